"""The tile shapes of the kernels: fixed, so that nothing is tried out at the first call.

Most were chosen by what ptxas says of the kernels with a mask and a bias: at most 64 KB of shared
memory, the least that a served GPU has, and registers that hold everything, or nearly so. GPUs with
the shared memory of Hopper have larger tiles, where no mask or bias of rows and keys takes room
beside them.
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


# By the padded head_dim. With 4 warps the logits of 64 x 64 pairs, with the addresses of mask and
# bias, do not fit the registers; a second stage would not fit the shared memory.
_MATRIX_UNITS = {
    64: Tiles(Tile(64, 64, 8, 1), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1), Tile(64, 64, 8, 1)),
    128: Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    256: Tiles(Tile(32, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1), Tile(16, 32, 8, 1)),
}
# For GPUs with at least so much shared memory, bytes of a block: keys and values, or rows, are
# loaded while products are computed from those before. At head_dim 128 these were the fastest of
# four on an H200, without a mask; of the others ptxas says that hardly a register is spilled.
_LARGE_SHARED = 200 * 1024
_LARGE = {
    64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)),
    128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)),
    256: (Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2)),
}
# Without matrix units each thread holds whole rows of both factors of a product in registers. At
# head_dim 256 these do not fit, whatever the tile; the kernels are right but slow there.
_NO_MATRIX_UNITS = {
    64: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    128: Tiles(*[Tile(16, 16, 8, 1)] * 4),
    256: Tiles(*[Tile(16, 16, 8, 1)] * 4),
}
# The interpreter takes its time for each operation, however large.
_INTERPRETED = Tiles(*[Tile(128, 128, 4, 1)] * 4)


def is_interpreted() -> bool:
    """Whether the kernels run in triton's interpreter, as its import decides."""
    standard = sys.modules.get("triton.language.standard")
    if standard is None:
        return os.environ.get("TRITON_INTERPRET") == "1"
    return type(standard.sum).__name__ == "InterpretedFunction"


def padded_head_dim(head_dim: int) -> int:
    """The power of two that tiles have in place of head_dim; a product needs at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tiles_for(
    dtype: torch.dtype, head_dim: int, old_nvidia: bool, shared_bytes: int = 0, pairs: bool = True
) -> Tiles:
    """The tiles for operands of this dtype.

    Args:
        dtype: of q, k and v.
        head_dim: D.
        old_nvidia: whether it is an NVIDIA GPU older than sm_80, on which triton uses no matrix
            units.
        shared_bytes: shared memory that a block may have; 0 if it is not known.
        pairs: whether there is a mask or bias with rows and keys, of which a tile is loaded too.
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
    """Shared memory that a block may have on an NVIDIA GPU; 0 for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", 0))


def is_old_nvidia(device: torch.device) -> bool:
    """Whether it is an NVIDIA GPU older than sm_80."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) < (8, 0)
