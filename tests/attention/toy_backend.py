"""A backend in one file: `dmattn.reference`, called by the public functions like any other.

The row "toy" of targets.py takes it through the suite. That shows what a new backend needs, a
subclass of Backend and a row in the registry, and that `dmattn.reference` agrees with the oracle.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dmattn.backends import registry
from dmattn.backends.base import Backend
from dmattn.problem import Gradients, Needs, Problem, Results
from dmattn.reference import reference_attention, reference_gradients


class ToyBackend(Backend):
    """Serves sequences that are not packed, without lists of keys."""

    name = "toy"
    devices = ("cpu",)

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, problem: Problem) -> list[Exception]:
        reasons: list[Exception] = []
        if problem.packing is not None:
            reasons.append(ValueError("cu_seqlens_q: got packed sequences, wanted none for 'toy'"))
        if problem.key_lists is not None:
            reasons.append(ValueError("selection: got lists of keys, wanted a mask for 'toy'"))
        return reasons

    def forward(self, problem: Problem, for_backward: bool = True) -> Results:
        out, lse, _ = reference_attention(*_arguments(problem))
        wide = torch.promote_types(problem.q.dtype, torch.float32)
        out = out.to(problem.q.dtype).contiguous()
        return Results(out, lse.to(wide), lse.new_empty(0, dtype=torch.float32))

    def backward(
        self, problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        empty = (results.lse == -math.inf).transpose(1, 2)[..., None]
        found = reference_gradients(
            *_arguments(problem), dout=dout.masked_fill(empty, 0.0), dlse=dlse
        )
        grads = (found.dq, found.dk, found.dv, found.dbias)
        operands = (problem.q, problem.k, problem.v, problem.bias)
        return Gradients(*map(_as_operand, grads, operands, needs, [problem.q] * 4))


def _arguments(problem: Problem) -> tuple[Any, ...]:
    numbers = (problem.softmax_scale, problem.is_causal, problem.softcap)
    return problem.q, problem.k, problem.v, problem.mask, problem.bias, *numbers


def _as_operand(grad: Tensor | None, operand: Tensor | None, needed: bool, like: Tensor) -> Tensor:
    """In the dtype of its operand, or (0,) where it is not needed."""
    if grad is None or operand is None or not needed:
        return (like if operand is None else operand).new_empty(0)
    return grad.to(operand.dtype).contiguous()


registry.BACKENDS.append(ToyBackend())
