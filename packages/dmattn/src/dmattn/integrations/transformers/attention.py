"""The attention function of the implementation "dmattn", which layers of transformers call."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from dmattn import KeySelection, flash_dmattn_func, flash_dmattn_varlen_func
from dmattn import sliding_window as select_window
from dmattn.checks import MAX_HEAD_DIM
from dmattn.integrations.transformers.interval_mask import Documents, IntervalMask, VisibleKeys
from dmattn.validation import check_optional_tensor

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
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, with the signature of transformers' attention functions.

    Letters: B batch, Sq/Sk query/key length, H query heads, HK key/value heads, D head dimension of
    queries and keys, Dv of values.

    Args:
        module: the layer. Its attribute `is_causal` is used if the argument is None, and True if it
            has none.
        query: (B, H, Sq, D). Query, or key and value, may have a batch of 1, for any B.
        key: (B, HK, Sk, D).
        value: (B, HK, Sk, Dv). If the dtypes differ, query and key are cast to that of value.
        attention_mask: what `make_mask` returned, or the user's own: bool (B|1, H|1, Sq|1, Sk|1) or
            (B, Sk), True = attend; or floating with four dimensions, added to the logits. None: all
            keys, or if `is_causal` those up to the row's own position, with the last row at the
            last key.
        dropout: must be 0.
        scaling: factor of the dot products; D ** -0.5 when None.
        sliding_window: each row sees this many keys, its own included. Only used if attention_mask
            does not say which keys rows see, that is, if it is None or (B, Sk), and if `is_causal`.
        softcap: c turns the scaled dot product x into c * tanh(x / c), before mask and biases; None
            or 0 for none.
        is_causal: whether rows see no later keys. Only used if attention_mask does not say which
            keys rows see.
        s_aux: (H,), a logit for each head that takes part in every row's softmax without a value.
        sinks: (B|1, H, Sq, 1), such a logit for each row, as in Inkling 2.
        position_bias: (B|1, H|1, Sq, at least Sk), added to the logits.
        indices: integer (B, Sq, chosen), keys chosen for each row. A row attends only to these, as
            far as it sees them.
        block_indices: integer (B, HK, Sq, chosen), the same for blocks of
            `module.indexer.block_size` keys, chosen for each key/value head; -1 stands for none.

    Returns:
        (B, Sq, H, Dv), contiguous; None in place of attention weights, which are never formed.

    Raises:
        ValueError: dropout is not 0, the mask is for another number of keys, cu_seq_lens_q is
            given in a call that does not support it, or as `dmattn.flash_dmattn_func`.
        TypeError: the mask is no tensor or has integers, or as `dmattn.flash_dmattn_func`.
    """
    check_call("dropout", dropout, kwargs)
    attention_mask = check_optional_tensor("attention_mask", attention_mask)
    _check_head_dim(query, value)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    query, key, value = _one_batch_size(*_one_dtype(query, key, value))
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    chosen = _chosen_keys(module, indices, block_indices, query, key)
    described = _description(attention_mask, query, key)
    # With a bias or a choice of keys per row something dense exists anyway, so the mask may be
    # dense as well.
    is_dense = position_bias is not None or chosen is not None
    if is_causal and (attention_mask is None or described is not None):
        described = _in_documents(described, query, key, sliding_window, is_dense, kwargs)
    if described is not None and not (described.needs_selection and is_dense):
        seen = _as_described(described, has_softcap=bool(softcap))
    elif attention_mask is None or attention_mask.dim() == 2:
        seen = _by_position(attention_mask, query, key, is_causal, sliding_window)
    else:
        seen = _by_mask(attention_mask, key.shape[1])
    if chosen is not None:
        chosen = chosen[..., : seen.key_len]
        seen = seen._replace(mask=chosen if seen.mask is None else seen.mask & chosen)
    bias = _sum_of_biases(position_bias, seen, query.dtype)
    settings: dict[str, Any] = {
        "softmax_scale": scaling,
        "is_causal": seen.is_causal,
        "softcap": softcap or 0.0,
        "deterministic": bool(kwargs.get("deterministic")),
        "sinks": s_aux,
    }
    if sinks is None:
        out: Tensor = _attend(query, key, value, seen, bias, settings)
        return out, None
    out, lse = _attend(query, key, value, seen, bias, settings | {"return_lse": True})
    share = torch.sigmoid(lse - sinks[..., 0])  # the part of the softmax that falls to the keys
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype).contiguous(), None


