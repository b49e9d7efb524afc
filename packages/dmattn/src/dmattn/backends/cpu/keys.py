"""Copying keys, values and scores by operations of torch: dmattn::join_keys, dmattn::keep_keys.

For the CPU, and for GPUs that the compiled kernels do not serve.
"""

import math

import torch
from torch import Tensor

from dmattn.key_lists import KeptKeys, rows_at


def join_keys(
    first: tuple[Tensor, Tensor, Tensor],
    new: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    joined: tuple[Tensor, Tensor, Tensor],
    place_first: Tensor | None = None,
) -> None:
    """The implementation of dmattn::join_keys for devices without kernels: fills `joined`."""
    k, v, score = joined
    heads = k.shape[2]
    if place_first is not None:
        at = place_first.clamp(0, max(0, place_first.shape[2] - 1)).long()
        first = rows_at(first[0], at), rows_at(first[1], at), first[2].gather(2, at)
    new_begin = k.shape[1] - new[0].shape[1]
    begin = new_begin - first[0].shape[1]
    for result, before, behind in ((k, first[0], new[0]), (v, first[1], new[1])):
        result[:, :begin] = 0.0
        result[:, begin:new_begin] = _with_heads(before, heads, 2)
        result[:, new_begin:] = _with_heads(behind, heads, 2)
    score[:, :, :begin] = -math.inf
    score[:, :, begin:new_begin] = _with_heads(first[2], heads, 1)
    score[:, :, new_begin:] = _with_heads(new[2], heads, 1)
    if mask is not None:
        score[:, :, new_begin:].masked_fill_(~_with_heads(mask, heads, 1), -math.inf)


def keep_keys(
    row: int,
    end: Tensor,
    place: Tensor | None,
    keys: tuple[Tensor, Tensor, Tensor],
    position: Tensor | None,
    seen: Tensor | None,
    kept: KeptKeys,
    beside_attention: bool = False,
) -> None:
    """The implementation of dmattn::keep_keys for devices without kernels.

    Fills `kept`, which must not be empty. `beside_attention` makes no difference.
    """
    batch, window, heads, _ = kept.k.shape
    seqlen = end.shape[2]
    is_kept = _with_heads(end > row, heads, 1).expand(batch, heads, seqlen)
    count = is_kept.sum(2, keepdim=True)
    entry = is_kept.cumsum(2) - 1 + (window - count)
    entry = entry.masked_fill(~is_kept | (entry < 0), window)  # an extra entry that is cut off
    standing = torch.arange(seqlen, device=end.device).expand(batch, heads, -1)
    at = entry.new_zeros((batch, heads, window + 1)).scatter_(2, entry, standing)[..., :window]
    if place is not None:
        at = place.clamp(0, seqlen - 1).long().gather(2, at)
    empty = torch.arange(window, device=end.device) < window - count
    positions = _positions(position, seen, is_kept)
    no_row = empty.mT[..., None]
    k, v, score = (_with_heads(t, heads, dim) for t, dim in zip(keys, (2, 2, 1), strict=True))
    kept.k.copy_(rows_at(k, at)).masked_fill_(no_row, 0.0)
    kept.v.copy_(rows_at(v, at)).masked_fill_(no_row, 0.0)
    scores = score.expand(batch, heads, seqlen).gather(2, at)
    kept.score.copy_(scores).masked_fill_(empty, -math.inf)
    kept.position.copy_(positions.gather(2, at)).masked_fill_(empty, -1)
    held = 0 if position is None else position.shape[2]
    kept.seen.copy_((0 if seen is None else seen) + kept.seen.new_full((batch,), seqlen - held))


def _positions(position: Tensor | None, seen: Tensor | None, is_kept: Tensor) -> Tensor:
    """int32 (B, N, L), the shape of is_kept: the positions of all keys.

    First those given, then on from `seen`.
    """
    batch, heads, seqlen = is_kept.shape
    held = 0 if position is None else position.shape[2]
    further = torch.arange(seqlen - held, dtype=torch.int32, device=is_kept.device)
    if seen is not None:
        further = seen[:, None, None] + further
    further = further.expand(batch, heads, -1)
    if position is None:
        return further
    position = _with_heads(position, heads, 1).expand(batch, heads, held)
    return torch.cat((position, further), 2)


def _with_heads(t: Tensor, heads: int, dim: int) -> Tensor:
    """t with the heads in dimension `dim` repeated so that there are `heads` of them."""
    few = t.shape[dim]
    return t if few == heads else t.repeat_interleave(heads // few, dim)
