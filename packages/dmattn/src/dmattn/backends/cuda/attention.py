"""Attention on NVIDIA GPUs: memory from torch, work by the kernels of dmattn_kernels.

This is the path of every training step and decoded token, so the host work per call is kept small.
"""

import torch
from torch import Tensor

from dmattn.backends.cuda.kernels import check_device, launch, load_kernels, view, views
from dmattn.checks import HEAD_DIM_MULTIPLE
from dmattn.key_lists import Selection, without_spare_lists
from dmattn.problem import (
    Gradients,
    Needs,
    Packing,
    Problem,
    Results,
    empty_gradients,
    lse_shape,
)


def forward(problem: Problem, for_backward: bool = True) -> Results:
    """Results of a checked problem; lse in float32, lse_rest only with a bias and `for_backward`.

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    q, k, v, mask, bias = problem.q, problem.k, problem.v, problem.mask, problem.bias
    device = q.get_device()
    check_device(device)
    head_dim = q.shape[-1]
    padded = head_dim % HEAD_DIM_MULTIPLE != 0
    if padded:
        q, k, v = _pad(q), _pad(k), _pad(v)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(lse_shape(q), dtype=torch.float32)
    rest = torch.empty_like(lse) if for_backward and bias is not None else None
    if k.numel() == 0:
        out = out.zero_()[..., :head_dim].contiguous()
        return Results(out, lse.fill_(-torch.inf), None if rest is None else rest.zero_())
    if q.numel() > 0:
        core, codes = load_kernels()
        packing = problem.packing and _contiguous(problem.packing)
        lists = _lists(problem)
        params = core.FwdParams(
            device=device,
            q=view(q, codes),
            k=view(k, codes),
            v=view(v, codes),
            mask=None if mask is None else view(mask, codes),
            bias=None if bias is None else view(bias, codes),
            out=view(out, codes),
            lse=view(lse, codes),
            softmax_scale=problem.softmax_scale,
            softcap=problem.softcap,
            is_causal=problem.is_causal,
            selection=None if lists is None else views(lists, codes),
            lse_rest=None if rest is None else view(rest, codes),
            cu_seqlens_q=packing and view(packing.cu_seqlens_q, codes),
            cu_seqlens_k=packing and view(packing.cu_seqlens_k, codes),
            max_seqlen_q=packing.max_seqlen_q if packing else 0,
            max_seqlen_k=packing.max_seqlen_k if packing else 0,
        )
        launch(params, q, device)
    if padded:
        out = out[..., :head_dim].contiguous()
    return Results(out, lse, rest)


def backward(
    problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
) -> Gradients:
    """The gradients of a checked problem, each only where `needs` says so.

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    q, k, v, mask, bias = problem.q, problem.k, problem.v, problem.mask, problem.bias
    device = q.get_device()
    check_device(device)
    if q.numel() == 0 or k.numel() == 0:
        grads = empty_gradients(problem, needs)
        for grad in grads:
            grad.zero_()
        return grads
    # As forward made them, unless a compiler moved them.
    out, lse = results.out.contiguous(), results.lse.contiguous()
    rest = results.lse_rest
    rest = None if rest is None or rest.dim() != lse.dim() else rest.contiguous()
    head_dim = q.shape[-1]
    padded = head_dim % HEAD_DIM_MULTIPLE != 0
    if padded:
        q, k, v, out, dout = _pad(q), _pad(k), _pad(v), _pad(out), _pad(dout)
        problem = problem._replace(q=q, k=k, v=v)
    elif dout.stride(-1) != 1:
        dout = dout.contiguous()  # such as the expanded gradient of a sum
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv, dbias = empty_gradients(problem, needs)
    core, codes = load_kernels()
    packing = problem.packing and _contiguous(problem.packing)
    lists = _lists(problem)
    params = core.BwdParams(
        device=device,
        q=view(q, codes),
        k=view(k, codes),
        v=view(v, codes),
        mask=None if mask is None else view(mask, codes),
        bias=None if bias is None else view(bias, codes),
        out=view(out, codes),
        lse=view(lse, codes),
        dout=view(dout, codes),
        dlse=None if dlse is None else view(dlse, codes),
        dq=view(dq, codes) if needs.q else None,
        dk=view(dk, codes) if needs.k else None,
        dv=view(dv, codes) if needs.v else None,
        dbias=view(dbias, codes) if needs.bias and bias is not None else None,
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
        is_causal=problem.is_causal,
        deterministic=problem.deterministic,
        selection=None if lists is None else views(lists, codes),
        lse_rest=None if rest is None else view(rest, codes),
        cu_seqlens_q=packing and view(packing.cu_seqlens_q, codes),
        cu_seqlens_k=packing and view(packing.cu_seqlens_k, codes),
        max_seqlen_q=packing.max_seqlen_q if packing else 0,
        max_seqlen_k=packing.max_seqlen_k if packing else 0,
    )
    launch(params, q, device)
    if padded:
        dq, dk, dv = (
            g[..., :head_dim].contiguous() if need else g
            for g, need in zip((dq, dk, dv), needs, strict=False)
        )
    return Gradients(dq, dk, dv, dbias)


def _lists(problem: Problem) -> Selection | None:
    """Keep the result referenced until after the launch, or its memory may become the workspace."""
    if problem.key_lists is None:
        return None
    return without_spare_lists(problem.key_lists, problem.q.shape[1], problem.is_causal)


def _contiguous(packing: Packing) -> Packing:
    """Keep the result referenced until after the launch, or its memory may become the workspace."""
    cu_seqlens_q, cu_seqlens_k, *longest = packing
    return Packing(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), *longest)


def _pad(t: Tensor) -> Tensor:
    """A contiguous copy with zeros up to the next multiple of 8 along head_dim."""
    head_dim = t.shape[-1]
    padded = t.new_zeros((*t.shape[:-1], head_dim + -head_dim % HEAD_DIM_MULTIPLE))
    padded[..., :head_dim] = t
    return padded
