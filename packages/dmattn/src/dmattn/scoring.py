"""A learned score per key, and attention through a cache: shared by the layer and integrations.

Letters: B batch, S sequence length, H query heads, HK key/value heads, HS score heads (HK or H),
D head dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dmattn.autocast import without_autocast
from dmattn.cache import DynamicMaskCache
from dmattn.functional import flash_dmattn_func
from dmattn.selection import select_keys
from dmattn.validation import check_bool, check_floating, check_same_device, check_shape

# exp(80) is 5.5e34. A score above it would drown every logit anyway; without the limit the score,
# and with it the attention output, would overflow to INF while the parameters are still finite.
MAX_EXPONENT = 80.0


def key_scores(dt: Tensor, A: Tensor, exp_score: bool = True) -> Tensor:
    """exp(A * softplus(dt)), the score of each key in dynamic mask attention and in Doge models.

    Computed in float32 also under autocast and for inputs in half precision: rounded to bfloat16
    many scores would be equal, and ties would decide which keys are kept.

    Args:
        dt: floating (B, S, HS), the output of the layer's `dt_proj` for the values.
        A: floating (HS,), on the device of dt.
        exp_score: False for A * softplus(dt).

    Returns:
        (B, HS, S), contiguous, float32 or, for a float64 dt, float64. With exp_score the exponent
        is clamped to at most 80, so that finite inputs give finite scores.

    Raises:
        TypeError: dt or A is no floating tensor, or exp_score no bool.
        ValueError: a shape or device does not fit.
    """
    for name, t in (("dt", dt), ("A", A)):
        check_floating(name, t)
    exp_score = check_bool("exp_score", exp_score)
    if dt.dim() != 3:
        raise ValueError(f"dt: got shape {tuple(dt.shape)}, wanted (batch, seqlen, score heads)")
    check_shape("A", A, dt.shape[2:])
    check_same_device("A", A, dt.device, "dt")
    dtype = torch.promote_types(dt.dtype, torch.float32)
    with without_autocast(dt.device.type):
        score = A.to(dtype) * F.softplus(dt.to(dtype))
        if exp_score:
            score = score.clamp(max=MAX_EXPONENT).exp()
    return score.transpose(1, 2).contiguous()  # the kernels want unit stride along keys


def attend_through_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Tensor,
    cache: DynamicMaskCache,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    key_mask: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Causal attention of the next tokens of a text to themselves and to the keys in the cache.

    If the cache is empty, the tokens are a prompt: all of them attend at once, by one selection,
    and the cache is then filled with the keys that it keeps. Later tokens are put in by
    `DynamicMaskCache.append_and_attend`.

    Args:
        query: (B, S, H, D).
        key, value: (B, S, HK, D).
        score: (B, HS, S), in the score dtype of the cache.
        cache: a cache of HS key/value heads, in each of which a query attends to `window_size`
            keys. With a score per query head (HS = H > HK), query heads keep different keys of the
            same key/value head, so the cache holds keys and values once per query head.
        softmax_scale, softcap: as in `flash_dmattn_func`.
        key_mask: bool (B, S), False at padding, which is not put in; None for no padding.
        slots: int32 or int64 (B,), which entries of the cache's batch the tokens are for; all when
            None.

    Returns:
        out (B, S, H, D). Rows of padding are meaningless, and finite if their query is.

    Raises:
        TypeError, ValueError: something does not fit the cache, which is then unchanged.
        RuntimeError: a gradient would be needed.
    """
    _refuse_gradients(query, key, value, score)
    if not cache.is_empty:
        held_key, held_value = (_per_score_head(t, score) for t in (key, value))
        return cache.append_and_attend(
            query, held_key, held_value, score, softmax_scale, softcap, key_mask, slots
        )
    window: int | None = cache.window_size
    mask = None if key_mask is None else key_mask[:, None, None]
    selection = None
    if key.shape[1] > cache.window_size:
        selection = select_keys(score, cache.window_size, attn_mask=key_mask)
        window, mask = None, None  # both are in the selection
    out = flash_dmattn_func(
        query,
        key,
        value,
        attn_mask=mask,
        attn_bias=score[:, :, None],
        softmax_scale=softmax_scale,
        is_causal=True,
        softcap=softcap,
        window_size=window,
        selection=selection,
    )
    held_key, held_value = (_per_score_head(t, score) for t in (key, value))
    cache.prefill(held_key, held_value, score, selection, attn_mask=key_mask, slots=slots)
    return out


def _refuse_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError("cache: got one with gradients enabled, wanted torch.no_grad()")


def _per_score_head(t: Tensor, score: Tensor) -> Tensor:
    """Keys or values (B, S, HK, D) repeated to the heads of score (B, HS, S)."""
    heads, wanted = t.shape[2], score.shape[1]
    return t if heads == wanted else t.repeat_interleave(wanted // heads, 2)
