"""Selection of keys on the CPU.

Order: the higher score first, of equal scores the later key. NaN and -inf are never kept.
"""

import heapq
import math

import torch
from torch import Tensor

from dmattn.key_lists import Selection, interval_lists


def select(
    scores: Tensor,
    window: int,
    seqlen_q: int,
    is_causal: bool,
    capacity: int,
    cu_seqlens: Tensor | None = None,
) -> Selection:
    """Keys to keep by `scores` ({B|1}, heads, Sk), any floating dtype, masked keys at -inf.

    `cu_seqlens`, int32 (documents + 1,): boundaries of documents, causal only. Keys behind the
    last one count as one more document.
    """
    if not is_causal:
        return _best_of_all(scores, window, capacity)
    stops = _document_stops(cu_seqlens, scores.shape[2])
    rows = scores.flatten(0, 1).tolist()
    ends = [_running_top(row, window, stops) for row in rows]
    end = torch.tensor(ends, dtype=torch.int32).view(scores.shape)
    lists = interval_lists(end, seqlen_q, capacity)
    return Selection(end, lists.idx, lists.counts, lists.full)


def _document_stops(cu_seqlens: Tensor | None, seqlen_k: int) -> list[int]:
    """For each key the first one behind its document."""
    if cu_seqlens is None:
        return [seqlen_k] * seqlen_k
    bounds = torch.cat((cu_seqlens, cu_seqlens.new_tensor([seqlen_k])))
    key = torch.arange(seqlen_k, dtype=cu_seqlens.dtype)
    stops = bounds[torch.searchsorted(cu_seqlens, key, right=True)]
    # Whatever the boundaries are, a key is seen by its own row, and by none that is not there.
    in_range: list[int] = stops.clamp(max=seqlen_k).maximum(key + 1).tolist()
    return in_range


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
    usable = scores > -math.inf
    ranked = scores.masked_fill(~usable, -math.inf)
    # Stable, over the reversed keys: of equal scores the later key comes first.
    order = seqlen_k - 1 - ranked.flip(-1).argsort(dim=-1, descending=True, stable=True)
    keep = torch.zeros_like(usable).scatter_(-1, order[..., :window], True) & usable
    count = keep.sum(-1, keepdim=True, dtype=torch.int32)
    slot = (keep.cumsum(-1) - 1).masked_fill(~keep, capacity)
    idx = torch.zeros((*scores.shape[:2], capacity + 1), dtype=torch.int32)
    idx.scatter_(-1, slot, torch.arange(seqlen_k, dtype=torch.int32).expand(slot.shape))
    end = keep.to(torch.int32) * seqlen_k
    return Selection(end, idx[..., None, :capacity].contiguous(), count, count.new_empty(0))
