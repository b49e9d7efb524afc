"""Running top-w: selection, attention over key intervals, decoding from the kept keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import dmattn
from attention.cases import BIAS_FILLS, Case, build, case_id
from attention.driver import assert_close, call, run, times
from attention.oracle import Problem, Results
from attention.poison import poisoned
from attention.selections import KINDS, assert_lists, brute_force, make_scores, sorted_lists
from attention.targets import on_cuda, target, target_device

pytestmark = pytest.mark.each_family

SHAPES = [
    (1, 1, 1),
    (13, 13, 1),
    (127, 127, 14),
    (128, 128, 128),
    (129, 129, 130),
    (300, 700, 100),
    (1, 1000, 64),
    (1025, 1025, 1),
    (1500, 1500, 257),
    (700, 1100, 900),
]


@pytest.mark.default_backend
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen_q,seqlen_k,window", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_selection(kind: str, seqlen_q: int, seqlen_k: int, window: int, causal: bool) -> None:
    for dtype, heads, masked in (
        (torch.float32, 2, False),
        (torch.bfloat16, 2, True),
        (torch.float16, 1, True),
    ):
        scores = make_scores(kind, 2, heads, seqlen_k).to(dtype)
        mask = make_scores("random", 2, 1, 1, seqlen_k) < 0.8 if masked else None
        with poisoned():
            selection = dmattn.select_keys(
                scores, window, causal, attn_mask=mask, query_len=seqlen_q
            )
        keep = brute_force(
            scores, window, seqlen_q, causal, None if mask is None else mask[:, :, 0]
        )
        assert torch.equal(selection.to_mask(), keep)
        assert_lists(selection, keep)


@pytest.mark.default_backend
@pytest.mark.parametrize("kind", ["random", "tied"])
def test_selection_at_every_window(kind: str) -> None:
    for window in range(1, 151, 7):
        for causal in (True, False):
            scores = make_scores(kind, 1, 2, 150)
            keep = brute_force(scores, window, 150, causal)
            assert torch.equal(dmattn.select_keys(scores, window, causal).to_mask(), keep)


@pytest.mark.default_backend
@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("seqlen,window", [(20_000, 6000), (40_000, 1024), (65_537, 2048)])
def test_long_selection(seqlen: int, window: int) -> None:
    """Long enough for sets (docs/kernels/selection.md); random rows are compared with
    torch.topk."""
    scores = make_scores("random", 1, 2, seqlen)
    selection = dmattn.select_keys(scores, window)
    key = torch.arange(seqlen, device=scores.device)
    for row in torch.randint(0, seqlen, (40,)).tolist():
        kept = (key <= row) & (row < selection.end)
        assert bool((kept.sum(-1) == min(row + 1, window)).all())
        best = scores[..., : row + 1].topk(min(row + 1, window), sorted=False).indices
        assert bool(kept.gather(-1, best).all())


@pytest.mark.default_backend
@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["random", "tied", "nan", "minus_inf"])
@pytest.mark.parametrize(
    "heads,seqlen_q,seqlen_k,window",
    [(160, 900, 900, 200), (300, 700, 1100, 300), (150, 600, 5000, 700), (60, 2000, 2100, 1)],
)
def test_selection_for_many_heads(
    kind: str, heads: int, seqlen_q: int, seqlen_k: int, window: int
) -> None:
    """With more than enough work for the GPU, a thread block takes several row blocks together; for
    a head alone, each row block gets its own thread block."""
    scores = make_scores(kind, 1, heads, seqlen_k)
    rising = scores.sort(-1).values  # every row drops a key
    for values in (scores, scores.bfloat16(), rising):
        with poisoned():
            together = dmattn.select_keys(values, window, query_len=seqlen_q)
        for head in (0, heads // 2, heads - 1):
            own = slice(head, head + 1)
            alone = dmattn.select_keys(values[:, own], window, query_len=seqlen_q)
            keep = brute_force(values[:, own], window, seqlen_q, True)
            assert torch.equal(alone.to_mask(), keep)
            assert_lists(alone, keep)
            assert torch.equal(together.end[:, own], alone.end)
            assert torch.equal(sorted_lists(together)[:, own], sorted_lists(alone))


@pytest.mark.default_backend
@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["random", "tied", "nan"])
@pytest.mark.parametrize("batch,seqlen", [(1, 32_769), (1, 200_704), (3, 90_001), (40, 33_000)])
def test_one_row_of_many_keys(batch: int, seqlen: int, kind: str) -> None:
    """By one launch on the whole GPU, or by several launches (40 rows are too many for one)."""
    for dtype, window, causal in (
        (torch.float32, 1000, False),
        (torch.float32, 1, True),
        (torch.bfloat16, 4097, True),
        (torch.float16, seqlen - 5, False),
    ):
        scores = make_scores(kind, batch, 1, seqlen).to(dtype)
        mask = make_scores("random", batch, 1, 1, seqlen) < 0.9
        with poisoned():
            found = dmattn.select_keys(scores, window, causal, attn_mask=mask, query_len=1)
        keep = best_keys(scores.masked_fill(~mask[:, :, 0], -math.inf), window)
        assert torch.equal(found.to_mask()[:, :, 0], keep)
        count = keep.sum(-1)
        assert torch.equal(found.count[..., 0].long(), count)
        for b in range(batch):
            keys = found.idx[b, 0, 0, : int(count[b, 0])]
            assert torch.equal(keys.long(), keep[b, 0].nonzero()[:, 0])


def best_keys(scores: Tensor, window: int) -> Tensor:
    """bool, as scores: the best `window` keys, the later of equal ones; never NaN or -inf."""
    scores = torch.where(scores.isnan(), -math.inf, scores.double())
    order = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :window]
    keep = torch.zeros_like(scores, dtype=torch.bool)
    keep.scatter_(-1, scores.shape[-1] - 1 - order, True)
    return keep & (scores > -math.inf)


ATTENTION = [
    Case(300, 300, 2, 4, 2, 64, causal=True, bias="bk1k"),
    Case(512, 700, 1, 4, 1, 128, causal=True, bias="bk1k", dlse=True),
    Case(257, 257, 2, 2, 1, 128, causal=True, bias="bh1k", dtype="f16"),
    Case(513, 513, 1, 4, 4, 256, causal=True, bias="1k1k", bias_f32=True),
    Case(5, 700, 1, 4, 2, 64, causal=True, bias="bk1k"),
    Case(1, 700, 2, 8, 2, 128, causal=True, bias="bk1k"),
    Case(300, 400, 1, 4, 2, 128, bias="bk1k"),
    Case(400, 400, 1, 4, 2, 128, causal=True, bias="bh1k", softcap=8.0, bias_f32=True),
    Case(200, 260, 2, 4, 2, 72, causal=True, bias="b11k", bias_f32=True, bias_fill="lowest_rows"),
    Case(300, 300, 1, 4, 2, 96, causal=True, bias="bk1k", bias_fill="some_minus_inf"),
    Case(300, 300, 1, 4, 2, 64, causal=True, bias="bk1k", bias_fill="zero", layout="heads_first"),
    Case(190, 500, 2, 6, 2, 192, causal=True, bias="bk1k", dtype="f16", dlse=True),
    Case(257, 129, 1, 8, 1, 136, causal=True, bias="bk1k", bias_fill="some_lowest"),
    Case(300, 400, 2, 4, 2, 256, bias="bk1k", layout="heads_first"),
    Case(900, 900, 1, 8, 2, 128, causal=True, bias="bk1k", wants="b"),
    Case(700, 700, 2, 4, 2, 192, causal=True, bias="bk1k"),
    Case(390, 500, 1, 8, 2, 256, causal=True, bias="bk1k", dtype="f16"),
    Case(300, 300, 1, 4, 2, 136, causal=True, bias="bk1k", layout="heads_first"),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [1, 40, 128, 200])
@pytest.mark.parametrize("case", ATTENTION, ids=case_id)
def test_attention(case: Case, window: int, deterministic: bool) -> None:
    problem = build(case)
    assert problem.bias is not None
    keep = brute_force(problem.bias[:, :, 0], window, case.seqlen_q, case.causal)
    found = run(problem, deterministic, window_size=window)
    assert_close(problem.with_(mask=keep), found)


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "case,window",
    [
        (Case(700, 800, 2, 64, 32, 64, causal=True, bias="bk1k", dlse=True), 150),
        (Case(1100, 1100, 4, 16, 16, 128, causal=True, bias="bk1k"), 260),
        (Case(650, 650, 8, 16, 8, 72, causal=True, bias="1k1k", bias_f32=True), 100),
        (Case(1100, 1100, 4, 8, 8, 256, causal=True, bias="bk1k", dlse=True), 260),
        (Case(900, 1000, 4, 16, 4, 192, causal=True, bias="1k1k", dtype="f16"), 150),
        (Case(650, 650, 8, 16, 4, 256, causal=True, bias="bk1k"), 230),
        (Case(500, 600, 8, 16, 4, 192, causal=True, bias="bk1k", dtype="f16"), 300),
        (Case(300, 300, 22, 12, 12, 64, causal=True, bias="bk1k"), 120),
        (Case(390, 450, 12, 32, 16, 128, causal=True, bias="bk1k", dtype="f16"), 150),
    ],
    ids=[
        "groups",
        "one head a group",
        "shared bias",
        "wide heads",
        "groups of 192",
        "groups of wide heads",
        "heads of 192",
        "all rows together",
        "all rows of groups together",
    ],
)
def test_many_heads(case: Case, window: int, biased: bool, deterministic: bool) -> None:
    """Enough work for backward kernels to take several row blocks together."""
    problem = build(case)
    assert problem.bias is not None
    scores = problem.bias[:, :, 0].detach()
    keep = brute_force(scores, window, case.seqlen_q, True)
    chosen = dmattn.select_keys(problem.bias.detach(), window, query_len=case.seqlen_q)
    if not biased:
        problem = problem.with_(bias=None)
    found = run(problem, deterministic, selection=chosen)
    assert_close(problem.with_(mask=keep), found)


def check_forward(case: Case, window: int) -> None:
    """Check forwards over the keys that the scores select, and over those of a key mask."""
    selected = build(case.with_(wants="", causal=True))
    assert selected.bias is not None
    keep = brute_force(selected.bias[:, :, 0], window, case.seqlen_q, True)
    assert_close(selected.with_(mask=keep), run(selected, False, window_size=window))
    masked = build(case.with_(wants="", mask="b11k"))
    assert_close(masked, run(masked, False))


@pytest.mark.parametrize("fill", BIAS_FILLS)
@pytest.mark.parametrize("dtype, f32", [("bf16", False), ("f16", False), ("bf16", True)])
def test_bias_of_listed_keys(fill: str, dtype: str, f32: bool) -> None:
    """On Hopper the tensor cores add the bias up to head_dim 64, unless a number is large."""
    case = Case(300, 400, 1, 4, 2, bias="bk1k", bias_fill=fill, bias_f32=f32, dtype=dtype)
    check_forward(case.with_(dlse=True), 150)


@pytest.mark.parametrize("scale", [1e-4, 0.02, 30.0, 1e4, -0.2])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_bias_of_listed_keys_beside_a_scale(dtype: str, scale: float) -> None:
    """It is divided by the scale first: up to what 16 bits have room for, and far less."""
    check_forward(Case(260, 300, 2, 4, 4, 40, bias="bk1k", dtype=dtype, scale=scale), 90)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", ["111k", "bk1k", "1h1k"])
@pytest.mark.parametrize("mask", ["b11k", "bh1k", "1k1k"])
def test_mask_beside_scores(mask: str, bias: str, causal: bool) -> None:
    """Either of scores and mask may have more heads than the other."""
    problem = build(Case(200, 200, bias=bias, mask=mask, causal=causal))
    assert problem.bias is not None and problem.mask is not None
    scores = problem.bias[:, :, 0].expand(2, -1, -1)
    keep = brute_force(scores, 40, 200, causal, problem.mask[:, :, 0])
    assert_close(problem.with_(mask=keep), run(problem, window_size=40))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["", "bk1k"])
@pytest.mark.parametrize("dtype", target().dtypes)
def test_unusable_scores_at_every_window(dtype: str, mask: str, causal: bool) -> None:
    """Keys of NaN and -inf are never attended to and get no gradient, however wide the window."""
    case = Case(200, 200, bias="bk1k", bias_f32=True, mask=mask, causal=causal, dtype=dtype)
    problem = build(case)
    assert problem.bias is not None
    bias = problem.bias.clone()
    bias[..., 3::5] = math.nan
    bias[..., 4::7] = -math.inf
    bias[0, 0, :, :150] = math.nan  # rows without keys
    usable = bias > -math.inf
    key_mask = None if problem.mask is None else problem.mask[:, :, 0]
    for window in (150, 200, 500):
        found = run(problem.with_(bias=bias), window_size=window)
        keep = brute_force(bias[:, :, 0], window, 200, causal, key_mask)
        exact = problem.with_(mask=keep, bias=torch.where(usable, bias, 0.0))
        assert_close(exact, found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["", "b11k"])
def test_wide_window_chooses_nothing(mask: str, causal: bool) -> None:
    problem = build(Case(100, 130, bias="1k1k", mask=mask, causal=causal))
    for window in (130, 131, 10**9):
        for a, b in zip(call(problem, window_size=window), call(problem), strict=True):
            assert torch.equal(a, b)


def test_three_dimensional_scores() -> None:
    problem = build(Case(100, 130, bias="bk1k", causal=True))
    assert problem.bias is not None
    flat = run(problem.with_(bias=problem.bias[:, :, 0]), True, window_size=30)
    for (name, a), (_, b) in zip(
        flat.items(), run(problem, True, window_size=30).items(), strict=True
    ):
        assert torch.equal(a, b.view_as(a)), name


@pytest.mark.parametrize("causal", [False, True])
def test_window_over_nothing(causal: bool) -> None:
    for seqlen_q, seqlen_k in ((0, 5), (5, 0), (0, 0)):
        problem = build(Case(seqlen_q, seqlen_k, bias="bk1k", causal=causal, dlse=True))
        assert_close(problem, run(problem, window_size=2))


def test_keys_with_lowest_scores_weigh_the_same() -> None:
    """If every bias of a row is the lowest finite float, its lse says nothing of its keys."""
    problem = build(Case(300, 300, 1, 4, 2, 64, causal=True, bias="bk1k", bias_f32=True))
    lowest = torch.full_like(problem.bias, torch.finfo(torch.float32).min)
    low = run(problem.with_(bias=lowest, wants="qkv"), True, window_size=50)
    # Beside the lowest float q.k is rounded away: every kept key weighs the same, as without q.
    flat = run(
        problem.with_(bias=torch.zeros_like(lowest), softmax_scale=0.0, wants="qkv"),
        True,
        window_size=50,
    )
    torch.testing.assert_close(low.dv, flat.dv, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(low.out, flat.out, atol=1e-2, rtol=1e-2)
    for grad in (low.dq, low.dk):
        assert grad is not None and bool(grad.isfinite().all())


def test_more_rows_than_keys() -> None:
    problem = build(Case(300, 130, 2, 4, 2, 64, causal=True, bias="bk1k"))
    assert problem.bias is not None
    keep = brute_force(problem.bias[:, :, 0], 20, 300, True)
    assert_close(problem.with_(mask=keep), run(problem, True, window_size=20))


@pytest.mark.slow
@pytest.mark.parametrize("case", ATTENTION[:4], ids=case_id)
def test_deterministic_repeat(case: Case) -> None:
    problem = build(case)
    want = run(problem, True, window_size=60)
    for _ in range(times(25)):
        for (name, a), (_, b) in zip(
            run(problem, True, window_size=60).items(), want.items(), strict=True
        ):
            assert torch.equal(a, b), name


def test_one_selection_serves_many_layers() -> None:
    """It serves other queries, keys, values and biases; so do sliding windows and documents."""
    scores = make_scores("random", 2, 2, 1, 400)
    selections = [
        dmattn.select_keys(scores, 50),
        dmattn.sliding_window(400, 50, device=target_device()),
        dmattn.packed_documents([0, 100, 101, 350, 400], device=target_device()),
        dmattn.select_keys(scores, 50, cu_seqlens=[0, 130, 400]),
    ]
    for selection in selections:
        keep = selection.to_mask()
        for seed in range(2):
            problem = build(Case(400, 400, 2, 4, 2, 64, causal=True, bias="bk1k", seed=seed))
            assert_close(problem.with_(mask=keep), run(problem, selection=selection))


# --- decoding -------------------------------------------------------------------------------------

B, H, HK, D = 2, 8, 2, 64


def sequence(length: int, kind: str = "random") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device = target_device()
    generator = torch.Generator(device).manual_seed(length)
    q, k, v = (
        torch.randn(B, length, n, D, generator=generator, device=device).bfloat16()
        for n in (H, HK, HK)
    )
    return q, k, v, make_scores(kind, B, HK, length)


def new_cache(window: int, capacity: int | None = None) -> dmattn.DynamicMaskCache:
    return dmattn.DynamicMaskCache(
        B,
        window,
        HK,
        D,
        torch.bfloat16,
        target_device(),
        evict=capacity is None,
        capacity=capacity,
    )


def assert_decoded(got: Tensor, whole: tuple[Tensor, ...], window: int, start: int) -> None:
    """Assert that every step is within the tolerance of the plain computation in bfloat16."""
    q, k, v, score = whole
    stop = start + got.shape[1]
    keep = brute_force(score, window, q.shape[1], True)
    dout = torch.zeros_like(q)
    problem = Problem(q, k, v, keep, score[:, :, None], dout, None, D**-0.5, True, 0.0, "")
    rows = slice(start, stop)
    tail = problem.with_(
        q=q[:, rows], k=k[:, :stop], v=v[:, :stop], bias=score[:, :, None, :stop]
    ).with_(mask=keep[:, :, rows, :stop], dout=dout[:, rows])
    _, lse = dmattn.flash_dmattn_func(
        tail.q, tail.k, tail.v, tail.mask, tail.bias, is_causal=True, return_lse=True
    )
    assert_close(tail, Results(got, lse))


@pytest.mark.default_backend
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "tied"])
@pytest.mark.parametrize("evict", [True, False])
def test_2000_steps(evict: bool, kind: str) -> None:
    total = 2100 if on_cuda() else 150
    whole = q, k, v, score = sequence(total, kind)
    cache = new_cache(128, None if evict else total)
    prompt = total - (2000 if on_cuda() else 100)
    cache.prefill(k[:, :prompt], v[:, :prompt], score[..., :prompt])
    outs = []
    for t in range(prompt, total):
        now = slice(t, t + 1)
        outs.append(cache.append_and_attend(q[:, now], k[:, now], v[:, now], score[..., now]))
    assert_decoded(torch.cat(outs, 1), whole, 128, prompt)
    assert cache.seen.tolist() == [total, total]


@pytest.mark.default_backend
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 17])
@pytest.mark.parametrize("score_dtype", [torch.float32, torch.bfloat16])
def test_steps_of_each_shape_and_stride(
    head_dim: int, group: int, score_dtype: torch.dtype
) -> None:
    """A few tokens at a time through a small cache, from tensors whose rows start anywhere."""
    device, heads, window, tokens = target_device(), 2, 70, 100
    generator = torch.Generator(device).manual_seed(head_dim + group)

    def odd_rows(count: int) -> Tensor:
        """Views with heads first, whose rows start on odd elements."""
        shape = (B, count, tokens, head_dim + 1)
        base = torch.randn(shape, generator=generator, device=device).bfloat16()
        return base[..., 1:].transpose(1, 2)

    q, k, v = odd_rows(heads * group), odd_rows(heads), odd_rows(heads)
    score = make_scores("random", B, heads, tokens).to(score_dtype)
    numbers = (B, window, heads, head_dim, torch.bfloat16, device, score_dtype)
    cache, even = dmattn.DynamicMaskCache(*numbers), dmattn.DynamicMaskCache(*numbers)
    outs = []
    for t in range(0, tokens, 5):
        step = [x[:, t : t + 5] for x in (q, k, v)]
        new_score = score[..., t : t + 5]
        with poisoned():
            outs.append(cache.append_and_attend(*step, new_score, softmax_scale=0.2, softcap=5.0))
        contiguous = (x.contiguous() for x in step)
        assert torch.equal(outs[-1], even.append_and_attend(*contiguous, new_score, 0.2, 5.0))
    got = torch.cat(outs, 1)
    keep = brute_force(score, window, tokens, True)
    bias, dout = score[:, :, None], torch.zeros_like(q)
    problem = Problem(q, k, v, keep, bias, dout, None, 0.2, True, 5.0, "")
    _, lse = dmattn.flash_dmattn_func(
        q, k, v, keep, bias, 0.2, is_causal=True, softcap=5.0, return_lse=True
    )
    assert_close(problem, Results(got, lse))


@pytest.mark.default_backend
def test_few_tokens_at_once_and_ragged() -> None:
    whole = q, k, v, score = sequence(300, "tied")
    cache, one = new_cache(40), new_cache(40)
    outs, singles = [], []
    for t in range(0, 300, 3):
        now = slice(t, t + 3)
        outs.append(cache.append_and_attend(q[:, now], k[:, now], v[:, now], score[..., now]))
        for i in range(t, t + 3):
            now = slice(i, i + 1)
            step = (q[:, now], k[:, now], v[:, now], score[..., now])
            for b in range(B):  # one sequence at a time
                active = torch.arange(B, device=q.device) == b
                out = one.append_and_attend(*step, active=active)
                singles.append(out[b : b + 1])
    assert_decoded(torch.cat(outs, 1), whole, 40, 0)
    rows = [torch.cat(singles[b::B], 1) for b in range(B)]
    assert torch.equal(torch.cat(rows), torch.cat(outs, 1))
    for name in ("k", "v", "score", "position", "seen"):
        assert torch.equal(getattr(cache, name), getattr(one, name)), name


@pytest.mark.default_backend
def test_reordered_beams() -> None:
    whole = q, k, v, score = sequence(120)
    cache = new_cache(30)
    cache.prefill(k[:, :80], v[:, :80], score[..., :80], dmattn.select_keys(score[..., :80], 30))
    cache.reorder(torch.tensor([1, 0], device=q.device))
    flipped = tuple(x.flip(0) for x in whole)
    outs = []
    for t in range(80, 120):
        now = slice(t, t + 1)
        step = [x[:, now] for x in flipped[:3]]
        outs.append(cache.append_and_attend(*step, flipped[3][..., now]))
    assert_decoded(torch.cat(outs, 1).flip(0), whole, 30, 80)


@pytest.mark.default_backend
@pytest.mark.cuda
@pytest.mark.parametrize("evict", [True, False])
def test_graph_of_a_step(evict: bool) -> None:
    """Captured once, replayed for every token: positions are counted on the device."""
    whole = q, k, v, score = sequence(260)
    cache = new_cache(64, None if evict else 256)
    now = [x[:, :1].clone() for x in (q, k, v)] + [score[..., :1].clone()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        cache.append_and_attend(*now)
    torch.cuda.current_stream().wait_stream(side)
    cache.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.append_and_attend(*now)
    cache.reset()
    outs = []
    for t in range(250):
        for x, source in zip(now, (q, k, v), strict=False):
            x.copy_(source[:, t : t + 1])
        now[3].copy_(score[..., t : t + 1])
        graph.replay()
        outs.append(out.clone())
    assert_decoded(
        torch.cat(outs, 1),
        tuple(x[:, :250] if x.dim() == 4 else x[..., :250] for x in whole),
        64,
        0,
    )
    if not evict:  # a graph has no counter on the host: tokens that do not fit are left out
        before = cache.k.clone()
        for _ in range(10):
            graph.replay()
        assert cache.seen.tolist() == [256, 256]
        assert torch.equal(cache.k[:, :250], before[:, :250])


@pytest.mark.cuda
def test_graph_of_selection_and_attention() -> None:
    problem = build(Case(400, 400, 2, 4, 2, 64, causal=True, bias="bk1k", wants=""))
    want = attend_plain(problem)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attend_plain(problem)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_plain(problem)
    out.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, want)


def attend_plain(problem: Problem) -> Tensor:
    out: Tensor = dmattn.flash_dmattn_func(
        problem.q, problem.k, problem.v, attn_bias=problem.bias, is_causal=True, window_size=60
    )
    return out


@pytest.mark.default_backend
@pytest.mark.parametrize("causal", [True, False])
def test_operators_pass_opcheck(causal: bool) -> None:
    problem = build(Case(40, 60, bias="bk1k", causal=causal))
    assert problem.bias is not None
    scores = problem.bias[:, :, 0]
    torch.library.opcheck(torch.ops.dmattn.select_keys.default, (scores, None, 9, 40, causal))
    lists = dmattn.select_keys(scores, 9, causal, query_len=40).lists
    numbers = (problem.softmax_scale, causal, 0.0)
    args = (problem.q, problem.k, problem.v, None, problem.bias, problem.sinks)
    given = (*args, *numbers, True, 0, False, *lists)
    torch.library.opcheck(torch.ops.dmattn.fwd.default, given)
    results = torch.ops.dmattn.fwd(*given)
    backward = (problem.dout, None, *results, [True] * 5, *given)
    torch.library.opcheck(torch.ops.dmattn.bwd.default, backward)
    q, k, v, score = sequence(2)
    cache = new_cache(16)
    state = (cache.k, cache.v, cache.score, cache.position, cache.seen)
    torch.library.opcheck(
        torch.ops.dmattn.cache_append_and_attend.default, (q, k, v, score, None, *state, 0.1, 0.0)
    )
