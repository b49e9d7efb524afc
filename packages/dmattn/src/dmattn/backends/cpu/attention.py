"""Attention on the CPU, blocked over query rows and keys: memory is linear in both lengths.

Steps of a cache also run here on GPUs that the compiled kernels do not serve: all tensors are made
on the device of the problem.

Arithmetic is in float32 (float64 for float64 inputs) and each result is rounded once. Query heads
that share a key head are folded into the rows of one matrix product, so keys are never expanded.

A key that a row does not keep contributes nothing to that row, nor the row to the gradient of the
key, even if one of them is NaN or INF. Multiplying by a probability of 0 does not ensure that,
since 0 * NaN is NaN. So blocks with such values are computed by `_isolated_product` (`exact=True`),
and the others in the ordinary, faster way.

Letters: as in `dmattn.backends.cpu.layout`; further X = B*HL*L, the matrices of a block, and
GM = G*M, the rows of each.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.backends.cpu import packed
from dmattn.backends.cpu.key_blocks import KeyBlock, Lists, key_blocks, make_lists, row_blocks
from dmattn.backends.cpu.layout import (
    Layout,
    RowBlock,
    make_layout,
    write_bias_gradient,
    write_key_gradient,
)
from dmattn.problem import Gradients, Needs, Problem, Results, empty_gradients, empty_results

# Above this |lse|, exp(logits - lse) would suffer from the rounding of lse: at 1e8 the logarithm of
# the row sum is lost altogether in a float32 lse. The backward computes maximum and sum of such
# rows again.
_EXACT_LSE_LIMIT = 128.0


def forward(problem: Problem) -> Results:
    """Results of a checked problem: dense, packed, or over key lists.

    With a bias lse_rest is computed as well: sinks that are as large as the bias need it.

    Raises:
        ValueError: cu_seqlens do not rise from 0 to the number of tokens, or a sequence is longer
            than max_seqlen_q or max_seqlen_k.
    """
    results = empty_results(problem)
    out, lse = results.out, results.lse
    rest = results.lse_rest if problem.bias is not None else None
    # Autocast would compute the products in half precision.
    with torch.autocast(problem.q.device.type, enabled=False):
        if problem.packing is None:
            _forward(problem, out, lse, rest)
        else:
            for part in packed.sequences(problem):
                its_rest = None if rest is None else part.lse_of(rest)
                _forward(part.problem, part.rows_of(out), part.lse_of(lse), its_rest)
    return results


def backward(
    problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
) -> Gradients:
    """The gradients of a checked problem from what `forward` returned, (0,) where not needed.

    The order of every sum is fixed, so the result is repeatable whatever `deterministic` says.

    Raises:
        ValueError: as `forward`.
    """
    out, lse = results.out, results.lse
    grads = empty_gradients(problem, needs)
    with torch.autocast(problem.q.device.type, enabled=False):
        if problem.packing is None:
            _backward(problem, out, lse, dout, dlse, grads, needs)
            return grads
        grads.bias.zero_()  # columns beyond the keys of a row's sequence stay 0
        for part in packed.sequences(problem):
            _backward(
                part.problem,
                part.rows_of(out),
                part.lse_of(lse),
                part.rows_of(dout),
                None if dlse is None else part.lse_of(dlse),
                part.gradients_of(grads, needs),
                needs,
            )
    return grads


def _forward(problem: Problem, out: Tensor, lse: Tensor, rest: Tensor | None) -> None:
    """Write out (B, Sq, H, D), lse and its rest (B, H, Sq) of a problem without packing."""
    layout, lists = make_lists(problem, make_layout(problem))
    targets = [layout.with_rows(out), layout.per_row(lse)]
    if rest is not None:
        targets.append(layout.per_row(rest))
    for block in row_blocks(layout, lists):
        rows, softmax = _forward_rows(layout, lists, block, exact=False)
        if not _all_finite(rows):
            rows, softmax = _forward_rows(layout, lists, block, exact=True)
        for target, found in zip(targets, (rows, *softmax.lse(rest is not None)), strict=True):
            layout.block_of(target, block).copy_(layout.unfold(found, block))


def _backward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    grads: Gradients,
    needs: Needs,
) -> None:
    """Write the gradients of a problem without packing."""
    layout, lists = make_lists(problem, make_layout(problem))
    sums = _empty_sums(layout, lists, needs)
    finite_keys = _all_finite(layout.k, layout.v)
    for block in row_blocks(layout, lists):
        rows = _given_rows(layout, block, out, lse, dout, dlse)
        exact = not (finite_keys and _all_finite(rows.q, rows.dout, rows.delta, rows.shift))
        dq = _backward_rows(layout, lists, block, rows, sums, needs.q, exact)
        if dq is not None:
            target = layout.block_of(layout.with_rows(grads.q), block)
            target.copy_(layout.unfold(dq, block))
    if sums.dk is not None:
        write_key_gradient(sums.dk, grads.k)
    if sums.dv is not None:
        write_key_gradient(sums.dv, grads.v)
    if sums.dbias is not None:
        write_bias_gradient(sums.dbias, grads.bias)


class _Sums(NamedTuple):
    """Gradients summed over row blocks, in the arithmetic dtype; None where not needed."""

    dk: Tensor | None  # (B*HK, Sk, D)
    dv: Tensor | None  # (B*HK, Sk, D)
    dbias: Tensor | None  # as layout.bias; with lists its first dimensions are B and HL


class _Rows(NamedTuple):
    """The tensors of a block of rows that the backward pass needs."""

    q: Tensor  # (X, GM, D), scaled
    dout: Tensor  # (X, GM, D)
    # dout . out - dlse: then dlogits = p * (dp - delta), as the derivative of lse by a logit is p.
    delta: Tensor  # (X, GM, 1)
    shift: Tensor  # (X, GM, 1): lse, or 0 for rows that keep nothing


def _empty_sums(layout: Layout, lists: Lists | None, needs: Needs) -> _Sums:
    dbias = None
    if layout.bias is not None and needs.bias:
        shape = tuple(layout.bias.shape)
        if lists is not None:  # they differ between batch entries and heads
            shape = (layout.batch, layout.heads, *shape[2:])
        dbias = layout.bias.new_zeros(shape, dtype=layout.dtype)
    return _Sums(
        dk=torch.zeros_like(layout.k) if needs.k else None,
        dv=torch.zeros_like(layout.v) if needs.v else None,
        dbias=dbias,
    )


def _given_rows(
    layout: Layout, block: RowBlock, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> _Rows:
    """The rows of a block for the backward pass.

    Rows that keep nothing get gradients of 0 for out and lse, since the given ones may be NaN, as
    from -inf - -inf.
    """
    row_lse = layout.fold(layout.per_row(lse), block)
    empty = row_lse == -math.inf
    row_dout = layout.fold(layout.with_rows(dout), block).masked_fill(empty, 0.0)
    delta = (row_dout * layout.fold(layout.with_rows(out), block)).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= layout.fold(layout.per_row(dlse), block).masked_fill(empty, 0.0)
    q = layout.fold(layout.q, block) * layout.problem.softmax_scale
    return _Rows(q, row_dout, delta, row_lse.masked_fill(empty, 0.0))


def _logits(
    layout: Layout, block: RowBlock, keys: KeyBlock, scaled_q: Tensor, exact: bool
) -> tuple[Tensor, Tensor | None]:
    """Logits (X, GM, N), -inf where not kept, and the tanh of the soft cap or None.

    They are logits to base e. Multiplied by log2(e), for exp2, a bias near the largest float would
    overflow.
    """
    s = torch.bmm(scaled_q, keys.k.transpose(1, 2))
    tanh: Tensor | None = None
    if layout.problem.softcap > 0:
        tanh = s.div_(layout.problem.softcap).tanh_()
        s = tanh * layout.problem.softcap
    apart = layout.unfold(s, block)
    if layout.bias is not None:
        bias = layout.operand_of(layout.bias, block, keys.keys)
        apart += bias
        if exact:  # NaN + -inf is NaN, but a bias of -inf has to mask
            apart.masked_fill_(bias == -math.inf, -math.inf)
    if layout.mask is not None:
        apart.masked_fill_(~layout.operand_of(layout.mask, block, keys.keys), -math.inf)
    if keys.hidden is not None:
        apart.masked_fill_(keys.hidden, -math.inf)
    return s, tanh


class _Softmax:
    """A running softmax of rows: their maximum and the sum of exp(logits - maximum) so far."""

    def __init__(self, scaled_q: Tensor) -> None:
        shape = (*scaled_q.shape[:2], 1)
        self.maximum = scaled_q.new_full(shape, -math.inf)
        self.total = scaled_q.new_zeros(shape)

    def add(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Add logits s (X, GM, N), which are overwritten.

        Returns exp(s - maximum) and alpha, the factor by which earlier sums have to be multiplied.
        """
        maximum = torch.maximum(self.maximum, s.amax(-1, keepdim=True))
        shift = maximum.masked_fill(maximum == -math.inf, 0.0)
        p = s.sub_(shift).exp_()
        alpha = (self.maximum - shift).exp_()
        self.maximum = maximum
        self.total = self.total.mul_(alpha).add_(p.sum(-1, keepdim=True))
        return p, alpha

    def lse(self, with_rest: bool) -> tuple[Tensor, ...]:
        """The log-sum-exp; `with_rest` also what its rounding dropped, 0 where it is infinite."""
        log = self.total.log()
        lse = self.maximum + log
        if not with_rest:
            return (lse,)
        return lse, (self.maximum - lse + log).masked_fill_(lse.isinf(), 0.0)

    def divisor(self) -> Tensor:
        """The sum of exponentials of each row, or 1 for rows that keep nothing."""
        return self.total.masked_fill(self.total == 0, 1.0)


