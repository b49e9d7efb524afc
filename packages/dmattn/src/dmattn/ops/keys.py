"""The operators that copy keys, values and scores. They have no gradients.

    dmattn::join_keys   append the keys of a stretch to those of a state or a cache
    dmattn::keep_keys   extract the keys that the last row of a selection keeps

If gradients are needed, `dmattn.key_state` and `dmattn.stretches` do the same by operations of
torch. Letters: B batch, L keys, N heads of the result, D and Dv head dimension of keys and of
values. A tensor may have a number n of heads that divides N: each head then stands for N / n
neighbouring heads.
"""

from types import ModuleType

import torch
from torch import Tensor

from dmattn.backends.cpu import keys as cpu
from dmattn.backends.cuda import keys as cuda
from dmattn.backends.cuda.kernels import serves
from dmattn.key_lists import KeptKeys, larger
from dmattn.ops.register import Operator, by_device, register

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
    """Append new keys to others, by the operator dmattn::join_keys.

    Args:
        first: k (B, F, N, D), v (B, F, N, Dv) and score (B, N, F). They become the last of the
            entries in front of the new keys. The entries before them hold no key: zeros, with a
            score of -inf.
        new: k (B, S, n, D), v (B, S, n, Dv) and score ({B|1}, n, S).
        mask: bool ({B|1}, n, S), False for new keys whose score becomes -inf; or None.
        front: number of entries in front of the new keys, at least F.
        direct: call the implementation instead of the operator, where torch's dispatcher would do
            nothing else.
        place_first: int32 (B, N, F): the i-th key taken from `first` is its entry place_first[i].
            None: in their order.
        into: where to write the result, of any strides, sharing memory with nothing that is read;
            needs `direct`. None: new tensors.

    Returns:
        k (B, front + S, N, D), v (B, front + S, N, Dv) and score (B, N, front + S). The score has
        the dtype of the score in `first`. That of the score in `new` must convert to it without
        loss.

    Raises:
        ValueError: front is less than F, or the CUDA library finds a shape that does not fit.
    """
    if direct:
        device = cuda if serves(new[0]) else cpu
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
    """Copy keys into other tensors, by the implementation of dmattn::join_keys.

    Args:
        keys: k (B, L, N, D), v (B, L, N, Dv) and score (B, N, L).
        into: tensors of the same shapes, or with more than L entries, of any strides. The keys are
            written to the last L entries; the entries before them get no key.
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
    """Extract the keys that the last row of a selection keeps, by the operator dmattn::keep_keys.

    Args:
        row: the position of the last row; key j is kept if end[j] > row.
        end: int32 ({B|1}, n, L), the interval ends of a selection in which that row keeps `window`
            keys or fewer.
        place: int32 (B, N, L): the key that `end` counts as the i-th is entry place[i] of `keys`
            and `position`. None: entry i.
        keys: k (B, L, n, D), v (B, L, n, Dv) and score ({B|1}, n, L).
        position: int32 ({B|1}, n, P), positions of the first P entries of `keys`. Those of the
            other entries continue from `seen`. None for P = 0.
        seen: int32 (B,), number of tokens before those other entries; None for 0.
        window: w, at least 1.
        direct: call the implementation instead of the operator, where torch's dispatcher would do
            nothing else.
        into: where to write the result: k, v and score of any strides, sharing memory with nothing
            that is read. The dtype of its scores must be one to which the scores in `keys` convert
            without loss. Needs `direct`. None: new tensors.
        beside_attention: allow the copy to run at the same time as the attention that was enqueued
            right before. Needs that `into` was allocated before that attention, which must not use
            its memory, and that nothing that is read here was written since.

    Returns:
        The kept keys as the last of w entries, in order of position; entries without a key hold
        zeros, a score of -inf and position -1. `seen` of the result is seen + L - P.
    """
    k, v, score = keys
    if direct:
        device = cuda if serves(k) else cpu
        arguments = (row, end, place, k, v, score, position, seen, window, into, beside_attention)
        return _keep(device, *arguments)
    return KeptKeys(
        *torch.ops.dmattn.keep_keys(row, end, place, k, v, score, position, seen, window)
    )


def empty_kept(end: Tensor, keys: Rows, window: int, score_dtype: torch.dtype) -> KeptKeys:
    """Uninitialised contiguous memory for the result of `keep_keys`, with scores of `score_dtype`.

    The other arguments are those of `keep_keys`.
    """
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


register(Operator("dmattn::join_keys", _JOIN, by_device(_join, cpu, cuda), _empty_joined))
register(Operator("dmattn::keep_keys", _KEEP, by_device(_keep, cpu, cuda), _empty_kept))
