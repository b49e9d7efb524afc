"""Which backward calls the kernels for Hopper compute, and how they are launched."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest

from abi import BFLOAT16, FLOAT32, SOME_ADDRESS, tensor
from probe import ARRAYS, MASK_LIST, SM90, WORKSPACE, Plan, Probe, array_bytes, mask

SMS = 132
LONG: dict[str, Any] = {"seqlen_q": 4096, "seqlen_k": 4096, "nheads": 16, "nheads_k": 16}
REST = {"softmax_lse_rest": tensor((1, 16, 4096), FLOAT32)}
BIAS = {"bias": tensor((1, 16, 4096, 4096), BFLOAT16), **REST}
FP32_BIAS = {"bias": tensor((1, 16, 4096, 4096), FLOAT32), **REST}
KEY_BIAS = {"bias": tensor((1, 16, 1, 4096), FLOAT32), **REST}


def plan_of(
    probe: ctypes.CDLL, gradients: str = "dq dk dv", sms: int = SMS, **arguments: Any
) -> Plan:
    fields: dict[str, Any] = {"batch": 1, "head_dim": 128} | LONG | arguments
    return Probe(probe).bwd(SM90, sms, gradients=gradients, **fields)


@pytest.mark.parametrize(
    "head_dim, arch, block_m",
    [(40, 90, 96), (64, 90, 96), (72, 90, 64), (128, 90, 64), (136, 90, 64), (256, 90, 64)],
)
def test_tiles(probe: ctypes.CDLL, head_dim: int, arch: int, block_m: int) -> None:
    plan = plan_of(probe, head_dim=head_dim)
    assert (plan["arch"], plan["block_m"]) == (arch, block_m)


@pytest.mark.parametrize(
    "arguments",
    [
        {"softcap": 30.0},
        {"deterministic": 1},
        {"is_causal": 1, "nheads_k": 8},
        {"seqlen_q": 4095, "seqlen_k": 5001, "is_causal": 1},
        {"dsoftmax_lse": tensor((1, 16, 4096), FLOAT32)},
        {"deterministic": 1, "seqlen_k": 128},
        {"mask": mask(1, 1, 4096, 4096), "deterministic": 1},
        {"seqlen_q": 500, "seqlen_k": 128},
    ],
    ids=[
        *("softcap", "deterministic", "causal groups", "odd", "dlse"),
        *("few keys, deterministic", "mask, deterministic", "few keys, few rows"),
    ],
)
def test_what_they_compute(probe: ctypes.CDLL, arguments: dict[str, Any]) -> None:
    plan = plan_of(probe, **arguments)
    items = -(-plan["seqlen_k"] // 128) * plan["nheads_k"] * plan["num_splits"]
    assert plan["arch"] == 90 and plan["blocks"] == min(items, SMS)
    # The counter of items starts at zero.
    cleared = plan["scratch_zeros"] + plan["counter_zero_bytes"]
    assert plan["scratch_zeros"] <= plan["work_counter"] < cleared


@pytest.mark.parametrize(
    "arguments",
    [
        {"bias": tensor((1, 1, 1, 4096), FLOAT32)},
        {"mask": mask(1, 1, 4096, 4096), "softcap": 30.0},
        {"k": tensor((1, 4096, 16, 128), stride=(0, 128, 0, 1))},
        {"dout": tensor((1, 4096, 16, 128), stride=(4096 * 2052, 2052, 128, 1))},
        {"softmax_lse_rest": tensor((1, 16, 4096), FLOAT32)},
        {"softmax_scale": -1.0},
        # There are too few tiles, and no memory for the sums of parts of them.
        {"nheads": 1, "nheads_k": 1, "seqlen_q": 262144},
        {"nheads": 1, "nheads_k": 1, "seqlen_q": 524288, "is_causal": 1},
    ],
    ids=[
        *("bias", "mask and softcap"),
        *("expanded", "unaligned", "rest of lse"),
        *("negative scale", "one head", "one head, causal"),
    ],
)
def test_what_others_compute(probe: ctypes.CDLL, arguments: dict[str, Any]) -> None:
    assert plan_of(probe, **arguments)["arch"] == 80


@pytest.mark.parametrize("deterministic", [0, 1])
@pytest.mark.parametrize(
    "arguments, splits",
    [
        # 96 blocks of keys, in one round as there are few keys for the rows. In parts they would
        # take as long.
        ({"seqlen_k": 768}, (1, 1)),
        # 144 blocks in two rounds of 72. By parts almost every SM has three items instead of two.
        ({"seqlen_k": 1025}, (5, 1)),
        # 128 blocks. As there are few keys, the longest take hardly more than the average.
        ({"seqlen_k": 1024, "is_causal": 1}, (1, 1)),
        # 64 blocks, the longest of which take twice the average.
        ({"seqlen_q": 2048, "seqlen_k": 2048, "nheads": 4, "nheads_k": 4, "is_causal": 1}, (3, 1)),
        # 32 blocks, in parts of heads.
        ({"nheads": 8, "nheads_k": 1}, (4, 4)),
        # Parts of rows, too.
        ({"nheads": 2, "nheads_k": 1, "seqlen_q": 2048, "seqlen_k": 2048}, (8, 2)),
    ],
)
def test_few_blocks_of_keys_fall_into_parts(
    probe: ctypes.CDLL, arguments: dict[str, Any], splits: tuple[int, int], deterministic: int
) -> None:
    """Parts are of heads, or, with too few heads and sums in any order, of the rows of a head.

    All parts of a block are added up in one place.
    """
    plan = plan_of(probe, deterministic=deterministic, **arguments)
    assert (plan["arch"], plan["num_splits"]) == (90, splits[deterministic])
    if plan["num_splits"] == 1:
        assert not plan["dk_slots"]
        return
    assert plan["dk_slots"] and plan["dv_slots"] and not plan["dk_accum"]
    tiles = -(-plan["seqlen_k"] // 128) * plan["round.heads_k"]
    assert plan["blocks"] == min(tiles * plan["num_splits"], SMS)
    # The sums start as zeros, and so do the turns that parts take in a fixed order.
    assert plan["dkv_zero_bytes"] >= 2 * 4 * tiles * 128 * 128
    assert bool(plan["dkv_semaphore"]) == bool(deterministic)


@pytest.mark.parametrize(
    "shape, splits",
    [
        # Items of four heads; and of one, where a head has several blocks of rows.
        ((1, 50, 50, 12, 3, 128, 0), 1),
        ((2, 256, 256, 24, 6, 128, 0), 4),
        # Parts of rows, for SMs that would have no item without them.
        ((1, 2048, 256, 20, 20, 72, 0), 3),
        # About as many blocks of keys as SMs: long ones, which are split; and short ones, for which
        # the sums of parts would take longer.
        ((1, 4096, 4096, 4, 4, 64, 1), 2),
        ((1, 1024, 1024, 16, 16, 64, 1), 1),
    ],
)
def test_sums_of_small_calls(
    probe: ctypes.CDLL, shape: tuple[int, int, int, int, int, int, int], splits: int
) -> None:
    """The sums may take 32 MB, whatever the size of the call, so that there is one round."""
    names = ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "head_dim", "is_causal")
    plan = plan_of(probe, **dict(zip(names, shape, strict=True)))
    assert (plan["arch"], plan["rounds"], plan["num_splits"]) == (90, 1, splits)
    assert plan["workspace_bytes"] <= 33 << 20


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
@pytest.mark.parametrize(
    "arguments",
    [
        {"seqlen_q": 4096, "seqlen_k": 77},
        {"seqlen_q": 100, "seqlen_k": 128, "batch": 40},
        {"seqlen_q": 128, "seqlen_k": 128, "is_causal": 1, "batch": 40},
        {"seqlen_q": 65, "seqlen_k": 65, "batch": 400},  # the kernels for few keys take it as well
        {"seqlen_q": 30000, "seqlen_k": 128, "nheads_k": 1, "batch": 8},
    ],
)
def test_keys_of_one_tile_need_no_sums_of_dq(
    probe: ctypes.CDLL, arguments: dict[str, Any], head_dim: int
) -> None:
    """There are no rounds, however many rows there are."""
    plan = plan_of(probe, head_dim=head_dim, **arguments)
    assert (plan["arch"], plan["block_m"], plan["rounds"]) == (90, 64, 1)
    assert plan["dq"] and not plan["dq_accum"] and not plan["dq_zero_bytes"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"seqlen_k": 129},
        {"seqlen_k": 128, "is_causal": 1},  # nobody would write dq of rows that see no key
        {"seqlen_k": 128, "deterministic": 1},
        {"seqlen_k": 128, "softcap": 5.0},
        {"seqlen_k": 128, "gradients": "dk dv"},
        {"seqlen_k": 128, "head_dim": 256},
    ],
)
def test_sums_of_dq(probe: ctypes.CDLL, arguments: dict[str, Any]) -> None:
    plan = plan_of(probe, **arguments)
    assert plan["dq_accum"] and not plan["dq"]


GROUPS: dict[str, Any] = {"batch": 8, "seqlen_q": 2048, "seqlen_k": 2048, "is_causal": 1}
GROUPS |= {"nheads": 32, "nheads_k": 8}
D64 = {"head_dim": 64}
LSE_OF_GROUPS = tensor((8, 32, 2048), FLOAT32)
KEY_BIAS_OF_GROUPS: dict[str, Any] = {
    "bias": tensor((1, 8, 1, 2048)),
    "softmax_lse_rest": LSE_OF_GROUPS,
}


@pytest.mark.parametrize(
    "arguments, is_mirrored",
    [
        ({}, 1),
        ({"head_dim": 64}, 1),
        ({"seqlen_q": 2100}, 1),
        ({"seqlen_q": 2000}, 0),  # all rows see the first keys
        ({"batch": 2, "seqlen_q": 8192, "seqlen_k": 8192, "nheads": 28, "nheads_k": 4}, 1),
        # 11 blocks of keys, the middle one of which is alone: 396 pairs, three for each SM.
        ({"batch": 3, "seqlen_k": 1400, "nheads": 44, "nheads_k": 22}, 1),
        ({"batch": 3, "seqlen_k": 1152, "nheads": 44, "nheads_k": 22}, 0),  # 9 blocks
        ({"is_causal": 0}, 0),
        ({"nheads_k": 32}, 0),
        ({"batch": 5}, 0),  # 320 pairs: half of the SMs have no third one, and wait for the others
        # All rows stay in L2; twice as many do not.
        ({"batch": 32, "seqlen_q": 256, "seqlen_k": 256, "nheads": 8, "nheads_k": 4} | D64, 0),
        ({"batch": 64, "seqlen_q": 256, "seqlen_k": 256, "nheads": 8, "nheads_k": 4} | D64, 1),
        # The calls of attention/test_groups.py.
        ({"batch": 66, "seqlen_q": 512, "seqlen_k": 512, "nheads": 12, "nheads_k": 4}, 1),
        ({"seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 64}, 1),
        ({"seqlen_q": 1100, "seqlen_k": 1024}, 1),
        ({"batch": 11, "seqlen_q": 1024, "seqlen_k": 700, "nheads": 48, "nheads_k": 24}, 1),
        ({"batch": 3, "seqlen_q": 1400, "seqlen_k": 1400, "nheads": 44, "nheads_k": 22}, 1),
        ({"seqlen_q": 1920, "seqlen_k": 1920, "nheads": 20, "nheads_k": 4, "head_dim": 40}, 1),
        ({"softcap": 30.0}, 0),
        ({"head_dim": 256}, 0),
        ({"deterministic": 1}, 0),
        (KEY_BIAS_OF_GROUPS, 1),
        (KEY_BIAS_OF_GROUPS | {"head_dim": 64}, 1),
        (KEY_BIAS_OF_GROUPS | {"bias": tensor((1, 32, 1, 2048))}, 0),  # each head is a part
        (KEY_BIAS_OF_GROUPS | {"mask": mask(1, 1, 2048, 2048)}, 0),
        (KEY_BIAS_OF_GROUPS | {"deterministic": 1}, 0),
        ({"bias": tensor((1, 8, 2048, 2048)), "softmax_lse_rest": LSE_OF_GROUPS}, 0),
    ],
)
def test_items_of_groups_are_taken_two_by_two(
    probe: ctypes.CDLL, arguments: dict[str, Any], is_mirrored: int
) -> None:
    """Under causality, where all pairs take the same time, which keeps thread blocks in step."""
    plan = plan_of(probe, **(GROUPS | arguments))
    assert plan["mirrors_items"] == is_mirrored
    if is_mirrored:
        assert plan["num_splits"] == 1 and plan["arch"] == 90 and plan["blocks"] == SMS


@pytest.mark.parametrize("deterministic", [0, 1])
@pytest.mark.parametrize(
    "nheads, heads, splits, head_dim",
    [
        *((16, 8, 8, head_dim) for head_dim in (64, 128)),
        *((8, 4, 4, head_dim) for head_dim in (64, 128)),
        *((71, 36, 18, 64), (71, 36, 12, 128)),  # parts of two heads, or three
    ],
)
def test_rounds_of_the_heads_of_a_group(
    probe: ctypes.CDLL, nheads: int, heads: int, splits: int, head_dim: int, deterministic: int
) -> None:
    """dk and dv are summed from round to round; the sums of dq have room for one round's heads.

    In a fixed order an item takes its heads side by side, and may have several.
    """
    call = {"nheads": nheads, "nheads_k": 1, "seqlen_q": 16384, "seqlen_k": 16384}
    call |= {"head_dim": head_dim, "deterministic": deterministic, "is_causal": 1}
    first, second = (plan_of(probe, round=i, **call) for i in range(2))
    assert first["arch"] == 90 and first["rounds"] == 2
    assert first["num_splits"] == (2 if deterministic else splits)
    assert (first["group_begin"], first["group_end"]) == (0, heads)
    assert (second["group_begin"], second["group_end"]) == (heads, nheads)
    assert first["dk_slots"] == second["dk_slots"] and first["dv_slots"] == second["dv_slots"]
    assert not first["completes_dkv"] and second["completes_dkv"]
    block = 4 * first["block_m"] * first["dim_tile"]
    assert first["dq_accum"] - second["dq_accum"] == heads * first["dq_blocks"] * block
    inputs = 2 * 16384 * head_dim * (nheads + 2)
    assert first["workspace_bytes"] + 4 * nheads * 16384 <= 1.5 * inputs


@pytest.mark.parametrize("sms", [40, 60, 132])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_parts_in_a_fixed_order_are_of_whole_heads(
    probe: ctypes.CDLL, head_dim: int, sms: int
) -> None:
    """That holds in the last round of a group, too, which may have fewer heads.

    Parts of the rows of a head could wait for items behind them where work is done in sections.
    """
    uneven = 0
    for nheads, length in itertools.product((3, 5, 7, 9, 11, 13, 15, 71), (4096, 16384)):
        call: dict[str, Any] = {"nheads": nheads, "nheads_k": 1, "head_dim": head_dim}
        call |= {"seqlen_q": length, "seqlen_k": length, "deterministic": 1, "is_causal": 1}
        first = plan_of(probe, sms=sms, **call)
        for round in range(first["rounds"]):
            plan = plan_of(probe, sms=sms, round=round, **call)
            heads = plan["group_end"] - plan["group_begin"]
            assert 1 <= plan["num_splits"] <= max(heads, first["num_splits"])
            assert plan["arch"] == 80 or plan["num_splits"] <= heads
            uneven += plan["arch"] == 90 and heads < first["num_splits"]
            tiles = -(-length // 128)
            assert plan["arch"] == 80 or plan["blocks"] == min(tiles * plan["num_splits"], sms)
    assert uneven > 0 or (head_dim, sms) != (128, 132)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "arguments, heads",
    [
        ({"mask": mask(1, 1, 4096, 4096)}, 1),
        ({"mask": mask(2, 4, 4096, 4096), "is_causal": 1}, 4),
        ({"mask": mask(2, 16, 4096, 4096)}, 16),
        ({"mask": mask(1, 4, 4096, 1)}, 4),
        ({"mask": mask(2, 16, 4096, 4096, stride=(0, 0, 4096, 1))}, 1),
        ({"mask": mask(1, 1, 1000, 4095), "seqlen_q": 1000, "seqlen_k": 4095}, 1),
    ],
    ids=["one for all", "of groups, causal", "of heads", "of rows", "expanded", "odd"],
)
def test_dense_masks(
    probe: ctypes.CDLL, arguments: dict[str, Any], heads: int, head_dim: int
) -> None:
    """Blocks have 64 rows, for which the packed mask has states."""
    plan = plan_of(probe, batch=2, nheads_k=4, head_dim=head_dim, **arguments)
    assert (plan["arch"], plan["block_m"], plan["block_n"]) == (90, 64, 128)
    assert plan["mask.bits"] and plan["mask.head_ratio"] == 16 // heads
    assert plan["lse_scale"] > 1 and plan["rest_scale"] == 1


@pytest.mark.parametrize("seqlen, heads, heads_k, head_dim", [(4096, 16, 4, 128), (8192, 8, 2, 64)])
def test_memory_of_masked_keys(
    probe: ctypes.CDLL, seqlen: int, heads: int, heads_k: int, head_dim: int
) -> None:
    """With the sums over the lists of a key mask the workspace stays below 1.5 times q, k and v."""
    sizes = {"batch": 1, "nheads": heads, "nheads_k": heads_k}
    sizes |= {"seqlen_q": seqlen, "seqlen_k": seqlen}
    found = {"mask": mask(1, 1, 1, seqlen), "gradients": "dq dk dv", "head_dim": head_dim, **sizes}
    plan = Probe(probe).bwd(SM90, SMS, is_causal=1, **found)
    assert plan["arch"] == 90 and plan["walk"] == MASK_LIST
    assert plan["workspace_bytes"] < 1.5 * 2 * seqlen * head_dim * (heads + 2 * heads_k)


PACKED: dict[str, Any] = {"packed": True, "sequences": 20, "nheads": 4, "nheads_k": 2}
PACKED |= {"total_q": 9000, "max_seqlen_q": 3000, "total_k": 8000, "max_seqlen_k": 2500}
ONE_LENGTH = {"sequences": 4, "total_q": 8192, "max_seqlen_q": 2048, "total_k": 8192}
ONE_LENGTH |= {"max_seqlen_k": 2048}


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("head_dim", [40, 64, 72, 128, 136, 256])
def test_packed_sequences(probe: ctypes.CDLL, head_dim: int, causal: int) -> None:
    """Blocks have 64 rows; the statistics of sequences have a pitch of 128 rows."""
    plan = Probe(probe).bwd(SM90, SMS, head_dim=head_dim, is_causal=causal, **PACKED)
    assert (plan["arch"], plan["block_m"]) == (90, 64)
    assert plan["blocks"] == SMS and plan["block_n"] == 128 and plan["num_splits"] == 1
    assert plan["dq_blocks"] == plan["packing.m_blocks"] == 9000 // 64 + 20
    assert plan["seqlen_q_rounded"] == (9000 // 128 + 20) * 128
    assert plan["lse_scale"] > 1


@pytest.mark.parametrize(
    "arguments, is_mirrored",
    [
        ({}, 1),
        ({"is_causal": 0}, 0),
        ({"nheads_k": 32}, 0),
        ({"nheads": 8, "nheads_k": 4}, 0),  # fewer than four pairs of blocks of keys for each SM
        ({"total_q": 8000}, 0),  # the first keys may be seen by all rows
        # Lengths that are all alike, as those of a batch.
        (ONE_LENGTH | {"nheads": 12, "nheads_k": 4}, 1),
        (ONE_LENGTH | {"nheads": 10, "nheads_k": 5}, 0),  # 160 pairs for 132 SMs
        (ONE_LENGTH | {"nheads": 16, "nheads_k": 4}, 1),
    ],
)
def test_packed_groups_are_taken_two_by_two(
    probe: ctypes.CDLL, arguments: dict[str, Any], is_mirrored: int
) -> None:
    fields = PACKED | {"nheads": 32, "nheads_k": 16, "total_k": 8448, "is_causal": 1} | arguments
    plan = Probe(probe).bwd(SM90, SMS, head_dim=64, gradients="dq dk dv", **fields)
    assert plan["arch"] == 90 and plan["mirrors_items"] == is_mirrored
    assert not plan["dq_semaphore"]


@pytest.mark.parametrize(
    "arguments, takes_turns",
    [
        ({}, 1),
        ({"total_q": 8000}, 1),
        ({"softcap": 30.0}, 1),
        ({"is_causal": 0}, 0),
        ({"nheads_k": 16}, 0),
        ({"nheads_k": 1}, 1),
        ({"head_dim": 64}, 0),
        ({"head_dim": 64, "nheads_k": 4}, 1),
        ({"head_dim": 256}, 0),
        (ONE_LENGTH, 0),
        ({"total_q": 1500, "total_k": 1500}, 0),  # what is read and added to stays in L2
    ],
)
def test_packed_groups_take_turns(
    probe: ctypes.CDLL, arguments: dict[str, Any], takes_turns: int
) -> None:
    """They take turns at dq if lengths are unequal, even if sums may be in any order."""
    fields = PACKED | {"nheads": 16, "nheads_k": 8, "is_causal": 1, "head_dim": 128} | arguments
    plan = Probe(probe).bwd(SM90, SMS, gradients="dq dk dv", **fields)
    assert plan["arch"] == 90 and bool(plan["dq_semaphore"]) == bool(takes_turns)
    assert not (plan["mirrors_items"] and plan["dq_semaphore"])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [0, 1])
def test_packed_sequences_of_one_head_of_keys(
    probe: ctypes.CDLL, head_dim: int, deterministic: int
) -> None:
    """The sums of dq take rounds, each of some heads of the group, which add to dk and dv."""
    heads = {"nheads": 8, "nheads_k": 1, "head_dim": head_dim, "deterministic": deterministic}
    many = {"total_q": 36000, "total_k": 32000}
    plan = Probe(probe).bwd(SM90, SMS, gradients="dq dk dv", **(PACKED | many | heads))
    assert plan["arch"] == 90 and plan["round.groups"] < 8
    assert plan["dk_accum"] and plan["dv_accum"] and not plan["dk_slots"]


def test_few_packed_sequences(probe: ctypes.CDLL) -> None:
    """Hopper's kernels take them although they do not split rows: others do not, either."""
    sizes = {"sequences": 1, "total_q": 1000, "max_seqlen_q": 1000}
    sizes |= {"total_k": 100, "max_seqlen_k": 100}
    plan = Probe(probe).bwd(SM90, SMS, head_dim=128, **(PACKED | sizes))
    assert plan["arch"] == 90 and plan["blocks"] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        {"softmax_scale": -1.0},
        {"softcap": 30.0, "bias": tensor((4, 8000))},
        {"bias": tensor((4, 8000))},
        {"mask": mask(2, 9000, 2500)},
        {"dout": tensor((9000, 4, 128), stride=(516, 128, 1))},
        {"softmax_lse_rest": tensor((4, 9000), FLOAT32)},
        {"v": tensor((8000, 2, 128), stride=(128, 0, 1))},
        {"v": tensor((8000, 2, 128), stride=(1 << 33, 128, 1))},
    ],
    ids=[
        *("negative scale", "softcap and bias", "bias", "mask"),
        *("unaligned", "rest of lse", "expanded", "far rows"),
    ],
)
def test_packed_sequences_that_others_compute(
    probe: ctypes.CDLL, arguments: dict[str, Any]
) -> None:
    fields = {"gradients": "dq dk dv"} | PACKED | arguments
    assert Probe(probe).bwd(SM90, SMS, head_dim=128, **fields)["arch"] == 80


