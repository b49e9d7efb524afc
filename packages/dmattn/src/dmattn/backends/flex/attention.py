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
    bias_gradient,
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
    table = block_table(given) if torch_flex.runs_compiled(problem.q) else None
    with torch.no_grad(), torch.autocast(problem.q.device.type, enabled=False):
        out, lse, _ = _attend(problem, given, table)
        # Logits that large come from a bias, hardly from dot products.
        if problem.bias is not None:
            shift = actual(lse, torch.finfo(lse.dtype).max / 4)
            if _any_beyond(shift, _EXACT_LSE_LIMIT):
                out, rest, _ = _attend(problem, given, table, shift)
                lse = shift + rest
    packed = problem.packing is not None
    out = out.transpose(1, 2)
    results.out.copy_(out[0] if packed else out)
    results.lse.copy_(lse[0] if packed else lse)
    return results


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
        table = block_table(given) if torch_flex.runs_compiled(problem.q) else None
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
    table: BlockTable | None,
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
    out, lse = torch_flex.attend(spec, given.q, given.k, given.v, tensors, table)
    return out[..., :head_dim], lse, tensors.bias


def _readable(t: Tensor) -> Tensor:
    """With neighbouring entries along head_dim, which the kernels want."""
    return t if t.stride(-1) == 1 else t.contiguous()
