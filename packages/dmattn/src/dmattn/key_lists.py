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

    end: Tensor  # ({B|1}, heads, Sk): the interval ends
    # ({B|1}, heads, blocks, capacity): the lists. Entries past the count of a list are zeros; in
    # lists made for attention alone, which does not read these entries, they may be anything.
    idx: Tensor
    # ({B|1}, heads, blocks): the length of each list. The name hides tuple.count.
    count: Tensor  # type: ignore[assignment]
    # Shape of count: how many leading entries of each list every row keeps; (0,) when not causal.
    full: Tensor


class KeyLists(NamedTuple):
    """The lists of a `Selection`, made from its intervals, and the lengths that they need."""

    idx: Tensor
    count: Tensor  # type: ignore[assignment]
    full: Tensor
    needed: Tensor  # int32, shape of count: length of each list, also of lists that do not fit


class KeptKeys(NamedTuple):
    """The w keys that a row keeps, in order of position. Entries without a key come first."""

    k: Tensor  # (B, w, N, D), zeros without a key
    v: Tensor  # (B, w, N, Dv), likewise
    score: Tensor  # (B, N, w), -inf without a key
    position: Tensor  # int32 (B, N, w), -1 without a key
    seen: Tensor  # int32 (B,): tokens so far


def smaller(a: int, b: int) -> int:
    """The smaller of two sizes, each an int or a symbolic size (SymInt).

    The builtin min() of SymInts would compare them and so tie a traced graph to the outcome. Under
    torch.compile symbolic sizes count as ints here, and its own min() of them goes into the graph;
    the oldest torch that we support cannot compile sym_min.
    """
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    found: int = torch.sym_min(a, b)
    return found


