"""Attention over packed sequences on the CPU: one sequence after another, by `ops.cpu`."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from dmattn.backends.cpu import attention as cpu
from dmattn.checks import (
    check_backward_inputs,
    empty_backward_outputs,
    empty_forward_outputs,
)
from dmattn.packed_checks import Packing, check_packed_inputs, is_per_key


class _Span(NamedTuple):
    """One sequence: its rows and keys among those of all."""

    rows: slice
    keys: slice

    def operand(self, t: Tensor | None) -> Tensor | None:
        """Its part of a mask, bias or dbias, as (1, heads, 1 or rows, keys), a view."""
        if t is None:
            return None
        if is_per_key(t):
            return t[None, :, None, self.keys]
        return t[None, :, self.rows, : self.keys.stop - self.keys.start]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    packing: Packing,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """The CPU implementation of dmattn::varlen_fwd: out (Tq, H, D) and lse (H, Tq).

    Raises:
        TypeError, ValueError: as `varlen_shapes.check_packed_inputs`; cu_seqlens do not rise from
            0 to the number of tokens, or a sequence is longer than the bound given for it.
    """
    check_packed_inputs(q, k, v, mask, bias, packing)
    out, lse = empty_forward_outputs(q)
    for span in _spans(packing, q.shape[0], k.shape[0]):
        rows, keys = span
        found = cpu.forward(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            span.operand(mask),
            span.operand(bias),
            softmax_scale,
            is_causal,
            softcap,
        )
        out[rows], lse[:, rows] = found[0][0], found[1][0]
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    packing: Packing,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The CPU implementation of dmattn::varlen_bwd: dq, dk, dv, dbias, each only where needed.

    Raises:
        TypeError, ValueError: as `forward` and `shapes.check_backward_inputs`.
    """
    check_packed_inputs(q, k, v, mask, bias, packing)
    check_backward_inputs(dout, dlse, q, out, lse, needs)
    grads = empty_backward_outputs(q, k, v, bias, needs)
    dbias = grads[3].zero_()  # columns behind the keys of a row's sequence stay so
    for span in _spans(packing, q.shape[0], k.shape[0]):
        rows, keys = span
        found = cpu.backward(
            dout[None, rows],
            None if dlse is None else dlse[None, :, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            span.operand(mask),
            span.operand(bias),
            out[None, rows],
            lse[None, :, rows],
            softmax_scale,
            is_causal,
            softcap,
            deterministic,
            needs,
        )
        for grad, part, need, where in zip(grads, found, needs, (rows, keys, keys), strict=False):
            if need:
                grad[where] = part[0]
        target = span.operand(dbias) if needs[3] and bias is not None else None
        if target is not None:
            target.copy_(found[3])
    return grads


def _spans(packing: Packing, total_q: int, total_k: int) -> Iterator[_Span]:
    rows = _boundaries("q", packing.cu_seqlens_q, packing.max_seqlen_q, total_q)
    keys = _boundaries("k", packing.cu_seqlens_k, packing.max_seqlen_k, total_k)
    for (row, row_end), (key, key_end) in zip(
        itertools.pairwise(rows), itertools.pairwise(keys), strict=True
    ):
        yield _Span(slice(row, row_end), slice(key, key_end))


def _boundaries(name: str, cu_seqlens: Tensor, longest: int, total: int) -> list[int]:
    bounds: list[int] = cu_seqlens.tolist()
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != total or any(n < 0 for n in lengths):
        raise ValueError(f"cu_seqlens_{name}: got {bounds}, wanted rising from 0 to {total}")
    if lengths and max(lengths) > longest:
        raise ValueError(f"max_seqlen_{name}: got {longest}, wanted at least {max(lengths)}")
    return bounds
