"""Packed sequences of unequal lengths: what the host decides and lays out for them."""

from __future__ import annotations

import ctypes
import itertools
import random
from typing import Any

import pytest

import abi
from abi import BOOL, FLOAT32, tensor
from probe import (
    ARRAYS,
    DB_ACCUM,
    DB_KEY,
    DB_TILE,
    DIRECT,
    KEY,
    SM80,
    SM89,
    SM90,
    TILE,
    WORKSPACE,
    Plan,
    Probe,
    zeroed_bytes,
)

KEY_MASK, ROW_MASK = tensor((2, 700), BOOL), tensor((2, 500, 400), BOOL)


@pytest.fixture(scope="module")
def plan(probe: ctypes.CDLL) -> Probe:
    return Probe(probe)


# ---------------------------------------------------------------------------------------- forward


def test_extents(plan: Probe) -> None:
    found = plan.fwd(packed=True)
    assert (found["batch"], found["seqlen_q"], found["seqlen_k"]) == (3, 300, 400)
    totals = (found["packing.sequences"], found["packing.total_q"], found["packing.total_k"])
    assert totals == (3, 500, 700)
    assert found["q_stride.batch"] == found["out_stride.batch"] == found["lse_stride.batch"] == 0
    assert (found["q_stride.row"], found["lse_stride.head"], found["lse_stride.row"]) == (
        *(256, 500),
        1,
    )
    assert found["workspace_bytes"] == 0 and found["num_splits"] == 1


MANY = {"sequences": 100_000, "nheads": 64, "nheads_k": 64}
MANY |= {
    "total_q": 2_000_000,
    "total_k": 2_000_000,
    "max_seqlen_q": 1 << 16,
    "max_seqlen_k": 1 << 16,
}


def test_more_blocks_than_32_bits_count_are_refused(plan: Probe) -> None:
    """The sm80 kernels have blocks for max_seqlen in every sequence; Hopper's own have fewer."""
    heads = {"nheads": 1024, "nheads_k": 1024}  # of which the backward takes a part in each round
    for run, length, fields in (
        (plan.fwd, "max_seqlen_q", MANY),
        (plan.bwd, "max_seqlen_k", MANY | heads),
    ):
        with pytest.raises(AssertionError, match=f"thread blocks, for .*, or a lower {length}"):
            run(packed=True, **fields)
        assert run(packed=True, **fields | {length: 1 << 13})["arch"] == 80
        assert run(SM90, packed=True, **fields)["arch"] == 90


def test_more_items_than_32_bits_count_are_not_for_hopper(plan: Probe) -> None:
    sizes = {"sequences": 1 << 22, "nheads": 512, "nheads_k": 512, "total_q": 4096, "total_k": 4096}
    sizes |= {"max_seqlen_q": 64, "max_seqlen_k": 64}
    with pytest.raises(AssertionError, match="thread blocks"):
        plan.fwd(SM90, packed=True, **sizes)
    assert plan.fwd(SM90, packed=True, **sizes | {"sequences": 1 << 21})["arch"] == 90
    assert plan.bwd(SM90, packed=True, **sizes)["rounds"] == 8


def test_few_long_sequences_are_not_split(plan: Probe) -> None:
    sizes = {"sequences": 1, "total_q": 10, "max_seqlen_q": 10, "nheads": 2}
    sizes |= {"total_k": 9000, "max_seqlen_k": 9000}
    assert plan.fwd(packed=True, **sizes)["num_splits"] == 1
    assert plan.fwd(batch=1, seqlen_q=10, seqlen_k=9000, nheads=2)["num_splits"] > 1
    assert plan.bwd(packed=True, **sizes)["num_splits"] == 1


def test_one_row_a_sequence_keeps_its_heads_apart(plan: Probe) -> None:
    """Rows of other sequences follow, so that heads cannot become the rows of one block."""
    found = plan.fwd(packed=True, total_q=3, max_seqlen_q=1)
    assert (found["nheads"], found["head_ratio"], found["seqlen_q"]) == (4, 2, 1)


