"""Streams, graphs, threads and devices: work is enqueued where the caller is, and nowhere else."""

from __future__ import annotations

import concurrent.futures

import pytest
import torch

import dmattn
from attention.cases import Case, build
from attention.driver import assert_close, call, run
from attention.oracle import Problem, Results
from attention.targets import target, target_device

pytestmark = [pytest.mark.cuda, pytest.mark.each_family]

INPUTS = ("q", "k", "v", "bias")
CASES = {
    "dense": Case(300, 300, causal=True, bias="bk1k"),
    "dense_mask": Case(300, 333, mask="bhqk", bias="1hqk", head_dim=128),
    "key_mask": Case(300, 700, mask="bk1k", bias="bk1k", head_dim=128),
    "split": Case(1, 9000, 2, 8, 2, 128, mask="bk1k", bias="bk1k"),
}


def _keep_busy(cycles: int = 20_000_000) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _assert_equal(found: Results, want: Results) -> None:
    for (name, a), (_, b) in zip(found.items(), want.items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", CASES)
def test_side_stream(name: str) -> None:
    """Inputs arrive late on a side stream; results must wait for them."""
    problem = build(CASES[name])
    want = run(problem, deterministic=True)
    late = {x: torch.zeros_like(getattr(problem, x)) for x in (*INPUTS, "dout")}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        _keep_busy()
        for x, value in late.items():
            value.copy_(getattr(problem, x))
        leaves = [late[x].requires_grad_() for x in INPUTS]
        out, lse = call(problem.with_(**late), deterministic=True)
        grads = torch.autograd.grad(out, leaves, late["dout"])
    stream.synchronize()
    _assert_equal(Results(out.detach(), lse.detach(), *grads), want)


@pytest.mark.parametrize("name", CASES)
def test_graph_replay(name: str) -> None:
    """Forward and backward captured once, replayed on other data."""
    problem = build(CASES[name])
    other = build(CASES[name].with_(seed=1))
    want = run(other, deterministic=True)
    tensors = {x: getattr(problem, x).clone().requires_grad_() for x in ("q", "k", "v", "bias")}
    dout = problem.dout.clone()
    mask = None if problem.mask is None else problem.mask.clone()
    problem = problem.with_(mask=mask, **tensors)

    def step() -> tuple[torch.Tensor, ...]:
        out, lse = call(problem, deterministic=True)
        return (out, lse, *torch.autograd.grad(out, list(tensors.values()), dout))

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        for x in INPUTS:
            tensors[x].copy_(getattr(other, x))
        dout.copy_(other.dout)
        if mask is not None and other.mask is not None:
            mask.copy_(other.mask)
        for value in results:
            value.detach().fill_(float("nan"))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    _assert_equal(Results(*(value.detach() for value in results)), want)


def test_call_does_not_synchronise() -> None:
    """A call returns while the device is still busy with earlier work."""
    problem = build(CASES["key_mask"])
    if target().backend == "flex":  # which looks at lse where a bias may have made it large
        problem = problem.with_(bias=None)
    call(problem)
    torch.cuda.synchronize()
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    _keep_busy(400_000_000)
    done.record()
    call(problem)
    assert not done.query()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()


def test_many_threads() -> None:
    """Eight threads on streams of their own, each with its own case, all at once."""
    names = [*CASES] * 2
    problems = [build(CASES[name].with_(seed=i)) for i, name in enumerate(names)]
    wants = [_forward_backward(problem) for problem in problems]
    torch.cuda.synchronize()

    def work(index: int) -> bool:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        equal = True
        with torch.cuda.stream(stream):
            for _ in range(20):
                found = _forward_backward(problems[index])
                stream.synchronize()
                for a, b in zip(found, wants[index], strict=True):
                    equal &= torch.equal(a, b)
        return equal

    with concurrent.futures.ThreadPoolExecutor(len(problems)) as pool:
        assert list(pool.map(work, range(len(problems)))) == [True] * len(problems)


def _forward_backward(problem: Problem) -> list[torch.Tensor]:
    """Through the operators themselves: autograd would move the backward to a thread of its own."""
    args = (problem.q, problem.k, problem.v, problem.mask, problem.bias, problem.sinks)
    numbers = (problem.softmax_scale, problem.is_causal, problem.softcap)
    results = torch.ops.dmattn.fwd(*args, *numbers, True)
    grads = torch.ops.dmattn.bwd(problem.dout, None, *results, [True] * 5, *args, *numbers, True)
    return [*results[:2], *grads]


def test_errors_are_per_thread() -> None:
    """A thread that fails leaves the others' results and messages alone."""
    problem = build(CASES["dense"])

    def work(index: int) -> bool:
        for _ in range(50):
            if index % 2:
                with pytest.raises(ValueError, match="key: got"):
                    dmattn.flash_dmattn_func(problem.q, problem.k[..., :-1], problem.v)
            else:
                call(problem)
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", CASES)
def test_device_that_is_not_current(name: str) -> None:
    problem = build(CASES[name])
    want = run(problem, deterministic=True)
    names = ("q", "k", "v", "mask", "bias", "dout")
    moved = {x: None if (t := getattr(problem, x)) is None else t.to("cuda:1") for x in names}
    second = problem.with_(**moved)
    assert torch.cuda.current_device() == 0
    leaves = [getattr(second, x).requires_grad_() for x in INPUTS]
    out, lse = call(second, deterministic=True)
    grads = torch.autograd.grad(out, leaves, second.dout)
    assert torch.cuda.current_device() == 0
    returned = [x.detach().to(target_device()) for x in (out, lse, *grads)]
    _assert_equal(Results(*returned), want)


def test_results_of_dropped_workspaces() -> None:
    """Workspaces are freed right after the call; later allocations must not disturb it."""
    problem = build(CASES["key_mask"])
    want = run(problem, deterministic=True)
    for _ in range(20):
        out, lse = call(problem)
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
            torch.empty(size, dtype=torch.uint8, device=out.device).fill_(0xFF)
        assert torch.equal(out, want.out) and torch.equal(lse, want.lse)
    assert_close(problem, run(problem))
