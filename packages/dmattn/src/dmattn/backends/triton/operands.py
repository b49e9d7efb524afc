"""A problem as the kernels take it: tensors, their strides, and how the keys of a row are found.

Letters: as in `dmattn.problem`; T is Sk, or Tk for packed sequences.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmattn.key_lists import BLOCK_ROWS
from dmattn.problem import Problem, has_rows, is_per_key

# How a program finds its keys: the values of LISTS in `listed_range` of the kernels.
ALL_KEYS, ONE_LIST, LIST_PER_BLOCK = 0, 1, 2


@dataclass(frozen=True)
class Lists:
    """Lists of keys, int32 and contiguous. Shapes for ONE_LIST, and for LIST_PER_BLOCK."""

    kind: int  # ONE_LIST or LIST_PER_BLOCK
    keys: Tensor  # ({B|1}, heads, T + 1), or ({B|1}, heads, blocks, capacity)
    # ({B|1}, heads, T + 1): the number of listed keys before each key; or ({B|1}, heads, blocks):
    # the length of each list.
    rank: Tensor
    full: Tensor | None = None  # as rank: how many leading entries all rows of the block keep
    end: Tensor | None = None  # ({B|1}, heads, Sk): rows at this position and later drop the key


@dataclass(frozen=True)
class Operands:
    """The arguments that all kernels of a call share."""

    problem: Problem
    lists: Lists | None
    mask_is_listed: bool  # whether the lists contain all that the mask says
    batch: int  # or the number of packed sequences
    seqlen_q: int  # an upper bound of the rows of a sequence
    seqlen_k: int  # an upper bound of the keys of a sequence
    total_q: int  # rows in a batch entry of the tensors, or of all packed sequences
    total_k: int  # keys in a batch entry of the tensors, or of all packed sequences

    @property
    def nheads(self) -> int:
        return self.problem.q.shape[-2]

    @property
    def nheads_k(self) -> int:
        return self.problem.k.shape[-2]

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.nheads // self.nheads_k

    @property
    def has_pairs(self) -> bool:
        """Whether the bias, or a mask that the kernels read, may differ between rows."""
        mask = None if self.mask_is_listed else self.problem.mask
        return any(t is not None and has_rows(t) for t in (mask, self.problem.bias))

    @property
    def list_heads(self) -> int:
        """The number of heads that have different lists; 0 without lists."""
        return 0 if self.lists is None else self.lists.keys.shape[1]

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the kernels, except those for lists."""
        problem = self.problem
        packing = problem.packing
        return {
            **_rows("q", "m", problem.q),
            **_rows("k", "n", problem.k),
            **_rows("v", "n", problem.v),
            **self._operand("mask", None if self.mask_is_listed else problem.mask),
            **self._operand("bias", problem.bias),
            "cu_seqlens_q": None if packing is None else packing.cu_seqlens_q.contiguous(),
            "cu_seqlens_k": None if packing is None else packing.cu_seqlens_k.contiguous(),
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "total_q": self.total_q,
            "total_k": self.total_k,
            "nheads": self.nheads,
            "group": self.group,
            "scale": float(problem.softmax_scale),
            "softcap": float(problem.softcap),
            "D": problem.q.shape[-1],
            "CAUSAL": problem.is_causal,
            "SOFTCAP": problem.softcap > 0,
            "BASE_2": self._in_base_2(),
        }

    def _in_base_2(self) -> bool:
        """Whether the kernels compute the softmax in base 2, with scale * log2(e) as one factor.

        They then scale the maximum of the products instead of the products, so the scale must not
        be negative. With a large bias the logits must not be multiplied, and in float32 the
        additional rounding would matter.
        """
        problem = self.problem
        plain = problem.bias is None and problem.softcap == 0 and problem.softmax_scale >= 0
        return plain and problem.q.dtype != torch.float32

    def mask_arguments(self) -> dict[str, Any]:
        """Keyword arguments for the mask, for kernels that do not walk lists."""
        return self._operand("mask", self.problem.mask)

    def list_arguments(self) -> dict[str, Any]:
        """Further keyword arguments of the kernels that walk lists."""
        lists = self.lists
        shape = (1, 1, 0, 0) if lists is None else lists.keys.shape
        batch, heads = shape[:2]
        return {
            "keys": None if lists is None else lists.keys,
            "rank": None if lists is None else lists.rank,
            "full": None if lists is None else lists.full,
            "end": None if lists is None else lists.end,
            "list_b": heads if batch > 1 else 0,
            "list_h": int(heads > 1),
            "list_heads": self.nheads // heads,
            "width": shape[-1],
            "rank_width": 0 if lists is None else lists.rank.shape[-1],
            "LISTS": ALL_KEYS if lists is None else lists.kind,
            "LIST_ROWS": BLOCK_ROWS,
        }

    def _operand(self, name: str, t: Tensor | None) -> dict[str, Any]:
        """Keyword arguments for a mask or bias: the tensor and its strides.

        The stride is 0 in dimensions in which it is broadcast, but None for rows.
        """
        if t is None:
            strides, heads, stride_k0 = (0, 0, 0, 0), 1, 0
        elif self.problem.packing is not None and is_per_key(t):
            strides, heads, stride_k0 = (0, t.stride(0), 0, t.stride(1)), t.shape[0], t.stride(1)
        else:
            wide = t if t.dim() == 4 else t[None]
            found = [wide.stride(i) if wide.shape[i] > 1 else 0 for i in range(4)]
            strides, heads, stride_k0 = (found[0], found[1], found[2], found[3]), wide.shape[1], 0
        return {
            name: t,
            f"{name}_b": strides[0],
            f"{name}_h": strides[1] if heads > 1 else 0,
            f"{name}_heads": self.nheads // heads,
            f"{name}_m": None if strides[2] == 0 else strides[2],
            f"{name}_n": strides[3],
            f"{name}_k0": stride_k0,
        }


