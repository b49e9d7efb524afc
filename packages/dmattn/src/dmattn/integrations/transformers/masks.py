"""The mask function of "dmattn", which transformers calls once per forward for all layers."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

from dmattn.integrations.transformers.interval_mask import IntervalMask, VisibleKeys
from dmattn.integrations.transformers.patterns import MaskFunction, Pattern, recognise

logger = logging.get_logger(__name__)

# Models do not declare what their layers do with masks. These are the model types that are known to
# differ from the others.
# Layers whose is_causal is wrong: False with causal masks, or True in an encoder of images.
_WRONG_CAUSALITY = ("aimv2_text_model", "phi4_multimodal_vision", "videoprism_text_model")
# Layers that get masks with a sliding window, but do not pass the window to the attention function.
_SILENT_OF_WINDOWS = ("blt_local_encoder", "blt_patcher", "phimoe", "qwen2_moe")
# Models that slice masks as tensors of four dimensions. (Gemma 4 only if layers share their keys.)
_CUT_MASKS = ("gemma4_text", "gemma4_unified_text", "pix2struct_text_model")


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a forward, in the smallest form that describes it.

    Args:
        batch_size, q_length, kv_length: B, Sq, Sk of the attention calls to come.
        q_offset: position of the first query; a tensor of one element for static caches.
        kv_offset: position of the first key.
        mask_function: the pattern, as a function of (batch, head, query, key) indices.
        attention_mask: bool (B, tokens seen so far), False for padding; or None.
        local_size: the size of a window or chunk, or None.
        allow_is_causal_skip: whether None may be returned for a causal mask.
        allow_is_bidirectional_skip: whether None may be returned if every row sees every key.
        use_vmap: whether mask_function takes single indices only.
        device: of the mask.
        config: of the model.
        dtype: in which the model computes.

    Returns:
        One of these forms:

        * None: each row sees all keys up to its own position, with the last row at the last key;
          or, for a bidirectional pattern, all keys. Never for the few models whose layers do not
          say whether they are causal.
        * An `IntervalMask`: for other causal patterns that are recognised.
        * A bool view (B, 1, Sq, Sk), expanded over the rows: for a bidirectional pattern with
          padding.
        * A stored bool (B, 1, Sq, Sk): for a single row, for patterns that are not recognised, and
          in all other cases.
        * A bool (B, Sk), the padding: while torch compiles, if besides it there is only causality,
          and perhaps a window that the attention function is told of.
        * A mask (B, 1, Sq, Sk) in `dtype`, to be added to the logits: for models that were written
          for eager attention alone.

    Raises:
        ValueError: attention_mask does not have two dimensions.
    """
    call: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "use_vmap": use_vmap,
        "device": device,
    }
    if _knows_eager_alone(type(config)):
        added: Tensor = eager_mask(**call, dtype=dtype, allow_is_bidirectional_skip=False)
        return added
    says_causality = _layers_say_causality(type(config))
    allow_is_bidirectional_skip &= says_causality
    # With use_bidirectional_attention, Gemma's layers have is_causal = False, but PaliGemma also
    # asks for causal masks.
    is_told = says_causality and not getattr(config, "use_bidirectional_attention", None)
    allow_is_causal_skip &= is_told
    padding = _padding(attention_mask, kv_length, kv_offset)
    call |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    make_dense: Callable[[], Tensor] = partial(sdpa_mask, **call)
    if is_tracing(attention_mask) or is_tracing(q_offset):
        # Neither closures nor values can be inspected. Only the flags for skipping are reliable.
        if allow_is_bidirectional_skip and (local_size is None or kv_length < local_size):
            return _for_all_rows(padding, batch_size, q_length, kv_length)
        is_sure = allow_is_causal_skip and (local_size is None or _is_window(local_size, config))
        is_sure &= padding is None or not _cuts_masks(config)
        if is_sure and q_length > 1 and _ends_together(q_length, kv_length, q_offset, kv_offset):
            return padding
        return make_dense()
    pattern = None if use_vmap else recognise(mask_function)
    if pattern is None:
        return make_dense()
    if not pattern.is_causal:
        padding = _unless_full(padding)
        if padding is None and not allow_is_bidirectional_skip:
            padding = torch.ones((1, 1), dtype=torch.bool, device=device)
        return _for_all_rows(padding, batch_size, q_length, kv_length)
    if q_length == 1 and isinstance(q_offset, Tensor):
        return make_dense()  # a single row costs less than reading the tensor
    # q_offset is read once, so that no layer has to attend to the unused end of a static cache. The
    # cache changes this tensor before a layer can ask for the dense mask.
    first_row = int(q_offset)
    make_dense_later: Callable[[], Tensor] = partial(sdpa_mask, **call | {"q_offset": first_row})
    key_len = first_row + q_length - kv_offset
    if not q_length <= key_len <= kv_length:
        return make_dense()
    visible = _visible_keys(batch_size, q_length, key_len, pattern, padding, kv_offset, device)
    _find_texts_for_softcap(visible, config)
    if visible.is_plain and allow_is_causal_skip and key_len == kv_length:
        return None
    if q_length == 1:
        return make_dense()
    return IntervalMask(visible, kv_length, make_dense_later)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _knows_eager_alone(config_class: type) -> bool:
    """Whether the models of a config support no attention function but transformers' eager one.

    What they do with masks is only correct for the masks of eager attention, which are added to the
    logits: some compute all or part of the attention themselves (Bloom, BigBird-Pegasus), some
    append to the mask (DeepSeek V4). transformers refuses "sdpa" for such models, but not names of
    registered attention functions.
    """
    return _support(config_class).eager_alone


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _layers_say_causality(config_class: type) -> bool:
    """Whether a mask of None can be interpreted by the attribute `is_causal` of the layers.

    It cannot be, for example, for the decoder layers of Pegasus-X, which have is_causal = False.
    """
    return _support(config_class).says_causality