def check_call(name: str, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse dropout, which the layer calls `name`, and warn that there are no attention weights.

    Raises:
        ValueError: dropout is not 0.
    """
    if dropout > 0:
        # Layers copy the number when they are made: to change the config of a model has no effect.
        raise ValueError(
            f"{name}: got {dropout}, wanted 0, as dmattn has no dropout of attention; make or load "
            "the model without, as by from_pretrained(..., attention_dropout=0.0) (some configs "
            'have another name for it), or use model.eval() or the implementation "eager"'
        )
    if kwargs.get("output_attentions"):
        logger.warning_once(
            "dmattn never forms attention weights, so output_attentions=True brings none of them; "
            'attn_implementation="eager" returns them.'
        )


class _SeenKeys(NamedTuple):
    """The keys that the rows of a call see, in the form of arguments of dmattn's functions.

    Attributes:
        key_len: number of keys in use; those behind them are the unused end of a cache.
        is_causal: whether rows see no later keys.
        mask: bool ({B|1}, {H|1}, {Sq|1}, key_len), or None.
        bias: a floating mask of the user, of the same shapes as mask, or None.
        documents: the documents, if a row sees the keys of its own document up to its own position;
            or None.
        selection: key lists that describe all that rows see, or None.
    """

    key_len: int
    is_causal: bool
    mask: Tensor | None = None
    bias: Tensor | None = None
    documents: Documents | None = None
    selection: KeySelection | None = None


def _check_head_dim(query: Tensor, value: Tensor) -> None:
    head_dim = max(query.shape[-1], value.shape[-1])
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim: got {head_dim}, wanted at most {MAX_HEAD_DIM} for dmattn's kernels; "
            'set_attn_implementation("eager") serves this model, and mostly "sdpa", too'
        )


def _description(mask: Tensor | None, query: Tensor, key: Tensor) -> VisibleKeys | None:
    """The description in a mask from `make_mask`; None for other masks, or if shapes differ.

    query, key: (B, S, heads, D).
    """
    if not isinstance(mask, IntervalMask):
        return None
    shape = (query.shape[0], 1, query.shape[1], key.shape[1])
    return mask.visible if tuple(mask.shape) == shape else None


def _as_described(visible: VisibleKeys, has_softcap: bool) -> _SeenKeys:
    key_len = visible.key_len
    if not visible.needs_selection:
        # Hopper's kernels support softcap with documents, but not with a mask of keys.
        if has_softcap and visible.texts is not None:
            return _SeenKeys(key_len, True, documents=visible.texts)
        return _SeenKeys(key_len, True, visible.key_mask)
    if visible.window is None and visible.padding is None and visible.documents is not None:
        return _SeenKeys(key_len, True, documents=visible.documents)
    return _SeenKeys(key_len, True, selection=visible.selection)


def _in_documents(
    described: VisibleKeys | None,
    query: Tensor,
    key: Tensor,
    window: int | None,
    is_dense: bool,
    kwargs: dict[str, Any],
) -> VisibleKeys | None:
    """The description with documents, if only the call has boundaries of packed documents.

    transformers finds documents by position_ids when it makes a mask, but not with a cache, which
    models create by default. Collators for flash attention also pass boundaries (cu_seq_lens_q),
    which reach the layers.
    """
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    query_len, key_len = query.shape[1], key.shape[1]
    if described is not None:
        key_len = described.key_len
    # Different numbers of queries and keys mean cross attention, or a text that is continued.
    if cu_seqlens is None or query_len != key_len or query_len == 1:
        return described
    if described is None:
        shorter = window if window is not None and window < key_len else None
        described = VisibleKeys(
            query.shape[0], query_len, key_len, window=shorter, device=query.device
        )
    if described.padding is not None or described.document_ids is not None:
        return described  # the mask takes precedence, as with flash attention
    if query.shape[0] != 1 or described.chunk is not None or is_dense:
        got = "what has rows of its own" if is_dense else "chunks"
        got = got if query.shape[0] == 1 else f"a batch of {query.shape[0]}"
        raise ValueError(
            f"cu_seq_lens_q: got boundaries beside {got}, wanted a batch of 1 with causality and "
            "windows alone; with position_ids and use_cache=False masks know of documents by "
            "themselves"
        )
    return described.within(cu_seqlens, kwargs.get("max_length_q"))


def _by_mask(mask: Tensor, key_len: int) -> _SeenKeys:
    """What rows see by a mask of four dimensions, which includes causality."""
    if isinstance(mask, IntervalMask):
        mask = mask.to_dense_mask()
    _check_keys(mask, key_len)
    if mask.shape[2] > 1 and mask.stride(2) == 0:
        mask = mask[:, :, :1]  # the same for all rows: a single row costs less
    if mask.is_floating_point():
        return _SeenKeys(key_len, False, bias=mask)
    return _SeenKeys(key_len, False, mask)


def _by_position(
    padding: Tensor | None, query: Tensor, key: Tensor, is_causal: bool, window: int | None
) -> _SeenKeys:
    """What rows see by causality, a window and the padding (B, Sk) alone."""
    query_len, key_len = query.shape[1], key.shape[1]
    if padding is not None:
        _check_keys(padding, key_len)
    if is_causal and window is not None and window < key_len:
        selection = select_window(
            key_len, window, query_len, attn_mask=padding, device=query.device
        )
        return _SeenKeys(key_len, True, selection=selection)
    mask = None if padding is None else padding[:, None, None]
    return _SeenKeys(key_len, bool(is_causal and query_len > 1), mask)


def _check_keys(mask: Tensor, key_len: int) -> None:
    """Raise an error for a mask of another number of keys, or of integers.

    transformers makes such masks if an attention_mask is longer than the inputs, or if it covers
    tokens that were cropped from the cache. No guess is made which keys are meant.
    """
    is_added = mask.dim() == 4 and mask.is_floating_point()
    if mask.dtype != torch.bool and not is_added:
        raise TypeError(
            f"attention_mask: got dtype {mask.dtype} in {mask.dim()} dimensions, wanted torch.bool "
            "(True = attend), or a floating dtype in 4 dimensions, added to the logits"
        )
    keys = mask.shape[-1]
    if not (keys == key_len or keys == 1):
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}, wanted a mask of {key_len} keys, as "
            "many as the layer has"
        )


def _chosen_keys(
    module: nn.Module,
    indices: Tensor | None,
    block_indices: Tensor | None,
    query: Tensor,
    key: Tensor,
) -> Tensor | None:
    """The keys that a layer with an indexer chose: bool (B, H|1, Sq, Sk); None without a choice."""
    key_len = key.shape[1]
    if indices is not None:
        return _are_among(indices, key_len)[:, None]
    if block_indices is None:
        return None
    indexer: Any = module.indexer
    size = indexer.block_size
    blocks = -(-key_len // size)
    unused_to_the_end = block_indices.masked_fill(block_indices < 0, blocks)
    chosen = _are_among(unused_to_the_end, blocks + 1)[..., :blocks]
    chosen = chosen.repeat_interleave(size, dim=-1)[..., :key_len]
    return chosen.repeat_interleave(query.shape[2] // chosen.shape[1], dim=1)


def _are_among(indices: Tensor, size: int) -> Tensor:
    """bool (..., size): entry j says whether j is among the indices (..., chosen)."""
    found = indices.new_zeros((*indices.shape[:-1], size), dtype=torch.bool)
    return found.scatter(-1, indices.long(), True)


def _sum_of_biases(
    position_bias: Tensor | None, seen: _SeenKeys, dtype: torch.dtype
) -> Tensor | None:
    """The sum of both biases, float32 or in `dtype`, that of the query; None without any."""
    bias = seen.bias
    if position_bias is not None:
        position_bias = position_bias[..., : seen.key_len]
        bias = position_bias if bias is None else position_bias + bias
    return bias if bias is None or bias.dtype == torch.float32 else bias.to(dtype)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: _SeenKeys,
    bias: Tensor | None,
    settings: dict[str, Any],
) -> Any:
    """out (B, Sq, H, Dv); or a tuple of out and lse (B, H, Sq), if the settings ask for lse."""
    if seen.documents is not None:
        keys, values = key[:, : seen.key_len], value[:, : seen.key_len]
        return _within_documents(query, keys, values, seen.documents, settings)
    return flash_dmattn_func(
        query,
        key[:, : seen.key_len],
        value[:, : seen.key_len],
        attn_mask=seen.mask,
        attn_bias=bias,
        selection=seen.selection,
        **settings,
    )


def _within_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, settings: dict[str, Any]
) -> Any:
    """Attention of the batch as packed documents, sequence after sequence; needs no key lists."""
    found = flash_dmattn_varlen_func(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        documents.cu_seqlens,
        None,
        documents.max_seqlen,
        documents.max_seqlen,
        **settings,
    )
    out, lse = found if isinstance(found, tuple) else (found, None)
    out = out.view(*query.shape[:2], *out.shape[1:])
    return out if lse is None else (out, lse.unflatten(1, query.shape[:2]).transpose(0, 1))


def _one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All in the dtype of value: rotary embeddings and adapters may return wider query and key."""
    return query.to(value.dtype), key.to(value.dtype), value


def _one_batch_size(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All with the same batch size: learned queries, for example, come with a batch of 1."""
    if query.shape[0] == key.shape[0]:
        return query, key, value
    batch_size = max(query.shape[0], key.shape[0])

    def copied(t: Tensor) -> Tensor:
        return t.repeat(batch_size, 1, 1, 1) if t.shape[0] == 1 else t

    return copied(query), copied(key), copied(value)
