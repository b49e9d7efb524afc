"""Documents packed one behind the other: selection by score within each, and lists of intervals."""

import re
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from attention_cases import random_case
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_cases import KINDS, brute_force, check_lists, make_scores
from torch import Tensor
from torch.library import opcheck

from dmattn import KeySelection, flash_dmattn_func, packed_documents, select_keys
from dmattn.backends.cpu import selection as cpu
from dmattn.backends.cuda import selection as cuda
from dmattn.key_lists import Selection, best_keys, without_spare_lists
from dmattn.ops.selection import build_key_lists, document_ends
from dmattn.ops.selection import select_keys as select


def keep_within(
    scores: Tensor, window: int, bounds: list[int], key_mask: Tensor | None = None
) -> Tensor:
    """bool (B, H, Sk, Sk): each document by itself."""
    batch, heads, key_len = scores.shape
    keep = torch.zeros(batch, heads, key_len, key_len, dtype=torch.bool)
    for a, b in pairwise(bounds):
        part = None if key_mask is None else key_mask[..., a:b]
        keep[:, :, a:b, a:b] = brute_force(scores[..., a:b], window, b - a, True, part)
    return keep


def assert_selects(
    scores: Tensor, window: int, bounds: list[int], attn_mask: Tensor | None = None
) -> KeySelection:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    selection = select_keys(scores, window, attn_mask=attn_mask, cu_seqlens=cu_seqlens)
    key_mask = None if attn_mask is None else attn_mask[:, :, 0]
    keep = keep_within(scores, window, bounds, key_mask)
    assert torch.equal(selection.to_mask().expand(keep.shape), keep)
    check_lists(selection, keep)
    return selection


