"""The operators dmattn::fwd and dmattn::bwd: schemas, implementations, fakes and gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dmattn.ops import cpu, cuda
from dmattn.ops.lists import as_selection
from dmattn.ops.shapes import (
    check_backward_inputs,
    check_inputs,
    check_selected_bias,
    check_selection,
    empty_backward_outputs,
    empty_forward_outputs,
    empty_lse_rest,
)

_FWD = "dmattn::fwd"
_BWD = "dmattn::bwd"
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
    sel_end: Tensor | None = None,
    sel_idx: Tensor | None = None,
    sel_count: Tensor | None = None,
    sel_full: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    selection = as_selection(sel_end, sel_idx, sel_count, sel_full)
    out, lse = cpu.forward(q, k, v, mask, bias, softmax_scale, is_causal, softcap, selection)
    return out, lse, empty_lse_rest(q, bias)


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
    sel_end: Tensor | None = None,
    sel_idx: Tensor | None = None,
    sel_count: Tensor | None = None,
    sel_full: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    selection = as_selection(sel_end, sel_idx, sel_count, sel_full)
    rest = empty_lse_rest(q, bias)
    out, lse = cuda.forward(
        q,
        k,
        v,
        mask,
        bias,
        softmax_scale,
        is_causal,
        softcap,
        selection,
        rest if rest.dim() == 3 else None,
    )
    return out, lse, rest


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
    sel_end: Tensor | None = None,
    sel_idx: Tensor | None = None,
    sel_count: Tensor | None = None,
    sel_full: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dims = check_inputs(q, k, v, mask, bias)
    selection = as_selection(sel_end, sel_idx, sel_count, sel_full)
    check_selection(selection, mask, dims, is_causal, q.device)
    return (*empty_forward_outputs(q), empty_lse_rest(q, bias))


def _cpu_bwd(
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
    sel_end: Tensor | None = None,
    sel_idx: Tensor | None = None,
    sel_count: Tensor | None = None,
    sel_full: Tensor | None = None,
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    selection = as_selection(sel_end, sel_idx, sel_count, sel_full)
    given = (dout, dlse, q, k, v, mask, bias, out, lse)
    return cpu.backward(*given, softmax_scale, is_causal, softcap, deterministic, needs, selection)


def _cuda_bwd(
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
    sel_end: Tensor | None = None,
    sel_idx: Tensor | None = None,
    sel_count: Tensor | None = None,
    sel_full: Tensor | None = None,
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    selection = as_selection(sel_end, sel_idx, sel_count, sel_full)
    rest = lse_rest if lse_rest is not None and lse_rest.dim() == 3 else None
    given = (dout, dlse, q, k, v, mask, bias, out, lse)
    return cuda.backward(
        *given, softmax_scale, is_causal, softcap, deterministic, needs, selection, rest
    )


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
    sel_end: Tensor | None = None,
    sel_idx: Tensor | None = None,
    sel_count: Tensor | None = None,
    sel_full: Tensor | None = None,
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dims = check_inputs(q, k, v, mask, bias)
    selection = as_selection(sel_end, sel_idx, sel_count, sel_full)
    check_selection(selection, mask, dims, is_causal, q.device)
    check_selected_bias(selection, bias, needs[3])
    check_backward_inputs(dout, dlse, q, out, lse, needs)
    return empty_backward_outputs(q, k, v, bias, needs)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
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


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise RuntimeError(
        "dmattn::bwd is not differentiable: dmattn attention has first derivatives only"
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