def larger(a: int, b: int) -> int:
    """The larger of two sizes, each an int or a SymInt; see `smaller`."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    found: int = torch.sym_max(a, b)
    return found


def num_blocks(seqlen_q: int, is_causal: bool) -> int:
    """How many lists `seqlen_q` rows need: one per block of rows, or one in all if not causal."""
    return _blocks(seqlen_q) if is_causal else 1


def num_lists(seqlen_q: int, is_causal: bool) -> int:
    """How many lists to make: `num_blocks`, but at least 2 if causal and torch compiles.

    The second list is empty if there are no more than 128 rows. It is made since torch specialises
    a graph on a size of 1: without it, the graph would be compiled again for more than one block,
    and an export for all lengths would be refused.
    """
    blocks = num_blocks(seqlen_q, is_causal)
    if not is_causal or not torch.compiler.is_compiling():
        return blocks
    return larger(2, blocks)


def without_spare_lists(lists: Selection, seqlen_q: int, is_causal: bool) -> Selection:
    """The lists without the empty ones that `num_lists` added, contiguous.

    A copy if there are any to remove, otherwise the lists themselves.
    """
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
    """Causal lists without some of their keys. Takes time and memory for all entries of the lists.

    Args:
        lists: the lists, causal.
        keep: bool ({B|1}, heads, Sk), False for the keys to leave out. Of the numbers of heads of
            `keep` and of the lists, one has to divide the other.
    """
    batch = keep.shape[0] if lists.end.shape[0] == 1 else lists.end.shape[0]
    heads = max(lists.end.shape[1], keep.shape[1])
    end, idx, count, full, keep = (_with_heads(t, batch, heads) for t in (*lists, keep))
    entry = torch.arange(idx.shape[3], device=idx.device)
    by_list = keep[:, :, None].expand(-1, -1, idx.shape[2], -1)
    # Clamped, since a wrong entry must not lead outside of the mask.
    entries = idx.clamp(0, larger(1, keep.shape[2]) - 1).long()
    kept = by_list.gather(3, entries) & (entry < count[..., None])
    # Kept entries move up to close the gaps; the others go to an extra last entry that is cut off.
    place = torch.where(kept, kept.cumsum(3) - 1, idx.shape[3])
    wide = torch.nn.functional.pad(torch.zeros_like(idx), (0, 1)).scatter(3, place, idx)
    return Selection(
        torch.where(keep, end, 0).contiguous(),  # torch.where takes over the strides of the mask
        wide[..., :-1].contiguous(),
        kept.sum(3, dtype=torch.int32),
        (kept & (entry < full[..., None])).sum(3, dtype=torch.int32),
    )


def _with_heads(t: Tensor, batch: int, heads: int) -> Tensor:
    """({B|1}, {H|HK|1}, ...) as (batch, heads, ...): heads are repeated, or expanded from 1."""
    if t.shape[1] not in (1, heads):
        t = t.repeat_interleave(heads // t.shape[1], 1)
    return t.expand(batch, heads, *t.shape[2:])


def capacity_for(most: int, seqlen_k: int) -> int:
    """The capacity of lists of at most `most` of `seqlen_k` keys: a multiple of 128 entries."""
    # Not the minimum of seqlen_k itself, which torch 2.9 cannot estimate if it depends on data.
    return smaller(_blocks(most), _blocks(seqlen_k)) * BLOCK_ROWS


def whole_blocks(rows: int) -> int:
    """`rows`, rounded up to a multiple of `BLOCK_ROWS`."""
    return _blocks(rows) * BLOCK_ROWS


def _blocks(rows: int) -> int:
    """How many blocks of `BLOCK_ROWS` hold `rows`."""
    return (rows + BLOCK_ROWS - 1) // BLOCK_ROWS


def behind_rows(lists: Selection, before: int) -> Selection:
    """Causal lists without those of the first `before` rows, a multiple of `BLOCK_ROWS`.

    Selection within documents makes lists for as many rows as keys. If keys of a state stand in
    front, the rows at their positions are no queries, and their lists are dropped here.
    """
    skip = before // BLOCK_ROWS
    end, *by_block = lists  # older torch cannot compile a slice of a named tuple
    return Selection(end, *(t[:, :, skip:].contiguous() for t in by_block))


def rows_at(t: Tensor, places: Tensor) -> Tensor:
    """The keys or values of t (B, L, N, D) at places, int64 (B, N, w): (B, w, N, D).

    Uses gather instead of take_along_dim, which would tie a traced graph to one length L.
    """
    return t.gather(1, places.mT[..., None].expand(-1, -1, -1, t.shape[3]))


def best_keys(
    scores: Tensor,
    window_size: int,
    allowed: Tensor | None = None,
    sequence: Tensor | None = None,
) -> Tensor:
    """The keys with the highest scores, as a mask. Of equal scores the later key is chosen.

    Keys with a score of NaN or -inf are never chosen. The keys are sorted once, which needs no
    value on the host; rows that may choose among different keys share the sort.

    Args:
        scores: floating (..., 1, Sk) or (..., Sk).
        window_size: how many keys to choose, at least 1.
        allowed: bool of a shape that broadcasts with scores, True where a key may be chosen; it may
            have more rows than scores. None for all keys.
        sequence: int64 (Sk,), in non-decreasing order: the index of the packed sequence that each
            key belongs to. `window_size` keys are then chosen in each sequence. None if there is
            only one sequence.

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
        # Sorted by sequence, each sequence occupies the same places as before: count the rank from
        # its first place. (Clamped, since wrong boundaries may give a `sequence` out of order.)
        first = torch.searchsorted(sequence, sequence).clamp(max=key_len - 1)
        before = rank - candidate.to(torch.int32)
        rank = rank - before.index_select(-1, first)
    keep = candidate & (rank <= window_size)
    return torch.zeros_like(usable).scatter(-1, order, keep)


def check_boundaries(bounds: Sequence[int], seqlen_k: int | None, name: str = "cu_seqlens") -> None:
    """Raise ValueError unless the boundaries of packed documents rise from 0 to `seqlen_k`.

    `seqlen_k`: None if the number of keys is given by the last boundary alone. `name`: of the
    argument, for the error message.
    """
    if len(bounds) == 0:
        raise ValueError(f"{name}: got no boundary, wanted (documents + 1,)")
    last = bounds[-1]
    fits = last < 2**31 if seqlen_k is None else last == seqlen_k
    falls = first_fall(bounds)
    if bounds[0] != 0 or falls is not None or not fits:
        wanted = "the number of keys, less than 2**31" if seqlen_k is None else seqlen_k
        got = falls or (list(bounds) if len(bounds) <= 6 else f"[{bounds[0]}, ..., {last}]")
        raise ValueError(f"{name}: got {got}, wanted rising from 0 to {wanted}")


def first_fall(bounds: Sequence[int]) -> str | None:
    """Where boundaries of packed documents fall first, in words; None if they never do."""
    for i, (a, b) in enumerate(pairwise(bounds)):
        if b < a:
            return f"{b} at index {i + 1} behind {a}"
    return None
