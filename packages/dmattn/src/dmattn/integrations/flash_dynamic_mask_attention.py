"""Attention with the name and the arguments of flash-dmattn's function for model code.

It does not need transformers. A layer calls it as its attention function, and passes its scores as
`attention_bias`. For transformers' own Doge models `dmattn.integrations.transformers.enable_doge`
does everything that is needed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dmattn.arguments import without_nan
from dmattn.functional import flash_dmattn_func
from dmattn.selection import check_boundary_tensor, to_int32
from dmattn.utils.mask import top_window_mask
from dmattn.validation import (
    check_bool,
    check_dtype,
    check_int,
    check_longest,
    check_mask,
    check_number,
    check_optional_tensor,
    check_tensor,
    is_one_or,
)
from dmattn.varlen import flash_dmattn_varlen_func


def flash_dynamic_mask_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_bias: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Softmax attention with a mask, a bias, and a choice of keys by that bias.

    Letters: B batch, Sq/Sk query/key length, H query heads, HK key/value heads, D head dimension.
    With a window each row attends to the keys with the highest bias among those that it may see by
    the mask and by causality; of equal biases the later key is kept. (flash-dmattn chose among all
    keys, later ones included, so that the start of a text was treated differently depending on what
    followed.)

    Args:
        module: the layer. Its attribute `is_causal` is used if the argument is None, and True if it
            has none.
        query: (B, H, Sq, D), floating.
        key, value: (B, HK, Sk, D), floating.
        attention_mask: True where a row may see a key: bool (B|1, H|HK|1, Sq|1, at least Sk), or
            the same without the row dimension, or a padding mask (B|1, at least Sk) of bools or
            integers (0 = padding). Only the first Sk keys of a mask are used.
        attention_bias: floating (B|1, H|HK|1, Sq|1, Sk), (B|1, H|HK|1, Sk) or (B|1, Sk); added to
            the logits. -inf masks.
        scaling: factor of the dot products; D ** -0.5 when None.
        softcap: c turns the scaled dot product x into c * tanh(x / c); None or 0 for none.
        is_causal: whether rows see no later keys, with the last row at the last key.
        keep_window_size, window_size: two names for the number of keys that a row keeps; None for
            all. The keys are chosen by attention_bias, which is then required. If the mask or the
            bias differs between rows, the choice takes memory for Sq * Sk keys.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: for packed sequences without
            padding, in a batch of 1: the boundaries, integer (sequences + 1,), and the lengths of
            the longest sequences. If only one of the boundaries is given, it is used for both. A
            length that is None is read from the boundaries, for which the host waits.
        target_dtype: the dtype to which float32 inputs are cast. When None, it is that of the
            linear weights of `module`: adapters and norms may leave inputs in float32.
        deterministic: make gradients bitwise repeatable.
        dropout: must be 0 or None.
        **kwargs: other arguments are ignored.

    Returns:
        out (B, Sq, H, D), contiguous, and None in place of attention weights.

    Raises:
        TypeError, ValueError: an argument does not fit, or asks for something that is not
            supported.
        RuntimeError: as `dmattn.flash_dmattn_func`.
    """
    _check_tensors(query, key, value, attention_bias)
    dropout = kwargs.get("dropout")
    if dropout is not None and check_number("dropout", dropout) != 0:
        raise ValueError(f"dropout: got {dropout}, wanted 0, as dmattn has no dropout of attention")
    window = _window_size(kwargs)
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = check_bool("is_causal", is_causal) and query.shape[2] > 1
    dtype = _compute_dtype(module, query, value, kwargs.get("target_dtype"))
    query, key, value = (t.transpose(1, 2).to(dtype) for t in (query, key, value))
    bias = _with_rows(attention_bias)
    if bias is not None and bias.dtype not in (dtype, torch.float32):
        bias = bias.to(dtype)
    mask = _checked_mask(attention_mask)
    is_packed = kwargs.get("cu_seq_lens_q") is not None or kwargs.get("cu_seq_lens_k") is not None
    if not is_packed:
        _check_shapes(
            query,
            key,
            attention_mask=(attention_mask, mask),
            attention_bias=(attention_bias, bias),
        )
    if mask is not None:
        mask = mask[..., : key.shape[1]]
    deterministic = kwargs.get("deterministic")
    settings: dict[str, Any] = {
        "softmax_scale": None if scaling is None else check_number("scaling", scaling),
        "softcap": 0.0 if softcap is None else softcap,
        "deterministic": check_bool(
            "deterministic", False if deterministic is None else deterministic
        ),
    }
    if window is not None and key.shape[1] <= window:
        window = None
        if bias is not None:
            bias = without_nan(bias)  # keys with a bias of NaN are never chosen
    if window is not None and bias is None:
        raise ValueError("attention_bias: got None, wanted a bias by which the window chooses")
    if is_packed:
        settings |= {"is_causal": is_causal, "window_size": window}
        return _packed(query, key, value, mask, bias, kwargs, settings), None
    if window is not None and bias is not None and _has_rows(mask, bias):
        shape = query.shape[1], key.shape[1]
        mask = _best_of_each_row(mask, bias, window, shape, is_causal)
        window, is_causal = None, False  # both are in the mask
    out: Tensor = flash_dmattn_func(
        query,
        key,
        value,
        attn_mask=mask,
        attn_bias=bias,
        is_causal=is_causal,
        window_size=window,
        **settings,
    )
    return out, None


