"""The public attention function."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

import dmattn.ops.attention  # noqa: F401 - registers the operators
from dmattn.backends.cpu import attention as cpu
from dmattn.backends.cuda import attention as cuda
from dmattn.backends.registry import why_unavailable
from dmattn.dispatch import (
    check_backend,
    check_number,
    default_scale,
    is_plain_call,
    refuse_forward_mode,
    without_nan,
)
from dmattn.key_lists import Selection
from dmattn.checks import check_inputs, check_selected_bias, check_tensors, lse_dtype
from dmattn.reference import reference_attention
from dmattn.selection import KeySelection, key_only_mask, select_keys
from dmattn.utils.mask import check_window_size


@overload
def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
    window_size: int | None = None,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    *,
    selection: KeySelection | None = None,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...


@overload
def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
    window_size: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    *,
    selection: KeySelection | None = None,
    return_attn_probs: bool = False,
) -> Any: ...  # Tensor, or tuple of two or three


def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
    window_size: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    *,
    selection: KeySelection | None = None,
    return_attn_probs: bool = False,
) -> Any:
    """Softmax attention with a mask, a bias, or both, neither expanded nor padded.

        logits[b,h,i,j] = softcap(softmax_scale * query[b,i,h] . key[b,j,h//G]) + attn_bias[b,h,i,j]
        out[b,i,h]      = sum over kept j of softmax_j(logits) * value[b,j,h//G]

    A query row that keeps no key gives out = 0 and lse = -inf, and adds nothing to any gradient.
    Letters: B batch, Sq/Sk query/key length, H query heads, HK key/value heads, G = H / HK, D head
    dimension. Gradients reach query, key, value and attn_bias, each computed only if required.

    Args:
        query: (B, Sq, H, D) with D at most 256; float16 or bfloat16 on CUDA, on the CPU also
            float32 or float64. Query, key and value may be any view whose last dimension is
            contiguous (on the CPU, any view at all).
        key, value: (B, Sk, HK, D) in the dtype of query; HK divides H.
        attn_mask: bool ({B|1}, {H|HK|1}, {Sq|1}, {Sk|1}), True = attend. One that is alike for all
            queries (Sq dimension 1) makes the cost follow the number of kept keys.
        attn_bias: the dtype of query, or float32; shapes as attn_mask. -inf masks. Its gradient is
            summed in float32 or wider and rounded once.
        softmax_scale: D ** -0.5 when None.
        is_causal: query i sees keys 0 .. i + Sk - Sq, so that the last query sees the last key.
        softcap: c > 0 turns the scaled dot product x into c * tanh(x / c).
        deterministic: bitwise repeatable gradients, at some cost. Also on while
            torch.use_deterministic_algorithms is.
        window_size: each query keeps only this many keys: of those that it may see (by attn_mask,
            and by causality when is_causal) the ones with the highest attn_bias, the later of two
            equal ones, never one of NaN or -inf. attn_bias must then be ({B|1}, {H|HK|1}, 1, Sk)
            or ({B|1}, {H|HK|1}, Sk), and attn_mask alike for all query rows. The choice is not
            differentiated, the bias of the kept keys is. Time grows with Sq * window_size, and
            nothing of size Sq * Sk is formed. With Sk <= window_size nothing is chosen: all keys
            count but those of NaN or -inf.
        return_lse: also return the log-sum-exp of each row.
        backend: "cuda" or "cpu" to insist on it, None to go by the device of the tensors.
        selection: which keys each row keeps, instead of window_size and attn_mask: from
            `select_keys`, to share one choice among calls, or from `KeySelection.from_intervals`.
            attn_bias may then be ({B|1}, {H|HK|1}, Sk) as well, or have rows of its own if it
            requires no gradient.
        return_attn_probs: also return the probabilities, for testing. They are computed apart, in
            float64 and with memory of Sq * Sk per head, and carry no gradient.

    Returns:
        out (B, Sq, H, D), contiguous, in the dtype of query. With return_lse or return_attn_probs
        a tuple of out and what was asked for, in this order: lse (B, H, Sq) with the natural
        logarithm, differentiable, and probabilities (B, H, Sq, Sk); both float32, or float64 for
        float64 inputs.

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
    if selection is not None:
        if window_size is not None:
            raise ValueError("window_size: got a value beside selection, wanted one of them")
        _check_selection(selection, query, is_causal)
        if isinstance(attn_bias, Tensor) and attn_bias.dim() == 3:
            attn_bias = attn_bias.unsqueeze(2)
    elif window_size is not None:
        attn_mask, attn_bias, selection = _select(
            query, key, value, attn_mask, attn_bias, is_causal, window_size
        )
    if selection is None:
        out, lse = _attend(
            query,
            key,
            value,
            attn_mask,
            attn_bias,
            softmax_scale,
            is_causal,
            softcap,
            deterministic,
        )
    else:
        out, lse = _attend_selected(
            query,
            key,
            value,
            attn_mask,
            attn_bias,
            softmax_scale,
            is_causal,
            softcap,
            deterministic,
            selection,
        )
    if not (return_lse or return_attn_probs):
        return out
    result: tuple[Tensor, ...] = (out, lse) if return_lse else (out,)
    if return_attn_probs:
        if selection is not None:
            attn_mask = selection.to_mask()
        with torch.no_grad():
            exact = reference_attention(
                query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, softcap
            )
        result = (*result, exact.probs.to(lse_dtype(query.dtype)))
    return result


def flash_dmattn_func_auto(backend: str | None = None) -> Callable[..., Any]:
    """`flash_dmattn_func`, bound to a backend.

    Args:
        backend: "cuda", "cpu", or None to go by the device of the tensors of each call.

    Returns:
        A callable with the signature of `flash_dmattn_func`.

    Raises:
        ValueError: there is no such backend.
        RuntimeError: that backend cannot run on this machine; says why.
    """
    if backend is None:
        return flash_dmattn_func
    reason = why_unavailable(backend)
    if reason is not None:
        raise RuntimeError(f"backend: got {backend!r}, which cannot run here: {reason}")
    return functools.partial(flash_dmattn_func, backend=backend)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    attn_bias: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool,
    lists: Selection | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse, past the dispatcher where it has nothing to do."""
    if is_plain_call(query, key, value, attn_mask, attn_bias):
        forward = cuda.forward if query.is_cuda else cpu.forward
        return forward(
            query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, softcap, lists
        )
    check_inputs(query, key, value, attn_mask, attn_bias)
    refuse_forward_mode(query, key, value, attn_bias)
    out, lse, _ = torch.ops.dmattn.fwd(
        query,
        key,
        value,
        attn_mask,
        attn_bias,
        softmax_scale,
        is_causal,
        softcap,
        deterministic or torch.are_deterministic_algorithms_enabled(),
        *(() if lists is None else lists),
    )
    return out, lse


def _attend_selected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    attn_bias: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool,
    selection: KeySelection,
) -> tuple[Tensor, Tensor]:
    """`_attend`, for which rows in front of the first key, which keep nothing, are left out."""
    check_inputs(query, key, value, attn_mask, attn_bias)
    grad = attn_bias is not None and attn_bias.requires_grad and torch.is_grad_enabled()
    check_selected_bias(selection.lists, attn_bias, grad)
    skip = max(0, query.shape[1] - key.shape[1]) if is_causal else 0
    if skip > 0:
        query = query[:, skip:]
        if attn_bias is not None and attn_bias.shape[2] > 1:
            attn_bias = attn_bias[:, :, skip:]
    numbers = (softmax_scale, is_causal, softcap, deterministic)
    out, lse = _attend(query, key, value, attn_mask, attn_bias, *numbers, selection.lists)
    if skip > 0:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, skip, 0))
        lse = torch.nn.functional.pad(lse, (skip, 0), value=-math.inf)
    return out, lse


def _select(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    attn_bias: Tensor | None,
    is_causal: bool,
    window_size: int,
) -> tuple[Tensor | None, Tensor, KeySelection | None]:
    """What `window_size` amounts to: the mask left to apply, the bias in 4-D, and a selection.

    There is no selection where every key is within the window: a bias of -inf then keeps out the
    keys that would not be selected.
    """
    check_window_size(window_size)
    if attn_bias is None:
        raise ValueError(
            "attn_bias: got None, wanted one score per key, by which window_size chooses"
        )
    check_tensors(query, key, value, attn_mask, attn_bias)
    given = tuple(attn_bias.shape)
    bias = attn_bias.unsqueeze(2) if attn_bias.dim() == 3 else attn_bias
    dims = check_inputs(query, key, value, attn_mask, bias)
    if bias.shape[2] != 1 or bias.shape[3] != dims.seqlen_k:
        raise ValueError(
            f"attn_bias: got shape {given}, wanted (batch|1, nheads|nheads_k|1, 1, "
            f"{dims.seqlen_k}) or (batch, nheads|nheads_k, {dims.seqlen_k}) with window_size"
        )
    if attn_mask is not None:
        attn_mask = key_only_mask(attn_mask, dims.seqlen_k)[:, :, None]
    if dims.seqlen_k <= window_size:
        return attn_mask, without_nan(bias), None
    selection = select_keys(
        bias, window_size, is_causal, attn_mask=attn_mask, query_len=dims.seqlen_q
    )
    return None, bias, selection


def _check_selection(selection: Any, query: Tensor, is_causal: bool) -> None:
    """Raise unless the selection was made for this many query rows and this causality."""
    if not isinstance(selection, KeySelection):
        kind = type(selection).__name__
        raise TypeError(f"selection: got {kind}, wanted a dmattn.KeySelection or None")
    check_tensors(query, query, query, None, None)
    if selection.is_causal != is_causal:
        raise ValueError(
            f"selection: got one with is_causal={selection.is_causal}, wanted {is_causal}"
        )
    if query.dim() == 4 and selection.query_len != query.shape[1]:
        raise ValueError(
            f"selection: got one for {selection.query_len} query rows, wanted {query.shape[1]}"
        )
