"""Boolean masks that keep the keys with the highest bias.

`create_mask`, `maybe_create_mask` and `dynamic_mask` choose, for each row of the bias, among all
keys that the mask allows. `top_window_mask` can also be causal: each query row then chooses among
the keys up to its own position. {B|1} below is a dimension of size B or 1.
"""

import math
import numbers

import torch
from torch import Tensor

from dmattn.key_lists import best_keys, smaller
from dmattn.validation import (
    check_bool,
    check_floating,
    check_int,
    check_mask,
    check_number,
    check_same_device,
    describe,
    is_one_or,
)


def create_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    batch_size: int,
    query_len: int,
    key_len: int,
    window_size: int,
    min_dtype: float | None = None,
    block_size: int | None = None,
    type: str = "topk",
) -> Tensor:
    """Choose keys by their bias, with a fixed number of keys per row or a threshold.

    Args:
        attention_bias: floating ({B|1}, {H|HK|1}, {Sq|1}, Sk), or ({B|1}, H|HK, Sk). Not changed,
            and no gradient flows through the choice. NaN is never chosen.
        attention_mask: True where a key may be chosen, or None for all keys. Either bool, of a
            shape that broadcasts to that of the bias; or bool or integer (0 for padding), (B, Sk)
            or (B, Sq). The last form is for the last Sq keys, and allows all keys before them. If
            the bias has no rows of queries but the mask has, a key may be chosen if any row of the
            mask allows it; such a mask has to be applied in the attention as well.
        batch_size, query_len, key_len: B, Sq and Sk.
        window_size: how many keys "topk" keeps for each row of the bias; all when Sk is smaller.
            "relu" ignores it.
        min_dtype: a bias at or below this value counts as masked. None: only -inf counts as masked.
        block_size: after choosing, decide each run of this many keys as a whole, by its majority:
            kept if more than half of its keys were chosen, dropped otherwise (the last run may be
            shorter). A masked key stays dropped. None or 1: no such step.
        type: "topk" keeps the `window_size` highest biases (which of two equal ones is not
            specified), "relu" the biases above zero.

    Returns:
        A new bool tensor of the bias's own shape, True where a key is kept.

    Raises:
        TypeError: the bias is not floating, the mask has a wrong dtype, or a number is not one.
        ValueError: a shape or device does not fit, window_size or block_size is below 1, or type is
            unknown.
    """
    if not isinstance(type, str) or type not in ("topk", "relu"):
        raise ValueError(f"type: got {describe(type)}, wanted 'topk' or 'relu'")
    batch_size = check_int("batch_size", batch_size, 0)
    query_len = check_int("query_len", query_len, 0)
    key_len = check_int("key_len", key_len, 0)
    _check_bias(attention_bias, batch_size, query_len, key_len)
    block_size = _check_block_size(block_size)
    allowed = None
    if attention_mask is not None:
        allowed = _normalize_mask(attention_mask, attention_bias, batch_size, query_len, key_len)
    if type == "topk":
        window_size = check_int("window_size", window_size, 1)
        return _top(attention_bias, allowed, window_size, min_dtype, block_size)
    keep = attention_bias.detach() > max(0.0, _floor(min_dtype))
    if allowed is not None:
        keep &= allowed
    return _decide_blocks(keep, allowed, block_size)


def maybe_create_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    batch_size: int,
    query_len: int,
    key_len: int,
    window_size: int | None,
    min_dtype: float | None = None,
) -> Tensor | None:
    """`create_mask` with type "topk", if there are more keys than the window holds.

    Args:
        attention_bias, attention_mask, batch_size, query_len, key_len, min_dtype: as for
            `create_mask`.
        window_size: how many keys to keep for each row of the bias, or None for all.

    Returns:
        `attention_mask` itself when `window_size` is None or at least `key_len`; otherwise a new
        bool tensor of the bias's own shape.

    Raises:
        TypeError, ValueError: as `create_mask`.
    """
    if window_size is None:
        return attention_mask
    window_size = check_int("window_size", window_size, 1)
    check_floating("attention_bias", attention_bias)
    if check_int("key_len", key_len, 0) <= window_size:
        return attention_mask
    return create_mask(
        attention_bias, attention_mask, batch_size, query_len, key_len, window_size, min_dtype
    )