@pytest.mark.parametrize("head_dim", [40, 128, 136, 192, 256])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("deterministic", [0, 1])
def test_packed_sequences_in_any_order_and_capped(
    probe: ctypes.CDLL, head_dim: int, softcap: float, deterministic: int
) -> None:
    fields = {"head_dim": head_dim, "softcap": softcap, "deterministic": deterministic}
    plan = Probe(probe).bwd(SM90, SMS, gradients="dq dk dv", **(PACKED | fields))
    assert (plan["arch"], plan["block_m"], plan["block_n"]) == (90, 64, 128)
    assert plan["num_splits"] == 1 and bool(plan["dq_semaphore"]) == bool(deterministic)


@pytest.mark.parametrize(
    "head_dim, sequences, arch", [(256, 1024, 90), (256, 1025, 80), (128, 9000, 90)]
)
def test_boundaries_that_each_cluster_looks_at(
    probe: ctypes.CDLL, head_dim: int, sequences: int, arch: int
) -> None:
    """Wide heads over very many sequences in a fixed order are left to the sm80 code."""
    fields = PACKED | {"sequences": sequences, "head_dim": head_dim, "deterministic": 1}
    assert Probe(probe).bwd(SM90, SMS, gradients="dq dk dv", **fields)["arch"] == arch


