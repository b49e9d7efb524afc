"""Sums over lists of keys in a fixed order: which chunks, in which rounds, add to a key."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import pytest

BLOCK = 128  # rows of a list
INT_MIN, INT_MAX = -(2**31), 2**31 - 1

# What is found for a key in a round, see rounds_of().
Found = tuple[int, int, bool, bool, bool]


def rounds_of(
    probe: ctypes.CDLL, seqlen_q: int, chunk_rows: int, round_rows: int, end: list[int]
) -> Iterator[tuple[int, int, int, list[Found]]]:
    """For each round its first row, the row behind its last one, a key, and a tuple for each key.

    The key is the first one that no row of the round sees, nor any row before the round. The tuple
    has the key's first chunk in the round, the number of its chunks, whether the round
    has a part in the key's sums, and whether rows before the round and rows behind it see the key.
    """
    seqlen_k = len(end)
    for begin in range(0, seqlen_q, round_rows):
        rows = min(round_rows, -(-seqlen_q // BLOCK) * BLOCK - begin)
        to = (ctypes.c_int32 * (5 * seqlen_k))()
        up_to = probe.probe_terms(
            *(chunk_rows, begin, rows, seqlen_q, seqlen_k),
            *((ctypes.c_int32 * seqlen_k)(*end), to),
        )
        found = [
            (to[i], to[i + 1], bool(to[i + 2]), bool(to[i + 3]), bool(to[i + 4]))
            for i in range(0, len(to), 5)
        ]
        yield begin, min(begin + rows, seqlen_q), up_to, found


def draw_ends(draw: random.Random, seqlen_k: int, kind: str) -> list[int]:
    if kind == "anything":
        return [draw.choice([INT_MIN, -1, 0, 7, seqlen_k, INT_MAX]) for _ in range(seqlen_k)]
    if kind == "short":
        return [min(key + draw.randrange(300), seqlen_k) for key in range(seqlen_k)]
    return [draw.randrange(key, seqlen_k + 1) for key in range(seqlen_k)]


@pytest.mark.parametrize("kind", ["long", "short", "anything"])
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k",
    [(1, 1), (127, 127), (1000, 1000), (4095, 4095), (700, 1900), (1500, 900), (300, 100)],
)
@pytest.mark.parametrize("chunk_blocks, chunks", [(1, 1), (1, 3), (2, 2), (4, 1), (8, 100)])
def test_every_row_counts_once(
    probe: ctypes.CDLL, *, seqlen_q: int, seqlen_k: int, kind: str, chunk_blocks: int, chunks: int
) -> None:
    draw = random.Random(seqlen_q * 10 + chunk_blocks)
    end = draw_ends(draw, seqlen_k, kind)
    chunk_rows, offset = chunk_blocks * BLOCK, seqlen_k - seqlen_q
    # The rows that see each key: key <= row + offset < end.
    first = [max(key - offset, 0) for key in range(seqlen_k)]
    after = [min(max(x, 0), seqlen_k) - offset for x in end]
    finished = [0] * seqlen_k
    handed_on: set[int] = set()
    for begin, stop, up_to, found in rounds_of(
        probe, seqlen_q, chunk_rows, chunks * chunk_rows, end
    ):
        takes_over: set[int] = set()
        for key, (chunk, count, belongs, came, goes) in enumerate(found):
            low, high = max(first[key], begin), min(after[key], stop)
            wanted = {(row - begin) // chunk_rows for row in range(low, high)}
            assert set(range(chunk, chunk + count)) == wanted, key
            assert key < up_to or not (wanted or goes), key
            assert belongs == bool(wanted) or (first[key] >= after[key] and stop == seqlen_q), key
            assert came == (first[key] < begin < after[key]), key
            assert goes == (first[key] < stop < after[key]), key
            finished[key] += belongs and not goes
            takes_over |= {key} if came else set()
        assert takes_over == handed_on
        handed_on = {key for key, each in enumerate(found) if each[4]}
    assert not handed_on
    assert finished == [1] * seqlen_k
