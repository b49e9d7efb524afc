"""Packed sequences of unequal lengths: native in the kernels, forward and backward."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

import dmattn
from attention.cases import BIAS_FILLS, MASK_FILLS, OPERAND_LAYOUTS, Case, seeds
from attention.driver import times
from attention.packed import (
    PackedProblem,
    build_packed,
    call_packed,
    check_packed,
    judge_packed,
    run_packed,
)
from attention.selections import brute_force
from attention.targets import target
from dmattn import varlen

pytestmark = pytest.mark.each_family

# Lengths around every tile edge, empty sequences, rows without keys, and keys without rows, mixed.
MIXED = (
    *((0, 5), (1, 1), (127, 128), (128, 127), (129, 300), (0, 0), (64, 65), (5, 0)),
    *((300, 129), (1, 513), (33, 1)),
)
SELF = tuple((n, n) for n in (129, 0, 1, 127, 128, 300, 64, 65, 2))
ANCHORS = [("bf16", 64), ("f16", 128), ("bf16", 256)]
OPERANDS = ["1h1k", "1k1k", "111k", "1hqk", "1kqk", "11qk"]


@pytest.mark.parametrize("dtype,head_dim", [*ANCHORS, ("f16", 64), ("f16", 40), ("bf16", 136)])
@pytest.mark.parametrize("lengths", [MIXED, SELF, MIXED[::-1]], ids=["mixed", "self", "reversed"])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(
    lengths: tuple[tuple[int, int], ...], dtype: str, head_dim: int, causal: bool
) -> None:
    check_packed(Case(dtype=dtype, head_dim=head_dim, causal=causal, dlse=True), lengths)


@pytest.mark.parametrize("dtype,head_dim", [*ANCHORS, ("f16", 64), ("bf16", 96), ("f16", 192)])
@pytest.mark.parametrize("causal", [False, True])
def test_long_sequences(dtype: str, head_dim: int, causal: bool) -> None:
    """Sequences of many tiles, with groups of heads."""
    case = Case(nheads=2, nheads_k=1, dtype=dtype, head_dim=head_dim, causal=causal)
    check_packed(case, ((1100, 1100), (3, 700), (0, 77), (1025, 900), (600, 1)))


@pytest.mark.parametrize("dtype,head_dim", [*ANCHORS, ("f16", 64), ("bf16", 96), ("f16", 192)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_softcap(dtype: str, head_dim: int, causal: bool, deterministic: bool) -> None:
    case = Case(nheads=4, nheads_k=2, dtype=dtype, head_dim=head_dim, causal=causal, softcap=3.0)
    check_packed(case.with_(deterministic=deterministic), MIXED)


@pytest.mark.parametrize("dtype,head_dim", ANCHORS)
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_do_not_see_each_other(dtype: str, head_dim: int, causal: bool) -> None:
    """NaN and infinities of a sequence reach no other one, though tiles have parts of both."""
    if target().backend == "flex":
        pytest.skip("what a mask hides has to be finite there: docs/backends.md")
    case = Case(nheads=4, nheads_k=2, dtype=dtype, head_dim=head_dim, causal=causal)
    problem = build_packed(case, SELF)
    bad = {name: getattr(problem, name).clone() for name in ("q", "k", "v", "dout")}
    spans = [list(problem.spans())[b] for b in (0, 5, 7)]
    for rows, keys in spans:
        bad["q"][rows], bad["k"][keys] = math.nan, math.inf
        bad["v"][keys], bad["dout"][rows] = math.nan, math.inf
    found, clean = run_packed(problem.with_(**bad)), run_packed(problem)
    for rows, keys in spans:
        found["lse"][:, rows] = clean["lse"][:, rows]
        for name in ("out", "dq", "dk", "dv"):
            own = keys if name in ("dk", "dv") else rows
            found[name][own] = clean[name][own]
    judge_packed(problem, found)


@pytest.mark.parametrize("nheads,nheads_k", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("dtype,head_dim", ANCHORS)
def test_grouped_heads(nheads: int, nheads_k: int, dtype: str, head_dim: int) -> None:
    case = Case(nheads=nheads, nheads_k=nheads_k, dtype=dtype, head_dim=head_dim, causal=True)
    check_packed(case.with_(bias="1k1k", mask="1h1k"), MIXED)


@pytest.mark.parametrize("mask", OPERANDS)
@pytest.mark.parametrize("dtype,head_dim", ANCHORS)
@pytest.mark.parametrize("causal", [False, True])
def test_masks(mask: str, dtype: str, head_dim: int, causal: bool) -> None:
    check_packed(Case(mask=mask, dtype=dtype, head_dim=head_dim, causal=causal), MIXED)


@pytest.mark.parametrize("bias", OPERANDS)
@pytest.mark.parametrize("dtype,head_dim", ANCHORS)
@pytest.mark.parametrize("f32", [False, True])
def test_biases(bias: str, dtype: str, head_dim: int, f32: bool) -> None:
    case = Case(bias=bias, bias_f32=f32, dtype=dtype, head_dim=head_dim, nheads=8, dlse=True)
    check_packed(case, MIXED)


@pytest.mark.parametrize("bias", OPERANDS)
@pytest.mark.parametrize("mask", OPERANDS)
def test_masks_with_biases(mask: str, bias: str) -> None:
    check_packed(Case(mask=mask, bias=bias, head_dim=128, causal=True, softcap=5.0), MIXED)


@pytest.mark.parametrize("fill", MASK_FILLS)
@pytest.mark.parametrize("mask", ["1k1k", "1hqk"])
def test_mask_fills(fill: str, mask: str) -> None:
    check_packed(Case(mask=mask, mask_fill=fill, bias="1k1k", causal=True), MIXED)


@pytest.mark.parametrize("fill", BIAS_FILLS)
@pytest.mark.parametrize("bias", ["1k1k", "1hqk"])
def test_bias_fills(fill: str, bias: str) -> None:
    check_packed(Case(bias=bias, bias_fill=fill, causal=True), MIXED)


@pytest.mark.parametrize(
    "layout", ["heads_first", "misaligned", "offset", "spaced", "heads_shared"]
)
@pytest.mark.parametrize("dtype,head_dim", ANCHORS)
def test_layouts(layout: str, dtype: str, head_dim: int) -> None:
    case = Case(layout=layout, dtype=dtype, head_dim=head_dim, causal=True)
    check_packed(case, MIXED)
    check_packed(case.with_(mask="1k1k"), MIXED)


@pytest.mark.parametrize("layout", OPERAND_LAYOUTS)
@pytest.mark.parametrize("shape", OPERANDS)
def test_operand_layouts(layout: str, shape: str) -> None:
    case = Case(operand_layout=layout, mask=shape, bias=shape, head_dim=128)
    check_packed(case, MIXED)
    check_packed(case.with_(mask="", bias_f32=True), MIXED)


@pytest.mark.parametrize("shape", ["1hqk", "1h1k"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_words_of_mask(shape: str, head_dim: int) -> None:
    """More than 2048 rows and keys: sequences start within the words and cells of packed masks."""
    lengths = ((70, 30), (2100, 700), (1, 4), (600, 2300), (130, 2049))
    case = Case(nheads=2, nheads_k=1, mask=shape, mask_fill="blocks", bias=shape, causal=True)
    check_packed(case.with_(head_dim=head_dim), lengths)


@pytest.mark.parametrize("wants", ["q", "k", "v", "b", "kb", "qv", ""])
@pytest.mark.parametrize("bias", ["1k1k", "11qk"])
@pytest.mark.parametrize("mask", ["", "1k1k"])
def test_some_gradients(wants: str, bias: str, mask: str) -> None:
    check_packed(Case(wants=wants, bias=bias, mask=mask, dlse=True), MIXED)


@pytest.mark.parametrize("shape", ["", *OPERANDS])
@pytest.mark.parametrize("dtype,head_dim", ANCHORS)
def test_deterministic(shape: str, dtype: str, head_dim: int) -> None:
    """Results are right, and bit for bit the same each time, dbias included."""
    case = Case(nheads=4, nheads_k=2, dtype=dtype, head_dim=head_dim, causal=True)
    case = case.with_(deterministic=True, bias=shape, mask="1k1k" if shape == "1h1k" else "")
    problem = check_packed(case, MIXED)
    want = run_packed(problem, deterministic=True)
    for _ in range(times(5)):
        for name, value in run_packed(problem, deterministic=True).items():
            assert torch.equal(value, want[name]), name


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("dtype,head_dim", [*ANCHORS, ("f16", 64), ("bf16", 192)])
def test_deterministic_over_many_tiles(dtype: str, head_dim: int, softcap: float) -> None:
    """Key blocks that begin together, for groups of heads, take turns at the same rows."""
    case = Case(nheads=8, nheads_k=4, dtype=dtype, head_dim=head_dim, causal=True, softcap=softcap)
    lengths = ((900, 1300), (3, 70), (0, 5), (700, 640), (1030, 1030))
    problem = check_packed(case.with_(deterministic=True), lengths)
    want = run_packed(problem, deterministic=True)
    for _ in range(times(20)):
        for name, value in run_packed(problem, deterministic=True).items():
            assert torch.equal(value, want[name]), name


@pytest.mark.parametrize("dtype,head_dim", ANCHORS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_one_head_of_keys(dtype: str, head_dim: int, deterministic: bool) -> None:
    """Long enough for the sums of dq to take several rounds, over which dk and dv are added up."""
    case = Case(nheads=8, nheads_k=1, dtype=dtype, head_dim=head_dim, causal=True)
    lengths = ((2500, 2500), (3, 70), (0, 5), (700, 640), (2400, 2500))
    check_packed(case.with_(deterministic=deterministic), lengths)


# So many keys that Hopper reads lists of them beside a mask or a bias: see `varlen._over_lists`.
MANY_KEYS = tuple((n, n) for n in (129, 0, 1, 127, 128, 900, 64, 65, 2, 513, 0, 257, 641))


@pytest.mark.parametrize("dtype,head_dim", [*ANCHORS, ("f16", 40), ("bf16", 192)])
@pytest.mark.parametrize("bias, mask", [("1k1k", ""), ("1h1k", ""), ("", "111k"), ("111k", "1h1k")])
@pytest.mark.parametrize("deterministic", [False, True])
def test_masks_and_biases_of_many_keys(
    bias: str,
    mask: str,
    dtype: str,
    head_dim: int,
    deterministic: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(varlen, "_FEWEST_ENTRIES", 0)
    case = Case(nheads=8, nheads_k=2, dtype=dtype, head_dim=head_dim, causal=True, dlse=True)
    case = case.with_(bias=bias, bias_f32=head_dim == 40, mask=mask, deterministic=deterministic)
    check_packed(case, MANY_KEYS)
    check_packed(case.with_(mask_fill="most", bias_fill="some_minus_inf"), MANY_KEYS)


@pytest.mark.parametrize("mask", ["", "1k1k", "1hqk"])
def test_forward_is_repeatable(mask: str) -> None:
    problem = build_packed(Case(mask=mask, bias="1k1k", causal=True), MIXED)
    want = call_packed(problem)
    for _ in range(times(20)):
        for a, b in zip(call_packed(problem), want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("seed", seeds(150))
def test_random(seed: int) -> None:
    draw = random.Random(seed)
    edges = (0, 1, 2, 31, 63, 64, 65, 127, 128, 129, 200, 257)
    lengths = tuple((draw.choice(edges), draw.choice(edges)) for _ in range(draw.randint(1, 9)))
    nheads_k = draw.choice((1, 2, 3))
    case = Case(
        nheads=nheads_k * draw.choice((1, 2, 4)),
        nheads_k=nheads_k,
        head_dim=draw.choice((8, 32, 64, 72, 128, 160, 256)),
        dtype=draw.choice(target().dtypes),
        causal=draw.random() < 0.5,
        softcap=draw.choice((0.0, 0.0, 7.0)),
        scale=draw.choice((None, None, 0.3)),
        mask=draw.choice(("", *OPERANDS)),
        mask_fill=draw.choice(("half", "percent", "blocks", "dead_rows", "prefix")),
        bias=draw.choice(("", *OPERANDS)),
        bias_f32=draw.random() < 0.3,
        layout=draw.choice(("plain", "plain", "misaligned", "heads_first")),
        operand_layout=draw.choice(("plain", "plain", *OPERAND_LAYOUTS)),
        wants="".join(x for x in "qkvb" if draw.random() < 0.8),
        dlse=draw.random() < 0.4,
        deterministic=draw.random() < 0.5,
        seed=1000 * seed,
    )
    check_packed(case, lengths)


def test_many_short_sequences() -> None:
    draw = random.Random(0)
    lengths = tuple((draw.randint(0, 9), draw.randint(0, 9)) for _ in range(300))
    check_packed(Case(nheads=2, nheads_k=1, bias="1k1k", causal=True), lengths)


def test_one_row_each() -> None:
    """Decoding: one row for each head of a group, and causality that hides nothing."""
    lengths = tuple((1, n) for n in (1, 127, 700, 0, 64, 128))
    check_packed(Case(nheads=8, nheads_k=2, bias="1k1k", causal=True, head_dim=128), lengths)


def test_one_row_in_all() -> None:
    """(heads, 1, longest) is a bias per row, not per key, however alike they look."""
    for shape in ("1hqk", "1h1k"):
        check_packed(Case(bias=shape, mask=shape, causal=True), ((0, 60), (1, 33), (0, 7)))


def test_generous_bounds() -> None:
    problem = build_packed(Case(bias="1k1k", mask="1k1k", causal=True), MIXED)
    inputs = (problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k)
    out = dmattn.flash_dmattn_varlen_func(
        *(*inputs, 2000, 3000, problem.mask, problem.bias),
        **problem.numbers,
        **target().options(),
    )
    assert torch.equal(out, call_packed(problem)[0])


@pytest.mark.parametrize("lengths", [[(0, 0)], [(0, 0), (0, 0)], [(3, 0), (200, 0)], [(0, 9)]])
@pytest.mark.parametrize("shape", ["1k1k", "1hqk"])
def test_nothing_to_do(lengths: list[tuple[int, int]], shape: str) -> None:
    check_packed(Case(bias=shape, mask=shape, dlse=True), lengths)


# ---------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 50, 200, 1000])
@pytest.mark.parametrize("bias,mask", [("1k1k", ""), ("1h1k", "111k"), ("111k", "1h1k")])
def test_window(bias: str, mask: str, window: int, causal: bool) -> None:
    problem = build_packed(Case(bias=bias, bias_f32=True, mask=mask, causal=causal), SELF)
    check_window(problem, window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [40, 300])  # 300: every sequence fits the window
@pytest.mark.parametrize("mask", ["", "1k1k"])
def test_unusable_scores(mask: str, window: int, causal: bool) -> None:
    """NaN and -inf are never attended to, and have no gradient, however wide the window is."""
    case = Case(bias="1k1k", bias_f32=True, mask=mask, causal=causal)
    problem = build_packed(case, ((129, 129), (0, 0), (1, 1), (300, 300)))
    assert problem.bias is not None
    for part, (_, keys) in zip(problem.parts, problem.spans(), strict=True):
        assert part.bias is not None
        for scores in (problem.bias[keys].T, part.bias[0, :, 0]):
            scores[:, 3::5], scores[:, 4::7] = math.nan, -math.inf
    check_window(problem, window)


def check_window(problem: PackedProblem, window: int) -> None:
    """Compare with the oracle under the mask equivalent to the window, sequence by sequence."""
    problem = problem.with_(cu_seqlens_k=problem.cu_seqlens_q)
    found = run_packed(problem, window_size=window)
    parts = []
    for part in problem.parts:
        assert part.bias is not None
        allowed = None if part.mask is None else part.mask[:, :, 0]
        seqlen = part.q.shape[1]
        keep = brute_force(part.bias[:, :, 0], window, seqlen, part.is_causal, allowed)
        bias = torch.where(part.bias > -math.inf, part.bias, 0.0)
        parts.append(part.with_(mask=keep, bias=bias, is_causal=False))
    judge_packed(problem.with_(parts=parts), found)


def test_one_row_a_sequence_sees_its_whole_past() -> None:
    """Decoding: causality hides nothing, also if both boundaries are tensors of their own."""
    lengths = ((1, 200), (1, 70), (0, 3), (1, 129))
    problem = build_packed(Case(bias="1k1k", causal=True), lengths)
    causal = call_packed(problem, window_size=40)
    other = call_packed(problem, window_size=40, is_causal=False)
    assert torch.equal(causal[0], other[0]) and torch.equal(causal[1], other[1])


def test_wide_window_chooses_nothing() -> None:
    problem = build_packed(Case(bias="1k1k", mask="111k"), ((30, 40), (50, 300)))
    assert torch.equal(call_packed(problem, window_size=300)[0], call_packed(problem)[0])


# ------------------------------------------------------------------------------- inside of PyTorch


def _arguments(problem: PackedProblem) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments of dmattn::fwd: those by position, and those by name."""
    mask, bias = (None if x is None else x.transpose(0, 1) for x in (problem.mask, problem.bias))
    bounds = {"cu_seqlens_q": problem.cu_seqlens_q, "cu_seqlens_k": problem.cu_seqlens_k}
    longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), problem.longest, strict=True))
    return (
        problem.q,
        problem.k,
        problem.v,
        mask,
        bias,
        None,
        0.2,
        True,
        0.0,
        True,
    ), bounds | longest


