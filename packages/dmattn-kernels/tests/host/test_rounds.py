"""The rounds of a backward call whose fp32 sums are large beside q, k and v: see BwdRound."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest

import abi
from abi import FLOAT32, SOME_ADDRESS, tensor
from probe import SM80, SM89, Plan, Probe, mask


@pytest.fixture(scope="module")
def plan(probe: ctypes.CDLL) -> Probe:
    return Probe(probe)


LONG = {"batch": 1, "seqlen_q": 16384, "seqlen_k": 16384, "nheads": 16, "head_dim": 128}


@pytest.mark.parametrize("kernels", [SM80, SM89])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("batch, nheads_k", [(1, 1), (1, 2), (1, 4), (1, 16), (4, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["none", "key", "key per head", "selection"])
def test_workspace_stays_below_one_and_a_half_inputs(
    plan: Probe, batch: int, nheads_k: int, kind: str, head_dim: int, kernels: str
) -> None:
    """The scratch of training with a key-only bias, beside inputs, outputs and gradients.

    The log-sum-exp and its rest, which the forward keeps, count as scratch, too.
    """
    # Rounds over interval lists need more rows to keep the GPU busy.
    length = 262144 if kind == "selection" else 16384
    lengths = {"seqlen_q": length, "seqlen_k": length}
    shape = LONG | lengths | {"batch": batch, "nheads_k": nheads_k, "head_dim": head_dim}
    arguments: dict[str, Any] = dict(shape, kernels=kernels, is_causal=1)
    arguments["bias"] = tensor((batch, nheads_k, 1, length))
    arguments["softmax_lse_rest"] = tensor((batch, 16, length), FLOAT32)
    if kind == "selection":
        arguments["selection"] = abi.selection(length, length, 1024)
    elif kind != "none":
        arguments["mask"] = mask(1, 1 if kind == "key" else 16, 1, length)
    found = plan.bwd(gradients="dq dk dv dbias", **arguments)
    inputs = 2 * batch * length * head_dim * (16 + 2 * nheads_k)
    kept = 2 * 4 * batch * 16 * length
    assert found["workspace_bytes"] + kept <= 1.5 * inputs
    if kind == "key" and kernels == SM80 and head_dim == 128:
        assert found["max_tiles"] >= 32  # the tiles of 1024 kept keys


@pytest.mark.parametrize(
    "arguments, round, rounds",
    [
        ({"nheads_k": 16}, (1, 16, 1), 1),
        ({"nheads_k": 4}, (1, 4, 4), 1),
        ({"nheads_k": 2}, (1, 1, 8), 2),
        ({"nheads_k": 1}, (1, 1, 8), 2),
        ({"nheads_k": 1, "batch": 5}, (3, 1, 16), 2),
        ({"nheads_k": 1, "batch": 5, "head_dim": 72}, (2, 1, 16), 3),
        ({"nheads_k": 1, "seqlen_q": 256, "seqlen_k": 256}, (1, 1, 16), 1),
    ],
)
def test_large_sums_take_rounds(
    plan: Probe, arguments: dict[str, Any], round: tuple[int, int, int], rounds: int
) -> None:
    found = plan.bwd(**(LONG | arguments))
    assert tuple(found[f"round.{name}"] for name in ("batches", "heads_k", "groups")) == round
    assert found["rounds"] == rounds


def test_rounds_of_one_kv_head_split_their_rows(plan: Probe) -> None:
    """128 tiles fill 132 SMs badly, so they are split. Sums go on from round to round.

    They are kept in slots if tiles are certain to be split. For a list, whose tiles may be split or
    not, they are kept by key.
    """
    arguments = LONG | {"nheads_k": 1}
    found = plan.bwd(**arguments)
    assert found["num_splits"] == 4 and found["dk_slots"] and not found["dk_accum"]
    found = plan.bwd(**arguments, mask=mask(1, 1, 1, 16384))
    assert found["max_splits"] > 4 and found["dk_accum"] and not found["dk_slots"]
    found = plan.bwd(deterministic=1, **arguments)
    assert found["num_splits"] == 1 and found["dk_accum"] and not found["dk_slots"]


@pytest.mark.parametrize("length, splits", [(16384, 4), (20000, 3), (28000, 2), (30000, 1)])
def test_tiles_are_split_until_they_fill_the_gpu(plan: Probe, length: int, splits: int) -> None:
    found = plan.bwd(
        batch=1, seqlen_q=length, seqlen_k=length, nheads=4, nheads_k=1, head_dim=128, is_causal=1
    )
    assert found["num_splits"] == splits


@pytest.mark.parametrize("nheads, nheads_k, round", [(16, 2, (1, 8)), (16, 1, (1, 8))])
@pytest.mark.parametrize("deterministic", [0, 1])
def test_packed_sequences_share_out_their_heads(
    plan: Probe, nheads: int, nheads_k: int, round: tuple[int, int], deterministic: int
) -> None:
    """Each round has all sequences, since their arrays cannot be cut between sequences."""
    arguments: dict[str, Any] = {"sequences": 5, "total_q": 20000, "total_k": 20000}
    arguments |= {"max_seqlen_q": 9000, "max_seqlen_k": 9000, "head_dim": 128}
    arguments |= {"nheads": nheads, "nheads_k": nheads_k, "deterministic": deterministic}
    arguments["bias"] = tensor((nheads, 20000))
    arguments["gradients"] = "dq dk dv dbias"
    found = [plan.bwd(packed=True, round=i, **arguments) for i in range(2)]
    first, second = found
    assert first["rounds"] == 2
    assert (first["round.heads_k"], first["round.groups"]) == round
    assert first["batch"] == second["batch"] == first["round.batches"] == 5
    assert first["dq.batch"] == 1 and first["dq.nheads"] == 8
    assert second["dq.dq"] - first["dq.dq"] == 2 * 8 * 128
    block_bytes = 4 * first["block_m"] * first["dim_tile"]
    if nheads_k == 1:  # heads are numbered as in the whole call
        assert (second["group_begin"], second["group_end"]) == (8, 16)
        assert first["q"] == second["q"] and first["lse"] == second["lse"]
        shift = first["dq_accum"] - second["dq_accum"]
        assert shift == 8 * first["packing.m_blocks"] * block_bytes
        assert first["dk_accum"] and first["dk_accum"] == second["dk_accum"]
        assert not first["completes_dkv"] and second["completes_dkv"]
    else:
        assert second["q"] - first["q"] == 2 * 8 * 128
        assert second["k"] - first["k"] == second["dk"] - first["dk"] == 2 * 128
        assert second["lse"] - first["lse"] == 4 * 8 * first["seqlen_q_rounded"]
        assert second["dbias_cols"] - first["dbias_cols"] == 4 * 8 * 20000
        assert first["dq_accum"] == second["dq_accum"] and not first["dk_accum"]
    inputs = 2 * 20000 * 128 * (nheads + 2 * nheads_k)
    assert first["workspace_bytes"] <= 1.5 * inputs


@pytest.mark.parametrize("bias_heads", [1, 16])
def test_dense_operands_do_not_count(plan: Probe, bias_heads: int) -> None:
    """A packed mask may be larger than q, k and v: rounds would not make it smaller."""
    shape = LONG | {"nheads_k": 16, "seqlen_q": 8192, "seqlen_k": 8192}
    arguments: dict[str, Any] = dict(shape, mask=mask(1, 16, 8192, 8192))
    arguments["bias"] = tensor((1, bias_heads, 8192, 8192))
    found = plan.bwd(gradients="dq dk dv dbias", **arguments)
    assert found["rounds"] == 1
    assert found["workspace_bytes"] > 2 * 2 * 8192 * 128 * 48


@pytest.mark.parametrize("seqlen_q", [1, 3, 70])
@pytest.mark.parametrize("nheads_k", [1, 8])
def test_many_short_sequences_take_few_rounds(plan: Probe, seqlen_q: int, nheads_k: int) -> None:
    """Their rows are rounded up to whole blocks, which more rounds would not change."""
    found = plan.bwd(batch=9000, seqlen_q=seqlen_q, seqlen_k=50, nheads=8, nheads_k=nheads_k)
    assert 1 < found["rounds"] <= 8


@pytest.mark.parametrize("deterministic", [0, 1])
@pytest.mark.parametrize("nheads, nheads_k", [(16, 4), (8, 2), (4, 1)])
def test_lists_take_rounds_where_tiles_could_not_be_split(
    plan: Probe, nheads: int, nheads_k: int, deterministic: int
) -> None:
    """With four query heads for each kv head one round would fit, but without room for splits."""
    arguments = LONG | {"nheads": nheads, "nheads_k": nheads_k, "deterministic": deterministic}
    arguments["mask"] = mask(1, 1, 1, 16384)
    found = plan.bwd(**arguments)
    if nheads_k == 1 and deterministic:  # rounds of a group's heads would have no splits either
        assert found["rounds"] == 1
        return
    assert found["rounds"] == 2
    # Split, whatever the mask keeps, until its tiles fill 132 SMs.
    wanted = min(132, nheads_k * 16384 // found["block_n"] // 2)
    assert found["max_tiles"] >= wanted and found["max_splits"] >= 4
    assert found["workspace_bytes"] <= 1.5 * 2 * 16384 * 128 * (nheads + 2 * nheads_k)
    # Not where rounds would cost more than they gain.
    short = arguments | {"seqlen_q": 2048, "seqlen_k": 2048, "mask": mask(1, 1, 1, 2048)}
    assert plan.bwd(**short)["rounds"] == 1


IN_ROUNDS = [
    {"batch": 3, "nheads": 16, "nheads_k": 2},
    {"batch": 1, "nheads": 24, "nheads_k": 3},
    {"batch": 1, "nheads": 17, "nheads_k": 1},
    {"batch": 2, "nheads": 16, "nheads_k": 16, "head_dim": 8},
]


def in_rounds_call(shape: dict[str, int], kind: str) -> dict[str, Any]:
    length = 120_000 if kind == "selection" else 5_000
    sizes = {"seqlen_q": length, "seqlen_k": length, "head_dim": 128} | shape
    batch, nheads, nheads_k = sizes["batch"], sizes["nheads"], sizes["nheads_k"]
    bias_shape = (batch, nheads_k, 1, length)
    if kind == "dense":
        bias_shape = (batch, nheads, length, length)
    arguments: dict[str, Any] = dict(sizes, is_causal=1, bias=tensor(bias_shape))
    if kind == "selection":
        arguments["selection"] = abi.selection(length, length, 1024)
    elif kind == "key per head":
        arguments["mask"] = mask(batch, nheads, 1, length)
    return arguments | {"gradients": "dq dk dv dbias"}


@pytest.mark.parametrize("deterministic", [0, 1])
@pytest.mark.parametrize("kind", ["none", "key per head", "dense", "selection"])
@pytest.mark.parametrize(
    "shape", IN_ROUNDS, ids=["batches", "kv heads", "one kv head", "small dim"]
)
def test_rounds_cover_everything_once(
    plan: Probe, shape: dict[str, int], kind: str, deterministic: int
) -> None:
    """Every row of every head is in one launch of one round, its sums in the round's share."""
    arguments = in_rounds_call(shape, kind) | {"deterministic": deterministic}
    first = plan.bwd(**arguments)
    assert first["rounds"] > 1
    ratio = shape["nheads"] // shape["nheads_k"]
    rows_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
    completed = set()
    for i in range(first["rounds"]):
        round = plan.bwd(round=i, **arguments)
        groups = range(round["round.group"], round["round.group"] + round["round.groups"])
        for g in groups if first["per_group"] else groups[:1]:
            launch = plan.bwd(round=i, launch=(0, 0, g), **arguments)
            for b, hk, member in itertools.product(
                range(launch["batch"]),
                range(launch["nheads_k"]),
                range(launch["group_begin"], launch["group_end"]),
            ):
                head = head_of(launch, first, b, hk * ratio + member, arguments)
                assert_sums(launch, first, b, hk * ratio + member, arguments)
                rows = (launch["row_block_begin"], launch["row_blocks"])
                rows_of.setdefault(head, []).append(rows)
                if round["completes_dkv"]:
                    completed.add((head[0], head[1] // ratio))
    assert set(rows_of) == set(itertools.product(range(shape["batch"]), range(shape["nheads"])))
    blocks = -(-arguments["seqlen_q"] // first["keys.block_rows"]) if kind == "selection" else 1
    for parts in rows_of.values():
        ends = [begin + count for begin, count in parts]
        assert [begin for begin, _ in parts] == [0, *ends[:-1]] and ends[-1] == blocks
    assert completed == set(itertools.product(range(shape["batch"]), range(shape["nheads_k"])))


def head_of(launch: Plan, first: Plan, b: int, h: int, call: dict[str, Any]) -> tuple[int, int]:
    """(batch, query head) whose queries, and whose statistics, the launch reads for its (b, h)."""
    q = launch["q"] - SOME_ADDRESS
    q += 2 * (b * launch["q_stride.batch"] + h * launch["q_stride.head"])
    found = divmod(q // 2 // call["head_dim"], call["seqlen_q"] * call["nheads"])
    lse = (launch["lse"] - first["lse"]) // 4 // launch["seqlen_q_rounded"]
    assert lse + b * launch["nheads"] + h == found[0] * call["nheads"] + found[1]
    return found


def assert_sums(launch: Plan, first: Plan, b: int, h: int, call: dict[str, Any]) -> None:
    """The kernel adds to dq within the round's share, and there the conversion reads the rows."""
    bytes_of_block = 4 * first["block_m"] * first["dim_tile"]
    share = first["round.batches"] * first["round.heads_k"] * first["round.groups"]
    shift, unaligned = divmod(launch["dq_accum"] - first["dq_accum"], bytes_of_block)
    first_row = launch["row_block_begin"] * launch["keys.block_rows"]
    block = (b * launch["nheads"] + h) * launch["dq_blocks"] + shift
    block += first_row // launch["block_m"]
    assert unaligned == 0 and 0 <= block < share * first["dq_blocks"]
    converted_b, converted_h = divmod(block // launch["dq_blocks"], launch["dq.nheads"])
    row_bytes = 2 * call["nheads"] * call["head_dim"]
    dq = launch["dq.dq"] - SOME_ADDRESS - first_row * row_bytes
    dq += 2 * converted_h * call["head_dim"] + converted_b * call["seqlen_q"] * row_bytes
    q = launch["q"] - SOME_ADDRESS
    q += 2 * (b * launch["q_stride.batch"] + h * launch["q_stride.head"])
    assert dq == q
