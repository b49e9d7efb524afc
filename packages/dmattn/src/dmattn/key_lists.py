"""Kept keys as tensors: an interval of rows for each key, a list of keys for each block of rows.

Key j is kept by the rows at positions j <= r < end[j]. The list of a block of rows holds the keys
that any of its rows keeps: those that all of them keep first, then the others, both ascending.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Query rows that share a list, and what the room for its entries is a multiple of.
BLOCK_ROWS = 128


class Selection(NamedTuple):
    """The kept keys as the operators take them, all int32 and contiguous."""

    end: Tensor  # ({B|1}, heads, Sk)
    # ({B|1}, heads, blocks, capacity); zeros past its count, or anything where nobody but
    # attention, which does not read them, gets the lists
    idx: Tensor
    # Hides tuple.count. ({B|1}, heads, blocks)
    count: Tensor  # type: ignore[assignment]
    full: Tensor  # as count: the leading entries that every row keeps; (0,) when not causal


class KeyLists(NamedTuple):
    """The lists of a `Selection`, made from its intervals, and how long they have to be."""

    idx: Tensor
    count: Tensor  # type: ignore[assignment]
    full: Tensor
    needed: Tensor  # int32, as count: entries of each list, whether it fits or not


class KeptKeys(NamedTuple):
    """Keys that a row keeps, in order of position. Entries without a key come first."""

    k: Tensor  # (B, w, N, D), zeros without a key
    v: Tensor  # (B, w, N, Dv), likewise
    score: Tensor  # (B, N, w), -inf without a key
    position: Tensor  # int32 (B, N, w), -1 without a key
    seen: Tensor  # int32 (B,): tokens so far


def smaller(a: int, b: int) -> int:
    """The smaller of two sizes, which may be symbols.

    Between symbols min() would decide for one side and so tie a traced graph to it. torch.compile
    lets symbols pass for ints and writes its own min() of them into the graph; the oldest torch
    that we support cannot compile sym_min.
    """
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    found: int = torch.sym_min(a, b)
    return found


def larger(a: int, b: int) -> int:
    """The larger of two sizes, as `smaller`."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    found: int = torch.sym_max(a, b)
    return found


def num_blocks(seqlen_q: int, is_causal: bool) -> int:
    """Lists for `seqlen_q` rows; one serves all of them when not causal."""
    return (seqlen_q + BLOCK_ROWS - 1) // BLOCK_ROWS if is_causal else 1


def num_lists(seqlen_q: int, is_causal: bool) -> int:
    """How many lists to make: as many as blocks; while torch compiles at least 2, if causal.

    The second one is then empty where there are no more than 128 rows. Without it, a graph traced
    for one number of blocks would not serve the others: torch takes a size that may be 1 for a
    reason to compile again, and to refuse an export for all lengths.
    """
    blocks = num_blocks(seqlen_q, is_causal)
    if not is_causal or not torch.compiler.is_compiling():
        return blocks
    return larger(2, blocks)


def without_spare_lists(lists: Selection, seqlen_q: int, is_causal: bool) -> Selection:
    """As many lists as blocks of rows, contiguous; where `num_lists` made more, a copy."""
    blocks = num_blocks(seqlen_q, is_causal)
    if lists.idx.shape[2] == blocks:
        return lists
    return Selection(
        lists.end,
        lists.idx.narrow(2, 0, blocks).contiguous(),
        lists.count.narrow(2, 0, blocks).contiguous(),
        lists.full.narrow(2, 0, blocks).contiguous(),
    )


def without_keys(lists: Selection, keep: Tensor) -> Selection:
    """The same lists without some keys, in time and memory for as many entries as they have.

    Args:
        lists: causal ones.
        keep: bool ({B|1}, heads, Sk), False for the keys to leave out. Its heads are those of the
            lists, or a multiple, or 1, or a divisor.
    """
    batch = keep.shape[0] if lists.end.shape[0] == 1 else lists.end.shape[0]
    heads = max(lists.end.shape[1], keep.shape[1])
    end, idx, count, full, keep = (_with_heads(t, batch, heads) for t in (*lists, keep))
    entry = torch.arange(idx.shape[3], device=idx.device)
    by_list = keep[:, :, None].expand(-1, -1, idx.shape[2], -1)
    # Clamped, since a wrong entry must not lead outside of the mask.
    entries = idx.clamp(0, larger(1, keep.shape[2]) - 1).long()
    kept = by_list.gather(3, entries) & (entry < count[..., None])
    # Entries that stay close up; the others fall into a last one that is cut off.
    place = torch.where(kept, kept.cumsum(3) - 1, idx.shape[3])
    wide = torch.nn.functional.pad(torch.zeros_like(idx), (0, 1)).scatter(3, place, idx)
    return Selection(
        torch.where(keep, end, 0).contiguous(),  # it takes over the strides of the mask
        wide[..., :-1].contiguous(),
        kept.sum(3, dtype=torch.int32),
        (kept & (entry < full[..., None])).sum(3, dtype=torch.int32),
    )


