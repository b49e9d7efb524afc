"""Attention over sequences of unequal lengths that are packed one behind the other."""

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

import dmattn.ops.varlen  # noqa: F401 - registers the operators
from dmattn.functional import flash_dmattn_func
from dmattn.backends.cpu import packed as packed_cpu
from dmattn.backends.cuda import attention as cuda
from dmattn.dispatch import (
    check_backend,
    check_number,
    default_scale,
    is_plain_call,
    refuse_forward_mode,
    without_nan,
)
from dmattn.checks import check_tensors
from dmattn.packed_checks import Packing, check_packed_inputs, is_per_key
from dmattn.selection import same_heads, select_keys
from dmattn.utils.mask import check_window_size


@overload
def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
    window_size: int | None = None,
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...


@overload
def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
    window_size: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any: ...  # Tensor, or tuple of two


def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
    window_size: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """`flash_dmattn_func` for each of n sequences packed one behind the other, without padding.

    Sequence b has the query rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 and the keys
    cu_seqlens_k[b] .. cu_seqlens_k[b + 1] - 1; either may be none. Rows see keys of their own
    sequence only. Letters: Tq and Tk rows and keys of all sequences together, H query heads, HK
    key/value heads, D head dimension.

    On CUDA cu_seqlens are read by the kernels alone, so that the host never waits for them, and
    cannot be checked: ones that do not rise from 0 to Tq and Tk, or a sequence longer than
    max_seqlen says, give undefined results and may read or write outside the tensors. On the CPU
    they raise ValueError.

    Args:
        query: (Tq, H, D) with D at most 256; dtypes and views as for `flash_dmattn_func`.
        key, value: (Tk, HK, D) in the dtype of query; HK divides H.
        cu_seqlens_q, cu_seqlens_k: int32 (n + 1,), on the device of query.
        max_seqlen_q, max_seqlen_k: length of the longest sequence, or more.
        attn_mask: bool, True = attend: (Tk, {H|HK|1}), alike for all rows of a sequence, or
            (Tq, {H|HK|1}, max_seqlen_k), its columns counted from the first key of the row's own
            sequence. With the first the cost follows the number of kept keys.
        attn_bias: the dtype of query, or float32; shapes as attn_mask. -inf masks. Where its
            gradient has columns behind the keys of a row's sequence, they are 0.
        softmax_scale: D ** -0.5 when None.
        is_causal: the last row of each sequence sees its last key, the row before it one key less,
            and so on.
        softcap, deterministic, backend: as for `flash_dmattn_func`.
        window_size: each row keeps only this many keys of its sequence, chosen as by
            `flash_dmattn_func`. attn_bias, and attn_mask if given, must then be (Tk, {H|HK|1}).
            With is_causal the rows are the keys' own: cu_seqlens_k is the same object as
            cu_seqlens_q, unless max_seqlen_q is 1.
        return_lse: also return the log-sum-exp of each row.

    Returns:
        out (Tq, H, D), contiguous, in the dtype of query. With return_lse a tuple of that and lse
        (H, Tq) with the natural logarithm, float32 (float64 for float64 inputs), differentiable.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, stride, device or number does not fit.
        RuntimeError: the compiled kernels are missing or of another version, or the GPU is older
            than sm_80.
    """
    check_number("softcap", softcap)
    if softmax_scale is None:
        softmax_scale = default_scale(query)
    else:
        check_number("softmax_scale", softmax_scale)
    if backend is not None:
        check_backend(backend, query)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    numbers = (softmax_scale, is_causal, softcap, deterministic)
    check_tensors(query, key, value, attn_mask, attn_bias)
    mask, bias = _heads_first(attn_mask), _heads_first(attn_bias)
    if window_size is not None:
        check_packed_inputs(query, key, value, mask, bias, packing)
        out, lse = _attend_in_window(query, key, value, mask, bias, packing, numbers, window_size)
    else:
        out, lse = _attend(query, key, value, mask, bias, packing, numbers)
    return (out, lse) if return_lse else out


_Numbers = tuple[float, bool, float, bool]  # softmax_scale, is_causal, softcap, deterministic


