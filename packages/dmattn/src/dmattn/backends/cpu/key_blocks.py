"""Which rows and keys the CPU backend computes together.

Blocks of keys are either slices of all keys, or gathered from lists. Lists come from a selection,
or from a mask that is the same for all rows: they then hold the keys that it keeps. Each list is
for a stretch of rows.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.backends.cpu.layout import Layout, RowBlock
from dmattn.key_lists import BLOCK_ROWS
from dmattn.problem import Problem

_KEYS_PER_BLOCK = 512
# Lists of up to this many keys are not divided into blocks.
_LISTED_KEYS_PER_BLOCK = 768
_MIN_ROWS_PER_BLOCK = 16
# Logits of one block, all batch entries and heads together: 4 MB in float32, about the size of a
# second-level cache.
_BLOCK_ELEMENTS = 1 << 20
# A mask that is the same for all rows becomes a list only if it keeps at most this fraction of the
# keys; otherwise it is applied to slices of keys.
_LIST_BELOW = 0.75


class Lists(NamedTuple):
    """Lists of keys, each for a stretch of rows. Letters: R lists, C room of each list."""

    idx: Tensor  # int64 ({B|1}, {HL|1}, R, C); any keys past the count
    counts: Tensor  # ({B|1}, {HL|1}, R)
    end: Tensor | None  # ({B|1}, {HL|1}, Sk): rows at this position and later drop the key
    rows_per_list: int


class KeyBlock(NamedTuple):
    """N keys that a block of rows attends to. Letters as in `dmattn.backends.cpu.layout`."""

    keys: slice | Tensor  # a slice of all Sk keys, or an index of shape ({B|1}, {HL|1}, L, N)
    k: Tensor  # (B*HL*L, N, D)
    v: Tensor  # (B*HL*L, N, D)
    # For an index: int64 (B*HL*L*N,), the same keys as rows of k seen as (B*HK*Sk, D).
    flat: Tensor | None
    # Pairs of row and key that causality or the list hides; bool, broadcasts to
    # (B, HL, L, G, M, N). None = no pair.
    hidden: Tensor | None

    def add_to_keys(self, total: Tensor, weights: Tensor) -> None:
        """Add weights (B*HL*L, N, D) to the rows of these keys in total (B*HK, Sk, D)."""
        if isinstance(self.keys, slice):
            total[:, self.keys] += weights
        else:
            assert self.flat is not None
            total.flatten(0, 1).index_add_(0, self.flat, weights.flatten(0, 1))


def make_lists(problem: Problem, layout: Layout) -> tuple[Layout, Lists | None]:
    """The lists with which a problem is to be computed; None = with slices of all keys.

    Also returns the layout, without its mask if the lists contain all that the mask says.
    """
    if problem.key_lists is not None:
        end, index, count, _ = problem.key_lists
        # Clamped: a wrong entry then finds some key, but nothing outside the tensors.
        index = index.long().clamp(0, max(0, layout.seqlen_k - 1))
        if layout.problem.is_causal:
            return layout, Lists(index, count, end, BLOCK_ROWS)
        return layout, Lists(index, count, None, layout.seqlen_q)
    mask, bias = layout.mask, layout.bias
    bias_has_rows = bias is not None and bias.shape[3] > 1
    if mask is None or mask.shape[3] > 1 or mask.shape[4] == 1 or bias_has_rows:
        return layout, None
    kept = mask.any(2)  # keys that any query head of a group keeps
    count = kept.sum(-1)
    longest = int(count.amax()) if count.numel() else 0
    if longest > _LIST_BELOW * layout.seqlen_k:
        return layout, None
    # The kept keys come first; entries past the count are dropped keys.
    index = kept.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :longest]
    if mask.shape[2] == 1:
        layout = dataclasses.replace(layout, mask=None)
    return layout, Lists(index, count, None, layout.seqlen_q)


def row_blocks(layout: Layout, lists: Lists | None) -> Iterator[RowBlock]:
    """All query rows, in blocks whose logits have about `_BLOCK_ELEMENTS` elements."""
    heads = max(1, layout.batch * layout.heads * layout.group)
    if lists is None:
        width = min(layout.seqlen_k, _KEYS_PER_BLOCK)
    else:
        width = min(lists.idx.shape[3], _LISTED_KEYS_PER_BLOCK)
    size = max(_MIN_ROWS_PER_BLOCK, _BLOCK_ELEMENTS // (max(1, width) * heads))
    if lists is None or lists.rows_per_list >= layout.seqlen_q:
        for start in range(0, layout.seqlen_q, size):
            yield RowBlock(slice(start, min(start + size, layout.seqlen_q)), 1)
        return
    # Whole stretches of rows together, and the last stretch, if it is shorter, by itself.
    length = lists.rows_per_list
    whole = layout.seqlen_q - layout.seqlen_q % length
    size = max(1, size // length) * length
    for start in range(0, whole, size):
        rows = slice(start, min(start + size, whole))
        yield RowBlock(rows, (rows.stop - rows.start) // length)
    if whole < layout.seqlen_q:
        yield RowBlock(slice(whole, layout.seqlen_q), 1)


def key_blocks(layout: Layout, lists: Lists | None, block: RowBlock) -> Iterator[KeyBlock]:
    """The blocks of keys in which some row of the block may see some key."""
    if lists is None:
        yield from _slices(layout, block)
    else:
        yield from _listed(layout, lists, block)


def _slices(layout: Layout, block: RowBlock) -> Iterator[KeyBlock]:
    seen = layout.seqlen_k
    if layout.problem.is_causal:
        seen = min(seen, max(0, block.rows.stop + layout.causal_offset))
    for start in range(0, seen, _KEYS_PER_BLOCK):
        keys = slice(start, min(start + _KEYS_PER_BLOCK, layout.seqlen_k))
        hidden = None
        if layout.problem.is_causal and keys.stop - 1 > block.rows.start + layout.causal_offset:
            key = torch.arange(keys.start, keys.stop, device=layout.k.device)
            hidden = key > _positions(layout, block)
        yield KeyBlock(keys, layout.k[:, keys], layout.v[:, keys], None, hidden)


def _listed(layout: Layout, lists: Lists, block: RowBlock) -> Iterator[KeyBlock]:
    first = block.rows.start // lists.rows_per_list
    numbers = slice(first, first + block.stretches)
    count = lists.counts[:, :, numbers, None]
    longest = int(count.amax()) if count.numel() else 0
    parts = -(-longest // _LISTED_KEYS_PER_BLOCK)
    for part in range(parts):
        entries = slice(longest * part // parts, longest * (part + 1) // parts)
        index = lists.idx[:, :, numbers, entries]
        # `begin`: the first position that sees a key; behind all rows for entries past the count.
        listed = torch.arange(entries.start, entries.stop, device=count.device) < count
        begin = index.masked_fill(~listed, layout.seqlen_k)
        if layout.problem.is_causal and int(begin.amin()) >= block.rows.stop + layout.causal_offset:
            continue
        flat = _flat_index(layout, index)
        shape = (flat.numel() // index.shape[3], index.shape[3], layout.k.shape[2])
        k, v = (t.flatten(0, 1).index_select(0, flat).view(shape) for t in (layout.k, layout.v))
        yield KeyBlock(index, k, v, flat, _hidden_entries(layout, lists, block, index, begin))


def _hidden_entries(
    layout: Layout, lists: Lists, block: RowBlock, index: Tensor, begin: Tensor
) -> Tensor | None:
    """The pairs that the length of a list, causality or an interval end hides: `KeyBlock.hidden`.

    Args:
        index: ({B|1}, {HL|1}, L, N).
        begin: as index: the first position that sees the key, Sk for entries past the count.
    """
    everywhere = layout.seqlen_k - 1
    first = block.rows.start + layout.causal_offset if layout.problem.is_causal else everywhere
    if lists.end is None and int(begin.amax()) <= first:
        return None
    begin = begin[:, :, :, None, None]
    if not layout.problem.is_causal:
        return begin > everywhere
    position = _positions(layout, block)
    hidden = begin > position
    if lists.end is not None:
        end = lists.end[:, :, None].take_along_dim(index, 3)
        hidden |= end[:, :, :, None, None] <= position
    return hidden


def _flat_index(layout: Layout, index: Tensor) -> Tensor:
    """An index ({B|1}, {HL|1}, L, N) of keys as indices of the rows of k, (B*HL*L*N,)."""
    device = index.device
    head = torch.arange(layout.heads, device=device) // (layout.heads // layout.nheads_k)
    matrix = torch.arange(layout.batch, device=device)[:, None] * layout.nheads_k + head
    return (index + matrix[..., None, None] * layout.seqlen_k).flatten()


def _positions(layout: Layout, block: RowBlock) -> Tensor:
    """int64 (L, 1, M, 1): the positions of the rows among the keys."""
    rows = torch.arange(block.rows.start, block.rows.stop, device=layout.k.device)
    rows += layout.causal_offset
    return rows.view(block.stretches, 1, block.length, 1)