def _forward_rows(
    layout: Layout, lists: Lists | None, block: RowBlock, exact: bool
) -> tuple[Tensor, _Softmax]:
    """out (X, GM, D) of a block of rows, and the softmax of these rows."""
    scaled_q = layout.fold(layout.q, block) * layout.problem.softmax_scale
    softmax = _Softmax(scaled_q)
    acc = torch.zeros_like(scaled_q)
    for keys in key_blocks(layout, lists, block):
        s, _ = _logits(layout, block, keys, scaled_q, exact)
        kept = s != -math.inf if exact else None
        p, alpha = softmax.add(s)
        acc.mul_(alpha)
        _add_product(acc, p, keys.v, kept)
    # An empty row has acc = 0 and total = 0: it gives out = 0 and lse = -inf.
    return acc.div_(softmax.divisor()), softmax


def _normalizer(
    layout: Layout, lists: Lists | None, block: RowBlock, rows: _Rows, exact: bool
) -> tuple[Tensor, Tensor | None]:
    """(shift, factor) such that probabilities = exp(logits - shift) * factor; None = factor 1."""
    if rows.shift.numel() == 0 or float(rows.shift.abs().amax()) <= _EXACT_LSE_LIMIT:
        return rows.shift, None
    softmax = _Softmax(rows.q)
    for keys in key_blocks(layout, lists, block):
        s, _ = _logits(layout, block, keys, rows.q, exact)
        softmax.add(s)
    if layout.sinks is not None:
        softmax.add(layout.fold(layout.sinks, block).clone())
    shift = softmax.maximum.masked_fill(softmax.maximum == -math.inf, 0.0)
    return shift, softmax.divisor().reciprocal()


