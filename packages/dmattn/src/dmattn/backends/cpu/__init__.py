"""Attention on the CPU, in torch operations, with memory linear in both lengths."""

from torch import Tensor

from dmattn.backends.base import Backend
from dmattn.backends.cpu import attention
from dmattn.problem import Gradients, Needs, Problem, Results


class CpuBackend(Backend):
    """Serves every problem whose tensors are on the CPU."""

    name = "cpu"
    devices = ("cpu",)

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, problem: Problem) -> list[Exception]:
        return []

    def slow_paths(self, problem: Problem) -> list[str]:
        notes = []
        if problem.packing is not None:
            notes.append("packed sequences are computed one after another")
        mask = problem.mask
        has_rows = mask is not None and (mask.dim() == 3 or (mask.dim() == 4 and mask.shape[2] > 1))
        if has_rows:
            notes.append(
                "attn_mask has rows of its own: all keys are computed, and hidden afterwards; of "
                "one that is alike for all rows only the kept keys are"
            )
        return notes

    def forward(self, problem: Problem, for_backward: bool = True) -> Results:
        return attention.forward(problem)

    def backward(
        self, problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        return attention.backward(problem, results, dout, dlse, needs)