def dynamic_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    window_size: int,
    min_dtype: float | None = None,
    block_size: int | None = None,
) -> Tensor:
    """Keep the `window_size` highest biases of each row among the keys that the mask allows.

    Args:
        attention_bias: floating (..., Sk). Not changed, and no gradient flows through the choice.
        attention_mask: bool of a shape that broadcasts to that of the bias, or None.
        window_size, min_dtype, block_size: as for `create_mask`.

    Returns:
        A new bool tensor of the bias's own shape, True where a key is kept.

    Raises:
        TypeError: the bias is not floating, the mask has a wrong dtype, or a number is not one.
        ValueError: the bias has no dimension, or the mask does not broadcast to it; window_size or
            block_size is below 1.
    """
    window_size = check_int("window_size", window_size, 1)
    check_floating("attention_bias", attention_bias)
    if attention_bias.dim() == 0:
        raise ValueError("attention_bias: got shape (), wanted (..., key_len)")
    if attention_mask is not None:
        attention_mask = check_mask("attention_mask", attention_mask)
        given = tuple(attention_mask.shape)
        _check_allowed(attention_mask, attention_bias, given)
    block_size = _check_block_size(block_size)
    return _top(attention_bias, attention_mask, window_size, min_dtype, block_size)


def top_window_mask(
    attention_bias: Tensor,
    window_size: int,
    query_len: int | None = None,
    is_causal: bool = True,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """The keys that each query row keeps under `window_size`, as a dense mask.

    Row i chooses the `window_size` keys with the highest bias among those that it may see: the keys
    that the mask allows and that, when causal, are not after position i + Sk - Sq. Of equal biases
    the later key is kept, so a constant bias gives a causal sliding window. Keys with a bias of NaN
    or -inf are never chosen.

    These are the keys that `flash_dmattn_func(..., window_size=...)` attends to; it calls this
    function itself if the mask or the bias differs between query rows. The mask takes memory for
    Sq * Sk entries.

    Args:
        attention_bias: floating ({B|1}, {H|HK|1}, {Sq|1}, Sk) or ({B|1}, {H|HK|1}, Sk). Not
            changed, and no gradient flows through the choice.
        window_size: at least 1.
        query_len: Sq; Sk when None.
        is_causal: True: each row chooses among the keys up to its own position. False: among all
            keys.
        attention_mask: True where a key may be seen: bool ({B|1}, {H|HK|1}, {Sq|1}, {Sk|1}), or
            bool or integer (B, Sk), or None.

    Returns:
        bool ({B|1}, {H|HK|1}, {Sq|1}, Sk), True where a key is kept, causality included. It has one
        row when not causal and both mask and bias have one row.

    Raises:
        TypeError: the bias is not floating, the mask has a wrong dtype, or a number is not one.
        ValueError: a shape or device does not fit, or a number is too small.
    """
    window_size = check_int("window_size", window_size, 1)
    is_causal = check_bool("is_causal", is_causal)
    check_floating("attention_bias", attention_bias)
    bias = attention_bias.unsqueeze(2) if attention_bias.dim() == 3 else attention_bias
    key_len = bias.shape[-1] if bias.dim() > 0 else 0
    query_len = key_len if query_len is None else check_int("query_len", query_len, 0)
    if bias.dim() != 4 or not is_one_or(bias.shape[2], query_len):
        raise ValueError(
            f"attention_bias: got shape {tuple(attention_bias.shape)}, wanted "
            f"(batch|1, heads|1, {query_len}|1, key_len) or (batch|1, heads|1, key_len)"
        )
    allowed = None
    if attention_mask is not None:
        allowed = _check_rows_mask(attention_mask, bias, query_len)
        bias, allowed = _same_heads(bias, allowed)
    if is_causal:
        seen = _causal_rows(query_len, key_len, bias.device)
        allowed = seen if allowed is None else allowed & seen
    return best_keys(bias, window_size, allowed)


def _top(
    attention_bias: Tensor,
    allowed: Tensor | None,
    window_size: int,
    min_dtype: float | None,
    block_size: int | None,
) -> Tensor:
    """`dynamic_mask` for checked arguments."""
    # Without this topk would take NaN for the largest number of all.
    bias = attention_bias.detach().nan_to_num(-math.inf, math.inf, -math.inf)
    if allowed is not None:
        bias = bias.masked_fill(~allowed, -math.inf)
    values, indices = bias.topk(smaller(window_size, bias.shape[-1]), dim=-1, sorted=False)
    keep = torch.zeros(bias.shape, dtype=torch.bool, device=bias.device)
    # Not in place: under torch.func.vmap `keep` has no batch dimension to write a batch into.
    keep = keep.scatter(-1, indices, values > _floor(min_dtype))
    return _decide_blocks(keep, allowed, block_size)


def _causal_rows(query_len: int, key_len: int, device: torch.device) -> Tensor:
    """bool (Sq, Sk): the keys at or before each row's position, aligned to the bottom right."""
    position = torch.arange(query_len, device=device)[:, None] + (key_len - query_len)
    return torch.arange(key_len, device=device) <= position


def _check_rows_mask(attention_mask: Tensor, bias: Tensor, query_len: int) -> Tensor:
    """The mask, checked, as bool ({B|1}, heads, {Sq|1}, {Sk|1})."""
    mask = check_mask("attention_mask", attention_mask)
    check_same_device("attention_mask", mask, bias.device, "attention_bias")
    given, key_len = tuple(mask.shape), bias.shape[3]
    mask = mask[:, None, None] if mask.dim() == 2 else mask
    if (
        mask.dim() == 4
        and (is_one_or(mask.shape[0], bias.shape[0]) or bias.shape[0] == 1)
        and is_one_or(mask.shape[2], query_len)
        and is_one_or(mask.shape[3], key_len)
    ):
        return mask
    batch = "batch" if bias.shape[0] == 1 else bias.shape[0]
    raise ValueError(
        f"attention_mask: got shape {given}, wanted ({batch}|1, heads|1, {query_len}|1, "
        f"{key_len}|1) or ({batch}, {key_len})"
    )


def _same_heads(bias: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Bias and mask with the same number of heads, or 1 head, if one has HK and the other H."""
    a, b = bias.shape[1], mask.shape[1]
    if is_one_or(a, b) or b == 1:
        return bias, mask
    if a % b != 0 and b % a != 0:
        raise ValueError(
            f"attention_mask: got {b} heads, wanted them to go with {a} of attention_bias"
        )
    heads = max(a, b)
    return bias.repeat_interleave(heads // a, 1), mask.repeat_interleave(heads // b, 1)


def _normalize_mask(
    attention_mask: Tensor, bias: Tensor, batch_size: int, query_len: int, key_len: int
) -> Tensor:
    """The mask of `create_mask`, checked, in a shape that broadcasts to that of the bias."""
    mask = check_mask("attention_mask", attention_mask)
    given = tuple(mask.shape)
    if mask.dim() == 2:
        mask = _keys_mask(mask, batch_size, query_len, key_len)[:, None, None, :]
    if mask.dim() != 4 and mask.dim() != bias.dim():
        raise ValueError(
            f"attention_mask: got shape {given}, wanted 2 or 4 dimensions, or those of "
            f"attention_bias, of shape {tuple(bias.shape)}"
        )
    if mask.dim() == 4 and bias.dim() == 3:
        mask = mask.any(2)
    elif mask.dim() == 4 and bias.shape[2] == 1 and mask.shape[2] != 1:
        mask = mask.any(2, keepdim=True)
    heads, mask_heads = bias.shape[1], mask.shape[1]
    if mask_heads > 1 and heads != mask_heads and heads % mask_heads == 0:
        mask = mask.repeat_interleave(heads // mask_heads, dim=1)
    _check_allowed(mask, bias, given)
    return mask


def _keys_mask(mask: Tensor, batch_size: int, query_len: int, key_len: int) -> Tensor:
    """A mask (B, Sk) unchanged; a mask (B, Sq) extended to (B, Sk) with True in front."""
    given = tuple(mask.shape)
    if mask.shape[0] == batch_size and mask.shape[1] == key_len:
        return mask
    if mask.shape[0] != batch_size or mask.shape[1] != query_len:
        queries = "" if query_len == key_len else f" or ({batch_size}, {query_len})"
        raise ValueError(
            f"attention_mask: got shape {given}, wanted ({batch_size}, {key_len}){queries}"
        )
    if query_len > key_len:
        raise ValueError(
            f"attention_mask: got shape {given}, wanted ({batch_size}, {key_len}) as there "
            "are fewer keys than queries"
        )
    return torch.nn.functional.pad(mask, (key_len - query_len, 0), value=True)


def _decide_blocks(keep: Tensor, allowed: Tensor | None, block_size: int | None) -> Tensor:
    """Keep or drop every run of `block_size` keys as a whole, as the majority of its keys."""
    if block_size is None or block_size == 1:
        return keep
    key_len = keep.shape[-1]
    key = torch.arange(key_len, device=keep.device)
    start = key // block_size * block_size
    stop = (start + block_size).clamp(max=key_len)  # the last run may be shorter
    # before[..., j]: how many keys are kept in front of key j.
    before = torch.nn.functional.pad(keep.cumsum(-1, dtype=torch.int32), (1, 0))
    decided = (before[..., stop] - before[..., start]) * 2 > stop - start
    if allowed is not None:
        decided = decided & allowed
    return decided


def _check_block_size(block_size: int | None) -> int | None:
    if block_size is None:
        return None
    return check_int("block_size", block_size, 1, "an int of at least 1, or None")


def _floor(min_dtype: float | None) -> float:
    """The number that a bias must exceed to be chosen, from the argument `min_dtype`."""
    if min_dtype is None or (isinstance(min_dtype, numbers.Real) and min_dtype == -math.inf):
        return -math.inf
    return check_number("min_dtype", min_dtype)


def _check_bias(bias: Tensor, batch_size: int, query_len: int, key_len: int) -> None:
    check_floating("attention_bias", bias)
    if (
        bias.dim() in (3, 4)
        and is_one_or(bias.shape[0], batch_size)
        and (bias.dim() == 3 or is_one_or(bias.shape[2], query_len))
        and bias.shape[-1] == key_len
    ):
        return
    raise ValueError(
        f"attention_bias: got shape {tuple(bias.shape)}, wanted ({batch_size}|1, heads|1, "
        f"{query_len}|1, {key_len}) or ({batch_size}|1, heads, {key_len})"
    )


def _check_allowed(mask: Tensor, bias: Tensor, given: tuple[int, ...]) -> None:
    """Raise unless the mask broadcasts to the bias; `given`: its shape as the caller gave it."""
    check_same_device("attention_mask", mask, bias.device, "attention_bias")
    missing = bias.dim() - mask.dim()
    fits = missing >= 0 and all(
        is_one_or(n, size) for n, size in zip(mask.shape, bias.shape[missing:], strict=True)
    )
    if not fits:
        raise ValueError(
            f"attention_mask: got shape {given}, wanted one that broadcasts to the "
            f"shape {tuple(bias.shape)} of attention_bias; expand the bias where the mask is larger"
        )