def _backward_rows(
    layout: Layout,
    lists: Lists | None,
    block: RowBlock,
    rows: _Rows,
    sums: _Sums,
    need_dq: bool,
    exact: bool,
) -> Tensor | None:
    """Add the gradients from a block of rows to `sums`; returns its dq (X, GM, D) if needed."""
    shift, factor = _normalizer(layout, lists, block, rows, exact)
    dq = torch.zeros_like(rows.q) if need_dq else None
    need_ds = need_dq or sums.dk is not None or sums.dbias is not None
    for keys in key_blocks(layout, lists, block):
        s, tanh = _logits(layout, block, keys, rows.q, exact)
        kept = s != -math.inf if exact else None
        p = s.sub_(shift).exp_()
        if factor is not None:
            p *= factor
        if kept is not None:
            p.masked_fill_(~kept, 0.0)
        if sums.dv is not None:
            _add_to_keys(sums.dv, keys, p, rows.dout, kept)
        if not need_ds:
            continue
        ds = torch.bmm(rows.dout, keys.v.transpose(1, 2)).sub_(rows.delta).mul_(p)
        if kept is not None:
            ds.masked_fill_(~kept, 0.0)
        if sums.dbias is not None:
            _add_to_bias(layout, sums.dbias, block, keys, ds)
        if tanh is not None:
            ds *= 1.0 - tanh.square()
            if kept is not None:
                ds.masked_fill_(~kept, 0.0)
        if dq is not None:
            _add_product(dq, ds, keys.k, kept)
        if sums.dk is not None:
            _add_to_keys(sums.dk, keys, ds, rows.q, kept)
    return None if dq is None else dq.mul_(layout.problem.softmax_scale)


