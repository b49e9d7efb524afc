"""The tile shapes of the kernels: fixed, so that nothing is tried out at the first call."""

import os
from typing import NamedTuple


class Tile(NamedTuple):
    """Rows and keys of a tile, and the launch settings that go with them."""

    rows: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """A tile for each kind of kernel."""

    forward: Tile
    row_gradients: Tile
    key_gradients: Tile
    bias_gradient: Tile


# The interpreter takes its time for each operation, however large.
_INTERPRETED = Tiles(*[Tile(128, 128, 4, 1)] * 4)
_TABLE = {
    (2, 64): Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
    (2, 128): Tiles(Tile(64, 64, 4, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
    (2, 256): Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    (4, 64): Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    (4, 128): Tiles(Tile(32, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)),
    (4, 256): Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}


def is_interpreted() -> bool:
    """Whether the kernels run in triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def padded_head_dim(head_dim: int) -> int:
    """The power of two that tiles have in place of head_dim; a product needs at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tiles_for(element_size: int, head_dim: int) -> Tiles:
    """The tiles for operands of so many bytes an element."""
    if is_interpreted():
        return _INTERPRETED
    return _TABLE[element_size, max(64, padded_head_dim(head_dim))]