@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.sampled_from((0, 1, 2, 30, 127, 128, 129, 200)), min_size=1, max_size=5),
    window=st.integers(1, 260),
    masked=st.sampled_from((None, (2, 1), (1, 2), (2, 2))),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_equals_brute_force(
    kind: str,
    lengths: list[int],
    window: int,
    masked: tuple[int, int] | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    bounds = [0, *accumulate(lengths)]
    key_len = bounds[-1]
    scores = make_scores(kind, 2, 2, key_len).to(dtype)
    mask = None if masked is None else torch.rand(*masked, 1, key_len) < 0.7
    assert_selects(scores, min(window, key_len + 1), bounds, mask)


@pytest.mark.parametrize("kind", KINDS)
def test_every_window(kind: str) -> None:
    for window in range(1, 15):
        assert_selects(make_scores(kind, 1, 2, 13), window, [0, 0, 4, 5, 13])


@pytest.mark.parametrize("edge", [1, 127, 128, 129, 255, 256, 257])
def test_documents_that_end_at_the_edges_of_blocks(edge: int) -> None:
    for window in (1, 100, 128, 400):
        assert_selects(make_scores("tied", 1, 2, 400), window, [0, edge, 400])


def test_every_key_a_document() -> None:
    selection = assert_selects(torch.randn(1, 1, 140), 3, list(range(141)))
    assert torch.equal(selection.end[0, 0], torch.arange(1, 141, dtype=torch.int32))


def test_one_document_is_no_document() -> None:
    scores, mask = torch.randn(2, 2, 300), torch.rand(2, 1, 1, 300) < 0.7
    plain = select_keys(scores, 40, attn_mask=mask)
    for bounds in ([0, 300], [0, 0, 300, 300]):
        packed = select_keys(scores, 40, attn_mask=mask, cu_seqlens=bounds)
        for a, b in zip(plain.lists, packed.lists, strict=True):
            assert torch.equal(a, b)


def test_constant_scores_slide_within_documents() -> None:
    bounds = [0, 7, 140, 141, 300]
    selected = select_keys(torch.zeros(1, 1, 300), 30, cu_seqlens=bounds)
    assert torch.equal(selected.end, packed_documents(bounds, 30).end)


def test_ways_to_write_the_boundaries() -> None:
    scores, bounds = torch.randn(1, 2, 50), [0, 20, 20, 50]
    selections = [
        select_keys(scores, 9, cu_seqlens=x)
        for x in (bounds, tuple(bounds), torch.tensor(bounds), torch.tensor(bounds).int())
    ]
    for other in selections[1:]:
        assert torch.equal(other.end, selections[0].end)
        assert torch.equal(other.idx, selections[0].idx)


def test_lists_hold_at_most_the_window_and_a_block() -> None:
    """The longest list: the keys of a block's first row, which all leave, and 127 that enter."""
    for edge in (200, 256, 257, 300):
        scores = torch.linspace(1, 0, 600).sigmoid()[None, None]
        selection = assert_selects(scores, 200, [0, edge, edge + 50, 600])
        assert int(selection.count.max()) <= 200 + 127 <= selection.idx.shape[3]


def test_attention_within_documents() -> None:
    case = random_case(seqlen_q=200, seqlen_k=200, bias_shape=(2, 2, 1, 200))
    q, k, v, _, bias = case.inputs
    bounds = [0, 90, 130, 200]
    selection = select_keys(bias, 25, cu_seqlens=bounds)
    got = flash_dmattn_func(q, k, v, None, bias, is_causal=True, selection=selection)
    for a, b in pairwise(bounds):
        part = flash_dmattn_func(
            q[:, a:b],
            k[:, a:b],
            v[:, a:b],
            attn_bias=bias[..., a:b],
            is_causal=True,
            window_size=25,
        )
        torch.testing.assert_close(got[:, a:b], part, rtol=0, atol=1e-13)


@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    window=st.integers(1, 10),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_best_keys_of_each_sequence(
    kind: str, lengths: list[int], window: int, masked: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    bounds = [0, *accumulate(lengths)]
    scores = make_scores(kind, 2, 2, bounds[-1])
    mask = torch.rand(2, 1, bounds[-1]) < 0.7 if masked else None
    sequence = torch.repeat_interleave(torch.tensor(lengths))
    keep = best_keys(scores, window, mask, sequence)
    for a, b in pairwise(bounds):
        part = None if mask is None else mask[..., a:b]
        want = brute_force(scores[..., a:b], window, 1, False, part)[:, :, 0]
        assert torch.equal(keep[..., a:b], want)
        assert torch.equal(best_keys(scores[..., a:b], window, part), want)


@pytest.mark.parametrize("masked", [False, True])
def test_operator(masked: bool) -> None:
    mask = torch.rand(2, 1, 140) < 0.5 if masked else None
    bounds = torch.tensor([0, 50, 51, 140], dtype=torch.int32)
    opcheck(torch.ops.dmattn.select_keys, (torch.randn(1, 2, 140), mask, 9, 140, True, bounds))


def test_operator_that_ends_documents() -> None:
    opcheck(torch.ops.dmattn.document_ends, (torch.tensor([0, 3, 3, 9], dtype=torch.int32), 9))


@pytest.mark.parametrize("wrong", [[0, 5], [0, 7], [1, 6], [0, 4, 2, 6], [6], [-3, 6]])
def test_operators_refuse_wrong_boundaries_on_the_cpu(wrong: list[int]) -> None:
    bounds = torch.tensor(wrong, dtype=torch.int32)
    message = r"cu_seqlens: got .*, wanted rising from 0 to 6$"
    with pytest.raises(ValueError, match=message):
        select(SCORES, None, 2, 6, True, bounds)
    with pytest.raises(ValueError, match=message):
        document_ends(bounds, 6)


@pytest.mark.parametrize(
    "bounds,got",
    [
        ([0, 2, 5], "[0, 2, 5], wanted rising from 0 to 6"),
        ([0, 1, 2, 3, 9, 8, 10], "8 at index 5 behind 9, wanted rising"),
        ([0, 1, 2, 3, 4, 5, 7], "[0, ..., 7], wanted rising from 0 to 6"),
    ],
)
def test_wrong_boundaries_are_shown(bounds: list[int], got: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"cu_seqlens: got {got}")):
        select_keys(SCORES[:, :, None], 2, cu_seqlens=bounds)


@given(st.lists(st.integers(-5, 40), min_size=1, max_size=6))
def test_ends_of_documents_without_waiting(bounds: list[int]) -> None:
    """The function for CUDA reads no values; wrong boundaries still give ends among the keys."""
    ends = cuda.document_ends(torch.tensor(bounds, dtype=torch.int32), 30)
    assert ends.dtype == torch.int32
    assert bool((ends > torch.arange(30)).all()) and int(ends.max()) <= 30
    right = torch.tensor(sorted({0, 30, *(b for b in bounds if 0 < b < 30)}), dtype=torch.int32)
    assert torch.equal(cuda.document_ends(right, 30), cpu.document_ends(right, 30))


SCORES = torch.zeros(2, 2, 6)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cu_seqlens": [0, 4]}, ValueError, r"cu_seqlens: got .*, wanted rising from 0 to 6"),
    ({"cu_seqlens": [0, 4, 2, 6]}, ValueError, "cu_seqlens: got"),
    ({"cu_seqlens": [1, 6]}, ValueError, "cu_seqlens: got"),
    ({"cu_seqlens": torch.tensor([0, 7])}, ValueError, "cu_seqlens: got"),
    ({"cu_seqlens": []}, ValueError, "cu_seqlens: got no boundary"),
    ({"cu_seqlens": [0.0, 6.0]}, TypeError, r"cu_seqlens: got 0.0 \(float\), wanted a seq"),
    ({"cu_seqlens": torch.tensor([0.0, 6.0])}, TypeError, "cu_seqlens: got dtype torch.float32"),
    ({"cu_seqlens": torch.tensor(6)}, ValueError, r"cu_seqlens: got shape \(\), wanted"),
    ({"cu_seqlens": torch.tensor([[0, 6]])}, ValueError, r"cu_seqlens: got shape \(1, 2\), wanted"),
    ({"cu_seqlens": [0, 6], "is_causal": False}, ValueError, "cu_seqlens: got boundaries"),
    ({"cu_seqlens": [0, 6], "query_len": 5}, ValueError, "query_len: got 5, wanted 6"),
]