@pytest.mark.default_backend
@pytest.mark.parametrize("mask,bias", [("1k1k", "1hqk"), ("1hqk", "1k1k")])
def test_opcheck(mask: str, bias: str) -> None:
    problem = build_packed(Case(mask=mask, bias=bias, causal=True), ((5, 9), (0, 3), (20, 17)))
    given, packing = _arguments(problem)
    torch.library.opcheck(torch.ops.dmattn.fwd.default, given, packing)
    results = torch.ops.dmattn.fwd(*given, **packing)
    for needs in ([True] * 5, [False, False, False, True, False]):
        backward = (problem.dout, None, *results, needs, *given)
        torch.library.opcheck(torch.ops.dmattn.bwd.default, backward, packing)


def test_fast_path_equals_dispatched_path() -> None:
    problem = build_packed(Case(bias="1k1k", mask="1hqk", causal=True), MIXED)
    tracked = run_packed(problem)
    out, lse = call_packed(problem)
    assert torch.equal(out, tracked["out"]) and torch.equal(lse, tracked["lse"])


@pytest.mark.cuda
@pytest.mark.parametrize("mask", ["", "1k1k", "1hqk"])
def test_other_boundaries_in_a_graph(mask: str) -> None:
    """Captured once, replayed for sequences of other lengths: the host has read none of them."""
    first, second = ((100, 130), (28, 0), (72, 70)), ((10, 70), (90, 130), (100, 0))
    case = Case(bias="1k1k", mask=mask, causal=True, deterministic=True)
    problem, other = build_packed(case, first), build_packed(case.with_(seed=9), second)
    assert problem.longest == other.longest
    names = ("q", "k", "v", "bias", "mask", "dout", "cu_seqlens_q", "cu_seqlens_k")
    held = {x: t.clone() for x in names if (t := getattr(problem, x)) is not None}
    leaves = [held[x].requires_grad_() for x in ("q", "k", "v", "bias")]

    def step() -> tuple[Tensor, ...]:
        out, lse = call_packed(problem.with_(**held), deterministic=True)
        return (out, lse, *torch.autograd.grad(out, leaves, held["dout"]))

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        for x, t in held.items():
            t.copy_(getattr(other, x))
        for value in results:
            value.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    names_found = ("out", "lse", "dq", "dk", "dv", "dbias")
    judge_packed(other, dict(zip(names_found, (x.detach() for x in results), strict=True)))


@pytest.mark.cuda
@pytest.mark.parametrize("window", [None, 64])
def test_call_does_not_synchronise(window: int | None) -> None:
    if target().backend == "flex":
        pytest.skip("with a bias the flex backend looks at lse")
    problem = build_packed(Case(bias="1k1k"), SELF)
    call_packed(problem, window_size=window)
    torch.cuda.synchronize()
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
    done.record()
    call_packed(problem, window_size=window)
    assert not done.query()
    torch.cuda.synchronize()
