"""Attention sinks, on top of whatever a backend computes.

A sink is a logit of a query head that takes part in the softmax of each of its rows and has no
value. A backend computes forward as if there were none, and what it returns is changed here:

    lse' = logaddexp(lse, sink)
    out' = out * sigmoid(lse - sink)

Its backward starts from out and lse: given out' and lse', the probabilities exp(logits - lse') are
those beside a sink, and its gradients are right as they are. What is left is

    dsink = sum over rows of exp(sink - lse') * (dlse' - sum over head_dim of dout * out')
"""

import math

import torch
from torch import Tensor

from dmattn.backends.base import Backend
from dmattn.problem import Gradients, Needs, Problem, Results, empty_gradients


def forward(backend: Backend, problem: Problem, for_backward: bool = True) -> Results:
    """`backend.forward`, with the sinks of the problem if it has any."""
    if problem.sinks is None:
        return backend.forward(problem, for_backward)
    # With lse_rest in any case, so that the bits do not depend on whether a backward follows.
    results = backend.forward(problem._replace(sinks=None), True)
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
    """What a forward without sinks returned, changed in place for out."""
    out, lse, rest = results
    exact = _exact_lse(results)
    sink = sinks.to(exact.dtype)[:, None]
    weight = torch.sigmoid(exact - sink).masked_fill_(exact == -math.inf, 0.0)
    out.mul_(weight.to(lse.dtype).transpose(-1, -2)[..., None])
    total = torch.logaddexp(exact, sink)
    lse = total.to(lse.dtype)
    if _has_rest(results):
        rest = (total - lse).masked_fill_(total == -math.inf, 0.0).float()
    return Results(out, lse, rest)


def _gradient(sinks: Tensor, results: Results, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """(H,), of results beside sinks. A row with lse = -inf has none, as if it kept nothing."""
    out, lse, _ = results
    exact = _exact_lse(results)
    weight = (sinks.to(exact.dtype)[:, None] - exact).exp_()
    dlogit = -(dout.to(lse.dtype) * out).sum(-1).transpose(-1, -2)
    if dlse is not None:
        dlogit += dlse
    by_row = (weight * dlogit).masked_fill_(lse == -math.inf, 0.0)
    by_head = by_row.transpose(0, -2).flatten(1).sum(1)
    return by_head.to(sinks.dtype)


def _has_rest(results: Results) -> bool:
    rest = results.lse_rest
    return rest is not None and rest.dim() == results.lse.dim()


def _exact_lse(results: Results) -> Tensor:
    """lse as exactly as it is known: in float64 where the backend tells what its rounding cost."""
    if not _has_rest(results):
        return results.lse
    assert results.lse_rest is not None
    return results.lse.double() + results.lse_rest
