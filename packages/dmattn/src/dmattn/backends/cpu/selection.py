"""Selection of keys on the CPU, and lists of kept keys from the interval of each key.

Order: the higher score first, of equal scores the later key. NaN and -inf are never kept.
"""

import heapq
import math

import torch
from torch import Tensor

from dmattn.key_lists import (
    BLOCK_ROWS,
    KeyLists,
    Selection,
    best_keys,
    check_boundaries,
    num_blocks,
)

# Entries of lists that are put in order at a time, a few dozen bytes each.
_STEP_ENTRIES = 1 << 20


def select(
    scores: Tensor,
    window: int,
    seqlen_q: int,
    is_causal: bool,
    capacity: int,
    cu_seqlens: Tensor | None = None,
) -> Selection:
    """Keys to keep by `scores` ({B|1}, heads, Sk), any floating dtype, masked keys at -inf.

    `cu_seqlens`, int32 (documents + 1,): boundaries of documents, causal only.

    Raises:
        ValueError: cu_seqlens does not rise from 0 to Sk.
    """
    if not is_causal:
        return _best_of_all(scores, window, capacity)
    seqlen_k = scores.shape[2]
    if cu_seqlens is None:
        stops = [seqlen_k] * seqlen_k
    else:
        stops = document_ends(cu_seqlens, seqlen_k).tolist()
    rows = scores.flatten(0, 1).tolist()
    ends = [_running_top(row, window, stops) for row in rows]
    end = torch.tensor(ends, dtype=torch.int32).view(scores.shape)
    lists = interval_lists(end, seqlen_q, capacity)
    return Selection(end, lists.idx, lists.count, lists.full)


def document_ends(cu_seqlens: Tensor, seqlen_k: int) -> Tensor:
    """For each key the first one behind its document, int32 (Sk,).

    Raises:
        ValueError: cu_seqlens does not rise from 0 to Sk.
    """
    bounds = cu_seqlens.tolist()
    check_boundaries(bounds, seqlen_k)
    return torch.repeat_interleave(cu_seqlens[1:], cu_seqlens.diff()).to(torch.int32)


def _running_top(scores: list[float], window: int, stops: list[int]) -> list[int]:
    """For each key the first position past its own at which `window` better ones are known.

    Or at which its document stops, if that comes first.
    """
    heap: list[tuple[float, int]] = []
    end = stops.copy()
    stop = 0
    for j, score in enumerate(scores):
        if j == stop:
            heap.clear()
            stop = stops[j]
        if not score > -math.inf:
            end[j] = j
        elif len(heap) < window:
            heapq.heappush(heap, (score, j))
        else:
            _, lowest = heapq.heappushpop(heap, (score, j))
            end[lowest] = j
    return end


def _best_of_all(scores: Tensor, window: int, capacity: int) -> Selection:
    seqlen_k = scores.shape[2]
    keep = best_keys(scores, window)
    count = keep.sum(-1, keepdim=True, dtype=torch.int32)
    slot = (keep.cumsum(-1) - 1).masked_fill(~keep, capacity)
    idx = torch.zeros((*scores.shape[:2], capacity + 1), dtype=torch.int32)
    idx.scatter_(-1, slot, torch.arange(seqlen_k, dtype=torch.int32).expand(slot.shape))
    end = keep.to(torch.int32) * seqlen_k
    return Selection(end, idx[..., None, :capacity].contiguous(), count, count.new_empty(0))


def interval_lists(end: Tensor, seqlen_q: int, capacity: int, reach: int | None = None) -> KeyLists:
    """The lists that belong to `end`, in time and memory that follow the entries of all lists.

    Args:
        end: int32 (B, heads, Sk), contiguous.
        seqlen_q: Sq <= Sk; row i stands at position i + Sk - Sq.
        capacity: room of each list, a multiple of 128. A list that does not fit is left empty.
        reach: keys further than that before the first row of a block are not looked for; the
            largest end[j] - j, or None for Sk.
    """
    batch, heads, seqlen_k = end.shape
    blocks = num_blocks(seqlen_q, True)
    first_row = seqlen_k - seqlen_q
    idx = end.new_zeros((batch, heads, blocks, capacity))
    count, full, needed = (end.new_zeros((batch, heads, blocks)) for _ in range(3))
    # Counted from the first row: the rows that keep each key, and the last one that is looked at.
    key = torch.arange(seqlen_k)
    end_row = end.flatten(0, 1).to(torch.int64).clamp(max=seqlen_k) - first_row
    enter = (key - first_row).clamp(min=0)
    leave = end_row if reach is None else torch.minimum(end_row, key - first_row + reach)
    for head in range(batch * heads):
        lists = tuple(t.flatten(0, 1)[head] for t in (idx, count, full, needed))
        kept = (leave[head] > enter).nonzero().flatten()
        _fill_lists(
            KeyLists(*lists),
            kept,
            enter[kept],
            leave[head, kept],
            end_row[head, kept],
            seqlen_q,
        )
    return KeyLists(idx, count, full, needed)


def _fill_lists(
    lists: KeyLists, key: Tensor, enter: Tensor, leave: Tensor, end: Tensor, seqlen_q: int
) -> None:
    """Fill the lists of one head, whose `idx` is (blocks, capacity), all of it zero.

    Args:
        key: int64 (n,), ascending: the keys that any row keeps.
        enter, leave: int64 (n,): the rows for whose blocks each key is listed.
        end: int64 (n,): the row behind the last that keeps it.
    """
    first, last = enter // BLOCK_ROWS, (leave - 1) // BLOCK_ROWS
    entries = int((last - first + 1).sum())
    steps = min(lists.count.shape[0], -(-entries // _STEP_ENTRIES))
    for step in range(steps):
        low = step * lists.count.shape[0] // steps
        high = (step + 1) * lists.count.shape[0] // steps
        inside = ((first < high) & (last >= low)).nonzero().flatten()
        a, b = first[inside].clamp(min=low), last[inside].clamp(max=high - 1)
        # One entry for each of these keys and each block of rows that lists it.
        times = b - a + 1
        entry = torch.repeat_interleave(inside, times)
        place = torch.arange(len(entry)) - torch.repeat_interleave(times.cumsum(0) - times, times)
        block = torch.repeat_interleave(a, times) + place
        rows_end = ((block + 1) * BLOCK_ROWS).clamp(max=seqlen_q)
        some = (enter[entry] > block * BLOCK_ROWS) | (end[entry] < rows_end)
        # Stable: by block, in it those that all rows keep first, each ascending by key.
        where, order = (block * 2 + some).sort(stable=True)
        block, every = where // 2, where % 2 == 0
        part = slice(low, high)
        length = torch.bincount(block - low, minlength=high - low)
        slot = torch.arange(len(block)) - (length.cumsum(0) - length)[block - low]
        fits = length <= lists.idx.shape[1]
        shown = fits[block - low]
        lists.needed[part] = length.to(torch.int32)
        lists.count[part] = (length * fits).to(torch.int32)
        leading = torch.bincount(block[every] - low, minlength=high - low)
        lists.full[part] = (leading * fits).to(torch.int32)
        lists.idx[block[shown], slot[shown]] = key[entry[order]][shown].to(torch.int32)
