"""The tile shapes of the kernels. They are fixed: there is no autotuning at the first call.

Most were chosen by the output of ptxas for the kernels with a mask and a bias: at most 64 KB of
shared memory, the smallest size among supported GPUs, and no or nearly no spilled registers. GPUs
with as much shared memory as Hopper get larger tiles, unless a mask or bias with rows and keys
needs some of it.
"""

import functools
import os
import sys
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Rows and keys of a tile, and the launch settings that go with them."""

    rows: int  # a divisor of the 128 rows that share a list of keys
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """A tile for each kind of kernel."""

    forward: Tile
    row_gradients: Tile
    key_gradients: Tile
    bias_gradient: Tile


# By the padded head_dim. With 4 warps instead of 8, the logits of 64 x 64 pairs and the addresses
# of mask and bias would not fit the registers; a second stage would not fit the shared memory.
_MATRIX_UNITS = {
    64: Tiles(Tile(64, 64, 8, 1), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1), Tile(64, 64, 8, 1)),
    128: Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    256: Tiles(Tile(32, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1), Tile(16, 32, 8, 1)),
}
# For GPUs on which a block may have at least this many bytes of shared memory: keys and values, or
# rows, are loaded while products of the previous ones are computed. At head_dim 128 these were the
# fastest of four choices on an H200, without a mask; for the others ptxas reports hardly any
# spilled register.
_LARGE_SHARED = 200 * 1024
_LARGE = {
    64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)),
    128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)),
    256: (Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2)),
}
# Without matrix units each thread holds whole rows of both factors of a product in registers. At
# head_dim 256 these do not fit, whatever the tile; the kernels are correct but slow there.
_NO_MATRIX_UNITS = {
    64: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    128: Tiles(*[Tile(16, 16, 8, 1)] * 4),
    256: Tiles(*[Tile(16, 16, 8, 1)] * 4),
}
# The interpreter takes about the same time for each operation, whatever its size.
_INTERPRETED = Tiles(*[Tile(128, 128, 4, 1)] * 4)


def is_interpreted() -> bool:
    """Whether the kernels run in triton's interpreter.

    Decided when triton is imported, by TRITON_INTERPRET; before that, what an import would decide.
    """
    standard = sys.modules.get("triton.language.standard")
    if standard is None:
        return os.environ.get("TRITON_INTERPRET") == "1"
    return type(standard.sum).__name__ == "InterpretedFunction"


def padded_head_dim(head_dim: int) -> int:
    """head_dim rounded up to a power of two for tiles (BD); at least 16, as products need it."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tiles_for(
    dtype: torch.dtype, head_dim: int, old_nvidia: bool, shared_bytes: int = 0, pairs: bool = True
) -> Tiles:
    """The tiles for operands of this dtype.

    Args:
        dtype: of q, k and v.
        head_dim: D.
        old_nvidia: whether the device is an NVIDIA GPU older than sm_80, on which triton uses no
            matrix units.
        shared_bytes: shared memory that a block may have, in bytes; 0 if it is not known.
        pairs: whether there is a mask or bias with rows and keys, of which tiles are loaded too.
    """
    if is_interpreted():
        return _INTERPRETED
    size = max(64, padded_head_dim(head_dim))
    if old_nvidia or dtype == torch.float32:
        return _NO_MATRIX_UNITS[size]
    tiles = _MATRIX_UNITS[size]
    if pairs or shared_bytes < _LARGE_SHARED:
        return tiles
    return Tiles(*_LARGE[size], tiles.bias_gradient)


@functools.cache
def shared_bytes_of(device: torch.device) -> int:
    """Shared memory that a block may have on an NVIDIA GPU, in bytes; 0 for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", 0))


def is_old_nvidia(device: torch.device) -> bool:
    """Whether the device is an NVIDIA GPU older than sm_80."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) < (8, 0)
