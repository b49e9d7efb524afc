"""Selections of keys: against brute force, in attention, and built from intervals."""

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import assert_close_to_oracle, random_case
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_cases import KINDS, brute_force, check_lists, make_scores
from torch import Tensor
from torch.library import opcheck
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dmattn import (
    KeySelection,
    KeyState,
    create_mask,
    flash_dmattn_func,
    packed_documents,
    select_keys,
    sliding_window,
)
from dmattn.backends.cpu import selection as cpu
from dmattn.key_lists import without_keys


def assert_selects(scores: Tensor, window: int, query_len: int, causal: bool, **more: Any) -> None:
    selection = select_keys(scores, window, causal, query_len=query_len, **more)
    mask = more.get("attn_mask")
    key_mask = None if mask is None else mask[:, :, 0]
    keep = brute_force(scores, window, query_len, causal, key_mask)
    assert torch.equal(selection.to_mask().expand(keep.shape), keep)
    rows = min(query_len, scores.shape[2]) if causal else query_len
    if rows > 0 and scores.shape[2] > 0:
        check_lists(selection, keep[:, :, query_len - rows :])


@given(
    kind=st.sampled_from(KINDS),
    lengths=st.sampled_from(
        (
            (1, 1),
            (5, 12),
            (12, 12),
            (40, 12),
            (127, 127),
            (128, 128),
            (129, 129),
            (130, 257),
            (1, 200),
        )
    ),
    window=st.integers(1, 260),
    causal=st.booleans(),
    masked=st.sampled_from((None, (2, 1), (1, 2), (2, 2))),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120)
