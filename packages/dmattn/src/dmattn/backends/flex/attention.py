"""Forward and backward by FlexAttention, from a problem to its results and gradients."""

import math

import torch
from torch import Tensor

from dmattn.backends.flex import torch_flex
from dmattn.backends.flex.blocks import BlockTable, block_table
from dmattn.backends.flex.operands import (
    Arranged,
    actual,
    arrange,
    operands,
    padded_head_dim,
)
from dmattn.problem import Gradients, Needs, Problem, Results, empty_gradients, empty_results

# FlexAttention rounds lse in base 2. Above this |lse| that would show, and the forward is computed
# once more with the scores shifted by it.
_EXACT_LSE_LIMIT = 128.0
# What older versions of torch demand of head_dim on a GPU, a power of 2, starts here.
_SMALLEST_HEAD_DIM = 16


def kernel_head_dim(head_dim: int) -> int:
    """The head_dim of the kernels on a GPU that serve this one."""
    return max(_SMALLEST_HEAD_DIM, 1 << (head_dim - 1).bit_length())


def forward(problem: Problem) -> Results:
    """Results of a checked problem, without lse_rest."""
    results = empty_results(problem)._replace(lse_rest=None)
    if problem.q.numel() == 0 or problem.k.numel() == 0:
        return results._replace(out=results.out.zero_(), lse=results.lse.fill_(-math.inf))
    given = arrange(problem)
    table = block_table(given) if problem.q.is_cuda else None
    with torch.no_grad(), torch.autocast(problem.q.device.type, enabled=False):
        out, lse = _attend(problem, given, table)
        # Logits that large come from a bias, hardly from dot products.
        if problem.bias is not None and bool((lse.abs() > _EXACT_LSE_LIMIT).any()):
            limit = torch.finfo(lse.dtype).max / 4
            shift = actual(lse, limit)
            out, rest = _attend(problem, given, table, shift)
            lse = shift + rest
    packed = problem.packing is not None
    out = out.transpose(1, 2)
    results.out.copy_(out[0] if packed else out)
    results.lse.copy_(lse[0] if packed else lse)
    return results


def backward(
    problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
) -> Gradients:
    """The gradients of a checked problem, each only where `needs` says so.

    The forward runs once more, with the scores shifted by lse: FlexAttention's own backward starts
    from an lse in base 2, whose rounding shows where lse is large.
    """
    grads = empty_gradients(problem, needs)
    if problem.q.numel() == 0 or problem.k.numel() == 0:
        for grad in grads:
            grad.zero_()
        return grads
    packed = problem.packing is not None
    lse = results.lse[None] if packed else results.lse
    dout = (dout[None] if packed else dout).transpose(1, 2)
    empty = lse == -math.inf
    leaves = [
        None if t is None else t.detach().requires_grad_(need)
        for t, need in zip(
            (problem.q, problem.k, problem.v, problem.bias), needs, strict=True
        )
    ]
    q, k, v, bias = leaves
    assert q is not None and k is not None and v is not None
    with torch.enable_grad(), torch.autocast(problem.q.device.type, enabled=False):
        tracked = problem._replace(q=q, k=k, v=v, bias=bias)
        given = arrange(tracked)
        table = block_table(given) if problem.q.is_cuda else None
        shift = lse.detach().masked_fill(empty, 0.0)
        out, rest = _attend(tracked, given, table, shift, needs)
        outputs = [out]
        # A row that keeps nothing has no gradient: what came may be NaN, as from -inf - -inf.
        cotangents = [dout.to(out.dtype).masked_fill(empty[..., None], 0.0)]
        if dlse is not None:
            dlse = dlse[None] if packed else dlse
            outputs.append(rest)
            cotangents.append(dlse.to(rest.dtype).masked_fill(empty, 0.0))
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, cotangents))
    for grad, leaf in zip(grads, leaves, strict=True):
        if leaf is not None and leaf.requires_grad:
            grad.copy_(next(found))
    return grads


def _attend(
    problem: Problem,
    given: Arranged,
    table: BlockTable | None,
    shift: Tensor | None = None,
    needs: Needs = Needs(False, False, False, False),
) -> tuple[Tensor, Tensor]:
    """out (B, H, Sq, D) and lse (B, H, Sq) with the scores shifted."""
    head_dim = given.q.shape[-1]
    if given.q.is_cuda:
        size = kernel_head_dim(head_dim)
        q, k, v = (_readable(padded_head_dim(t, size)) for t in (given.q, given.k, given.v))
        given = given._replace(q=q, k=k, v=v)
    any_of_qkv = needs.q or needs.k or needs.v
    spec, tensors = operands(problem, given, shift, (any_of_qkv, needs.bias))
    out, lse = torch_flex.attend(spec, given.q, given.k, given.v, tensors, table)
    return out[..., :head_dim], lse


def _readable(t: Tensor) -> Tensor:
    """With neighbouring entries along head_dim, which the kernels want."""
    return t if t.stride(-1) == 1 else t.contiguous()


