"""The operators dmattn::fwd and dmattn::bwd: schemas, implementations, fakes and gradients."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn.backends.cpu import attention as cpu
from dmattn.backends.cuda import attention as cuda
from dmattn.key_lists import Selection, as_selection
from dmattn.checks import (
    check_backward_inputs,
    check_inputs,
    check_selected_bias,
    check_selection,
    empty_backward_outputs,
    empty_forward_outputs,
    empty_lse_rest,
)

# `deterministic` changes nothing forward; autograd hands it on to the backward operator. The four
# tensors of a selection (`lists.Selection`) are given all or none. `lse_rest` is for the backward
# operator; see `shapes.empty_lse_rest`.
_SELECTION = (
    "Tensor? sel_end=None, Tensor? sel_idx=None, Tensor? sel_count=None, Tensor? sel_full=None"
)
_FWD_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, float softmax_scale, "
    f"bool is_causal, float softcap, bool deterministic=False, {_SELECTION}) "
    "-> (Tensor out, Tensor lse, Tensor lse_rest)"
)
_BWD_SCHEMA = (
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, "
    "Tensor out, Tensor lse, float softmax_scale, bool is_causal, float softcap, "
    f"bool deterministic, bool[4] needs, {_SELECTION}, Tensor? lse_rest=None) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)"
)
# Strides decide what is read in place, so a compiler may not choose others. Older releases of torch
# know only the weaker promise to keep the order of the strides.
TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)


class FwdCall(NamedTuple):
    """The arguments of dmattn::fwd, named and ordered as in its schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None
    softmax_scale: float
    is_causal: bool
    softcap: float
    deterministic: bool = False
    sel_end: Tensor | None = None
    sel_idx: Tensor | None = None
    sel_count: Tensor | None = None
    sel_full: Tensor | None = None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.q, self.k, self.v, self.mask, self.bias

    @property
    def numbers(self) -> tuple[float, bool, float]:
        return self.softmax_scale, self.is_causal, self.softcap

    @property
    def selection(self) -> Selection | None:
        return as_selection(self.sel_end, self.sel_idx, self.sel_count, self.sel_full)


class BwdCall(NamedTuple):
    """The arguments of dmattn::bwd, named and ordered as in its schema."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None
    out: Tensor
    lse: Tensor
    softmax_scale: float
    is_causal: bool
    softcap: float
    deterministic: bool
    needs: Sequence[bool]
    sel_end: Tensor | None = None
    sel_idx: Tensor | None = None
    sel_count: Tensor | None = None
    sel_full: Tensor | None = None
    lse_rest: Tensor | None = None

    @property
    def selection(self) -> Selection | None:
        return as_selection(self.sel_end, self.sel_idx, self.sel_count, self.sel_full)


Forward = tuple[Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def written_rest(rest: Tensor | None, lse: Tensor) -> Tensor | None:
    """lse_rest as the kernels take it: what stands in for none has another shape."""
    return rest if rest is not None and rest.dim() == lse.dim() else None


def _cpu_fwd(*given: Any, **named: Any) -> Forward:
    call = FwdCall(*given, **named)
    out, lse = cpu.forward(*call.operands, *call.numbers, call.selection)
    return out, lse, empty_lse_rest(call.q, call.bias)


def _cuda_fwd(*given: Any, **named: Any) -> Forward:
    call = FwdCall(*given, **named)
    rest = empty_lse_rest(call.q, call.bias)
    kept = rest if rest.dim() == 3 else None
    out, lse = cuda.forward(*call.operands, *call.numbers, call.selection, kept)
    return out, lse, rest


def _fake_fwd(*given: Any, **named: Any) -> Forward:
    call = FwdCall(*given, **named)
    dims = check_inputs(*call.operands)
    check_selection(call.selection, call.mask, dims, call.is_causal, call.q.device)
    return (*empty_forward_outputs(call.q), empty_lse_rest(call.q, call.bias))


def _cpu_bwd(*given: Any, **named: Any) -> Gradients:
    call = BwdCall(*given, **named)
    return cpu.backward(*call[:14], call.selection)


def _cuda_bwd(*given: Any, **named: Any) -> Gradients:
    call = BwdCall(*given, **named)
    return cuda.backward(*call[:14], call.selection, written_rest(call.lse_rest, call.lse))


def _fake_bwd(*given: Any, **named: Any) -> Gradients:
    call = BwdCall(*given, **named)
    dims = check_inputs(call.q, call.k, call.v, call.mask, call.bias)
    check_selection(call.selection, call.mask, dims, call.is_causal, call.q.device)
    check_selected_bias(call.selection, call.bias, call.needs[3])
    check_backward_inputs(call.dout, call.dlse, call.q, call.out, call.lse, call.needs)
    return empty_backward_outputs(call.q, call.k, call.v, call.bias, call.needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Forward) -> None:
    ctx.set_materialize_grads(False)  # a missing dlse is then None, and costs nothing
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs[:5], *output, *inputs[9:])
    ctx.settings = inputs[5:9]


def _backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, mask, bias, out, lse, rest, *selection = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4)]
    given = (dout, dlse, q, k, v, mask, bias, out, lse)
    grads = torch.ops.dmattn.bwd(*given, *ctx.settings, needs, *selection, rest)
    dq, dk, dv, dbias = (g if need else None for g, need in zip(grads, needs, strict=True))
    return dq, dk, dv, None, dbias, *[None] * 8


class Operator(NamedTuple):
    """A function and what it needs as a registered operator."""

    name: str
    schema: str
    cpu: Callable[..., Any]
    cuda: Callable[..., Any]
    fake: Callable[..., Any]


def register(
    forward: Operator,
    backward: Operator,
    gradients: Callable[..., Any],
    setup_context: Callable[..., Any],
) -> None:
    """Register a forward and its backward, which has no derivative of its own."""

    def no_double_backward(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(
            f"{backward.name} is not differentiable: dmattn attention has first derivatives only"
        )

    for operator in (forward, backward):
        torch.library.define(operator.name, operator.schema, tags=TAGS)
        torch.library.impl(operator.name, "cpu", operator.cpu)
        torch.library.impl(operator.name, "cuda", operator.cuda)
        torch.library.register_fake(operator.name, operator.fake)
    torch.library.register_autograd(forward.name, gradients, setup_context=setup_context)
    torch.library.register_autograd(backward.name, no_double_backward)


register(
    Operator("dmattn::fwd", _FWD_SCHEMA, _cpu_fwd, _cuda_fwd, _fake_fwd),
    Operator("dmattn::bwd", _BWD_SCHEMA, _cpu_bwd, _cuda_bwd, _fake_bwd),
    _backward,
    _setup_context,
)
