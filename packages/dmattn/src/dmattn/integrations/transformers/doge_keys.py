"""Which keys the rows of a Doge forward may choose from, and attention to the best of these.

The keys that rows may see are the same in every layer: they depend on padding, packed documents, a
sliding window, and the unused end of a static cache. They are worked out once per forward, as a
`SeenKeys`, in most cases of O(Sk) numbers. Which of these keys a row keeps depends on the scores of
the layer. Letters: B batch, Sq/Sk query/key length, H query heads, HK key/value heads, D head
dimension.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils.import_utils import is_tracing

from dmattn import (
    KeySelection,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    packed_documents,
    select_keys,
    sliding_window,
    top_window_mask,
)
from dmattn.integrations.documents import check_bounds
from dmattn.integrations.transformers.interval_mask import IntervalMask


class SeenKeys(NamedTuple):
    """The keys from which the rows of one forward may choose, for `attend`.

    `attend` applies `order` or `key_len` first. After that `mask`, if it is given, describes the
    keys; otherwise `cu_seqlens` and `selection` do; otherwise `key_mask` and `is_causal`.

    Attributes:
        mask: bool (B|1, heads|1, Sq|1, at least Sk), a mask that describes everything, including
            causality; or None.
        order: int64 (Sk,), an order in which the keys are taken first, or None. It moves the keys
            of a static cache that hold tokens to the end, where causal rows expect them.
        key_len: the number of leading keys, those of a static cache that hold tokens, to which all
            is limited; None for all keys.
        cu_seqlens: int32 (documents + 1,), boundaries of documents in the sequences of the batch
            laid one after the other, or None. It may reach the number of tokens before its end;
            then the last documents are empty.
        max_seqlen: the length of the longest document, or None if the host does not know it.
        selection: that of a sliding window which is no longer than the number of keys that a row
            keeps, so that all keys in the window are kept; or None.
        key_mask: bool (B|1, 1, 1, Sk), False for padding; or None.
        is_causal: whether rows see only keys up to their own position, the last row at the last
            key.
    """

    mask: Tensor | None = None
    order: Tensor | None = None
    key_len: int | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    selection: KeySelection | None = None
    key_mask: Tensor | None = None
    is_causal: bool = True


class _Call(NamedTuple):
    """The sizes and settings of one forward."""

    batch: int
    query_len: int
    key_len: int  # the number of keys that the layers will get from the cache
    total: int | Tensor  # how many of these keys hold tokens, including those of this forward
    device: torch.device
    keep: int  # the number of keys that each row keeps
    window: int | None  # the size of the sliding window


def seen_keys(
    config: Any,
    keep: int,
    hidden_shape: tuple[int, int],
    device: torch.device,
    attention_mask: Any,
    position_ids: Tensor | None,
    cache: Cache | None,
    is_causal: bool,
    boundaries: Any = None,
) -> SeenKeys:
    """What a forward of a Doge model may see, by the rules of transformers.

    Args:
        config: of the model.
        keep: the smallest number of keys that a row keeps in any layer.
        hidden_shape: (B, Sq).
        device: of the inputs.
        attention_mask: None, (B, tokens in the cache + Sq) with 0 or False at padding, or a mask of
            four dimensions, which then describes everything.
        position_ids: (B|1, Sq), or None. Without an attention_mask and a cache, a new document
            starts wherever they do not rise by one.
        cache: the cache in its state before this forward, or None.
        is_causal: False for a model that is used as an encoder.
        boundaries: integer (documents + 1,), boundaries of documents, rising from 0 to Sq, for a
            batch of 1 without a cache; or None. They take precedence over position_ids, and
            attention_mask over both.

    Raises:
        TypeError: attention_mask is no tensor, or has four dimensions and integers.
        ValueError: attention_mask has another shape, the cache another batch, or boundaries are
            given for a batch larger than 1, or on the CPU and do not rise from 0 to Sq.
    """
    batch, query_len = hidden_shape
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise TypeError(
            f"attention_mask: got {type(attention_mask).__name__}, wanted a torch.Tensor or None"
        )
    first_key: int = 0
    offset: int | Tensor = 0
    key_len = query_len
    if cache is not None:
        _check_batch(cache, batch)
        offset = cache.get_query_offset()
        key_len, first_key = cache.get_mask_sizes(query_len, 0)
    # Under torch.compile the description of an IntervalMask can be read, but not its shape.
    if isinstance(attention_mask, IntervalMask) and torch.compiler.is_compiling():
        return of_mask(keep, attention_mask)
    if attention_mask is not None and attention_mask.dim() == 4:
        _check_mask(attention_mask, config, batch, query_len, key_len)
        return of_mask(keep, attention_mask)
    if isinstance(offset, Tensor):
        offset = offset.to(device)
        if query_len > 1 and not is_tracing(offset):
            offset = int(offset)  # read once, so that the layers leave out the unused keys
    padding = None
    if attention_mask is not None:
        padding = _padding(attention_mask, batch, query_len, offset, may_go_on=cache is not None)
        padding = padding.to(device)[:, first_key : first_key + key_len]
        padding = torch.nn.functional.pad(padding, (0, key_len - padding.shape[1]))
    documents = None
    if attention_mask is None and boundaries is not None:
        documents = _numbers(boundaries, batch, query_len, device)
    elif attention_mask is None and cache is None and position_ids is not None:
        documents = find_packed_sequence_indices(position_ids.expand(batch, -1))
    total = offset + query_len - first_key
    window = config.sliding_window
    call = _Call(batch, query_len, key_len, total, device, keep, window)
    if not is_causal:
        return _both_ways(call, padding)
    return _seen(call, padding, documents)


def _numbers(boundaries: Any, batch: int, query_len: int, device: torch.device) -> Tensor:
    """int64 (1, Sq): the index of the document of each token, from boundaries of documents."""
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q: got boundaries beside a batch of {batch}, wanted 1")
    ends = check_bounds("cu_seq_lens_q", boundaries, query_len)[0][1:].to(device)
    token = torch.arange(query_len, device=device, dtype=ends.dtype)
    return torch.searchsorted(ends, token, right=True)[None]


def of_mask(keep: int, mask: Tensor) -> SeenKeys:
    """The `SeenKeys` of a mask of four dimensions, for rows that keep `keep` keys each.

    Raises:
        TypeError: the mask is neither bool nor floating.
    """
    if isinstance(mask, IntervalMask):
        batch, _, query_len, key_len = mask.shape
        visible = mask.visible
        if visible.chunk is None:
            call = _Call(
                batch, query_len, key_len, visible.key_len, visible.device, keep, visible.window
            )
            padding = visible.padding
            if padding is not None:
                padding = torch.nn.functional.pad(padding, (0, key_len - padding.shape[1]))
            return _seen(call, padding, visible.document_ids)
        mask = mask.to_dense_mask()
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"attention_mask: got dtype {mask.dtype} in four dimensions, wanted torch.bool (True = "
            "attend), or a floating mask to be added"
        )
    # Masks that are added have 0 where rows see a key; Doge has no other bias.
    return SeenKeys(mask=mask if mask.dtype == torch.bool else mask == 0, is_causal=False)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Tensor,
    keep: int,
    scale: float,
    seen: SeenKeys,
) -> Tensor:
    """Attention of each row to the `keep` keys with the highest scores among those that it may see.

    Of equal scores the later key is kept. The score is added to the logits.

    Args:
        query: (B, Sq, H, D).
        key, value: (B, Sk, HK, D), as the cache returns them.
        score: (B, HK, Sk).
        keep: the window size.
        scale: factor of the dot products.
        seen: from `seen_keys`.

    Returns:
        (B, Sq, H, D).
    """
    if seen.order is not None:
        key, value = key.index_select(1, seen.order), value.index_select(1, seen.order)
        score = score.index_select(2, seen.order)
    elif seen.key_len is not None:
        key, value = key[:, : seen.key_len], value[:, : seen.key_len]
        score = score[..., : seen.key_len]
    mask = seen.key_mask
    if seen.mask is not None:
        mask = seen.mask[..., : key.shape[1]]
        if mask.shape[2] > 1 and key.shape[1] > keep:
            mask = top_window_mask(score, keep, query.shape[1], False, mask)
        if mask.shape[2] > 1:
            return flash_dmattn_func(
                query, key, value, mask, score[:, :, None], scale, is_causal=False
            )
    elif seen.cu_seqlens is not None or seen.selection is not None:
        return _attend_to_selected(query, key, value, score, keep, scale, seen)
    return flash_dmattn_func(
        query,
        key,
        value,
        attn_mask=mask,
        attn_bias=score[:, :, None],
        softmax_scale=scale,
        is_causal=seen.is_causal,
        window_size=keep,
    )


def _attend_to_selected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Tensor,
    keep: int,
    scale: float,
    seen: SeenKeys,
) -> Tensor:
    """`attend` for rows whose keys are limited by documents or a short sliding window."""
    if seen.cu_seqlens is None:
        return flash_dmattn_func(
            query,
            key,
            value,
            attn_bias=score[:, :, None],
            softmax_scale=scale,
            is_causal=True,
            selection=seen.selection,
        )
    # The sequences of the batch one behind the other, (B * Sk, heads, ...).
    flat_query, key, value = (t.flatten(0, 1) for t in (query, key, value))
    score = score.transpose(0, 1).flatten(1)  # (HK, B * Sk)
    if seen.selection is None and seen.max_seqlen is not None:
        out = flash_dmattn_varlen_func(
            flat_query,
            key,
            value,
            seen.cu_seqlens,
            seen.cu_seqlens,
            seen.max_seqlen,
            seen.max_seqlen,
            attn_bias=score.transpose(0, 1),
            softmax_scale=scale,
            is_causal=True,
            window_size=keep,
        )
        return out.view(query.shape)
    selection = seen.selection
    if selection is None:
        selection = select_keys(score[None], keep, cu_seqlens=seen.cu_seqlens)
    out = flash_dmattn_func(
        flat_query[None],
        key[None],
        value[None],
        attn_bias=score[None, :, None],
        softmax_scale=scale,
        is_causal=True,
        selection=selection,
    )
    return out.view(query.shape)


def _check_batch(cache: Cache, batch: int) -> None:
    """Raise ValueError for a cache of another batch, before one of its layers is changed."""
    for layer in getattr(cache, "layers", ())[:1]:
        held = getattr(layer, "keys", None)
        if isinstance(held, Tensor) and held.dim() == 4 and held.shape[0] != batch:
            raise ValueError(
                f"past_key_values: got a {type(cache).__name__} of {held.shape[0]} sequences for "
                f"{batch}, wanted as many"
            )


def _check_mask(mask: Tensor, config: Any, batch: int, query_len: int, key_len: int) -> None:
    """Raise ValueError for a 4-D mask of a wrong shape, before the cache takes the tokens."""
    heads = {1, config.num_key_value_heads, config.num_attention_heads}
    n, mask_heads, rows, keys = mask.shape
    fits = n in (1, batch) and mask_heads in heads and rows in (1, query_len)
    if not fits or (keys != 1 and keys < key_len):
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}, wanted ({batch}|1, heads|1, "
            f"{query_len}|1, {key_len}), or more keys, as many as a cache has room for"
        )


def _padding(
    mask: Tensor, batch: int, query_len: int, offset: int | Tensor, may_go_on: bool
) -> Tensor:
    """A mask of two dimensions as bool, if it has an entry for each token so far.

    may_go_on: whether it may have more entries, such as for all tokens that a cache has room for.

    Raises:
        ValueError: the mask has another shape.
    """
    needed = query_len if isinstance(offset, Tensor) else offset + query_len
    fits = mask.dim() == 2 and mask.shape[0] == batch
    if not fits or mask.shape[1] < needed or (mask.shape[1] > needed and not may_go_on):
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}, wanted ({batch}, {needed}), all "
            "tokens up to the last one at hand, or four dimensions"
        )
    return mask.bool()


def _seen(call: _Call, padding: Tensor | None, documents: Tensor | None) -> SeenKeys:
    """The `SeenKeys` of causal rows.

    padding: bool (B, key_len), or None. documents: (B, Sq), the number of the document of each
    token, or None.
    """
    if call.query_len == 1:
        return _one_row(call, padding)
    if documents is not None:
        return _packed(call, documents)
    order = None
    key_len = call.key_len
    if isinstance(call.total, Tensor):
        key = torch.arange(key_len, device=call.device)
        order = (key + call.total) % key_len
        filled = (key >= key_len - call.total)[None]
        padding = filled if padding is None else padding.index_select(1, order) & filled
    else:
        key_len = call.total
        padding = None if padding is None else _unless_full(padding[:, :key_len])
    shorter = None if key_len == call.key_len else key_len
    if call.window is not None and call.window < key_len:
        if call.window > call.keep:
            mask = _in_window(call.query_len, key_len, call.window, call.device)
            mask = mask if padding is None else mask & padding[:, None, None]
            return SeenKeys(mask, order, shorter, is_causal=False)
        selection = sliding_window(
            key_len, call.window, call.query_len, attn_mask=padding, device=call.device
        )
        return SeenKeys(order=order, key_len=shorter, selection=selection)
    key_mask = None if padding is None else padding[:, None, None]
    return SeenKeys(order=order, key_len=shorter, key_mask=key_mask)


def _one_row(call: _Call, padding: Tensor | None) -> SeenKeys:
    """The `SeenKeys` of a single row per sequence, for which a mask per key is enough."""
    if isinstance(call.total, int):
        key_len = call.total
        first = 0 if call.window is None else max(0, key_len - call.window)
        if padding is not None:
            padding = padding[:, :key_len]
        if first > 0:
            recent = (torch.arange(key_len, device=call.device) >= first)[None]
            padding = recent if padding is None else padding & recent
        key_mask = None if padding is None else padding[:, None, None]
        shorter = None if key_len == call.key_len else key_len
        return SeenKeys(key_len=shorter, key_mask=key_mask, is_causal=False)
    key = torch.arange(call.key_len, device=call.device)
    shown = (key < call.total)[None]
    if call.window is not None:
        shown = shown & (key >= call.total - call.window)
    if padding is not None:
        shown = shown & padding
    return SeenKeys(key_mask=shown[:, None, None], is_causal=False)


def _packed(call: _Call, documents: Tensor) -> SeenKeys:
    """The `SeenKeys` of rows that see their own document only.

    A new document starts where the number in `documents` (B, Sq) differs from the one before. The
    sequences of the batch are laid one after the other; each starts with a new document.
    """
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents.diff(dim=1) != 0
    is_start = starts.flatten()
    tokens = is_start.shape[0]
    token = torch.arange(tokens, device=call.device)
    if is_tracing(is_start):
        # The number of documents is not known: boundaries for as many documents as tokens, of which
        # the last ones are empty.
        place = torch.where(is_start, is_start.cumsum(0) - 1, tokens)
        first = torch.where(is_start, token, tokens)
        cu_seqlens = token.new_full((tokens + 1,), tokens).scatter(0, place, first)
        longest = None
    else:
        cu_seqlens = torch.nn.functional.pad(token[is_start], (0, 1), value=tokens)
        longest = int(cu_seqlens.diff().max()) if tokens > 0 else 0
    cu_seqlens = cu_seqlens.to(torch.int32)
    reach = call.query_len if longest is None else longest
    if call.window is None or call.window >= reach:
        return SeenKeys(cu_seqlens=cu_seqlens, max_seqlen=longest)
    if call.window > call.keep:
        mask = _in_window(call.query_len, call.query_len, call.window, call.device)
        own = documents[:, None, :, None] == documents[:, None, None]
        return SeenKeys(mask & own, is_causal=False)
    selection = packed_documents(
        document_ids=is_start.cumsum(0)[None], window_size=call.window, device=call.device
    )
    return SeenKeys(cu_seqlens=cu_seqlens, selection=selection)


def _both_ways(call: _Call, padding: Tensor | None) -> SeenKeys:
    """The `SeenKeys` of rows that see keys in both directions, up to `window` away if given."""
    key = torch.arange(call.key_len, device=call.device)
    row = torch.arange(call.query_len, device=call.device) + call.total - call.query_len
    mask = (key < call.total)[None, None, None]
    if padding is not None:
        mask = mask & padding[:, None, None]
    if call.window is not None:
        mask = mask & ((row[:, None] - key).abs() <= call.window)
    return SeenKeys(mask, is_causal=False)


def _in_window(query_len: int, key_len: int, window: int, device: torch.device) -> Tensor:
    """bool (1, 1, Sq, Sk): the last `window` keys up to each row's own."""
    row = torch.arange(query_len, device=device)[:, None] + (key_len - query_len)
    distance = row - torch.arange(key_len, device=device)
    return ((distance >= 0) & (distance < window))[None, None]


def _unless_full(padding: Tensor) -> Tensor | None:
    """The padding mask, or None if nothing is padding.

    The host reads one number for that, as transformers' own sdpa masks do; not while tracing.
    """
    return padding if is_tracing(padding) or not bool(padding.all()) else None
