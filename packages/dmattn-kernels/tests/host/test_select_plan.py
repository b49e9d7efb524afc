"""How a selection of keys is carried out, and where its arrays lie in the workspace."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import pytest

import abi
from abi import BFLOAT16, BOOL, FLOAT32, INT32, tensor
from probe import WORKSPACE, Plan, Probe

BINS, DIGITS = 2048, 3


@pytest.fixture(scope="module")
def plan(probe: ctypes.CDLL) -> Probe:
    return Probe(probe)


def call(
    batch: int,
    heads: int,
    rows: int,
    keys: int,
    window: int,
    causal: bool = True,
    dtype: int = FLOAT32,
    documents: int = 0,
) -> dict[str, Any]:
    capacity = -(-min(window + 128, keys) // 128) * 128
    fields: dict[str, Any] = {
        "is_causal": int(causal),
        "window": window,
        "seqlen_q": rows,
        "scores": tensor((batch, heads, keys), dtype),
        "selection": abi.selection(rows, keys, capacity, batch, heads, causal),
    }
    if documents:
        fields["cu_seqlens"] = tensor((documents + 1,), INT32)
    return fields


@pytest.mark.parametrize(
    "window, keys, causal, capacity",
    [
        (100, 1000, 1, 256),
        (100, 1000, 0, 128),
        (128, 1000, 0, 128),
        (1000, 300, 1, 384),
        (1, 0, 1, 0),
        (0, 1000, 1, 0),
        (100, -1, 1, 0),
        (1 << 40, 1 << 29, 1, 1 << 29),
    ],
)
def test_capacity(probe: ctypes.CDLL, window: int, keys: int, causal: int, capacity: int) -> None:
    measure = probe.probe_select_capacity
    measure.restype = ctypes.c_int64
    assert measure(ctypes.c_int64(window), ctypes.c_int64(keys), causal) == capacity


def test_short_sequences_take_neither_grid_nor_sets(plan: Probe) -> None:
    found = plan.select(**call(2, 4, 8192, 8192, 1024))
    assert (found["grid_keys"], found["sets"], found["single_list"]) == (0, 0, 0)
    assert found["rows"] == 8 and found["digits"] == 3
    assert plan.select(**call(2, 4, 8192, 8192, 1024, dtype=BFLOAT16))["digits"] == 2


@pytest.mark.parametrize(
    "fields, reads_scores",
    [
        (call(2, 4, 8192, 8192, 1024), True),
        (call(2, 4, 700, 32768, 100, dtype=BFLOAT16), True),
        (call(2, 4, 300, 32769, 100), False),  # its sets are of ordered scores
        (call(2, 4, 8192, 8192, 6145), False),  # no segments
        (call(2, 4, 8192, 8192, 1024, documents=2), False),
        (call(2, 4, 1, 8000, 1024), False),
        (call(2, 4, 8192, 8192, 64) | {"key_mask": tensor((2, 1, 8192), BOOL)}, False),
        (call(2, 4, 8192, 8192, 64) | {"scores": tensor((2, 4, 8192), FLOAT32, (0, 1, 4))}, False),
    ],
    ids=range(8),
)
def test_segments_read_scores_as_they_are(
    plan: Probe, fields: dict[str, Any], reads_scores: bool
) -> None:
    """Segments that find adjacent, unmasked scores before them need no launch that orders these."""
    found = plan.select(**fields)
    assert found["reads_scores"] == reads_scores and bool(found["ord"]) == (not reads_scores)
    assert (found["workspace_bytes"] == 0) == reads_scores


@pytest.mark.parametrize("rows, causal", [(1, True), (64, False)])
def test_a_long_single_list_takes_one_launch_where_the_gpu_holds_it(
    plan: Probe, rows: int, causal: bool
) -> None:
    arguments = call(1, 4, rows, 100_000, 1024, causal)
    found = plan.select(**arguments)
    assert found["single_list"] and found["grid_keys"] == 100_000 and found["chunks"] == 25
    assert found["one_launch"] and not found["ord"]
    assert not plan.select(sms=99, **arguments)["one_launch"]  # 4 x 25 blocks
    assert plan.select(sms=100, **arguments)["one_launch"]
    # Up to 32768 keys a thread block for each list finds them if the GPU does not have room for the
    # 4 x 8 blocks of a single launch.
    short = call(1, 4, rows, 32768, 1024, causal)
    assert plan.select(sms=32, **short)["one_launch"]
    assert not plan.select(sms=31, **short)["grid_keys"]
    assert plan.select(**call(1, 4, rows, 8192, 1024, causal))["one_launch"]
    assert not plan.select(**call(1, 4, rows, 8191, 1024, causal))["grid_keys"]


def test_long_sequences_are_cut_by_sets(plan: Probe) -> None:
    found = plan.select(**call(1, 1, 65536, 65536, 1024))
    assert found["super_keys"] == 8192 and found["first_set"] == 1 and found["set_origin"] == 0
    assert found["sets"] == 7 and found["set_capacity"] == 1024 and not found["grid_keys"]
    # Keys in front of the first row are selected by the grid: they are the first set.
    found = plan.select(**call(1, 1, 1000, 65536, 1024))
    assert found["grid_keys"] == found["set_origin"] == (65536 - 1000) // 128 * 128
    assert found["first_set"] == 0 and found["sets"] == 1


@pytest.mark.parametrize(
    "fields, blocks, threads",
    [
        # Segments just so long that there is no more than one thread block for each SM: 32 thread
        # blocks, and then 128 in each case.
        (call(1, 1, 4096, 4096, 1024), 1, 512),
        (call(1, 8, 4096, 4096, 1024), 2, 512),
        (call(1, 8, 8192, 8192, 512), 4, 1024),
        (call(1, 1, 32768, 32768, 1024), 2, 1024),
        (call(1, 4, 16384, 16384, 1024), 4, 1024),
        # Where that is not possible, no more than two for each SM: 22 for each of 12 lists.
        (call(1, 12, 8192, 8192, 768), 3, 512),
        (call(1, 13, 8192, 8192, 768), 4, 512),
        (call(1, 32, 4096, 4096, 512), 4, 512),
        # More thread blocks than that. They have as few threads as the keys that the last segment
        # looks at allow.
        (call(8, 16, 4096, 4096, 256), 4, 256),
        (call(8, 16, 4608, 4608, 256), 4, 256),
        (call(8, 16, 4609, 4609, 256), 4, 512),
        (call(1, 16, 16384, 16384, 1024), 4, 512),
        (call(1, 16, 32768, 32768, 1024), 4, 1024),
        (call(1, 4, 131072, 131072, 2048), 4, 512),
        (call(1, 4, 131072, 131072, 6144), 4, 512),
        # Windows that do not fit shared memory (unless there are fewer keys), documents and single
        # lists have other kernels.
        (call(1, 4, 16384, 16384, 6145), 0, 0),
        (call(1, 4, 2000, 2000, 1 << 30), 1, 512),
        (call(1, 4, 16384, 16384, 1024, documents=3), 0, 0),
        (call(1, 4, 1, 16384, 1024), 0, 0),
        (call(1, 4, 128, 16384, 1024, causal=False), 0, 0),
    ],
    ids=range(20),
)
def test_segments_of_blocks_of_rows(
    plan: Probe, fields: dict[str, Any], blocks: int, threads: int
) -> None:
    found = plan.select(sms=132, **fields)
    assert (found["segment_blocks"], found["segment_threads"]) == (blocks, threads)


@pytest.mark.parametrize(
    "batch, heads, keys, words",
    [
        (1, 1, 1 << 30, "scores has 1073741824 keys; wanted at most 1073741823"),
        (1 << 16, 1 << 15, 1, "have 2147483648 rows together (batch x heads); wanted at most"),
    ],
)
def test_more_than_positions_can_count(
    plan: Probe, batch: int, heads: int, keys: int, words: str
) -> None:
    with pytest.raises(AssertionError) as error:
        plan.select(**call(batch, heads, 1, keys, 1))
    assert words in str(error.value)


CALLS = [
    call(2, 4, 1000, 1000, 100, documents=2),
    call(2, 3, 65536, 65536, 1000),
    call(2, 3, 65537, 65537, 100, documents=3),
    call(1, 5, 1000, 50_001, 2000, dtype=BFLOAT16),
    call(1, 4, 1, 100_000, 1024),
    call(8, 8, 1, 100_000, 1024),
    call(3, 2, 128, 40_000, 7, causal=False),
]


def array_bytes(found: Plan, keys: int) -> dict[str, int]:
    rows, chunks = found["rows"], found["chunks"]
    sets = 2 * rows * found["sets"]
    return {
        "ord": 4 * rows * found["ord_pitch"],
        "document": 8 * keys,
        "hist": 4 * rows * DIGITS * BINS,
        "arrived": 4 * rows,
        "digit_state": 8 * rows * DIGITS,
        "chunk_above": 4 * rows * chunks,
        "chunk_suffix": 4 * rows * chunks * BINS,
        "chunk_counts": 8 * rows * chunks,
        "set_ord": 4 * sets * found["set_capacity"],
        "set_key": 4 * sets * found["set_capacity"],
        "set_count": 4 * sets,
    }


@pytest.mark.parametrize("fields", CALLS, ids=range(len(CALLS)))
def test_arrays_do_not_overlap(plan: Probe, fields: dict[str, Any]) -> None:
    found = plan.select(**fields)
    sizes = array_bytes(found, fields["scores"].shape[2])
    placed = [name for name in sizes if found[name] and sizes[name]]
    spans = sorted((found[name], found[name] + sizes[name]) for name in placed)
    assert all(start % 256 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[0][0] >= WORKSPACE
    assert spans[-1][1] <= WORKSPACE + found["workspace_bytes"]
    # The histogram starts as zeros, and so do the barriers of a single launch behind it.
    if found["grid_keys"]:
        counted = "arrived" if found["one_launch"] else "hist"
        end = found["hist"] + found["zero_bytes"]
        assert found[counted] + sizes[counted] <= end
        assert all(not found["hist"] < found[n] < end for n in placed if n not in ("hist", counted))


@pytest.mark.parametrize("reach, bytes_a_key", [(0, 4 / 32), (4096, 0), (4097, 4 / 32)])
def test_key_lists_of_a_long_reach_summarise_the_ends(
    plan: Probe, reach: int, bytes_a_key: float
) -> None:
    """There is one number for 32 keys then, as a list may have to look at many keys."""
    lists = abi.selection(65536, 65536, 256, batch=2, heads=4)
    found = plan.key_lists(seqlen_q=65536, reach=reach, selection=lists)
    assert found["workspace_bytes"] == 8 * 65536 * bytes_a_key
    assert (found["latest"] == WORKSPACE) == (bytes_a_key > 0)
    assert found["reach"] == (reach or 65536)
