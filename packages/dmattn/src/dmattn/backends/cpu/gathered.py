"""Attention on the CPU over the keys of a selection: they are gathered for each block of rows.

Memory is linear in both lengths: a block holds 128 rows and the keys that any of them keeps.
Letters: HL heads with keys of their own (HK, or H when each query head has its own list), G query
heads for each of them, M rows of a block, N keys of a block, D head dimension.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.key_lists import BLOCK_ROWS, Selection
from dmattn.checks import Dims, empty_backward_outputs, empty_forward_outputs, lse_dtype


@dataclass(frozen=True, slots=True)
class _Problem:
    dims: Dims
    dtype: torch.dtype  # of all arithmetic
    q: Tensor  # (B, HL, G, Sq, D), a view of q as given
    k: Tensor  # (B, HL, Sk, D)
    v: Tensor  # (B, HL, Sk, D)
    bias: Tensor | None  # (B, H, {Sq|1}, Sk), a view where heads allow it
    selection: Selection  # expanded to (B, HL, ...)
    softmax_scale: float
    softcap: float
    is_causal: bool

    def rows_of(self, t: Tensor) -> Tensor:
        """(B, Sq, H, D) -> (B, HL, G, Sq, D), a view."""
        heads = self.k.shape[1]
        return torch.unflatten(t, 2, (heads, t.shape[2] // heads)).permute(0, 2, 3, 1, 4)

    def per_row(self, t: Tensor) -> Tensor:
        """(B, H, Sq) -> (B, HL, G, Sq), a view."""
        return torch.unflatten(t, 1, (self.k.shape[1], -1))


class _Block(NamedTuple):
    rows: slice
    keys: Tensor  # int64 (B, HL, N)
    q: Tensor  # (B, HL, G*M, D), scaled
    k: Tensor  # (B, HL, N, D)
    v: Tensor  # (B, HL, N, D)
    p: Tensor  # (B, HL, G*M, N): probabilities
    lse: Tensor  # (B, HL, G*M)
    tanh: Tensor | None  # (B, HL, G*M, N): of the soft cap


def forward(
    dims: Dims,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    selection: Selection,
) -> tuple[Tensor, Tensor]:
    """out (B, Sq, H, D) and lse (B, H, Sq), from validated inputs."""
    out, lse = empty_forward_outputs(q)
    problem = _arrange(dims, q, k, v, bias, softmax_scale, is_causal, softcap, selection)
    out_rows, lse_rows = problem.rows_of(out), problem.per_row(lse)
    with torch.autocast("cpu", enabled=False):
        for block in _blocks(problem):
            group = out_rows.shape[2]
            out_rows[..., block.rows, :] = torch.unflatten(block.p @ block.v, 2, (group, -1))
            lse_rows[..., block.rows] = torch.unflatten(block.lse, 2, (group, -1))
    return out, lse


def backward(
    dims: Dims,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    needs: Sequence[bool],
    selection: Selection,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dbias, each only where `needs` says so, from validated inputs.

    The probabilities are computed anew from the logits, so the forward's lse is not read.
    """
    problem = _arrange(dims, q, k, v, bias, softmax_scale, is_causal, softcap, selection)
    grads = empty_backward_outputs(q, k, v, bias, needs)
    dk, dv = torch.zeros_like(problem.k), torch.zeros_like(problem.v)
    shape = (dims.batch, problem.k.shape[1], problem.q.shape[2], dims.seqlen_k)
    dbias = problem.k.new_zeros(shape) if needs[3] and bias is not None else None
    with torch.autocast("cpu", enabled=False):
        for block in _blocks(problem):
            dout_rows, delta = _given_rows(problem, block, dout, dlse, out)
            ds = (dout_rows @ block.v.mT).sub_(delta).mul_(block.p)
            if dbias is not None:
                summed = torch.unflatten(ds, 2, (shape[2], -1)).sum(3)
                dbias.scatter_add_(3, block.keys[:, :, None].expand(summed.shape), summed)
            if block.tanh is not None:
                ds *= 1.0 - block.tanh.square()
            if needs[0]:
                block_dq = torch.unflatten((ds @ block.k).mul_(softmax_scale), 2, (shape[2], -1))
                problem.rows_of(grads[0])[..., block.rows, :] = block_dq
            index = block.keys[..., None].expand(block.k.shape)
            dk.scatter_add_(2, index, ds.mT @ block.q)
            dv.scatter_add_(2, index, block.p.mT @ dout_rows)
    for grad, total, need in ((grads[1], dk, needs[1]), (grads[2], dv, needs[2])):
        if need:
            summed = torch.unflatten(total, 1, (dims.nheads_k, -1)).sum(2)
            grad.copy_(summed.transpose(1, 2))
    if dbias is not None and bias is not None:
        by_head = dbias.flatten(1, 2)
        heads = bias.shape[1]
        if heads not in (1, dims.nheads):
            by_head = torch.unflatten(by_head, 1, (heads, -1)).sum(2)
        grads[3].copy_(by_head.unsqueeze(2).sum_to_size(bias.shape))
    return grads


