"""Attention by FlexAttention of torch: a kernel that torch.compile writes for each kind of call."""

import functools
import importlib.util

import torch
from torch import Tensor

from dmattn.backends.base import Backend, Graph
from dmattn.backends.flex import attention, limits, torch_flex
from dmattn.problem import Gradients, Needs, Problem, Results
from dmattn.validation import one_of

_CUDA_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class FlexBackend(Backend):
    """Serves every problem on the CPU, and on GPUs those that `limits` and the dtype allow.

    Deterministic problems with a bias are refused, as the gradient of a bias is never repeatable.
    """

    name = "flex"
    devices = ("cuda", "cpu")
    goes_by_kind = True
    keeps_graphs = True

    def unavailable(self) -> str | None:
        return torch_flex.missing()

    def unsupported(self, problem: Problem) -> list[Exception]:
        reasons: list[Exception] = []
        if problem.q.is_cuda:
            if problem.q.dtype not in _CUDA_DTYPES:
                wanted = one_of(_CUDA_DTYPES)
                text = (
                    f"query: got dtype {problem.q.dtype}, wanted {wanted} for backend 'flex' on "
                    "CUDA"
                )
                reasons.append(TypeError(text))
            elif not _has_triton():
                text = (
                    f"query: got dtype {problem.q.dtype} on {problem.q.device}, which backend "
                    "'flex' takes where triton is installed: pip install triton"
                )
                reasons.append(ValueError(text))
            else:
                reasons += limits.refusals(problem)
        if problem.deterministic and problem.bias is not None:
            text = (
                "deterministic: got True beside attn_bias, or from "
                "torch.use_deterministic_algorithms, wanted False for backend 'flex', which adds "
                "up the gradient of a bias in no fixed order"
            )
            reasons.append(ValueError(text))
        return reasons

    def slow_paths(self, problem: Problem) -> list[str]:
        return _on_cuda(problem) if problem.q.is_cuda else [_FORMULA]

    def forward(self, problem: Problem, for_backward: bool = True) -> Results:
        told = torch_flex.is_called_directly()
        with torch_flex.as_if_called_directly():
            return attention.forward(problem, told)

    def forward_with_graph(self, problem: Problem) -> tuple[Results, Graph] | None:
        told = torch_flex.is_called_directly()
        with torch_flex.as_if_called_directly():
            return attention.forward_with_graph(problem, told)

    def backward(
        self, problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        told = torch_flex.is_called_directly()
        with torch_flex.as_if_called_directly():
            return attention.backward(problem, results, dout, dlse, needs, told)


@functools.cache
def _has_triton() -> bool:
    """Whether torch.compile can make kernels for a GPU."""
    return importlib.util.find_spec("triton") is not None


_FORMULA = (
    "FlexAttention has no kernel for the CPU that returns lse or gradients: torch computes it by "
    "its formula, with all scores, (batch, nheads, seqlen_q, seqlen_k), in memory; backend 'cpu' "
    "does not"
)


def _on_cuda(problem: Problem) -> list[str]:
    head_dim = problem.q.shape[-1]
    notes = [
        "torch.compile makes a kernel for the first call of each kind, which takes many seconds"
    ]
    if not attention.keeps_graph(problem):
        notes.append(
            "with attn_bias or sinks, and in float32, the backward computes the forward once more"
        )
    if limits.kernel_head_dim(head_dim) != head_dim:
        notes.append(
            f"head_dim {head_dim} is no power of 2 from 16 on, so query, key and value are copied "
            f"to be padded to {limits.kernel_head_dim(head_dim)}"
        )
    if problem.key_lists is not None:
        notes.append(
            "of the keys that a selection leaves out only whole blocks of 128 are skipped; backend "
            "'cuda' skips single keys"
        )
    if problem.bias is not None:
        notes.append("the gradient of attn_bias is added up by atomics, one for each score")
    return notes
