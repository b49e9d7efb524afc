"""Lists of kept keys, one for each block of query rows, from the interval of each key.

Key j is kept by the rows at positions j <= r < end[j]. The list of a block holds the keys that any
of its rows keeps: those that all of them keep first, then the others, both ascending.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Query rows that share a list, and what the room for its entries is a multiple of.
BLOCK_ROWS = 128
# Elements of the largest intermediate array of a step.
_STEP_ELEMENTS = 1 << 20


class Selection(NamedTuple):
    """The kept keys as the operators take them, all int32 and contiguous."""

    end: Tensor  # ({B|1}, heads, Sk)
    idx: Tensor  # ({B|1}, heads, blocks, capacity); zeros past its count
    counts: Tensor  # ({B|1}, heads, blocks)
    full: Tensor  # as counts: the leading entries that every row keeps; (0,) when not causal


class KeyLists(NamedTuple):
    """What `interval_lists` makes: the lists of a `Selection`, and how long they have to be."""

    idx: Tensor
    counts: Tensor
    full: Tensor
    needed: Tensor  # int32, as counts: entries of each list, whether it fits or not


class _Step(NamedTuple):
    blocks: slice
    key: Tensor  # (n, width) int64: candidates of each block
    listed: Tensor  # bool (B, heads, n, width): some row keeps the key
    every: Tensor  # bool (B, heads, n, width): every row does


def as_selection(
    end: Tensor | None, idx: Tensor | None, count: Tensor | None, full: Tensor | None
) -> Selection | None:
    """The optional tensors of an operator as one thing."""
    if end is None or idx is None or count is None or full is None:
        return None
    return Selection(end.contiguous(), idx.contiguous(), count.contiguous(), full.contiguous())


def num_blocks(seqlen_q: int, is_causal: bool) -> int:
    """Lists for `seqlen_q` rows; one serves all of them when not causal."""
    return (seqlen_q + BLOCK_ROWS - 1) // BLOCK_ROWS if is_causal else 1


def capacity_for(most: int, seqlen_k: int) -> int:
    """Room for lists of at most `most` of `seqlen_k` keys."""
    return (min(most, seqlen_k) + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS


def interval_lists(end: Tensor, seqlen_q: int, capacity: int, reach: int | None = None) -> KeyLists:
    """The lists that belong to `end`, by torch operations.

    Args:
        end: int32 (B, heads, Sk), contiguous.
        seqlen_q: Sq <= Sk; row i stands at position i + Sk - Sq.
        capacity: room of each list, a multiple of 128. A list that does not fit is left empty.
        reach: keys further than that before the first row of a block are not looked for; the
            largest end[j] - j, or None for Sk.
    """
    batch, heads, _ = end.shape
    blocks = num_blocks(seqlen_q, True)
    idx = end.new_zeros((batch, heads, blocks, capacity))
    full = end.new_zeros((batch, heads, blocks))
    needed = torch.zeros_like(full)
    for step in _steps(end, seqlen_q, reach):
        leading = step.every.sum(-1)
        needed[:, :, step.blocks] = step.listed.sum(-1)
        full[:, :, step.blocks] = leading
        if capacity == 0:
            continue
        behind = leading[..., None] + (step.listed & ~step.every).cumsum(-1)
        slot = torch.where(step.every, step.every.cumsum(-1), behind) - 1
        # Entries that are cut off below: of keys that are not listed, or beyond the capacity.
        slot = slot.masked_fill(~step.listed, capacity).clamp(max=capacity)
        rows = end.new_zeros((*slot.shape[:-1], capacity + 1))
        rows.scatter_(-1, slot, step.key.to(torch.int32).expand(slot.shape))
        idx[:, :, step.blocks] = rows[..., :capacity]
    too_long = needed > capacity
    idx.masked_fill_(too_long[..., None], 0)
    return KeyLists(idx, needed.masked_fill(too_long, 0), full.masked_fill(too_long, 0), needed)


def _steps(end: Tensor, seqlen_q: int, reach: int | None) -> Iterator[_Step]:
    batch, heads, seqlen_k = end.shape
    reach = seqlen_k if reach is None else max(1, min(reach, seqlen_k))
    width = reach + BLOCK_ROWS - 1
    blocks = num_blocks(seqlen_q, True)
    stride = max(1, _STEP_ELEMENTS // max(1, batch * heads * width))
    for start in range(0, blocks, stride):
        stop = min(start + stride, blocks)
        first = torch.arange(start, stop, device=end.device)[:, None] * BLOCK_ROWS
        first = first + (seqlen_k - seqlen_q)
        last = (first + BLOCK_ROWS - 1).clamp(max=seqlen_k - 1)
        key = first - reach + 1 + torch.arange(width, device=end.device)
        key_end = end[:, :, key.clamp(0, seqlen_k - 1)]
        listed = (key >= 0) & (key <= last) & (key_end > torch.maximum(key, first))
        every = listed & (key <= first) & (key_end > last)
        yield _Step(slice(start, stop), key, listed, every)
