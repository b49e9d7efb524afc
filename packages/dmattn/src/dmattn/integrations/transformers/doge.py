"""Doge models with running top-w attention: nothing of size Sq x Sk is formed.

`enable_doge` sets another `forward` on modules of a model, as attributes of the objects. Classes,
parameters and config stay unchanged. In every call such a forward looks up in the config whether
the attention implementation is "dmattn", and calls the forward of its class if it is not.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.models.doge.modeling_doge import (
    DogeAttention,
    DogeModel,
    DogeRMSNorm,
    apply_rotary_pos_emb,
)

from dmattn.autocast import without_autocast
from dmattn.integrations.transformers.attention import check_call
from dmattn.integrations.transformers.doge_cache import DogeCache, DogeCacheLayer
from dmattn.integrations.transformers.doge_keys import SeenKeys, attend, of_mask, seen_keys
from dmattn.integrations.transformers.registration import NAME, register
from dmattn.scoring import key_scores
from dmattn.validation import check_bool

Model = TypeVar("Model", bound=nn.Module)

# The keyword argument by which the model tells its layers which keys rows see.
_SEEN = "dmattn_seen_keys"

# The dtypes for which both the class and torch's operator compute the norm in float32.
_NORM_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# The attribute of linear layers that have been changed to take inputs wider than their weights.
_IS_WIDE = "_dmattn_is_wide"


def enable_doge(model: Model, use_dynamic_mask_cache: bool = False) -> Model:
    """Make the Doge models within `model` compute running top-w attention by dmattn.

    Each row attends to the `keep_window_size` keys with the highest scores among those that it may
    see. Of equal scores the later key is kept, and scores are computed in float32. The norms of the
    model are computed by `torch.nn.functional.rms_norm`, which takes less time and memory. The
    attention implementation is set to "dmattn"; `set_attn_implementation` with another name
    switches all of this off, and with "dmattn" on again. Calling this again for a model only
    changes which cache is made.

    Args:
        model: a Doge model of transformers, dense or with experts, or a module that contains one,
            such as an adapter around it. Changed in place.
        use_dynamic_mask_cache: let `generate` and calls of the model create a `DogeCache` where
            they would create a DynamicCache: if the user names no cache, generation is not
            assisted, and no gradient is needed.

    Returns:
        model.

    Raises:
        ImportError: transformers is older than 5.18.
        TypeError: an argument has the wrong type.
        ValueError: there is no Doge model in `model`; or, with use_dynamic_mask_cache, its config
            is one that `DogeCache` refuses, such as one with a sliding window. The model is then
            unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, wanted a torch.nn.Module")
    use_dynamic_mask_cache = check_bool("use_dynamic_mask_cache", use_dynamic_mask_cache)
    bodies = [m for m in model.modules() if isinstance(m, DogeModel)]
    if not bodies:
        raise ValueError(
            f"model: got a {type(model).__name__} without a DogeModel of transformers in it, "
            'wanted one; other models take attn_implementation="dmattn" after '
            "dmattn.integrations.transformers.register()"
        )
    if use_dynamic_mask_cache:
        for body in bodies:
            DogeCache(body.config)  # raises if the config allows no such cache
    register()
    for body in bodies:
        body._dmattn_registration = _Registration()
        _set_forward(body, functools.partial(_model_forward, body, use_dynamic_mask_cache))
        for layer in body.modules():
            if isinstance(layer, DogeAttention):
                _set_forward(layer, functools.partial(_attention_forward, layer))
                _compute_wide(layer.dt_proj)
            elif isinstance(layer, DogeRMSNorm):
                _set_forward(layer, functools.partial(_norm_forward, layer, body.config))
        body.set_attn_implementation(NAME)
    for owner in model.modules():
        if isinstance(owner, PreTrainedModel) and getattr(owner, "model", None) in bodies:
            owner.set_attn_implementation(NAME)
            if owner.can_generate():
                _set_generate(owner, use_dynamic_mask_cache)
                owner.create_masks_for_generate = functools.partial(_masks_for_generate, owner)
    return model