def test_equals_brute_force(
    kind: str,
    lengths: tuple[int, int],
    window: int,
    causal: bool,
    masked: tuple[int, int] | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    query_len, key_len = lengths
    scores = make_scores(kind, 2, 2, key_len).to(dtype)
    mask = None if masked is None else torch.rand(*masked, 1, key_len) < 0.7
    assert_selects(scores, min(window, key_len + 1), query_len, causal, attn_mask=mask)


@pytest.mark.parametrize("window", range(1, 15))
@pytest.mark.parametrize("kind", KINDS)
def test_every_window(kind: str, window: int) -> None:
    for causal in (False, True):
        assert_selects(make_scores(kind, 1, 3, 13), window, 13, causal)


@pytest.mark.parametrize("window", [1, 60, 128, 129, 300])
def test_more_blocks_than_one_step_builds(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmattn.backends.cpu.selection._STEP_ENTRIES", 1)
    assert_selects(torch.randn(1, 2, 700), window, 650, True)


@pytest.mark.parametrize("heads, mask_heads", [(2, 2), (2, 1), (1, 4), (2, 4), (4, 2)])
@pytest.mark.parametrize("query_len", [300, 50])
def test_lists_without_some_keys(heads: int, mask_heads: int, query_len: int) -> None:
    """They equal lists that are made anew from the intervals that are left."""
    lists = select_keys(torch.randn(1, heads, 300), 40, query_len=query_len).lists
    keep = torch.rand(2, mask_heads, 300) < 0.6
    found = without_keys(lists, keep)
    most = max(heads, mask_heads)
    end, wide = (
        lists.end.repeat_interleave(most // heads, 1),
        keep.repeat_interleave(most // mask_heads, 1),
    )
    anew = KeySelection.from_intervals(torch.where(wide, end, 0), query_len).lists
    for name, a, b in zip(lists._fields, found, anew, strict=True):
        assert a.is_contiguous() and a.dtype == torch.int32
        room = b.shape[3] if name == "idx" else a.shape[-1]  # as much as the longest list needs
        assert torch.equal(a[..., :room], b), name


def test_lists_without_keys_are_contiguous_for_any_mask_and_entry() -> None:
    """Kernels need contiguous lists. A wrong entry reads nothing outside of the mask."""
    lists = select_keys(torch.randn(1, 1, 9), 4).lists
    keep = torch.ones(9, 2, dtype=torch.bool).t()[:, None]
    lists.idx[..., -1] = 2**31 - 1
    found = without_keys(lists, keep)
    assert all(t.is_contiguous() for t in found)
    assert torch.equal(found.count, lists.count.expand_as(found.count))


def test_one_head_of_mask_or_scores_serves_many() -> None:
    scores, mask = torch.randn(2, 4, 1, 20), torch.rand(2, 2, 1, 20) < 0.6
    by_head = select_keys(scores, 5, attn_mask=mask)
    wide = select_keys(scores, 5, attn_mask=mask.repeat_interleave(2, 1))
    assert torch.equal(by_head.end, wide.end)
    shared = select_keys(scores[:, :1], 5, attn_mask=mask)
    assert shared.end.shape == (2, 2, 20)


@pytest.mark.parametrize("shape", [(2, 20), (2, 1, 1, 20), (2, 1, 9, 20)])
def test_ways_to_write_a_padding_mask(shape: tuple[int, ...]) -> None:
    padding = torch.rand(2, 20) < 0.7
    mask = padding if len(shape) == 2 else padding[:, None, None].expand(shape)
    got = select_keys(torch.zeros(2, 1, 20), 5, attn_mask=mask, query_len=9)
    keep = brute_force(torch.zeros(2, 1, 20), 5, 9, True, padding[:, None])
    assert torch.equal(got.to_mask(), keep)


def test_same_keys_as_create_mask() -> None:
    """For distinct scores, row r keeps what create_mask chooses among the keys 0 to r."""
    scores = torch.randn(1, 2, 1, 60)
    keep = select_keys(scores, 7).to_mask()
    for row in range(60):
        seen = row + 1
        want = create_mask(scores[..., :seen], None, 1, 1, seen, 7)
        assert torch.equal(keep[:, :, row, :seen], want[:, :, 0])
    every = select_keys(scores, 7, is_causal=False, query_len=1)
    assert torch.equal(every.to_mask(), create_mask(scores, None, 1, 1, 60, 7))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_attention_against_the_oracle(
    causal: bool, heads: int, softcap: float, dtype: torch.dtype
) -> None:
    """Several row blocks, more keys than rows, and all gradients, of a loss of out and lse."""
    case = random_case(
        seqlen_q=140,
        seqlen_k=170,
        bias_shape=(2, heads, 1, 170),
        dtype=dtype,
        is_causal=causal,
        softcap=softcap,
    )
    leaves = case.requiring_grad()
    q, k, v, _, bias = leaves.inputs
    out, lse = flash_dmattn_func(
        q, k, v, None, bias, window_size=20, return_lse=True, **case.options
    )
    assert case.attn_bias is not None
    keep = brute_force(case.attn_bias[:, :, 0], 20, 140, causal)
    case.attn_mask = keep
    oracle, plain = case.reference(), case.reference(dtype)
    grads = torch.autograd.grad((out, lse), (q, k, v, bias), (case.dout, case.dlse))
    for name, got in zip(
        ("out", "lse", "dq", "dk", "dv", "dbias"), (out, lse, *grads), strict=True
    ):
        rows = 140 * 4 // heads if name == "dbias" else 1
        expected = getattr(oracle, name), getattr(plain, name)
        assert_close_to_oracle(name, got.detach(), *expected, dtype, rows)


def test_more_rows_than_keys() -> None:
    case = random_case(seqlen_q=30, seqlen_k=11, bias_shape=(2, 2, 1, 11), is_causal=True)
    leaves = case.requiring_grad()
    q, k, v, _, bias = leaves.inputs
    arguments: dict[str, Any] = {"is_causal": True, "return_lse": True}
    out, lse, probs = flash_dmattn_func(
        q, k, v, None, bias, window_size=3, return_attn_probs=True, **arguments
    )
    case.attn_mask = brute_force(bias.detach()[:, :, 0], 3, 30, True)
    assert not out[:, :19].any() and (lse[:, :, :19] == -math.inf).all()
    assert probs.sum(-1).allclose((torch.arange(30) >= 19).double().expand(2, 4, 30))
    grads = torch.autograd.grad(out, (q, k, v, bias), case.dout, retain_graph=True)
    case.dlse.zero_()
    oracle = case.reference()
    for name, got in zip(("out", "dq", "dk", "dv", "dbias"), (out, *grads), strict=True):
        expected = getattr(oracle, name)
        assert_close_to_oracle(name, got.detach(), expected, expected, torch.float64)
    selection = select_keys(bias, 3, query_len=30)
    for same in (bias, bias[:, :, 0]):
        again, _ = flash_dmattn_func(q, k, v, None, same, selection=selection, **arguments)
        assert torch.equal(again, out)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [2, 9])
def test_no_rows_beside_a_mask_expanded_over_them(window: int, causal: bool) -> None:
    q, k, scores = torch.randn(2, 0, 2, 8), torch.randn(2, 5, 1, 8), torch.randn(2, 1, 1, 5)
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool).expand(-1, -1, 0, -1)
    selection = select_keys(scores, window, causal, query_len=0)
    for chosen in ({"window_size": window}, {"selection": selection}):
        out = flash_dmattn_func(q, k, k, mask, scores, is_causal=causal, **chosen)
        assert out.shape == q.shape
    # A mask without rows does not say which keys a stretch may leave in a state.
    with pytest.raises(ValueError, match=r"attn_mask: got shape \(2, 1, 0, 5\)"):
        KeyState.of(k, k, scores, window, attn_mask=mask)
    empty = KeyState.of(k[:, :0], k[:, :0], scores[..., :0], window, attn_mask=mask[..., :0])
    assert bool((empty.position == -1).all())


def test_reuse_for_other_scores_and_without_any() -> None:
    case = random_case(seqlen_q=150, seqlen_k=150, bias_shape=(2, 2, 1, 150), is_causal=True)
    q, k, v, _, bias = case.inputs
    selection = select_keys(torch.randn(2, 1, 150), 9)
    keep = selection.to_mask()
    for other in (None, bias, torch.randn(2, 4, 150, 150, dtype=torch.float64)):
        got = flash_dmattn_func(q, k, v, None, other, is_causal=True, selection=selection)
        want = flash_dmattn_func(q, k, v, keep, other, is_causal=True)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_only_the_gradients_asked_for() -> None:
    case = random_case(bias_shape=(2, 2, 1, 11), is_causal=True)
    q, k, v, _, bias = case.inputs
    for frozen in range(4):
        leaves = [t.detach().requires_grad_(i != frozen) for i, t in enumerate((q, k, v, bias))]
        out = flash_dmattn_func(*leaves[:3], None, leaves[3], is_causal=True, window_size=4)
        out.backward(case.dout)
        assert [t.grad is None for t in leaves] == [i == frozen for i in range(4)]


@pytest.mark.parametrize("window", [1, 5, 128, 400])
@pytest.mark.parametrize("query_len", [None, 1, 200])
def test_sliding_window(window: int, query_len: int | None) -> None:
    selection = sliding_window(300, window, query_len)
    rows = 300 if query_len is None else query_len
    keep = brute_force(torch.zeros(1, 1, 300), window, rows, True)
    assert torch.equal(selection.to_mask(), keep)
    check_lists(selection, keep)


@pytest.mark.parametrize("bounds", [[0], [0, 300], [0, 1, 130, 130, 259, 300], [0, 128, 256]])
@pytest.mark.parametrize("window", [None, 1, 40, 1000])
def test_packed_documents(bounds: list[int], window: int | None) -> None:
    selection = packed_documents(torch.tensor(bounds), window)
    key_len = bounds[-1]
    document = torch.bucketize(torch.arange(key_len), torch.tensor(bounds[1:]), right=True)
    keep = (document[:, None] == document) & torch.ones(key_len, key_len, dtype=torch.bool).tril()
    if window is not None:
        keep &= ~keep.new_ones(keep.shape).tril(-window)
    assert torch.equal(selection.to_mask()[0, 0], keep)
    check_lists(selection, keep[None, None])
    case = random_case(seqlen_q=key_len, seqlen_k=key_len)
    got = flash_dmattn_func(*case.inputs[:3], is_causal=True, selection=selection)
    want = flash_dmattn_func(*case.inputs[:3], keep[None, None])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("reach", [None, 60])
def test_arbitrary_intervals(reach: int | None) -> None:
    end = torch.arange(400) + torch.randint(0, 61, (2, 3, 400))
    selection = KeySelection.from_intervals(end, 350, reach=reach)
    row = torch.arange(50, 400)[:, None]
    keep = (torch.arange(400) <= row) & (row < end[:, :, None])
    assert torch.equal(selection.to_mask(), keep)
    check_lists(selection, keep)
    assert selection.window_size is None


class Elements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            made = result if isinstance(result, (tuple, list)) else (result,)
            self.made += sum(t.numel() for t in made if isinstance(t, Tensor))
        return result


def test_work_on_the_cpu_follows_the_length() -> None:
    """Four times the keys take four times the work, not sixteen."""
    made = []
    for key_len in (4096, 16384):
        with Elements() as elements:
            cpu.select(torch.randn(1, 1, key_len), 100, key_len, True, 256)
        made.append(elements.made)
        with Elements() as elements:
            end = torch.arange(key_len, dtype=torch.int32) + 100
            cpu.interval_lists(end[None, None], key_len, 256)
        made.append(elements.made)
    assert made[2] < 4.5 * made[0] and made[3] < 4.5 * made[1]


def test_memory_of_lists_follows_the_window() -> None:
    selection = sliding_window(20_000, 100)
    assert selection.idx.shape[3] == 256
    assert select_keys(torch.randn(1, 1, 20_000), 100).idx.shape == (1, 1, 157, 256)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_operator(causal: bool, masked: bool) -> None:
    mask = torch.rand(2, 1, 140) < 0.5 if masked else None
    scores = torch.randn(1, 2, 140)
    opcheck(torch.ops.dmattn.select_keys, (scores, mask, 9, 130, causal))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_operators(causal: bool) -> None:
    case = random_case(bias_shape=(2, 2, 1, 11), dtype=torch.float32).requiring_grad()
    q, k, v, _, bias = case.inputs
    lists = select_keys(bias, 4, causal, query_len=9).lists
    arguments = (q, k, v, None, bias, None, 0.3, causal, 0.0, False, 0, False, *lists)
    opcheck(torch.ops.dmattn.fwd, arguments)
    results = torch.ops.dmattn.fwd(*arguments)
    given = [t.detach() if isinstance(t, Tensor) else t for t in (*results, [True] * 5, *arguments)]
    opcheck(torch.ops.dmattn.bwd, (case.dout, None, *given))


def test_compiles_and_travels_through_trees() -> None:
    case = random_case(bias_shape=(2, 2, 1, 11), is_causal=True)
    q, k, v, _, bias = case.inputs

    def step(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, KeySelection]:
        selection = select_keys(bias, 4, query_len=q.shape[1])
        return flash_dmattn_func(
            q, k, v, None, bias, is_causal=True, selection=selection
        ), selection

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    out, selection = compiled(q, k, v, bias)
    torch.testing.assert_close(out, step(q, k, v, bias)[0])
    assert isinstance(selection, KeySelection) and selection.window_size == 4
    copied = pytree.tree_map(torch.clone, {"a": selection})["a"]
    assert torch.equal(copied.to_mask(), selection.to_mask())


def test_trees_know_the_names_of_the_tensors() -> None:
    selection = sliding_window(6, 2)
    names = pytree.tree_map_with_path(lambda path, t: pytree.keystr(path), selection)
    assert names.lists == (".end", ".idx", ".count", ".full")
    shapes = pytree.tree_map(lambda t: tuple(t.shape), selection)
    assert shapes.end == (1, 1, 6) and "(1, 1, 6)" in repr(shapes)
    assert pytree.tree_map(torch.clone, selection).query_len == 6


def test_moves_between_devices() -> None:
    selection = select_keys(torch.randn(2, 2, 20), 5, query_len=9)
    assert selection.to("cpu") is selection and selection.cpu() is selection
    moved = selection.to("meta")
    assert all(t.is_meta for t in moved.lists)
    assert (moved.window_size, moved.is_causal, moved.query_len) == (5, True, 9)


@pytest.mark.parametrize("causal", [False, True])
def test_saved_and_loaded(tmp_path: Path, causal: bool) -> None:
    selection = select_keys(torch.randn(2, 2, 20), 5, causal, query_len=9)
    torch.save({"kept": selection}, tmp_path / "selection.pt")
    loaded = torch.load(tmp_path / "selection.pt", weights_only=True)["kept"]
    for copied in (loaded, pickle.loads(pickle.dumps(selection)), copy.deepcopy(selection)):
        assert all(map(torch.equal, copied.lists, selection.lists))
        assert torch.equal(copied.to_mask(), selection.to_mask())


def test_repr_says_facts() -> None:
    text = repr(select_keys(torch.randn(2, 3, 300), 5, query_len=200))
    assert text == (
        "KeySelection(batch=2, heads=3, query_len=200, key_len=300, window_size=5, "
        "is_causal=True, 2 lists of at most 256 keys, device='cpu')"
    )


def test_without_causality_a_selection_serves_any_number_of_rows() -> None:
    case = random_case(bias_shape=(2, 2, 1, 11))
    q, k, v, _, bias = case.inputs
    selection = select_keys(bias, 4, is_causal=False)
    for rows in (1, 5, q.shape[1]):
        got = flash_dmattn_func(q[:, :rows], k, v, attn_bias=bias, selection=selection)
        want = flash_dmattn_func(q[:, :rows], k, v, attn_bias=bias, window_size=4)
        assert torch.equal(got, want)


def test_integers_of_numpy_and_masks_of_tokenizers() -> None:
    scores, padding = torch.randn(2, 2, 20), torch.rand(2, 20) < 0.6
    wanted = select_keys(scores, 5, attn_mask=padding, query_len=9)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        window, rows = np.int64(5), np.int32(9)
        got = select_keys(
            scores,
            window,  # type: ignore[arg-type]
            attn_mask=padding.to(dtype),
            query_len=rows,  # type: ignore[arg-type]
        )
        assert torch.equal(got.end, wanted.end) and got.query_len == 9


def test_plot(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = select_keys(torch.randn(1, 2, 50), 8).plot(tmp_path / "kept.png", head=1)
    assert (tmp_path / "kept.png").stat().st_size > 1000
    every = select_keys(torch.randn(1, 2, 50), 8, is_causal=False).plot(ax=axes)
    assert every is axes and "8 keys" in axes.get_title("left")


BIAS = torch.zeros(2, 2, 1, 6)
NESTED = torch.nested.nested_tensor([torch.zeros(2, 6), torch.zeros(2, 5)], layout=torch.jagged)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"window_size": 0}, ValueError, "window_size: got 0, wanted an int of at least 1"),
    ({"window_size": 1.0}, TypeError, "window_size: got 1.0"),
    ({"attn_bias": None}, TypeError, "attn_bias: got None, wanted a floating tensor"),
    ({"attn_bias": BIAS.int()}, TypeError, "attn_bias: got dtype torch.int32, wanted a floating"),
    ({"attn_bias": BIAS.expand(2, 2, 4, 6)}, ValueError, r"attn_bias: got shape \(2, 2, 4, 6\)"),
    ({"attn_mask": BIAS}, TypeError, "attn_mask: got dtype torch.float32, wanted torch.bool"),
    ({"attn_mask": BIAS.bool()[0]}, ValueError, r"attn_mask: got shape \(2, 1, 6\), wanted"),
    ({"attn_mask": torch.ones(2, 7).bool()}, ValueError, "attn_mask: got shape"),
    (
        {"attn_mask": torch.ones(2, 1, 6, 6).bool()},
        ValueError,
        "attn_mask: got shape .* with rows of their own, .* dmattn.top_window_mask",
    ),
    (
        {"attn_mask": torch.ones(2, 1, 0, 6).bool()},
        ValueError,
        r"\(2, 1, 0, 6\), whose 0 rows have",
    ),
    ({"attn_mask": torch.ones(3, 1, 1, 6).bool()}, ValueError, "attn_mask: got batch 3, wanted 2"),
    ({"attn_mask": torch.ones(2, 3, 1, 6).bool()}, ValueError, "attn_mask: got 3 heads"),
    ({"attn_bias": [[[0.0]]]}, TypeError, r"attn_bias: got \[\[\[0.0\]\]\] \(list\), wanted a fl"),
    ({"attn_bias": BIAS[:, :, 0].to_sparse()}, ValueError, "attn_bias: got .* torch.sparse_coo"),
    ({"attn_bias": NESTED}, ValueError, "attn_bias: got a tensor of layout nested, wanted"),
    ({"attn_mask": True}, TypeError, r"attn_mask: got True \(bool\), wanted a torch.Tensor"),
    ({"attn_mask": torch.ones(2, 1, 1, 6).int()}, TypeError, r"attn_mask: got .* mask.bool\(\)"),
    (
        {"attn_mask": torch.ones(2, 6, dtype=torch.bool, device="meta")},
        ValueError,
        "attn_mask: got device meta, wanted cpu as attn_bias",
    ),
    ({"is_causal": "no"}, TypeError, r"is_causal: got 'no' \(str\), wanted True or False"),
    ({"window_size": 2**63}, ValueError, "window_size: got 9223372036854775808"),
    ({"cu_seqlens": 5}, TypeError, r"cu_seqlens: got 5 \(int\), wanted a sequence of ints"),
    ({"query_len": -1}, ValueError, "query_len: got -1, wanted an int of at least 0"),
    ({"query_len": 2.0}, TypeError, r"query_len: got 2.0 \(float\), wanted an int"),
]


