"""Which backward calls over lists of row blocks Hopper's kernels compute, and in which parts."""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Any

import pytest

import abi
from abi import FLOAT32, tensor
from probe import (
    ARRAYS,
    MASK_LIST,
    ROW_BLOCK_LISTS,
    SM90,
    TILED,
    WORKSPACE,
    Plan,
    Probe,
    array_bytes,
    mask,
    zeroed_bytes,
)

SMS = 132
BLOCK = 128  # rows of a list
REST = {"softmax_lse_rest": tensor((1, 16, 4096), FLOAT32)}
KEY_BIAS = {"bias": tensor((1, 4, 1, 4096), FLOAT32), **REST}


def plan_of(
    probe: ctypes.CDLL,
    window: int = 1024,
    gradients: str = "dq dk dv",
    round: int = 0,
    launch: tuple[int, int, int] = (0, 0, 0),
    **given: Any,
) -> Plan:
    fields: dict[str, Any] = {"batch": 1, "head_dim": 128, "nheads": 16, "nheads_k": 4}
    fields |= {"seqlen_q": 4096, "seqlen_k": 4096, "is_causal": 1} | given
    if "selection" not in fields:
        fields["selection"] = abi.selection(
            *(fields["seqlen_q"], fields["seqlen_k"], window + BLOCK),
            *(fields["batch"], fields["nheads_k"]),
        )
    return Probe(probe).bwd(SM90, SMS, gradients=gradients, round=round, launch=launch, **fields)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"head_dim": 40},
        {"head_dim": 80, "seqlen_q": 300},
        {"head_dim": 136},
        {"head_dim": 256, "gradients": "dq dk dv dbias", **KEY_BIAS},
        KEY_BIAS,
        {"bias": tensor((1, 1, 1, 4096), FLOAT32), **REST},
        {"gradients": "dq dk dv dbias", **KEY_BIAS},
        {"selection": abi.selection(4096, 4096, 512, 1, 1)},
        {"k": tensor((1, 4096, 4, 128), stride=(0, 128, 0, 1))},
        {"dsoftmax_lse": tensor((1, 16, 4096), FLOAT32)},
        {"deterministic": 1},
        {"deterministic": 1, "gradients": "dq dk dv dbias", **KEY_BIAS},
        {"deterministic": 1, "head_dim": 136},
        {"deterministic": 1, "head_dim": 256, "gradients": "dq dk dv dbias", **KEY_BIAS},
    ],
    ids=[
        *("plain", "small heads", "few rows", "wide heads", "wide heads with bias"),
        *("bias", "shared bias", "bias with gradient"),
        *("one list for all heads", "expanded keys", "dlse"),
        *("deterministic", "deterministic with bias"),
        *("deterministic wide heads", "deterministic wide heads with bias"),
    ],
)
def test_what_they_compute(probe: ctypes.CDLL, arguments: dict[str, Any]) -> None:
    plan = plan_of(probe, **arguments)
    assert plan["walk"] == ROW_BLOCK_LISTS
    assert (plan["arch"], plan["block_m"], plan["block_n"]) == (90, 64, 128)
    assert plan["dq_accum"]
    kept_apart = bool(arguments.get("deterministic"))  # what each chunk adds to dk and dv
    assert bool(plan["terms.dk"]) == bool(plan["terms.dv"]) == kept_apart
    assert bool(plan["dk_accum"]) == bool(plan["dv_accum"]) == (not kept_apart)
    assert bool(plan["terms.dbias"]) == (kept_apart and "bias" in arguments)
    assert not plan["per_group"]  # one launch has the keys' sums of all heads
    # A power of two for plain logits; those with a bias stay in natural units.
    scales = (plan["lse_scale"], plan["rest_scale"])
    assert (scales[0] == 1) == ("bias" in arguments) == (scales[1] != 1)
    cleared = plan["scratch_zeros"] + plan["once_zero_bytes"] + plan["counter_zero_bytes"]
    assert plan["scratch_zeros"] <= plan["work_counter"] < cleared


