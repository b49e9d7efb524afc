"""Few query rows of the heads of a group: when they read keys together, and by which kernel."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest

import abi
from abi import tensor
from probe import PLAIN, SM80, SM90, Plan, Probe, mask


@pytest.fixture(scope="module")
def plan(probe: ctypes.CDLL) -> Probe:
    return Probe(probe)


def few_rows(plan: Probe, **arguments: Any) -> Plan:
    """The plan of a forward over 2 sequences of 4096 keys."""
    return plan.fwd(**{"batch": 2, "seqlen_k": 4096, "nheads_k": 2} | arguments)


@pytest.mark.parametrize("seqlen_q, nheads, head_dim", [(2, 8, 64), (8, 16, 128), (4, 8, 256)])
@pytest.mark.parametrize("causal", [0, 1])
def test_tokens_of_a_group_are_rows_of_the_decode_kernel(
    plan: Probe, seqlen_q: int, nheads: int, head_dim: int, causal: int
) -> None:
    shape = {"seqlen_q": seqlen_q, "nheads": nheads, "head_dim": head_dim}
    found = few_rows(plan, **shape, is_causal=causal)
    group = nheads // 2
    assert found["decode"] and found["is_causal"] == causal and found["level"] == PLAIN
    assert (found["token_rows.count"], found["token_rows.group"]) == (seqlen_q, group)
    assert (found["nheads"], found["seqlen_q"]) == (2, seqlen_q * group)
    # Head hk * group + g of token t, as the kernel finds it.
    q, out = (tensor((2, seqlen_q, nheads, head_dim)) for _ in range(2))
    lse = tensor((2, nheads, seqlen_q), abi.FLOAT32)
    for hk, g, t in itertools.product(range(2), range(group), range(seqlen_q)):
        for name, token, stride in (
            ("q", "q_token", (q.stride[1], q.stride[2])),
            ("out", "out_token", (out.stride[1], out.stride[2])),
            ("lse", "lse_token", (lse.stride[2], lse.stride[1])),
        ):
            by_head, by_row = found[f"{name}_stride.head"], found[f"{name}_stride.row"]
            place = hk * by_head + g * by_row + t * found[f"token_rows.{token}"]
            assert place == t * stride[0] + (hk * group + g) * stride[1]
    # There are one or two blocks of rows; in a word for each the blocks of its splits are counted.
    blocks = -(-seqlen_q * group // (16 if head_dim == 256 else 32))
    assert found["blocks"] == 2 * 2 * blocks * found["num_splits"]
    assert found["out_accum"] - found["arrivals"] >= 8 * 2 * 2 * blocks


@pytest.mark.parametrize(
    "changed, group",
    [
        ({}, 4),
        ({"mask": mask(2, 2, 1, 4096), "bias": tensor((2, 2, 1, 4096))}, 4),
        # With a mask or a bias of each query head, heads do not share keys.
        ({"mask": mask(2, 8, 1, 4096)}, 1),
        ({"bias": tensor((2, 8, 1, 4096))}, 1),
        ({"nheads": 2, "seqlen_q": 16}, 1),
        # More rows than may read keys together.
        ({"seqlen_q": 17}, 0),
        ({"nheads": 2, "seqlen_q": 17}, 0),
        ({"seqlen_q": 9, "head_dim": 256}, 0),
        # Rows that differ in more than what causality hides from them.
        ({"mask": mask(2, 1, 8, 4096)}, 0),
        ({"bias": tensor((2, 8, 8, 4096))}, 0),
    ],
)
def test_which_few_rows_decode(plan: Probe, changed: dict[str, Any], group: int) -> None:
    arguments = {"seqlen_q": 8, "nheads": 8, "is_causal": 1} | changed
    found = few_rows(plan, **arguments)
    assert found["decode"] == (group > 0)
    if group > 0:
        assert found["token_rows.group"] == group
        assert found["token_rows.count"] == arguments["seqlen_q"]
        assert found["head_ratio"] == (arguments["nheads"] // 2 if group == 1 else 1)


@pytest.mark.parametrize(
    "batch, nheads_k, seqlen_k, decode",
    [(1, 1, 2048, False), (1, 2, 2048, True), (2, 1, 2048, True), (32, 1, 65536, True)],
)
def test_two_blocks_of_rows_want_keys_enough(
    plan: Probe, batch: int, nheads_k: int, seqlen_k: int, decode: bool
) -> None:
    shape = {"batch": batch, "nheads_k": nheads_k, "seqlen_k": seqlen_k, "nheads": 8 * nheads_k}
    assert few_rows(plan, **shape, seqlen_q=8, head_dim=128)["decode"] == decode
    assert few_rows(plan, **shape, seqlen_q=4, head_dim=128)["decode"]


@pytest.mark.parametrize(
    "seqlen_q, group, packs",
    [
        (33, 4, True),
        (40, 3, True),
        (96, 8, True),  # 6 blocks of rows instead of 8
        (128, 4, False),  # as many
        (100, 4, False),
        (65, 1, False),
    ],
)
def test_rows_of_a_group_go_together_where_they_fill_fewer_blocks(
    plan: Probe, seqlen_q: int, group: int, packs: bool
) -> None:
    shape = {"batch": 1, "seqlen_q": seqlen_q, "seqlen_k": 16384, "nheads_k": 2}
    found = plan.fwd(**shape, nheads=2 * group, head_dim=128, is_causal=1)
    assert not found["decode"] and found["is_causal"] and found["level"] == PLAIN
    tokens, rows = (seqlen_q, seqlen_q * group) if packs else (1, seqlen_q)
    assert found["token_rows.count"] == tokens
    assert (found["seqlen_q"], found["nheads"]) == (rows, 2 if packs else 2 * group)
    blocks = -(-rows // found["block_m"]) * found["nheads"]
    assert found["blocks"] == blocks * found["num_splits"] and found["num_splits"] > 1


@pytest.mark.parametrize("kernels", [SM80, SM90])
@pytest.mark.parametrize("seqlen_q", [1 << 21, 1 << 22])
def test_rows_of_a_group_are_no_more_than_32_bits_count(
    plan: Probe, kernels: str, seqlen_q: int
) -> None:
    shape = {"batch": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_q, "nheads": 1024, "nheads_k": 1}
    found = plan.fwd(kernels, **shape, head_dim=8)
    assert (found["seqlen_q"], found["nheads"], found["token_rows.count"]) == (seqlen_q, 1024, 1)
    assert found["blocks"] > 0 and found["workspace_bytes"] < 1 << 20


@pytest.mark.parametrize(
    "batch, seqlen_q, nheads, nheads_k, head_dim, seqlen_k, decode",
    [
        # More rows than a block of the decode kernel has, of few heads over many keys ...
        (1, 16, 32, 8, 128, 32768, False),
        (8, 8, 8, 1, 128, 8192, False),
        (2, 2, 8, 2, 256, 16384, False),
        # ... over fewer keys, of more heads, and no more rows than a block has.
        (1, 16, 32, 8, 128, 2048, True),
        (8, 16, 32, 8, 128, 8192, True),
        (8, 2, 32, 8, 256, 4096, True),
        (1, 8, 32, 8, 128, 32768, True),
    ],
)
def test_few_heads_of_many_keys(
    plan: Probe,
    batch: int,
    seqlen_q: int,
    nheads: int,
    nheads_k: int,
    head_dim: int,
    seqlen_k: int,
    decode: bool,
) -> None:
    shape = {"batch": batch, "nheads": nheads, "nheads_k": nheads_k, "head_dim": head_dim}
    found = plan.fwd(**shape, seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=1)
    assert found["decode"] == decode
    assert (found["token_rows.count"], found["nheads"]) == (seqlen_q, nheads_k)


@pytest.mark.parametrize("seqlen_k, packs", [(16384, True), (700, False)])
def test_rows_of_a_group_go_together_where_they_save_enough(
    plan: Probe, seqlen_k: int, packs: bool
) -> None:
    found = plan.fwd(batch=1, seqlen_q=33, seqlen_k=seqlen_k, nheads=32, nheads_k=8, head_dim=128)
    assert (found["token_rows.count"] > 1) == packs


@pytest.mark.parametrize(
    "changed",
    [
        {"mask": mask(2, 1, 33, 16384)},
        {"mask": mask(2, 2, 1, 16384)},
        {"bias": tensor((2, 2, 1, 16384))},
        {"softcap": 20.0},
        {"softmax_scale": -1.0},
    ],
)
def test_rows_of_a_group_go_apart(plan: Probe, changed: dict[str, Any]) -> None:
    """Kernels that look at more than lengths and causality take the rows of each head alone."""
    shape = {"seqlen_q": 33, "seqlen_k": 16384, "nheads": 8, "head_dim": 128, "is_causal": 1}
    assert few_rows(plan, **shape)["token_rows.count"] == 33
    found = few_rows(plan, **(shape | changed))
    assert found["token_rows.count"] == 1 and found["nheads"] == 8
