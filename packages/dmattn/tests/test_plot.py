"""Pictures show what attention does, at any length; and what works without matplotlib."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dmattn import (
    KeySelection,
    flash_dmattn_func,
    packed_documents,
    plot,
    select_keys,
    sliding_window,
)
from dmattn.plot.pixels import of_selection, of_tensor

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def close_figures() -> Any:
    yield
    from matplotlib import pyplot

    pyplot.close("all")


def scores(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


SELECTIONS = {
    "running top-w": lambda: select_keys(scores(2, 2, 61), 9),
    "fewer queries": lambda: select_keys(scores(1, 1, 61), 9, query_len=23),
    "more queries": lambda: select_keys(scores(1, 1, 30), 9, query_len=41),
    "not causal": lambda: select_keys(scores(1, 2, 40), 9, is_causal=False),
    "masked": lambda: select_keys(scores(2, 1, 61), 9, attn_mask=scores(2, 61) > 0),
    "documents": lambda: packed_documents([0, 17, 17, 50, 61], 12),
    "none kept": lambda: KeySelection.from_intervals(torch.zeros(1, 1, 40, dtype=torch.int32)),
    "one key": lambda: sliding_window(1, 1),
}


def blocks(mask: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The mean of each block of a mask, one by one."""
    means = [[mask[a:b, c:d].double().mean() for c, d in pairwise(keys)] for a, b in pairwise(rows)]
    return torch.tensor(means, dtype=torch.float64)


@pytest.mark.parametrize("pixels", [7, 61])
@pytest.mark.parametrize("name", SELECTIONS)
def test_pixels_are_shares_of_the_mask(name: str, pixels: int) -> None:
    selection = SELECTIONS[name]()
    mask = selection.to_mask()[-1, -1]
    batch, heads = selection.end.shape[:2]
    drawn = of_selection(selection, batch - 1, heads - 1, pixels)
    assert max(len(drawn.rows), len(drawn.keys)) <= pixels + 1
    torch.testing.assert_close(drawn.kept, blocks(mask, drawn.rows, drawn.keys))
    dense = of_tensor(mask, selection.is_causal, pixels)
    torch.testing.assert_close(dense.kept, drawn.kept)
    torch.testing.assert_close(dense.visible, drawn.visible)
    assert drawn.is_exact == (drawn.kept.shape == mask.shape)


def test_exact_pixels_show_every_entry() -> None:
    selection = SELECTIONS["running top-w"]()
    ax = plot.mask(selection, head=1, batch=1)
    state = torch.as_tensor(ax.images[0].get_array().data)
    visible = torch.ones(61, 61).tril()
    assert torch.equal(state.int(), (visible + selection.to_mask()[1, 1]).int())
    assert "at most 9 for each query" in ax.get_title(loc="left")


def test_a_long_selection_needs_no_mask() -> None:
    selection = sliding_window(200_000, 500)  # its mask would take 40 GB
    ax = plot.mask(selection, pixels=50)
    shown = torch.as_tensor(ax.images[0].get_array().filled(-1))
    assert shown.shape == (50, 50) and (shown.diagonal() > 0).all()
    assert (shown.tril(-2) == 0)[torch.ones(50, 50).tril(-2) > 0].all()
    assert (shown[0, 1:] == -1).all()  # hidden by causality: no share at all
    # 499 * 500 / 2 of the first 500 queries' keys are missing, of 500 for each of all queries.
    share = (200_000 * 500 - 499 * 500 / 2) / (200_000 * 200_001 / 2)
    assert f"{100 * share:.3g}%" in ax.get_title(loc="left")


def test_masks_of_other_forms(tmp_path: Path) -> None:
    per_key = torch.rand(2, 1, 1, 30) < 0.5
    ax = plot.mask(per_key, head=3, batch=1, is_causal=True, path=tmp_path / "mask.png")
    state = torch.as_tensor(ax.images[0].get_array().data).int()
    assert torch.equal(state == 2, per_key[1, 0].expand(30, 30).tril())
    assert (tmp_path / "mask.png").stat().st_size > 1000
    assert plot.mask(torch.rand(9, 30) < 0.5, ax=ax) is ax


