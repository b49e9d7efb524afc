"""Runs a problem through the public API on poisoned buffers and judges the results."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from torch import Tensor

import dmattn
from attention.cases import Case, build
from attention.oracle import Deviation, Problem, Results, deviations, solve
from attention.poison import poisoned
from attention.targets import on_cuda, target

if TYPE_CHECKING:
    from attention.packed import PackedProblem


def run(problem: Problem, deterministic: bool = False, **options: Any) -> Results:
    """One forward and, if any gradient is wanted, one backward of `dmattn.flash_dmattn_func`.

    `options`: further arguments of the call, such as window_size and selection.
    """
    return Results(**differentiate(problem, lambda p: call(p, deterministic, **options)))


AnyProblem = TypeVar("AnyProblem", Problem, "PackedProblem")


def differentiate(
    problem: AnyProblem, forward: Callable[[AnyProblem], tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """out, lse and the gradients that are wanted, on poisoned buffers."""
    skip_if_too_large(problem.q, problem.k)
    leaves = {"dq": problem.q, "dk": problem.k, "dv": problem.v}
    leaves |= {"dbias": problem.bias, "dsinks": problem.sinks}
    tracked = {
        name: x.detach().requires_grad_(name[1] in problem.wants)
        for name, x in leaves.items()
        if x is not None
    }
    wanted = {name: x for name, x in tracked.items() if x.requires_grad}
    problem = problem.with_(**{name[1:]: x for name, x in tracked.items()})
    with poisoned():
        out, lse = forward(problem)
        grads: tuple[Tensor, ...] = ()
        if wanted:
            outputs, cotangents = [out], [problem.dout]
            if problem.dlse is not None:
                outputs.append(lse)
                cotangents.append(problem.dlse)
            grads = torch.autograd.grad(outputs, list(wanted.values()), cotangents)
    found = dict(zip(wanted, grads, strict=True))
    return {"out": out.detach(), "lse": lse.detach(), **found}


def call(problem: Problem, deterministic: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
    """out and lse, with gradients tracked for those tensors of the problem that ask for them."""
    with skipped_when_refused():
        out, lse = dmattn.flash_dmattn_func(
            problem.q,
            problem.k,
            problem.v,
            attn_bias=problem.bias,
            sinks=problem.sinks,
            deterministic=deterministic,
            return_lse=True,
            **settings(problem),
            **options,
        )
    return out, lse


def settings(problem: Problem) -> dict[str, Any]:
    """Arguments of the call beside the tensors that may need a gradient."""
    return {
        "attn_mask": problem.mask,
        "softmax_scale": problem.softmax_scale,
        "is_causal": problem.is_causal,
        "softcap": problem.softcap,
        **target().options(),
    }


@contextlib.contextmanager
def skipped_when_refused() -> Iterator[None]:
    """Skips the test when the backend that the target names refuses the problem, with its reason.

    The device's own backend may refuse nothing that the suite asks for.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if target().backend is None:
            raise
        pytest.skip(f"{target().backend} refuses: {error}")


def skip_if_too_large(q: Tensor, k: Tensor) -> None:
    """Skips the test when the target is too slow for q (..., rows, H, D), k (..., keys, HK, D)."""
    heads, rows, keys = math.prod(q.shape[:-3]) * q.shape[-2], q.shape[-3], k.shape[-3]
    tiles = heads * math.ceil(rows / 128) * math.ceil(keys / 128)
    for what, count, most in (
        ("tiles", tiles, target().most_tiles),
        ("scores", heads * rows * keys, target().most_scores),
    ):
        if most is not None and count > most:
            pytest.skip(f"{count} {what} are too many for {target().name}, of at most {most}")


def times(count: int) -> int:
    """How often to repeat what might differ between runs: `count` times, on the CPU at most 3."""
    return count if on_cuda() else min(count, 3)


def bytes_of(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def peak_bytes_beside(step: Callable[[], tuple[Tensor, ...]]) -> int:
    """The peak memory of a step, in bytes, without what was allocated before and what it returns.

    The bytes that torch's allocator was asked for are counted. For each tensor it may reserve up
    to a megabyte more, depending on the blocks left by earlier calls, not on the step.
    """
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    results = step()
    torch.cuda.synchronize()
    peak = int(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    return peak - int(before) - bytes_of(*results)


def check(case: Case) -> Results:
    """Builds, runs and judges one case; an AssertionError names every tensor too far off."""
    problem = build(case)
    found = run(problem, case.deterministic)
    for (name, value), operand in zip(found.items(), _expected_like(problem, found), strict=True):
        assert value.shape == operand.shape, f"{name} has shape {tuple(value.shape)}"
        wanted_dtype = lse_dtype(problem.q) if name == "lse" else operand.dtype
        assert value.dtype == wanted_dtype, f"{name} has dtype {value.dtype}"
    assert_close(problem, found)
    return found


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _expected_like(problem: Problem, found: Results) -> list[Tensor]:
    lse_like = problem.q[..., 0].transpose(1, 2)
    operands = {
        "out": problem.dout,
        "lse": lse_like,
        "dq": problem.q,
        "dk": problem.k,
        "dv": problem.v,
    }
    if problem.bias is not None:
        operands["dbias"] = problem.bias
    if problem.sinks is not None:
        operands["dsinks"] = problem.sinks
    return [operands[name] for name, _ in found.items()]


def assert_close(problem: Problem, found: Results) -> None:
    rows = deviations(problem, found)
    if all(row.ok for row in rows):
        return
    exact = dict(solve(problem, torch.float64).items())
    lines = []
    for row, (name, value) in zip(rows, found.items(), strict=True):
        lines.append(str(row) + ("" if row.ok else "  <-- " + _where(value, exact[name], row)))
    raise AssertionError("too far from the oracle\n" + "\n".join(lines))


def _where(value: Tensor, exact: Tensor, row: Deviation) -> str:
    difference = torch.where(value.double() == exact, 0.0, (value.double() - exact).abs())
    difference = difference.nan_to_num(float("inf"))
    bad = difference > row.allowed
    worst = torch.unravel_index(difference.argmax(), difference.shape)
    index = tuple(int(i) for i in worst)
    return (
        f"{int(bad.sum())} of {bad.numel()} wrong ({int(value.isnan().sum())} NaN), first at "
        f"{tuple(int(i) for i in bad.nonzero()[0])}, worst at {index}: "
        f"{float(value[index]):.6g} instead of {float(exact[index]):.6g}"
    )
