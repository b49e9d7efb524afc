"""Which blocks of rows meet which blocks of keys, without looking at single pairs of them.

All that hides keys is either an interval per row or per key, or a tensor that is there already. The
least and greatest ends within a block say whether two blocks meet at all and whether they meet
entirely. Only a mask that has rows and keys is read throughout. What is listed as meeting in part
may turn out to keep nothing; what is listed as meeting entirely keeps every pair.
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
    full_num: Tensor  # as partial_num: those that all rows keep entirely
    full_idx: Tensor  # as partial_idx


def block_table(given: Arranged) -> BlockTable | None:
    """The blocks that meet in a problem; None where every row keeps every key."""
    hiding = (given.last, given.first, given.mask)
    if not given.diagonal and all(t is None for t in hiding):
        return None
    some, full = _meeting(given)
    partial_num, partial_idx = _listed(some & ~full)
    full_num, full_idx = _listed(full)
    return BlockTable(partial_num, partial_idx, full_num, full_idx)


def _meeting(given: Arranged) -> tuple[Tensor, Tensor]:
    """bool ({B|1}, {H|1}, row blocks, key blocks): where two blocks may meet, where entirely."""
    heads, seqlen_q, seqlen_k = given.q.shape[1], given.q.shape[2], given.k.shape[2]
    device = given.q.device
    start = torch.arange(0, seqlen_k, BLOCK, device=device)
    stop = (start + BLOCK - 1).clamp(max=seqlen_k - 1)
    row_start = torch.arange(0, seqlen_q, BLOCK, device=device)[:, None]
    # A block that reaches beyond the last row or key is left to mask_mod.
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
    """Where any and where all entries of a block are True; 1 where the mask has one row or key."""
    if given.packed_rows[0]:
        # Columns count from each row's first key, so that a block of keys has no block of columns.
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
    if extra:  # repeats the last entry, which changes neither
        t = torch.cat([t, t[..., -1:].expand(*t.shape[:-1], extra)], -1)
    blocks = torch.unflatten(t, -1, (-1, BLOCK))
    if t.dtype == torch.bool:
        return blocks.all(-1).transpose(dim, -1), blocks.any(-1).transpose(dim, -1)
    return blocks.amin(-1).transpose(dim, -1), blocks.amax(-1).transpose(dim, -1)


def _by_head(t: Tensor, heads: int) -> Tensor:
    """A table per key head as one per query head; others as they are."""
    return t if t.shape[1] in (1, heads) else t.repeat_interleave(heads // t.shape[1], 1)


def _listed(table: Tensor) -> tuple[Tensor, Tensor]:
    """How many entries of each row are True, and where: those first, each part ascending."""
    number = table.sum(-1, dtype=torch.int32)
    order = table.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return number, order.to(torch.int32).contiguous()
