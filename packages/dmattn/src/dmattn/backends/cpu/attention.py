"""Attention on the CPU, blocked over query rows and keys: memory is linear in both lengths.

Arithmetic is in float32 (float64 for float64 inputs) and each result is rounded once. Query heads
that share a key head are folded into the rows of one matrix product, so keys are never expanded.
Letters: B batch, HK key heads, G = H / HK, M rows of a block, N keys of a block, D head dimension.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.backends.cpu import gathered
from dmattn.backends.cpu.layout import Layout, make_layout
from dmattn.key_lists import Selection
from dmattn.checks import (
    check_backward_inputs,
    check_inputs,
    check_selected_bias,
    check_selection,
    empty_backward_outputs,
    empty_forward_outputs,
)

_KEYS_PER_BLOCK = 512
_MIN_ROWS_PER_BLOCK = 16
# Logits of one block, all batches and heads together: 4 MB in float32, about a second-level cache.
_BLOCK_ELEMENTS = 1 << 20
# Above this |lse|, exp(logits - lse) would inherit the rounding of lse: at 1e8 the logarithm of the
# row sum has vanished from a float32 lse altogether. Such rows get their maximum and sum anew.
_EXACT_LSE_LIMIT = 128.0


class _Block(NamedTuple):
    """A block of keys for the rows at hand; `cut` if causality hides some from some row."""

    keys: slice
    cut: bool


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    selection: Selection | None = None,
) -> tuple[Tensor, Tensor]:
    """The CPU implementation of dmattn::fwd: out (B, Sq, H, D) and lse (B, H, Sq).

    Raises:
        TypeError, ValueError: as `shapes.check_inputs` and `shapes.check_selection`.
    """
    dims = check_inputs(q, k, v, mask, bias)
    if selection is not None:
        check_selection(selection, mask, dims, is_causal, q.device)
        return gathered.forward(
            dims, q, k, v, bias, softmax_scale, is_causal, softcap, selection
        )
    out, lse = empty_forward_outputs(q)
    layout = make_layout(dims, q, k, v, mask, bias, softmax_scale, is_causal, softcap)
    out_rows, lse_rows = layout.rows_of(out), layout.per_row(lse)
    with torch.autocast("cpu", enabled=False):  # it would run the products below in bfloat16
        for rows in _row_blocks(layout):
            block_out, block_lse = _forward_rows(layout, rows)
            out_rows[..., rows, :] = block_out
            lse_rows[..., rows] = block_lse
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool,
    needs: Sequence[bool],
    selection: Selection | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The CPU implementation of dmattn::bwd: dq, dk, dv, dbias, each only where `needs` says so.

    The order of every sum is fixed, so the result is repeatable whatever `deterministic` says.

    Raises:
        TypeError, ValueError: as `shapes.check_inputs`, `shapes.check_backward_inputs` and
            `shapes.check_selection`; a bias with rows has no gradient with a selection.
    """
    dims = check_inputs(q, k, v, mask, bias)
    check_backward_inputs(dout, dlse, q, out, lse, needs)
    if selection is not None:
        check_selection(selection, mask, dims, is_causal, q.device)
        check_selected_bias(selection, bias, needs[3])
        return gathered.backward(
            dims,
            dout,
            dlse,
            q,
            k,
            v,
            bias,
            out,
            softmax_scale,
            is_causal,
            softcap,
            needs,
            selection,
        )
    dq, dk, dv, dbias = empty_backward_outputs(q, k, v, bias, needs)
    need_q, need_k, need_v, need_bias = needs
    layout = make_layout(dims, q, k, v, mask, bias, softmax_scale, is_causal, softcap)
    sums = _Sums(
        dk=torch.zeros_like(layout.k) if need_k else None,
        dv=torch.zeros_like(layout.v) if need_v else None,
        dbias=None
        if layout.bias is None or not need_bias
        else layout.bias.new_zeros(layout.bias.shape, dtype=layout.dtype),
    )
    dq_rows = layout.rows_of(dq) if need_q else None
    with torch.autocast("cpu", enabled=False):
        for rows in _row_blocks(layout):
            given = _given_rows(layout, rows, dout, dlse, out, lse)
            block_dq = _backward_rows(layout, rows, given, sums, need_q)
            if dq_rows is not None and block_dq is not None:
                dq_rows[..., rows, :] = layout.unfold_rows(block_dq)
    if sums.dk is not None:
        layout.keys_to_input(sums.dk, dk)
    if sums.dv is not None:
        layout.keys_to_input(sums.dv, dv)
    if sums.dbias is not None:
        layout.bias_to_input(sums.dbias, dbias)
    return dq, dk, dv, dbias