@pytest.mark.parametrize("head_dim", [136, 192, 256])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": 1, "nheads_k": 4, "seqlen_q": 16384, "seqlen_k": 16384},
        {"seqlen_q": 500, "seqlen_k": 1, "nheads_k": 2},
        # 120 blocks of keys, each for two thread blocks.
        {"seqlen_q": 1920, "seqlen_k": 1920, "nheads": 8, "nheads_k": 8, "is_causal": 1},
        {"softcap": 30.0, "is_causal": 1, "nheads_k": 4},
        {"deterministic": 1},
        {"softcap": 30.0, "deterministic": 1, "seqlen_k": 100},
        {"mask": mask(1, 1, 4096, 4096)},
        BIAS,
        {**FP32_BIAS, "mask": mask(1, 16, 4096, 4096)},
        {**KEY_BIAS, "mask": mask(1, 1, 4096, 4096)},
        {"mask": mask(1, 1, 4096, 4096), "deterministic": 1},
        {**BIAS, "deterministic": 1, "is_causal": 1},
    ],
    ids=[
        *("plain", "causal groups", "few keys, few rows", "no more than fill the GPU", "softcap"),
        *("deterministic", "softcap, deterministic"),
        *("mask", "bias", "fp32 bias and mask", "key bias and mask"),
        *("mask, deterministic", "bias, deterministic"),
    ],
)
def test_wide_heads(probe: ctypes.CDLL, arguments: dict[str, Any], head_dim: int) -> None:
    """Two thread blocks share 128 keys; the sums of dq lie as the consumers of both leave them."""
    plan = plan_of(probe, head_dim=head_dim, **arguments)
    assert (plan["arch"], plan["block_m"], plan["block_n"]) == (90, 64, 128)
    assert (plan["lse_scale"] > 1) == ("bias" not in arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dout": tensor((1, 4096, 16, 256), stride=(4096 * 4100, 4100, 256, 1))},
        {"softcap": 30.0, "mask": mask(1, 1, 4096, 4096)},
        {"softcap": 30.0, "bias": tensor((1, 16, 1, 4096), FLOAT32)},
        {"softcap": 30.0, "softmax_scale": -1.0},
    ],
    ids=[
        "unaligned",
        *("softcap and mask", "softcap and bias", "softcap, negative scale"),
    ],
)
def test_wide_heads_that_others_compute(probe: ctypes.CDLL, arguments: dict[str, Any]) -> None:
    assert plan_of(probe, head_dim=256, **arguments)["arch"] == 80


