"""Selections made from intervals, windows and documents: attention uses the keys that they show."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import random_case
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_cases import check_lists
from torch import Tensor

from dmattn import KeySelection, flash_dmattn_func, packed_documents, sliding_window


def keep_of(end: Tensor, query_len: int) -> Tensor:
    """bool (B, heads, Sq, Sk) by the definition of the intervals."""
    key_len = end.shape[2]
    row = torch.arange(key_len - query_len, key_len)[:, None]
    return (torch.arange(key_len) <= row) & (row < end[:, :, None])


def assert_attends(selection: KeySelection) -> None:
    """Attention over the selection is attention under its mask."""
    rows, keys = selection.query_len, selection.end.shape[2]
    case = random_case(seqlen_q=rows, seqlen_k=keys)
    q, k, v = case.inputs[:3]
    got = flash_dmattn_func(q, k, v, is_causal=True, selection=selection)
    want = flash_dmattn_func(q, k, v, selection.to_mask())
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def causal(key_len: int) -> Tensor:
    return torch.ones(key_len, key_len, dtype=torch.bool).tril()


@given(
    lengths=st.sampled_from(((1, 1), (5, 9), (128, 130), (129, 129), (200, 300))),
    reach=st.one_of(st.none(), st.integers(1, 400)),
    dtype=st.sampled_from((torch.int32, torch.int64)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_intervals_of_any_numbers(
    lengths: tuple[int, int], reach: int | None, dtype: torch.dtype, seed: int
) -> None:
    """Interval ends are clamped to the range of positions, and to `reach` behind their keys."""
    torch.manual_seed(seed)
    query_len, key_len = lengths
    end = torch.arange(key_len) + torch.randint(-20, 350, (2, 1, key_len))
    far = torch.iinfo(dtype).max
    end = torch.where(torch.rand(end.shape) < 0.1, far, end)
    end = torch.where(torch.rand(end.shape) < 0.1, -far, end).to(dtype)
    selection = KeySelection.from_intervals(end, query_len, reach=reach)
    limit = key_len if reach is None else reach
    kept = keep_of(torch.minimum(end, torch.arange(key_len) + limit), query_len)
    assert torch.equal(selection.to_mask(), kept)
    assert int(selection.end.min()) >= 0 and int(selection.end.max()) <= key_len
    check_lists(selection, kept)
    assert_attends(selection)


@pytest.mark.parametrize("number", [2**31, 2**40, torch.iinfo(torch.int64).max])
def test_a_key_that_never_leaves(number: int) -> None:
    selection = KeySelection.from_intervals(torch.full((1, 1, 6), number))
    assert torch.equal(selection.to_mask()[0, 0], causal(6))
    assert_attends(selection)


def test_a_reach_that_is_too_small_is_what_the_selection_shows() -> None:
    selection = KeySelection.from_intervals(torch.arange(300)[None, None] + 250, reach=3)
    assert torch.equal(selection.end, sliding_window(300, 3).end)
    assert_attends(selection)


# --- windows and documents with padding -----------------------------------------------------------


def masks_of(padding: Tensor) -> list[Tensor]:
    """All the ways to write a padding mask, given as bool (B, Sk)."""
    four = padding[:, None, None]
    rows = four.expand(-1, 2, padding.shape[1], -1)
    return [padding, padding.long(), padding.to(torch.uint8), four, rows]


@pytest.mark.parametrize("way", range(5))
def test_sliding_window_with_padding(way: int) -> None:
    padding = torch.rand(2, 200) < 0.7
    selection = sliding_window(200, 60, attn_mask=masks_of(padding)[way])
    kept = causal(200) & ~causal(200).tril(-60) & padding[:, None, None]
    assert torch.equal(selection.to_mask().any(1), kept.any(1))
    assert torch.equal(selection.to_mask().all(1), kept.all(1))
    assert_attends(selection)


def test_one_row_of_queries_with_padding() -> None:
    padding = torch.rand(2, 50) < 0.7
    selection = sliding_window(50, 20, 1, attn_mask=padding)
    kept = (torch.arange(50) >= 30) & padding
    assert torch.equal(selection.to_mask(), kept[:, None, None])


@pytest.mark.parametrize("window", [None, 1, 30])
@pytest.mark.parametrize("bounds", [[0, 200], [0, 1, 130, 130, 200], list(range(201))])
def test_packed_documents_with_padding(bounds: list[int], window: int | None) -> None:
    padding = torch.rand(2, 200) < 0.7
    plain = packed_documents(bounds, window).to_mask()
    for given_ in (bounds, np.array(bounds), torch.tensor(bounds)):  # numpy: also its ints
        selection = packed_documents(given_, window, attn_mask=padding)
        assert torch.equal(selection.to_mask(), plain & padding[:, None, None])
    assert_attends(selection)


def ids_of(bounds: list[int]) -> Tensor:
    return torch.cat([torch.full((b - a,), n % 2) for n, (a, b) in enumerate(pairwise(bounds))])


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_documents_that_differ_between_rows(window: int | None, dtype: torch.dtype) -> None:
    """Each row is as if it were alone; an id that comes back later is another document."""
    rows = [[0, 90, 91, 200], [0, 1, 128, 150, 200]]
    ids = torch.stack([ids_of(bounds) for bounds in rows]).to(dtype)
    padding = torch.rand(2, 200) < 0.7
    selection = packed_documents(window_size=window, document_ids=ids, attn_mask=padding)
    for b, bounds in enumerate(rows):
        alone = packed_documents(bounds, window).to_mask()[0, 0]
        assert torch.equal(selection.to_mask()[b, 0], alone & padding[b])
    assert_attends(selection)
    known = packed_documents(window_size=window, document_ids=ids, max_seqlen=200)
    assert torch.equal(known.end, packed_documents(window_size=window, document_ids=ids).end)


@given(st.lists(st.integers(0, 2), min_size=0, max_size=12))
def test_documents_begin_where_the_id_changes(ids: list[int]) -> None:
    starts = [i for i, (a, b) in enumerate(pairwise([None, *ids])) if a != b]
    bounds = [*starts, len(ids)] if ids else [0]
    by_ids = packed_documents(document_ids=torch.tensor([ids], dtype=torch.int64))
    assert torch.equal(by_ids.end, packed_documents(bounds).end)


def test_room_follows_what_is_known_of_the_documents() -> None:
    bounds = list(range(0, 4097, 64))
    ids = torch.arange(4096)[None] // 64
    assert packed_documents(bounds).idx.shape[3] == 256
    assert packed_documents(document_ids=ids, max_seqlen=64).idx.shape[3] == 256
    assert packed_documents(document_ids=ids, window_size=64).idx.shape[3] == 256
    assert packed_documents(document_ids=ids).idx.shape[3] == 4096
    cut = packed_documents(document_ids=ids[:, :300], max_seqlen=10)
    assert torch.equal(cut.end, packed_documents([*range(0, 300, 64), 300], 10).end)


def test_no_keys() -> None:
    for selection in (
        sliding_window(0, 3),
        packed_documents([0]),
        packed_documents(document_ids=torch.zeros(2, 0, dtype=torch.int64)),
        KeySelection.from_intervals(torch.zeros(1, 1, 0, dtype=torch.int32), reach=4),
    ):
        assert selection.end.shape[2] == selection.query_len == 0


IDS = torch.zeros(2, 6, dtype=torch.int64)
OTHER = torch.ones(2, 6, dtype=torch.bool, device="meta")
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, ValueError, "cu_seqlens: got None, wanted either cu_seqlens or document_ids"),
    ({"cu_seqlens": [0, 6], "document_ids": IDS}, ValueError, "cu_seqlens: got boundaries beside"),
    ({"cu_seqlens": 5}, TypeError, r"cu_seqlens: got 5 \(int\), wanted a sequence of ints or"),
    ({"cu_seqlens": "06"}, TypeError, r"cu_seqlens: got '0' \(str\), wanted a sequence of ints"),
    ({"cu_seqlens": [0, None]}, TypeError, "cu_seqlens: got None, wanted a sequence of ints"),
    ({"cu_seqlens": [0, 2**31]}, ValueError, r"cu_seqlens: got .*, wanted rising .* 2\*\*31"),
    ({"cu_seqlens": [0, 5], "key_len": 6}, ValueError, "cu_seqlens: got .* from 0 to 6"),
    ({"cu_seqlens": [0, 6], "key_len": 6.0}, TypeError, "key_len: got 6.0"),
    (
        {"cu_seqlens": [0, 4, 6], "max_seqlen": 3},
        ValueError,
        "max_seqlen: got 3, wanted .* 4",
    ),
    ({"cu_seqlens": [0, 6], "window_size": 0}, ValueError, "window_size: got 0"),
    ({"cu_seqlens": [0, 6], "attn_mask": [[1] * 6]}, TypeError, "attn_mask: got .* wanted a torch"),
    ({"cu_seqlens": [0, 6], "attn_mask": IDS[:, :5]}, ValueError, r"attn_mask: got shape \(2, 5\)"),
    ({"cu_seqlens": [0, 6], "attn_mask": IDS.double()}, TypeError, "attn_mask: got dtype .*64"),
    ({"cu_seqlens": [0, 6], "attn_mask": OTHER, "device": "cpu"}, ValueError, "attn_mask: got dev"),
    ({"document_ids": [[0, 1]]}, TypeError, r"document_ids: got \[\[0, 1\]\] \(list\), wanted"),
    ({"document_ids": IDS.float()}, TypeError, "document_ids: got dtype torch.float32, wanted an"),
    ({"document_ids": IDS[0]}, ValueError, r"document_ids: got shape \(6,\), wanted \(batch, seq"),
    ({"document_ids": IDS, "key_len": 7}, ValueError, r"document_ids: got .*wanted \(batch, 7\)"),
    ({"document_ids": IDS, "attn_mask": IDS[[0, 0, 0]]}, ValueError, "attn_mask: got batch 3"),
]


@pytest.mark.parametrize("arguments, error, message", BAD)
def test_bad_documents(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        packed_documents(**arguments)


BAD_WINDOWS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"key_len": None}, TypeError, "key_len: got None, wanted an int of at least 0"),
    ({"key_len": -1}, ValueError, "key_len: got -1, wanted an int of at least 0"),
    ({"window_size": 2**63}, ValueError, "window_size: got 9223372036854775808"),
    ({"window_size": True}, TypeError, r"window_size: got True \(bool\)"),
    ({"query_len": math.nan}, TypeError, "query_len: got nan"),
    ({"attn_mask": torch.ones(1, 1, 6, 6).bool()}, ValueError, "dmattn.top_window_mask"),
    ({"attn_mask": torch.ones(2, 1, 1, 6).int()}, TypeError, r"attn_mask: got .* mask.bool\(\)"),
    (
        {"attn_mask": torch.ones(2, 6).bool().to_sparse()},
        ValueError,
        "attn_mask: got .*sparse",
    ),
]


@pytest.mark.parametrize("changes, error, message", BAD_WINDOWS)
def test_bad_windows(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sliding_window(**({"key_len": 6, "window_size": 2} | changes))


def test_numbers_of_numpy() -> None:
    window = sliding_window(np.int64(50), np.int32(7), np.int64(20))  # type: ignore[arg-type]
    assert torch.equal(window.end, sliding_window(50, 7, 20).end) and window.query_len == 20
    ends = torch.arange(1, 51)[None, None]
    assert KeySelection.from_intervals(ends, np.int64(20)).query_len == 20  # type: ignore[arg-type]


def test_what_is_known_of_a_selection_without_reading_it() -> None:
    """Backends rely on it: `keeps_own` is not claimed where a row's own key may be hidden."""
    mask = torch.tensor([[True, True, False, True, True, True, True]])
    bounds = torch.tensor([0, 3, 7])
    for masked in (None, mask):
        for found in (
            sliding_window(7, 3, attn_mask=masked),
            packed_documents(bounds, attn_mask=masked),
            packed_documents(bounds, 2, attn_mask=masked),
            packed_documents(document_ids=torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), attn_mask=masked),
        ):
            own = found.to_mask().diagonal(dim1=-2, dim2=-1)
            assert found.keeps_own == bool(own.all()) == (masked is None)
    assert sliding_window(7, 3).is_sliding and not sliding_window(7, 3, attn_mask=mask).is_sliding
    unread = packed_documents(bounds.to("meta"), key_len=7, max_seqlen=4)
    assert not unread.keeps_own
