"""Forward and backward by FlexAttention, from a problem to its results and gradients."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dmattn.autocast import without_autocast
from dmattn.backends.base import Graph
from dmattn.backends.flex import torch_flex
from dmattn.backends.flex.limits import device_blocks, kernel_head_dim
from dmattn.backends.flex.operands import (
    Arranged,
    actual,
    arrange,
    bias_gradient,
    operands,
    padded_head_dim,
    rows_are_keys,
)
from dmattn.problem import Gradients, Needs, Problem, Results, empty_gradients, empty_results

# FlexAttention computes and rounds lse in base 2. Above this |lse| the error would matter, and the
# forward is computed once more, with the scores shifted by lse.
_EXACT_LSE_LIMIT = 128.0


def forward(problem: Problem, can_be_told: bool) -> Results:
    """Results of a checked problem, with lse_rest if lse is so large that its rounding matters.

    Args:
        problem: what to compute.
        can_be_told: as in `dmattn.backends.flex.kept.Sources`, for the tensors of the problem.
    """
    if problem.q.numel() == 0 or problem.k.numel() == 0:
        out, lse, _ = empty_results(problem)
        return Results(out.zero_(), lse.fill_(-math.inf), None)
    given = arrange(problem, can_be_told)
    table = torch_flex.block_mask(given)
    with torch.no_grad(), without_autocast(problem.q.device.type):
        out, lse, _ = _attend(problem, given, table)
        dropped = None
        # Logits that are so large come from a bias, hardly ever from dot products.
        if problem.bias is not None:
            shift = actual(lse, torch.finfo(lse.dtype).max / 4)
            if _any_beyond(shift, _EXACT_LSE_LIMIT):
                out, rest, _ = _attend(problem, given, table, shift)
                lse = shift + rest
                dropped = (shift - lse + rest).masked_fill_(lse.isinf(), 0.0)
    return _results(problem, out, lse, dropped)


def _results(problem: Problem, out: Tensor, lse: Tensor, rest: Tensor | None = None) -> Results:
    """The results from out (B, H, Sq, D), and lse and its rest (B, H, Sq), as FlexAttention has it.

    FlexAttention returns the strides of the query, so that tensors are copied here only if the
    query was expanded or padded, or if its heads do not lie side by side.
    """
    out, lse = out.transpose(1, 2).to(problem.q.dtype).contiguous(), lse.contiguous()
    if rest is not None:
        rest = rest.float().contiguous()
    if problem.packing is not None:
        out, lse, rest = out[0], lse[0], None if rest is None else rest[0]
    return Results(out, lse, rest)


def _any_beyond(lse: Tensor, limit: float) -> bool:
    """Whether |lse| is, or may be, above `limit` somewhere. The host waits for the device."""
    if lse.is_cuda and torch.cuda.is_current_stream_capturing():
        return True  # the graph is replayed with other numbers, and the host must not wait now
    return bool((lse.abs() > limit).any())


def forward_with_graph(problem: Problem, can_be_told: bool) -> tuple[Results, Graph] | None:
    """`forward`, and the autograd graph of FlexAttention itself; None unless `keeps_graph`."""
    if not keeps_graph(problem):
        return None
    # Leaves that are views of the operands, independent of the graph of the caller.
    q, k, v = inputs = [t.detach().requires_grad_() for t in problem[:3]]
    with torch.enable_grad(), without_autocast(q.device.type):
        given = arrange(problem._replace(q=q, k=k, v=v), can_be_told)
        out, lse, _ = _attend(problem, given, torch_flex.block_mask(given))
    return _results(problem, out.detach(), lse.detach()), FlexGraph(inputs, (out, lse))


def keeps_graph(problem: Problem) -> bool:
    """Whether the graph of a forward is kept for its backward.

    It is if it gives gradients as exact as those of `backward`, and holds no more memory than the
    operands and results. A bias, for example, would be held in float32.
    """
    q, k = problem.q, problem.k
    plain = problem.bias is None and problem.sinks is None
    return plain and not _shifts(problem) and q.numel() > 0 and k.numel() > 0


class FlexGraph(Graph):
    """The autograd graph of one call of FlexAttention.

    Args:
        inputs: query, key and value as leaves.
        outputs: out (B, H, Sq, D) and lse (B, H, Sq).
    """

    def __init__(self, inputs: Sequence[Tensor], outputs: tuple[Tensor, Tensor]) -> None:
        self._inputs = inputs
        self._outputs = outputs

    def backward(
        self,
        problem: Problem,
        results: Results,
        dout: Tensor,
        dlse: Tensor | None,
        needs: Needs,
        retain: bool,
    ) -> Gradients:
        grads = empty_gradients(problem, Needs(False, False, False, False))
        leaves = {name: t for name, t in zip("qkv", self._inputs, strict=True) if _is(needs, name)}
        dout, dlse = _cotangents(problem, results.lse, dout, dlse)
        with without_autocast(problem.q.device.type):
            found = _differentiate(self._outputs, leaves, dout, dlse, retain)
        return grads._replace(**{name: grad.contiguous() for name, grad in found.items()})


def _is(needs: Needs, name: str) -> bool:
    return bool(getattr(needs, name))


def backward(
    problem: Problem,
    results: Results,
    dout: Tensor,
    dlse: Tensor | None,
    needs: Needs,
    can_be_told: bool,
) -> Gradients:
    """The gradients of a checked problem that `needs` names; the forward is computed once more.

    `can_be_told`: as in `dmattn.backends.flex.kept.Sources`, for the tensors of the problem.
    """
    grads = empty_gradients(problem, needs)
    if problem.q.numel() == 0 or problem.k.numel() == 0:
        for grad in grads[:4]:
            grad.zero_()
        return grads
    dout, dlse = _cotangents(problem, results.lse, dout, dlse)
    q, k, v = (t.detach().requires_grad_() for t in (problem.q, problem.k, problem.v))
    with torch.enable_grad(), without_autocast(problem.q.device.type):
        given = arrange(problem._replace(q=q, k=k, v=v), can_be_told)
        table = torch_flex.block_mask(given)
        shift = None
        if _shifts(problem):
            lse = results.lse.detach()
            shift = (lse if problem.packing is None else lse[None]).masked_fill(lse == -math.inf, 0)
        out, rest, bias = _attend(problem, given, table, shift, needs.bias)
        if problem.sinks is not None:
            sinks = problem.sinks.to(rest.dtype)[:, None]
            out, rest = _beside_sinks(out, rest, sinks if shift is None else sinks - shift)
        wanted = {"q": q, "k": k, "v": v, "bias": bias}
        leaves = {
            name: t
            for name, t in wanted.items()
            if t is not None and t.requires_grad and _is(needs, name)
        }
        found = _differentiate((out, rest), leaves, dout, dlse)
    for name, grad in found.items():
        target = getattr(grads, name)
        target.copy_(bias_gradient(grad, target.shape) if name == "bias" else grad)
    return grads


def _shifts(problem: Problem) -> bool:
    """Whether the backward shifts the scores by lse.

    FlexAttention's own backward starts from a rounded lse in base 2. The rounding matters if lse is
    large, as with a bias, and in more than half precision.
    """
    return problem.bias is not None or problem.q.dtype.itemsize > 2


def _cotangents(
    problem: Problem, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """dout (B, H, Sq, D), with the strides of out, and dlse (B, H, Sq), 0 for rows without keys.

    A row that keeps nothing has no gradient, and the given ones may be NaN, as from -inf - -inf.
    """
    if problem.packing is not None:
        lse, dout = lse[None], dout[None]
        dlse = None if dlse is None else dlse[None]
    dout = dout.contiguous().transpose(1, 2)  # the gradient of a sum is one expanded number
    if _all_rows_keep_keys(problem):
        return dout, dlse
    empty = lse == -math.inf
    dout = dout.masked_fill(empty[..., None], 0.0)
    return dout, None if dlse is None else dlse.masked_fill(empty, 0.0)


def _all_rows_keep_keys(problem: Problem) -> bool:
    """Whether it is known, without reading a tensor, that every row keeps a key."""
    if problem.mask is not None or problem.bias is not None:
        return False
    if problem.packing is not None:
        return rows_are_keys(problem)  # if so, each row sees at least the key at its own position
    if problem.key_lists is not None and not problem.keeps_own:
        return False
    return not problem.is_causal or problem.q.shape[1] <= problem.k.shape[1]


def _differentiate(
    outputs: tuple[Tensor, Tensor],
    leaves: dict[str, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    retain: bool = False,
) -> dict[str, Tensor]:
    """The gradients of the leaves, by name, from the gradients dout and dlse of the outputs."""
    out, lse = outputs
    given, cotangents = [out], [dout.to(out.dtype)]
    if dlse is not None:
        given, cotangents = [out, lse], [*cotangents, dlse.to(lse.dtype)]
    found = torch.autograd.grad(given, list(leaves.values()), cotangents, retain_graph=retain)
    return dict(zip(leaves, found, strict=True))


def _beside_sinks(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, H, Sq, D) and lse (B, H, Sq) with one more logit, the sink, in each row."""
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
    """out (B, H, Sq, D) and lse (B, H, Sq) of a problem, and the bias by which to differentiate.

    With `shift` (B, H, Sq) it is subtracted from all scores, and so from lse.
    """
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
    """t, made contiguous if its stride along head_dim is not 1, as the kernels need it."""
    return t if t.stride(-1) == 1 else t.contiguous()
