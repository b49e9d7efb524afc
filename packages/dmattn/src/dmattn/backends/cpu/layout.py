"""How the CPU backend arranges the tensors of a problem for matrix products.

Tensors with a row dimension are viewed as (B, HL, G, Sq, X): HL is the number of heads that have
keys, or lists of keys, of their own, and G the number of query heads that share each of them. A
block of rows may consist of L stretches of M rows, each of which attends to other keys. For matrix
products its rows are (B*HL*L, G*M, X), and its logits for N keys (B*HL*L, G*M, N); with all
dimensions separate, the logits are (B, HL, L, G, M, N).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.problem import Problem, lse_dtype


class RowBlock(NamedTuple):
    """Query rows that are computed together."""

    rows: slice
    stretches: int  # L: equal stretches of rows, each with keys of its own

    @property
    def length(self) -> int:
        """M: the rows of a stretch."""
        rows: int = self.rows.stop - self.rows.start
        return rows // self.stretches


@dataclass(frozen=True, slots=True)
class Layout:
    """One problem without packing, arranged for matrix products."""

    problem: Problem  # for its settings
    dtype: torch.dtype  # of all arithmetic
    batch: int
    nheads_k: int  # HK
    heads: int  # HL
    group: int  # G
    seqlen_q: int
    seqlen_k: int
    q: Tensor  # (B, HL, G, Sq, D), a view
    k: Tensor  # (B*HK, Sk, D), contiguous, in `dtype`
    v: Tensor  # (B*HK, Sk, D), contiguous, in `dtype`
    mask: Tensor | None  # bool ({B|1}, {HL|1}, {G|1}, {Sq|1}, {Sk|1})
    bias: Tensor | None  # shapes as mask, in its own dtype
    sinks: Tensor | None  # (B, HL, G, Sq, 1), a view

    @property
    def causal_offset(self) -> int:
        """Sk - Sq: under causality row i sees the keys 0 .. i + causal_offset."""
        return self.seqlen_k - self.seqlen_q

    def with_rows(self, t: Tensor) -> Tensor:
        """(B, Sq, H, D) -> (B, HL, G, Sq, D), a view."""
        return torch.unflatten(t, 2, (self.heads, self.group)).permute(0, 2, 3, 1, 4)

    def per_row(self, t: Tensor) -> Tensor:
        """(B, H, Sq) -> (B, HL, G, Sq, 1), a view."""
        return torch.unflatten(t, 1, (self.heads, self.group)).unsqueeze(-1)

    def block_of(self, t: Tensor, block: RowBlock) -> Tensor:
        """(B, HL, G, Sq, X) -> the block's (B, HL, L, G, M, X), a view."""
        rows = torch.unflatten(t[..., block.rows, :], 3, (block.stretches, block.length))
        return rows.transpose(2, 3)

    def fold(self, t: Tensor, block: RowBlock) -> Tensor:
        """(B, HL, G, Sq, X) -> the block's (B*HL*L, G*M, X), in the arithmetic dtype."""
        return self.block_of(t, block).to(self.dtype).flatten(3, 4).flatten(0, 2)

    def unfold(self, t: Tensor, block: RowBlock) -> Tensor:
        """(B*HL*L, G*M, X) -> (B, HL, L, G, M, X), a view."""
        sizes = (self.batch, self.heads, block.stretches, self.group, block.length, t.shape[-1])
        return t.view(sizes)

    def operand_of(self, t: Tensor, block: RowBlock, keys: slice | Tensor) -> Tensor:
        """The part of a mask or bias for a block of rows and some keys.

        It broadcasts to the logits (B, HL, L, G, M, N). For a slice of keys it is a view, for an
        index of shape ({B|1}, {HL|1}, L, N) a copy.
        """
        t = self.block_of(t, block) if t.shape[3] > 1 else t.unsqueeze(2)
        if t.shape[5] == 1:
            return t
        if isinstance(keys, slice):
            return t[..., keys]
        return t.take_along_dim(keys[:, :, :, None, None], 5)


def make_layout(problem: Problem) -> Layout:
    """Arrange a checked problem without packing."""
    q, k, v = problem.q, problem.k, problem.v
    batch, seqlen_q, nheads, _ = q.shape
    heads = k.shape[2]
    if problem.key_lists is not None and problem.key_lists.idx.shape[1] == nheads:
        heads = nheads
    group = nheads // heads
    dtype = lse_dtype(q.dtype)
    sinks = problem.sinks
    if sinks is not None:
        sinks = sinks.to(dtype).view(1, heads, group, 1, 1).expand(batch, -1, -1, seqlen_q, 1)
    return Layout(
        problem=problem,
        dtype=dtype,
        batch=batch,
        nheads_k=k.shape[2],
        heads=heads,
        group=group,
        seqlen_q=seqlen_q,
        seqlen_k=k.shape[1],
        q=torch.unflatten(q, 2, (heads, group)).permute(0, 2, 3, 1, 4),
        k=k.transpose(1, 2).to(dtype).contiguous().flatten(0, 1),
        v=v.transpose(1, 2).to(dtype).contiguous().flatten(0, 1),
        mask=None if problem.mask is None else _by_group(problem.mask, heads, group),
        bias=None if problem.bias is None else _by_group(problem.bias, heads, group),
        sinks=sinks,
    )


def _by_group(t: Tensor, heads: int, group: int) -> Tensor:
    """A mask or bias ({B|1}, {H|HK|1}, {Sq|1}, {Sk|1}) with its heads as ({HL|1}, {G|1})."""
    if t.shape[1] == heads * group:
        return torch.unflatten(t, 1, (heads, group))
    if t.shape[1] not in (1, heads):  # HK heads, each for several heads with key lists
        t = t.repeat_interleave(heads // t.shape[1], dim=1)
    return t.unsqueeze(2)


def write_key_gradient(total: Tensor, target: Tensor) -> None:
    """Write dk or dv (B*HK, Sk, D) to (B, Sk, HK, D), rounding once."""
    target.transpose(1, 2).copy_(torch.unflatten(total, 0, (target.shape[0], target.shape[2])))


def write_bias_gradient(total: Tensor, target: Tensor) -> None:
    """Write dbias (B, HL, G, {Sq|1}, {Sk|1}) to the bias's own shape, rounding once."""
    by_head = total.flatten(1, 2)
    heads = target.shape[1]
    if heads not in (1, by_head.shape[1]):
        by_head = torch.unflatten(by_head, 1, (heads, -1)).sum(2)
    target.copy_(by_head.sum_to_size(target.shape))
