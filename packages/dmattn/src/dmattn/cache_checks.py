"""Checks of the arguments of a `DynamicMaskCache` and of its methods."""

from typing import Any

import torch
from torch import Tensor

from dmattn.cache_state import CacheTokens
from dmattn.checks import HEAD_DIM_MULTIPLE, check_head_dim_number, check_last_stride
from dmattn.selection import KeySelection
from dmattn.validation import (
    can_be_read,
    check_device,
    check_dtype,
    check_float32,
    check_optional_tensor,
    check_same_device,
    check_shape,
    check_tensor,
    check_tensor_dtype,
    describe,
    is_one_or,
    one_of,
)

_HALF = (torch.float16, torch.bfloat16)
_DTYPES = {"cuda": _HALF, "cpu": (*_HALF, torch.float32, torch.float64)}
_DTYPES["meta"] = _DTYPES["cpu"]


def check_cache_device(device: Any) -> torch.device:
    """`device` as a torch.device on which a cache can be: CUDA, the CPU, or meta.

    Raises:
        TypeError: torch cannot make a device of it.
        ValueError: caches cannot be on such a device.
    """
    wanted = "a torch.device or its name, of cuda or the CPU"
    found = check_device(device, wanted)
    if found.type not in _DTYPES:
        raise ValueError(f"device: got {device}, wanted {wanted}")
    return found


def check_cache_head_dim(head_dim: Any, device: torch.device) -> int:
    """`head_dim` as an int that attention through a cache supports on `device`.

    Raises:
        TypeError: it is no int.
        ValueError: it is not 1 to 256, or on CUDA no multiple of 8.
    """
    found = check_head_dim_number(head_dim)
    if device.type == "cuda" and found % HEAD_DIM_MULTIPLE:
        raise ValueError(f"head_dim: got {found}, wanted a multiple of {HEAD_DIM_MULTIPLE} on CUDA")
    return found


def check_entry_dtype(dtype: Any, device: torch.device) -> torch.dtype:
    """`dtype`, if keys and values in a cache on `device` can have it; raises TypeError if not."""
    if check_dtype("dtype", dtype) not in _DTYPES[device.type]:
        where = "CUDA" if device.type == "cuda" else "the CPU"
        raise TypeError(f"dtype: got {dtype}, wanted {one_of(_DTYPES[device.type])} on {where}")
    return dtype  # type: ignore[no-any-return]  # just checked


def check_cache_input(
    name: str, t: Any, shape: tuple[int, ...], dtype: torch.dtype, entries: Tensor
) -> None:
    """Raise for a tensor that does not fit. Fast if it fits, since each decoding step calls this.

    Args:
        name: the argument's public name.
        t: what the caller gave.
        shape, dtype: those that it must have.
        entries: the keys of the cache, on whose device it must be.

    Raises:
        TypeError: it is no tensor, or has another dtype.
        ValueError: it is not dense, or has another shape or device.
    """
    if (
        isinstance(t, Tensor)
        and t.layout is torch.strided
        and not t.is_nested
        and t.dtype == dtype
        and t.shape == shape
        and t.device == entries.device
    ):
        return
    check_tensor(name, t)
    check_tensor_dtype(name, t, (dtype,), _autocast_hint(t, dtype, entries.dtype))
    check_shape(name, t, shape)
    check_same_device(name, t, entries.device, "the cache")


def check_places(name: str, given: Any, batch: int, device: torch.device) -> Tensor:
    """Indices into the batch of a cache, int (N,), none of which is out of range.

    The host checks the values if it can read them without waiting; otherwise they are clamped.

    Raises:
        TypeError: it is no tensor of int32 or int64.
        ValueError: its shape or device does not fit, or the host has read a number out of range.
    """
    index = check_tensor(name, given)
    check_tensor_dtype(name, index, (torch.int64, torch.int32))
    check_same_device(name, index, device, "the cache")
    if index.dim() != 1 or (batch == 0 and len(index) > 0):
        wanted = "(N,)" if batch > 0 else "(0,)"
        raise ValueError(f"{name}: got shape {tuple(index.shape)}, wanted {wanted}")
    if can_be_read(index):
        wrong = index[(index < 0) | (index >= batch)]
        if wrong.numel() > 0:
            raise ValueError(f"{name}: got {int(wrong[0])}, wanted 0 to {batch - 1}")
        return index
    return index.clamp(0, max(0, batch - 1))


