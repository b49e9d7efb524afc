"""The operators that move whole keys, without gradients.

    dmattn::join_keys   the keys of a stretch behind those of a state or a cache
    dmattn::keep_keys   of keys in order of position those that the last row of a selection keeps

Where gradients are wanted, `dmattn.key_state` and `dmattn.stretches` do the same by operations of
torch. Letters: B batch, L keys, N heads of the result, D and Dv head dimension of keys and of
values. Other heads n, of keys or of numbers, divide N: each stands for N / n neighbouring ones.
"""

from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from dmattn.backends.cpu import keys as cpu
from dmattn.backends.cuda import keys as cuda
from dmattn.key_lists import KeptKeys, larger
from dmattn.ops.register import Operator, register

_JOIN = (
    "(Tensor k_first, Tensor v_first, Tensor score_first, Tensor k_new, Tensor v_new, "
    "Tensor score_new, Tensor? mask_new, SymInt front, Tensor? place_first=None) "
    "-> (Tensor k, Tensor v, Tensor score)"
)
_KEEP = (
    "(SymInt row, Tensor end, Tensor? place, Tensor k, Tensor v, Tensor score, Tensor? position, "
    "Tensor? seen, SymInt window) "
    "-> (Tensor k, Tensor v, Tensor score, Tensor position, Tensor seen)"
)

Rows = tuple[Tensor, Tensor, Tensor]


# --- dmattn::join_keys ----------------------------------------------------------------------------


def join_keys(
    first: Rows,
    new: Rows,
    mask: Tensor | None,
    front: int,
    direct: bool,
    place_first: Tensor | None = None,
    into: Rows | None = None,
) -> Rows:
    """Call the operator.

    Args:
        first: k (B, F, N, D), v (B, F, N, Dv) and score (B, N, F): the last of the entries in front
            of the new keys. Those before them hold no key: zeros, with a score of -inf.
        new: k (B, S, n, D), v (B, S, n, Dv) and score ({B|1}, n, S).
        mask: bool ({B|1}, n, S), False for a score of -inf; or None.
        front: entries in front of the new keys, at least F.
        direct: leave the dispatcher of torch out, where it would do nothing but call this.
        place_first: int32 (B, N, F), where each key of `first` lies in it; None: where it stands.
        into: where to write it, of any strides, overlapping with nothing that is read; needs
            `direct`.

    Returns:
        k (B, front + S, N, D), v likewise, and score (B, N, front + S) in the dtype of that of
        `first`, to which that of `new` must convert without loss.

    Raises:
        ValueError: a shape does not fit.
    """
    if direct:
        device = cuda if new[0].is_cuda else cpu
        return _join(device, *first, *new, mask, front, place_first, into)
    found: Rows = torch.ops.dmattn.join_keys(*first, *new, mask, front, place_first)
    return found


def _empty_joined(
    k_first: Tensor,
    v_first: Tensor,
    score_first: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    score_new: Tensor,
    mask_new: Tensor | None,
    front: int,
    place_first: Tensor | None = None,
) -> Rows:
    batch, held, heads, head_dim = k_first.shape
    if front < held:
        raise ValueError(f"front: got {front}, wanted at least {held}, the keys of k_first")
    seqlen = front + k_new.shape[1]
    return (
        k_first.new_empty((batch, seqlen, heads, head_dim)),
        v_first.new_empty((batch, seqlen, heads, v_first.shape[3])),
        score_first.new_empty((batch, heads, seqlen)),
    )


def _join(
    device: ModuleType,
    k_first: Tensor,
    v_first: Tensor,
    score_first: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    score_new: Tensor,
    mask_new: Tensor | None,
    front: int,
    place_first: Tensor | None = None,
    into: Rows | None = None,
) -> Rows:
    """dmattn::join_keys by the implementation for a device."""
    first, new = (k_first, v_first, score_first), (k_new, v_new, score_new)
    joined = _empty_joined(*first, *new, mask_new, front) if into is None else into
    if joined[2].numel() > 0:
        if place_first is not None:
            place_first = place_first.contiguous()
        device.join_keys(first, new, mask_new, joined, place_first)
    return joined