class _Registration:
    """Registers the attention implementation when a model is loaded whole, as by `torch.load`."""

    def __reduce__(self) -> tuple[Callable[[], "_Registration"], tuple[()]]:
        return _registered, ()


def _registered() -> _Registration:
    register()
    return _Registration()


def _set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Set another forward on a module; inside the hook of accelerate, if the module has one."""
    name = "_old_forward" if hasattr(module, "_old_forward") else "forward"
    setattr(module, name, forward)


# --------------------------------------------------------------------------------------- the model


def _model_forward(
    model: DogeModel,
    use_dynamic_mask_cache: bool,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Cache | None = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    **kwargs: Any,
) -> Any:
    """`DogeModel.forward`; works out once which keys rows see, and passes that to all layers."""
    inputs = input_ids if inputs_embeds is None else inputs_embeds
    if model.config._attn_implementation == NAME and inputs is not None:
        boundaries = kwargs.get("cu_seq_lens_q")
        if boundaries is not None and past_key_values is not None:
            raise ValueError(
                "cu_seq_lens_q: got boundaries of packed documents beside a cache, wanted one of "
                "them: no document goes on behind the last one"
            )
        if use_cache is None:
            use_cache = model.config.use_cache
        use_cache = use_cache and not (model.gradient_checkpointing and model.training)
        use_cache = use_cache and boundaries is None
        is_causal = kwargs.get("is_causal", getattr(model.config, "is_causal", None)) is not False
        if use_cache and past_key_values is None:
            keeps = use_dynamic_mask_cache and is_causal
            past_key_values = _new_cache(model, inputs_embeds, keeps)
        hidden_shape = inputs.shape[0], inputs.shape[1]
        if isinstance(past_key_values, DogeCache):
            _check_cache(model, past_key_values, inputs_embeds, is_causal)
            kwargs[_SEEN] = _new_tokens(attention_mask, hidden_shape, past_key_values)
        else:
            kwargs[_SEEN] = seen_keys(
                model.config,
                min(_window_sizes(model)),
                hidden_shape,
                inputs.device,
                attention_mask,
                position_ids,
                past_key_values,
                is_causal,
                boundaries,
            )
        # The class passes a mask of four dimensions on unchanged, and makes none of its own. Our
        # layers ignore it.
        attention_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=inputs.device)
    return type(model).forward(
        model,
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **kwargs,
    )


def _new_cache(
    model: DogeModel, inputs_embeds: Tensor | None, use_dynamic_mask_cache: bool
) -> Cache:
    """A new cache for a call that is given none."""
    if use_dynamic_mask_cache and not _needs_gradients(model, inputs_embeds):
        return DogeCache(model.config)
    return DynamicCache(config=model.config)


def _needs_gradients(model: DogeModel, inputs_embeds: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    if inputs_embeds is not None and inputs_embeds.requires_grad:
        return True
    return any(p.requires_grad for p in model.parameters())


def _window_sizes(model: DogeModel) -> list[int]:
    """How many keys each layer keeps: what the config said when the layer was made."""
    of_config = model.config.keep_window_size
    sizes = [getattr(layer.self_attn, "keep_window_size", of_config) for layer in model.layers]
    return sizes or [of_config]


def _check_cache(
    model: DogeModel, cache: DogeCache, inputs_embeds: Tensor | None, is_causal: bool
) -> None:
    """Raise ValueError or RuntimeError for a wrong cache, before any layer changes it."""
    if not is_causal:
        raise ValueError(
            "is_causal: got False beside a DogeCache, wanted True; it holds the keys that causal "
            "rows keep. A transformers.DynamicCache holds all"
        )
    if _needs_gradients(model, inputs_embeds):
        raise RuntimeError(
            "past_key_values: got a DogeCache where gradients are needed, which it does not carry; "
            "call the model under torch.no_grad(), or use a transformers.DynamicCache"
        )
    wanted = _window_sizes(model)
    found = [layer.window_size for layer in cache.layers]
    if found != wanted:
        raise ValueError(
            f"past_key_values: got a DogeCache of {_in_words(found)}, wanted {_in_words(wanted)}, "
            "as the model has. DogeCache(model.config) has them, unless the config was changed: "
            "layers keep the number of keys with which they were made"
        )


def _in_words(windows: list[int]) -> str:
    """How many layers keep how many keys."""
    sizes = " or ".join(map(str, sorted(set(windows))))
    return f"{len(windows)} layers that keep {sizes} keys"


def _new_tokens(
    attention_mask: Tensor | None, hidden_shape: tuple[int, int], cache: DogeCache
) -> Tensor | None:
    """Which of the new tokens are no padding: bool (B, Sq), or None if all are."""
    if attention_mask is None:
        return None
    batch, query_len = hidden_shape
    is_tensor = isinstance(attention_mask, Tensor)
    if is_tensor and tuple(attention_mask.shape) == (batch, 1, 1, query_len):
        return attention_mask[:, 0, 0].bool()  # made by `_masks_for_generate`
    if torch.compiler.is_compiling() and is_tensor and attention_mask.dim() == 2:
        # The number of earlier tokens is only known on the device, but the new ones are the last.
        return attention_mask[:, attention_mask.shape[1] - query_len :].bool()
    before = cache.get_seq_length()
    wanted = (batch, before + query_len)
    if not is_tensor or tuple(attention_mask.shape) != wanted:
        got = getattr(attention_mask, "shape", None)
        got = type(attention_mask).__name__ if got is None else f"shape {tuple(got)}"
        raise ValueError(
            f"attention_mask: got {got}, wanted {wanted} beside a DogeCache: all tokens so far, "
            "those at hand included. (With use_cache=False, generate passes earlier tokens again "
            "and cannot use a cache.)"
        )
    return attention_mask[:, before:].bool()


# -------------------------------------------------------------------------------------- the layers


def _attention_forward(
    layer: DogeAttention,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Cache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`DogeAttention.forward` with running top-w attention."""
    seen = kwargs.pop(_SEEN, None)
    if layer.config._attn_implementation != NAME:
        result: tuple[Tensor, None] = type(layer).forward(
            layer, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
        )
        return result
    check_call("attention_dropout", layer.attention_dropout if layer.training else 0.0, kwargs)
    shape = (*hidden_states.shape[:-1], -1, layer.head_dim)
    value = layer.v_proj(hidden_states).view(shape)
    query = layer.q_norm(layer.q_proj(hidden_states).view(shape))
    key = layer.k_norm(layer.k_proj(hidden_states).view(shape))
    cos, sin = position_embeddings
    query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    # Norms and rotation may return a wider dtype than that of values, for example under autocast.
    query, key = (t.transpose(1, 2).to(value.dtype) for t in (query, key))
    if isinstance(past_key_values, DogeCache):
        entries = past_key_values.layers[layer.layer_idx]
        assert isinstance(entries, DogeCacheLayer)
        score = _scores(layer, value)
        out = entries.attend(query, key, value, score, layer.scaling, seen)
    else:
        if past_key_values is not None:
            key, value = past_key_values.update(
                key.transpose(1, 2), value.transpose(1, 2), layer.layer_idx
            )
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        if seen is None:  # not called by `_model_forward`
            seen = _seen_by(attention_mask, layer)
        score, keep = _scores(layer, value), layer.keep_window_size
        out = attend(query, key, value, score, keep, layer.scaling, seen)
    return layer.o_proj(out.flatten(2)), None


