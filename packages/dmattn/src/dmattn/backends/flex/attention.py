"""Forward and backward by FlexAttention, from a problem to its results and gradients."""

import math
from typing import Any

import torch
from torch import Tensor

from dmattn.backends.flex import torch_flex
from dmattn.backends.flex.limits import device_blocks, kernel_head_dim
from dmattn.backends.flex.operands import (
    Arranged,
    actual,
    arrange,
    bias_gradient,
    operands,
    padded_head_dim,
)
from dmattn.problem import Gradients, Needs, Problem, Results, empty_gradients, empty_results

# FlexAttention rounds lse in base 2. Above this |lse| that would show, and the forward is computed
# once more with the scores shifted by it.
_EXACT_LSE_LIMIT = 128.0


def forward(problem: Problem) -> Results:
    """Results of a checked problem, without lse_rest."""
    if problem.q.numel() == 0 or problem.k.numel() == 0:
        out, lse, _ = empty_results(problem)
        return Results(out.zero_(), lse.fill_(-math.inf), None)
    given = arrange(problem)
    table = torch_flex.block_mask(given)
    with torch.no_grad(), torch.autocast(problem.q.device.type, enabled=False):
        out, lse, _ = _attend(problem, given, table)
        # Logits that large come from a bias, hardly from dot products.
        if problem.bias is not None:
            shift = actual(lse, torch.finfo(lse.dtype).max / 4)
            if _any_beyond(shift, _EXACT_LSE_LIMIT):
                out, rest, _ = _attend(problem, given, table, shift)
                lse = shift + rest
    # FlexAttention lays out like the query, so that these are copies only where that was expanded
    # or padded, or its heads lie apart.
    out, lse = out.transpose(1, 2).to(problem.q.dtype).contiguous(), lse.contiguous()
    if problem.packing is not None:
        out, lse = out[0], lse[0]
    return Results(out, lse, None)


def _any_beyond(lse: Tensor, limit: float) -> bool:
    """Whether it must be taken that |lse| is larger somewhere. Looking makes the host wait."""
    if lse.is_cuda and torch.cuda.is_current_stream_capturing():
        return True  # the graph is replayed with other numbers, and the host may not wait now
    return bool((lse.abs() > limit).any())


def backward(
    problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
) -> Gradients:
    """The gradients of a checked problem, each only where `needs` says so.

    The forward runs once more, with the scores shifted by lse: FlexAttention's own backward starts
    from an lse in base 2, whose rounding shows where lse is large.
    """
    grads = empty_gradients(problem, needs)
    if problem.q.numel() == 0 or problem.k.numel() == 0:
        for grad in grads[:4]:
            grad.zero_()
        return grads
    packed = problem.packing is not None
    lse = results.lse[None] if packed else results.lse
    empty = lse == -math.inf
    # A row that keeps nothing has no gradient: what came may be NaN, as from -inf - -inf.
    dout = (dout[None] if packed else dout).transpose(1, 2).masked_fill(empty[..., None], 0.0)
    if dlse is not None:
        dlse = (dlse[None] if packed else dlse).masked_fill(empty, 0.0)
    q, k, v = (t.detach().requires_grad_() for t in (problem.q, problem.k, problem.v))
    with torch.enable_grad(), torch.autocast(problem.q.device.type, enabled=False):
        given = arrange(problem._replace(q=q, k=k, v=v))
        table = torch_flex.block_mask(given)
        shift = lse.detach().masked_fill(empty, 0.0)
        out, rest, bias = _attend(problem, given, table, shift, needs.bias)
        if problem.sinks is not None:
            out, rest = _beside_sinks(out, rest, problem.sinks.to(rest.dtype)[:, None] - shift)
        wanted = {"q": q, "k": k, "v": v, "bias": bias}
        leaves = {
            name: t
            for name, t in wanted.items()
            if t is not None and t.requires_grad and getattr(needs, name)
        }
        outputs, cotangents = [out], [dout.to(out.dtype)]
        if dlse is not None:
            outputs, cotangents = [out, rest], [*cotangents, dlse.to(rest.dtype)]
        found = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    for name, grad in zip(leaves, found, strict=True):
        target = getattr(grads, name)
        target.copy_(bias_gradient(grad, target.shape) if name == "bias" else grad)
    return grads


def _beside_sinks(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, H, Sq, D) and lse (B, H, Sq) with one logit more in each row, without a value."""
    lse = lse.masked_fill(lse == -math.inf, torch.finfo(lse.dtype).min / 4)
    total = torch.logaddexp(lse, sink)
    return out * (lse - total).exp().to(out.dtype)[..., None], total


def _attend(
    problem: Problem,
    given: Arranged,
    table: Any,
    shift: Tensor | None = None,
    needs_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out (B, H, Sq, D), lse (B, H, Sq) with the scores shifted, and the bias to differentiate."""
    head_dim = given.q.shape[-1]
    if torch_flex.runs_compiled(given.q):
        size = kernel_head_dim(head_dim)
        q, k, v = (_readable(padded_head_dim(t, size)) for t in (given.q, given.k, given.v))
        given = given._replace(q=q, k=k, v=v)
    spec, tensors = operands(problem, given, shift, (given.q.requires_grad, needs_bias))
    blocks = device_blocks(problem)
    out, lse = torch_flex.attend(spec, given.q, given.k, given.v, tensors, table, blocks)
    return out[..., :head_dim], lse, tensors.bias


def _readable(t: Tensor) -> Tensor:
    """With neighbouring entries along head_dim, which the kernels want."""
    return t if t.stride(-1) == 1 else t.contiguous()
