"""The compiled kernels: loaded at the first call, given views of tensors, launched on a stream."""

import functools
import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn.key_lists import Selection

ABI_VERSION = 1
_MIN_CAPABILITY = (8, 0)

# A tensor as the kernels take it: data pointer, dtype code, shape, strides in elements.
View = tuple[int, int, torch.Size, tuple[int, ...]]

checked_devices: set[int] = set()


class Kernels(NamedTuple):
    """The compiled module, and its numbers for the dtypes."""

    core: Any
    dtype_codes: dict[torch.dtype, int]


@functools.cache
def load_kernels() -> Kernels:
    """The compiled module dmattn_kernels._core, imported at the first call.

    Raises:
        RuntimeError: it is not installed, cannot be loaded, or speaks another ABI version.
    """
    try:
        core: Any = importlib.import_module("dmattn_kernels._core")
    except ImportError as error:
        raise RuntimeError(
            "dmattn-kernels: got none that can be loaded, wanted it for tensors on CUDA; "
            f"pip install dmattn-kernels ({error})"
        ) from error
    found = core.abi_version()
    if found != ABI_VERSION:
        raise RuntimeError(
            f"dmattn-kernels: got ABI version {found}, wanted {ABI_VERSION}; install the two "
            "packages of one release: pip install --upgrade dmattn dmattn-kernels"
        )
    codes = {
        torch.float16: core.FLOAT16,
        torch.bfloat16: core.BFLOAT16,
        torch.float32: core.FLOAT32,
        torch.bool: core.BOOL,
        torch.int32: core.INT32,
    }
    return Kernels(core, codes)


def check_device(device: int) -> None:
    """Make sure that the kernels serve CUDA device number `device`.

    Raises:
        RuntimeError: the kernels cannot be loaded, or the GPU is not one of NVIDIA's from sm_80 on.
    """
    if device in checked_devices:
        return
    if torch.version.hip is None:  # what is missing there is no package
        load_kernels()
    reason = unserved(device)
    if reason is not None:
        raise RuntimeError(reason)
    checked_devices.add(device)


def unserved(device: int) -> str | None:
    """Why there are no kernels for such a GPU, installed or not; None where there are."""
    if device in checked_devices:
        return None
    if torch.version.hip is not None:
        name = torch.cuda.get_device_name(device)
        return f"query: got a tensor on cuda:{device} ({name}), wanted an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= _MIN_CAPABILITY:
        return None
    return (
        f"query: got a tensor on cuda:{device} ({torch.cuda.get_device_name(device)}, "
        f"sm_{major}{minor}), wanted a GPU of sm_80 (Ampere) or later"
    )


def view(t: Tensor, codes: dict[torch.dtype, int]) -> View:
    return t.data_ptr(), codes[t.dtype], t.shape, t.stride()


def views(
    selection: Selection, codes: dict[torch.dtype, int]
) -> tuple[View, View, View, View | None]:
    end, idx, count, full = selection
    last = view(full, codes) if full.dim() == 3 else None
    return view(end, codes), view(idx, codes), view(count, codes), last


def launch(params: Any, q: Tensor, device: int) -> None:
    stream = torch._C._cuda_getCurrentRawStream(device)
    size = params.enqueue(stream)
    if size > 0:
        # Freed on return: the caching allocator reuses it only for later work of the same stream.
        workspace = q.new_empty(size, dtype=torch.uint8)
        params.launch(workspace.data_ptr(), size, stream)