def _check_tensors(query: Any, key: Any, value: Any, attention_bias: Any) -> None:
    """The checks that are needed before `flash_dmattn_func` checks the rest."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not check_tensor(name, t).is_floating_point():
            raise TypeError(f"{name}: got dtype {t.dtype}, wanted a floating dtype")
        if t.dim() != 4:
            raise ValueError(
                f"{name}: got shape {tuple(t.shape)}, wanted (batch, heads, seqlen, head_dim)"
            )
    bias = check_optional_tensor("attention_bias", attention_bias)
    if bias is None:
        return
    if not bias.is_floating_point():
        hint = "; a mask of bools is an attention_mask" if bias.dtype == torch.bool else ""
        raise TypeError(
            f"attention_bias: got dtype {bias.dtype}, wanted a floating dtype, as it is added to "
            f"the logits{hint}"
        )
    if not 2 <= bias.dim() <= 4:
        raise ValueError(
            f"attention_bias: got shape {tuple(bias.shape)}, wanted (batch|1, heads|1, seqlen_q|1, "
            "seqlen_k) or one without the dimension of rows"
        )


def _checked_mask(attention_mask: Any) -> Tensor | None:
    mask = _with_rows(attention_mask)
    if mask is None:
        return None
    mask = check_mask("attention_mask", mask)
    if mask.dim() != 4:
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}, wanted (batch, "
            "seqlen_k), or (batch|1, heads|1, seqlen_q|1, seqlen_k) with rows or without"
        )
    return mask


def _check_shapes(query: Tensor, key: Tensor, **given: tuple[Tensor | None, Tensor | None]) -> None:
    """Raise ValueError for a mask or bias of a wrong shape, naming the shape that was given.

    Args:
        query, key: (B, Sq, H, D) and (B, Sk, HK, D).
        given: by name, a mask or bias as it was given, and with four dimensions. A mask may have
            more keys than `key`; the last ones are ignored.
    """
    batch, query_len, heads, _ = query.shape
    key_len, nheads_k = key.shape[1:3]
    for name, (original, t) in given.items():
        if original is None or t is None:
            continue
        keys = t.shape[3]
        fits_keys = keys >= key_len if name == "attention_mask" else is_one_or(keys, key_len)
        fits_heads = is_one_or(t.shape[1], heads) or t.shape[1] == nheads_k
        fits = is_one_or(t.shape[0], batch) and is_one_or(t.shape[2], query_len)
        if not (fits and fits_heads and fits_keys):
            raise ValueError(
                f"{name}: got shape {tuple(original.shape)}, wanted ({batch}|1, {heads}|{nheads_k}"
                f"|1, {query_len}|1, {key_len}) or one without the dimension of rows, or of heads"
            )


def _window_size(kwargs: dict[str, Any]) -> int | None:
    given = {name: kwargs.get(name) for name in ("keep_window_size", "window_size")}
    sizes = {name: check_int(name, size, 1) for name, size in given.items() if size is not None}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"window_size: got {sizes['window_size']} beside keep_window_size="
            f"{sizes['keep_window_size']}, wanted one of them"
        )
    return next(iter(sizes.values()), None)


def _compute_dtype(
    module: nn.Module, query: Tensor, value: Tensor, target: torch.dtype | None
) -> torch.dtype:
    """The dtype to which query, key and value are cast; after that autocast may cast them again."""
    if target is not None:
        check_dtype("target_dtype", target)
    if query.dtype != torch.float32:
        return value.dtype
    if target is not None:
        return target
    for layer in module.modules():
        weight = getattr(layer, "weight", None)
        if isinstance(layer, nn.Linear) and isinstance(weight, Tensor):
            if weight.is_floating_point():
                return weight.dtype
            break  # a quantized layer: its outputs already have the dtype to compute in
    return value.dtype


def _with_rows(t: Tensor | None) -> Tensor | None:
    """A mask or bias (B, Sk), (B, heads, Sk) or (B, heads, Sq, Sk) with four dimensions."""
    if not isinstance(t, Tensor):
        return t  # a later check reports anything other than None
    if t.dim() == 2:
        t = t if t.is_floating_point() else t != 0
        return t[:, None, None]
    if t.dim() == 4 and t.shape[2] > 1 and t.stride(2) == 0:
        return t[:, :, :1]  # the same for all rows: a single row costs less
    return t.unsqueeze(2) if t.dim() == 3 else t


def _has_rows(mask: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the mask or the bias may differ between rows."""
    return any(t is not None and t.shape[2] > 1 for t in (mask, bias))


