"""Attention by kernels in triton, for devices that the compiled kernels do not serve."""

import importlib.util
import sys

import torch
from torch import Tensor

from dmattn.backends.base import Backend
from dmattn.backends.triton.tiles import is_interpreted, is_old_nvidia
from dmattn.problem import Gradients, Needs, Problem, Results, is_per_key
from dmattn.validation import one_of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NO_BFLOAT16 = (torch.float16, torch.float32)


class TritonBackend(Backend):
    """Serves GPUs of any vendor that triton compiles for, in half precision and float32.

    On the CPU it runs in triton's interpreter, which is slow and made for tests: only where
    TRITON_INTERPRET=1 was set before triton was imported, and only when asked for by name.
    """

    name = "triton"
    devices = ("cuda", "xpu", "cpu")
    by_name_only = ("cpu",)

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; pip install triton"
        if is_interpreted() or torch.cuda.is_available() or torch.xpu.is_available():
            return None
        return (
            "torch sees no GPU, and TRITON_INTERPRET=1, which runs the kernels on the CPU, was not "
            "set before triton was imported"
        )

    def unavailable_on(self, device: torch.device) -> str | None:
        # Looking for a package in every call would take longer than a launch.
        return None if "triton" in sys.modules else self.unavailable()

    def unsupported(self, problem: Problem) -> list[Exception]:
        q = problem.q
        if q.device.type == "cpu" and not is_interpreted():
            text = (
                f"query: got device {q.device}, wanted a GPU, or TRITON_INTERPRET=1 set before "
                "triton is imported, for backend 'triton'"
            )
            return [ValueError(text)]
        wanted = _NO_BFLOAT16 if is_old_nvidia(q.device) else _DTYPES
        if q.dtype not in wanted:
            text = f"wanted {one_of(wanted)} for backend 'triton' on {q.device}"
            return [TypeError(f"query: got dtype {q.dtype}, {text}")]
        return []

    def slow_paths(self, problem: Problem) -> list[str]:
        q, bias = problem.q, problem.bias
        notes = []
        if q.dtype == torch.float32:
            notes.append("products of float32 use no matrix units")
        elif is_old_nvidia(q.device):
            notes.append("products on NVIDIA GPUs older than sm_80 use no matrix units")
        if problem.deterministic and problem.is_causal and problem.key_lists is not None:
            notes.append("a deterministic backward over a selection is a launch for every 128 rows")
        if bias is not None and bias.requires_grad and _has_rows_and_keys(problem, bias):
            notes.append("the gradient of an attn_bias with rows and keys takes a pass of its own")
        return notes

    def forward(self, problem: Problem, for_backward: bool = True) -> Results:
        from dmattn.backends.triton import attention

        return attention.forward(problem, for_backward)

    def backward(
        self, problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        from dmattn.backends.triton import attention

        return attention.backward(problem, results, dout, dlse, needs)


def _has_rows_and_keys(problem: Problem, bias: Tensor) -> bool:
    if problem.packing is not None:
        return not is_per_key(bias)
    return bias.shape[2] > 1 and bias.shape[3] > 1
