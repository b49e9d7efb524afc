"""From the arguments of a public attention call to a checked `Problem`."""

import math
from typing import Any

import torch
from torch import Tensor

from dmattn.checks import check
from dmattn.problem import Packing, Problem, checked_settings
from dmattn.validation import (
    check_float32,
    check_int,
    check_optional_tensor,
    check_tensor,
    is_integer,
    is_one_or,
)


def checked_problem(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    attn_bias: Any,
    packing: Packing | None = None,
    *,
    sinks: Any,
    softmax_scale: Any,
    **settings: Any,
) -> Problem:
    """The checked problem of the arguments of a public function.

    Under torch.autocast the operands are cast as `flash_dmattn_func` documents. A mask of two
    dimensions, unless sequences are packed, becomes one of four; packed masks and biases are
    transposed so that their heads come first.

    Args:
        query, key, value, attn_mask, attn_bias, sinks, softmax_scale: what the caller gave.
        packing: that of packed sequences, else None.
        settings: the arguments of `dmattn.problem.checked_settings`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a layout, shape, device or number does not fit, or a mask of two dimensions
            could be (B, Sk) or (Sq, Sk).
    """
    check_tensor("query", query)
    if softmax_scale is None:
        softmax_scale = _default_scale(query)
    else:
        softmax_scale = check_float32("softmax_scale", softmax_scale)
    if is_autocast(query):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (_cast(t, dtype) for t in (query, key, value))
        if isinstance(attn_bias, Tensor) and attn_bias.dtype != torch.float32:
            attn_bias = _cast(attn_bias, dtype)
    if packing is None:
        if isinstance(attn_mask, Tensor) and attn_mask.dim() == 2:
            attn_mask = _four_dimensions(attn_mask, query, key)
    else:
        attn_mask, attn_bias = heads_first(attn_mask), heads_first(attn_bias)
    problem = Problem(
        query,
        key,
        value,
        attn_mask,
        attn_bias,
        sinks,
        softmax_scale,
        *checked_settings(**settings),
        packing=packing,
    )
    check(problem)
    return problem


def _for_sliding_window(is_packed: bool) -> str:
    """What to do instead, in the words of an error message."""
    if is_packed:
        other = "the same score for every key as attn_bias, with is_causal=True"
    else:
        other = "selection=dmattn.sliding_window(key_len, window_size)"
    return f"for a sliding window pass {other}"


def check_window_size(
    window_size: Any, may_be_left_out: bool = True, is_packed: bool = False
) -> int:
    """window_size as an int of at least 1.

    Args:
        window_size: what the caller gave, not None.
        may_be_left_out: whether None is allowed as well, for the error message.
        is_packed: whether the call has packed sequences, for the error message.

    Raises:
        TypeError: it is no integer, such as the pair of numbers that flash_attn takes.
        ValueError: it is below 1, such as the -1 by which flash_attn means no window.
    """
    wanted = "an int of at least 1, the keys that each row keeps by score"
    if may_be_left_out:
        wanted += f", or None; {_for_sliding_window(is_packed)}"
    return check_int("window_size", window_size, 1, wanted)


def check_scores(attn_bias: Any, is_packed: bool = False) -> Tensor:
    """attn_bias, if it is a dense tensor, as window_size needs it.

    `is_packed`: whether the call has packed sequences, for the error message.

    Raises:
        TypeError: it is neither a tensor nor None.
        ValueError: it is None, or no dense tensor.
    """
    scores = check_optional_tensor("attn_bias", attn_bias)
    if scores is None:
        raise ValueError(
            "attn_bias: got None, wanted one score per key, by which window_size chooses; "
            + _for_sliding_window(is_packed)
        )
    return scores


def without_nan(scores: Tensor) -> Tensor:
    """Scores with -inf in place of NaN.

    For calls in which all keys fit the window: no selection runs then, which would leave out keys
    with a score of NaN.
    """
    return torch.nan_to_num(scores, nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def _default_scale(query: Tensor) -> float:
    if query.dim() > 0 and query.shape[-1] > 0:
        scale: float = query.shape[-1] ** -0.5
        return scale
    return 1.0  # the shape is wrong, which a later check reports


def is_autocast(query: Tensor) -> bool:
    """Whether `checked_problem` casts the operands of such a query."""
    if query.is_cuda:
        return torch.is_autocast_enabled("cuda")
    if query.is_cpu:
        return torch.is_autocast_enabled("cpu")
    return query.is_xpu and torch.is_autocast_enabled("xpu")


def _cast(t: Any, dtype: torch.dtype) -> Any:
    """Cast as autocast does: floating tensors except float64 ones; other values unchanged."""
    if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64:
        return t.to(dtype)
    return t


def _four_dimensions(mask: Tensor, query: Tensor, key: Any) -> Tensor:
    """A mask (B, Sk) as (B, 1, 1, Sk), or a mask (Sq, Sk) as (1, 1, Sq, Sk).

    Raises:
        ValueError: its shape is neither of these, or both of them; or it is no dense tensor.
    """
    if query.dim() != 4 or not isinstance(key, Tensor) or key.dim() != 4:
        return mask  # query or key is wrong, which a later check reports
    mask = check_tensor("attn_mask", mask)  # a sparse one cannot get further dimensions
    batch, rows, keys = query.shape[0], query.shape[1], key.shape[1]
    first, last = mask.shape
    if last != keys or not (is_one_or(first, batch) or first == rows):
        raise ValueError(
            f"attn_mask: got shape {tuple(mask.shape)}, wanted (batch, seqlen_k) = "
            f"({batch}, {keys}), (seqlen_q, seqlen_k) = ({rows}, {keys}), or four dimensions "
            "(batch|1, nheads|nheads_k|1, seqlen_q|1, seqlen_k|1)"
        )
    is_padding = first == batch
    if first > 1 and is_padding and first == rows:
        raise ValueError(
            f"attn_mask: got shape {tuple(mask.shape)}, which is both (batch, seqlen_k) and "
            "(seqlen_q, seqlen_k) here; wanted mask[:, None, None] for padding, or "
            "mask[None, None] for rows of their own"
        )
    if is_integer(mask.dtype) and (is_padding or first == 1):
        mask = mask != 0  # a padding mask as a tokenizer returns it
    return mask[:, None, None] if is_padding else mask[None, None]


def heads_first(operand: Any) -> Any:
    """A view of a packed mask or bias, (Tk, heads) or (Tq, heads, ...), with its heads first."""
    if isinstance(operand, Tensor) and not operand.is_nested and operand.dim() >= 2:
        return operand.transpose(0, 1)
    return operand
