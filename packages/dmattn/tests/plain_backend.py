"""A backend in one file: attention by plain torch in float64. It shows what a new backend needs.

Beside this file it takes one row, in `registry.BACKENDS`. The attention tests run with it in front,
so that the same problems are computed by it and by the real backends.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.backends import registry
from dmattn.backends.base import Backend
from dmattn.problem import Gradients, Needs, Problem, Results, empty_gradients, empty_results


class PlainBackend(Backend):
    """Every problem on the CPU; forms everything of size Sq x Sk."""

    name = "plain"
    devices = ("cpu",)

    def __init__(self) -> None:
        self.calls = 0

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, problem: Problem) -> list[Exception]:
        return []

    def forward(self, problem: Problem, for_backward: bool = True) -> Results:
        self.calls += 1
        results = empty_results(problem)
        for part in _sequences(problem):
            p, lse, _ = _probabilities(part)
            _rows(part, results.out).copy_(p @ _per_head(part, part.v).transpose(1, 2))
            _rows_of_lse(part, results.lse).copy_(lse)
        return results

    def backward(
        self, problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        grads = empty_gradients(problem, needs)
        exact = Gradients(*(torch.zeros_like(g, dtype=torch.float64) for g in grads))
        for part in _sequences(problem):
            _add_gradients(part, results, dout, dlse, needs, exact)
        for grad, total in zip(grads, exact, strict=True):
            grad.copy_(total)
        return grads


@contextmanager
def preferred(backend: Backend) -> Iterator[Backend]:
    """Within, the registry has this backend as its first row."""
    registry.BACKENDS.insert(0, backend)
    try:
        yield backend
    finally:
        registry.BACKENDS.remove(backend)


class _Part(NamedTuple):
    """One sequence of a problem, or a whole dense one, in float64."""

    problem: Problem
    rows: slice | None  # of a packed sequence, else None
    keys: slice | None
    q: Tensor  # (B, Sq, H, D)
    k: Tensor  # (B, Sk, HK, D)
    v: Tensor


def _sequences(problem: Problem) -> Iterator[_Part]:
    q, k, v = (t.double() for t in problem[:3])
    if problem.packing is None:
        yield _Part(problem, None, None, q, k, v)
        return
    bounds = (t.tolist() for t in problem.packing[:2])
    for (row, row_end), (key, key_end) in zip(*map(pairwise, bounds), strict=True):
        rows, keys = slice(row, row_end), slice(key, key_end)
        yield _Part(problem, rows, keys, q[None, rows], k[None, keys], v[None, keys])


def _rows(part: _Part, t: Tensor) -> Tensor:
    """The part's rows of out, dout or dq as (B, H, Sq, D), a view."""
    return (t if part.rows is None else t[None, part.rows]).transpose(1, 2)


def _keys(part: _Part, t: Tensor) -> Tensor:
    """The part's keys of dk or dv as (B, HK, Sk, D), a view."""
    return (t if part.keys is None else t[None, part.keys]).transpose(1, 2)


def _rows_of_lse(part: _Part, t: Tensor) -> Tensor:
    return t if part.rows is None else t[None, :, part.rows]


def _operand(part: _Part, t: Tensor) -> Tensor:
    """The part of a mask, bias or dbias in four dimensions, a view."""
    if part.rows is None or part.keys is None:
        return t
    if t.dim() == 2:
        return t[None, :, None, part.keys]
    return t[None, :, part.rows, : part.keys.stop - part.keys.start]


def _per_head(part: _Part, t: Tensor, dim: int = 2) -> Tensor:
    """With one entry for each query head, where `t` has one for each key head."""
    nheads = part.q.shape[2]
    return t if t.shape[dim] in (1, nheads) else t.repeat_interleave(nheads // t.shape[dim], dim)


def _sum_heads(grad: Tensor, heads: int) -> Tensor:
    """(B, H, ...) summed to that many heads."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _probabilities(part: _Part) -> tuple[Tensor, Tensor, Tensor | None]:
    """p (B, H, Sq, Sk), lse (B, H, Sq), and tanh of the soft cap, if there is one."""
    problem, tanh = part.problem, None
    rows, keys = part.q.shape[1], part.k.shape[1]
    k = _per_head(part, part.k).transpose(1, 2)
    logits = problem.softmax_scale * (part.q.transpose(1, 2) @ k.mT)
    if problem.softcap > 0:
        tanh = torch.tanh(logits / problem.softcap)
        logits = problem.softcap * tanh
    if problem.bias is not None:
        logits = logits + _per_head(part, _operand(part, problem.bias), 1)
    keep = torch.ones(rows, keys, dtype=torch.bool)
    if problem.is_causal:
        keep = keep.tril(keys - rows)
    if problem.mask is not None:
        keep = keep & _per_head(part, _operand(part, problem.mask), 1)
    if problem.key_lists is not None:
        position = torch.arange(rows)[:, None] + (keys - rows) if problem.is_causal else 0
        keep = keep & (position < _per_head(part, problem.key_lists.end, 1)[:, :, None])
    logits = logits.masked_fill(~keep, -math.inf)
    lse = logits.logsumexp(-1) if keys else logits.new_full(logits.shape[:3], -math.inf)
    p = (logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return p, lse, tanh


def _add_gradients(
    part: _Part,
    results: Results,
    dout: Tensor,
    dlse: Tensor | None,
    needs: Needs,
    grads: Gradients,
) -> None:
    problem, heads_k = part.problem, part.k.shape[2]
    p, lse, tanh = _probabilities(part)
    empty = (lse == -math.inf)[..., None]
    do = _rows(part, dout).double().masked_fill(empty, 0.0)
    delta = (do * _rows(part, results.out).double()).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - _rows_of_lse(part, dlse).double()[..., None].masked_fill(empty, 0.0)
    ds = p * (do @ _per_head(part, part.v).transpose(1, 2).mT - delta)
    if needs.v:
        _keys(part, grads.v).add_(_sum_heads(p.mT @ do, heads_k))
    if needs.bias and problem.bias is not None:
        target = _operand(part, grads.bias)
        target.add_(_sum_heads(ds, max(target.shape[1], 1)).sum_to_size(target.shape))
    if tanh is not None:
        ds = ds * (1 - tanh.square())
    ds = ds * problem.softmax_scale
    if needs.q:
        _rows(part, grads.q).add_(ds @ _per_head(part, part.k).transpose(1, 2))
    if needs.k:
        _keys(part, grads.k).add_(_sum_heads(ds.mT @ part.q.transpose(1, 2), heads_k))