def test_nothing_to_do(plan: Probe) -> None:
    assert plan.fwd(packed=True, total_q=0, max_seqlen_q=0)["is_empty"]
    assert plan.fwd(packed=True, sequences=0, total_q=0, total_k=0)["is_empty"]
    assert plan.fwd(packed=True, total_k=0, max_seqlen_k=0)["no_keys"]
    assert plan.fwd(packed=True, total_k=0)["no_keys"]
    for total in ("total_q", "total_k"):
        found = plan.bwd(packed=True, **{total: 0})
        assert found["zeros"] and found["workspace_bytes"] == 0


@pytest.mark.parametrize(
    "bias, kind, col_stride",
    [
        (tensor((4, 700)), KEY, 1),
        (tensor((2, 700), FLOAT32, stride=(1, 2)), KEY, 2),
        (tensor((4, 500, 400)), TILE, 0),
        (tensor((1, 500, 400), FLOAT32), DIRECT, 0),
        (tensor((4, 500, 400), stride=(400, 0, 1)), KEY, 0),
    ],
    ids=["key", "strided key", "row", "fp32 row", "expanded rows"],
)
def test_bias_kind(plan: Probe, bias: abi.Tensor, kind: int, col_stride: int) -> None:
    """Only the columns of a bias for each key are numbered through all sequences."""
    for found in (plan.fwd(packed=True, bias=bias), plan.bwd(packed=True, bias=bias)):
        assert found["bias.kind"] == kind
        assert found["packing.bias_col_stride"] == col_stride
        assert found["bias.head_ratio"] == 4 // bias.shape[0]


@pytest.mark.parametrize(
    "bias, col_stride",
    [(tensor((4, 700)), 0), (tensor((4, 500, 400)), -1), (tensor((4, 500, 400), FLOAT32), -1)],
)
def test_listed_keys_count_through_all_sequences(
    plan: Probe, bias: abi.Tensor, col_stride: int
) -> None:
    """So do the columns of a bias for each key; those of a bias with rows are moved back."""
    for found in (
        plan.fwd(packed=True, bias=bias, mask=KEY_MASK),
        plan.bwd(packed=True, bias=bias, mask=KEY_MASK),
    ):
        assert found["packing.bias_col_stride"] == col_stride


