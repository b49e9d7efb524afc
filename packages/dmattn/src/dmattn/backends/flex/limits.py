"""What FlexAttention's kernels on a GPU cannot do, and the block sizes that they get.

The kernels index tensors with 32 bits, put batch entries and heads on axes of the grid that are
limited to 65535, and prefetch whatever score_mod and mask_mod read for each pair of a row and a
key. torch chooses block sizes as if score_mod and mask_mod read nothing; with a bias its blocks do
not fit the shared memory.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.problem import Problem, lse_dtype

_MOST_ENTRIES = 2**31 - 1
_MOST_PLACES = 65535  # along the second and third axis of a grid
_STAGES = 3  # the most stages of prefetched data that torch keeps
_SPARE_BYTES = 8 * 1024  # of shared memory, for reductions and changes of layout
# The smallest head_dim of the kernels on a GPU. Older releases of torch need a power of 2.
_SMALLEST_HEAD_DIM = 16
# From this much shared memory per block on, torch's own choice of blocks fits, if score_mod and
# mask_mod read nothing for each pair.
_LARGE_SHARED_BYTES = 160 * 1024

# Candidates for block sizes, the best first: of the forward (rows, keys); of the backward (size of
# the blocks that a loop goes through, size of the block that stays). For float32, which uses no
# matrix units, only the small ones are allowed.
_FORWARD = ((128, 64), (64, 64), (64, 32), (32, 32), (32, 16), (16, 16))
_BACKWARD = ((64, 64), (32, 64), (32, 32), (16, 32), (16, 16))
_SMALLEST = 32


class Blocks(NamedTuple):
    """Block sizes as FlexAttention's `kernel_options`; empty to leave the choice to torch."""

    options: tuple[tuple[str, int], ...] = ()


def kernel_head_dim(head_dim: int) -> int:
    """The head_dim to which operands are padded for the kernels on a GPU: a power of 2."""
    return max(_SMALLEST_HEAD_DIM, 1 << (head_dim - 1).bit_length())


def refusals(problem: Problem) -> list[Exception]:
    """Why the kernels cannot compute a problem whose tensors are on a GPU."""
    q = problem.q
    reasons: list[Exception] = []
    pairs = q.shape[-2] * (q.shape[0] if problem.packing is None else 1)
    if pairs > _MOST_PLACES:
        text = (
            f"query: got {pairs} pairs of a batch entry and a head, wanted at most {_MOST_PLACES} "
            "for backend 'flex', whose kernels have no more places for them"
        )
        reasons.append(ValueError(text))
    for name, entries in _entries(problem).items():
        if entries > _MOST_ENTRIES:
            text = (
                f"{name}: got a tensor that takes {entries} entries of memory in a row, wanted at "
                f"most {_MOST_ENTRIES} for backend 'flex', whose kernels count them in 32 bits"
            )
            reasons.append(ValueError(text))
    if blocks_for(problem, _shared_bytes(q.device)) is None:
        text = (
            f"query: got head_dim {q.shape[-1]} and dtype {q.dtype} on {q.device}, whose shared "
            "memory is too small for the kernels of backend 'flex'; wanted a smaller head_dim, or "
            "half precision"
        )
        reasons.append(ValueError(text))
    return reasons


def _entries(problem: Problem) -> dict[str, int]:
    """How many entries lie from the first to the last entry of each tensor, as kernels get it."""
    found = {}
    for name, t in (("query", problem.q), ("key", problem.k), ("value", problem.v)):
        padded = math.prod(t.shape[:-1]) * kernel_head_dim(t.shape[-1])
        found[name] = max(padded, _reach(t))
    # An expanded mask is passed without its repeats, a bias with all entries: see `operands`.
    if problem.mask is not None:
        sizes = zip(problem.mask.shape, problem.mask.stride(), strict=True)
        found["attn_mask"] = math.prod(size for size, stride in sizes if stride != 0)
    if problem.bias is not None:
        found["attn_bias"] = problem.bias.numel()
    return found


def _reach(t: Tensor) -> int:
    if t.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def blocks_for(problem: Problem, shared_bytes: int) -> Blocks | None:
    """Block sizes that fit the shared memory; without options if torch's own do; None if none fit.

    Args:
        problem: what to compute.
        shared_bytes: shared memory that a block of the GPU may have.
    """
    q = problem.q
    read = _bytes_read_by_pair(problem)
    if read == 0 and shared_bytes >= _LARGE_SHARED_BYTES:
        return Blocks()
    row = kernel_head_dim(q.shape[-1]) * q.dtype.itemsize
    most = _SMALLEST if q.dtype == torch.float32 else 128
    room = shared_bytes - _SPARE_BYTES
    forward = [
        (rows, keys)
        for rows, keys in _FORWARD
        if max(rows, keys) <= most
        and rows * row + _STAGES * (2 * keys * row + rows * keys * read) <= room
    ]
    # The backward reads once for the scores and once for their gradient.
    backward = [
        (moving, staying)
        for moving, staying in _BACKWARD
        if max(moving, staying) <= most
        and 2 * staying * row + _STAGES * 2 * moving * (row + staying * read) <= room
    ]
    if not forward or not backward:
        return None
    (rows, keys), (moving, staying) = forward[0], backward[0]
    return Blocks(
        (
            *(("BLOCK_M", rows), ("BLOCK_N", keys)),
            *(("BLOCK_M1", moving), ("BLOCK_N1", staying)),
            *(("BLOCK_M2", staying), ("BLOCK_N2", moving)),
        )
    )


def _bytes_read_by_pair(problem: Problem) -> int:
    """The number of bytes that score_mod and mask_mod read for every pair of a row and a key.

    A bias is assumed to be loaded for every pair, even if it is the same for all rows. The ends of
    a selection do not count: they are one number per key, which a block of keys loads once.
    """
    read = 0
    if problem.bias is not None:
        read += lse_dtype(problem.q.dtype).itemsize
    if problem.mask is not None:
        read += 1
    return read


def device_blocks(problem: Problem) -> Blocks:
    """The block sizes for a problem for which `refusals` is empty."""
    if not problem.q.is_cuda:
        return Blocks()
    return blocks_for(problem, _shared_bytes(problem.q.device)) or Blocks()


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", 64 * 1024))