@pytest.mark.parametrize("seqlen_q, pitch", [(90, 128), (97, 256), (193, 384), (4096, 4224)])
def test_statistics_have_whole_blocks_of_rows(
    probe: ctypes.CDLL, seqlen_q: int, pitch: int
) -> None:
    """Blocks of 96 rows end past the multiple of 128 that other kernels need."""
    plan = plan_of(probe, head_dim=64, seqlen_q=seqlen_q)
    assert plan["arch"] == 90 and plan["seqlen_q_rounded"] == pitch


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("batch, nheads_k", [(1, 1), (1, 2), (1, 4), (1, 16), (4, 1), (2, 2)])
@pytest.mark.parametrize("deterministic", [0, 1])
def test_workspace_stays_below_one_and_a_half_inputs(
    probe: ctypes.CDLL, batch: int, nheads_k: int, head_dim: int, deterministic: int
) -> None:
    """The limit includes the log-sum-exp that the forward keeps."""
    length = 16384
    shape = {"batch": batch, "nheads_k": nheads_k, "head_dim": head_dim}
    lengths = {"seqlen_q": length, "seqlen_k": length}
    plan = plan_of(probe, is_causal=1, deterministic=deterministic, **shape, **lengths)
    inputs = 2 * batch * length * head_dim * (16 + 2 * nheads_k)
    assert plan["workspace_bytes"] + 4 * batch * 16 * length <= 1.5 * inputs
    assert plan["arch"] == 90


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("nheads, nheads_k, length", [(16, 4, 5000), (16, 16, 3000), (8, 1, 200)])
def test_arrays_do_not_overlap(
    probe: ctypes.CDLL, nheads: int, nheads_k: int, length: int, head_dim: int
) -> None:
    shape = {"batch": 2, "seqlen_q": length, "seqlen_k": length, "nheads": nheads}
    shape |= {"nheads_k": nheads_k, "head_dim": head_dim}
    found = plan_of(probe, deterministic=1, **shape)
    assert found["arch"] == 90
    sizes = array_bytes(found, shape, 0)
    elsewhere = ("dk_slots", "dv_slots") if found["dq_slot_bytes"] else ()
    names = [name for name in ARRAYS if found[name] and name not in elsewhere]
    spans = sorted((found[name], found[name] + sizes[name]) for name in names)
    assert spans[0][0] >= WORKSPACE and spans[-1][1] <= WORKSPACE + found["workspace_bytes"]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert bool(found["dk_slots"]) == (found["num_splits"] > 1)