def _norm_forward(norm: DogeRMSNorm, config: Any, hidden_states: Tensor) -> Tensor:
    """`DogeRMSNorm.forward` as one operator of torch.

    On a GPU that is one kernel, which saves its input and a number for each row for the backward.
    The class takes eight kernels, which write and save several tensors in float32.
    """
    weight: Tensor = norm.weight
    is_known = hidden_states.dtype == weight.dtype and weight.dtype in _NORM_DTYPES
    if config._attn_implementation != NAME or not is_known:
        result: Tensor = type(norm).forward(norm, hidden_states)
        return result
    normed = F.rms_norm(hidden_states, weight.shape, weight, norm.variance_epsilon)
    return normed.to(hidden_states.dtype)  # on a GPU the operator returns float32 under autocast


def _seen_by(attention_mask: Tensor | None, layer: DogeAttention) -> SeenKeys:
    """Which keys rows see by a mask of four dimensions; without one, by causality alone."""
    if attention_mask is None:
        return SeenKeys()
    return of_mask(layer.keep_window_size, attention_mask)


def _scores(layer: DogeAttention, value: Tensor) -> Tensor:
    """(B, S, HK, D) values -> (B, HK, S) scores, in float32 or wider."""
    flat = value.flatten(2)
    if not _is_wide(layer.dt_proj):
        return key_scores(layer.dt_proj(flat), layer.A)
    with without_autocast(flat.device.type):
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        return key_scores(layer.dt_proj(wide), layer.A)


