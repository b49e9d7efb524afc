"""Selection of keys by operations of torch, and lists of kept keys from the interval of each key.

For the CPU, and for GPUs that the compiled kernels do not serve. All tensors stay on the device of
the input, but running top-w is computed on the host, which waits for the scores.

A key is better than another if its score is higher, or if the scores are equal and it is later.
Keys with a score of NaN or -inf are never kept.
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

# How many entries of lists are sorted at a time; each takes a few dozen bytes meanwhile.
_STEP_ENTRIES = 1 << 20


def select(
    scores: Tensor,
    window: int,
    seqlen_q: int,
    is_causal: bool,
    capacity: int,
    cu_seqlens: Tensor | None = None,
) -> Selection:
    """The implementation of dmattn::select_keys for devices without kernels.

    Args:
        scores: ({B|1}, heads, Sk), any floating dtype, -inf for masked keys.
        window: number of keys to keep.
        seqlen_q: Sq.
        is_causal: whether each row chooses among the keys up to its position.
        capacity: room of each list, a multiple of 128.
        cu_seqlens: int32 (documents + 1,), boundaries of documents, causal only; or None.

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
    end = torch.tensor(ends, dtype=torch.int32, device=scores.device).view(scores.shape)
    lists = interval_lists(end, seqlen_q, capacity)
    return Selection(end, lists.idx, lists.count, lists.full)


def document_ends(cu_seqlens: Tensor, seqlen_k: int) -> Tensor:
    """The CPU implementation of dmattn::document_ends; for a tensor on a GPU the host waits.

    Returns, for each key, the index of the first key after its document, int32 (Sk,).

    Raises:
        ValueError: cu_seqlens does not rise from 0 to Sk.
    """
    bounds = cu_seqlens.tolist()
    check_boundaries(bounds, seqlen_k)
    return torch.repeat_interleave(cu_seqlens[1:], cu_seqlens.diff()).to(torch.int32)


def _running_top(scores: list[float], window: int, stops: list[int]) -> list[int]:
    """The interval end of each key under running top-w.

    That is the first position at which `window` better keys are known, among those of the same
    document up to that position; or the end of the document, if that comes first. For a score of
    NaN or -inf it is the key's own index. `stops`: for each key the end of its document.
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
    idx = count.new_zeros((*scores.shape[:2], capacity + 1))
    key = torch.arange(seqlen_k, dtype=torch.int32, device=scores.device)
    idx.scatter_(-1, slot, key.expand(slot.shape))
    end = keep.to(torch.int32) * seqlen_k
    return Selection(end, idx[..., None, :capacity].contiguous(), count, count.new_empty(0))


def interval_lists(end: Tensor, seqlen_q: int, capacity: int, reach: int | None = None) -> KeyLists:
    """The implementation of dmattn::build_key_lists for devices without kernels.

    Time and memory grow with the number of entries of all lists. On a GPU the host waits several
    times for each head.

    Args:
        end: int32 (B, heads, Sk), contiguous.
        seqlen_q: Sq <= Sk; row i stands at position i + Sk - Sq.
        capacity: room of each list, a multiple of 128. A list that does not fit is left empty.
        reach: the largest end[j] - j, or None if it is unknown. For a block of rows, keys further
            than this before its first row are not searched.
    """
    batch, heads, seqlen_k = end.shape
    blocks = num_blocks(seqlen_q, True)
    first_row = seqlen_k - seqlen_q
    idx = end.new_zeros((batch, heads, blocks, capacity))
    count, full, needed = (end.new_zeros((batch, heads, blocks)) for _ in range(3))
    # As row indices: `enter` is the first row that keeps a key, `end_row` the first one that does
    # not any more, and `leave` the same, but limited by `reach`.
    key = torch.arange(seqlen_k, device=end.device)
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
    """Fill the lists of one head, whose `idx` is (blocks, capacity) and holds zeros.

    Args:
        key: int64 (n,), ascending: the keys that any row keeps.
        enter, leave: int64 (n,): each key is listed for the blocks of the rows enter .. leave - 1.
        end: int64 (n,): the first row, after those that keep the key, that does not keep it.
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
        place = torch.arange(len(entry), device=key.device)
        place -= torch.repeat_interleave(times.cumsum(0) - times, times)
        block = torch.repeat_interleave(a, times) + place
        rows_end = ((block + 1) * BLOCK_ROWS).clamp(max=seqlen_q)
        some = (enter[entry] > block * BLOCK_ROWS) | (end[entry] < rows_end)
        # A stable sort: by block, in each block the keys that all rows keep first, and within both
        # groups in ascending order of the keys.
        where, order = (block * 2 + some).sort(stable=True)
        block, every = where // 2, where % 2 == 0
        part = slice(low, high)
        length = torch.bincount(block - low, minlength=high - low)
        slot = torch.arange(len(block), device=key.device)
        slot -= (length.cumsum(0) - length)[block - low]
        fits = length <= lists.idx.shape[1]
        shown = fits[block - low]
        lists.needed[part] = length.to(torch.int32)
        lists.count[part] = (length * fits).to(torch.int32)
        leading = torch.bincount(block[every] - low, minlength=high - low)
        lists.full[part] = (leading * fits).to(torch.int32)
        lists.idx[block[shown], slot[shown]] = key[entry[order]][shown].to(torch.int32)