def test_lifetimes_are_columns_of_the_mask() -> None:
    selection = SELECTIONS["running top-w"]()
    ax = plot.lifetimes(selection, head=1)
    kept = selection.to_mask()[0, 1]
    left, still = (torch.as_tensor(points.get_offsets().data) for points in ax.collections)
    drawn = torch.zeros(61, dtype=torch.long)
    for points in (left, still):
        drawn[points[:, 0].long()] = points[:, 1].long()
    assert torch.equal(drawn, kept.sum(0))
    assert torch.equal(still[:, 0].long(), kept[-1].nonzero()[:, 0])
    assert "window of 9 keys" in ax.get_title(loc="left")


def test_lifetimes_of_many_keys_as_density() -> None:
    ax = plot.lifetimes(sliding_window(5000, 30))
    (mesh,) = ax.collections
    assert mesh.get_array().sum() == 5000


KINDS: dict[str, dict[str, Any]] = {
    "window": {"attn_bias": scores(2, 2, 1, 50), "window_size": 8, "is_causal": True},
    "selection": {"selection": sliding_window(50, 8), "is_causal": True, "softcap": 5.0},
    "not causal": {"attn_bias": scores(1, 4, 1, 50), "window_size": 8},
    "sinks": {"is_causal": True, "sinks": scores(4)},
    "dense": {
        "attn_mask": scores(2, 1, 50, 50) > 0.5,
        "attn_bias": scores(1, 4, 50, 50),
        "softmax_scale": 0.3,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_attention_shows_the_probabilities(kind: str) -> None:
    q, k = scores(2, 50, 4, 16), scores(2, 50, 2, 16)
    options = {"return_attn_probs": True, **KINDS[kind]}
    _, probabilities = flash_dmattn_func(q, k, k, **options)
    ax = plot.attention(q, k, head=3, batch=1, **KINDS[kind])
    shown = torch.as_tensor(ax.images[1].get_array().filled(0)).float()
    torch.testing.assert_close(shown, probabilities[1, 3])

    ax = plot.attention(q, k, head=3, batch=1, row=40, pixels=10, **KINDS[kind])
    bars = [bar[1][1] for bar in ax.collections[0].get_segments()]
    wanted = probabilities[1, 3, 40].view(10, 5).sum(1)
    torch.testing.assert_close(torch.tensor(bars).float(), wanted[wanted > 0])


def test_a_bias_of_minus_infinity_hides_keys_like_a_mask() -> None:
    q, bias = scores(1, 8, 1, 16), torch.zeros(1, 1, 8, 8)
    bias[..., 2:] = bias[..., 3, :] = -torch.inf
    ax = plot.attention(q, q, attn_bias=bias)
    assert "2 keys kept on average" in ax.get_title(loc="left")
    assert "no key is kept" in plot.attention(q, q, attn_bias=bias, row=3).get_title(loc="left")


def test_attention_of_numbers_that_are_none() -> None:
    q = scores(1, 5, 1, 8)
    q[0, 3] = float("nan")
    ax = plot.attention(q, scores(1, 5, 1, 8), is_causal=True)
    assert "NaN in 1 of the 5 queries" in ax.get_title(loc="left")
    ground = torch.as_tensor(ax.images[0].get_array().data)
    assert not torch.equal(ground[3, 0], ground[4, 0])  # neither kept nor dropped
    ax = plot.attention(q, scores(1, 5, 1, 8), row=3)
    assert "its probabilities are NaN" in ax.get_title(loc="left")
    marks = ax.lines[0].get_ydata()
    assert len(marks) == 5 and all(y < 0 for y in marks)


def test_the_whole_figure_is_saved(tmp_path: Path) -> None:
    from matplotlib import pyplot

    part = pyplot.figure().subfigures(1, 2)[0]
    plot.mask(torch.ones(5, 5) > 0, ax=part.subplots(), path=tmp_path / "mask.png")
    assert (tmp_path / "mask.png").stat().st_size > 1000


def test_attention_of_many_rows_draws_some_of_them() -> None:
    q, k = scores(1, 300, 1, 8), scores(1, 300, 1, 8)
    ax = plot.attention(q, k, is_causal=True, pixels=20)
    assert ax.images[1].get_array().shape == (20, 20)
    assert "20 of 300 queries" in ax.get_title(loc="left")
    (shown,) = (torch.as_tensor(ax.images[1].get_array().filled(0)),)
    torch.testing.assert_close(shown.sum(1), torch.ones(20, dtype=shown.dtype))


def title(ax: Any) -> str:
    return str(ax.get_title(loc="left"))


@pytest.mark.parametrize(
    "length, pixels, block", [(24, 12, "2 queries x 2 keys"), (25, 24, "up to 2 queries x 2 keys")]
)
def test_what_pixels_stand_for(length: int, pixels: int, block: str) -> None:
    ax = plot.mask(torch.rand(length, length) > 0.5, pixels=pixels)
    assert ax.figure.axes[1].get_ylabel() == f"share that is kept of {block}"
    q, keys = scores(1, length, 1, 8), block.replace("2 queries x ", "")
    ax = plot.attention(q, q, pixels=pixels)
    assert ax.figure.axes[1].get_ylabel() == f"probability of {keys} together"
    assert title(ax).startswith(f"Attention, head 0, {pixels} of {length} queries\n")
    ax = plot.attention(q, q, row=0, pixels=pixels)
    assert ax.get_ylabel() == f"probability of {keys} together"


def test_numbers_of_one() -> None:
    mask = torch.ones(3, 3) > 0
    mask[1] = False
    assert title(plot.mask(mask)).endswith("; 1 query keeps none")
    mask[2] = False
    assert title(plot.mask(mask)).endswith("; 2 queries keep none")
    assert "Scores of 1 token (" in title(plot.token_scores(["a"], torch.ones(1)))
    assert "Scores of 2 tokens (" in title(plot.token_scores(["a", "b"], torch.ones(2)))
    q = scores(1, 3, 1, 8)
    assert "\n1 key kept on average" in title(plot.attention(q, q, torch.eye(3)[None, None] > 0))
    for length, words in (
        (1, "the only key stays to the last query"),
        (2, "1 key leaves, within 1 query; 1 is still kept"),
        (3, "of the 2 keys that leave, half do so within 1 query; 1 is still kept"),
    ):
        assert title(plot.lifetimes(sliding_window(length, 1))).endswith(words)
    assert title(plot.lifetimes(sliding_window(3, 5))).endswith("all 3 keys stay to the last query")


def test_tokens_are_escaped_ranked_and_marked(tmp_path: Path) -> None:
    words = ["a < b", "\n", "<script>", "&"]
    values, kept = torch.tensor([1e9, 2.0, -torch.inf, 3.0]), torch.tensor([True] + [False] * 3)
    page = plot.token_scores_html(words, values, kept)
    assert "<script>" not in page.html and "a &lt; b" in page.html and "&amp;" in page.html
    assert page.html.count("border-bottom") == 1 and page._repr_html_() == page.html
    # By rank: the highest score is darkest, and does not make the others look alike.
    colours = ["rgb(255,255,255)", "rgb(8,81,156)"]
    assert [page.html.count(c) for c in colours] == [1, 1]
    page.save(tmp_path / "page.html")
    assert page.html in (tmp_path / "page.html").read_text(encoding="utf-8")

    ax = plot.token_scores(words, values, kept, columns=4, path=tmp_path / "tokens.png")
    drawn = "".join(text.get_text() for text in ax.texts)
    assert drawn.replace("\u21b5", "\n") == "".join(words)
    assert (tmp_path / "tokens.png").stat().st_size > 1000


WINDOW, SINGLE = SELECTIONS["not causal"], torch.ones(1, 1, 1, 8)
BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: plot.mask(3), TypeError, "keep: got 3 (int), wanted a dmattn.KeySelection or a bool"),
    (lambda: plot.mask(torch.ones(4, 4)), TypeError, "keep: got dtype torch.float32"),
    (lambda: plot.mask(torch.ones(4) > 0), ValueError, "keep: got shape (4,), wanted (seqlen_q"),
    (lambda: plot.mask(sliding_window(5, 1, query_len=0)), ValueError, "keep: got 0 queries and 5"),
    (
        lambda: plot.attention(torch.ones(1, 0, 1, 8), torch.ones(1, 0, 1, 8)),
        ValueError,
        "query: got 0 queries and 0 keys, wanted at least one of each",
    ),
    (lambda: plot.mask(WINDOW(), head=2), IndexError, "head: got 2, wanted 0 to 1"),
    (lambda: plot.mask(WINDOW(), head="0"), TypeError, "head: got '0' (str), wanted an int"),
    (lambda: plot.lifetimes(sliding_window(5, 1), batch=None), TypeError, "batch: got None"),
    (lambda: plot.mask(WINDOW(), pixels=0), ValueError, "pixels: got 0"),
    (lambda: plot.mask(WINDOW(), ax=3), TypeError, "ax: got 3 (int), wanted the axes of"),
    (lambda: plot.token_scores_html(None, torch.ones(1)), TypeError, "tokens: got None"),
    (lambda: plot.lifetimes(WINDOW()), ValueError, "selection: got one with is_causal=False"),
    (lambda: plot.lifetimes(None), TypeError, "selection: got None"),
    (lambda: plot.lifetimes(sliding_window(0, 1)), ValueError, "selection: got 0 queries and 0"),
    (lambda: plot.token_scores(["a"], torch.ones(2)), ValueError, "scores: got shape (2,)"),
    (lambda: plot.token_scores([1], torch.ones(1)), TypeError, "tokens: got 1 (int) among them"),
    (lambda: plot.token_scores_html(["a"], torch.tensor([1])), TypeError, "scores: got dtype"),
    (
        lambda: plot.attention(torch.ones(1, 4, 1, 8), torch.ones(1, 4, 1, 8), row=4),
        IndexError,
        "row: got 4, wanted 0 to 3",
    ),
    *(
        (
            lambda name=name: plot.attention(SINGLE, SINGLE, **{name: 9}),
            IndexError,
            f"{name}: got 9, wanted 0",
        )
        for name in ("row", "head", "batch")
    ),
]