@pytest.mark.parametrize("changes, error, message", BAD)
def test_bad_documents(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        select_keys(SCORES, 2, **changes)


BAD_OPERANDS: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((torch.tensor([0, 6]), 6, True), TypeError, "cu_seqlens: got dtype torch.int64, wanted"),
    ((torch.tensor([[0, 6]]).int(), 6, True), ValueError, r"cu_seqlens: got shape \(1, 2\)"),
    ((torch.tensor([0, 6]).int(), 6, False), ValueError, "cu_seqlens: got boundaries"),
    ((torch.tensor([0, 6]).int(), 5, True), ValueError, "seqlen_q: got 5, wanted 6"),
]


@pytest.mark.parametrize("given_, error, message", BAD_OPERANDS)
def test_bad_operands(given_: tuple[Any, ...], error: type[Exception], message: str) -> None:
    cu_seqlens, seqlen_q, is_causal = given_
    with pytest.raises(error, match=message):
        select(SCORES, None, 2, seqlen_q, is_causal, cu_seqlens)


# --- lists of intervals ---------------------------------------------------------------------------


def some_intervals(key_len: int, longest: int) -> Tensor:
    end = torch.arange(key_len) + torch.randint(-2, longest + 1, (2, 3, key_len))
    return end.to(torch.int32)


def keep_of(end: Tensor, query_len: int) -> Tensor:
    key_len = end.shape[2]
    row = torch.arange(key_len - query_len, key_len)[:, None]
    return (torch.arange(key_len) <= row) & (row < end[:, :, None])


