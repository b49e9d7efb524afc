"""Packed sequences put together from cases of one sequence each, and judged sequence by sequence.

So the cases, the oracle and the tolerance are those of the other tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

import dmattn
from attention.cases import LAYOUTS, OPERAND_LAYOUTS, Case, build
from attention.driver import differentiate, skipped_when_refused
from attention.oracle import (
    ROUNDINGS,
    Deviation,
    Problem,
    Results,
    all_allowances,
    deviations,
    max_error,
    roundoff,
    solve,
    sum_eps,
)
from attention.targets import target

Lengths = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class PackedProblem:
    """One call over packed sequences, and the problem of each sequence alone (batch 1)."""

    parts: list[Problem]
    lengths: list[tuple[int, int]]
    q: Tensor  # (total_q, H, D)
    k: Tensor  # (total_k, HK, D)
    v: Tensor
    mask: Tensor | None  # (total_k, heads) or (total_q, heads, longest_k)
    bias: Tensor | None
    dout: Tensor
    dlse: Tensor | None  # (H, total_q)
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    numbers: dict[str, Any]
    wants: str
    sinks: Tensor | None

    @property
    def longest(self) -> tuple[int, int]:
        return max((m for m, _ in self.lengths), default=0), max(
            (n for _, n in self.lengths), default=0
        )

    def spans(self) -> Iterator[tuple[slice, slice]]:
        rows, keys = (_sums(x) for x in zip(*self.lengths, strict=True))
        for row, key in zip(pairwise(rows), pairwise(keys), strict=True):
            yield slice(*row), slice(*key)

    def with_(self, **changes: Any) -> PackedProblem:
        return dataclasses.replace(self, **changes)


def _sums(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def build_packed(case: Case, lengths: Lengths) -> PackedProblem:
    """Sequence b has the seed case.seed + b and lengths[b]; operand shapes start with "1"."""
    parts = [
        build(case.with_(batch=1, seqlen_q=m, seqlen_k=n, seed=case.seed + b))
        for b, (m, n) in enumerate(lengths)
    ]
    parts = [part.with_(sinks=parts[0].sinks) for part in parts]
    device = parts[0].q.device
    lay, lay_operand = LAYOUTS[case.layout], OPERAND_LAYOUTS[case.operand_layout]

    def joined(name: str) -> Tensor:
        return lay(torch.cat([getattr(part, name) for part in parts], dim=1))[0]

    def joined_operand(name: str, letters: str) -> Tensor | None:
        if not letters:
            return None
        values = [getattr(part, name) for part in parts]
        if letters[2] == "1":
            return lay_operand(torch.cat(values, dim=3))[0, :, 0].t()
        longest = max(n for _, n in lengths)
        # Behind a sequence's keys there are NaN, or a mask that is True: neither may be read.
        filler = True if name == "mask" else float("nan")
        wide = [torch.nn.functional.pad(x, (0, longest - x.shape[3]), value=filler) for x in values]
        return lay_operand(torch.cat(wide, dim=2))[0].transpose(0, 1)

    dlse = [part.dlse for part in parts if part.dlse is not None]
    rows, keys = (_sums(x) for x in zip(*lengths, strict=True))
    first = parts[0]
    cu_seqlens_q = torch.tensor(rows, dtype=torch.int32, device=device)
    # One tensor for both, as in self-attention, tells that rows and keys have the same boundaries.
    cu_seqlens_k = cu_seqlens_q if rows == keys else cu_seqlens_q.new_tensor(keys)
    return PackedProblem(
        parts,
        list(lengths),
        joined("q"),
        joined("k"),
        joined("v"),
        joined_operand("mask", case.mask),
        joined_operand("bias", case.bias),
        joined("dout"),
        torch.cat(dlse, dim=2)[0] if dlse else None,
        cu_seqlens_q,
        cu_seqlens_k,
        {
            "softmax_scale": first.softmax_scale,
            "is_causal": first.is_causal,
            "softcap": first.softcap,
        },
        first.wants,
        first.sinks,
    )


def call_packed(problem: PackedProblem, **more: Any) -> tuple[Tensor, Tensor]:
    with skipped_when_refused():
        out, lse = dmattn.flash_dmattn_varlen_func(
            *(problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k),
            *problem.longest,
            attn_mask=problem.mask,
            attn_bias=problem.bias,
            sinks=problem.sinks,
            return_lse=True,
            **(problem.numbers | target().options() | more),
        )
    return out, lse


def run_packed(problem: PackedProblem, **more: Any) -> dict[str, Tensor]:
    """Forward and backward on poisoned buffers: out, lse and the gradients that are wanted."""
    return differentiate(problem, lambda p: call_packed(p, **more))


def split_results(problem: PackedProblem, found: dict[str, Tensor]) -> list[Results]:
    """The results of each sequence, as if it had been alone, without dsinks, a sum over them."""
    results = []
    for rows, keys in problem.spans():
        part = {
            "out": found["out"][None, rows],
            "lse": found["lse"][None, :, rows],
            "dq": found["dq"][None, rows] if "dq" in found else None,
            "dk": found["dk"][None, keys] if "dk" in found else None,
            "dv": found["dv"][None, keys] if "dv" in found else None,
        }
        if "dbias" in found:
            dbias = found["dbias"]
            if dbias.dim() == 2:
                part["dbias"] = dbias[keys].t()[None, :, None]
            else:
                count = keys.stop - keys.start
                assert not dbias[rows, :, count:].any(), "dbias behind the keys of a sequence"
                part["dbias"] = dbias[rows, :, :count].transpose(0, 1)[None]
        results.append(Results(**part))  # type: ignore[arg-type]
    return results


def check_packed(case: Case, lengths: Lengths, **more: Any) -> PackedProblem:
    """Builds, runs and judges; an AssertionError names what is too far off, and where."""
    problem = build_packed(case, lengths)
    found = run_packed(problem, deterministic=case.deterministic, **more)
    judge_packed(problem, found)
    return problem


def judge_packed(problem: PackedProblem, found: dict[str, Tensor]) -> None:
    like = {"out": problem.dout, "dq": problem.q, "dk": problem.k, "dv": problem.v}
    if problem.bias is not None:
        like["dbias"] = problem.bias
    if problem.sinks is not None:
        like["dsinks"] = problem.sinks
    for name, value in found.items():
        if name in like:
            assert (value.shape, value.dtype) == (like[name].shape, like[name].dtype), name
    if "dsinks" in found:
        _judge_sinks(problem, found["dsinks"])
    if _too_far(problem, found, deviations):
        wrong = _too_far(problem, found, all_allowances)
        assert not wrong, "too far from the oracle\n" + "\n".join(wrong)


def _judge_sinks(problem: PackedProblem, dsinks: Tensor) -> None:
    """The gradient of sinks is a sum over all sequences, and so is its allowed error."""
    wanted, allowed = torch.zeros_like(dsinks, dtype=torch.float64), 0.0
    for part in problem.parts:
        exact, plain = solve(part, torch.float64).dsinks, solve(part).dsinks
        assert exact is not None and plain is not None
        wanted += exact
        terms = roundoff(part)
        allowed += 2 * max_error(plain, exact)
        allowed += ROUNDINGS * sum_eps(part) * (1 + terms.all.get("dsinks", 0.0))
        allowed += torch.finfo(part.q.dtype).eps / 2 * terms.of_out.get("dsinks", 0.0)
    allowed += torch.finfo(dsinks.dtype).eps / 2 * float(wanted.abs().max())
    error = max_error(dsinks, wanted)
    assert error <= allowed, f"dsinks: {error:.3e} > {allowed:.3e}"


def _too_far(
    problem: PackedProblem,
    found: dict[str, Tensor],
    rule: Callable[[Problem, Results], list[Deviation]],
) -> list[str]:
    """The tensors that are too far off, with the largest error of any sequence.

    It is compared with the largest error that is allowed for any sequence, as in a batch, since in
    a sequence of a few rows the plain computation may be exact by luck.
    """
    rows: dict[str, list[Deviation]] = {}
    for part, results in zip(problem.parts, split_results(problem, found), strict=True):
        for row in rule(part.with_(wants=part.wants.replace("s", "")), results):
            rows.setdefault(row.name, []).append(row)
    wrong = []
    for name, each in rows.items():
        worst = max(range(len(each)), key=lambda b: _rank(each[b].error))
        allowed = max(row.allowed for row in each)
        if not each[worst].error <= allowed:
            error, lengths = each[worst].error, problem.lengths[worst]
            wrong.append(f"{name} of sequence {worst}, {lengths}: {error:.3e} > {allowed:.3e}")
    return wrong


def _rank(error: float) -> float:
    return float("inf") if error != error else error
