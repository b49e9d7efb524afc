"""Checks of what a `DynamicMaskCache` is made from and given."""

from typing import Any

import torch
from torch import Tensor

from dmattn.checks import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM
from dmattn.validation import (
    can_be_read,
    check_dtype,
    check_int,
    check_same_device,
    check_shape,
    check_tensor,
    check_tensor_dtype,
    describe,
    one_of,
)

_HALF = (torch.float16, torch.bfloat16)
_DTYPES = {"cuda": _HALF, "cpu": (*_HALF, torch.float32, torch.float64)}
_DTYPES["meta"] = _DTYPES["cpu"]


def check_cache_device(device: Any) -> torch.device:
    """A device that caches can be on."""
    wanted = "a torch.device or its name, of cuda or the CPU"
    try:
        found = torch.device(device)
    except (TypeError, RuntimeError):
        raise TypeError(f"device: got {describe(device)}, wanted {wanted}") from None
    if found.type not in _DTYPES:
        raise ValueError(f"device: got {device}, wanted {wanted}")
    return found


def check_cache_head_dim(head_dim: Any, device: torch.device) -> int:
    """A head_dim that attention through a cache serves."""
    head_dim = check_int("head_dim", head_dim, 1)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim: got {head_dim}, wanted 1 to {MAX_HEAD_DIM}")
    if device.type == "cuda" and head_dim % HEAD_DIM_MULTIPLE:
        raise ValueError(f"head_dim: got {head_dim}, wanted a multiple of 8 on CUDA")
    return int(head_dim)


def check_entry_dtype(dtype: Any, device: torch.device) -> torch.dtype:
    """A dtype that keys and values in a cache can have."""
    if check_dtype("dtype", dtype) not in _DTYPES[device.type]:
        where = "CUDA" if device.type == "cuda" else "the CPU"
        raise TypeError(f"dtype: got {dtype}, wanted {one_of(_DTYPES[device.type])} on {where}")
    return dtype  # type: ignore[no-any-return]  # just checked


def check_cache_input(
    name: str, t: Any, shape: tuple[int, ...], dtype: torch.dtype, entries: Tensor
) -> None:
    """Raise for a tensor that does not fit; quick for one that does, as each step calls it.

    Args:
        name: the argument's public name.
        t: what the caller gave.
        shape, dtype: what it has to have.
        entries: the keys of the cache.
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
    """Places in the batch of a cache, int (N,), of which none leads outside.

    Raises:
        TypeError: it is no tensor of int32 or int64.
        ValueError: its shape or device does not fit; where the host can read it, also that a number
            is out of range.
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
    """Places as `check_places`, no two of them alike.

    Raises:
        TypeError: as `check_places`.
        ValueError: as `check_places`; or one is named twice, of which a device only tells that
            there are more than the cache has.
    """
    index = check_places("slots", slots, batch, device)
    if len(index) > batch:
        raise ValueError(f"slots: got {len(index)}, wanted at most {batch}, each named once")
    if can_be_read(index) and len(set(index.tolist())) < len(index):
        raise ValueError(f"slots: got {index.tolist()}, wanted each named once")
    return index.long()


def size_of(t: Any, dim: int) -> int:
    """Of a (B, tokens, heads, D) tensor; the checks to come name whatever else it is."""
    return t.shape[dim] if isinstance(t, Tensor) and not t.is_nested and t.dim() == 4 else 1


def _autocast_hint(t: Tensor, dtype: torch.dtype, entry_dtype: torch.dtype) -> str:
    """What may be behind keys of another dtype than the cache's."""
    if dtype != entry_dtype or t.device.type not in ("cuda", "cpu"):
        return ""
    if torch.is_autocast_enabled(t.device.type):
        return ", the dtype of the cache; under torch.autocast, make the cache under it as well"
    if dtype in _HALF and t.dtype == torch.float32:
        return ", the dtype of the cache; one made under torch.autocast serves calls under it"
    return ", the dtype of the cache"
