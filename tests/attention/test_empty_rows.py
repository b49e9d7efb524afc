"""Rows that keep nothing: out = 0, lse = -inf, and no gradient from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attention.cases import Case, build
from attention.driver import assert_close, run
from attention.packed import build_packed, judge_packed, run_packed
from attention.targets import on_cuda, target

pytestmark = pytest.mark.each_family

# What makes the rows of batch entry 0 keep nothing; with causality, the first rows of every entry.
HOW: dict[str, dict[str, Any]] = {
    "key mask": {"mask": "b11k"},
    "row mask": {"mask": "b1q1"},
    "dense mask": {"mask": "bhqk"},
    "dense bias": {"bias": "bhqk"},
    "key bias": {"bias": "bk1k"},
    "causal": {"causal": True, "seqlen_k": 20},
    "no keys": {"seqlen_k": 0},
}


@pytest.mark.parametrize("dtype", target().dtypes)
@pytest.mark.parametrize("how", HOW)
def test_rows_without_keys(how: str, dtype: str) -> None:
    case = Case(70, 90, dtype=dtype, mask_fill="all", dlse=True).with_(**HOW[how])
    problem = build(case)
    if problem.mask is not None:
        problem.mask[0] = False
    if problem.bias is not None:
        problem.bias[0] = -math.inf
    empty = torch.zeros(2, 4, 70, dtype=torch.bool, device=problem.q.device)
    if how == "causal":
        empty[:, :, :50] = True
    else:
        empty[: 2 if how == "no keys" else 1] = True
    found = run(problem)
    assert torch.equal(found.lse == -math.inf, empty)
    assert not found.out[empty.transpose(1, 2)].any()
    assert found.dq is not None and not found.dq[empty.transpose(1, 2)].any()
    if how not in ("causal", "no keys"):
        assert not any(x[0].any() for _, x in found.items() if x.dim() == 4)
    assert_close(problem, found)


@pytest.mark.parametrize("mask", ["b1qk", "bhqk"])
def test_what_is_sent_back_to_them_does_not_matter(mask: str) -> None:
    """Their gradients may be NaN, as by arithmetic with lse = -inf.

    CUDA kernels multiply by dout, so there only the gradient of lse is NaN.
    """
    problem = build(Case(70, 90, mask=mask, bias="bhqk", dlse=True))
    assert problem.mask is not None and problem.dlse is not None
    problem.mask[0, :, :30] = False
    results = []
    for junk in (0.0, math.nan):
        dout, dlse = problem.dout.clone(), problem.dlse.clone()
        dlse[0, :, :30] = junk
        if not on_cuda():
            dout[0, :30] = junk
        results.append(run(problem.with_(dout=dout, dlse=dlse), deterministic=True))
    for (name, a), (_, b) in zip(*(found.items() for found in results), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("heads", ["h", "k"])
@pytest.mark.parametrize("rows", ["1", "q"])
def test_heads_masked_altogether(heads: str, rows: str) -> None:
    problem = build(Case(70, 90, mask=f"b{heads}{rows}k", bias="bk1k", dlse=True))
    assert problem.mask is not None
    problem.mask[:, 0] = False
    assert_close(problem, run(problem))


def test_packed_sequences_without_keys() -> None:
    problem = build_packed(Case(bias="1h1k", dlse=True), ((40, 0), (3, 70), (130, 0), (0, 9)))
    found = run_packed(problem)
    judge_packed(problem, found)
    for rows in (slice(0, 40), slice(43, 173)):
        assert not found["out"][rows].any() and not found["dq"][rows].any()
        assert bool((found["lse"][:, rows] == -math.inf).all())
