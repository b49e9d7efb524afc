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
    **given: Any,
) -> Plan:
    fields: dict[str, Any] = {"batch": 1, "head_dim": 128, "nheads": 16, "nheads_k": 4}
    fields |= {"seqlen_q": 4096, "seqlen_k": 4096, "is_causal": 1} | given
    if "selection" not in fields:
        fields["selection"] = abi.selection(
            *(fields["seqlen_q"], fields["seqlen_k"], window + BLOCK),
            *(fields["batch"], fields["nheads_k"]),
        )
    return Probe(probe).bwd(SM90, SMS, gradients=gradients, round=round, **fields)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"head_dim": 40},
        {"head_dim": 80, "seqlen_q": 300},
        KEY_BIAS,
        {"bias": tensor((1, 1, 1, 4096), FLOAT32), **REST},
        {"gradients": "dq dk dv dbias", **KEY_BIAS},
        {"selection": abi.selection(4096, 4096, 512, 1, 1)},
        {"k": tensor((1, 4096, 4, 128), stride=(0, 128, 0, 1))},
        {"dsoftmax_lse": tensor((1, 16, 4096), FLOAT32)},
        {"deterministic": 1},
        {"deterministic": 1, "gradients": "dq dk dv dbias", **KEY_BIAS},
    ],
    ids=[
        *("plain", "small heads", "few rows", "bias", "shared bias", "bias with gradient"),
        *("one list for all heads", "expanded keys", "dlse"),
        *("deterministic", "deterministic with bias"),
    ],
)
def test_what_they_compute(probe: ctypes.CDLL, arguments: dict[str, Any]) -> None:
    plan = plan_of(probe, **arguments)
    assert plan["walk"] == ROW_BLOCK_LISTS
    assert (plan["arch"], plan["block_m"], plan["block_n"]) == (90, 64, 128)
    assert plan["dk_accum"] and plan["dv_accum"] and plan["dq_accum"]
    # A power of two for plain logits; those with a bias stay in natural units.
    scales = (plan["lse_scale"], plan["rest_scale"])
    assert (scales[0] == 1) == ("bias" in arguments) == (scales[1] != 1)
    cleared = plan["scratch_zeros"] + plan["once_zero_bytes"] + plan["round_zero_bytes"]
    assert plan["scratch_zeros"] <= plan["work_counter"] < cleared


@pytest.mark.parametrize(
    "arguments",
    [
        {"softcap": 30.0},
        {"head_dim": 136},
        {"gradients": "dq dv"},
        {"softmax_scale": -1.0},
        {"bias": tensor((1, 16, 1, 4096), FLOAT32), **REST},
        {"bias": tensor((1, 4, 1, 4096), FLOAT32)},
        {"bias": tensor((1, 4, 4096, 4096)), **REST},
        {"selection": abi.selection(4096, 4096, 1024, 1, 16)},
        {"dout": tensor((1, 4096, 16, 128), stride=(4096 * 2052, 2052, 128, 1))},
    ],
    ids=[
        *("softcap", "large heads", "one gradient less", "negative scale"),
        *("bias of each head", "bias without the rest of lse", "dense bias"),
        *("list of each head", "unaligned"),
    ],
)
def test_what_others_compute(probe: ctypes.CDLL, arguments: dict[str, Any]) -> None:
    plan = plan_of(probe, **arguments)
    assert plan["arch"] == 80 and plan["chunk_blocks"] == 0 and not plan["chunks.idx"]


@pytest.mark.parametrize(
    "batch, nheads, nheads_k, length, window, blocks",
    [
        (1, 16, 4, 16384, 1024, 4),  # 32 steps over a block of 64 rows
        (1, 16, 4, 131072, 2048, 4),
        (1, 2, 1, 32768, 1024, 4),  # more would leave fewer than four items for each SM
        (8, 16, 16, 4096, 256, 4),  # more rows than twice the keys that each of them keeps
        (1, 16, 16, 16384, 1024, 8),  # as many rows as a chunk may have
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
    assert plan["chunk_blocks"] == blocks and plan["chunks.block_rows"] == blocks * BLOCK <= 1024
    assert plan["chunks.blocks"] == -(-plan["row_blocks"] // blocks)
    # Each row after those of the first row block brings at most one key.
    assert plan["chunks.capacity"] >= plan["keys.capacity"] + (blocks - 1) * BLOCK
    assert plan["chunks.capacity"] % 128 == 0
    items = plan["chunks.capacity"] // 128 * plan["chunks.blocks"] * plan["nheads_k"]
    assert plan["blocks"] == min(items * plan["round.batches"], SMS)


def test_more_rows_of_a_chunk_where_tiles_take_turns(probe: ctypes.CDLL) -> None:
    lengths = {"seqlen_q": 16384, "seqlen_k": 16384}
    assert plan_of(probe, deterministic=1, **lengths)["chunk_blocks"] == 8


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
        assert bool(found["dkv_semaphore"]) == bool(found["dq_semaphore"]) == bool(deterministic)
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


def test_masks_beside_lists_are_for_others(probe: ctypes.CDLL) -> None:
    found = Probe(probe).bwd(
        SM90, SMS, batch=1, nheads=16, nheads_k=4, head_dim=128, seqlen_q=4096, seqlen_k=4096,
        mask=mask(1, 1, 1, 4096), gradients="dq dk dv",
    )  # fmt: skip
    assert found["arch"] == 80 and found["chunk_blocks"] == 0
