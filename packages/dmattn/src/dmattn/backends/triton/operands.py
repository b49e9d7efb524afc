"""A problem as the kernels take it: tensors, their strides, and how the keys of a row are found.

Letters: as in `dmattn.problem`; T = Sk, or Tk of packed sequences.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmattn.key_lists import BLOCK_ROWS
from dmattn.problem import Problem, has_rows, is_per_key

# How a program finds its keys, as `listed_range` in the kernels.
ALL_KEYS, ONE_LIST, LIST_PER_BLOCK = 0, 1, 2


@dataclass(frozen=True)
class Lists:
    """Lists of keys, int32 and contiguous."""

    kind: int  # ONE_LIST or LIST_PER_BLOCK
    keys: Tensor  # ({B|1}, heads, T + 1), or ({B|1}, heads, blocks, capacity)
    rank: Tensor  # ({B|1}, heads, T + 1), or ({B|1}, heads, blocks)
    full: Tensor | None = None  # as rank: the leading entries that all rows of the block keep
    end: Tensor | None = None  # ({B|1}, heads, Sk): rows at this position and later drop the key


@dataclass(frozen=True)
class Operands:
    """What all kernels of a call have in common."""

    problem: Problem
    lists: Lists | None
    mask_is_listed: bool  # whether the lists say all that the mask says
    batch: int  # or the number of packed sequences
    seqlen_q: int  # of the longest sequence
    seqlen_k: int
    total_q: int  # rows and keys that the tensors hold for a batch entry
    total_k: int

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
        """Whether a mask that is read, or the bias, has rows and keys."""
        mask = None if self.mask_is_listed else self.problem.mask
        return any(t is not None and has_rows(t) for t in (mask, self.problem.bias))

    @property
    def list_heads(self) -> int:
        """Heads that have lists of their own; 0 without lists."""
        return 0 if self.lists is None else self.lists.keys.shape[1]

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the kernels, those for lists left out."""
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
        """Whether the kernels take the softmax in base 2, where the scale and the change of base
        are one factor.

        The largest scaled product is the largest product only if the scale is not negative. A
        large bias needs the logits as they are, and float32 one rounding less.
        """
        problem = self.problem
        plain = problem.bias is None and problem.softcap == 0 and problem.softmax_scale >= 0
        return plain and problem.q.dtype != torch.float32

    def mask_arguments(self) -> dict[str, Any]:
        """The mask for kernels that do not walk lists."""
        return self._operand("mask", self.problem.mask)

    def list_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the kernels that walk lists."""
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
        """A mask or bias with a stride of 0 wherever it is broadcast, and of None along rows."""
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
    """A tensor (B, rows, heads, D), or packed (rows, heads, D)."""
    batch = t.stride(0) if t.dim() == 4 else 0
    return {
        name: t,
        f"{name}_b": batch,
        f"{name}_{row}": t.stride(-3),
        f"{name}_h": t.stride(-2),
        f"{name}_d": t.stride(-1),
    }


def rows_of(name: str, row: str, t: Tensor) -> dict[str, Any]:
    """As above for a contiguous result, whose last stride the kernels know."""
    arguments = _rows(name, row, t)
    del arguments[f"{name}_d"]
    return arguments


def given_rows(name: str, t: Tensor) -> dict[str, Any]:
    """As above for a tensor of rows with any strides."""
    return _rows(name, "m", t)


def arrange(problem: Problem) -> Operands:
    """A checked problem with its lists, made on its device and without waiting for it."""
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
    """The problem, perhaps with a mask in place of key lists; its lists; `mask_is_listed`."""
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
    """The kept keys of each head, ascending. kept: bool ({B|1}, heads, T)."""
    batch, heads, total = kept.shape
    rank = torch.zeros((batch, heads, total + 1), dtype=torch.int32, device=kept.device)
    torch.cumsum(kept, 2, dtype=torch.int32, out=rank[..., 1:])
    place = torch.where(kept, rank[..., :-1], total).long()  # the last place takes the others
    keys = torch.zeros_like(rank)
    key = torch.arange(total, dtype=torch.int32, device=kept.device)
    keys.scatter_(2, place, key.expand(place.shape))
    return Lists(ONE_LIST, keys, rank)
