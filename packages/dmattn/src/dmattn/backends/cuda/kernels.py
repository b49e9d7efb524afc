"""The compiled kernels: they are loaded at the first call, and launched on torch's streams."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn.key_lists import Selection

ABI_VERSION = 1
_MIN_CAPABILITY = (8, 0)

# A tensor as the kernels take it: data pointer, dtype code, shape, strides in elements.
View = tuple[int, int, torch.Size, tuple[int, ...]]

# Numbers of the CUDA devices for which `check_device` has passed.
checked_devices: set[int] = set()


class Operation(NamedTuple):
    """The names in the compiled module that belong to one operation."""

    params: str  # the class of its parameters
    at_once: str  # the function that takes the parameters, allocates the workspace and launches


FORWARD = Operation("FwdParams", "enqueue_fwd")
BACKWARD = Operation("BwdParams", "enqueue_bwd")
SELECT = Operation("SelectParams", "enqueue_select")
BUILD_KEY_LISTS = Operation("BuildKeyListsParams", "enqueue_build_key_lists")
CACHE_APPEND = Operation("CacheAppendParams", "enqueue_cache_append")
CACHE_DRAFT = Operation("CacheDraftParams", "enqueue_cache_draft")
CACHE_COMMIT = Operation("CacheCommitParams", "enqueue_cache_commit")
JOIN_KEYS = Operation("JoinKeysParams", "enqueue_join_keys")
KEEP_KEYS = Operation("KeepKeysParams", "enqueue_keep_keys")


class Kernels(NamedTuple):
    """The compiled module, and how tensors are passed to it.

    Attributes:
        core: the module.
        at_once: its functions that do all of a call, by name; empty if the module cannot read
            torch's tensors, or is of a release without such functions.
        view: converts a tensor to the form in which the module takes it.
    """

    core: Any
    at_once: dict[str, Callable[..., int]]
    view: Callable[[Tensor], Any]


_OPERATIONS = (
    *(FORWARD, BACKWARD, SELECT, BUILD_KEY_LISTS),
    *(CACHE_APPEND, CACHE_DRAFT, CACHE_COMMIT),
    *(JOIN_KEYS, KEEP_KEYS),
)

# The module's function `kind_of` for `dmattn.known_calls`, as the only entry once it is loaded.
kind_readers: list[Callable[..., bytes | None]] = []


@functools.cache
def load_kernels() -> Kernels:
    """The compiled module dmattn_kernels._core, imported at the first call.

    Raises:
        RuntimeError: it is not installed, cannot be loaded, or has another ABI version.
    """
    try:
        core: Any = importlib.import_module("dmattn_kernels._core")
    except ImportError as error:
        raise RuntimeError(
            "dmattn-kernels: got none that can be loaded, wanted it for tensors on CUDA; "
            f"install it beside dmattn, from the same release or clone ({error})"
        ) from error
    found = core.abi_version()
    if found != ABI_VERSION:
        raise RuntimeError(
            f"dmattn-kernels: got ABI version {found}, wanted {ABI_VERSION}; install dmattn and "
            "dmattn-kernels of one release, or from one clone"
        )
    codes = {
        torch.float16: core.FLOAT16,
        torch.bfloat16: core.BFLOAT16,
        torch.float32: core.FLOAT32,
        torch.bool: core.BOOL,
        torch.int32: core.INT32,
        torch.int64: core.INT64,
    }
    # With older releases of torch the module cannot read tensors, nor could its first releases.
    reads = getattr(core, "reads", None)
    if reads is None or not reads(Tensor):
        return Kernels(core, {}, functools.partial(_described, codes))
    if hasattr(core, "kind_of"):
        kind_readers[:] = [core.kind_of]
    names = [x.at_once for x in _OPERATIONS if hasattr(core, x.at_once)]
    return Kernels(core, {name: getattr(core, name) for name in names}, _as_it_is)


def check_device(device: int) -> None:
    """Raise unless the kernels support CUDA device number `device`.

    Raises:
        RuntimeError: the kernels cannot be loaded, or the GPU is not one of NVIDIA's from sm_80 on.
    """
    if device in checked_devices:
        return
    if torch.version.hip is None:  # on AMD GPUs the problem is not a missing package
        load_kernels()
    reason = unserved(device)
    if reason is not None:
        raise RuntimeError(reason)
    checked_devices.add(device)


def serves(t: Tensor) -> bool:
    """Whether the kernels are for the device of a tensor; if they are not installed, True as well.

    Operations of torch are to be used on other devices only, so that no call is slow for lack of a
    package without an error.
    """
    return t.is_cuda and unserved(t.get_device()) is None


def unserved(device: int) -> str | None:
    """Why there are no kernels for CUDA device number `device`; None if there are.

    Whether the kernels are installed makes no difference.
    """
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


@functools.cache
def has_kernels_of_hopper(device: int) -> bool:
    """Whether the kernels written for Hopper serve CUDA device number `device`.

    They take masks and biases over key lists, but not over packed sequences, and they can sum
    gradients in a fixed order beside a bias per row and key, if its rows start at multiples of 16
    bytes.
    """
    architecture: str = load_kernels().core.device_architecture(device)
    return architecture == "sm90"


def _as_it_is(t: Tensor) -> Tensor:
    return t


def _described(codes: dict[torch.dtype, int], t: Tensor) -> View:
    return t.data_ptr(), codes[t.dtype], t.shape, t.stride()


def at_once(operation: Operation) -> Callable[..., int]:
    """The module's function that does all of a call.

    It takes the arguments of `launch` (without operation and tensor), followed by the stream. It
    returns 0 if the call was enqueued; any other number means that `launch` has to be called.

    Raises:
        RuntimeError: no usable kernels.
    """
    return load_kernels().at_once.get(operation.at_once, _not_at_once)


def _not_at_once(*_: Any) -> int:
    return -1


def parts(lists: Selection) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The tensors of a selection as the module takes them: with None for an empty `full`."""
    return lists if lists.full.dim() == 3 else (*lists[:3], None)


def launch(operation: Operation, on: Tensor, *arguments: Any) -> None:
    """Enqueue a call on the current stream of the device of tensor `on`.

    Args:
        operation: which operation to call.
        on: a tensor on the device, from which the workspace is allocated.
        arguments: all arguments of the constructor of the operation's parameters; the first is the
            device. By position, since matching names would cost several microseconds. Tensors are
            passed as they are, alone or in a tuple. The caller has to keep them referenced until
            this returns: otherwise their memory may be given to the workspace.

    Raises:
        ValueError: the library finds an argument that does not fit.
        RuntimeError: no usable kernels, or an error of CUDA.
    """
    core, at_once, view = load_kernels()
    stream = torch._C._cuda_getCurrentRawStream(arguments[0])
    call = at_once.get(operation.at_once)
    if call is not None and call(*arguments, stream) == 0:
        return
    params = getattr(core, operation.params)(*(_viewed(x, view) for x in arguments))
    size = params.enqueue(stream)
    if size > 0:
        # Freed on return: the caching allocator reuses it only for later work of the same stream.
        workspace = on.new_empty(size, dtype=torch.uint8)
        params.launch(workspace.data_ptr(), size, stream)


def _viewed(argument: Any, view: Callable[[Tensor], Any]) -> Any:
    if isinstance(argument, tuple):
        return tuple([None if t is None else view(t) for t in argument])
    return view(argument) if isinstance(argument, Tensor) else argument