def _add_product(acc: Tensor, weights: Tensor, values: Tensor, kept: Tensor | None) -> None:
    """acc (X, I, D) += weights (X, I, J) @ values (X, J, D).

    By `_isolated_product` if `kept` is given.
    """
    if kept is None:
        acc.baddbmm_(weights, values)
    else:
        acc += _isolated_product(weights, values, kept)


def _add_to_keys(
    total: Tensor, keys: KeyBlock, weights: Tensor, values: Tensor, kept: Tensor | None
) -> None:
    """Add weights.mT @ values to dk or dv: weights (X, GM, N), values (X, GM, D)."""
    if kept is not None:
        product = _isolated_product(weights.mT, values, kept.mT)
    elif isinstance(keys.keys, slice):
        total[:, keys.keys].baddbmm_(weights.mT, values)
        return
    else:
        product = torch.bmm(weights.mT, values)
    keys.add_to_keys(total, product)


def _add_to_bias(
    layout: Layout, dbias: Tensor, block: RowBlock, keys: KeyBlock, ds: Tensor
) -> None:
    """Add ds (X, GM, N) to dbias, summed over the dimensions in which the bias is broadcast."""
    apart = layout.unfold(ds, block)
    if isinstance(keys.keys, slice) or dbias.shape[4] == 1:
        target = layout.operand_of(dbias, block, slice(None))
        if isinstance(keys.keys, slice) and dbias.shape[4] > 1:
            target = target[..., keys.keys]
        target += apart.sum_to_size(target.shape)
        return
    # With lists a bias that has keys has no rows. by_key becomes (B, HL, G, L*N), in the order of
    # the index.
    by_key = apart.sum(4).sum_to_size((*apart.shape[:3], dbias.shape[2], apart.shape[5]))
    by_key = by_key.transpose(2, 3).flatten(3)
    index = keys.keys.flatten(2)[:, :, None].expand(by_key.shape)
    dbias.select(3, 0).scatter_add_(3, index, by_key)


def _isolated_product(weights: Tensor, values: Tensor, kept: Tensor) -> Tensor:
    """weights (X, I, J) @ values (X, J, D), to which pairs that are not kept contribute nothing.

    In pairs that are kept, INF or NaN among the values makes the result INF or NaN as usual.

    Args:
        weights: (X, I, J), 0 where not kept, unless the whole row is NaN.
        values: (X, J, D), any numbers.
        kept: bool (X, I, J).
    """
    finite = values.isfinite()
    if finite.all():
        return torch.bmm(weights, values)
    total = torch.bmm(weights, values.where(finite, 0.0))
    for infinity in (math.inf, -math.inf):  # NaN counts as both infinities, whose sum is NaN
        is_such = (values == infinity) | values.isnan()
        met = torch.bmm(kept.to(values.dtype), is_such.to(values.dtype)) > 0
        total += torch.zeros_like(total).masked_fill_(met, infinity)
    return total


def _all_finite(*tensors: Tensor) -> bool:
    """Whether all entries are finite, judged by their sum.

    A sum is the cheapest pass over a tensor, and an INF or NaN in it stays, whatever is added. If
    only the sum overflows, the answer is False as well, which costs time and nothing else.
    """
    return all(math.isfinite(float(t.sum())) for t in tensors)