FOUR_HEADS = {"batch": 1, "nheads": 16, "nheads_k": 4, "head_dim": 128}
FOUR_HEADS |= {"seqlen_q": 4096, "seqlen_k": 4096, "is_causal": 1}


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"batch": 3, "seqlen_q": 512, "seqlen_k": 512},
        {"head_dim": 256, "seqlen_q": 1024, "seqlen_k": 1024},
        {"deterministic": 1},
    ],
)
def test_sums_of_parts_lie_where_dq_will_be(
    probe: ctypes.CDLL, shape: dict[str, int], heads_first: bool
) -> None:
    """dq is written after they have been rounded. So four heads of a group need no rounds."""
    call = FOUR_HEADS | shape
    batch, rows, heads, size = (call[x] for x in ("batch", "seqlen_q", "nheads", "head_dim"))
    strides = (heads * rows * size, size, rows * size, 1) if heads_first else None
    dq = tensor((batch, rows, heads, size), BFLOAT16, strides)
    plan = plan_of(probe, dq=dq, **call)
    assert (plan["arch"], plan["rounds"]) == (90, 1) and plan["num_splits"] > 1
    tiles = batch * call["nheads_k"] * -(-call["seqlen_k"] // plan["block_n"])
    slots = tiles * plan["block_n"] * plan["dim_tile"] * 4  # of dk, and of dv
    assert plan["dq_slot_bytes"] == 2 * slots <= 2 * batch * rows * heads * size
    assert plan["dk_slots"] == plan["dq.dq"] and plan["dv_slots"] == plan["dq.dq"] + slots
    inputs = 2 * batch * rows * size * (heads + 2 * call["nheads_k"])
    assert plan["workspace_bytes"] + 4 * batch * heads * rows <= 1.5 * inputs
    assert plan["dkv_zero_bytes"] == 0


@pytest.mark.parametrize(
    "shape, pitch, address",
    [
        ({"nheads_k": 8}, 16, SOME_ADDRESS),  # dk and dv in fp32 take twice the bytes of dq
        ({}, 17, SOME_ADDRESS),  # rows with gaps, in which others may write
        ({}, 16, SOME_ADDRESS + 2),
    ],
)
def test_where_dq_has_no_room_for_sums_of_parts(
    probe: ctypes.CDLL, shape: dict[str, int], pitch: int, address: int
) -> None:
    call = FOUR_HEADS | {"seqlen_q": 1024, "seqlen_k": 1024} | shape
    stride = (1024 * pitch * 128, pitch * 128, 128, 1)
    plan = plan_of(probe, dq=tensor((1, 1024, 16, 128), BFLOAT16, stride, address), **call)
    assert plan["dq_slot_bytes"] == 0
    assert plan["num_splits"] == 1 or plan["dk_slots"] >= WORKSPACE


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [0, 1])
def test_size_without_pointers(probe: ctypes.CDLL, causal: int, head_dim: int) -> None:
    """The size is asked for before tensors have memory, and has to suffice for the launch."""
    for length, heads, batch in itertools.product(
        (300, 1024, 4096, 9000), ((8, 2), (16, 4), (32, 4), (8, 8)), (1, 3)
    ):
        call = {"batch": batch, "nheads": heads[0], "nheads_k": heads[1], "head_dim": head_dim}
        call |= {"seqlen_q": length, "seqlen_k": length, "is_causal": causal}
        size = Probe(probe).bwd_size(SM90, SMS, **call)
        assert size == plan_of(probe, **call)["workspace_bytes"]
