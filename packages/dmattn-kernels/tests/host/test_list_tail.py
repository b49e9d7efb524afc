"""The estimated end of Hopper's backward over lists, against simulated thread blocks."""

from __future__ import annotations

import ctypes
import heapq
import random

import pytest


def simulated_end(blocks: int, durations: list[int]) -> int:
    """The end of all items, if each thread block takes the next item when it is done with one."""
    free = [0] * blocks
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 7, 16])
def test_estimated_end_is_that_of_items_taken_in_turn(probe: ctypes.CDLL, heads: int) -> None:
    choose = random.Random(heads)
    for _ in range(300):
        blocks, items = choose.choice((1, 7, 66, 132)), choose.randint(1, 900)
        of_head, prologue = choose.choice((4, 8, 16)), choose.choice((0, 7))
        given = (blocks, items, heads, of_head, prologue)
        whole = [heads * of_head + prologue] * items
        assert probe.probe_end(*given, 0, 1) == simulated_end(blocks, whole)
        if heads == 1:
            continue
        tail, parts = choose.randint(1, min(items, 2 * blocks)), choose.randint(2, heads)
        smaller = [-(-heads // parts) * of_head + prologue] * (tail * parts)
        found = probe.probe_end(*given, tail, parts)
        assert found == simulated_end(blocks, whole[tail:] + smaller)


def test_quotients(probe: ctypes.CDLL) -> None:
    choose = random.Random(0)
    for divisor in (*range(1, 200), 264, 1031, 4096):
        multiples = [divisor * choose.randint(0, 2**20 // divisor - 1) for _ in range(40)]
        for n in (0, 1, *multiples, *(max(m - 1, 0) for m in multiples)):
            assert probe.probe_quick_quotient(n, divisor, 0) == n // divisor
            assert probe.probe_quick_quotient(n, divisor, 1) == -(-n // divisor)
