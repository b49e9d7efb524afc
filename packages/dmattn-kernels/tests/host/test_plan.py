"""Decisions of the host: tiles, splits, mask and bias kinds, and where arrays lie in the workspace.

The planning code is compiled on its own (conftest.probe), so that neither a GPU nor CUDA is needed.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest

import abi
from abi import FLOAT32, SOME_ADDRESS, tensor
from probe import (
    ARRAYS,
    CUT,
    DB_ACCUM,
    DB_KEY,
    DB_NONE,
    DB_TILE,
    DIRECT,
    GENERAL,
    KEY,
    PLAIN,
    ROW_BLOCK_LISTS,
    SELECTION_LIST,
    SM80,
    SM89,
    TILE,
    WORKSPACE,
    Plan,
    Probe,
    array_bytes,
    mask,
    zeroed_bytes,
)


@pytest.fixture(scope="module")
def plan(probe: ctypes.CDLL) -> Probe:
    return Probe(probe)


# ---------------------------------------------------------------------------------------- forward


def test_nothing_to_do(plan: Probe) -> None:
    assert plan.fwd(batch=0)["is_empty"]
    assert plan.fwd(seqlen_q=0)["is_empty"]
    no_keys = plan.fwd(seqlen_k=0)
    assert no_keys["no_keys"] and not no_keys["is_empty"]
    assert no_keys["workspace_bytes"] == 0


def test_plain_call_needs_no_workspace(plan: Probe) -> None:
    assert plan.fwd(batch=8, seqlen_q=4096, seqlen_k=4096)["workspace_bytes"] == 0


@pytest.mark.parametrize("head_dim, tile", [(8, 64), (64, 64), (72, 128), (128, 128), (136, 256)])
def test_head_dim_tile(plan: Probe, head_dim: int, tile: int) -> None:
    assert plan.fwd(head_dim=head_dim)["dim_tile"] == tile


@pytest.mark.parametrize(
    "given, gathered",
    [
        (mask(2, 4, 1, 128), True),
        (mask(1, 1, 1, 1), True),
        (mask(2, 4, 128, 128), False),
        (mask(1, 1, 128, 1), False),
        (mask(2, 4, 128, 128, stride=(128, 0, 0, 1)), True),  # expanded from one row
        (mask(2, 4, 128, 128, stride=(0, 0, 128, 1)), False),  # expanded over batch and heads
    ],
    ids=["key-only", "one entry", "dense", "rows", "expanded rows", "expanded batch and heads"],
)
def test_mask_kind(plan: Probe, given: abi.Tensor, gathered: bool) -> None:
    found = plan.fwd(mask=given)
    assert found["gathered"] == gathered
    assert (found["keys.idx"] > 0, found["mask.bits"] > 0) == (gathered, not gathered)


def test_expanded_mask_is_packed_once(plan: Probe) -> None:
    found = plan.fwd(mask=mask(2, 4, 128, 128, stride=(0, 0, 128, 1)))
    assert (found["mask.batch"], found["mask.head_ratio"]) == (1, 4)
    assert found["workspace_bytes"] < plan.fwd(mask=mask(2, 4, 128, 128))["workspace_bytes"]


@pytest.mark.parametrize(
    "shape, dtype, stride, key_mask, kind",
    [
        ((2, 4, 1, 128), abi.BFLOAT16, None, False, KEY),
        ((1, 1, 1, 128), FLOAT32, None, True, KEY),
        ((2, 4, 128, 128), abi.BFLOAT16, (128, 0, 0, 1), False, KEY),
        ((2, 2, 128, 128), abi.BFLOAT16, None, False, TILE),
        ((2, 2, 128, 128), abi.BFLOAT16, None, True, TILE),
        ((2, 2, 128, 128), FLOAT32, None, False, DIRECT),
        ((2, 2, 128, 128), abi.BFLOAT16, (1 << 15, 1 << 14, 1, 128), False, DIRECT),
        ((2, 4, 128, 1), abi.BFLOAT16, None, False, DIRECT),
    ],
)
def test_bias_kind(
    plan: Probe,
    shape: tuple[int, ...],
    dtype: int,
    stride: tuple[int, ...] | None,
    key_mask: bool,
    kind: int,
) -> None:
    arguments: dict[str, Any] = {"bias": tensor(shape, dtype, stride)}
    if key_mask:
        arguments["mask"] = mask(2, 1, 1, 128)
    found = plan.fwd(**arguments)
    assert found["bias.kind"] == kind
    assert found["bias.head_ratio"] == 4 // shape[1]
    assert plan.bwd(**arguments)["bias.kind"] == kind


def test_extents_of_one_have_no_stride(plan: Probe) -> None:
    q = tensor((1, 128, 4, 64), stride=(3, 256, 64, 1))
    found = plan.fwd(batch=1, q=q)
    assert found["q_stride.batch"] == 0 and found["vec_q"]


@pytest.mark.parametrize(
    "q, is_vec",
    [
        (tensor((2, 128, 4, 64)), True),
        (tensor((2, 128, 4, 64), data=SOME_ADDRESS + 8), False),
        (tensor((2, 128, 4, 64), stride=(1 << 16, 260, 64, 1)), False),
        (tensor((2, 128, 4, 64), stride=(0, 0, 0, 1)), True),
    ],
)
def test_vector_access(plan: Probe, q: abi.Tensor, is_vec: bool) -> None:
    assert bool(plan.fwd(q=q)["vec_q"]) == is_vec


# Decoding: one query row, 8 heads over 2 kv heads. Query head h is row h % 4 of kv head h // 4.


def test_group_becomes_rows(plan: Probe) -> None:
    found = plan.fwd(seqlen_q=1, seqlen_k=100, nheads=8, is_causal=1)
    assert (found["seqlen_q"], found["nheads"], found["head_ratio"]) == (4, 2, 1)
    assert (found["q_stride.row"], found["q_stride.head"]) == (64, 256)
    assert (found["out_stride.row"], found["out_stride.head"]) == (64, 256)
    assert (found["lse_stride.row"], found["lse_stride.head"]) == (1, 4)
    assert not found["is_causal"]


@pytest.mark.parametrize("heads, packed", [(1, True), (2, True), (8, False)])
def test_group_needs_one_mask(plan: Probe, heads: int, packed: bool) -> None:
    found = plan.fwd(seqlen_q=1, seqlen_k=100, nheads=8, mask=mask(2, heads, 1, 100))
    assert found["gathered"]
    assert found["nheads"] == (2 if packed else 8)
    assert found["keys.head_ratio"] == found["nheads"] // heads


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("dtype", [abi.BFLOAT16, FLOAT32])
def test_bias_follows_the_rows(plan: Probe, heads: int, dtype: int) -> None:
    bias = tensor((2, heads, 1, 100), dtype)
    found = plan.fwd(seqlen_q=1, seqlen_k=100, nheads=8, bias=bias)
    # Element (b, h, j) of the bias has to be found at row g of kv head hk, h = 4 hk + g.
    for b, hk, g, j in itertools.product(range(2), range(2), range(4), (0, 99)):
        address = (
            b * found["bias.batch_stride"]
            + hk // found["bias.head_ratio"] * found["bias.head_stride"]
            + g * found["bias.row_stride"]
            + j * found["bias.col_stride"]
        )
        wanted_head = (4 * hk + g) // (8 // heads)
        assert address == b * bias.stride[0] + wanted_head * bias.stride[1] + j
    per_row = TILE if dtype == abi.BFLOAT16 else DIRECT
    assert found["bias.kind"] == (per_row if heads == 8 else KEY)


def test_multi_head_decoding_is_left_alone(plan: Probe) -> None:
    found = plan.fwd(seqlen_q=1, nheads=2, is_causal=1)
    assert (found["seqlen_q"], found["nheads"]) == (1, 2)
    assert found["decode"] and not found["is_causal"]  # the one row sees every key


def test_few_blocks_are_split(plan: Probe) -> None:
    found = plan.fwd(batch=1, seqlen_q=1, seqlen_k=16384, nheads=8)
    # A block of four warps takes 64 keys a turn, and two turns at least.
    assert found["decode"] and found["num_splits"] == 16384 // 64 // 2
    # Two kv heads: a word each, in which the blocks of the splits are counted.
    assert found["arrivals"] == WORKSPACE and found["out_accum"] - WORKSPACE >= 8 * 2
    rows = found["num_splits"] * 2 * 4
    assert found["lse_accum"] - found["out_accum"] >= rows * 64 * 4
    assert WORKSPACE + found["workspace_bytes"] - found["lse_accum"] >= 2 * rows * 4


@pytest.mark.parametrize(
    "changed, level",
    [
        ({}, PLAIN),
        ({"bias": tensor((2, 2, 1, 100))}, PLAIN),
        ({"mask": mask(2, 2, 1, 100)}, PLAIN),
        ({"num_splits": 128, "seqlen_k": 8192}, PLAIN),
        ({"bias": tensor((2, 8, 1, 100))}, GENERAL),
        ({"softcap": 1.0}, GENERAL),
        ({"head_dim": 56}, CUT),
        ({"head_dim": 96, "bias": tensor((2, 2, 1, 100)), "mask": mask(2, 2, 1, 100)}, CUT),
        ({"head_dim": 136}, GENERAL),
        ({"head_dim": 120, "softcap": 1.0}, GENERAL),
        ({"q": tensor((2, 1, 8, 64), data=SOME_ADDRESS + 2)}, GENERAL),
        ({"k": tensor((2, 100, 2, 64), data=SOME_ADDRESS + 2)}, GENERAL),
        ({"v": tensor((2, 100, 2, 64), data=SOME_ADDRESS + 2)}, GENERAL),
        ({"out": tensor((2, 1, 8, 64), data=SOME_ADDRESS + 2)}, GENERAL),
    ],
)
def test_levels_of_decoding(plan: Probe, changed: dict[str, Any], level: int) -> None:
    found = plan.fwd(**{"seqlen_q": 1, "seqlen_k": 100, "nheads": 8} | changed)
    assert found["decode"] and found["level"] == level


def test_levels_of_caches_and_drafts(plan: Probe) -> None:
    assert plan.cache()["level"] == plan.draft()["level"] == PLAIN
    assert plan.cache(softcap=1.0)["level"] == plan.draft(softcap=1.0)["level"] == GENERAL
    tokens = {
        **{name: tensor((2, 3, 4, 56), abi.BFLOAT16) for name in ("k_new", "v_new")},
        **{name: tensor((2, 3, 8, 56), abi.BFLOAT16) for name in ("q", "out")},
    }
    for found, rows in ((plan.cache, 64), (plan.draft, 72)):
        cache = {x: tensor((2, rows, 4, 56), abi.BFLOAT16) for x in ("k_cache", "v_cache")}
        assert found(**cache, **tokens)["level"] == CUT
        assert found(**cache, **tokens, softcap=1.0)["level"] == GENERAL
    entries = {
        "k_cache": tensor((2, 16384, 4, 64), abi.BFLOAT16),
        "v_cache": tensor((2, 16384, 4, 64), abi.BFLOAT16),
        "score": tensor((2, 4, 16384), abi.FLOAT32),
        "position": tensor((2, 4, 16384), abi.INT32),
    }
    large = plan.cache(sms=528, **entries)
    assert large["num_splits"] > 32 and large["level"] == GENERAL  # more than the lanes of a warp
    odd = tensor((2, 3, 4, 64), abi.BFLOAT16, data=SOME_ADDRESS + 2)
    # A draft's tokens are copied to the rows behind the entries before the kernel reads them.
    assert plan.cache(k_new=odd)["level"] == plan.cache(v_new=odd)["level"] == GENERAL
    assert plan.draft(k_new=odd)["level"] == PLAIN


def test_splits_of_each_block_of_rows_are_counted(plan: Probe) -> None:
    """40 heads share a kv head, which makes three blocks of 16 rows."""
    found = plan.fwd(batch=3, seqlen_q=1, seqlen_k=16384, nheads=80, nheads_k=2)
    assert found["num_splits"] > 1 and found["blocks"] == 3 * 2 * 3 * found["num_splits"]
    assert found["out_accum"] - found["arrivals"] >= 8 * 3 * 2 * 3
    assert not plan.fwd(seqlen_q=1, seqlen_k=64)["arrivals"]


def test_a_step_from_a_cache_counts_heads_too(plan: Probe) -> None:
    """There is a word for each head, whose last block writes the token, and for each sequence.

    Even a single split leaves its results and its lowest entry in the workspace.
    """
    small = plan.cache()
    assert small["num_splits"] == 1 and small["arrivals"] == WORKSPACE
    assert small["out_accum"] - small["arrivals"] >= 8 * (2 * 4 + 2)
    cache = tensor((2, 4096, 4, 64), abi.BFLOAT16)
    entries = {
        "score": tensor((2, 4, 4096), abi.FLOAT32),
        "position": tensor((2, 4, 4096), abi.INT32),
    }
    large = plan.cache(k_cache=cache, v_cache=cache, **entries)
    assert large["num_splits"] > 1 and large["blocks"] == 2 * 4 * large["num_splits"]
    assert large["out_accum"] - large["arrivals"] >= 8 * (2 * 4 + 2)
    for found in (small, large):
        parts = found["num_splits"] * 2 * 4  # of two sequences with 4 kv heads each
        assert found["lse_accum"] - found["out_accum"] >= parts * 2 * 64 * 4  # 2 rows a kv head
        assert found["lowest_entry"] - found["lse_accum"] >= 2 * parts * 2 * 4
        assert found["lowest_v"] - found["lowest_entry"] >= parts * 16
        assert found["lowest_logit"] - found["lowest_v"] >= parts * 64 * 2
        end = WORKSPACE + found["workspace_bytes"]
        assert end - found["lowest_logit"] >= (parts + 2 * 4) * 2 * 4
    assert not plan.cache(q=abi.Tensor(), out=abi.Tensor())["arrivals"]


def test_a_draft_is_rows_of_its_tokens(plan: Probe) -> None:
    small = plan.draft()
    assert (small["seqlen_q"], small["group"], small["heads"]) == (3 * 2, 2, 4)
    assert (small["seqlen_k"], small["entries"]) == (64 + 3, 64)
    assert (small["row_stride"], small["head_stride"], small["token_stride"]) == (64, 128, 512)
    assert small["blocks"] == 2 * 4 and not small["workspace_bytes"]
    assert plan.commit() == {
        "workspace_bytes": 0,
        "tokens": 3,
        "capacity": 64,
        "count_stride": 1,
        "count_is_wide": 1,
    }
    assert not plan.commit(count=tensor((2,), abi.INT32))["count_is_wide"]


@pytest.mark.parametrize(("head_dim", "row_blocks"), [(64, 1), (128, 1), (256, 2)])
def test_the_rows_of_a_draft_share_keys(plan: Probe, head_dim: int, row_blocks: int) -> None:
    """Eight tokens of four heads read keys once, as one block of rows; wide heads have two."""
    rows = {name: tensor((8, 8, 8, head_dim)) for name in ("k_new", "v_new")}
    rows |= {name: tensor((8, 8, 32, head_dim)) for name in ("q", "out")}
    rows |= {name: tensor((8, 2048 + 32, 8, head_dim)) for name in ("k_cache", "v_cache")}
    state = {
        "score": tensor((8, 8, 2048), abi.FLOAT32),
        "position": tensor((8, 8, 2048), abi.INT32),
        "seen": tensor((8,), abi.INT32),
        "score_new": tensor((8, 8, 8), abi.FLOAT32),
        "draft": tensor((8, 8, 8, 4), abi.INT32),
    }
    found = plan.draft(**rows, **state)
    blocks = 8 * 8 * row_blocks
    assert found["blocks"] == blocks * found["num_splits"]
    if row_blocks > 1:  # enough blocks without splits
        assert found["num_splits"] == 1 and not found["workspace_bytes"]
        return
    assert found["num_splits"] > 1
    assert found["arrivals"] == WORKSPACE and found["out_accum"] - WORKSPACE >= 8 * blocks
    partials = found["num_splits"] * 8 * 8 * 32 * (head_dim + 2) * 4
    assert found["workspace_bytes"] >= 8 * blocks + partials


@pytest.mark.parametrize("value", [1, 2, 3, 5, 7, 16, 24, 127, 132, 65535, 65537, 2**30 + 1])
def test_division_by_a_prepared_number(probe: ctypes.CDLL, value: int) -> None:
    last = 2**31 - 1
    near = [k * value + d for k in (0, 1, 2, 1000, last // value) for d in (-1, 0, 1)]
    for n in {*near, *range(100), last, last - 1, 123456789}:
        if 0 <= n <= last:
            assert probe.probe_quotient(ctypes.c_uint32(n), value) == n // value


def test_launch_tags_differ(probe: ctypes.CDLL) -> None:
    """Tags also look random, so that a count from one tag on is not taken for one from another."""
    probe.probe_launch_tag.restype = ctypes.c_uint64
    tags = sorted(probe.probe_launch_tag() for _ in range(1000))
    assert min(b - a for a, b in itertools.pairwise(tags)) > 2**16
    assert tags[0] < 2**58 and tags[-1] > 2**64 - 2**58


def test_many_blocks_are_not_split(plan: Probe) -> None:
    assert plan.fwd(batch=4, seqlen_q=2048, seqlen_k=2048, nheads=16)["num_splits"] == 1


def test_splits_can_be_forced(plan: Probe) -> None:
    assert plan.fwd(seqlen_k=16384, num_splits=3)["num_splits"] == 3
    # No more than tiles: of 128 keys in a plain kernel for head_dim 64, of 64 keys in others.
    assert plan.fwd(seqlen_k=100, num_splits=128)["num_splits"] == 1
    assert plan.fwd(seqlen_k=100, num_splits=128, softcap=1.0)["num_splits"] == 2
    assert plan.fwd(batch=1, seqlen_q=1, seqlen_k=16384, num_splits=1)["num_splits"] == 1


@pytest.mark.parametrize("blocks", [1, 2, 7, 33, 100, 150, 263])
@pytest.mark.parametrize("tiles", [1, 3, 8, 37, 256, 100000])
def test_split_count(probe: ctypes.CDLL, blocks: int, tiles: int) -> None:
    splits = probe.probe_num_splits(ctypes.c_int64(blocks), ctypes.c_int64(264), tiles)
    assert 1 <= splits <= min(128, max(1, tiles // 4))
    if blocks >= 0.8 * 264 or tiles < 8:
        assert splits == 1
    elif tiles >= 256:
        fills = [
            n * blocks / (-(-n * blocks // 264) * 264) for n in range(1, min(128, tiles // 4) + 1)
        ]
        assert fills[splits - 1] >= 0.84 * max(fills)


@pytest.mark.parametrize("causal", [0, 1])
def test_selection_is_used_as_it_is(plan: Probe, causal: int) -> None:
    lists = abi.selection(128, 512, 256, heads=2, causal=bool(causal))
    arguments: dict[str, Any] = {"seqlen_k": 512, "selection": lists, "is_causal": causal}
    for found in (plan.fwd(**arguments), plan.bwd(**arguments)):
        assert found["walk"] == (ROW_BLOCK_LISTS if causal else SELECTION_LIST)
        assert found["keys.idx"] == SOME_ADDRESS
        assert (found["keys.block_rows"], found["keys.head_ratio"]) == (128 * causal, 2)
    assert plan.fwd(**arguments)["workspace_bytes"] == 0


def test_selection_for_one_row_is_a_plain_list(plan: Probe) -> None:
    lists = abi.selection(1, 512, 256, heads=2)
    found = plan.fwd(seqlen_q=1, seqlen_k=512, nheads=8, selection=lists, is_causal=1)
    assert (found["keys.block_rows"], found["is_causal"]) == (0, 0)
    assert (found["seqlen_q"], found["nheads"], found["keys.head_ratio"]) == (4, 2, 1)


def test_splits_count_the_entries_of_a_list(plan: Probe) -> None:
    lists = abi.selection(1, 1 << 20, 256)
    found = plan.fwd(batch=1, seqlen_q=1, seqlen_k=1 << 20, selection=lists, is_causal=1)
    assert found["num_splits"] == 2  # 256 entries are 4 turns of 64


def test_interval_lists_accumulate(plan: Probe) -> None:
    arguments: dict[str, Any] = {"nheads": 8, "nheads_k": 2, "is_causal": 1, "seqlen_k": 512}
    arguments["selection"] = abi.selection(128, 512, 256, heads=2)
    found = plan.bwd(**arguments)
    assert found["walk"] == ROW_BLOCK_LISTS and not found["per_group"]
    assert found["dk_accum"] and found["dv_accum"]
    assert found["schedule"] == found["dk_slots"] == found["dkv_semaphore"] == 0
    ordered = plan.bwd(deterministic=1, **arguments)
    assert ordered["dkv_semaphore"] and not ordered["per_group"]
    with_dbias = plan.bwd(
        gradients="dk dbias", bias=tensor((1, 2, 1, 512)), deterministic=1, **arguments
    )
    assert with_dbias["per_group"]


# --------------------------------------------------------------------------------------- backward


def test_gradients_of_nothing_are_zero(plan: Probe) -> None:
    for extent in ("batch", "seqlen_q", "seqlen_k"):
        arguments: dict[str, Any] = {extent: 0}
        found = plan.bwd(**arguments)
        assert found["zeros"] and found["workspace_bytes"] == 0


def test_only_wanted_gradients_take_memory(plan: Probe) -> None:
    bias = tensor((1, 1, 1, 128))
    assert not plan.bwd(gradients="")["launches"]
    found = plan.bwd(gradients="dbias", bias=bias)
    assert found["launches"]
    assert found["dq_accum"] == found["dk_slots"] == found["dv_slots"] == 0
    assert plan.bwd(gradients="dv")["dq_accum"] == 0
    assert plan.bwd(gradients="dq", deterministic=1)["dq_semaphore"] > 0
    assert plan.bwd(gradients="dv", deterministic=1)["dq_semaphore"] == 0


SHAPES = [
    {"batch": 1, "seqlen_q": 1000, "seqlen_k": 777, "nheads": 4, "nheads_k": 2, "head_dim": 72},
    {"batch": 3, "seqlen_q": 65, "seqlen_k": 4095, "nheads": 6, "nheads_k": 6, "head_dim": 64},
    {"batch": 2, "seqlen_q": 4096, "seqlen_k": 64, "nheads": 8, "nheads_k": 1, "head_dim": 256},
    {"batch": 1, "seqlen_q": 9999, "seqlen_k": 9999, "nheads": 8, "nheads_k": 1, "head_dim": 128},
]


@pytest.mark.parametrize("kernels", [SM80, SM89])
@pytest.mark.parametrize("deterministic", [0, 1])
@pytest.mark.parametrize("kind", ["none", "key", "key per head", "dense", "selection"])
@pytest.mark.parametrize("shape", SHAPES, ids=["gqa", "mha", "mqa", "long mqa"])
def test_arrays_do_not_overlap(
    plan: Probe, shape: dict[str, int], kind: str, deterministic: int, kernels: str
) -> None:
    per_kind = {"key": 1, "key per head": shape["nheads"], "dense": shape["nheads_k"]}
    heads = per_kind.get(kind, 0)
    arguments: dict[str, Any] = dict(shape, deterministic=deterministic, kernels=kernels)
    arguments["bias"] = tensor((1, shape["nheads_k"], 1, shape["seqlen_k"]))
    if kind == "selection":
        if shape["seqlen_q"] > shape["seqlen_k"]:
            pytest.skip("a causal selection has no more rows than keys")
        arguments["is_causal"] = 1
        arguments["selection"] = abi.selection(shape["seqlen_q"], shape["seqlen_k"], 2048)
        arguments["softmax_lse_rest"] = tensor(
            (shape["batch"], shape["nheads"], shape["seqlen_q"]), FLOAT32
        )
    elif kind != "none":
        rows = shape["seqlen_q"] if kind == "dense" else 1
        arguments["mask"] = mask(1, heads, rows, shape["seqlen_k"])
    found = plan.bwd(gradients="dq dk dv dbias", **arguments)
    sizes = array_bytes(found, shape, heads)
    # The lists of a selection are the caller's.
    arrays = [name for name in ARRAYS if found[name] >= WORKSPACE]
    spans = sorted((found[name], found[name] + sizes[name], name) for name in arrays)
    assert spans[0][0] >= WORKSPACE
    assert spans[-1][1] <= WORKSPACE + found["workspace_bytes"]
    for (_, end, name), (begin, _, following) in itertools.pairwise(spans):
        assert end <= begin, f"{name} reaches into {following}"
    assert all(begin % 256 == 0 for begin, _, _ in spans)
    # What starts as zeros is in the cleared part, and nothing else.
    cleared = {"dq_accum", "dq_semaphore", "dkv_semaphore", "dk_accum", "dv_accum", "dbias_cols"}
    if not deterministic:
        cleared |= {"dk_slots", "dv_slots"}
    first, last = found["scratch_zeros"], found["scratch_zeros"] + zeroed_bytes(found)
    for begin, end, name in spans:
        assert (first <= begin and end <= last) == (name in cleared), name


@pytest.mark.parametrize(
    "shape, dtype, kind",
    [
        ((1, 1, 1, 128), abi.BFLOAT16, DB_KEY),
        ((2, 4, 1, 128), FLOAT32, DB_KEY),
        ((2, 4, 128, 128), abi.BFLOAT16, DB_TILE),
        ((2, 4, 128, 128), FLOAT32, DB_TILE),
        ((1, 4, 128, 128), abi.BFLOAT16, DB_ACCUM),
        ((2, 2, 128, 128), FLOAT32, DB_ACCUM),
        ((2, 4, 128, 1), abi.BFLOAT16, DB_NONE),
        ((1, 1, 1, 1), abi.BFLOAT16, DB_NONE),
    ],
)
def test_dbias_kind(plan: Probe, shape: tuple[int, ...], dtype: int, kind: int) -> None:
    found = plan.bwd(gradients="dbias", bias=tensor(shape, dtype))
    assert found["dbias_kind"] == kind
    assert bool(found["dbias_rows_reduced"]) == (kind == DB_NONE)
    assert bool(found["dbias_cols_reduced"]) == (kind == DB_KEY)
    assert found["launches"] == (kind != DB_NONE)
    if kind == DB_ACCUM:
        in_place = dtype == FLOAT32
        assert (found["dbias"] == SOME_ADDRESS) == in_place
        assert found["dbias_zero_bytes"] == (4 * found["dbias_elements"] if in_place else 0)


@pytest.mark.parametrize("arguments, cleared", [({}, False), ({"is_causal": 1}, True)])
def test_dbias_is_cleared_where_tiles_are_skipped(
    plan: Probe, arguments: dict[str, Any], cleared: bool
) -> None:
    found = plan.bwd(gradients="dbias", bias=tensor((2, 4, 128, 128)), **arguments)
    assert found["dbias_zero_bytes"] == (2 * found["dbias_elements"] if cleared else 0)


def test_dbias_of_an_expanded_bias_has_its_shape(plan: Probe) -> None:
    expanded = tensor((2, 4, 128, 128), stride=(0, 0, 128, 1))
    found = plan.bwd(gradients="dbias", bias=expanded)
    assert found["dbias_kind"] == DB_TILE
    assert (found["dbias_head_stride"], found["bias.head_ratio"]) == (128 * 128, 1)


def test_few_tiles_are_split(plan: Probe) -> None:
    found = plan.bwd(batch=1, seqlen_q=8192, seqlen_k=128, nheads=8, nheads_k=2)
    tiles = 2 * -(-128 // found["block_n"])
    assert found["num_splits"] > 4 and tiles * found["num_splits"] <= 4 * 132
    assert found["dk_slots"] and found["dv_slots"]
    assert plan.bwd(batch=8, seqlen_q=4096, seqlen_k=4096, nheads=8)["num_splits"] == 1


def test_deterministic_splits_are_whole_heads(plan: Probe) -> None:
    arguments: dict[str, Any] = {"batch": 1, "seqlen_q": 8192, "seqlen_k": 128, "nheads": 8}
    arguments["gradients"] = "dk dv"  # without dq_accum there is memory for four splits
    assert plan.bwd(deterministic=1, **arguments)["num_splits"] == 4
    lists = mask(1, 1, 1, 128)
    assert plan.bwd(deterministic=1, mask=lists, **arguments)["max_splits"] == 4


def test_one_list_per_query_head_takes_a_launch_each(plan: Probe) -> None:
    arguments: dict[str, Any] = {"nheads": 8, "nheads_k": 2, "mask": mask(2, 8, 1, 128)}
    first = plan.bwd(**arguments)
    assert first["per_group"] and not first["per_batch"] and not first["per_head_k"]
    assert first["dk_accum"] and first["dv_accum"] and not first["dk_slots"]
    for g in range(4):
        launch = plan.bwd(launch=(0, 0, g), **arguments)
        assert (launch["group_begin"], launch["group_end"]) == (g, g + 1)
        assert launch["keys.idx"] == first["keys.idx"]
        assert launch["keys.count"] == first["keys.count"] + 4 * g
    shared = plan.bwd(nheads=8, nheads_k=2, mask=mask(2, 2, 1, 128))
    assert not shared["per_group"] and (shared["group_begin"], shared["group_end"]) == (0, 4)


@pytest.mark.parametrize(
    "bias_batch, bias_heads, per_batch, per_head_k, per_group",
    [
        (1, 8, True, False, False),
        (2, 2, False, False, True),
        (1, 2, True, False, True),
        (2, 1, True, True, True),
        (1, 1, True, True, True),
    ],
)
def test_deterministic_shared_dbias_is_written_once_a_launch(
    plan: Probe,
    bias_batch: int,
    bias_heads: int,
    per_batch: bool,
    per_head_k: bool,
    per_group: bool,
) -> None:
    """Each launch adds to an entry at most once, and together they add all that they should."""
    bias = tensor((bias_batch, bias_heads, 128, 128))
    arguments: dict[str, Any] = {
        "gradients": "dq dk dv dbias",
        "nheads": 8,
        "nheads_k": 2,
        "bias": bias,
        "deterministic": 1,
    }
    first = plan.bwd(**arguments)
    found = tuple(bool(first[name]) for name in ("per_batch", "per_head_k", "per_group"))
    assert found == (per_batch, per_head_k, per_group)
    assert first["dbias_kind"] == DB_ACCUM and first["num_splits"] == 1
    assert not plan.bwd(**(arguments | {"deterministic": 0}))["per_batch"]
    seen = set()
    for b0, hk0, g in itertools.product(
        range(2 if per_batch else 1), range(2 if per_head_k else 1), range(4 if per_group else 1)
    ):
        launch = plan.bwd(launch=(b0, hk0, g), **arguments)
        reached = pairs_of(launch, first, bias)
        entries = [entry for _, entry in reached]
        assert len(set(entries)) == len(entries)
        seen |= {pair for pair, _ in reached}
        for (b, h), entry in reached:
            wanted_b, wanted_h = b % bias_batch, h // (8 // bias_heads)
            assert entry == wanted_b * bias_heads + wanted_h
    assert seen == set(itertools.product(range(2), range(8)))


def pairs_of(launch: Plan, first: Plan, bias: abi.Tensor) -> list[tuple[tuple[int, int], int]]:
    """((batch, query head), index of its 128 x 128 entries in dbias) for all heads of a launch."""
    found = []
    for b, hk in itertools.product(range(launch["batch"]), range(launch["nheads_k"])):
        for g in range(launch["group_begin"], launch["group_end"]):
            h = hk * launch["head_ratio"] + g
            q = launch["q"] + 2 * (b * launch["q_stride.batch"] + h * launch["q_stride.head"])
            pair = divmod((q - SOME_ADDRESS) // 2 // 64, 128 * 8)
            # The row statistics are found at the same pair.
            row = (launch["lse"] - first["lse"]) // 4 // 128 + b * launch["nheads"] + h
            assert row == pair[0] * 8 + pair[1]
            offset = launch["dbias"] - first["dbias"]
            offset += 4 * b * launch["dbias_batch_stride"]
            offset += 4 * (h // launch["bias.head_ratio"]) * launch["dbias_head_stride"]
            # The bias itself is read at the same entry.
            read = launch["bias.ptr"] - SOME_ADDRESS + 2 * b * launch["bias.batch_stride"]
            read += 2 * (h // launch["bias.head_ratio"]) * launch["bias.head_stride"]
            assert read * 2 == offset
            found.append((pair, offset // 4 // (128 * 128)))
    return found