def check_slots(slots: Any, batch: int, device: torch.device) -> Tensor:
    """Indices as `check_places` returns them, as int64, no two of them the same.

    Raises:
        TypeError: as `check_places`.
        ValueError: as `check_places`; or a slot is named twice. If the host cannot read the values,
            that is only noticed if there are more of them than the cache has slots.
    """
    index = check_places("slots", slots, batch, device)
    if len(index) > batch:
        raise ValueError(f"slots: got {len(index)}, wanted at most {batch}, each named once")
    if can_be_read(index) and len(set(index.tolist())) < len(index):
        raise ValueError(f"slots: got {index.tolist()}, wanted each named once")
    return index.long()


def size_of(t: Any, dim: int) -> int:
    """The size of dimension `dim` of a (B, tokens, heads, D) tensor.

    1 for anything else, which a later check reports.
    """
    return t.shape[dim] if isinstance(t, Tensor) and not t.is_nested and t.dim() == 4 else 1


def check_step(
    entries: Tensor,
    score_dtype: torch.dtype,
    batch: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Tensor,
    softmax_scale: Any,
    softcap: Any,
    active: Tensor | None,
) -> tuple[CacheTokens, float, float]:
    """Check the arguments of a decoding step.

    Args:
        entries: the keys of the cache.
        score_dtype: of the scores of the cache.
        batch: how many slots the tokens are for.
        query, key, value, score, softmax_scale, softcap, active: as for
            `DynamicMaskCache.append_and_attend`.

    Returns:
        The tokens, with `active` as bool (B, T) or None; the softmax scale; and the softcap.

    Raises:
        TypeError, ValueError: something does not fit the cache.
        RuntimeError: a gradient would be needed.
    """
    nheads_k, head_dim = entries.shape[2:]
    tokens, nheads = size_of(query, 1), size_of(query, 2)
    dtype, shape = entries.dtype, (batch, tokens, nheads_k, head_dim)
    check_cache_input("query", query, (batch, tokens, nheads, head_dim), dtype, entries)
    check_cache_input("key", key, shape, dtype, entries)
    check_cache_input("value", value, shape, dtype, entries)
    check_cache_input("score", score, (batch, nheads_k, tokens), score_dtype, entries)
    if query.is_cuda:
        check_last_stride(query, key, value)
    if nheads < 1 or nheads % nheads_k:
        raise ValueError(f"query: got {nheads} heads, wanted a multiple of {nheads_k}")
    active = check_optional_tensor("active", active)
    if active is not None:
        by_slot = active.dim() == 1
        wanted = (batch,) if by_slot else (batch, tokens)
        check_cache_input("active", active, wanted, torch.bool, entries)
        if by_slot:
            active = active[:, None].expand(-1, tokens)
    check_no_gradients(query, key, value, score)
    softcap = check_float32("softcap", softcap, 0)
    if softmax_scale is None:
        scale = head_dim**-0.5
    else:
        scale = check_float32("softmax_scale", softmax_scale)
    return CacheTokens(key, value, score, active), scale, softcap