def _heads_first(operand: Tensor | None) -> Tensor | None:
    """(Tk, heads) or (Tq, heads, max_seqlen_k) as the operators take it, a view."""
    return operand if operand is None or operand.dim() < 2 else operand.transpose(0, 1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    packing: Packing,
    numbers: _Numbers,
) -> tuple[Tensor, Tensor]:
    """out and lse, past the dispatcher where it has nothing to do."""
    softmax_scale, is_causal, softcap, deterministic = numbers
    if is_plain_call(q, k, v, mask, bias):
        forward = cuda.varlen_forward if q.is_cuda else packed_cpu.forward
        return forward(q, k, v, mask, bias, packing, softmax_scale, is_causal, softcap)
    check_packed_inputs(q, k, v, mask, bias, packing)
    refuse_forward_mode(q, k, v, bias)
    out, lse, _ = torch.ops.dmattn.varlen_fwd(
        q,
        k,
        v,
        mask,
        bias,
        *packing,
        softmax_scale,
        is_causal,
        softcap,
        deterministic or torch.are_deterministic_algorithms_enabled(),
    )
    return out, lse


def _attend_in_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    packing: Packing,
    numbers: _Numbers,
    window_size: int,
) -> tuple[Tensor, Tensor]:
    """What `window_size` amounts to: a mask per key, or (causal) a selection for all."""
    check_window_size(window_size)
    bias = _scores("attn_bias", bias)
    if mask is not None:
        _scores("attn_mask", mask)
    if packing.max_seqlen_k <= window_size:
        return _attend(q, k, v, mask, without_nan(bias), packing, numbers)
    softmax_scale, is_causal, softcap, deterministic = numbers
    if not is_causal or packing.max_seqlen_q <= 1:  # the only row of a sequence sees all its keys
        keep = _best_keys(bias.detach(), mask, packing.cu_seqlens_k, window_size)
        return _attend(q, k, v, keep, bias, packing, numbers)
    if packing.cu_seqlens_q is not packing.cu_seqlens_k or q.shape[0] != k.shape[0]:
        raise ValueError(
            "cu_seqlens_q: got another tensor than cu_seqlens_k, wanted the same one with "
            "window_size and is_causal: every key with the query row of its own position"
        )
    bias = bias[None, :, None]
    key_mask = None if mask is None else mask[None, :, None]
    chosen = select_keys(
        bias, window_size, True, attn_mask=key_mask, cu_seqlens=packing.cu_seqlens_k
    )
    out, lse = flash_dmattn_func(
        q[None],
        k[None],
        v[None],
        attn_bias=bias,
        softmax_scale=softmax_scale,
        is_causal=True,
        softcap=softcap,
        deterministic=deterministic,
        selection=chosen,
        return_lse=True,
    )
    return out[0], lse[0]


def _scores(name: str, operand: Tensor | None) -> Tensor:
    """The operand, if it has an entry per key."""
    if operand is None:
        raise ValueError(
            f"{name}: got None, wanted one score per key, by which window_size chooses"
        )
    if not is_per_key(operand):
        shape = tuple(operand.transpose(0, 1).shape)
        raise ValueError(
            f"{name}: got shape {shape}, wanted (total_k, heads), alike for all rows, with "
            "window_size"
        )
    return operand


def _best_keys(
    scores: Tensor, allowed: Tensor | None, cu_seqlens: Tensor, window_size: int
) -> Tensor:
    """bool (heads, Tk): the `window_size` highest scores of each sequence, the later of equal ones.

    By sorting, so that nothing has to be known on the host.
    """
    given, key_mask = same_heads(scores[None], None if allowed is None else allowed[None])
    scores = without_nan(given[0])
    if key_mask is not None:
        scores = torch.where(key_mask[0], scores, -math.inf)
    total = scores.shape[1]
    position = torch.arange(total, device=scores.device)
    sequence = torch.searchsorted(cu_seqlens.long(), position, right=True) - 1
    # Backwards, so that of equal scores the later key comes first; then the sequences apart again.
    order = total - 1 - scores.flip(1).argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, sequence[order].argsort(dim=1, stable=True))
    rank = position - cu_seqlens.long()[sequence]
    keep = (rank < window_size) & (scores.gather(1, order) != -math.inf)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, keep)
