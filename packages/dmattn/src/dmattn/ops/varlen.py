"""The operators dmattn::varlen_fwd and dmattn::varlen_bwd: attention over packed sequences.

As `ops.library`, for tensors without a batch. Masks and biases are (heads, Tk) or
(heads, Tq, max_seqlen_k).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn.backends.cpu import packed as packed_cpu
from dmattn.backends.cuda import attention as cuda
from dmattn.ops.attention import Forward, Gradients, Operator, register, written_rest
from dmattn.checks import (
    check_backward_inputs,
    empty_backward_outputs,
    empty_forward_outputs,
    empty_lse_rest,
)
from dmattn.packed_checks import Packing, check_packed_inputs

_PACKED = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
)
_FWD_SCHEMA = (
    f"({_PACKED}, float softmax_scale, bool is_causal, float softcap, bool deterministic=False) "
    "-> (Tensor out, Tensor lse, Tensor lse_rest)"
)
_BWD_SCHEMA = (
    f"(Tensor dout, Tensor? dlse, {_PACKED}, Tensor out, Tensor lse, float softmax_scale, "
    "bool is_causal, float softcap, bool deterministic, bool[4] needs, Tensor? lse_rest=None) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)"
)


class FwdCall(NamedTuple):
    """The arguments of dmattn::varlen_fwd, named and ordered as in its schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    is_causal: bool
    softcap: float
    deterministic: bool = False

    @property
    def packed(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Packing]:
        return (*self[:5], Packing(*self[5:9]))

    @property
    def numbers(self) -> tuple[float, bool, float]:
        return self.softmax_scale, self.is_causal, self.softcap


class BwdCall(NamedTuple):
    """The arguments of dmattn::varlen_bwd, named and ordered as in its schema."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    out: Tensor
    lse: Tensor
    softmax_scale: float
    is_causal: bool
    softcap: float
    deterministic: bool
    needs: Sequence[bool]
    lse_rest: Tensor | None = None

    @property
    def packed(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Packing]:
        return (*self[2:7], Packing(*self[7:11]))

    @property
    def results(self) -> tuple[Tensor, Tensor, float, bool, float, bool]:
        return self[11:17]


def _cpu_fwd(*given: Any, **named: Any) -> Forward:
    call = FwdCall(*given, **named)
    out, lse = packed_cpu.forward(*call.packed, *call.numbers)
    return out, lse, empty_lse_rest(call.q, call.bias)


def _cuda_fwd(*given: Any, **named: Any) -> Forward:
    call = FwdCall(*given, **named)
    rest = empty_lse_rest(call.q, call.bias)
    out, lse = cuda.varlen_forward(*call.packed, *call.numbers, rest if rest.dim() == 2 else None)
    return out, lse, rest


def _fake_fwd(*given: Any, **named: Any) -> Forward:
    call = FwdCall(*given, **named)
    check_packed_inputs(*call.packed)
    return (*empty_forward_outputs(call.q), empty_lse_rest(call.q, call.bias))


def _cpu_bwd(*given: Any, **named: Any) -> Gradients:
    call = BwdCall(*given, **named)
    return packed_cpu.backward(call.dout, call.dlse, *call.packed, *call.results, call.needs)


def _cuda_bwd(*given: Any, **named: Any) -> Gradients:
    call = BwdCall(*given, **named)
    rest = written_rest(call.lse_rest, call.lse)
    return cuda.varlen_backward(call.dout, call.dlse, *call.packed, *call.results, call.needs, rest)


def _fake_bwd(*given: Any, **named: Any) -> Gradients:
    call = BwdCall(*given, **named)
    check_packed_inputs(*call.packed)
    check_backward_inputs(call.dout, call.dlse, call.q, call.out, call.lse, call.needs)
    return empty_backward_outputs(call.q, call.k, call.v, call.bias, call.needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Forward) -> None:
    ctx.set_materialize_grads(False)  # a missing dlse is then None, and costs nothing
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.bounds, ctx.settings = inputs[7:9], inputs[9:]


def _backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    *given, out, lse, rest = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4)]
    grads = torch.ops.dmattn.varlen_bwd(
        dout, dlse, *given, *ctx.bounds, out, lse, *ctx.settings, needs, rest
    )
    dq, dk, dv, dbias = (g if need else None for g, need in zip(grads, needs, strict=True))
    return dq, dk, dv, None, dbias, *[None] * 8


register(
    Operator("dmattn::varlen_fwd", _FWD_SCHEMA, _cpu_fwd, _cuda_fwd, _fake_fwd),
    Operator("dmattn::varlen_bwd", _BWD_SCHEMA, _cpu_bwd, _cuda_bwd, _fake_bwd),
    _backward,
    _setup_context,
)
