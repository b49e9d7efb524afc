"""Rows of a bias numbered as one sequence, which TMA copies as eight classes of rows on Hopper."""

from __future__ import annotations

import ctypes

import pytest

MOST_ROWS = 1 << 30


def number_rows(
    probe: ctypes.CDLL, strides: tuple[int, int, int], batch: int, heads: int, rows: int, keys: int
) -> tuple[int, int, int]:
    """The number of rows, and the rows from one head and from one batch to the next."""
    found = (ctypes.c_int64 * 3)()
    probe.probe_number_rows((ctypes.c_int64 * 3)(*strides), batch, heads, rows, keys, found)
    return found[0], found[1], found[2]


@pytest.mark.parametrize(
    "batch, heads, rows, keys, strides",
    [
        (2, 3, 5, 7, (105, 35, 7)),  # contiguous
        (2, 3, 5, 7, (0, 35, 7)),
        (2, 3, 5, 7, (35, 0, 7)),
        (2, 3, 9, 7, (0, 0, 7)),
        (2, 3, 5, 7, (3 * 8 * 9, 8 * 9, 9)),  # cut from 8 rows of 9 numbers
        (2, 3, 5, 7, (2 * 105, 35, 7)),  # every second batch
        (3, 2, 5, 7, (35, 3 * 35, 7)),  # batches within heads
        (1, 3, 5, 7, (4, 35, 7)),  # the stride of a single batch, or head, means nothing
        (2, 1, 5, 7, (35, 4, 7)),
        (2, 3, 5, 1, (15, 5, 1)),
        (1, 1, 8, 7, (4, 4, 11)),
    ],
)
def test_numbers_lead_to_the_rows(
    probe: ctypes.CDLL,
    batch: int,
    heads: int,
    rows: int,
    keys: int,
    strides: tuple[int, int, int],
) -> None:
    count, head_rows, batch_rows = number_rows(probe, strides, batch, heads, rows, keys)
    numbers = set()
    for b in range(batch):
        for h in range(heads):
            for r in range(rows):
                number = b * batch_rows + h * head_rows + r
                start = b * strides[0] + h * strides[1] + r * strides[2]
                assert number * strides[2] == start
                numbers.add(number)
    assert min(numbers) == 0 and max(numbers) == count - 1


@pytest.mark.parametrize(
    "batch, heads, rows, keys, strides",
    [
        (2, 3, 5, 7, (3 * 38, 38, 7)),  # three more numbers behind each head
        (2, 3, 5, 7, (106, 35, 7)),
        (2, 3, 5, 7, (105, 35, 5)),  # rows that overlap
        (2, 3, 5, 7, (105, 35, 0)),
        (2, 3, 5, 0, (0, 0, 0)),
        (2, 3, 5, 7, (105, -35, 7)),
        (2, 3, 5, 7, (-105, 35, 7)),
        (1, 1, 7, 7, (0, 0, 7)),  # a class would be empty
        (1, 1, 9, 7, (0, 0, 1 << 35)),
        (1, 1, MOST_ROWS + 1, 7, (0, 0, 7)),
        (2, 1, 9, 7, (7 * MOST_ROWS, 0, 7)),
        (2, 1, 9, 7, (7 * (MOST_ROWS + 1), 0, 7)),
    ],
)
def test_others_have_none(
    probe: ctypes.CDLL,
    batch: int,
    heads: int,
    rows: int,
    keys: int,
    strides: tuple[int, int, int],
) -> None:
    assert number_rows(probe, strides, batch, heads, rows, keys) == (0, 0, 0)


def test_as_many_rows_as_can_be(probe: ctypes.CDLL) -> None:
    most = (7 * (MOST_ROWS - 9), 0, 7)
    assert number_rows(probe, most, 2, 1, 9, 7) == (MOST_ROWS, 0, MOST_ROWS - 9)