def copy_keys(keys: Rows, into: Rows) -> None:
    """Copy keys to where others stand: k (B, L, N, D), v (B, L, N, Dv) and score (B, N, L).

    `into`: the same or more of each, of any strides. Entries in front of the last L get no key. For
    callers that are direct.
    """
    k, v, score = keys
    none = k[:, :0], v[:, :0], score[:, :, :0]
    join_keys(keys, none, None, into[0].shape[1], True, into=into)


# --- dmattn::keep_keys ----------------------------------------------------------------------------


def keep_keys(
    row: int,
    end: Tensor,
    place: Tensor | None,
    keys: Rows,
    position: Tensor | None,
    seen: Tensor | None,
    window: int,
    direct: bool,
    into: KeptKeys | None = None,
    beside_attention: bool = False,
) -> KeptKeys:
    """Call the operator.

    Args:
        row: the position of the last row; keys whose end lies behind it are kept.
        end: int32 ({B|1}, n, L) of a selection, in which that row keeps `window` keys or fewer.
        place: int32 (B, N, L), where each of those keys lies in what follows; None: where it
            stands.
        keys: k (B, L, n, D), v (B, L, n, Dv) and score ({B|1}, n, L).
        position: int32 ({B|1}, n, P) of the first P keys as they lie. The others count on from
            `seen`. None for P = 0.
        seen: int32 (B,), None for 0.
        window: w, at least 1.
        direct: leave the dispatcher of torch out, where it would do nothing but call this.
        into: where to write it, k, v and score of any strides, overlapping with nothing that is
            read, and scores of a dtype to which that of the keys converts without loss; needs
            `direct`.
        beside_attention: they are written while the attention runs that was enqueued right before.
            It uses none of the memory in `into`, which was there before, and nothing that is read
            here was written since.

    Returns:
        The kept keys as the last of w entries, in order of position; entries without a key hold
        zeros, a score of -inf and position -1. And seen + L - P.
    """
    k, v, score = keys
    if direct:
        device = cuda if k.is_cuda else cpu
        arguments = (row, end, place, k, v, score, position, seen, window, into, beside_attention)
        return _keep(device, *arguments)
    return KeptKeys(
        *torch.ops.dmattn.keep_keys(row, end, place, k, v, score, position, seen, window)
    )


def empty_kept(end: Tensor, keys: Rows, window: int, score_dtype: torch.dtype) -> KeptKeys:
    """What `keep_keys` fills, of contiguous memory; the other arguments are its own."""
    kept = _empty_kept(0, end, None, *keys, None, None, window)
    if kept.score.dtype == score_dtype:
        return kept
    return kept._replace(score=kept.score.new_empty(kept.score.shape, dtype=score_dtype))


def _empty_kept(
    row: int,
    end: Tensor,
    place: Tensor | None,
    k: Tensor,
    v: Tensor,
    score: Tensor,
    position: Tensor | None,
    seen: Tensor | None,
    window: int,
) -> KeptKeys:
    batch, _, heads, head_dim = k.shape
    for t in (end, score):
        heads = larger(heads, t.shape[1])
    return KeptKeys(
        k.new_empty((batch, window, heads, head_dim)),
        v.new_empty((batch, window, heads, v.shape[3])),
        score.new_empty((batch, heads, window)),
        end.new_empty((batch, heads, window)),
        end.new_empty((batch,)),
    )


def _keep(
    device: ModuleType,
    row: int,
    end: Tensor,
    place: Tensor | None,
    k: Tensor,
    v: Tensor,
    score: Tensor,
    position: Tensor | None,
    seen: Tensor | None,
    window: int,
    into: KeptKeys | None = None,
    beside_attention: bool = False,
) -> KeptKeys:
    """dmattn::keep_keys by the implementation for a device."""
    kept = into
    if kept is None:
        kept = _empty_kept(row, end, place, k, v, score, position, seen, window)
    if kept.score.numel() > 0:
        if place is not None:
            place = place.contiguous()
        keys = (k, v, score)
        device.keep_keys(row, end, place, keys, position, seen, kept, beside_attention)
    else:
        kept.seen.fill_(k.shape[1] - (0 if position is None else position.shape[2]))
        if seen is not None:
            kept.seen.add_(seen)
    return kept


register(
    Operator("dmattn::join_keys", _JOIN, partial(_join, cpu), partial(_join, cuda), _empty_joined)
)
register(
    Operator("dmattn::keep_keys", _KEEP, partial(_keep, cpu), partial(_keep, cuda), _empty_kept)
)
