"""The operators dmattn::fwd and dmattn::bwd: schemas, implementations, fakes and gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dmattn.ops import cpu, cuda
from dmattn.ops.shapes import (
    check_backward_inputs,
    check_inputs,
    empty_backward_outputs,
    empty_forward_outputs,
)

_FWD = "dmattn::fwd"
_BWD = "dmattn::bwd"
# `deterministic` changes nothing forward; autograd hands it on to the backward operator.
_FWD_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, float softmax_scale, "
    "bool is_causal, float softcap, bool deterministic=False) -> (Tensor out, Tensor lse)"
)
_BWD_SCHEMA = (
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, "
    "Tensor out, Tensor lse, float softmax_scale, bool is_causal, float softcap, "
    "bool deterministic, bool[4] needs) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)"
)
# Strides decide what is read in place, so a compiler may not choose others. Older releases of torch
# know only the weaker promise to keep the order of the strides.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)


def _cpu_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    return cpu.forward(q, k, v, mask, bias, softmax_scale, is_causal, softcap)


def _cuda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    return cuda.forward(q, k, v, mask, bias, softmax_scale, is_causal, softcap)


def _fake_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    check_inputs(q, k, v, mask, bias)
    return empty_forward_outputs(q)


def _fake_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_inputs(q, k, v, mask, bias)
    check_backward_inputs(dout, dlse, q, out, lse, needs)
    return empty_backward_outputs(q, k, v, bias, needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, bias, softmax_scale, is_causal, softcap, deterministic = inputs
    ctx.set_materialize_grads(False)  # a missing dlse is then None, and costs nothing
    ctx.save_for_backward(q, k, v, mask, bias, *output)
    ctx.settings = (softmax_scale, is_causal, softcap, deterministic)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, mask, bias, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4)]
    grads = torch.ops.dmattn.bwd(dout, dlse, q, k, v, mask, bias, out, lse, *ctx.settings, needs)
    dq, dk, dv, dbias = (g if need else None for g, need in zip(grads, needs, strict=True))
    return dq, dk, dv, None, dbias, None, None, None, None


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise RuntimeError(
        "dmattn::bwd is not differentiable: dmattn attention has first derivatives only"
    )


def _register() -> None:
    torch.library.define(_FWD, _FWD_SCHEMA, tags=_TAGS)
    torch.library.define(_BWD, _BWD_SCHEMA, tags=_TAGS)
    torch.library.impl(_FWD, "cpu", _cpu_fwd)
    torch.library.impl(_FWD, "cuda", _cuda_fwd)
    torch.library.impl(_BWD, "cpu", cpu.backward)
    torch.library.impl(_BWD, "cuda", cuda.backward)
    torch.library.register_fake(_FWD, _fake_fwd)
    torch.library.register_fake(_BWD, _fake_bwd)
    torch.library.register_autograd(_FWD, _backward, setup_context=_setup_context)
    torch.library.register_autograd(_BWD, _no_double_backward)


_register()
