"""The function that every attention layer of transformers calls."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from dmattn import KeySelection, flash_dmattn_func, sliding_window
from dmattn.integrations.transformers.interval_mask import IntervalMask

logger = logging.get_logger(__name__)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer.

    Letters: B batch, Sq/Sk query/key length, H query heads, HK key/value heads, D head dimension of
    queries and keys, Dv of values.

    Args:
        module: the layer; its `is_causal` counts where the argument is None, True if it has none.
        query: (B, H, Sq, D).
        key: (B, HK, Sk, D).
        value: (B, HK, Sk, Dv). Where the dtypes differ, query and key are cast to that of value.
        attention_mask: what `make_mask` returned, or the user's own: bool (B|1, H|1, Sq, at least
            Sk), True = attend, or floating, added to the logits. None: all keys, or those up to the
            row's own position, the last row being at the last key.
        dropout: must be 0.
        scaling: D ** -0.5 when None.
        sliding_window: each row sees this many keys, its own included. Counts where attention_mask
            does not say what rows see: if it is None or (B, Sk).
        softcap: c turns the scaled dot product x into c * tanh(x / c), before mask and biases.
        is_causal: whether rows see no later keys, where attention_mask does not say what they see.
        s_aux: (H,), a logit for each head that takes part in every row's softmax without a value.
        position_bias: (B|1, H|1, Sq, at least Sk), added to the logits.

    Returns:
        (B, Sq, H, Dv), contiguous; None in place of attention weights, which are never formed.

    Raises:
        ValueError: dropout is not 0, or as `dmattn.flash_dmattn_func`.
        TypeError: as `dmattn.flash_dmattn_func`, which has no kernel for float32 on CUDA.
    """
    _check(dropout, kwargs)
    if s_aux is not None:
        raise ValueError("s_aux: got attention sinks, wanted None")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    query, key, value = (t.transpose(1, 2) for t in _one_dtype(query, key, value))
    seen = _seen_keys(attention_mask, query, key, is_causal, sliding_window)
    bias = seen.bias
    if position_bias is not None:
        position_bias = position_bias[..., : seen.key_len]
        bias = position_bias if bias is None else position_bias + bias
    if bias is not None and bias.dtype != torch.float32:
        bias = bias.to(query.dtype)
    out: Tensor = flash_dmattn_func(
        query,
        key[:, : seen.key_len],
        value[:, : seen.key_len],
        attn_mask=seen.mask,
        attn_bias=bias,
        softmax_scale=scaling,
        is_causal=seen.is_causal,
        softcap=softcap or 0.0,
        deterministic=bool(kwargs.get("deterministic")),
        selection=seen.selection,
    )
    return out, None


def _check(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout > 0:
        raise ValueError(
            f"dropout: got {dropout}, wanted 0, as dmattn has no attention dropout; set the "
            "attention dropout of the model's config to 0, or use model.eval()"
        )
    if kwargs.get("output_attentions"):
        logger.warning_once(
            "dmattn never forms attention weights, so output_attentions=True gives None for them; "
            'attn_implementation="eager" returns them.'
        )


class _SeenKeys(NamedTuple):
    """What the rows of a call see, as `flash_dmattn_func` takes it."""

    key_len: int  # keys behind these are the unused end of a cache
    is_causal: bool
    mask: Tensor | None = None
    bias: Tensor | None = None
    selection: KeySelection | None = None


def _seen_keys(
    mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool, window: int | None
) -> _SeenKeys:
    """query and key: (B, S, heads, D)."""
    query_len, key_len = query.shape[1], key.shape[1]
    if isinstance(mask, IntervalMask):
        visible = mask.visible
        if tuple(mask.shape[2:]) == (query_len, key_len):
            if visible.needs_selection:
                return _SeenKeys(visible.key_len, True, selection=visible.selection)
            return _SeenKeys(visible.key_len, True, visible.key_mask)
        mask = mask.to_dense_mask()  # made for calls of other lengths
    if mask is None or mask.dim() == 2:
        return _by_position(mask, query, key, is_causal, window)
    mask = mask[..., :key_len]
    if mask.shape[2] > 1 and mask.stride(2) == 0:
        mask = mask[:, :, :1]  # alike for all rows, which costs less
    if mask.is_floating_point():
        return _SeenKeys(key_len, False, bias=mask)
    return _SeenKeys(key_len, False, mask)


def _by_position(
    padding: Tensor | None, query: Tensor, key: Tensor, is_causal: bool, window: int | None
) -> _SeenKeys:
    """Causality, a window and the padding (B, Sk), where no mask says more."""
    query_len, key_len = query.shape[1], key.shape[1]
    if padding is not None:
        padding = padding[:, -key_len:]
    if is_causal and window is not None and window < key_len:
        selection = sliding_window(
            key_len, window, query_len, attn_mask=padding, device=query.device
        )
        return _SeenKeys(key_len, True, selection=selection)
    mask = None if padding is None else padding[:, None, None]
    return _SeenKeys(key_len, is_causal and query_len > 1, mask)


def _one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All in the dtype of value: rotary embeddings and adapters may leave the others wider."""
    return query.to(value.dtype), key.to(value.dtype), value