class _Sums(NamedTuple):
    """Gradients summed over row blocks, in the arithmetic dtype; None where not needed."""

    dk: Tensor | None  # (B*HK, Sk, D)
    dv: Tensor | None  # (B*HK, Sk, D)
    dbias: Tensor | None  # the shape of layout.bias


class _Given(NamedTuple):
    """What the backward pass is given for a block of rows, folded to (B*HK, G*M, ...)."""

    dout: Tensor  # (B*HK, G*M, D)
    out: Tensor  # (B*HK, G*M, D)
    lse: Tensor  # (B*HK, G*M, 1)
    dlse: Tensor | None  # (B*HK, G*M, 1)


def _given_rows(
    layout: Layout, rows: slice, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> _Given:
    """Rows that keep nothing get zero gradients: what came may be NaN, as from -inf - -inf."""
    row_lse = layout.fold_lse(lse, rows)
    empty = row_lse == -math.inf
    return _Given(
        dout=layout.fold_rows(dout, rows).masked_fill(empty, 0.0),
        out=layout.fold_rows(out, rows),
        lse=row_lse,
        dlse=None if dlse is None else layout.fold_lse(dlse, rows).masked_fill(empty, 0.0),
    )


def _row_blocks(layout: Layout) -> Iterator[slice]:
    keys = max(1, min(layout.seqlen_k, _KEYS_PER_BLOCK))
    heads = max(1, layout.batch * layout.nheads_k * layout.group)
    size = max(_MIN_ROWS_PER_BLOCK, _BLOCK_ELEMENTS // (keys * heads))
    for start in range(0, layout.seqlen_q, size):
        yield slice(start, min(start + size, layout.seqlen_q))


def _key_blocks(layout: Layout, rows: slice) -> Iterator[_Block]:
    """The blocks of which some row sees some key."""
    for start in range(0, layout.seqlen_k, _KEYS_PER_BLOCK):
        keys = slice(start, min(start + _KEYS_PER_BLOCK, layout.seqlen_k))
        if not layout.is_causal:
            yield _Block(keys, cut=False)
            continue
        first, last = layout.position_range(keys)
        if first <= rows.stop - 1 + layout.causal_offset:
            yield _Block(keys, cut=last > rows.start + layout.causal_offset)


def _logits(
    layout: Layout, rows: slice, block: _Block, scaled_q: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Logits (B*HK, G*M, N) in natural units, -inf where not kept, and tanh of the soft cap.

    Multiplying by log2(e) first, for exp2, would overflow a bias near the largest float.
    """
    s = torch.bmm(scaled_q, layout.k[:, block.keys].transpose(1, 2))
    tanh: Tensor | None = None
    if layout.softcap > 0:
        tanh = s.div_(layout.softcap).tanh_()
        s = tanh * layout.softcap
    s5 = layout.unfold_rows(s)
    if layout.bias is not None:
        s5 += layout.block_of(layout.bias, rows, block.keys)
    if layout.mask is not None:
        s5.masked_fill_(~layout.block_of(layout.mask, rows, block.keys), -math.inf)
    if block.cut:
        s5.masked_fill_(layout.beyond_causal(rows, block.keys), -math.inf)
    return s, tanh


def _forward_rows(layout: Layout, rows: slice) -> tuple[Tensor, Tensor]:
    """out (B, HK, G, M, D) and lse (B, HK, G, M) of a block of rows, by a running softmax."""
    scaled_q = layout.fold_rows(layout.q, rows) * layout.softmax_scale
    row_max, row_sum = _empty_statistics(scaled_q)
    acc = torch.zeros_like(scaled_q)
    for block in _key_blocks(layout, rows):
        s, _ = _logits(layout, rows, block, scaled_q)
        row_max, row_sum, p, alpha = _accumulate(row_max, row_sum, s)
        acc.mul_(alpha).baddbmm_(p, layout.v[:, block.keys])
    # An empty row has acc = 0 and row_sum = 0: it gives out = 0 and lse = -inf.
    out = acc.div_(row_sum.masked_fill(row_sum == 0, 1.0))
    lse = row_max + row_sum.log()
    return layout.unfold_rows(out), layout.unfold_rows(lse).squeeze(-1)


def _empty_statistics(scaled_q: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*scaled_q.shape[:2], 1)
    return scaled_q.new_full(shape, -math.inf), scaled_q.new_zeros(shape)


def _accumulate(
    row_max: Tensor, row_sum: Tensor, s: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One step of the running softmax: new maximum and sum, exp(s - maximum), old sums' factor."""
    new_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
    shift = new_max.masked_fill(new_max == -math.inf, 0.0)
    p = s.sub_(shift).exp_()
    alpha = (row_max - shift).exp_()
    return new_max, row_sum * alpha + p.sum(-1, keepdim=True), p, alpha


def _normalizer(
    layout: Layout, rows: slice, scaled_q: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(shift, factor) with probabilities = exp(logits - shift) * factor; None = factor 1."""
    shift = lse.masked_fill(lse == -math.inf, 0.0)
    if shift.numel() == 0 or float(shift.abs().amax()) <= _EXACT_LSE_LIMIT:
        return shift, None
    row_max, row_sum = _empty_statistics(scaled_q)
    for block in _key_blocks(layout, rows):
        s, _ = _logits(layout, rows, block, scaled_q)
        row_max, row_sum, _, _ = _accumulate(row_max, row_sum, s)
    shift = row_max.masked_fill(row_max == -math.inf, 0.0)
    return shift, row_sum.masked_fill(row_sum == 0, 1.0).reciprocal()


def _backward_rows(
    layout: Layout, rows: slice, given: _Given, sums: _Sums, need_dq: bool
) -> Tensor | None:
    """Add a block of rows to `sums`; its dq (B*HK, G*M, D) when needed."""
    scaled_q = layout.fold_rows(layout.q, rows) * layout.softmax_scale
    shift, factor = _normalizer(layout, rows, scaled_q, given.lse)
    # dlogits = p * (dp - delta), with dlse counting against delta since dlse/dlogits = p.
    delta = (given.dout * given.out).sum(-1, keepdim=True)
    if given.dlse is not None:
        delta -= given.dlse
    dq = torch.zeros_like(scaled_q) if need_dq else None
    need_ds = need_dq or sums.dk is not None or sums.dbias is not None
    for block in _key_blocks(layout, rows):
        keys = block.keys
        s, tanh = _logits(layout, rows, block, scaled_q)
        p = s.sub_(shift).exp_()
        if factor is not None:
            p *= factor
        if sums.dv is not None:
            sums.dv[:, keys].baddbmm_(p.transpose(1, 2), given.dout)
        if not need_ds:
            continue
        ds = torch.bmm(given.dout, layout.v[:, keys].transpose(1, 2)).sub_(delta).mul_(p)
        if sums.dbias is not None:
            layout.add_to_bias(sums.dbias, ds, rows, keys)
        if tanh is not None:
            ds *= 1.0 - tanh.square()
        if dq is not None:
            dq.baddbmm_(ds, layout.k[:, keys])
        if sums.dk is not None:
            sums.dk[:, keys].baddbmm_(ds.transpose(1, 2), scaled_q)
    return None if dq is None else dq.mul_(layout.softmax_scale)
