"""Which blocks of rows keep keys of which blocks of keys, without a look at each pair.

Keys are hidden by an interval per row, by an interval per key, or by a mask. For intervals, the
least and greatest bounds within a block say whether two blocks can have a pair that is kept, and
whether all pairs are kept. Only a mask with rows and keys is read entry by entry. A pair of blocks
that is listed as partial may turn out to keep nothing; one that is listed as full keeps every pair.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.backends.flex.operands import Arranged

BLOCK = 128  # rows and keys of a block, FlexAttention's own default


class BlockTable(NamedTuple):
    """Blocks of keys for each block of rows, as FlexAttention's BlockMask takes them, int32."""

    partial_num: Tensor  # ({B|1}, {H|1}, row blocks)
    partial_idx: Tensor  # ({B|1}, {H|1}, row blocks, key blocks)
    full_num: Tensor  # shape of partial_num; of blocks in which every row keeps every key
    full_idx: Tensor  # shape of partial_idx


def block_table(given: Arranged) -> BlockTable | None:
    """The table of blocks of a problem; None if every row keeps every key."""
    hiding = (given.last, given.first, given.mask)
    if not given.diagonal and all(t is None for t in hiding):
        return None
    some, full = _meeting(given)
    partial_num, partial_idx = _listed(some & ~full)
    full_num, full_idx = _listed(full)
    return BlockTable(partial_num, partial_idx, full_num, full_idx)


def _meeting(given: Arranged) -> tuple[Tensor, Tensor]:
    """Two bool ({B|1}, {H|1}, row blocks, key blocks): may any pair be kept, are all pairs kept."""
    heads, seqlen_q, seqlen_k = given.q.shape[1], given.q.shape[2], given.k.shape[2]
    device = given.q.device
    start = torch.arange(0, seqlen_k, BLOCK, device=device)
    stop = (start + BLOCK - 1).clamp(max=seqlen_k - 1)
    row_start = torch.arange(0, seqlen_q, BLOCK, device=device)[:, None]
    # A block that reaches beyond the last row or key is never full: mask_mod tests its pairs.
    full = ((row_start + BLOCK <= seqlen_q) & (start + BLOCK <= seqlen_k))[None, None]
    some = torch.ones_like(full)
    last = given.last_keys
    if last is not None:
        least, most = (t[:, None] for t in _bounds(last))
        some, full = some & (most >= start), full & (least >= stop)
    if given.window > 0:
        assert last is not None
        least, most = (t[:, None] for t in _bounds(last))
        some, full = some & (least - stop < given.window), full & (most - start < given.window)
    if given.first is not None:
        least, most = (t[:, None] for t in _bounds(given.first))
        some, full = some & (least <= stop), full & (most <= start)
    if given.end is not None:
        assert last is not None
        least, most = (t[:, None] for t in _bounds(last))
        least_end, most_end = (_by_head(t[:, :, None], heads) for t in _bounds(given.end))
        some, full = some & (least < most_end), full & (most < least_end)
    if given.mask is not None:
        any_kept, all_kept = _mask_bounds(given, given.mask, len(start))
        some, full = some & _by_head(any_kept, heads), full & _by_head(all_kept, heads)
    return some, full & some


def _mask_bounds(given: Arranged, mask: Tensor, key_blocks: int) -> tuple[Tensor, Tensor]:
    """Whether any, and whether all, entries of each block of a mask are True.

    Two bool tensors, of size 1 in dimensions in which the mask has size 1.
    """
    if given.packed_rows[0]:
        # Columns count from the first key of each row's sequence, so a block of keys is no block of
        # columns.
        kept = mask.any(-1, keepdim=True)
        return _bounds(kept, 2)[1], kept.new_zeros((1, 1, 1, key_blocks))
    least = most = mask
    for dim in (3, 2):
        if mask.shape[dim] > 1:
            least, most = _bounds(least, dim)[0], _bounds(most, dim)[1]
    return most, least


def _bounds(t: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """The least and the greatest entry of each block along a dimension."""
    t = t.transpose(dim, -1)
    extra = -t.shape[-1] % BLOCK
    if extra:  # repeat the last entry, which changes neither the least nor the greatest
        t = torch.cat([t, t[..., -1:].expand(*t.shape[:-1], extra)], -1)
    blocks = torch.unflatten(t, -1, (-1, BLOCK))
    if t.dtype == torch.bool:
        return blocks.all(-1).transpose(dim, -1), blocks.any(-1).transpose(dim, -1)
    return blocks.amin(-1).transpose(dim, -1), blocks.amax(-1).transpose(dim, -1)


def _by_head(t: Tensor, heads: int) -> Tensor:
    """A table per key head, repeated to one per query head; other tables unchanged."""
    return t if t.shape[1] in (1, heads) else t.repeat_interleave(heads // t.shape[1], 1)


def _listed(table: Tensor) -> tuple[Tensor, Tensor]:
    """The number of True entries in each row, and all indices, those of True entries first.

    Both groups of indices are in ascending order.
    """
    number = table.sum(-1, dtype=torch.int32)
    order = table.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return number, order.to(torch.int32).contiguous()