def check_no_gradients(*tensors: Tensor) -> None:
    """Raise RuntimeError if a gradient would be needed, which no cache carries."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(
            "DynamicMaskCache: got tensors that require gradients, wanted "
            "torch.no_grad(): decoding has none"
        )


def check_room(
    seen: Tensor, capacity: int, tokens: int, active: Tensor | None, rows: Tensor | None
) -> int:
    """Raise ValueError if there is no room for new tokens; the host waits for the device.

    Args:
        seen: int32 (B,), the number of tokens of each sequence.
        capacity: the most tokens that a sequence can have.
        tokens: how many tokens are to be added to each of the slots.
        active: bool (n, tokens), which of them count; all when None.
        rows: the slots (n,) that they are for; all when None.

    Returns:
        The largest number of tokens that a sequence has now.
    """
    more = seen.new_full((len(seen if rows is None else rows),), tokens)
    if active is not None:
        more = active.sum(1, dtype=torch.int32)
    if rows is not None:
        more = torch.zeros_like(seen).index_copy_(0, rows, more)
    counts = torch.stack([seen, more])
    held, coming = max(zip(*counts.tolist(), strict=True), key=sum, default=(0, 0))
    if held + coming > capacity:
        raise _no_room(coming, held, capacity)
    return max(counts[0].tolist(), default=0)


def check_prompt_room(seqlen: int, real: Tensor | None, capacity: int) -> int:
    """An upper bound of the tokens of the longest prompt; raises ValueError if they do not fit.

    Args:
        seqlen: length of all prompts, padding included.
        real: bool (B, S), False at padding; None where there is none.
        capacity: the most tokens that a sequence can have.
    """
    if seqlen <= capacity:
        return seqlen
    most = seqlen if real is None else max(real.sum(1).tolist(), default=0)
    if most > capacity:
        raise _no_room(most, 0, capacity)
    return most


def _no_room(tokens: int, held: int, capacity: int) -> ValueError:
    return ValueError(
        f"key: got {tokens} tokens after {held}, wanted at most the cache's capacity of "
        f"{capacity} in all"
    )


def check_prompt_selection(
    selection: Any, window_size: int, shape: tuple[int, int, int], device: torch.device
) -> None:
    """Raise unless `selection` is one for a prompt with scores of this shape (B, HK, S).

    Raises:
        TypeError: it is no KeySelection.
        ValueError: its window size, shape or device does not fit.
    """
    if not isinstance(selection, KeySelection):
        raise TypeError(
            f"selection: got {describe(selection)}, wanted a dmattn.KeySelection or None"
        )
    found = selection.end.shape
    fits = all(is_one_or(size, wanted) for size, wanted in zip(found[:2], shape[:2], strict=True))
    if not fits or found[2] != shape[2] or selection.window_size != window_size:
        raise ValueError(
            f"selection: got window_size {selection.window_size} and end of shape "
            f"{tuple(found)}, wanted window_size {window_size} and {shape}"
        )
    check_same_device("selection", selection.end, device, "the cache")


def real_tokens(
    lengths: Tensor | None, attn_mask: Tensor | None, shape: tuple[int, int], entries: Tensor
) -> Tensor | None:
    """Which tokens of prompts (B, S) are no padding: bool (B, S), or None if there is no padding.

    Args:
        lengths, attn_mask: what the caller gave, at most one of them.
        shape: (B, S).
        entries: the keys of the cache.

    Raises:
        TypeError: the given tensor has the wrong type or dtype.
        ValueError: both are given; a shape or device does not fit; or the host has read a length
            that is out of range.
    """
    batch, seqlen = shape
    if attn_mask is not None:
        if lengths is not None:
            raise ValueError("lengths: got a value beside attn_mask, wanted one of them")
        check_cache_input("attn_mask", attn_mask, shape, torch.bool, entries)
        return attn_mask
    if lengths is None:
        return None
    check_tensor("lengths", lengths, "a torch.Tensor or None")
    check_tensor_dtype("lengths", lengths, (torch.int32, torch.int64))
    check_cache_input("lengths", lengths, (batch,), lengths.dtype, entries)
    if can_be_read(lengths):
        wrong = lengths[(lengths < 0) | (lengths > seqlen)]
        if wrong.numel() > 0:
            raise ValueError(f"lengths: got {int(wrong[0])}, wanted 0 to {seqlen}")
    return torch.arange(seqlen, device=lengths.device) < lengths[:, None]


def _autocast_hint(t: Tensor, dtype: torch.dtype, entry_dtype: torch.dtype) -> str:
    """The end of the message about a wrong dtype: if autocast may be the cause, how to avoid it.

    `t`: the tensor given. `dtype`: the one that is wanted. `entry_dtype`: that of the cache's keys.
    """
    if dtype != entry_dtype or t.device.type not in ("cuda", "cpu"):
        return ""
    if torch.is_autocast_enabled(t.device.type):
        return ", the dtype of the cache; under torch.autocast, make the cache under it as well"
    if dtype in _HALF and t.dtype == torch.float32:
        return ", the dtype of the cache; one made under torch.autocast serves calls under it"
    return ", the dtype of the cache"