def _arrange(
    dims: Dims,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    selection: Selection,
) -> _Problem:
    dtype = lse_dtype(q.dtype)
    lists = selection.idx.shape[1]
    heads = dims.nheads if lists == dims.nheads else dims.nheads_k
    k, v = (t.transpose(1, 2).to(dtype) for t in (k, v))
    if heads != dims.nheads_k:
        k, v = (t.repeat_interleave(heads // dims.nheads_k, dim=1) for t in (k, v))
    end, idx, counts = (
        t.expand(dims.batch, heads, *t.shape[2:])
        for t in (selection.end, selection.idx, selection.counts)
    )
    if bias is not None:
        if bias.shape[1] not in (1, dims.nheads):
            bias = bias.repeat_interleave(dims.nheads // bias.shape[1], dim=1)
        bias = bias.expand(dims.batch, dims.nheads, bias.shape[2], dims.seqlen_k)
    return _Problem(
        dims=dims,
        dtype=dtype,
        q=torch.unflatten(q, 2, (heads, dims.nheads // heads)).permute(0, 2, 3, 1, 4),
        k=k,
        v=v,
        bias=bias,
        selection=Selection(end, idx, counts, selection.full),
        softmax_scale=softmax_scale,
        softcap=softcap,
        is_causal=is_causal,
    )


def _blocks(problem: _Problem) -> Iterator[_Block]:
    for number, start in enumerate(range(0, problem.dims.seqlen_q, BLOCK_ROWS)):
        rows = slice(start, min(start + BLOCK_ROWS, problem.dims.seqlen_q))
        yield _block(problem, rows, number if problem.is_causal else 0)


def _block(problem: _Problem, rows: slice, number: int) -> _Block:
    count = problem.selection.counts[:, :, number]
    longest = int(count.max()) if count.numel() else 0
    index = problem.selection.idx[:, :, number, :longest].long()
    k = problem.k.take_along_dim(index[..., None], 2)
    v = problem.v.take_along_dim(index[..., None], 2)
    q = problem.q[..., rows, :].to(problem.dtype).flatten(2, 3) * problem.softmax_scale
    s, tanh = q @ k.mT, None
    if problem.softcap > 0:
        tanh = s.div_(problem.softcap).tanh_()
        s = tanh * problem.softcap
    s5 = torch.unflatten(s, 2, (problem.q.shape[2], -1))
    if problem.bias is not None:
        bias = problem.bias if problem.bias.shape[2] == 1 else problem.bias[:, :, rows]
        bias = torch.unflatten(bias, 1, (k.shape[1], -1))
        s5 += bias.take_along_dim(index[:, :, None, None], 4)
    s5.masked_fill_(~_kept(problem, rows, index, count), -math.inf)
    if longest == 0:
        return _Block(rows, index, q, k, v, s, s.new_full(s.shape[:-1], -math.inf), tanh)
    top = s.amax(-1, keepdim=True)
    p = s.sub_(top.masked_fill(top == -math.inf, 0.0)).exp_()
    total = p.sum(-1, keepdim=True)
    lse = (top + total.log()).squeeze(-1)
    return _Block(rows, index, q, k, v, p.div_(total.masked_fill(total == 0, 1.0)), lse, tanh)


def _kept(problem: _Problem, rows: slice, index: Tensor, count: Tensor) -> Tensor:
    """bool (B, HL, 1, {M|1}, N): the list's keys that each row keeps."""
    listed = torch.arange(index.shape[2]) < count[..., None]
    if not problem.is_causal:
        return listed[:, :, None, None]
    end = problem.selection.end.take_along_dim(index, 2)
    position = torch.arange(rows.start, rows.stop)[:, None]
    position = position + (problem.dims.seqlen_k - problem.dims.seqlen_q)
    index, end, listed = (t[:, :, None, None] for t in (index, end, listed))
    return listed & (index <= position) & (position < end)


def _given_rows(
    problem: _Problem, block: _Block, dout: Tensor, dlse: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor]:
    """dout (B, HL, G*M, D) and delta (B, HL, G*M, 1), with dlse in it; zero for empty rows."""
    empty = (block.lse == -math.inf)[..., None]
    dout_rows, out_rows = (
        problem.rows_of(t)[..., block.rows, :].to(problem.dtype).flatten(2, 3) for t in (dout, out)
    )
    dout_rows = dout_rows.masked_fill(empty, 0.0)
    delta = (dout_rows * out_rows).sum(-1, keepdim=True)
    if dlse is not None:
        given = problem.per_row(dlse)[..., block.rows].flatten(2, 3)[..., None]
        delta -= given.masked_fill(empty, 0.0)
    return dout_rows, delta