def _best_of_each_row(
    mask: Tensor | None, bias: Tensor, window: int, shape: tuple[int, int], is_causal: bool
) -> Tensor:
    """bool: the keys that each row keeps among those that it may see; `shape`: (Sq, Sk)."""
    query_len, key_len = shape
    if bias.shape[3] != key_len:
        raise ValueError(
            f"attention_bias: got shape {tuple(bias.shape)}, wanted a bias of {key_len} keys"
        )
    return top_window_mask(bias, window, query_len, is_causal, mask)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    kwargs: dict[str, Any],
    settings: dict[str, Any],
) -> Tensor:
    """Attention of sequences that are packed one behind the other in a batch of 1."""
    if query.shape[0] != 1:
        raise ValueError(
            f"query: got batch {query.shape[0]} beside cu_seq_lens_q, wanted 1, with the sequences "
            "one behind the other"
        )
    bounds = {side: _boundaries(f"cu_seq_lens_{side}", kwargs) for side in "qk"}
    names = {side: f"max_length_{side}" for side in bounds}
    longest = {
        side: check_longest(name, kwargs.get(name), bounds[side]) for side, name in names.items()
    }
    operands = {"attention_mask": mask, "attention_bias": bias}
    per_key = {name: _per_key(name, t, key.shape[1]) for name, t in operands.items()}
    out: Tensor = flash_dmattn_varlen_func(
        query[0],
        key[0],
        value[0],
        bounds["q"],
        bounds["k"],
        longest["q"],
        longest["k"],
        attn_mask=per_key["attention_mask"],
        attn_bias=per_key["attention_bias"],
        **settings,
    )
    return out[None]


def _boundaries(name: str, kwargs: dict[str, Any]) -> Tensor:
    """Boundaries as int32; if only those of queries or of keys are given, they serve for both."""
    other = name[:-1] + ("k" if name.endswith("q") else "q")
    given = kwargs.get(name) if kwargs.get(name) is not None else kwargs.get(other)
    return to_int32(check_boundary_tensor(given, name))


def _per_key(name: str, t: Tensor | None, key_len: int) -> Tensor | None:
    """(1, heads, 1, Tk) as (Tk, heads), the layout of packed keys."""
    if t is None:
        return None
    if t.shape[0] != 1 or _has_rows(t, None) or t.shape[3] != key_len:
        raise ValueError(
            f"{name}: got shape {tuple(t.shape)} beside cu_seq_lens_q, wanted (1, heads, 1, "
            f"{key_len}), alike for all rows"
        )
    return t[0, :, 0].transpose(0, 1)