@pytest.mark.parametrize(
    "arguments",
    [
        {"softcap": 30.0},
        {"head_dim": 256, "softcap": 30.0},
        {"softmax_scale": -1.0},
        {"bias": tensor((1, 4, 1, 4096), FLOAT32)},
        {"bias": tensor((1, 4, 4096, 4096)), **REST},
        {"dout": tensor((1, 4096, 16, 128), stride=(4096 * 2052, 2052, 128, 1))},
    ],
    ids=[
        *("softcap", "wide heads, softcap"),
        *("negative scale", "bias without the rest of lse", "dense bias", "unaligned"),
    ],
)
def test_what_others_compute(probe: ctypes.CDLL, arguments: dict[str, Any]) -> None:
    plan = plan_of(probe, **arguments)
    assert plan["arch"] == 80 and plan["chunk_blocks"] == 0 and not plan["chunks.idx"]


LISTS_OF_HEADS = {"selection": abi.selection(4096, 4096, 1024 + BLOCK, 1, 16)}
BIAS_OF_HEADS = {"bias": tensor((1, 16, 1, 4096), FLOAT32), **REST}


@pytest.mark.parametrize("deterministic", [0, 1])
@pytest.mark.parametrize(
    "arguments",
    [
        LISTS_OF_HEADS,
        BIAS_OF_HEADS,
        LISTS_OF_HEADS | BIAS_OF_HEADS,
        LISTS_OF_HEADS | KEY_BIAS,
        {"head_dim": 192, **LISTS_OF_HEADS, **BIAS_OF_HEADS},
    ],
    ids=[
        *("lists", "biases", "lists and biases", "lists, a bias of the group"),
        "wide heads",
    ],
)
def test_lists_of_single_heads_have_launches_of_their_own(
    probe: ctypes.CDLL, arguments: dict[str, Any], deterministic: int
) -> None:
    gradients = "dq dk dv dbias" if "bias" in arguments else "dq dk dv"
    given = {"gradients": gradients, "deterministic": deterministic, **arguments}
    plans = [plan_of(probe, launch=(0, 0, g), **given) for g in range(4)]
    first = plans[0]
    assert first["arch"] == 90 and first["per_group"] and first["dk_accum"]
    # What chunks add is kept apart as for other lists, and then added to the sums of all launches.
    assert bool(first["terms.dk"]) == deterministic and not first["carried.places"]
    lists_of_group = first["chunks.heads"] // first["round.heads_k"]
    bytes_of_list = 4 * first["chunks.blocks"] * first["chunks.capacity"]
    cleared = first["scratch_zeros"] + first["once_zero_bytes"] + first["counter_zero_bytes"]
    for g, plan in enumerate(plans):
        assert (plan["group_begin"], plan["group_end"]) == (g, g + 1)
        own = g * lists_of_group // 4
        # As the list of a kv head is found, from where the launch's own lists begin.
        assert plan["chunks.idx"] - first["chunks.idx"] == own * bytes_of_list
        assert plan["chunks.count"] - first["chunks.count"] == own * 4 * first["chunks.blocks"]
        assert plan["chunks.end"] - first["chunks.end"] == own * 4 * 4096
    # Each launch counts its items from zero.
    counters = [plan["work_counter"] for plan in plans]
    assert len(set(counters)) == 4
    assert all(first["scratch_zeros"] <= place < cleared for place in counters)


def test_heads_share_what_a_group_shares(probe: ctypes.CDLL) -> None:
    """A launch has all heads of a group where these have one list and one bias."""
    shared = plan_of(probe, gradients="dq dk dv dbias", **KEY_BIAS)
    assert not shared["per_group"] and shared["group_end"] == 4


