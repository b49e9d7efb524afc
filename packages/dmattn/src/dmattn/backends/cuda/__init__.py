"""Attention on NVIDIA GPUs, by the kernels of dmattn_kernels."""

import torch
from torch import Tensor

from dmattn.backends.base import Backend, Prepared
from dmattn.backends.cuda import attention, kernels, prepared, slow_paths
from dmattn.checks import HEAD_DIM_MULTIPLE, wrong_strides
from dmattn.problem import Gradients, Needs, Problem, Results
from dmattn.validation import one_of

_DTYPES = (torch.float16, torch.bfloat16)


class CudaBackend(Backend):
    """Serves half-precision problems on GPUs of sm_80 or later."""

    name = "cuda"
    devices = ("cuda",)
    goes_by_kind = True

    def unavailable(self) -> str | None:
        reason = "torch sees no CUDA device"
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for device in range(devices):
            try:
                kernels.check_device(device)
            except RuntimeError as error:
                reason = str(error)
            else:
                return None
        return reason

    def unavailable_on(self, device: torch.device) -> str | None:
        return kernels.unserved(device.index)

    def unsupported(self, problem: Problem) -> list[Exception]:
        q, k, v = problem.q, problem.k, problem.v
        if q.dtype in _DTYPES and q.stride(-1) == 1 and k.stride(-1) == 1 and v.stride(-1) == 1:
            return []
        reasons: list[Exception] = []
        if q.dtype not in _DTYPES:
            reasons.append(
                TypeError(
                    f"query: got dtype {q.dtype}, wanted {one_of(_DTYPES)} on CUDA for backend "
                    "'cuda'; cast query, key and value, or call under torch.autocast"
                )
            )
        # With any other head_dim the operands are copied to be padded: strides do not matter.
        if q.shape[-1] % HEAD_DIM_MULTIPLE == 0:
            reasons += wrong_strides(q, k, v)
        return reasons

    def prefers_lists(self, device: torch.device, dtype: torch.dtype) -> bool:
        return dtype in _DTYPES and kernels.has_kernels_of_hopper(device.index)

    def slow_paths(self, problem: Problem) -> list[str]:
        return slow_paths.slow_paths(problem)

    def slow_outputs(self, problem: Problem, out: Tensor) -> list[str]:
        return slow_paths.slow_outputs(problem, out)

    def forward(self, problem: Problem, for_backward: bool = True) -> Results:
        return attention.forward(problem, for_backward)

    def forward_into(self, problem: Problem, out: Tensor, for_backward: bool = True) -> Results:
        return attention.forward(problem, for_backward, out)

    def prepare(self, problem: Problem) -> Prepared | None:
        return prepared.PreparedCall(self.name, problem) if prepared.suits(problem) else None

    def backward(
        self, problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        return attention.backward(problem, results, dout, dlse, needs)