class _Support(NamedTuple):
    eager_alone: bool
    says_causality: bool


# Not by functools.cache: a mask may be asked for before the models of a config are imported.
_known_support: dict[type, _Support] = {}


def _support(config_class: type) -> _Support:
    """What the models of a config support; without any imported models, the usual answer."""
    if config_class not in _known_support:
        models = _models_of(config_class)
        if not models:
            return _Support(eager_alone=False, says_causality=True)
        _known_support[config_class] = _said_by(models, config_class)
    return _known_support[config_class]


def _models_of(config_class: type) -> list[Any]:
    """The model classes of a config, of those that have been imported."""
    name = config_class.__module__.replace("configuration_", "modeling_")
    models: list[Any] = [
        found
        for found in vars(sys.modules.get(name, torch.nn)).values()
        if isinstance(found, type) and issubclass(found, PreTrainedModel)
        if found.__module__ == name
    ]
    # A file may contain models of other configs as well, for example of images.
    return [m for m in models if m.config_class is config_class] or models


def _said_by(models: list[Any], config_class: Any) -> _Support:
    eager_alone = not any(
        m._supports_sdpa or m._supports_flash_attn or m._supports_flex_attn for m in models
    )
    if eager_alone and not any(m._can_set_attn_implementation() for m in models):
        logger.warning(
            f'attn_implementation: got "dmattn" for a model of {config_class.__name__}, whose '
            "layers compute their attention themselves and do not ask dmattn for it; "
            'wanted "eager", which gives the same'
        )
    says_causality = any(m._supports_sdpa or m._supports_attention_backend for m in models)
    says_causality &= config_class.model_type not in _WRONG_CAUSALITY
    return _Support(eager_alone, says_causality)


def _visible_keys(
    batch_size: int,
    query_len: int,
    key_len: int,
    pattern: Pattern,
    padding: Tensor | None,
    first_key: int,
    device: torch.device | str,
) -> VisibleKeys:
    """The description of a causal call, without limits that have no effect."""
    window, chunk = pattern.window, pattern.chunk
    if chunk is not None and first_key + key_len <= chunk:
        chunk = None
    return VisibleKeys(
        batch_size,
        query_len,
        key_len,
        padding=_unless_full(None if padding is None else padding[:, :key_len]),
        window=window if window is not None and window < key_len else None,
        chunk=chunk,
        left_padding=None if chunk is None else pattern.left_padding,
        document_ids=pattern.document_ids,
        first_key=first_key,
        device=device,
    )


def _find_texts_for_softcap(visible: VisibleKeys, config: Any) -> None:
    """Let `visible` find the texts, if the layers have softcap.

    `attention_forward` then has the layers attend within texts instead of with a padding mask.
    """
    has_softcap = getattr(config, "attn_logit_softcapping", None) is not None
    if has_softcap and not visible.needs_selection:
        visible.find_texts()


def _padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """The part of a padding mask for the keys of the call: bool (B, kv_length).

    Raises:
        ValueError: the mask does not have two dimensions.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask: got shape {tuple(attention_mask.shape)}, wanted (batch, tokens so "
            "far), or four dimensions that say all that rows see"
        )
    missing = kv_offset + kv_length - attention_mask.shape[1]
    if missing > 0:  # a static cache is longer than what has been seen
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length]


def _unless_full(padding: Tensor | None) -> Tensor | None:
    """The padding mask, or None if nothing is padding.

    The host reads one number for that, as transformers' own sdpa masks do.
    """
    return None if padding is None or bool(padding.all()) else padding


def _for_all_rows(
    padding: Tensor | None, batch_size: int, q_length: int, kv_length: int
) -> Tensor | None:
    """A padding mask as bool (B, 1, Sq, Sk), a view."""
    if padding is None:
        return None
    return padding[:, None, None].expand(batch_size, 1, q_length, kv_length)


def _ends_together(q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int) -> bool:
    """Whether the last query is known to stand at the last key."""
    return not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length


def _is_window(local_size: int, config: Any) -> bool:
    """Whether a local size is known to be that of a window that layers pass to the attention."""
    if getattr(config, "model_type", None) in _SILENT_OF_WINDOWS:
        return False
    chunk = getattr(config, "attention_chunk_size", None)
    return chunk is None and local_size == getattr(config, "sliding_window", None)


def _cuts_masks(config: Any) -> bool:
    """Whether the model slices masks as tensors of four dimensions."""
    shares_keys = getattr(config, "num_kv_shared_layers", None) != 0
    return shares_keys and getattr(config, "model_type", None) in _CUT_MASKS
