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
    ROW_BLOCK_LISTS,
    SM90,
    WORKSPACE,
    Plan,
    Probe,
    array_bytes,
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
    assert not plan["per_group"]  # one launch adds up all heads for each key
    # Plain logits are exponents of 2; logits with a bias stay in natural units.
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
        # The kernel finds the list of a kv head from where the launch's own lists begin.
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
        (8, 16, 16, 4096, 256, 8),  # a chunk has at most four times as many rows as a row has keys
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


@pytest.mark.parametrize(
    "batch, nheads, nheads_k, length, window, rounds, changes",
    [
        (8, 32, 32, 2048, 512, 1, {}),
        (16, 16, 16, 2048, 512, 1, {"head_dim": 64}),
        (64, 16, 8, 1000, 256, 1, {}),
        (2, 4, 4, 100, 128, 1, {"head_dim": 96}),
        (8, 32, 32, 2048, 512, 1, {"gradients": "dq dv"}),  # dk goes to the workspace
        (8, 32, 32, 2100, 512, 2, None),  # more rows than a chunk may have
        (8, 32, 8, 2048, 512, 2, None),  # an item would take too long
        # Rows of dk that do not start on 16 bytes.
        (
            1,
            4,
            4,
            100,
            128,
            1,
            {"dk": tensor((1, 100, 4, 128), stride=(0, 516, 129, 1)), "sole": False},
        ),
        (1, 8, 8, 2048, 512, 1, None),  # too few items
        (8, 32, 32, 2048, 512, 1, {"deterministic": 1}),
        (8, 32, 32, 2048, 512, 2, {"head_dim": 256, "sole": False}),
    ],
)
def test_single_chunk_writes_its_keys(
    probe: ctypes.CDLL,
    batch: int,
    nheads: int,
    nheads_k: int,
    length: int,
    window: int,
    rounds: int,
    changes: dict[str, Any] | None,
) -> None:
    """Where a chunk has all rows, nobody else adds to the dk and dv of its keys."""
    given = {"seqlen_q": length, "seqlen_k": length} | (changes or {})
    sole = given.pop("sole", changes is not None)
    plan = plan_of(probe, window, batch=batch, nheads=nheads, nheads_k=nheads_k, **given)
    assert plan["arch"] == 90 and plan["has_sole_chunk"] == sole
    assert plan["rounds"] == rounds
    if sole:
        assert plan["chunks.blocks"] == 1 and plan["chunks.block_rows"] >= length
        assert not plan["dk_accum"] and not plan["dv_accum"] and plan["dq_accum"]
        assert not plan["terms.first"] and not plan["dkv_semaphore"]  # sums need no order


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
        (1, 8, 1, 16384, 1024, 128, 8, 1),  # longer chunks, so that each key lies in fewer of them
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
    (2, 2, 64, 131072, 8192, 16, 6),  # rounds of kv heads, too
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
    """Each round adds up what its own chunks have, and hands on sums to the next round.

    These are the sums of keys that the next round sees, too.
    """
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
    # No more than calls without an order may take, or 68 MB.
    inputs = 2 * length * head_dim * (nheads + 2 * nheads_k)
    statistics = 4 * nheads * length * (2 if biased else 1)
    assert first["workspace_bytes"] + statistics <= max(1.5 * inputs, 68 << 20)


@pytest.mark.parametrize("gradients", ["dq dk dv", "dq dk dv dbias"])
def test_chunks_take_turns_where_there_is_no_room_to_keep_their_sums(
    probe: ctypes.CDLL, gradients: str
) -> None:
    """If rows keep many keys, each key lies in many chunks. Longer chunks wait less often."""
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
    """In every round: rounds use the same memory, each for its own batches, heads and rows."""
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
        assert sum(ordered) == (deterministic and not found["has_sole_chunk"])
        assert bool(found["dk_accum"]) == (not found["terms.first"] and not found["has_sole_chunk"])
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
    """The limit includes the log-sum-exp that the forward keeps."""
    length = 16384
    shape = {"batch": batch, "nheads_k": nheads_k, "seqlen_q": length, "seqlen_k": length}
    plan = plan_of(probe, **shape)
    inputs = 2 * batch * length * 128 * (16 + 2 * nheads_k)
    assert plan["arch"] == 90
    assert plan["workspace_bytes"] + 4 * batch * 16 * length <= 1.5 * inputs