@pytest.mark.parametrize("block", [32, 64, 128, 192, 2048])
def test_every_sequence_gets_blocks_enough_of_its_own(probe: ctypes.CDLL, block: int) -> None:
    draw = random.Random(block)
    for _ in range(200):
        edges = (0, 0, 1, block - 1, block, block + 1, draw.randint(0, 5 * block))
        lengths = [draw.choice(edges) for _ in range(draw.randint(1, 20))]
        bounds = [0, *itertools.accumulate(lengths)]
        first = [probe.probe_first_packed_block(x, b, block) for b, x in enumerate(bounds)]
        for length, (begin, end) in zip(lengths, itertools.pairwise(first), strict=True):
            assert begin + -(-length // block) <= end
        assert first[0] == 0
        assert first[-1] == probe.probe_packed_blocks(bounds[-1], len(lengths), block)


def test_one_row_in_all_is_no_bias_per_key(plan: Probe) -> None:
    """(heads, 1, max_seqlen_k): its columns count from the first key of the row's sequence."""
    found = plan.fwd(packed=True, total_q=1, max_seqlen_q=1, bias=tensor((4, 1, 400)))
    assert found["bias.kind"] == KEY and found["packing.bias_col_stride"] == 0


@pytest.mark.parametrize("given, gathered", [(KEY_MASK, True), (ROW_MASK, False)])
def test_mask_kind(plan: Probe, given: abi.Tensor, gathered: bool) -> None:
    for found in (plan.fwd(packed=True, mask=given), plan.bwd(packed=True, mask=given)):
        assert found["gathered"] == gathered
        assert (found["keys.idx"] > 0, found["mask.bits"] > 0) == (gathered, not gathered)
        if gathered:
            assert found["keys.batch"] == 3 and found["keys.capacity"] == (700 // 128 + 3) * 128


# --------------------------------------------------------------------------------------- backward

SHAPES: list[dict[str, Any]] = [
    {},
    {"sequences": 40, "total_q": 3000, "max_seqlen_q": 2900, "head_dim": 128, "nheads_k": 4},
    {"total_k": 5000, "max_seqlen_k": 5000, "head_dim": 256, "nheads": 6, "nheads_k": 1},
]


def array_bytes(found: Plan, heads: int, nheads: int) -> dict[str, int]:
    """The least size of each array; none has room for the longest length in every sequence."""
    sequences, total_q = found["packing.sequences"], found["packing.total_q"]
    total_k, block_m = found["packing.total_k"], found["block_m"]
    stats = nheads * (total_q // 128 + sequences) * 128 * 4
    tiles = found["round.heads_k"] * found["round.groups"] * (total_q // block_m + sequences)
    kv = found["round.heads_k"] * total_k * found["dim_tile"] * 4
    return {
        "lse": stats,
        "lse_rest": stats,
        "delta": stats,
        "dq_accum": tiles * block_m * found["dq_dims"] * 4,
        "dq_semaphore": tiles * 4,
        "dkv_semaphore": found["round.heads_k"] * (total_k // 128 + sequences) * 2 * 4,
        "dk_accum": kv,
        "dv_accum": kv,
        "dbias_cols": nheads * total_k * 4,
        "schedule": (sequences * found["nheads_k"] + 3) * 4,
        "mask.bits": heads * total_q * found["seqlen_k"] // 8,
        "keys.idx": heads * ((total_k // 128 + sequences) * 128 + sequences) * 4,
    }


def check_arrays(full: dict[str, Any], found: Plan, heads: int) -> list[str]:
    """The arrays in the workspace, which do not overlap; those that start as zeros are cleared."""
    needed = array_bytes(found, heads, full["nheads"])
    arrays = [name for name in ARRAYS if found[name] >= WORKSPACE]
    spans = sorted((found[name], found[name] + needed[name], name) for name in arrays)
    assert spans[-1][1] <= WORKSPACE + found["workspace_bytes"]
    for (_, end, name), (begin, _, following) in itertools.pairwise(spans):
        assert end <= begin, f"{name} reaches into {following}"
    cleared = {"dq_accum", "dq_semaphore", "dkv_semaphore", "dk_accum", "dv_accum", "dbias_cols"}
    first, last = found["scratch_zeros"], found["scratch_zeros"] + zeroed_bytes(found)
    for begin, end, name in spans:
        assert (first <= begin and end <= last) == (name in cleared), name
    return arrays


@pytest.mark.parametrize("sizes", SHAPES, ids=["few", "many", "long"])
@pytest.mark.parametrize("deterministic", [0, 1])
def test_arrays_of_hopper_do_not_overlap(
    plan: Probe, sizes: dict[str, Any], deterministic: int
) -> None:
    full = {"total_q": 500, "total_k": 700, "max_seqlen_k": 400, "nheads": 4, "nheads_k": 2} | sizes
    found = plan.bwd(SM90, packed=True, gradients="dq dk dv", deterministic=deterministic, **full)
    assert found["arch"] == 90
    counters = {"dq_semaphore", "dkv_semaphore"} if deterministic else set()
    assert set(check_arrays(full, found, 0)) == {"lse", "delta", "dq_accum"} | counters


@pytest.mark.parametrize("kernels", [SM80, SM89])
@pytest.mark.parametrize("deterministic", [0, 1])
@pytest.mark.parametrize("kind", ["none", "key", "key per head", "row"])
@pytest.mark.parametrize("sizes", SHAPES, ids=["few", "many", "long"])
def test_arrays_do_not_overlap(
    plan: Probe, sizes: dict[str, Any], kind: str, deterministic: int, kernels: str
) -> None:
    full = {"total_q": 500, "total_k": 700, "max_seqlen_k": 400, "nheads": 4, "nheads_k": 2}
    full |= sizes
    heads = {"key": 1, "key per head": full["nheads"], "row": full["nheads_k"]}.get(kind, 0)
    arguments: dict[str, Any] = dict(full, deterministic=deterministic, kernels=kernels)
    arguments["bias"] = tensor((full["nheads_k"], full["total_k"]))
    arguments["softmax_lse_rest"] = tensor((full["nheads"], full["total_q"]), FLOAT32)
    if kind == "row":
        arguments["mask"] = tensor((heads, full["total_q"], full["max_seqlen_k"]), BOOL)
    elif kind != "none":
        arguments["mask"] = tensor((heads, full["total_k"]), BOOL)
    found = plan.bwd(packed=True, gradients="dq dk dv dbias", **arguments)
    arrays = check_arrays(full, found, heads)
    assert {"lse", "lse_rest", "delta", "dq_accum", "dbias_cols"} <= set(arrays)


def test_workspace_follows_the_total(plan: Probe) -> None:
    """And not the longest sequence: one long sequence among short ones costs what its rows cost."""
    even = plan.bwd(packed=True, sequences=100, total_q=20000, total_k=20000, max_seqlen_q=200,
                    max_seqlen_k=200)  # fmt: skip
    ragged = plan.bwd(packed=True, sequences=100, total_q=20000, total_k=20000,
                      max_seqlen_q=19000, max_seqlen_k=19000)  # fmt: skip
    assert ragged["workspace_bytes"] == even["workspace_bytes"]
    assert ragged["max_work_items"] == even["max_work_items"]


@pytest.mark.parametrize(
    "bias, kind",
    [
        (tensor((1, 700)), DB_KEY),
        (tensor((4, 700), FLOAT32), DB_KEY),
        (tensor((4, 500, 400)), DB_TILE),
        (tensor((4, 500, 400), FLOAT32), DB_TILE),
        (tensor((2, 500, 400)), DB_ACCUM),
        (tensor((1, 500, 400), FLOAT32), DB_ACCUM),
    ],
)
def test_dbias_kind(plan: Probe, bias: abi.Tensor, kind: int) -> None:
    found = plan.bwd(packed=True, gradients="dbias", bias=bias)
    assert found["dbias_kind"] == kind and found["launches"]
    assert bool(found["dbias_cols_reduced"]) == (kind == DB_KEY)
    assert not found["dbias_rows_reduced"]
    if kind == DB_TILE:
        # Columns behind a sequence's keys belong to no tile.
        item = 4 if bias.dtype == FLOAT32 else 2
        assert found["dbias_zero_bytes"] == 4 * 500 * 400 * item
        assert found["dbias_row_stride"] == 400 and found["dbias_head_stride"] == 500 * 400


def test_a_single_column_is_no_bias_per_row_of_scores(plan: Probe) -> None:
    """The shape is (heads, total_q, 1) because no sequence has more than one key."""
    sizes = {"total_k": 3, "max_seqlen_k": 1}
    found = plan.bwd(packed=True, gradients="dbias", bias=tensor((4, 500, 1)), **sizes)
    assert found["dbias_kind"] == DB_TILE and not found["dbias_rows_reduced"]


def test_shared_deterministic_dbias_takes_a_launch_a_head(plan: Probe) -> None:
    """Launches of heads that share entries follow one another; sequences share no entries."""
    bias = tensor((1, 500, 400))
    arguments: dict[str, Any] = {"gradients": "dq dk dv dbias", "bias": bias, "deterministic": 1}
    first = plan.bwd(packed=True, **arguments)
    last = plan.bwd(packed=True, launch=(0, 1, 1), **arguments)
    assert (first["per_batch"], first["per_head_k"], first["per_group"]) == (0, 1, 1)
    assert (last["batch"], last["nheads"], last["nheads_k"]) == (3, 2, 1)
    assert (last["group_begin"], last["group_end"]) == (1, 2)
    rows, tile = first["seqlen_q_rounded"], first["block_m"] * first["dim_tile"]
    assert last["lse"] - first["lse"] == 2 * rows * 4
    assert last["dq_accum"] - first["dq_accum"] == 2 * first["packing.m_blocks"] * tile * 4
    assert last["q"] - first["q"] == 2 * 64 * 2 and last["k"] - first["k"] == 64 * 2


def test_one_list_per_query_head_takes_a_launch_each(plan: Probe) -> None:
    arguments: dict[str, Any] = {"gradients": "dq dk dv", "mask": tensor((4, 700), BOOL)}
    found = [plan.bwd(packed=True, launch=(0, 0, g), **arguments) for g in range(2)]
    assert found[0]["per_group"] and not found[0]["per_head_k"]
    assert found[0]["dk_accum"] > 0
    assert found[1]["keys.count"] - found[0]["keys.count"] == 4
