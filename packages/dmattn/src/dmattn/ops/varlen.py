"""The operators dmattn::varlen_fwd and dmattn::varlen_bwd: attention over packed sequences.

As `ops.library`, for tensors without a batch. Masks and biases are (heads, Tk) or
(heads, Tq, max_seqlen_k).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dmattn.ops import cuda, varlen_cpu
from dmattn.ops.library import TAGS
from dmattn.ops.shapes import (
    check_backward_inputs,
    empty_backward_outputs,
    empty_forward_outputs,
    empty_lse_rest,
)
from dmattn.ops.varlen_shapes import Packing, check_packed_inputs

_FWD = "dmattn::varlen_fwd"
_BWD = "dmattn::varlen_bwd"
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


def _cpu_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = varlen_cpu.forward(q, k, v, mask, bias, packing, softmax_scale, is_causal, softcap)
    return out, lse, empty_lse_rest(q, bias)


def _cuda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    rest = empty_lse_rest(q, bias)
    out, lse = cuda.varlen_forward(
        q,
        k,
        v,
        mask,
        bias,
        packing,
        softmax_scale,
        is_causal,
        softcap,
        rest if rest.dim() == 2 else None,
    )
    return out, lse, rest


def _fake_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_packed_inputs(q, k, v, mask, bias, packing)
    return (*empty_forward_outputs(q), empty_lse_rest(q, bias))


def _cpu_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool,
    needs: Sequence[bool],
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    given = (dout, dlse, q, k, v, mask, bias, packing, out, lse)
    return varlen_cpu.backward(*given, softmax_scale, is_causal, softcap, deterministic, needs)


def _cuda_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool,
    needs: Sequence[bool],
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    rest = lse_rest if lse_rest is not None and lse_rest.dim() == 2 else None
    given = (dout, dlse, q, k, v, mask, bias, packing, out, lse)
    return cuda.varlen_backward(
        *given, softmax_scale, is_causal, softcap, deterministic, needs, rest
    )


def _fake_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool,
    needs: Sequence[bool],
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_packed_inputs(q, k, v, mask, bias, packing)
    check_backward_inputs(dout, dlse, q, out, lse, needs)
    return empty_backward_outputs(q, k, v, bias, needs)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
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


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise RuntimeError(
        "dmattn::varlen_bwd is not differentiable: dmattn attention has first derivatives only"
    )


def _register() -> None:
    torch.library.define(_FWD, _FWD_SCHEMA, tags=TAGS)
    torch.library.define(_BWD, _BWD_SCHEMA, tags=TAGS)
    torch.library.impl(_FWD, "cpu", _cpu_fwd)
    torch.library.impl(_FWD, "cuda", _cuda_fwd)
    torch.library.impl(_BWD, "cpu", _cpu_bwd)
    torch.library.impl(_BWD, "cuda", _cuda_bwd)
    torch.library.register_fake(_FWD, _fake_fwd)
    torch.library.register_fake(_BWD, _fake_bwd)
    torch.library.register_autograd(_FWD, _backward, setup_context=_setup_context)
    torch.library.register_autograd(_BWD, _no_double_backward)


_register()
