"""Backward calls whose fp32 sums are large beside q, k and v: in several rounds of launches."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import dmattn
from gpu.cases import Case, build, case_id
from gpu.device import require_device
from gpu.harness import assert_close, check, run
from gpu.oracle import Problem
from gpu.packed import check_packed
from gpu.selection_cases import brute_force
from gpu.test_window import attend

pytestmark = [pytest.mark.cuda, pytest.mark.each_family, pytest.mark.slow]

BATCHES = Case(1100, 1100, 3, 16, 1, 128, causal=True, bias="bk1k")
KV_HEADS = Case(1500, 1500, 1, 24, 3, 128, causal=True, bias="bk1k")
GROUP = Case(2100, 2100, 1, 17, 1, 128, causal=True, bias="bk1k")

CASES = [
    *(
        case.with_(**changes)
        for case in (BATCHES, KV_HEADS, GROUP)
        for changes in (
            {},
            {"mask": "bk1k"},
            {"mask": "bh1k", "dtype": "f16"},
            {"mask": "1hqk", "bias": "bhqk"},
            {"mask": "11qk", "bias": "11qk", "bias_f32": True},
        )
    ),
    BATCHES.with_(head_dim=72, layout="misaligned"),
    KV_HEADS.with_(head_dim=80, layout="heads_first", dlse=True),
    GROUP.with_(head_dim=200, nheads=9, causal=False),
    GROUP.with_(bias="", wants="qkv"),
    GROUP.with_(wants="qv", mask="b11k"),
    GROUP.with_(wants="qb"),
    KV_HEADS.with_(bias="", wants="qkv", layout="spaced"),
    KV_HEADS.with_(bias="bhq1", causal=False, softcap=10.0),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_gradients(case: Case, deterministic: bool) -> None:
    check(case.with_(deterministic=deterministic))


LENGTHS = ((700, 700), (0, 5), (129, 64), (1, 1), (900, 1000), (3, 0))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("nheads,nheads_k", [(24, 3), (28, 1)])
@pytest.mark.parametrize(
    "operands",
    [
        {},
        {"bias": "1k1k", "dlse": True},
        {"mask": "1h1k", "bias": "1k1k"},
        {"mask": "1k1k", "bias": "1h1k"},
        {"mask": "1hqk", "bias": "1hqk"},
        {"bias": "11qk", "bias_f32": True},
    ],
    ids=lambda operands: "-".join(operands) or "plain",
)
def test_packed(
    operands: dict[str, object], nheads: int, nheads_k: int, deterministic: bool
) -> None:
    case = Case(nheads=nheads, nheads_k=nheads_k, head_dim=128, causal=True)
    check_packed(case.with_(**operands, deterministic=deterministic), LENGTHS)


# Interval lists: each round has at least eight blocks for each SM, and saves 64 MiB.
WINDOWED = [
    Case(2048, 2048, 2, 24, 24, 128, causal=True, bias="bk1k"),
    Case(2000, 2000, 1, 48, 48, 128, causal=True, bias="bk1k", dlse=True),
    Case(2000, 2000, 3, 36, 18, 128, causal=True, bias="bh1k", dtype="f16"),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", WINDOWED, ids=case_id)
def test_window(case: Case, deterministic: bool) -> None:
    problem = build(case)
    assert problem.bias is not None
    keep = brute_force(problem.bias[:, :, 0], 1024, case.seqlen_q, True)
    assert_close(problem.with_(mask=keep), attend(problem, 1024, deterministic))


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_of_one_kv_head(deterministic: bool) -> None:
    """Too long for the oracle: against calls for some of the gradients, which need no rounds."""
    problem = build(Case(50_000, 50_000, 1, 8, 1, 128, causal=True, bias="bk1k"))
    whole = attend(problem, 2048, deterministic)
    wanted = attend(problem.with_(wants="kvb"), 2048, deterministic)
    pairs = [
        attend(_heads(problem, slice(first, first + 2)), 2048, deterministic)
        for first in range(0, 8, 2)
    ]
    dq = torch.cat([pair.dq for pair in pairs if pair.dq is not None], dim=2)
    wanted = dataclasses.replace(wanted, dq=dq)
    for (name, found), (_, other) in zip(whole.items(), wanted.items(), strict=True):
        # Sums of the same products in another order, rounded once: a last place of bfloat16.
        error = (found.double() - other.double()).abs().amax() / other.double().abs().amax()
        assert float(error) <= 2**-7, f"{name}: {float(error)}"
    if deterministic:
        again = attend(problem, 2048, deterministic)
        for (name, a), (_, b) in zip(again.items(), whole.items(), strict=True):
            assert torch.equal(a, b), name


def _heads(problem: Problem, heads: slice) -> Problem:
    """dq alone, of these heads."""
    return problem.with_(q=problem.q[:, :, heads], dout=problem.dout[:, :, heads], wants="q")


@pytest.mark.parametrize("case", [BATCHES, KV_HEADS, GROUP], ids=case_id)
def test_deterministic_repeat(case: Case) -> None:
    problem = build(case)
    want = run(problem, deterministic=True)
    for _ in range(10):
        for (name, a), (_, b) in zip(
            run(problem, deterministic=True).items(), want.items(), strict=True
        ):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("window", [0, 1024])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("nheads_k", [1, 2, 4, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_memory_of_training(head_dim: int, nheads_k: int, mask: bool, window: int) -> None:
    """With a key bias: beside inputs, outputs and gradients at most 1.5 times q, k and v."""
    if window and mask:
        pytest.skip("a window and a mask are a selection like any other")
    seqlen = 262144 if window else 16384
    device = require_device()

    def rows(heads: int) -> Tensor:
        x = torch.randn(1, seqlen, heads, head_dim, device=device, dtype=torch.bfloat16)
        return x.requires_grad_()

    q, k, v = rows(16), rows(nheads_k), rows(nheads_k)
    bias = torch.randn(1, nheads_k, 1, seqlen, device=device).requires_grad_()
    keep = torch.rand(1, 1, 1, seqlen, device=device) < 0.06 if mask else None
    dout = torch.randn_like(q)
    inputs = [q, k, v, bias]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = dmattn.flash_dmattn_func(
        q, k, v, attn_mask=keep, attn_bias=bias, is_causal=True, window_size=window or None
    )
    gradients = torch.autograd.grad(out, inputs, dout)
    torch.cuda.synchronize()

    def size(*tensors: Tensor) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    beside = torch.cuda.max_memory_allocated() - before - size(out, *gradients)
    assert beside <= 1.5 * size(q, k, v), f"{beside / size(q, k, v):.2f} times q, k and v"
