"""The items of Hopper's backward over lists contain each head of each tile exactly once."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Iterator

import pytest

Item = tuple[int, int, int]  # place, first head, the one behind the last

# tiles that a list has room for, chunks, parts, parts of a section, sections
ROOMS = [
    (1, 1, 1, 1, 0),
    (4, 3, 1, 1, 0),
    (3, 5, 4, 4, 0),
    (2, 4, 6, 6, 0),
    (3, 2, 5, 2, 1),
    (4, 3, 5, 2, 2),
    (2, 6, 6, 3, 2),
]


def items_of(
    probe: ctypes.CDLL,
    room: tuple[int, ...],
    tiles: list[int] | None,
    tail: tuple[int, int],
    heads: int,
) -> list[Item]:
    """The items in the order in which they are taken.

    tiles: for each chunk, in the order of items, the tiles of its longest list; None if all have as
    many as there is room for. tail: how many of the last chunks have tiles that are several items,
    and how many items each of these tiles is.
    """
    rows = room[0] * room[1] if tiles is None else sum(tiles)
    before = None
    if tiles is not None:
        starts = list(itertools.accumulate(tiles, initial=0))[:-1]
        before = (ctypes.c_int32 * len(starts))(*reversed(starts))
    tail_row = rows if tiles is None else rows - sum(tiles[len(tiles) - tail[0] :])
    given = (*room, rows, before, tail_row, tail[1], heads)
    to = (ctypes.c_int32 * (3 * probe.probe_numbering(*given, None)))()
    probe.probe_numbering(*given, to)
    return [(to[i], to[i + 1], to[i + 2]) for i in range(0, len(to), 3)]


def tiles_of_chunks(room: tuple[int, ...]) -> Iterator[list[int]]:
    """Chunks of equal lists, and of unequal ones, some without any tile."""
    room_tiles, chunks = room[:2]
    for tiles in range(1, room_tiles + 1):
        yield [tiles] * chunks
    draw = random.Random(str(room))
    for _ in range(5):
        yield [draw.randint(0, room_tiles) for _ in range(chunks)]


def place_of(room: tuple[int, ...], place: int) -> tuple[int, int, int]:
    """Tile, chunk (in the order of items) and part of a place, as find_list_item() reads them.

    That function is in bwd_items.cuh.
    """
    room_tiles, chunks, all_parts, section_parts, sections = room
    of_part = room_tiles * chunks
    section = min(place // (section_parts * of_part), sections)
    first = section * section_parts
    parts = section_parts if section < sections else all_parts - first
    row, part = divmod(place - first * of_part, parts)
    chunk, tile = divmod(row, room_tiles)
    return tile, chunk, first + part


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("heads", [1, 4, 6])
def test_each_head_of_each_tile_is_in_one_item(
    probe: ctypes.CDLL, room: tuple[int, ...], heads: int
) -> None:
    _, chunks, all_parts, _, sections = room
    for tiles in tiles_of_chunks(room):
        tails = [(0, 1)]
        if sections == 0:
            tails += itertools.product(range(1, chunks + 1), range(2, heads + 1))
        for tail in tails:
            seen = []
            for place, begin, end in items_of(probe, room, tiles, tail, heads):
                found = place_of(room, place)
                is_in_tail = found[1] >= chunks - tail[0]
                assert (end - begin < heads) == is_in_tail
                seen += [(*found, head) for head in range(begin, end)]
            wanted = [
                (tile, chunk, part, head)
                for chunk in range(chunks)
                for tile in range(tiles[chunk])
                for part in range(all_parts)
                for head in range(heads)
            ]
            assert sorted(seen) == sorted(wanted)


@pytest.mark.parametrize("room", ROOMS)
def test_items_come_in_the_order_of_places(probe: ctypes.CDLL, room: tuple[int, ...]) -> None:
    for tiles in (None, *tiles_of_chunks(room)):
        places = [place for place, _, _ in items_of(probe, room, tiles, (0, 1), 4)]
        assert places == sorted(places)
        if tiles is None:
            assert places == list(range(room[0] * room[1] * room[2]))


def test_lists_without_keys_have_no_items(probe: ctypes.CDLL) -> None:
    assert items_of(probe, (3, 5, 4, 4, 0), [0] * 5, (0, 1), 4) == []