@pytest.mark.parametrize("call,kind,message", BAD, ids=[message for *_, message in BAD])
def test_errors(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)


def test_without_matplotlib() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import torch\n"
        "from dmattn import plot, sliding_window\n"
        "print('a' in plot.token_scores_html(['a'], torch.ones(1)).html)\n"
        "try: plot.mask(sliding_window(4, 2))\n"
        "except ImportError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "True",
        "dmattn.plot draws with matplotlib, which is not installed: pip install matplotlib, or "
        "dmattn with its extra [plot]",
    ]


@pytest.mark.parametrize("pixels", [8, 64])
def test_equal_shares_are_not_taken_for_the_same_keys(pixels: int) -> None:
    """Every other key, in turn: blocks of such rows and keys all keep one half."""
    place = torch.arange(64)
    ax = plot.mask((place[:, None] + place) % 2 == 0, pixels=pixels)
    assert "50% of all entries" in ax.get_title(loc="left")
    same = plot.mask((place % 2 == 0).expand(64, -1)[None, None, :1], pixels=pixels)
    assert "every query keeps the same 32 keys" in same.get_title(loc="left")


@pytest.mark.parametrize("device, dtype", [("meta", torch.float32), ("cpu", torch.float16)])
def test_defaults_of_torch_change_no_picture(device: str, dtype: torch.dtype) -> None:
    """Pictures are drawn on the CPU, whatever device and dtype new tensors have elsewhere."""
    selection, long = SELECTIONS["running top-w"](), select_keys(scores(1, 1, 6000), 9)
    q, k = scores(1, 30, 2, 8), scores(1, 30, 1, 8)

    def draw() -> list[Any]:
        pictures = [
            plot.mask(selection),
            plot.mask(selection.to_mask()),
            plot.attention(q, k, is_causal=True),
            plot.attention(q, k),
        ]
        return [
            *(ax.images[0].get_array().tolist() for ax in pictures),
            plot.attention(q, k, row=3).get_title(loc="left"),
            *(plot.lifetimes(s).get_title(loc="left") for s in (selection, long)),
        ]

    usual = draw()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            assert draw() == usual
    finally:
        torch.set_default_dtype(torch.float32)
