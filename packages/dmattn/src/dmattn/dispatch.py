"""What the public attention functions do before they call an operator."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dmattn.backends.registry import BACKENDS, why_unavailable
from dmattn.checks import check_tensors


def without_nan(scores: Tensor) -> Tensor:
    """Scores with -inf for NaN: a key that would not be selected, where nothing is selected."""
    return torch.nan_to_num(scores, nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def default_scale(query: Any) -> Any:
    if isinstance(query, Tensor) and query.dim() > 0 and query.shape[-1] > 0:
        return query.shape[-1] ** -0.5
    return 1.0  # the shape is wrong, and the checks to come will say so


def check_number(name: str, value: Any) -> None:
    if not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}: got {type(value).__name__}, wanted a float")
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name}: got {value}, wanted a finite number")


def check_backend(backend: str, query: Tensor) -> None:
    if backend not in BACKENDS:
        why_unavailable(backend)
    check_tensors(query, query, query, None, None)
    device = query.device.type
    if backend != device:
        raise ValueError(f"backend: got {backend!r}, wanted {device!r} or None for tensors there")


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Without this, torch would drop the tangents of a registered operator silently."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    unpack: Callable[[Tensor], Any] = forward_ad.unpack_dual
    if any(t is not None and unpack(t).tangent is not None for t in tensors):
        raise RuntimeError("forward-mode derivatives of dmattn attention are not available")


def is_plain_call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None
) -> bool:
    """Whether the dispatcher would do nothing but call the CPU or CUDA implementation.

    Then calling that directly saves a third of the host time of a small call.
    """
    if torch.compiler.is_compiling():
        return False
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    ):
        return False
    grad = torch.is_grad_enabled()
    return (
        _is_plain(q, grad)
        and _is_plain(k, grad)
        and _is_plain(v, grad)
        and (mask is None or _is_plain(mask, grad))
        and (bias is None or _is_plain(bias, grad))
        and (q.is_cuda or q.is_cpu)
    )


def _is_plain(t: Tensor, grad: bool) -> bool:
    kind = type(t)
    if kind is not Tensor and kind is not torch.nn.Parameter:
        return False
    return not (grad and t.requires_grad) and not t.is_neg()