@pytest.mark.parametrize("lengths", [(1, 1), (127, 127), (129, 129), (300, 400), (400, 400)])
@pytest.mark.parametrize("reach", [None, 60, 200])
def test_lists_of_intervals(lengths: tuple[int, int], reach: int | None) -> None:
    query_len, key_len = lengths
    end = some_intervals(key_len, reach or 500)
    capacity = -(-min((reach or 500) + 127, key_len) // 128) * 128
    lists = build_key_lists(end, query_len, capacity, reach)
    selection = KeySelection(end, lists.idx, lists.count, lists.full, None, True, query_len)
    check_lists(selection, keep_of(end, query_len))
    assert torch.equal(lists.needed, lists.count)


def test_lists_that_do_not_fit_are_empty() -> None:
    end = torch.full((1, 2, 300), 300, dtype=torch.int32)
    end[:, 1, ::3] = 0  # few enough for the second head's first blocks
    needed = build_key_lists(end, 300, 0, None).needed
    assert needed.tolist() == [[[128, 256, 300], [85, 170, 200]]]
    lists = build_key_lists(end, 300, 128, None)
    assert torch.equal(lists.needed, needed)
    assert lists.count.tolist() == [[[128, 0, 0], [85, 0, 0]]]
    assert lists.full.tolist() == [[[1, 0, 0], [0, 0, 0]]]
    assert lists.idx[0, 0, 0].tolist() == list(range(128))
    assert not lists.idx[:, :, 1:].any()


def test_keys_beyond_reach_are_not_looked_for() -> None:
    end = torch.full((1, 1, 400), 400, dtype=torch.int32)
    lists = build_key_lists(end, 400, 256, 50)
    assert lists.count.tolist() == [[[128, 177, 177, 65]]]
    assert sorted(lists.idx[0, 0, 1, :177].tolist()) == list(range(79, 256))


def test_list_operator() -> None:
    for capacity, reach in ((0, 0), (128, 0), (256, 70)):
        opcheck(torch.ops.dmattn.build_key_lists, (some_intervals(200, 70), 150, capacity, reach))


def test_more_lists_than_blocks() -> None:
    """A compiler that does not know the number of blocks asks for more lists; those are empty."""
    bias = torch.randn(2, 2, 90)
    select_four = torch.ops.dmattn.select_keys
    few, many = select(bias, None, 9, 90, True), select_four(bias, None, 9, 90, True, None, 4)
    assert [t.shape[2] for t in many] == [90, 4, 4, 4]
    assert not many[2][:, :, 1:].any() and not many[3][:, :, 1:].any()
    for a, b in zip(few, without_spare_lists(Selection(*many), 90, True), strict=True):
        assert torch.equal(a, b) and b.is_contiguous()
    built = torch.ops.dmattn.build_key_lists(few.end, 90, 128, 9, 3)
    assert [t.shape[2] for t in built] == [3] * 4 and torch.equal(built[1][:, :, :1], few.count)
    with pytest.raises(ValueError, match="lists: got 1, wanted at least 2"):
        select_four(torch.randn(1, 1, 200), None, 9, 200, True, None, 1)
    opcheck(select_four, (bias, None, 9, 90, True, None, 4))
    opcheck(torch.ops.dmattn.build_key_lists, (few.end, 90, 128, 9, 3))


INT = torch.zeros(1, 1, 6, dtype=torch.int32)
BAD_LISTS: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((INT[0], 6, 128, 0), ValueError, r"end: got shape \(1, 6\), wanted"),
    ((INT.long(), 6, 128, 0), TypeError, "end: got dtype torch.int64, wanted torch.int32"),
    ((INT, 7, 128, 0), ValueError, "seqlen_q: got 7, wanted 0 to 6"),
    ((INT, 6, 100, 0), ValueError, "capacity: got 100, wanted a multiple of 128"),
    ((INT, 6, 128, -1), ValueError, "reach: got -1, wanted at least 1"),
]


@pytest.mark.parametrize("arguments, error, message", BAD_LISTS)
def test_bad_lists(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_key_lists(*arguments)
