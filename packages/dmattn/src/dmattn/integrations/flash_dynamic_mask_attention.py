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
from dmattn.integrations.documents import check_bounds_and_longest
from dmattn.utils.mask import top_window_mask
from dmattn.validation import (
    check_bool,
    check_dtype,
    check_float32,
    check_int,
    check_mask,
    check_number,
    check_optional_tensor,
    check_same_device,
    check_shape,
    check_tensor,
    is_one_or,
)
from dmattn.varlen import flash_dmattn_varlen_func


def flash_dynamic_mask_attention_forward(
    module: Any,
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
            has none. If it is a torch.nn.Module, its weights say to which dtype float32 inputs are
            cast; None serves as well.
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
            length that is None is read from the boundaries, for which the host waits. Values on a
            GPU that the host does not read are not checked. Mask and bias are then the same for all
            rows.
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
    _check_heads(query, key, value)
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
    if window is not None and bias is None:
        raise ValueError("attention_bias: got None, wanted a bias by which the window chooses")
    is_packed = kwargs.get("cu_seq_lens_q") is not None or kwargs.get("cu_seq_lens_k") is not None
    _check_operands(
        query,
        key,
        is_packed,
        attention_mask=(attention_mask, mask),
        attention_bias=(attention_bias, bias),
    )
    if mask is not None:
        mask = mask[..., : key.shape[1]]
    deterministic = kwargs.get("deterministic")
    settings: dict[str, Any] = {
        "softmax_scale": None if scaling is None else check_float32("scaling", scaling),
        "softcap": 0.0 if softcap is None else softcap,
        "deterministic": check_bool(
            "deterministic", False if deterministic is None else deterministic
        ),
    }
    if window is not None and key.shape[1] <= window:
        window = None
        if bias is not None:
            bias = without_nan(bias)  # keys with a bias of NaN are never chosen
    if is_packed:
        settings |= {"is_causal": is_causal, "window_size": window}
        return _packed(query, key, value, mask, bias, kwargs, settings), None
    if window is not None and bias is not None and _has_rows(mask, bias):
        mask = top_window_mask(bias, window, query.shape[1], is_causal, mask)
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


def _check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise ValueError unless key and value fit the query, by the shapes that were given."""
    batch, _, _, head_dim = query.shape
    if key.shape[0] != batch or key.shape[3] != head_dim:
        raise ValueError(
            f"key: got shape {tuple(key.shape)}, wanted ({batch}, heads, seqlen_k, {head_dim}) for "
            f"query of shape {tuple(query.shape)}"
        )
    if value.shape[:3] != key.shape[:3]:
        wanted = ", ".join(str(n) for n in key.shape[:3])
        raise ValueError(f"value: got shape {tuple(value.shape)}, wanted ({wanted}, head_dim)")


def _check_operands(
    query: Tensor, key: Tensor, is_packed: bool, **given: tuple[Tensor | None, Tensor | None]
) -> None:
    """Raise ValueError for a mask or bias that does not fit, naming the shape that was given.

    Args:
        query, key: (B, Sq, H, D) and (B, Sk, HK, D).
        is_packed: whether sequences are packed; masks and biases then have a single row.
        given: by name, a mask or bias as it was given, and with four dimensions. A mask may have
            more keys than `key`; the last ones are ignored.
    """
    batch, query_len, heads, _ = query.shape
    key_len, nheads_k = key.shape[1:3]
    rows = 1 if is_packed else query_len
    for name, (original, t) in given.items():
        if original is None or t is None:
            continue
        check_same_device(name, t, query.device, "query")
        keys = t.shape[3]
        fits_keys = keys >= key_len if name == "attention_mask" else keys == key_len
        fits_heads = is_one_or(t.shape[1], heads) or t.shape[1] == nheads_k
        fits = is_one_or(t.shape[0], batch) and is_one_or(t.shape[2], rows)
        if not (fits and fits_heads and fits_keys):
            sizes = ((batch, 1), (heads, nheads_k, 1), (rows, 1), (key_len,))
            wanted = ", ".join("|".join(dict.fromkeys(map(str, options))) for options in sizes)
            beside = " beside cu_seq_lens_q" if is_packed else ""
            raise ValueError(
                f"{name}: got shape {tuple(original.shape)}{beside}, wanted ({wanted}) or one "
                "without the dimension of rows, or of heads"
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
    module: Any, query: Tensor, value: Tensor, target: torch.dtype | None
) -> torch.dtype:
    """The dtype to which query, key and value are cast; after that autocast may cast them again."""
    if target is not None:
        check_dtype("target_dtype", target)
    if query.dtype != torch.float32:
        return value.dtype
    if target is not None:
        return target
    for layer in module.modules() if isinstance(module, nn.Module) else ():
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
    bounds_q, longest_q = _boundaries("q", query, kwargs)
    bounds_k, longest_k = _boundaries("k", key, kwargs)
    check_shape("cu_seq_lens_k", bounds_k, bounds_q.shape)
    out: Tensor = flash_dmattn_varlen_func(
        query[0],
        key[0],
        value[0],
        bounds_q,
        bounds_k,
        longest_q,
        longest_k,
        attn_mask=_per_key(mask),
        attn_bias=_per_key(bias),
        **settings,
    )
    return out[None]


def _boundaries(side: str, tokens: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, int]:
    """Boundaries of queries or keys (1, S, heads, D) as int32, and the longest sequence's length.

    If only those of queries or of keys are given, they serve for both.
    """
    names = [f"cu_seq_lens_{name}" for name in (side, "k" if side == "q" else "q")]
    name = next(name for name in names if kwargs.get(name) is not None)
    longest = f"max_length_{side}"
    found = check_bounds_and_longest(
        name, kwargs[name], longest, kwargs.get(longest), tokens.shape[1]
    )
    check_same_device(name, found[0], tokens.device, "query")
    return found


def _per_key(t: Tensor | None) -> Tensor | None:
    """(1, heads, 1, Tk) as (Tk, heads), the layout of packed keys."""
    return None if t is None else t[0, :, 0].transpose(0, 1)
