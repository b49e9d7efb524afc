"""Selection of keys on the CPU.

Order: the higher score first, of equal scores the later key. NaN and -inf are never kept.
"""

import heapq
import math

import torch
from torch import Tensor

from dmattn.ops.lists import Selection, interval_lists


def select(scores: Tensor, window: int, seqlen_q: int, is_causal: bool, capacity: int) -> Selection:
    """Keys to keep by `scores` ({B|1}, heads, Sk), any floating dtype, masked keys at -inf."""
    if not is_causal:
        return _best_of_all(scores, window, capacity)
    rows = scores.flatten(0, 1).tolist()
    ends = [_running_top(row, window) for row in rows]
    end = torch.tensor(ends, dtype=torch.int32).view(scores.shape)
    return interval_lists(end, seqlen_q, capacity)


def _running_top(scores: list[float], window: int) -> list[int]:
    """For each key the first position past its own at which `window` better ones are known."""
    heap: list[tuple[float, int]] = []
    end = [len(scores)] * len(scores)
    for j, score in enumerate(scores):
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
