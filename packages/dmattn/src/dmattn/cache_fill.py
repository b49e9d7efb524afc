"""The content of a cache after a prompt.

Letters as in `dmattn.cache_state`; S tokens of the prompt.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.key_lists import rows_at
from dmattn.selection import KeySelection, select_keys


class Fill(NamedTuple):
    """The keys of a prompt that a cache holds, in `room` entries (at most S)."""

    k: Tensor  # (B, room, HK, D)
    v: Tensor  # as k
    score: Tensor  # (B, HK, room)
    position: Tensor  # (B, HK, room)


def last_row_keys(
    score: Tensor, window_size: int, selection: KeySelection | None, real: Tensor | None
) -> Tensor:
    """bool (B, HK, S): the keys of a prompt that the next token may need.

    Args:
        score: (B, HK, S).
        window_size: the largest number of such keys per head.
        selection: the one by which the prompt was attended to, or None.
        real: bool (B, S), False at padding; None where there is none.
    """
    seqlen = score.shape[2]
    if seqlen == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    if selection is None:
        selection = select_keys(score, window_size, False, attn_mask=real)
    return (selection.end >= seqlen).expand(score.shape)


def all_keys(score: Tensor, real: Tensor | None) -> Tensor:
    """bool (B, HK, S): all keys but padding."""
    everything = torch.ones_like(score, dtype=torch.bool)
    return everything if real is None else everything & real[:, None]


def fill_of(
    key: Tensor,
    value: Tensor,
    score: Tensor,
    real: Tensor | None,
    kept: Tensor,
    entries: int,
    at_end: bool,
) -> Fill:
    """The keys of a prompt that a cache holds, without gaps between them.

    Args:
        key, value: (B, S, HK, D).
        score: (B, HK, S).
        real: bool (B, S), False at padding, which positions do not count; None for no padding.
        kept: bool (B, HK, S), the keys to hold, at most `entries` per head.
        entries: how many entries the cache has.
        at_end: whether entries without a key come first; otherwise they come last.
    """
    batch, nheads_k, seqlen = score.shape
    room = min(entries, seqlen)
    places = torch.arange(seqlen, dtype=torch.int32, device=score.device).expand(batch, -1)
    slot, count = kept.cumsum(-1) - 1, kept.sum(-1, keepdim=True)
    entry = torch.arange(room, device=score.device)
    if at_end:
        slot, empty = slot + (room - count), entry < room - count
    else:
        empty = entry >= count
    slot = slot.masked_fill(~kept, room)
    index = slot.new_zeros((batch, nheads_k, room + 1))
    index.scatter_(-1, slot, places[:, None].expand(slot.shape).long())
    index = index[..., :room]
    if real is not None:
        places = real.cumsum(1, dtype=torch.int32) - 1
    no_row = empty.mT[..., None]
    chosen = score.detach().gather(-1, index)
    where = places[:, None].expand(-1, nheads_k, -1).gather(-1, index)
    return Fill(
        rows_at(key.detach(), index).masked_fill(no_row, 0.0),
        rows_at(value.detach(), index).masked_fill(no_row, 0.0),
        chosen.masked_fill(empty | ~(chosen > -math.inf), -math.inf),
        where.masked_fill(empty, -1),
    )
