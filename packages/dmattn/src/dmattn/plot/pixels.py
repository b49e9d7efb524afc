"""Rows and keys as pixels: how much of each block of a mask is kept, without forming the mask."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:  # dmattn.selection draws through this package
    from dmattn.selection import KeySelection


class Pixels(NamedTuple):
    """A mask of one head as pixels, each a block of query rows and keys; float64 and int64."""

    kept: Tensor  # (rows, keys): the share of each pixel's entries that are kept, 0 to 1
    visible: Tensor  # (rows, keys): the share that causality allows
    rows: Tensor  # (rows + 1,): the first query row of each pixel, and Sq
    keys: Tensor  # (keys + 1,): the first key of each pixel, and Sk

    @property
    def is_exact(self) -> bool:
        """Whether every pixel is one entry of the mask."""
        return bool((self.rows.diff() <= 1).all() and (self.keys.diff() <= 1).all())


def edges(length: int, pixels: int) -> Tensor:
    """int64 (n + 1,): `length` places cut into n <= `pixels` blocks of nearly the same size."""
    n = max(1, min(length, pixels))
    return torch.arange(n + 1, device="cpu") * length // n


def of_selection(selection: "KeySelection", batch: int, head: int, pixels: int) -> Pixels:
    """The pixels of a selection, in time and memory of Sk + pixels ** 2."""
    rows, keys = edges(selection.query_len, pixels), edges(selection.end.shape[2], pixels)
    start, stop = row_intervals(selection, batch, head)
    kept = _entries(start, stop, rows, keys)
    key = torch.arange(len(start), device="cpu")
    first = (key - selection.first_row) if selection.is_causal else torch.zeros_like(key)
    return _shares(kept, _visible(first, rows, keys), rows, keys)


def of_tensor(mask: Tensor, is_causal: bool, pixels: int) -> Pixels:
    """The pixels of a bool mask (Sq, Sk), which may be an expanded view, read in blocks of rows."""
    query_len, key_len = mask.shape
    rows, keys = edges(query_len, pixels), edges(key_len, pixels)
    key = torch.arange(key_len, device="cpu")
    first = (key - (key_len - query_len)) if is_causal else torch.zeros_like(key)
    counts = []
    for a, b in zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True):
        block = mask[a:b].cpu()
        if is_causal:
            block = block & (first <= torch.arange(a, b, device="cpu")[:, None])
        counts.append(sums(block.sum(0), keys))
    return _shares(torch.stack(counts).double(), _visible(first, rows, keys), rows, keys)


def row_intervals(selection: "KeySelection", batch: int, head: int) -> tuple[Tensor, Tensor]:
    """int64 (Sk,) twice, on the CPU: the first row that keeps each key, and the one that drops it.

    Both are equal where no row keeps the key.
    """
    end = selection.end[batch, head].cpu().long()
    query_len = selection.query_len
    if not selection.is_causal:
        return torch.zeros_like(end), (end > 0) * query_len
    start = (torch.arange(len(end), device="cpu") - selection.first_row).clamp(0, query_len)
    return start, torch.maximum(start, (end - selection.first_row).clamp(0, query_len))


def _visible(first: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """How many entries of each pixel rows may see, if key j is seen from row first[j] on."""
    query_len = int(rows[-1])
    return _entries(first.clamp(0, query_len), torch.full_like(first, query_len), rows, keys)


def _entries(start: Tensor, stop: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """float64 (rows, keys): how many (i, j) with start[j] <= i < stop[j] lie in each pixel."""
    column = torch.bucketize(torch.arange(len(start), device="cpu"), keys, right=True) - 1
    count = len(keys) - 1
    before = _rows_since(start, column, rows, count) - _rows_since(stop, column, rows, count)
    return before.diff(dim=0)


def _rows_since(point: Tensor, column: Tensor, rows: Tensor, columns: int) -> Tensor:
    """float64 (rows + 1, columns): for each edge, the sum of max(0, edge - point) of a column.

    That sum is edge * (points before the edge) - (sum of those points), both of which are
    cumulative sums over a histogram of the points.
    """
    bucket = torch.bucketize(point, rows, right=True)  # the first edge behind the point
    cell, size = bucket * columns + column, (len(rows) + 1) * columns
    count = torch.bincount(cell, minlength=size).view(-1, columns)[:-1].cumsum(0)
    total = torch.bincount(cell, point.double(), size).view(-1, columns)[:-1].cumsum(0)
    return rows[:, None] * count.double() - total


def sums(values: Tensor, keys: Tensor) -> Tensor:
    """(..., keys): the sums of the values (..., Sk) in each pixel."""
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))[..., keys].diff(dim=-1)


def _shares(kept: Tensor, visible: Tensor, rows: Tensor, keys: Tensor) -> Pixels:
    area = (rows.diff()[:, None] * keys.diff()).clamp(min=1)
    return Pixels(kept / area, visible / area, rows, keys)
