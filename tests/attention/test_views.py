"""Gradients reach the tensors behind views, and equivalent ways to write a call agree."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attention.cases import Case, build
from attention.driver import assert_close, call
from attention.oracle import Results, solve
from attention.packed import build_packed, call_packed, run_packed

pytestmark = pytest.mark.each_family


def test_gradient_reaches_what_a_view_was_made_of() -> None:
    """An expanded bias, and keys shared by all heads, as a model writes them."""
    problem = build(Case(90, 110, bias="111k", bias_f32=True, wants="kb"))
    assert problem.bias is not None
    shared = problem.k[:, :, :1].contiguous()
    problem = problem.with_(k=shared.expand(problem.k.shape))
    leaves = [shared.requires_grad_(), problem.bias.reshape(-1).clone().requires_grad_()]
    viewed = problem.with_(
        k=leaves[0].expand(problem.k.shape), bias=leaves[1].expand(2, 4, 90, 110)
    )
    grads = torch.autograd.grad(call(viewed)[0], leaves, problem.dout)
    exact = solve(problem, torch.float64)
    assert exact.dk is not None and exact.dbias is not None
    for got, want in zip(grads, (exact.dk.sum(2, True), exact.dbias.reshape(-1)), strict=True):
        # The gradient of each of two heads is rounded to bfloat16 before autograd adds them.
        room = 2 * torch.finfo(torch.bfloat16).eps * float(want.abs().max())
        torch.testing.assert_close(got.double(), want, rtol=0, atol=room)


def test_equal_lengths_are_a_batch() -> None:
    """Packed sequences of one length give what a batch of them gives."""
    case = Case(mask="1hqk", bias="1kqk", causal=True)
    problem = build_packed(case, ((90, 110),) * 3)
    out, lse = call_packed(problem)

    def batch(x: Tensor | None) -> Tensor:
        assert x is not None
        return x.unflatten(0, (3, -1))

    wide = build(case).with_(
        **{name: batch(getattr(problem, name)) for name in ("q", "k", "v", "dout")},
        mask=batch(problem.mask).transpose(1, 2),
        bias=batch(problem.bias).transpose(1, 2),
        wants="",
    )
    found = Results(out.unflatten(0, (3, -1)), lse.unflatten(1, (3, -1)).transpose(0, 1))
    assert_close(wide, found)


def test_columns_behind_a_sequence_do_not_count() -> None:
    """What mask and bias hold there has no effect, and the gradient there is zero."""
    problem = build_packed(Case(bias="1hqk", mask="11qk"), ((30, 20), (50, 130)))
    assert problem.bias is not None and problem.mask is not None
    found = run_packed(problem)
    assert not found["dbias"][:30, :, 20:].any() and found["dbias"][:30, :, :20].any()
    bias, mask = problem.bias.clone(), problem.mask.clone()
    bias[:30, :, 20:], mask[:30, :, 20:] = math.inf, ~mask[:30, :, 20:]
    other = run_packed(problem.with_(bias=bias, mask=mask))
    assert torch.equal(found["out"], other["out"]) and torch.equal(found["lse"], other["lse"])
