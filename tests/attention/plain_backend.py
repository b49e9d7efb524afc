"""A backend in one file: attention by plain torch in float64. It shows what a new backend needs.

Besides this file it needs one row in the registry, which is added at the end of the file, and the
row "plain" of targets.py, which takes it through the suite.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from dmattn.backends import registry
from dmattn.backends.base import Backend
from dmattn.problem import Gradients, Needs, Problem, Results, empty_gradients, empty_results


class PlainBackend(Backend):
    """Takes every problem on the CPU, and forms all scores, of size Sq x Sk."""

    name = "plain"
    devices = ("cpu",)

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, problem: Problem) -> list[Exception]:
        return []

    def forward(self, problem: Problem, for_backward: bool = True) -> Results:
        results = empty_results(problem)
        out, lse = _attend(problem, _leaves(problem))
        results.out.copy_(out)
        results.lse.copy_(lse)
        if problem.bias is not None and results.lse_rest is not None:
            results.lse_rest.copy_((lse - results.lse).nan_to_num(0.0, 0.0, 0.0))
        return results

    def backward(
        self, problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        leaves = _leaves(problem)
        with torch.enable_grad():
            out, lse = _attend(problem, leaves)
            empty = lse == -math.inf
            rows = empty.transpose(-1, -2)[..., None]
            loss = (out * dout.double().masked_fill(rows, 0.0)).sum()
            if dlse is not None:
                finite = lse.masked_fill(empty, 0.0)
                loss = loss + (finite * dlse.double().masked_fill(empty, 0.0)).sum()
        wanted = [t for t in leaves if t is not None]
        found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
        grads = empty_gradients(problem, needs)
        for grad, leaf, need in zip(grads, leaves, needs, strict=True):
            value = None if leaf is None else next(found)
            if need and leaf is not None and grad is not None:
                grad.zero_() if value is None else grad.copy_(value)
        return grads


def _leaves(problem: Problem) -> list[Tensor | None]:
    operands = (problem.q, problem.k, problem.v, problem.bias, problem.sinks)
    return [None if t is None else t.detach().double().requires_grad_() for t in operands]


def _attend(problem: Problem, leaves: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    """out and lse in float64, of a dense problem or sequence by sequence."""
    q, k, v, bias, sinks = leaves
    assert q is not None and k is not None and v is not None
    if problem.packing is None:
        return _dense(problem, q, k, v, problem.mask, bias, sinks)
    outs, lses = [q[:0]], [q.new_zeros(q.shape[1], 0)]
    bounds = (t.tolist() for t in problem.packing[:2])
    for (row, row_end), (key, key_end) in zip(*map(pairwise, bounds), strict=True):

        def own(t: Tensor | None, row: int = row, row_end: int = row_end, key: int = key,
                key_end: int = key_end) -> Tensor | None:  # fmt: skip
            if t is None or t.dim() == 2:
                return None if t is None else t[None, :, None, key:key_end]
            return t[None, :, row:row_end, : key_end - key]

        part = (q[None, row:row_end], k[None, key:key_end], v[None, key:key_end])
        out, lse = _dense(problem, *part, own(problem.mask), own(bias), sinks)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def _dense(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    nheads, rows, keys = q.shape[2], q.shape[1], k.shape[1]

    def heads(t: Tensor) -> Tensor:  # dimension 1
        return t if t.shape[1] in (1, nheads) else t.repeat_interleave(nheads // t.shape[1], 1)

    logits = problem.softmax_scale * (q.transpose(1, 2) @ heads(k.transpose(1, 2)).mT)
    if problem.softcap > 0:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    if bias is not None:
        logits = logits + heads(bias)
    keep = torch.ones(rows, keys, dtype=torch.bool)
    if problem.is_causal:
        keep = keep.tril(keys - rows)
    if mask is not None:
        keep = keep & heads(mask)
    if problem.key_lists is not None:
        end = heads(problem.key_lists.end)[:, :, None]
        keep = (
            keep & (torch.arange(rows)[:, None] + (keys - rows) < end)
            if problem.is_causal
            else end > 0
        )
    logits = logits.masked_fill(~keep, -math.inf)
    if sinks is not None:  # in a backward only: one more key, whose value is 0
        logits = torch.cat((logits, sinks[:, None, None].expand(*logits.shape[:3], 1)), -1)
    hidden = (logits == -math.inf).expand(logits.shape)
    columns = logits.shape[3]
    top = (
        logits.detach().amax(-1, keepdim=True)
        if columns
        else logits.new_zeros(*logits.shape[:3], 1)
    )
    top = top.masked_fill(top == -math.inf, 0.0)
    p = (logits.masked_fill(hidden, 0.0) - top).exp().masked_fill(hidden, 0.0)
    total = p.sum(-1, keepdim=True)
    nothing = total == 0
    out = (p / total.masked_fill(nothing, 1.0))[..., :keys] @ heads(v.transpose(1, 2))
    lse = (top + total.masked_fill(nothing, 1.0).log()).masked_fill(nothing, -math.inf)
    return out.transpose(1, 2), lse[..., 0]


registry.BACKENDS.append(PlainBackend())