def _with_heads(t: Tensor, batch: int, heads: int) -> Tensor:
    """({B|1}, {H|HK|1}, ...) as (batch, heads, ...), where several heads may share an entry."""
    if t.shape[1] not in (1, heads):
        t = t.repeat_interleave(heads // t.shape[1], 1)
    return t.expand(batch, heads, *t.shape[2:])


def capacity_for(most: int, seqlen_k: int) -> int:
    """Room for lists of at most `most` of `seqlen_k` keys."""
    return whole_blocks(smaller(most, seqlen_k))


def whole_blocks(rows: int) -> int:
    """As many rows or more, so that they fill blocks."""
    return (rows + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS


def behind_rows(lists: Selection, before: int) -> Selection:
    """Causal lists without those of the first `before` rows, which fill whole blocks.

    Selection within documents is for as many rows as keys; those of a state that stands in front
    are no queries.
    """
    skip = before // BLOCK_ROWS
    return Selection(lists.end, *(t[:, :, skip:].contiguous() for t in lists[1:]))


def rows_at(t: Tensor, places: Tensor) -> Tensor:
    """(B, w, N, D): of keys or values (B, L, N, D) those at places int64 (B, N, w).

    By gather and not by take_along_dim, which ties a graph that torch traces to one length L.
    """
    return t.gather(1, places.mT[..., None].expand(-1, -1, -1, t.shape[3]))


def best_keys(
    scores: Tensor,
    window_size: int,
    allowed: Tensor | None = None,
    sequence: Tensor | None = None,
) -> Tensor:
    """The keys with the highest scores, of equal scores the later; NaN and -inf are never chosen.

    By one sort of the keys, so that nothing has to be known on the host, and rows that may choose
    among different keys share it.

    Args:
        scores: floating (..., 1, Sk) or (..., Sk).
        window_size: how many keys to choose, at least 1.
        allowed: bool of a shape that broadcasts with scores, True where a key may be chosen; it may
            have more rows than scores. None for all keys.
        sequence: int64 (Sk,), never falling: the packed sequence that each key belongs to. The keys
            of each sequence are then chosen by themselves. None where there is only one.

    Returns:
        bool, the shape of scores broadcast with that of allowed.
    """
    scores = scores.detach()
    usable = scores > -torch.inf
    if allowed is not None:
        usable = usable & allowed
    key_len = scores.shape[-1]
    # Sorted backwards and stably, so that of equal scores the later key comes first.
    order = key_len - 1 - scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    if sequence is not None:
        order = order.gather(-1, sequence[order].argsort(dim=-1, stable=True))
    order = order.expand(usable.shape)
    candidate = usable.gather(-1, order)
    rank = candidate.cumsum(-1, dtype=torch.int32)
    if sequence is not None:
        # Sorted by sequence, each sequence still has its own places: count from its first one.
        # (Clamped for the sake of wrong boundaries, from which no order may have come.)
        first = torch.searchsorted(sequence, sequence).clamp(max=key_len - 1)
        before = rank - candidate.to(torch.int32)
        rank = rank - before.index_select(-1, first)
    keep = candidate & (rank <= window_size)
    return torch.zeros_like(usable).scatter(-1, order, keep)


def check_boundaries(bounds: Sequence[int], seqlen_k: int | None) -> None:
    """Raise ValueError unless the boundaries of packed documents rise from 0 to `seqlen_k`.

    `seqlen_k`: None where the last boundary says how many keys there are.
    """
    if len(bounds) == 0:
        raise ValueError("cu_seqlens: got no boundary, wanted (documents + 1,)")
    rising = all(a <= b for a, b in pairwise(bounds))
    last = bounds[-1]
    fits = last < 2**31 if seqlen_k is None else last == seqlen_k
    if bounds[0] != 0 or not rising or not fits:
        wanted = "the number of keys, less than 2**31" if seqlen_k is None else seqlen_k
        raise ValueError(
            f"cu_seqlens: got {list(bounds[:3])}..{last}, wanted rising from 0 to {wanted}"
        )
