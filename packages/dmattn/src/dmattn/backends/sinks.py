"""Attention sinks, added to what a backend computes without them.

A sink is a logit of a query head that takes part in the softmax of each of its rows and has no
value. A backend computes the forward without sinks, and its results are changed here:

    lse' = logaddexp(lse, sink)
    out' = out * sigmoid(lse - sink)

The backward of a backend starts from out and lse. Given out' and lse' it computes the probabilities
exp(logits - lse'), which are those with the sink, so its gradients are correct without a change.
Two gradients remain. That of the sink is

    dsink = sum over rows of exp(sink - lse') * (dlse' - sum over head_dim of dout * out')

The other is the gradient of a bias that is the same for all keys, for backends that assume that the
dlogits of a row sum to dlse', which only holds without a sink: `bias_gradient_of_rows`.
"""

import math

import torch
from torch import Tensor

from dmattn.backends.base import Backend
from dmattn.problem import Gradients, Needs, Problem, Results, empty_gradients


def forward(
    backend: Backend, problem: Problem, for_backward: bool = True, out: Tensor | None = None
) -> Results:
    """The forward of a backend, with the sinks of the problem if it has any.

    Calls `backend.forward`, or `backend.forward_into` if `out` is given; sinks then change `out` in
    place.
    """
    if problem.sinks is None:
        if out is None:
            return backend.forward(problem, for_backward)
        return backend.forward_into(problem, out, for_backward)
    # lse_rest is always asked for, so that the result does not depend, in its last bits, on whether
    # a backward follows.
    without = problem._replace(sinks=None)
    if out is None:
        results = backend.forward(without, True)
    else:
        results = backend.forward_into(without, out, True)
    results = _beside_sinks(results, problem.sinks)
    return results if for_backward else results._replace(lse_rest=None)


def backward(
    backend: Backend,
    problem: Problem,
    results: Results,
    dout: Tensor,
    dlse: Tensor | None,
    needs: Needs,
) -> Gradients:
    """`backend.backward`, with the gradient of the sinks where it is needed."""
    if problem.sinks is None or not needs.sinks:
        return backend.backward(problem, results, dout, dlse, needs)
    others = needs._replace(sinks=False)
    if any(others):
        grads = backend.backward(problem, results, dout, dlse, others)
    else:
        grads = empty_gradients(problem, others)
    return grads._replace(sinks=_gradient(problem.sinks, results, dout, dlse))


def _beside_sinks(results: Results, sinks: Tensor) -> Results:
    """The results with sinks from those without; `out` is changed in place."""
    out, lse, rest = results
    before, rest_before = _exact_lse(results)
    sink = sinks.to(before.dtype)[:, None]
    weight = torch.sigmoid((before - sink) + rest_before).masked_fill_(before == -math.inf, 0.0)
    out.mul_(weight.to(lse.dtype).transpose(-1, -2)[..., None])
    # The larger of the two, and what the sum of both exponentials adds to it.
    larger = torch.maximum(before, sink)
    larger = larger.masked_fill(larger == -math.inf, 0.0)
    added = torch.logaddexp((before - larger) + rest_before, sink - larger)
    lse = (larger + added).to(lse.dtype)
    if _has_rest(results):
        rest = ((larger - lse) + added).masked_fill_(lse == -math.inf, 0.0).float()
    return Results(out, lse, rest)


def bias_gradient_of_rows(
    problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None
) -> Tensor:
    """With sinks, the gradient of a bias that is the same for all keys, in its shape and dtype.

    It is the sum of the dlogits of a row over its keys. With that of the sink they sum to dlse, so
    it is dlse less the dlogit of the sink.
    """
    sinks, bias = problem.sinks, problem.bias
    assert sinks is not None and bias is not None
    by_row = -_gradient_of_rows(sinks, results, dout, dlse)
    if dlse is not None:
        by_row += dlse.masked_fill(results.lse == -math.inf, 0.0)
    heads = bias.shape[1]
    if heads > 1:  # if these are key/value heads, each stands for a group of query heads
        by_row = by_row.view(len(by_row), heads, -1, by_row.shape[-1]).sum(2)
    return by_row[..., None].sum_to_size(bias.shape).to(bias.dtype)


def _gradient(sinks: Tensor, results: Results, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """The gradient of the sinks, (H,), from results that include them."""
    by_row = _gradient_of_rows(sinks, results, dout, dlse)
    by_head = by_row.transpose(0, -2).flatten(1).sum(1)
    return by_head.to(sinks.dtype)


def _gradient_of_rows(sinks: Tensor, results: Results, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """The dlogit of the sink in each row, in the shape of lse; 0 in rows with lse = -inf."""
    out, lse, _ = results
    exact, rest = _exact_lse(results)
    weight = ((sinks.to(exact.dtype)[:, None] - exact) - rest).exp_()
    dlogit = -(dout.to(lse.dtype) * out).sum(-1).transpose(-1, -2)
    if dlse is not None:
        dlogit += dlse
    return (weight * dlogit).masked_fill_(lse == -math.inf, 0.0)


def _has_rest(results: Results) -> bool:
    rest = results.lse_rest
    return rest is not None and rest.dim() == results.lse.dim()


def _exact_lse(results: Results) -> tuple[Tensor, Tensor | float]:
    """lse and lse_rest in float64 if there is a rest, else lse and 0.

    Their sum would be rounded. They are added only after another number has been subtracted from
    lse: where logits are very large or very negative, the rest alone tells how many keys there are.
    """
    if not _has_rest(results):
        return results.lse, 0.0
    assert results.lse_rest is not None
    return results.lse.double(), results.lse_rest.double()
