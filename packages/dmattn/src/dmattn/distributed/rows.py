"""Keys as rows of bytes: all that belongs to a key lies together, so that one copy moves it.

A row holds the key, the value and the score of one token and head (or their gradients), each
starting at a multiple of 8 bytes. Letters: B batch, N heads, L keys, D and Dv head dimension of
keys and of values, R bytes of a row.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.ops.keys import Rows as KeyRows
from dmattn.ops.keys import copy_keys


class Field(NamedTuple):
    """A part of each row: `width` numbers of one dtype."""

    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.width * self.dtype.itemsize


class Rows:
    """The layout of rows with these parts, in this order."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)
        ends = accumulate(-(-field.nbytes // 8) * 8 for field in fields)
        self.starts = (0, *ends)

    @property
    def nbytes(self) -> int:
        """R, the bytes of a row."""
        return self.starts[-1]

    def part(self, rows: Tensor, number: int) -> Tensor:
        """One part of uint8 (..., R), as a view (..., width)."""
        field, start = self.fields[number], self.starts[number]
        return rows[..., start : start + field.nbytes].view(field.dtype)

    def parts(self, rows: Tensor) -> list[Tensor]:
        return [self.part(rows, number) for number in range(len(self.fields))]

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """uint8 (..., R) from tensors (..., width) of the dtypes of the fields."""
        rows = parts[0].new_empty((*parts[0].shape[:-1], self.nbytes), dtype=torch.uint8)
        for place, part in zip(self.parts(rows), parts, strict=True):
            place.copy_(part)
        return rows

    def keys(self, rows: Tensor) -> KeyRows:
        """Views of keys (B, l, N, D), values and scores, given rows (B, N, l, R) of all three."""
        k, v, score = self.parts(rows)
        return k.transpose(1, 2), v.transpose(1, 2), score[..., 0]

    def fill(self, rows: Tensor, parts: Sequence[Tensor]) -> None:
        """Put (B, N, l, width) tensors into uint8 (B, N, l, R); three parts take one launch."""
        if len(parts) == 3:
            k, v, score = parts
            copy_keys((k.transpose(1, 2), v.transpose(1, 2), score[..., 0]), self.keys(rows))
        else:
            for place, part in zip(self.parts(rows), parts, strict=True):
                place.copy_(part)


def take(rows: Tensor, at: Tensor) -> Tensor:
    """The rows of uint8 (B, N, L, R) at the places int64 (B, N, l): uint8 (B, N, l, R)."""
    words = rows.view(torch.int64)
    index = at[..., None].expand(*at.shape, words.shape[-1])
    return words.gather(2, index).view(torch.uint8)
