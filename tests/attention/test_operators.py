"""The operators inside PyTorch: opcheck, torch.compile, autocast, modes, memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dmattn
from attention.cases import Case, build
from attention.driver import call, run, settings
from attention.oracle import Problem

SMALL = Case(24, 40, mask="bk1k", bias="1hqk", causal=True, sinks="normal")


def _operands(problem: Problem) -> tuple[object, ...]:
    numbers = (problem.softmax_scale, problem.is_causal, problem.softcap)
    operands = (problem.q, problem.k, problem.v, problem.mask, problem.bias, problem.sinks)
    return (*operands, *numbers)


@pytest.mark.default_backend
@pytest.mark.parametrize("tracked", [False, True])
def test_opcheck_forward(tracked: bool) -> None:
    problem = build(SMALL)
    for x in (problem.q, problem.k, problem.v, problem.bias, problem.sinks):
        assert x is not None
        x.requires_grad_(tracked)
    torch.library.opcheck(torch.ops.dmattn.fwd.default, _operands(problem))


@pytest.mark.default_backend
def test_opcheck_backward() -> None:
    problem = build(SMALL)
    args = (problem.q, problem.k, problem.v, problem.mask, problem.bias, problem.sinks)
    numbers = (problem.softmax_scale, problem.is_causal, problem.softcap)
    results = torch.ops.dmattn.fwd(*args, *numbers)
    for needs in ([True] * 5, [False, False, False, True, False], [True, False, True, False, True]):
        backward = (problem.dout, None, *results, needs, *args, *numbers, True)
        torch.library.opcheck(torch.ops.dmattn.bwd.default, backward)


@pytest.mark.default_backend
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic: bool) -> None:
    problem = build(SMALL.with_(deterministic=True))
    want = run(problem, deterministic=True)
    options = settings(problem) | {"deterministic": True}

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        out: Tensor = dmattn.flash_dmattn_func(q * 1, k, v, attn_bias=bias, sinks=sinks, **options)
        return out

    compiled: Callable[..., Tensor] = torch.compile(
        attend, backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    leaves = [
        x.clone().requires_grad_()
        for x in (problem.q, problem.k, problem.v, problem.bias, problem.sinks)
        if x is not None
    ]
    out = compiled(*leaves)
    grads = torch.autograd.grad(out, leaves, problem.dout)
    for (name, a), b in zip(list(want.items())[2:], grads, strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(out.detach(), want.out)


def test_fast_path_equals_dispatched_path() -> None:
    """The call that skips the dispatcher (no gradient wanted) gives the very same bits."""
    problem = build(SMALL)
    plain = run(problem.with_(wants=""))
    tracked = run(problem)
    assert torch.equal(plain.out, tracked.out) and torch.equal(plain.lse, tracked.lse)
    with torch.inference_mode():
        out, lse = call(problem)
    assert torch.equal(out, tracked.out) and torch.equal(lse, tracked.lse)


@pytest.mark.cuda
def test_backends_listed() -> None:
    assert "cuda" in dmattn.get_available_backends()