@pytest.mark.parametrize(
    "batch, nheads, nheads_k, length, window, blocks",
    [
        (1, 16, 4, 16384, 1024, 4),  # 32 steps over a block of 64 rows
        (1, 16, 4, 131072, 2048, 4),
        (1, 2, 1, 32768, 1024, 4),  # more would leave fewer than four items for each SM
        (8, 16, 16, 4096, 256, 8),  # more rows than four times the keys that each of them keeps
        (1, 16, 16, 16384, 1024, 16),  # as many rows as a chunk may have
        (1, 16, 1, 16384, 1024, 1),
        (1, 4, 2, 2048, 256, 1),
    ],
)
def test_rows_of_a_chunk(
    probe: ctypes.CDLL,
    batch: int,
    nheads: int,
    nheads_k: int,
    length: int,
    window: int,
    blocks: int,
) -> None:
    lengths = {"seqlen_q": length, "seqlen_k": length}
    plan = plan_of(probe, window, batch=batch, nheads=nheads, nheads_k=nheads_k, **lengths)
    assert plan["chunk_blocks"] == blocks and plan["chunks.block_rows"] == blocks * BLOCK <= 2048
    assert plan["chunks.blocks"] == -(-plan["row_blocks"] // blocks)
    # Each row after those of the first row block brings at most one key.
    assert plan["chunks.capacity"] >= plan["keys.capacity"] + (blocks - 1) * BLOCK
    assert plan["chunks.capacity"] % 128 == 0
    items = plan["chunks.capacity"] // 128 * plan["chunks.blocks"] * plan["nheads_k"]
    # A tile may become an item for each query head of the group.
    assert plan["blocks"] == min(items * plan["round.batches"] * (nheads // nheads_k), SMS)


def test_rounds_with_few_items_have_shorter_chunks(probe: ctypes.CDLL) -> None:
    lengths = {"seqlen_q": 131072, "seqlen_k": 131072, "head_dim": 64}
    plan = plan_of(probe, 2048, batch=1, nheads=1, nheads_k=1, **lengths)
    assert plan["rounds"] == 8 and plan["chunks.block_rows"] == 1024


@pytest.mark.parametrize("head_dim, blocks", [(128, 4), (136, 8), (256, 8)])
def test_rows_of_a_chunk_of_wide_heads(probe: ctypes.CDLL, head_dim: int, blocks: int) -> None:
    """Two thread blocks share an item: half as many of them fill the GPU."""
    shape = {"nheads": 2, "nheads_k": 1, "head_dim": head_dim}
    plan = plan_of(probe, seqlen_q=32768, seqlen_k=32768, **shape)
    assert (plan["arch"], plan["chunk_blocks"]) == (90, blocks)


@pytest.mark.parametrize(
    "batch, nheads, nheads_k, length, window, head_dim, blocks, rounds",
    [
        (1, 16, 4, 16384, 1024, 128, 4, 2),
        (1, 16, 4, 16384, 1024, 64, 4, 2),
        (1, 2, 1, 32768, 1024, 64, 4, 1),
        (1, 16, 16, 16384, 1024, 128, 16, 2),
        (1, 16, 4, 16384, 4096, 128, 4, 4),
        (1, 8, 1, 16384, 1024, 128, 8, 1),  # longer chunks: each key lies in fewer
        (1, 16, 4, 131072, 2048, 128, 4, 4),
    ],
)
def test_chunks_whose_sums_are_kept_apart(
    probe: ctypes.CDLL,
    batch: int,
    nheads: int,
    nheads_k: int,
    length: int,
    window: int,
    head_dim: int,
    blocks: int,
    rounds: int,
) -> None:
    shape = {"batch": batch, "nheads": nheads, "nheads_k": nheads_k, "head_dim": head_dim}
    lengths = {"seqlen_q": length, "seqlen_k": length}
    plan = plan_of(probe, window, deterministic=1, **shape, **lengths)
    assert plan["terms.first"] and not plan["dkv_semaphore"] and not plan["dk_accum"]
    assert (plan["chunk_blocks"], plan["rounds"]) == (blocks, rounds)
    # Every key that a chunk can list has a row.
    rows = blocks * BLOCK
    keys = [min(plan["chunks.capacity"], (i + 1) * rows, length) for i in range(-(-length // rows))]
    assert plan["terms.capacity"] == sum(keys)
    # The limit on sums beside the inputs, and a quarter more.
    inputs = 2 * batch * length * head_dim * (nheads + 2 * nheads_k)
    turns = plan_of(probe, window, **shape, **lengths)["workspace_bytes"]
    assert plan["workspace_bytes"] <= 1.25 * max(1.5 * inputs, 64 << 20, turns) + (8 << 20)


def key_bias(nheads: int, nheads_k: int, length: int) -> dict[str, Any]:
    rest = tensor((1, nheads, length), FLOAT32)
    return {"bias": tensor((1, nheads_k, 1, length), FLOAT32), "softmax_lse_rest": rest}


# Query heads, kv heads, head_dim, length, window; then row blocks of a chunk, and rounds.
ROW_ROUNDS = [
    (2, 1, 64, 131072, 2048, 16, 3),
    (2, 1, 64, 65536, 2048, 8, 3),
    (1, 1, 64, 131072, 2048, 16, 3),
    (12, 1, 128, 20000, 2048, 2, 4),  # the last round has fewer row blocks
    (16, 1, 128, 32768, 1024, 2, 3),
    (16, 1, 128, 131072, 2048, 16, 3),
    (2, 2, 64, 131072, 8192, 16, 6),  # and kv heads
]


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("nheads, nheads_k, head_dim, length, window, blocks, rounds", ROW_ROUNDS)
def test_sums_kept_apart_in_rounds_of_rows(
    probe: ctypes.CDLL,
    *,
    nheads: int,
    nheads_k: int,
    head_dim: int,
    length: int,
    window: int,
    blocks: int,
    rounds: int,
    biased: bool,
) -> None:
    """Each round adds up what its own chunks have, and hands on what it has of the keys that the
    next one sees."""
    shape = {"batch": 1, "nheads": nheads, "nheads_k": nheads_k, "head_dim": head_dim}
    shape |= {"seqlen_q": length, "seqlen_k": length}
    given: dict[str, Any] = {"deterministic": 1}
    if biased:
        given |= {"gradients": "dq dk dv dbias"} | key_bias(nheads, nheads_k, length)
    first = plan_of(probe, window, **given, **shape)
    assert (first["chunk_blocks"], first["rounds"]) == (blocks, rounds)
    rows_done, handed_on = 0, None
    for round in range(first["rounds"]):
        plan = plan_of(probe, window, round=round, **given, **shape)
        assert plan["arch"] == 90 and plan["round.heads_k"] == 1
        assert plan["terms.first"] and not plan["dkv_semaphore"] and not plan["dk_accum"]
        assert plan["dkv_zero_bytes"] == 0
        assert plan["round.row_block"] % plan["chunk_blocks"] == 0
        # Every key that a chunk can list has a row, and each that a row after the round sees.
        chunks = -(-plan["round.row_blocks"] // plan["chunk_blocks"])
        assert plan["chunks.blocks"] == chunks
        assert plan["terms.capacity"] >= chunks * min(plan["chunks.capacity"], length)
        assert window <= plan["carried.capacity"] < 1 << 16
        last = (first["rounds"] // nheads_k - 1) * first["round.row_blocks"] * BLOCK
        assert plan["carried.keys"] == last  # the others are seen in the last round alone
        carried = plan["carried.capacity"] * head_dim * 4
        terms = plan["terms.capacity"] * head_dim * 4
        sizes = array_bytes(plan, shape, 0) | {
            "chunks.idx": chunks * plan["chunks.capacity"] * 4,
            "chunks.count": chunks * 4,
            "chunks.tile_rows": chunks * plan["chunks.capacity"] // 128 * 8,
            "terms.first": length * 4,
            "terms.dbias": plan["terms.capacity"] * 4,
            "carried.places": plan["carried.keys"] * 4,
            **dict.fromkeys(("terms.dk", "terms.dv"), terms),
            **{f"carried.{to}_{x}": carried for to in ("from", "to") for x in ("dk", "dv")},
        }
        apart = {*ARRAYS, *sizes} - {"keys.idx", "dq_accum", "dq_semaphore"}
        spans = sorted((plan[x], plan[x] + sizes[x]) for x in apart if plan[x])
        assert len(spans) >= 13 and spans[0][0] >= WORKSPACE
        assert spans[-1][1] <= WORKSPACE + plan["workspace_bytes"]
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        if plan["round.row_block"] > 0:
            assert [plan[f"carried.from_{x}"] for x in ("dk", "dv")] == handed_on
        handed_on = [plan[f"carried.to_{x}"] for x in ("dk", "dv")]
        rows_done += plan["round.row_blocks"] * plan["round.heads_k"]
    assert rows_done == -(-length // BLOCK) * nheads_k
    # No more than calls without an order may take, where that is not very little.
    inputs = 2 * length * head_dim * (nheads + 2 * nheads_k)
    statistics = 4 * nheads * length * (2 if biased else 1)
    assert first["workspace_bytes"] + statistics <= max(1.5 * inputs, 68 << 20)


@pytest.mark.parametrize("gradients", ["dq dk dv", "dq dk dv dbias"])
def test_chunks_take_turns_where_there_is_no_room_to_keep_their_sums(
    probe: ctypes.CDLL, gradients: str
) -> None:
    """Of many kept keys each lies in many chunks. Longer chunks wait less often."""
    length = 131072
    given = key_bias(16, 4, length) if "dbias" in gradients else {}
    lengths = {"seqlen_q": length, "seqlen_k": length}
    plan = plan_of(probe, 32768, deterministic=1, gradients=gradients, **given, **lengths)
    assert plan["arch"] == 90 and not plan["per_group"]
    assert plan["dkv_semaphore"] and plan["dk_accum"] and not plan["terms.first"]
    assert plan["chunk_blocks"] == 8


@pytest.mark.parametrize("lists", [(1, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("length", [127, 4095, 20000, 60000])
@pytest.mark.parametrize("deterministic", [0, 1])
def test_arrays_do_not_overlap(
    probe: ctypes.CDLL, length: int, lists: tuple[int, int], deterministic: int
) -> None:
    """In every round: they use the same memory, each for its own batches, heads and rows."""
    shape = {"batch": 2, "nheads": 16, "nheads_k": 4, "head_dim": 128}
    shape |= {"seqlen_q": length, "seqlen_k": length}
    selection = abi.selection(length, length, 1024, *lists)
    given = {"selection": selection, "deterministic": deterministic}
    count = plan_of(probe, **given, **shape)["rounds"]
    rows_done = 0
    for round in range(count):
        found = plan_of(probe, round=round, **given, **shape)
        assert found["arch"] == 90
        chunks = math.prod(found[f"chunks.{name}"] for name in ("batch", "heads", "blocks"))
        assert found["chunks.batch"] == (found["round.batches"] if lists[0] > 1 else 1)
        assert found["chunks.heads"] == (found["round.heads_k"] if lists[1] > 1 else 1)
        sizes = array_bytes(found, shape, 0) | {
            "chunks.idx": chunks * found["chunks.capacity"] * 4,
            "chunks.count": chunks * 4,
            "chunks.tile_rows": chunks * found["chunks.capacity"] // 128 * 8,
        }
        sizes["dkv_semaphore"] *= found["chunks.blocks"]
        terms = found["round.batches"] * found["round.heads_k"] * found["terms.capacity"]
        sizes |= dict.fromkeys(("terms.dk", "terms.dv"), terms * shape["head_dim"] * 4)
        sizes["terms.first"] = found["chunks.batch"] * found["chunks.heads"] * length * 4
        assert bool(found["dq_semaphore"]) == bool(deterministic)
        # Chunks take turns at dk and dv, or what each adds to them is kept apart.
        ordered = bool(found["dkv_semaphore"]), bool(found["terms.first"])
        assert sum(ordered) == deterministic
        assert bool(found["dk_accum"]) == (not found["terms.first"])
        spans = sorted(
            (found[name], found[name] + sizes[name])
            for name in {*ARRAYS, *sizes}
            if found[name] and name not in ("keys.idx", "dq_accum", "dq_semaphore")
        )
        assert spans[0][0] >= WORKSPACE
        assert spans[-1][1] <= WORKSPACE + found["workspace_bytes"]
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        # The lists of chunks are written in full: none of it has to be zero.
        assert found["chunks.idx"] >= found["scratch_zeros"] + zeroed_bytes(found)
        rows_done += found["round.batches"] * found["round.heads_k"] * found["row_blocks"]
    assert rows_done == 2 * 4 * -(-length // BLOCK)


@pytest.mark.parametrize("batch, nheads_k", [(1, 4), (2, 16), (8, 1)])
def test_workspace_stays_below_one_and_a_half_inputs(
    probe: ctypes.CDLL, batch: int, nheads_k: int
) -> None:
    """With the log-sum-exp that the forward keeps."""
    length = 16384
    shape = {"batch": batch, "nheads_k": nheads_k, "seqlen_q": length, "seqlen_k": length}
    plan = plan_of(probe, **shape)
    inputs = 2 * batch * length * 128 * (16 + 2 * nheads_k)
    assert plan["arch"] == 90
    assert plan["workspace_bytes"] + 4 * batch * 16 * length <= 1.5 * inputs


def mask_plan_of(probe: ctypes.CDLL, kept: Any, length: int = 4096, **given: Any) -> Plan:
    """Of a mask that is alike for all rows."""
    fields: dict[str, Any] = {"batch": 2, "nheads": 16, "nheads_k": 4, "head_dim": 128}
    fields |= {"seqlen_q": length, "seqlen_k": length, "is_causal": 1, "mask": kept} | given
    gradients = fields.pop("gradients", "dq dk dv")
    return Probe(probe).bwd(SM90, SMS, gradients=gradients, **fields)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(
    "length, nheads, nheads_k, head_dim, arch",
    [
        # Copies of the list for each chunk of rows would take 1.1 of 1.3 GB, and 4.3 of 4.7.
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
    # In a fixed order its chunks take turns, which each launch counts from zero.
    fields = {"kept": mask(1, 16, 1, 4096), "deterministic": 1}
    plans = [mask_plan_of(probe, **fields, launch=(0, 0, g)) for g in range(4)]
    chunks = plans[0]["chunks.blocks"]
    turns = [plan["dkv_semaphore"] for plan in plans]
    assert all(after - before == 4 * 4 * chunks for before, after in itertools.pairwise(turns))
    cleared = plans[0]["once_zero_bytes"] + plans[0]["counter_zero_bytes"]
    assert turns[-1] + 4 * 4 * chunks <= plans[0]["scratch_zeros"] + cleared


@pytest.mark.parametrize("head_dim", [128, 192])
def test_masks_of_keys_in_a_fixed_order(probe: ctypes.CDLL, head_dim: int) -> None:
    """Each chunk of rows has all keys that the mask keeps: they add to dk and dv one by one."""
    found = mask_plan_of(probe, kept=mask(1, 1, 1, 4096), deterministic=1, head_dim=head_dim)
    assert found["arch"] == 90 and found["chunk_blocks"] > 0
    assert found["dq_semaphore"] and found["dkv_semaphore"] and not found["chunks.end"]


@pytest.mark.parametrize("causal", [0, 1])
def test_masks_of_few_keys_are_walked_tile_by_tile(probe: ctypes.CDLL, causal: int) -> None:
    """To list the keys, and to round their sums, would take longer."""
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
@pytest.mark.parametrize(("batch", "length"), [(8, 8192), (16, 7454), (256, 509), (1000, 70)])
@pytest.mark.parametrize("own_lists", [False, True])
def test_tiles_with_all_rows(
    probe: ctypes.CDLL, own_lists: bool, batch: int, length: int, nheads_k: int, causal: int
) -> None:
    """Many tiles of a mask's list have all rows each: dk and dv then take no sums."""
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
        # Arrays of all rounds begin with the first one's share.
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
    """The shapes of attention/test_padded.py that are there for tiles with all rows have some."""
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
    """And those that are there for chunks have these."""
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
    """Those of attention/test_masks.py that are there for hidden keys in tiles have such tiles."""
    batch = 24 if kept[0] == 1 else kept[0]  # a mask that all 24 share, or one of each sequence
    shape = {"batch": batch, "nheads": heads[0], "nheads_k": heads[1], "head_dim": head_dim}
    shape |= {"seqlen_q": rows, "seqlen_k": keys, "is_causal": causal}
    found = mask_plan_of(probe, mask(*kept, 1, keys), **shape)
    assert found["arch"] == 90 and found["walk"] == TILED and found["rounds"] == 1


SMALL = {"batch": 2, "length": 257, "nheads": 8, "nheads_k": 2, "head_dim": 64}
FEW_KEYS = SMALL | {"length": 100, "head_dim": 128}


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
        (FEW_KEYS | {"head_dim": 192}, {}, TILED),
        (SMALL | {"head_dim": 192}, {}, MASK_LIST),
        (SMALL, {"deterministic": 1}, MASK_LIST),
        # More work.
        (SMALL | {"batch": 12, "length": 1000}, {}, MASK_LIST),
    ],
)
def test_lists_of_small_calls(
    probe: ctypes.CDLL, shape: dict[str, int], more: dict[str, int], walk: int, causal: int
) -> None:
    """To make lists and to round their sums takes launches, which such calls do without."""
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
