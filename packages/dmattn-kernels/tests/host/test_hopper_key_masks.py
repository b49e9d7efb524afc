"""Which backward calls with a key mask Hopper's kernels compute, over lists or tile by tile."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest

from abi import FLOAT32, tensor
from probe import (
    ARRAYS,
    MASK_LIST,
    SM90,
    TILED,
    WORKSPACE,
    Plan,
    Probe,
    array_bytes,
    mask,
)

SMS = 132
BLOCK = 128  # rows of a list


def mask_plan_of(probe: ctypes.CDLL, kept: Any, length: int = 4096, **given: Any) -> Plan:
    """The plan of a backward with a mask that is the same for all rows."""
    fields: dict[str, Any] = {"batch": 2, "nheads": 16, "nheads_k": 4, "head_dim": 128}
    fields |= {"seqlen_q": length, "seqlen_k": length, "is_causal": 1, "mask": kept} | given
    gradients = fields.pop("gradients", "dq dk dv")
    return Probe(probe).bwd(SM90, SMS, gradients=gradients, **fields)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(
    "length, nheads, nheads_k, head_dim, arch",
    [
        # Copies of the list for each chunk of rows would take 1.1 of 1.3 GB of workspace, and 4.3
        # of 4.7.
        (1 << 19, 1, 1, 64, 80),
        (1 << 20, 2, 2, 64, 80),
        (1 << 17, 1, 1, 64, 90),
        (1 << 20, 16, 4, 128, 90),
    ],
)
def test_copies_of_a_list_do_not_grow_with_the_square_of_the_length(
    probe: ctypes.CDLL,
    length: int,
    nheads: int,
    nheads_k: int,
    head_dim: int,
    arch: int,
    causal: int,
) -> None:
    shape = {"batch": 1, "nheads": nheads, "nheads_k": nheads_k, "head_dim": head_dim}
    plan = mask_plan_of(probe, mask(1, 1, 1, length), length, **shape, is_causal=causal)
    inputs = 2 * (nheads + 2 * nheads_k) * length * head_dim
    assert plan["arch"] == arch and plan["workspace_bytes"] <= max(1.5 * inputs, 256 << 20)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [1337, 4096, 20000])
def test_masks_of_keys(
    probe: ctypes.CDLL, batch: int, heads: int, length: int, causal: int
) -> None:
    """Each chunk of rows has a part of the one list, which has room for all keys."""
    shape = {"batch": 2, "nheads": 16, "nheads_k": 4, "head_dim": 128}
    shape |= {"seqlen_q": length, "seqlen_k": length}
    given = {"is_causal": causal, "kept": mask(batch, heads, 1, length)}
    rows_done = 0
    for round in range(mask_plan_of(probe, length=length, **given)["rounds"]):
        plan = mask_plan_of(probe, length=length, round=round, **given)
        assert plan["arch"] == 90 and plan["chunk_blocks"] > 0 and not plan["chunks.end"]
        assert plan["keys.capacity"] == plan["chunks.capacity"] == -(-length // 128) * 128
        assert plan["chunks.block_rows"] == plan["chunk_blocks"] * BLOCK <= 1024
        assert plan["chunks.batch"] == (plan["round.batches"] if batch > 1 else 1)
        assert plan["chunks.heads"] == (plan["round.heads_k"] if heads > 1 else 1)
        lists = plan["chunks.batch"] * plan["chunks.heads"]
        chunks = lists * plan["chunks.blocks"]
        rows = plan["round.batches"] * plan["round.heads_k"] * 4
        sizes = array_bytes(plan, shape, lists) | {
            "lse": rows * plan["seqlen_q_rounded"] * 4,
            "delta": rows * plan["seqlen_q_rounded"] * 4,
            "chunks.idx": chunks * plan["chunks.capacity"] * 4,
            "chunks.count": chunks * 4,
            "chunks.tile_rows": chunks * plan["chunks.capacity"] // 128 * 8,
        }
        spans = sorted(
            (plan[name], plan[name] + sizes[name])
            for name in {*ARRAYS, *sizes}
            if plan[name] and name != "dq_accum"
        )
        assert spans[-1][1] <= WORKSPACE + plan["workspace_bytes"]
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        rows_done += plan["round.batches"] * plan["round.heads_k"] * plan["row_blocks"]
    assert rows_done == 2 * 4 * -(-length // BLOCK)


def test_masks_of_keys_that_others_compute(probe: ctypes.CDLL) -> None:
    found = mask_plan_of(probe, kept=mask(1, 1, 1, 4096), softcap=30.0)
    assert found["arch"] == 80 and found["chunk_blocks"] == 0


def test_masks_of_single_heads(probe: ctypes.CDLL) -> None:
    found = mask_plan_of(probe, kept=mask(1, 16, 1, 4096))
    assert found["arch"] == 90 and found["per_group"] and not found["has_whole_items"]
    assert found["chunks.heads"] == 16 and found["dk_accum"]
    # In a fixed order the chunks of rows take turns, which each launch counts from zero.
    fields = {"kept": mask(1, 16, 1, 4096), "deterministic": 1}
    plans = [mask_plan_of(probe, **fields, launch=(0, 0, g)) for g in range(4)]
    chunks = plans[0]["chunks.blocks"]
    turns = [plan["dkv_semaphore"] for plan in plans]
    assert all(after - before == 4 * 4 * chunks for before, after in itertools.pairwise(turns))
    cleared = plans[0]["once_zero_bytes"] + plans[0]["counter_zero_bytes"]
    assert turns[-1] + 4 * 4 * chunks <= plans[0]["scratch_zeros"] + cleared


@pytest.mark.parametrize("head_dim", [128, 192])
def test_masks_of_keys_in_a_fixed_order(probe: ctypes.CDLL, head_dim: int) -> None:
    """Each chunk of rows has all keys of the mask, so chunks add to dk and dv one by one."""
    found = mask_plan_of(probe, kept=mask(1, 1, 1, 4096), deterministic=1, head_dim=head_dim)
    assert found["arch"] == 90 and found["chunk_blocks"] > 0
    assert found["dq_semaphore"] and found["dkv_semaphore"] and not found["chunks.end"]


@pytest.mark.parametrize("causal", [0, 1])
def test_masks_of_few_keys_are_walked_tile_by_tile(probe: ctypes.CDLL, causal: int) -> None:
    """Listing the keys, and rounding the sums of their gradients, would take longer."""
    kept = mask(2, 1, 1, 560)
    given = {"kept": kept, "length": 560, "nheads": 12, "nheads_k": 12, "is_causal": causal}
    plan = mask_plan_of(probe, **given)
    assert (plan["arch"], plan["walk"]) == (90, TILED) and plan["mask.bits"]
    assert not plan["keys.idx"] and not plan["dk_accum"]
    assert mask_plan_of(probe, **given, deterministic=1)["dq_semaphore"]
    wide = mask_plan_of(probe, **given, head_dim=192)
    assert (wide["arch"], wide["walk"]) == (90, TILED)
    assert mask_plan_of(probe, **given, gradients="dk dv")["walk"] == TILED
    assert mask_plan_of(probe, **given, softcap=5.0)["walk"] == MASK_LIST


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("nheads_k", [4, 16])
@pytest.mark.parametrize(("batch", "length"), [(8, 8192), (16, 7454), (256, 509), (1000, 130)])
@pytest.mark.parametrize("own_lists", [False, True])
def test_tiles_with_all_rows(
    probe: ctypes.CDLL, own_lists: bool, batch: int, length: int, nheads_k: int, causal: int
) -> None:
    """If there are many tiles in a mask's list, each has all rows, and dk and dv need no sums."""
    mask_heads = nheads_k if own_lists else 1
    given = {"kept": mask(batch, mask_heads, 1, length), "is_causal": causal, "batch": batch}
    shape = {"batch": batch, "nheads": 16, "nheads_k": nheads_k, "head_dim": 128}
    shape |= {"seqlen_q": length, "seqlen_k": length}
    lists = set()
    plan = mask_plan_of(probe, length=length, nheads_k=nheads_k, **given)
    for round in range(plan["rounds"]):
        plan = mask_plan_of(probe, length=length, nheads_k=nheads_k, round=round, **given)
        assert plan["arch"] == 90 and plan["has_whole_items"]
        assert plan["chunks.blocks"] == 1 and plan["chunks.block_rows"] >= length
        assert plan["round.groups"] == 16 // nheads_k
        assert plan["round.row_blocks"] == -(-length // BLOCK)
        assert not plan["dk_accum"] and not plan["dv_accum"] and not plan["dk_slots"]
        # The lists are those of the mask, from the round's first one on.
        assert plan["chunks.idx"] == plan["keys.idx"] and plan["chunks.heads"] == mask_heads
        assert plan["chunks.capacity"] == plan["keys.capacity"] == -(-length // 128) * 128
        tiles = plan["chunks.capacity"] // 128
        sizes = array_bytes(plan, shape, batch * mask_heads) | {
            "lse": batch * 16 * plan["seqlen_q_rounded"] * 4,
            "delta": batch * 16 * plan["seqlen_q_rounded"] * 4,
            "chunks.tile_rows": plan["round.batches"] * mask_heads * tiles * 8,
            "used_rows": batch * mask_heads * 8,
        }
        # Arrays that all rounds share begin with the part of the first round.
        if round == 0:
            spans = sorted(
                (plan[name], plan[name] + sizes[name])
                for name in {*ARRAYS, *sizes}
                if plan[name] and name not in ("dq_accum", "keys.idx")
            )
            assert spans[-1][1] <= WORKSPACE + plan["workspace_bytes"]
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert plan["round.batches"] * plan["round.heads_k"] * tiles >= 12 * SMS
        assert plan["chunks.count"] == plan["keys.count"]
        assert plan["used_rows"]
        lists.add((plan["round.batch"], plan["round.head_k"]))
    assert len(lists) == plan["rounds"]


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(
    ("batch", "nheads_k", "seqlen_q", "seqlen_k", "head_dim"),
    [
        *((40, 16, 300, 300, head_dim) for head_dim in (56, 64, 120)),
        *((40, 16, 170, 300, 128), (40, 16, 120, 300, 40), (10, 16, 1300, 1300, 64)),
        *((80, 4, 256, 600, 64), (80, 4, 128, 600, 72)),
        *((8, 16, 1024, 1024, 64), (4, 16, 1024, 1024, 120)),
    ],
)
def test_tiles_of_padded_batches(
    probe: ctypes.CDLL,
    batch: int,
    nheads_k: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    causal: int,
) -> None:
    """The shapes in attention/test_padded.py that should have tiles with all rows have some."""
    kept = mask(batch, 1, 1, seqlen_k)
    shape = {"batch": batch, "nheads_k": nheads_k, "head_dim": head_dim, "is_causal": causal}
    found = mask_plan_of(probe, kept, **shape, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    assert found["arch"] == 90 and found["has_whole_items"] and found["used_rows"]


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(
    ("batch", "nheads", "nheads_k", "length"), [(12, 8, 2, 1000), (8, 16, 4, 900)]
)
def test_chunks_of_padded_batches(
    probe: ctypes.CDLL, batch: int, nheads: int, nheads_k: int, length: int, causal: int
) -> None:
    """The shapes in attention/test_padded.py that should have chunks of rows have such chunks."""
    shape = {"batch": batch, "nheads": nheads, "nheads_k": nheads_k, "is_causal": causal}
    found = mask_plan_of(probe, mask(batch, 1, 1, length), length, head_dim=72, **shape)
    assert found["arch"] == 90 and found["chunk_blocks"] > 0 and not found["has_whole_items"]


@pytest.mark.parametrize(
    ("rows", "keys", "heads", "head_dim", "causal", "kept"),
    [
        (256, 256, (12, 12), 64, 0, (16, 1)),
        (300, 200, (10, 10), 64, 0, (1, 1)),
        (512, 512, (12, 12), 96, 1, (8, 1)),
        (1000, 1000, (12, 12), 64, 1, (4, 1)),
        (128, 512, (24, 12), 64, 0, (8, 24)),
    ],
)
def test_small_calls_walk_the_tiles_of_a_mask_of_keys(
    probe: ctypes.CDLL,
    rows: int,
    keys: int,
    heads: tuple[int, int],
    head_dim: int,
    causal: int,
    kept: tuple[int, int],
) -> None:
    """So do the shapes in attention/test_masks.py that are there for hidden keys in tiles."""
    batch = 24 if kept[0] == 1 else kept[0]  # a mask that all 24 share, or one of each sequence
    shape = {"batch": batch, "nheads": heads[0], "nheads_k": heads[1], "head_dim": head_dim}
    shape |= {"seqlen_q": rows, "seqlen_k": keys, "is_causal": causal}
    found = mask_plan_of(probe, mask(*kept, 1, keys), **shape)
    assert found["arch"] == 90 and found["walk"] == TILED and found["rounds"] == 1


@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("kept", [(40, 1, 1), (40, 16, 1), (40, 1, 128), (1, 4, 128)])
@pytest.mark.parametrize("causal", [0, 1])
def test_masks_of_keys_of_one_tile_need_no_sums_of_dq(
    probe: ctypes.CDLL, kept: tuple[int, int, int], head_dim: int, causal: int
) -> None:
    """However many rows there are.

    The kernels for few keys, up to head_dim 64 and 256 rows, need no such sums, either.
    """
    for length, batch in ((128, 40), (128, 1000), (66, 40)):
        sizes = (batch if kept[0] > 1 else 1, kept[1], length if kept[2] > 1 else 1, length)
        shape = {"batch": batch, "length": length, "nheads_k": 4, "head_dim": head_dim}
        plan = mask_plan_of(probe, mask(*sizes), **shape, is_causal=causal)
        assert (plan["arch"], plan["walk"], plan["block_m"]) == (90, TILED, 64)
        assert plan["dq"] and not plan["dq_accum"] and plan["rounds"] == 1 and plan["mask.bits"]
        wide = mask_plan_of(probe, mask(*sizes), **shape | {"head_dim": 192}, is_causal=causal)
        assert wide["dq_accum"] and not wide["dq"]


@pytest.mark.parametrize(
    ("given", "walk"),
    [
        ({"deterministic": 1}, TILED),
        ({"gradients": "dk dv"}, TILED),
        ({"softcap": 5.0}, MASK_LIST),
        ({"length": 129}, TILED),
        ({"seqlen_q": 300, "is_causal": 1}, TILED),  # rows that see no key, whose dq nobody writes
    ],
)
def test_sums_of_dq_beside_masks_of_few_keys(
    probe: ctypes.CDLL, given: dict[str, Any], walk: int
) -> None:
    plan = mask_plan_of(probe, mask(8, 1, 1, given.get("length", 128)), **FEW_KEYS | given)
    assert plan["walk"] == walk and not plan["dq"]


FEW_KEYS: dict[str, Any] = {"batch": 8, "length": 128, "nheads": 8, "nheads_k": 8, "head_dim": 128}
SMALL = {"batch": 2, "length": 257, "nheads": 8, "nheads_k": 2, "head_dim": 64}
WIDE_FEW_KEYS = SMALL | {"length": 100, "head_dim": 192}


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(
    ("shape", "more", "walk"),
    [
        # Microseconds on an H200 by tiles, and by a list: 31 and 39, 40 and 50 with head_dim 80.
        (SMALL | {"batch": 8, "nheads": 4, "nheads_k": 1}, {}, TILED),
        ({"batch": 2, "length": 777, "nheads": 2, "nheads_k": 2, "head_dim": 80}, {}, TILED),
        # 42 and 58; 48 and 61 under causality; 30 and 46.
        ({"batch": 4, "length": 1024, "nheads": 1, "nheads_k": 1, "head_dim": 128}, {}, TILED),
        ({"batch": 1, "length": 1000, "nheads": 8, "nheads_k": 2, "head_dim": 120}, {}, TILED),
        ({"batch": 2, "length": 128, "nheads": 24, "nheads_k": 12, "head_dim": 128}, {}, TILED),
        # 26 and 37 where all keys are in one tile; 46 and 42, 45 and 37 where they are not.
        (WIDE_FEW_KEYS, {}, TILED),
        (SMALL | {"head_dim": 192}, {}, MASK_LIST),
        (SMALL, {"deterministic": 1}, MASK_LIST),
        # More work.
        (SMALL | {"batch": 12, "length": 1000}, {}, MASK_LIST),
    ],
)
def test_lists_of_small_calls(
    probe: ctypes.CDLL, shape: dict[str, int], more: dict[str, int], walk: int, causal: int
) -> None:
    """Making lists and rounding their sums takes launches, which most small calls do without."""
    kept = mask(shape["batch"], 1, 1, shape["length"])
    plan = mask_plan_of(probe, kept, **shape, **more, is_causal=causal)
    assert (plan["arch"], plan["walk"]) == (90, walk)
    assert bool(plan["keys.idx"]) == (walk == MASK_LIST)


@pytest.mark.parametrize(
    ("batch", "length", "are_whole"),
    [
        *((10, 1024, False), (11, 1024, True)),  # from 330 tiles on
        *((6, 4096, False), (7, 4096, True)),  # of more than 8192 rows of a group, from 792 on
    ],
)
def test_tiles_enough_to_have_all_rows(
    probe: ctypes.CDLL, batch: int, length: int, are_whole: bool
) -> None:
    kept = mask(batch, 1, 1, length)
    plan = mask_plan_of(probe, kept, batch=batch, length=length)
    assert plan["arch"] == 90 and plan["has_whole_items"] == are_whole


@pytest.mark.parametrize(
    "given",
    [
        {"batch": 2},  # few tiles
        {"batch": 64, "nheads_k": 2},
        {"length": 16384},
        {
            "bias": tensor((16, 4, 1, 4096), FLOAT32),
            "softmax_lse_rest": tensor((16, 16, 4096), FLOAT32),
        },
        {"head_dim": 256},
    ],
    ids=["few tiles", "many heads of a group", "many rows", "a bias", "wide heads"],
)
def test_tiles_without_all_rows(probe: ctypes.CDLL, given: dict[str, Any]) -> None:
    batch, length = given.get("batch", 16), given.get("length", 4096)
    found = mask_plan_of(probe, **({"kept": mask(batch, 1, 1, length), "batch": 16} | given))
    assert found["arch"] == 90 and not found["has_whole_items"]
    assert 0 < found["chunks.block_rows"] <= 1024 and found["dk_accum"]
