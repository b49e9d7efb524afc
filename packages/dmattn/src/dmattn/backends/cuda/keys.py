"""Copying keys, values and scores by the CUDA kernels: dmattn::join_keys and dmattn::keep_keys."""

from torch import Tensor

from dmattn.backends.cuda.kernels import JOIN_KEYS, KEEP_KEYS, check_device, launch
from dmattn.key_lists import KeptKeys


def join_keys(
    first: tuple[Tensor, Tensor, Tensor],
    new: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    joined: tuple[Tensor, Tensor, Tensor],
    place_first: Tensor | None = None,
) -> None:
    """The CUDA implementation of dmattn::join_keys: fills `joined`.

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    k = joined[0]
    device = k.get_device()
    check_device(device)
    launch(JOIN_KEYS, k, device, *_rows(first), *_rows(new), mask, *joined, place_first)


def keep_keys(
    row: int,
    end: Tensor,
    place: Tensor | None,
    keys: tuple[Tensor, Tensor, Tensor],
    position: Tensor | None,
    seen: Tensor | None,
    kept: KeptKeys,
    beside_attention: bool = False,
) -> None:
    """The CUDA implementation of dmattn::keep_keys: fills `kept`.

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    device = kept.k.get_device()
    check_device(device)
    k, v, score = _rows(keys)
    if end.stride(2) != 1:
        end, beside_attention = end.contiguous(), False
    # If keys or values were copied just now, the kernel has to wait for that copy, and so cannot
    # run at the same time as the attention.
    beside_attention = beside_attention and k is keys[0] and v is keys[1]
    arguments = (row, end, place, k, v, score, position, seen, *kept, beside_attention)
    launch(KEEP_KEYS, kept.k, device, *arguments)


def _rows(keys: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values, made contiguous along head_dim as the kernels need it, and scores."""
    k, v, score = keys
    if k.stride(3) != 1:
        k = k.contiguous()
    if v.stride(3) != 1:
        v = v.contiguous()
    return k, v, score