@pytest.mark.parametrize("changes, error, message", BAD)
def test_bad_selections(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        select_keys(**({"attn_bias": BIAS, "window_size": 2} | changes))


def test_bad_intervals() -> None:
    with pytest.raises(TypeError, match=r"end: got dtype torch.float32, wanted torch.int32"):
        KeySelection.from_intervals(torch.zeros(1, 1, 4))
    with pytest.raises(ValueError, match=r"end: got shape \(4,\), wanted"):
        KeySelection.from_intervals(torch.zeros(4).int())
    with pytest.raises(ValueError, match="reach: got 0, wanted an int of at least 1"):
        KeySelection.from_intervals(torch.zeros(1, 1, 4).int(), reach=0)


def test_selections_that_do_not_fit_the_attention() -> None:
    case = random_case(bias_shape=(2, 2, 1, 11))
    q, k, v, _, bias = case.inputs
    selection = select_keys(bias, 4, query_len=9)

    def attend(**more: Any) -> None:
        options = {"is_causal": True, "selection": selection} | more
        flash_dmattn_func(q, k, v, **options)

    attend()
    with pytest.raises(TypeError, match=r"selection: got Tensor, wanted a dmattn.KeySelection"):
        attend(selection=bias)
    with pytest.raises(ValueError, match="selection: got one with is_causal=True, wanted False"):
        attend(is_causal=False)
    with pytest.raises(ValueError, match="window_size: got a value beside selection"):
        attend(window_size=4, attn_bias=bias)
    with pytest.raises(ValueError, match="selection: got one for 11 query rows, wanted 9"):
        attend(selection=select_keys(bias, 4))
    with pytest.raises(ValueError, match="selection: got end of shape"):
        attend(selection=select_keys(bias[..., :10], 4, query_len=9))
    with pytest.raises(ValueError, match="selection: got batch 2 and 3 heads"):
        attend(selection=select_keys(torch.zeros(2, 3, 11), 4, query_len=9))


def test_the_result_of_vmap_is_shown_and_refused() -> None:
    """vmap adds a dimension to each tensor of a selection, which no call takes."""
    scores = torch.randn(4, 2, 2, 1, 6)
    many = torch.func.vmap(lambda s: select_keys(s, 3))(scores)
    assert "(4, 2, 2, 6)" in repr(many)
    q = torch.randn(2, 6, 2, 8)
    with pytest.raises(ValueError, match=r"selection: got end of shape \(4, 2, 2, 6\), wanted"):
        flash_dmattn_func(q, q, q, is_causal=True, selection=many)
