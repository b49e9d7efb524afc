"""Attention on the CPU, in operations of torch, with memory linear in Sq and in Sk."""

from torch import Tensor

from dmattn.backends.base import Backend
from dmattn.backends.cpu import attention
from dmattn.problem import Gradients, Needs, Problem, Results, has_rows


class CpuBackend(Backend):
    """Serves every problem whose tensors are on the CPU."""

    name = "cpu"
    devices = ("cpu",)
    goes_by_kind = True

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, problem: Problem) -> list[Exception]:
        return []

    def slow_paths(self, problem: Problem) -> list[str]:
        notes = []
        if problem.packing is not None:
            notes.append("packed sequences are computed one after another")
        if problem.mask is not None and has_rows(problem.mask):
            notes.append(
                "attn_mask has rows of its own, or a selection became such a mask: all keys are "
                "computed, and hidden afterwards; of a mask that is alike for all rows only the "
                "kept keys are"
            )
        return notes

    def forward(self, problem: Problem, for_backward: bool = True) -> Results:
        return attention.forward(problem)

    def backward(
        self, problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        return attention.backward(problem, results, dout, dlse, needs)