def _compute_wide(projection: nn.Module) -> None:
    """Let the linear layer within `dt_proj` take inputs that are wider than its weights.

    If its output were rounded to bfloat16, many scores would be equal, and ties would decide which
    keys are kept. It is still called as a module, so that hooks run and adapters around it are
    used.
    """
    linear = _innermost(projection)
    if type(linear) is nn.Linear:  # a quantized replacement is left as it is
        _set_forward(linear, functools.partial(_wide_linear_forward, linear))
        linear.__dict__[_IS_WIDE] = True


def _innermost(projection: nn.Module) -> nn.Module:
    """The layer inside any adapters that are wrapped around it."""
    while isinstance(inner := getattr(projection, "base_layer", None), nn.Module):
        projection = inner
    return projection


def _is_wide(projection: nn.Module) -> bool:
    return getattr(_innermost(projection), _IS_WIDE, False)


def _wide_linear_forward(linear: nn.Linear, input: Tensor) -> Tensor:
    """`nn.Linear.forward`, in the dtype of an input that is wider than the weight."""
    weight: Tensor = linear.weight
    bias: Tensor | None = linear.bias
    if input.dtype != weight.dtype and input.dtype == torch.promote_types(
        input.dtype, weight.dtype
    ):
        weight = weight.to(input.dtype)
        bias = None if bias is None else bias.to(input.dtype)
    return F.linear(input, weight, bias)


# -------------------------------------------------------------------------------------- generation


def _set_generate(owner: PreTrainedModel, use_dynamic_mask_cache: bool) -> None:
    """Let `generate` create a DogeCache by default, or undo that."""
    given = owner.__dict__.get("generate")
    is_ours = isinstance(given, functools.partial) and given.func is _generate
    if use_dynamic_mask_cache and not is_ours:
        owner.generate = functools.partial(_generate, owner)
    elif is_ours and not use_dynamic_mask_cache:
        del owner.generate


def _masks_for_generate(model: Any, **inputs: Any) -> Any:
    """The mask that `generate` makes itself, outside of the forward, when it compiles that.

    For a DogeCache a bool (B, 1, 1, new tokens), whose size does not grow with the text.
    """
    cache, mask = inputs["past_key_values"], inputs["attention_mask"]
    if isinstance(cache, DogeCache) and model.config._attn_implementation == NAME:
        new = inputs["inputs_embeds"].shape[1]
        return None if mask is None else mask[:, None, None, mask.shape[1] - new :].bool()
    make = getattr(type(model), "create_masks_for_generate", create_masks_for_generate)
    return make(**inputs)


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`model.generate` with a DogeCache, if it would otherwise create a DynamicCache."""
    named = inspect.signature(type(model).generate).bind_partial(model, *args, **kwargs).arguments
    named = named | kwargs
    # Settings that are None in a given generation_config are taken from that of the model.
    configs = (named.get("generation_config"), model.generation_config)

    def setting(name: str) -> Any:
        found = (named.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in found if value is not None), None)

    # Assisted generation removes tokens again, which a DogeCache cannot do.
    assistance = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
    is_plain = (
        model.config._attn_implementation == NAME
        and kwargs.get("past_key_values") is None
        and setting("use_cache") is not False
        and setting("cache_implementation") is None  # with a named cache, none may be passed
        and not setting("is_assistant")
        and all(setting(name) is None for name in assistance)
    )
    if is_plain:
        kwargs["past_key_values"] = DogeCache(model.config)
    return type(model).generate(model, *args, **kwargs)
