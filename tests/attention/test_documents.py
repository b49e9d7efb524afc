"""Selection within packed documents, and key lists from intervals."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import dmattn
from attention.cases import Case, build, case_id
from attention.driver import assert_close, run
from attention.poison import poisoned
from attention.selections import KINDS, assert_lists, brute_force, make_scores, sorted_lists
from attention.targets import target_device
from dmattn.ops.selection import build_key_lists
from dmattn.ops.selection import select_keys as select

pytestmark = pytest.mark.each_family

BOUNDS = [
    [0, 1],
    [0, 0, 13, 13],
    [0, 1, 128, 255, 383, 512],  # lengths 1, 127, 127, 128, 129
    [0, 127, 255, 384, 384, 900],
    [0, 129, 258, 258, 260, 261, 300, 700],
    [0, 700],
    [0, 5, 699, 700],
    [*range(131), 300],
]


def bounds_tensor(bounds: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(bounds, dtype=dtype, device=target_device())


def keep_within(
    scores: Tensor, window: int, bounds: list[int], key_mask: Tensor | None = None
) -> Tensor:
    batch, heads, seqlen = scores.shape
    keep = torch.zeros(batch, heads, seqlen, seqlen, dtype=torch.bool, device=scores.device)
    for a, b in pairwise(bounds):
        part = None if key_mask is None else key_mask[..., a:b]
        keep[:, :, a:b, a:b] = brute_force(scores[..., a:b], window, b - a, True, part)
    return keep


@pytest.mark.default_backend
@pytest.mark.parametrize("window", [1, 14, 100, 128, 257, 1000])
@pytest.mark.parametrize("bounds", BOUNDS, ids=lambda x: f"{len(x) - 1}of{x[-1]}")
@pytest.mark.parametrize("kind", KINDS)
def test_selection(kind: str, bounds: list[int], window: int) -> None:
    seqlen = bounds[-1]
    for dtype, heads, masked in (
        (torch.float32, 2, False),
        (torch.bfloat16, 2, True),
        (torch.float16, 1, True),
    ):
        scores = make_scores(kind, 2, heads, seqlen).to(dtype)
        mask = make_scores("random", 2, 1, 1, seqlen) < 0.8 if masked else None
        cu_seqlens = bounds_tensor(bounds, torch.int64 if masked else torch.int32)
        with poisoned():
            selection = dmattn.select_keys(scores, window, attn_mask=mask, cu_seqlens=cu_seqlens)
        keep = keep_within(scores, window, bounds, None if mask is None else mask[:, :, 0])
        assert torch.equal(selection.to_mask(), keep)
        assert_lists(selection, keep)


@pytest.mark.default_backend
def test_one_document_is_no_document() -> None:
    scores = make_scores("tied", 2, 2, 900)
    plain = dmattn.select_keys(scores, 200)
    packed = dmattn.select_keys(scores, 200, cu_seqlens=bounds_tensor([0, 0, 900, 900]))
    for name in ("end", "count", "full"):
        assert torch.equal(getattr(plain, name), getattr(packed, name)), name
    # The order of the full keys in a list is left open.
    assert torch.equal(sorted_lists(plain), sorted_lists(packed))


LONG = [
    [0, 40_000],
    [0, 8192, 16_384, 16_384, 24_576, 32_768, 40_000],  # multiples of 8192, where the sets are
    [0, 8191, 8193, 24_577, 33_000, 40_001],
    [0, 30, 33_333, 33_400, 33_401, 41_234],
    [*range(0, 40_900, 37), 41_000],
]


@pytest.mark.default_backend
@pytest.mark.slow
@pytest.mark.parametrize("window", [40, 1024, 9000])
@pytest.mark.parametrize("bounds", LONG, ids=lambda x: f"{len(x) - 1}of{x[-1]}")
def test_long_selection(bounds: list[int], window: int) -> None:
    """The same as a selection of each document alone, for texts long enough for sets.

    A set has the best keys in front of a multiple of 8192: see docs/kernels/selection.md.
    """
    seqlen = bounds[-1]
    scores = make_scores("tied" if window == 40 else "random", 1, 2, seqlen)
    selection = dmattn.select_keys(scores, window, cu_seqlens=bounds_tensor(bounds))
    key = torch.arange(seqlen, device=scores.device)
    for a, b in list(pairwise(bounds))[:: max(1, len(bounds) // 20)]:
        if a < b:
            alone = dmattn.select_keys(scores[..., a:b], window)
            assert torch.equal(selection.end[..., a:b] - a, alone.end)
    # The lists hold the same keys as those made from the intervals, which are tested below.
    built = build_key_lists(selection.end, seqlen, selection.idx.shape[3], None)
    assert torch.equal(built.count, selection.count) and torch.equal(built.full, selection.full)
    behind = torch.arange(built.idx.shape[3], device=key.device) >= built.count[..., None]
    mine, others = (
        x.masked_fill(behind, seqlen).sort(-1).values for x in (selection.idx, built.idx)
    )
    assert torch.equal(mine, others)
    starts = torch.tensor(bounds[:-1], device=key.device)
    for row in torch.randint(0, seqlen, (20,)).tolist():
        start = int(starts[starts <= row].max())
        kept = (key <= row) & (row < selection.end)
        assert not bool(kept[..., :start].any())
        assert bool((kept.sum(-1) == min(row - start + 1, window)).all())


@pytest.mark.default_backend
@pytest.mark.cuda  # the CPU looks at the values and refuses them
def test_any_boundaries_stay_inside() -> None:
    """Values that are no boundaries give some selection; the margins of the outputs stay clean."""
    scores = make_scores("random", 1, 2, 900)
    for bounds in ([5, 3, 1], [-4, 2000], [900, 0], [0], [3, 3, 7], [1 << 30, -(1 << 30), 450]):
        with poisoned():
            selection = select(scores, None, 130, 900, True, bounds_tensor(bounds))
        assert bool((selection.idx >= 0).all()) and bool((selection.idx < 900).all())
        assert bool((selection.count >= 0).all())
        assert int(selection.count.max()) <= selection.idx.shape[3]
        assert bool((selection.full <= selection.count).all())


@pytest.mark.default_backend
@pytest.mark.cuda  # the CPU looks at the values and refuses them
def test_keys_behind_the_last_boundary_are_one_more_document() -> None:
    scores = make_scores("random", 1, 2, 500)
    short, whole = (
        select(scores, None, 60, 500, True, bounds_tensor(bounds))
        for bounds in ([0, 130, 260], [0, 130, 260, 500])
    )
    for a, b in zip(short, whole, strict=True):
        assert torch.equal(a, b)


ATTENTION = [
    Case(300, 300, 2, 4, 2, 64, causal=True, bias="bk1k"),
    Case(257, 257, 2, 2, 1, 128, causal=True, bias="bh1k", dtype="f16"),
    Case(400, 400, 1, 4, 4, 256, causal=True, bias="1k1k", bias_f32=True),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [1, 50, 200])
@pytest.mark.parametrize("case", ATTENTION, ids=case_id)
def test_attention(case: Case, window: int, deterministic: bool) -> None:
    problem = build(case)
    assert problem.bias is not None
    bounds = [0, 100, 101, 229, case.seqlen_k]
    with poisoned():
        selection = dmattn.select_keys(problem.bias, window, cu_seqlens=bounds_tensor(bounds))
    found = run(problem, deterministic, selection=selection)
    keep = keep_within(problem.bias[:, :, 0], window, bounds)
    assert_close(problem.with_(mask=keep), found)


@pytest.mark.default_backend
@pytest.mark.cuda
def test_graph_with_other_documents_at_each_replay() -> None:
    """The boundaries are read on the device, and not on the host."""
    scores, bounds = make_scores("random", 1, 2, 600), bounds_tensor([0, 100, 350, 600])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dmattn.select_keys(scores, 70, cu_seqlens=bounds)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selection = dmattn.select_keys(scores, 70, cu_seqlens=bounds)
    for other in ([0, 100, 350, 600], [0, 0, 599, 600], [0, 128, 256, 600]):
        bounds.copy_(bounds_tensor(other))
        graph.replay()
        assert torch.equal(selection.to_mask(), keep_within(scores, 70, other))


@pytest.mark.default_backend
@pytest.mark.cuda
def test_host_does_not_wait() -> None:
    """In this debug mode of torch, an operation that makes the host wait raises an error."""
    scores, bounds = make_scores("random", 1, 2, 600), bounds_tensor([0, 100, 350, 600])
    end = dmattn.select_keys(scores, 70, cu_seqlens=bounds).end
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        dmattn.select_keys(scores, 70, cu_seqlens=bounds)
        dmattn.select_keys(scores, 70, cu_seqlens=bounds.long())
        dmattn.sliding_window(600, 70, device=scores.device)
        dmattn.sliding_window(600, 70, attn_mask=scores[:, 0] > 0)
        dmattn.packed_documents(bounds, key_len=600, max_seqlen=250)
        dmattn.packed_documents(bounds.long(), 70, key_len=600, attn_mask=scores[:, 0] > 0)
        dmattn.packed_documents(document_ids=(scores[:, 0] > 2).long().cumsum(1))
        dmattn.KeySelection.from_intervals(end, reach=600)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.default_backend
@pytest.mark.parametrize("window", [None, 40])
def test_ready_made_documents(window: int | None) -> None:
    """Boundaries as a tensor, and ids that differ between rows, with padding, do what lists do."""
    rows = [[0, 100, 350, 600], [0, 1, 128, 599, 600]]
    lengths = [[b - a for a, b in pairwise(bounds)] for bounds in rows]
    ids = torch.stack(
        [torch.arange(len(x)).repeat_interleave(torch.tensor(x)) for x in lengths]
    ).to(target_device())
    padding = make_scores("random", 2, 1, 600)[:, 0] > -1
    with poisoned():
        by_ids = dmattn.packed_documents(None, window, document_ids=ids, attn_mask=padding)
    for b, bounds in enumerate(rows):
        want = dmattn.packed_documents(bounds, window).to_mask().to(ids.device)
        assert torch.equal(by_ids.to_mask()[b], want[0] & padding[b])
        known = {"key_len": 600, "max_seqlen": max(lengths[b])}
        with poisoned():
            here = dmattn.packed_documents(bounds_tensor(bounds), window, **known)
        assert torch.equal(here.to_mask(), want)
        assert_lists(here, want)


@pytest.mark.default_backend
@pytest.mark.cuda
def test_a_compiled_graph_serves_all_lengths() -> None:
    """Short ones, too, for which the graph makes one list more than there are row blocks."""

    def attend(q: Tensor, bias: Tensor) -> Tensor:
        selection = dmattn.select_keys(bias, 40)
        out: Tensor = dmattn.flash_dmattn_func(
            q, q, q, attn_bias=bias, is_causal=True, selection=selection
        )
        return out

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend=counter)
    graphs = 0
    for length in (300, 90, 129, 600):
        q = torch.randn(2, length, 2, 64, dtype=torch.float16, device=target_device())
        bias = make_scores("random", 2, 2, 1, length).half()
        assert torch.equal(compiled(q, bias), attend(q, bias))
        graphs = counter.frame_count if length == 300 else graphs
        assert counter.frame_count == graphs


@pytest.mark.default_backend
def test_operators_pass_opcheck() -> None:
    scores = make_scores("random", 1, 2, 140)
    bounds = bounds_tensor([0, 50, 51, 140])
    torch.library.opcheck(
        torch.ops.dmattn.select_keys.default, (scores, None, 9, 140, True, bounds)
    )
    end = dmattn.sliding_window(140, 20, device=target_device()).end
    for capacity in (0, 128):
        torch.library.opcheck(torch.ops.dmattn.build_key_lists.default, (end, 130, capacity, 20))


# --- lists of intervals ---------------------------------------------------------------------------


def draw_end(kind: str, seqlen_k: int, reach: int | None) -> Tensor:
    device = target_device()
    shape, key = (2, 3, seqlen_k), torch.arange(seqlen_k, device=device)
    generator = torch.Generator(device).manual_seed(seqlen_k)
    chance = torch.rand(shape, generator=generator, device=device)
    if kind == "all":
        return torch.full(shape, seqlen_k, dtype=torch.int32, device=device)
    if kind == "few long":
        return torch.where(chance < 0.02, seqlen_k + 7, key + (chance * 9).int()).int()
    return (key + (chance * ((reach or 300) + 4)).int() - 3).int()


def keep_of(end: Tensor, seqlen_q: int) -> Tensor:
    key = torch.arange(end.shape[2], device=end.device)
    row = key[end.shape[2] - seqlen_q :, None]
    return (key <= row) & (row < end[:, :, None])


@pytest.mark.default_backend
@pytest.mark.parametrize(
    "seqlen_q,seqlen_k", [(1, 1), (33, 33), (128, 128), (129, 257), (700, 1100), (1500, 1500)]
)
@pytest.mark.parametrize(
    "kind,reach",
    [("random", None), ("random", 1), ("random", 90), ("few long", None), ("all", None)],
)
def test_lists(kind: str, reach: int | None, seqlen_q: int, seqlen_k: int) -> None:
    end = draw_end(kind, seqlen_k, reach)
    with poisoned():
        selection = dmattn.KeySelection.from_intervals(end, seqlen_q, reach=reach)
    keep = keep_of(end, seqlen_q)
    assert_lists(selection, keep)
    behind = torch.arange(selection.idx.shape[3], device=end.device) >= selection.count[..., None]
    assert not bool(selection.idx.masked_select(behind).any())


@pytest.mark.default_backend
@pytest.mark.parametrize("kind", ["random", "few long", "all"])
@pytest.mark.parametrize("seqlen_k", [4097, 9001])
def test_long_lists(kind: str, seqlen_k: int) -> None:
    """Lists behind long runs of keys that have left: a few blocks, compared with the intervals."""
    end = draw_end(kind, seqlen_k, None)
    selection = dmattn.KeySelection.from_intervals(end)
    key = torch.arange(seqlen_k, device=end.device)
    for block in {0, 1, 31, selection.idx.shape[2] - 1}:
        first, last = block * 128, min(block * 128 + 128, seqlen_k) - 1
        listed = (key <= last) & (end > key.clamp(min=first))
        every = listed & (key <= first) & (end > last)
        count, full = (x[:, :, block] for x in (selection.count, selection.full))
        assert torch.equal(count, listed.sum(-1).int())
        assert torch.equal(full, every.sum(-1).int())
        for b, h in ((0, 0), (1, 2)):
            got = selection.idx[b, h, block, : int(count[b, h])]
            want = [x[b, h].nonzero().flatten() for x in (every, listed & ~every)]
            assert torch.equal(got.long(), torch.cat(want))


@pytest.mark.default_backend
def test_lists_that_do_not_fit_are_empty() -> None:
    end = draw_end("all", 400, None)
    with poisoned():
        lists = build_key_lists(end, 400, 256, None)
        lengths = build_key_lists(end, 400, 0, None)
    needed = [128, 256, 384, 400]
    assert (lists.needed == torch.tensor(needed, device=end.device)).all()
    assert torch.equal(lengths.needed, lists.needed)
    assert lists.count[1, 2].tolist() == [128, 256, 0, 0]
    assert lists.full[1, 2].tolist() == [1, 129, 0, 0]
    assert lists.idx[1, 2, 1].tolist() == list(range(256))
    assert not bool(lists.idx[:, :, 2:].any())
    assert not bool(lengths.count.any()) and not bool(lengths.full.any())


@pytest.mark.default_backend
@pytest.mark.parametrize("window", [1, 100, 5000])
def test_ready_made_selections(window: int) -> None:
    """Every tensor is the same on the device as on the CPU."""
    bounds = [0, 100, 101, 3000, 3000, 4700]
    device = target_device()
    for here, there in (
        (
            dmattn.sliding_window(4700, window, device=device),
            dmattn.sliding_window(4700, window),
        ),
        (
            dmattn.packed_documents(bounds, window, device=device),
            dmattn.packed_documents(bounds, window),
        ),
    ):
        for a, b in zip(here.lists, there.lists, strict=True):
            assert torch.equal(a.cpu(), b)
