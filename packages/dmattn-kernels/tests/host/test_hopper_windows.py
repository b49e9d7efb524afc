"""Which calls Hopper's kernels compute as a sliding window, without the lists of the selection."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

import abi
from abi import FLOAT32, tensor
from probe import DIRECT, KEY, ROW_BLOCK_LISTS, SELECTION_LIST, SM80, SM90, TILED, Plan, Probe

SMS = 132
REST = {"softmax_lse_rest": tensor((1, 16, 4096), FLOAT32)}
KEY_BIAS = {"bias": tensor((1, 4, 1, 4096), FLOAT32), **REST}
DENSE_BIAS = {"bias": tensor((1, 16, 4096, 4096)), **REST}


def plan_of(
    probe: ctypes.CDLL, call: str, kernels: str = SM90, window: int = 1024, **given: Any
) -> Plan:
    fields: dict[str, Any] = {"batch": 1, "head_dim": 128, "nheads": 16, "nheads_k": 4}
    fields |= {"seqlen_q": 4096, "seqlen_k": 4096, "is_causal": 1, "window": window} | given
    capacity = -(-(window + 127) // 128) * 128
    lists = abi.selection(fields["seqlen_q"], fields["seqlen_k"], capacity, 1, 1)
    plan: Plan = getattr(Probe(probe), call)(kernels, SMS, selection=lists, **fields)
    return plan


def by_tiles(plan: Plan) -> bool:
    """Whether the call takes the kernels for windows; if not, it reads the lists."""
    found = plan["walk"] == TILED
    assert plan["gathered"] != found and (plan["keys.idx"] == 0) == found
    return found


@pytest.mark.parametrize(
    "head_dim, tile", [(40, (128, 64)), (64, (128, 64)), (96, (128, 128)), (136, (128, 80))]
)
def test_forward(probe: ctypes.CDLL, head_dim: int, tile: tuple[int, int]) -> None:
    plan = plan_of(probe, "fwd", head_dim=head_dim)
    assert by_tiles(plan) and plan["arch"] == 90 and plan["window"] == 1024
    assert (plan["block_m"], plan["block_n"]) == tile
    assert plan["blocks"] == SMS * (2 if head_dim <= 64 else 1) and plan["num_splits"] == 1
    assert plan["workspace_bytes"] == 256  # the counter


@pytest.mark.parametrize(
    "head_dim, tile", [(40, (128, 128)), (64, (128, 128)), (96, (128, 128)), (256, (128, 80))]
)
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_forward_with_softcap(
    probe: ctypes.CDLL, head_dim: int, tile: tuple[int, int], scale: float
) -> None:
    plan = plan_of(probe, "fwd", head_dim=head_dim, softcap=30.0, softmax_scale=scale)
    assert by_tiles(plan) and plan["arch"] == 90 and plan["window"] == 1024
    assert (plan["block_m"], plan["block_n"]) == tile


@pytest.mark.parametrize("head_dim", [40, 64, 72, 128, 136, 256])
def test_forward_with_a_bias_for_each_key(probe: ctypes.CDLL, head_dim: int) -> None:
    plan = plan_of(probe, "fwd", head_dim=head_dim, **KEY_BIAS)
    assert by_tiles(plan) and plan["arch"] == 90 and plan["window"] == 1024
    block_n = 128 if head_dim <= 128 else 64
    assert plan["bias.kind"] == KEY and (plan["block_m"], plan["block_n"]) == (128, block_n)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kernels": SM80},
        {"k": tensor((1, 4096, 4, 128), stride=(0, 0, 128, 1))},
        DENSE_BIAS,
        {"softcap": 30.0, **KEY_BIAS},
        {"softmax_scale": -1.0},
        {"num_splits": 2},
        {"seqlen_q": 70, "nheads": 2, "nheads_k": 1, "batch": 1},
        {"window": 0},
    ],
    ids=[
        *("sm80", "expanded", "dense bias", "softcap and key bias", "negative scale"),
        *("split", "few rows", "nothing known"),
    ],
)
def test_forward_by_lists(probe: ctypes.CDLL, arguments: dict[str, Any]) -> None:
    plan = plan_of(probe, "fwd", **arguments)
    assert not by_tiles(plan) and plan["walk"] == ROW_BLOCK_LISTS and plan["window"] == 0


def test_few_rows_of_a_short_window(probe: ctypes.CDLL) -> None:
    """Whether keys are split depends on the length of the window, not on the number of keys."""
    few = {"seqlen_q": 70, "nheads": 2, "nheads_k": 1}
    assert by_tiles(plan_of(probe, "fwd", window=200, **few))
    assert not by_tiles(plan_of(probe, "fwd", window=400, **few))


@pytest.mark.parametrize("call", ["fwd", "bwd"])
def test_one_row_takes_its_list(probe: ctypes.CDLL, call: str) -> None:
    plan = plan_of(probe, call, seqlen_q=1)
    assert not by_tiles(plan) and plan["walk"] == SELECTION_LIST


@pytest.mark.parametrize("call", ["fwd", "bwd"])
def test_a_window_of_all_keys_is_causality(probe: ctypes.CDLL, call: str) -> None:
    plan = plan_of(probe, call, window=4096, nheads_k=16)
    assert by_tiles(plan) and (plan["arch"], plan["window"]) == (90, 0) and plan["is_causal"]
    almost = plan_of(probe, call, window=4095, nheads_k=16)
    assert by_tiles(almost) and almost["window"] == 4095
    assert not by_tiles(plan_of(probe, call, SM80, window=4096))
    few = plan_of(probe, call, window=4096)
    assert by_tiles(few)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"head_dim": 40, "nheads_k": 16},
        {"head_dim": 80, "nheads_k": 16},
        KEY_BIAS,
        {"gradients": "dq dk dv dbias", **KEY_BIAS},
        {"bias": tensor((1, 16, 1, 4096), FLOAT32), **REST},
        DENSE_BIAS,
        {"nheads": 4},
        {"dsoftmax_lse": tensor((1, 16, 4096), FLOAT32)},
        {"deterministic": 1},
        {"head_dim": 136, "nheads_k": 16, "deterministic": 1},
    ],
    ids=[
        *("plain", "small heads", "between", "key bias", "key bias with gradient"),
        *("key bias of each head", "dense bias", "as many key heads", "dlse"),
        *("deterministic", "large heads, deterministic"),
    ],
)
def test_backward(probe: ctypes.CDLL, arguments: dict[str, Any]) -> None:
    plan = plan_of(probe, "bwd", **arguments)
    assert by_tiles(plan) and plan["arch"] == 90 and plan["window"] == 1024
    # Steps are announced as with a mask, with which tiles have 64 rows at each head dimension.
    assert (plan["block_m"], plan["block_n"]) == (64, 128)
    assert not plan["mask.bits"] and not plan["dk_accum"] and plan["dq_accum"]
    items = 32 * plan["nheads_k"] * plan["num_splits"]
    assert plan["round.row_blocks"] == 1 and plan["blocks"] == min(items, SMS)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kernels": SM80},
        {"softcap": 30.0},
        {"softmax_scale": -1.0},
        {"bias": tensor((1, 16, 4096, 4096), FLOAT32), **REST},
        {"window": 0},
    ],
    ids=["sm80", "softcap", "negative scale", "fp32 bias", "nothing known"],
)
def test_backward_by_lists(probe: ctypes.CDLL, arguments: dict[str, Any]) -> None:
    plan = plan_of(probe, "bwd", **arguments)
    assert not by_tiles(plan) and plan["walk"] == ROW_BLOCK_LISTS and plan["window"] == 0


@pytest.mark.parametrize("head_dim", [136, 192, 256])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_backward_of_wide_heads(probe: ctypes.CDLL, head_dim: int, softcap: float) -> None:
    plan = plan_of(probe, "bwd", head_dim=head_dim, softcap=softcap, nheads_k=16)
    assert by_tiles(plan) and plan["arch"] == 90 and plan["window"] == 1024
    assert (plan["block_m"], plan["block_n"]) == (64, 128)


def test_items_of_a_window_are_alike(probe: ctypes.CDLL) -> None:
    """So fewer of them keep the GPU busy than in a causal call, where some are twice as long."""
    few = {"nheads": 4, "nheads_k": 4, "batch": 1}
    window = plan_of(probe, "bwd", **few)
    assert by_tiles(window) and window["arch"] == 90 and window["num_splits"] == 1
    causal = Probe(probe).bwd(
        SM90, SMS, seqlen_q=4096, seqlen_k=4096, head_dim=128, is_causal=1, **few
    )
    assert causal["arch"] == 90 and causal["num_splits"] > 1


def test_a_bias_that_lists_read_element_by_element(probe: ctypes.CDLL) -> None:
    assert plan_of(probe, "fwd", kernels=SM80, **DENSE_BIAS)["bias.kind"] == DIRECT