def _rows(name: str, row: str, t: Tensor) -> dict[str, Any]:
    """Keyword arguments for a tensor (B, rows, heads, D), or packed (rows, heads, D).

    Args:
        name: the name of the tensor among the arguments of the kernels.
        row: the letter for its row stride, "m" for rows or "n" for keys.
        t: the tensor.
    """
    batch = t.stride(0) if t.dim() == 4 else 0
    return {
        name: t,
        f"{name}_b": batch,
        f"{name}_{row}": t.stride(-3),
        f"{name}_h": t.stride(-2),
        f"{name}_d": t.stride(-1),
    }


def rows_of(name: str, row: str, t: Tensor) -> dict[str, Any]:
    """As `_rows`, for a contiguous result, without the last stride, which kernels know to be 1."""
    arguments = _rows(name, row, t)
    del arguments[f"{name}_d"]
    return arguments


def given_rows(name: str, t: Tensor) -> dict[str, Any]:
    """As `_rows`, for a tensor of query rows with any strides."""
    return _rows(name, "m", t)


def arrange(problem: Problem) -> Operands:
    """A checked problem with its lists, which are made on the device without waiting for it."""
    q, k, packing = problem.q, problem.k, problem.packing
    if packing is None:
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[1], k.shape[1])
    else:
        total_q, total_k = q.shape[0], k.shape[0]
        longest = min(packing.max_seqlen_q, total_q), min(packing.max_seqlen_k, total_k)
        sizes = (packing.cu_seqlens_q.shape[0] - 1, *longest, total_q, total_k)
    problem, lists, mask_is_listed = _find_lists(problem)
    return Operands(problem, lists, mask_is_listed, *sizes)


def _find_lists(problem: Problem) -> tuple[Problem, Lists | None, bool]:
    """The problem, its lists or None, and `mask_is_listed`.

    In the problem, key lists that are not causal are replaced by a mask.
    """
    mask = problem.mask
    if problem.key_lists is not None:
        end, idx, count, full = (t.contiguous() for t in problem.key_lists)
        if problem.is_causal:
            return problem, Lists(LIST_PER_BLOCK, idx, count, full, end), False
        mask = (end > 0)[:, :, None]
        problem = problem.without_lists(mask)
    if mask is None:
        return problem, None, False
    if problem.packing is not None:
        if not is_per_key(mask):
            return problem, None, False
        kept = mask[None]
    else:
        if mask.shape[2] > 1 or mask.shape[3] != problem.k.shape[1]:
            return problem, None, False
        kept = mask[:, :, 0]
    nheads_k = problem.k.shape[-2]
    if kept.shape[1] not in (1, nheads_k):  # a list has the keys of all heads that share them
        return problem, _one_list(torch.unflatten(kept, 1, (nheads_k, -1)).any(2)), False
    return problem, _one_list(kept), True


def _one_list(kept: Tensor) -> Lists:
    """One list of the kept keys for each head, in ascending order. kept: bool ({B|1}, heads, T)."""
    batch, heads, total = kept.shape
    rank = torch.zeros((batch, heads, total + 1), dtype=torch.int32, device=kept.device)
    torch.cumsum(kept, 2, dtype=torch.int32, out=rank[..., 1:])
    place = torch.where(kept, rank[..., :-1], total).long()  # others all go to the last place
    keys = torch.zeros_like(rank)
    key = torch.arange(total, dtype=torch.int32, device=kept.device)
    keys.scatter_(2, place, key.expand(place.shape))
    return Lists(ONE_LIST, keys, rank)
