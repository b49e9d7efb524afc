"""Attention on NVIDIA GPUs: memory from torch, work by the kernels of dmattn_kernels.

This is the path of every training step and decoded token, so the host work per call is kept small.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dmattn.key_lists import Selection
from dmattn.checks import (
    HEAD_DIM_MULTIPLE,
    check_backward_inputs,
    check_inputs,
    check_selected_bias,
    check_selection,
    empty_backward_outputs,
    lse_shape,
)
from dmattn.packed_checks import Packing, check_packed_inputs
from dmattn.backends.cuda.kernels import View, check_device, launch, load_kernels, view, views

def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    selection: Selection | None = None,
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The CUDA implementation of dmattn::fwd: out (B, Sq, H, D) and lse (B, H, Sq), float32.

    `lse_rest`, as lse, is written where given; see `shapes.empty_lse_rest`.

    Raises:
        TypeError, ValueError: as `shapes.check_inputs` and `shapes.check_selection`.
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    dims = check_inputs(q, k, v, mask, bias)
    batch, seqlen_q, seqlen_k, nheads, _, head_dim = dims
    if selection is not None:
        check_selection(selection, mask, dims, is_causal, q.device)
    device = q.get_device()
    check_device(device)
    operands = (q, k, v, mask, bias)
    numbers = (softmax_scale, softcap, is_causal)
    rows = (batch, nheads, seqlen_q)
    return _forward(operands, numbers, head_dim, rows, seqlen_k > 0, selection, lse_rest, ())


def backward(
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
    selection: Selection | None = None,
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The CUDA implementation of dmattn::bwd: dq, dk, dv, dbias, each only where `needs` says so.

    Raises:
        TypeError, ValueError: as `shapes.check_inputs`, `shapes.check_backward_inputs` and
            `shapes.check_selection`; a bias with rows has no gradient with a selection.
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    dims = check_inputs(q, k, v, mask, bias)
    check_selection(selection, mask, dims, is_causal, q.device)
    check_selected_bias(selection, bias, needs[3])
    device = q.get_device()
    check_device(device)
    check_backward_inputs(dout, dlse, q, out, lse, needs)
    if dims.batch == 0 or dims.seqlen_q == 0 or dims.seqlen_k == 0:
        return _zero_gradients(q, k, v, bias, needs)
    operands, results = (q, k, v, mask, bias), (out, lse, dout, dlse, lse_rest)
    numbers = (softmax_scale, softcap, is_causal, deterministic)
    return _backward(operands, results, numbers, dims.head_dim, needs, selection, ())


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    packing: Packing,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The CUDA implementation of dmattn::varlen_fwd: out (Tq, H, D) and lse (H, Tq), float32.

    `lse_rest`, as lse, is written where given; see `shapes.empty_lse_rest`.

    Raises:
        TypeError, ValueError: as `varlen_shapes.check_packed_inputs`.
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    dims = check_packed_inputs(q, k, v, mask, bias, packing)
    check_device(q.get_device())
    packing = _contiguous(packing)
    operands = (q, k, v, mask, bias)
    numbers = (softmax_scale, softcap, is_causal)
    rows, has_keys = lse_shape(q), dims.total_k > 0
    return _forward(operands, numbers, dims.head_dim, rows, has_keys, None, lse_rest, packing)


def varlen_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    packing: Packing,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool,
    needs: Sequence[bool],
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The CUDA implementation of dmattn::varlen_bwd: dq, dk, dv, dbias, each only where needed.

    Raises:
        TypeError, ValueError: as `varlen_shapes.check_packed_inputs` and
            `shapes.check_backward_inputs`.
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    dims = check_packed_inputs(q, k, v, mask, bias, packing)
    check_backward_inputs(dout, dlse, q, out, lse, needs)
    packing = _contiguous(packing)
    check_device(q.get_device())
    if dims.total_q == 0 or dims.total_k == 0:
        return _zero_gradients(q, k, v, bias, needs)
    operands, results = (q, k, v, mask, bias), (out, lse, dout, dlse, lse_rest)
    numbers = (softmax_scale, softcap, is_causal, deterministic)
    return _backward(operands, results, numbers, dims.head_dim, needs, None, packing)


# Query, key, value, mask, bias.
_Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
# out, lse, dout, dlse, lse_rest.
_Results = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def _forward(
    operands: _Operands,
    numbers: tuple[float, float, bool],
    head_dim: int,
    rows: tuple[int, ...],
    has_keys: bool,
    selection: Selection | None,
    lse_rest: Tensor | None,
    packing: Packing | tuple[()],
) -> tuple[Tensor, Tensor]:
    """What both forwards do once they have looked at their arguments.

    `numbers`: softmax_scale, softcap, is_causal. `rows`: the shape of lse. `packing`: of packed
    sequences, contiguous.
    """
    q, k, v, mask, bias = operands
    if head_dim % HEAD_DIM_MULTIPLE:
        q, k, v = _pad(q), _pad(k), _pad(v)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(rows, dtype=torch.float32)
    if not has_keys:
        if lse_rest is not None:
            lse_rest.zero_()
        return out.zero_()[..., :head_dim].contiguous(), lse.fill_(float("-inf"))
    if 0 not in rows:
        core, codes = load_kernels()
        device = q.get_device()
        params = core.FwdParams(
            device,
            view(q, codes),
            view(k, codes),
            view(v, codes),
            None if mask is None else view(mask, codes),
            None if bias is None else view(bias, codes),
            view(out, codes),
            view(lse, codes),
            *numbers,
            0,
            None if selection is None else views(selection, codes),
            None if lse_rest is None else view(lse_rest, codes),
            *(_packing_views(packing, codes) if packing else ()),
        )
        launch(params, q, device)
    if head_dim % HEAD_DIM_MULTIPLE:
        out = out[..., :head_dim].contiguous()
    return out, lse


def _backward(
    operands: _Operands,
    results: _Results,
    numbers: tuple[float, float, bool, bool],
    head_dim: int,
    needs: Sequence[bool],
    selection: Selection | None,
    packing: Packing | tuple[()],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What both backwards do once they have looked at their arguments, where there is work.

    `numbers`: softmax_scale, softcap, is_causal, deterministic.
    """
    q, k, v, mask, bias = operands
    out, lse, dout, dlse, lse_rest = results
    padded = head_dim % HEAD_DIM_MULTIPLE != 0
    if padded:
        q, k, v, out, dout = _pad(q), _pad(k), _pad(v), _pad(out), _pad(dout)
    elif dout.stride(-1) != 1:
        dout = dout.contiguous()  # such as the expanded gradient of a sum
    out, lse = out.contiguous(), lse.contiguous()  # as forward made them, unless a compiler moved
    dlse = None if dlse is None else dlse.contiguous()
    lse_rest = None if lse_rest is None else lse_rest.contiguous()
    dq, dk, dv, dbias = empty_backward_outputs(q, k, v, bias, needs)
    core, codes = load_kernels()
    device = q.get_device()
    params = core.BwdParams(
        device,
        view(q, codes),
        view(k, codes),
        view(v, codes),
        None if mask is None else view(mask, codes),
        None if bias is None else view(bias, codes),
        view(out, codes),
        view(lse, codes),
        view(dout, codes),
        None if dlse is None else view(dlse, codes),
        view(dq, codes) if needs[0] else None,
        view(dk, codes) if needs[1] else None,
        view(dv, codes) if needs[2] else None,
        view(dbias, codes) if needs[3] and bias is not None else None,
        *numbers,
        None if selection is None else views(selection, codes),
        None if lse_rest is None else view(lse_rest, codes),
        *(_packing_views(packing, codes) if packing else ()),
    )
    launch(params, q, device)
    if padded:
        dq, dk, dv = (
            g[..., :head_dim].contiguous() if need else g
            for g, need in zip((dq, dk, dv), needs, strict=False)
        )
    return dq, dk, dv, dbias


def _zero_gradients(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = empty_backward_outputs(q, k, v, bias, needs)
    for grad in grads:
        grad.zero_()
    return grads


def _contiguous(packing: Packing) -> Packing:
    """The caller holds on to it until the launch: a copy's memory would serve the workspace."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packing
    return Packing(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), max_seqlen_q, max_seqlen_k)


def _packing_views(
    packing: Packing, codes: dict[torch.dtype, int]
) -> tuple[View, View, int, int]:
    """The last arguments of the parameter structs."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packing
    return view(cu_seqlens_q, codes), view(cu_seqlens_k, codes), max_seqlen_q, max_seqlen_k


def _pad(t: Tensor) -> Tensor:
    """A contiguous copy with zeros up to the next multiple of 8 along head_dim."""
    head_dim = t.shape[-1]
    padded = t.new_zeros((*t.shape[:-1], head_dim + -head_dim % HEAD_DIM_MULTIPLE))
    padded[..., :head_dim] = t
    return padded


