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

    def forward(self, problem: Problem, for_backward: bool = True) -> Results:
        return attention.forward(problem)

    def backward(
        self, problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        return attention.backward(problem, results, dout, dlse, needs)
