"""Gradients that nobody asked for, of the Hopper kernels, which always compute all three."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest

import abi
from abi import BFLOAT16, FLOAT32, tensor
from probe import ARRAYS, SM80, SM90, WORKSPACE, Plan, Probe, array_bytes, mask

SMS = 132
BATCH, LENGTH, NHEADS, NHEADS_K = 2, 4096, 16, 4
SUBSETS = ["dq", "dk", "dv", "dq dk", "dq dv", "dk dv", "dq dk dv"]
REST = {"softmax_lse_rest": tensor((BATCH, NHEADS, LENGTH), FLOAT32)}
BIAS = {"bias": tensor((BATCH, NHEADS, LENGTH, LENGTH), BFLOAT16), **REST}
KEY_BIAS = {"bias": tensor((BATCH, NHEADS_K, 1, LENGTH), FLOAT32), **REST}
LISTS = {"selection": abi.selection(LENGTH, LENGTH, 1152, BATCH, NHEADS_K), "is_causal": 1}
CALLS: dict[str, dict[str, Any]] = {
    "dense": {},
    "wide heads": {"head_dim": 256},
    "softcap": {"softcap": 30.0},
    "deterministic": {"deterministic": 1},
    "mask": {"mask": mask(BATCH, 1, LENGTH, LENGTH)},
    "mask of keys": {"mask": mask(BATCH, 1, 1, LENGTH)},
    "bias": BIAS,
    "bias for each key": KEY_BIAS,
    "window": LISTS | {"window": 1024},
    "lists": LISTS,
    "lists of wide heads": LISTS | {"head_dim": 192},
}


def plan_of(
    probe: ctypes.CDLL, gradients: str, kernels: str = SM90, round: int = 0, **given: Any
) -> Plan:
    fields: dict[str, Any] = {"batch": BATCH, "head_dim": 128, "nheads": NHEADS}
    fields |= {"nheads_k": NHEADS_K, "seqlen_q": LENGTH, "seqlen_k": LENGTH} | given
    return Probe(probe).bwd(kernels, SMS, gradients=gradients, round=round, **fields)


@pytest.mark.parametrize(
    "call, gradients",
    [*itertools.product(CALLS, SUBSETS), ("bias", "dbias"), ("bias for each key", "dbias")],
)
def test_all_are_computed(probe: ctypes.CDLL, call: str, gradients: str) -> None:
    """Computing all is faster than a kernel for older chips that leaves some of them out."""
    whole = plan_of(probe, "dq dk dv", **CALLS[call])
    plan = plan_of(probe, gradients, **CALLS[call])
    assert plan["arch"] == whole["arch"] == 90
    assert (plan["walk"], plan["block_m"]) == (whole["walk"], whole["block_m"])
    assert plan["dq_accum"]
    for name in ("dq", "dk", "dv"):
        assert plan[f"spares.{name}"] == (name not in gradients.split())


@pytest.mark.parametrize("head_dim", [72, 128, 256])
@pytest.mark.parametrize("gradients", SUBSETS)
def test_where_they_go(probe: ctypes.CDLL, head_dim: int, gradients: str) -> None:
    """Spare dk and dv have places of their own in the workspace, row after row."""
    plan = plan_of(probe, gradients, head_dim=head_dim)
    shape = {"batch": BATCH, "seqlen_q": LENGTH, "seqlen_k": LENGTH, "head_dim": head_dim}
    shape |= {"nheads": NHEADS, "nheads_k": NHEADS_K}
    sizes = array_bytes(plan, shape, 0)
    spans = [(plan[name], plan[name] + sizes[name]) for name in ARRAYS if plan[name]]
    for name in ("dk", "dv"):
        if not plan[f"spares.{name}"]:
            assert not WORKSPACE <= plan[name] < WORKSPACE + plan["workspace_bytes"]
            continue
        strides = [plan[f"{name}_stride.{dim}"] for dim in ("batch", "row", "head")]
        assert strides == [LENGTH * NHEADS_K * head_dim, NHEADS_K * head_dim, head_dim]
        spans.append((plan[name], plan[name] + BATCH * LENGTH * NHEADS_K * head_dim * 2))
    spans.sort()
    assert spans[0][0] >= WORKSPACE and spans[-1][1] <= WORKSPACE + plan["workspace_bytes"]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_where_they_go_in_packed_sequences(probe: ctypes.CDLL) -> None:
    sizes = {"sequences": 3, "total_q": 9000, "total_k": 8000, "nheads": 4, "nheads_k": 2}
    sizes |= {"max_seqlen_q": 4000, "max_seqlen_k": 3000, "head_dim": 64}
    plan = Probe(probe).bwd(SM90, SMS, packed=True, gradients="dq", **sizes)
    assert plan["arch"] == 90 and plan["spares.dk"] and plan["spares.dv"]
    assert [plan[f"dk_stride.{dim}"] for dim in ("batch", "row", "head")] == [0, 128, 64]
    assert plan["dv"] - plan["dk"] >= 8000 * 2 * 64 * 2


@pytest.mark.parametrize("call", ["dense", "mask", "bias", "window", "lists"])
def test_they_count_as_scratch(probe: ctypes.CDLL, call: str) -> None:
    """The workspace and the gradients together take no more than in a call for all three."""
    given = CALLS[call]
    whole = plan_of(probe, "dq dk dv", **given)
    plan = plan_of(probe, "dq", **given)
    asked = 2 * BATCH * LENGTH * NHEADS_K * 128 * 2  # dk and dv
    assert plan["workspace_bytes"] <= whole["workspace_bytes"] + asked


@pytest.mark.parametrize("given", [{"gradients": "dq dk"}, {"gradients": "dv"}])
def test_other_kernels_leave_them_out(probe: ctypes.CDLL, given: dict[str, Any]) -> None:
    for more in ({"kernels": SM80}, {"softmax_scale": -1.0}):
        plan = plan_of(probe, **(given | more))
        assert plan["arch"] == 80
        assert not (plan["spares.dq"] or plan["spares.dk"] or plan["spares.dv"])
        assert bool(plan["dq_accum"]) == ("dq" in given["gradients"])
        if "dk" not in given["gradients"]:
            assert not plan["dk"]


def test_few_keys(probe: ctypes.CDLL) -> None:
    """The kernel that stores dq itself is for calls that want it."""
    keys = {"seqlen_k": 128}
    assert plan_of(probe, "dq dk", **keys)["dq"]
    without = plan_of(probe, "dk dv", **keys)
    assert without["arch"] == 90 and without["dq_accum"] and not without["dq"]
