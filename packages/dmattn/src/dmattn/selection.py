"""Which keys each query row keeps, as an object to look at, to reuse and to build by other rules.

A selection says of every key from which row on it is out of sight: row i stands at position
r = i + Sk - Sq and keeps the keys j <= r < end[j]. Beside `end` it holds, for each block of 128
rows, the list of the keys that any of its rows keeps: what attention loads. Letters: B batch, H
query heads, HK key/value heads, Sq/Sk query/key length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dmattn.ops.key_lists import build_key_lists
from dmattn.key_lists import BLOCK_ROWS, Selection, capacity_for
from dmattn.ops.selection import select_keys as select
from dmattn.utils.mask import check_window_size


@dataclass(frozen=True, eq=False)
class KeySelection:
    """The keys that each query row keeps, for `flash_dmattn_func(..., selection=...)`.

    Made by `select_keys`, `from_intervals`, `sliding_window` or `packed_documents`. It serves any
    number of calls with the same lengths and causality, forward and backward.

    Attributes:
        end: int32 ({B|1}, {H|HK|1}, Sk). Causal: the row at position r keeps key j when
            j <= r < end[j]. Not causal: Sk for the kept keys, 0 for the others.
        idx: int32 ({B|1}, {H|HK|1}, blocks, capacity): keys kept by any row of a block of 128 rows
            (one block when not causal), those that all its rows keep first.
        count: int32 ({B|1}, {H|HK|1}, blocks): entries of each list.
        full: int32, as count: leading entries that all rows keep; (0,) when not causal.
        window_size: keys kept by each row, or None where the intervals were given.
        is_causal: whether row i stands at position i + Sk - Sq, or all rows keep the same keys.
        query_len: Sq.
    """

    end: Tensor
    idx: Tensor
    count: Tensor
    full: Tensor
    window_size: int | None
    is_causal: bool
    query_len: int

    @property
    def lists(self) -> Selection:
        """The tensors as the operators take them."""
        return Selection(self.end, self.idx, self.count, self.full)

    @staticmethod
    def from_intervals(
        end: Tensor, query_len: int | None = None, *, reach: int | None = None
    ) -> "KeySelection":
        """The causal selection in which key j is seen by the rows at positions j <= r < end[j].

        Args:
            end: int32 or int64 ({B|1}, {H|HK|1}, Sk).
            query_len: Sq; Sk when None. Row i stands at position i + Sk - Sq.
            reach: the largest end[j] - j, if known: the lists then take time and memory for that
                many keys each. None: lists as long as the longest needs to be, for which the host
                waits.

        Raises:
            TypeError: end is no int32 or int64 tensor, or reach no int.
            ValueError: end has not three dimensions, query_len is negative, or reach is below 1.
        """
        if _dtype_of(end) not in (torch.int32, torch.int64):
            raise TypeError(f"end: got {_dtype_of(end)}, wanted an int32 or int64 tensor")
        if end.dim() != 3:
            raise ValueError(f"end: got shape {tuple(end.shape)}, wanted (batch|1, heads|1, Sk)")
        capacity = None
        if reach is not None:
            _check_int("reach", reach, 1)
            capacity = capacity_for(reach + BLOCK_ROWS - 1, end.shape[2])
        return _of_intervals(end, query_len, capacity, reach, None)

    def to_mask(self) -> Tensor:
        """bool ({B|1}, {H|HK|1}, Sq, Sk), True where a key is kept; for looking at it."""
        key_len = self.end.shape[2]
        end = self.end[:, :, None]
        if not self.is_causal:
            return (end > 0).expand(-1, -1, self.query_len, -1)
        position = torch.arange(key_len, device=end.device)
        row = torch.arange(self.query_len, device=end.device)[:, None] + (key_len - self.query_len)
        return (position <= row) & (row < end)

    def plot(
        self, path: str | Path | None = None, ax: Any = None, head: int = 0, batch: int = 0
    ) -> Any:
        """Draw, for every key, the query positions at which it is kept. Needs matplotlib.

        Args:
            path: where to save the picture, by the suffix of its name; None to save nothing.
            ax: the matplotlib axes to draw on; a new figure when None.
            head, batch: which of the selection's heads and batch entries.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
            IndexError: there is no such head or batch entry.
        """
        import matplotlib.pyplot as plt  # for pictures only
        from matplotlib.collections import LineCollection

        end = self.end[batch, head].cpu()
        key = torch.arange(len(end))
        first_row = len(end) - self.query_len
        start = key.clamp(min=first_row) if self.is_causal else key * 0
        stop = end if self.is_causal else (end > 0) * self.query_len
        lines = [
            [(j, a), (j, b)]
            for j, a, b in zip(key.tolist(), start.tolist(), stop.tolist(), strict=True)
            if b > a
        ]
        if ax is None:
            _, ax = plt.subplots(figsize=(6, 6))
        ax.add_collection(LineCollection(lines, linewidths=max(0.3, 300 / max(1, len(end)))))
        low = first_row if self.is_causal else 0
        ax.set(xlim=(-0.5, len(end) - 0.5), ylim=(low + self.query_len, low))
        ax.set(xlabel="key", ylabel="query position", title=f"{len(lines)} keys seen")
        if path is not None:
            ax.figure.savefig(path, dpi=150, bbox_inches="tight")
        return ax


def _flatten(selection: KeySelection) -> tuple[list[Tensor], tuple[Any, ...]]:
    facts = (selection.window_size, selection.is_causal, selection.query_len)
    return list(selection.lists), facts


def _unflatten(tensors: Any, facts: tuple[Any, ...]) -> KeySelection:
    end, idx, count, full = tensors
    return KeySelection(end, idx, count, full, *facts)


pytree.register_pytree_node(
    KeySelection, _flatten, _unflatten, serialized_type_name="dmattn.KeySelection"
)


def select_keys(
    attn_bias: Tensor,
    window_size: int,
    is_causal: bool = True,
    attn_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    query_len: int | None = None,
) -> KeySelection:
    """Choose the keys with the highest bias, without forming anything of size Sq x Sk.

    Causal: the row at position r keeps the `window_size` highest-scored keys among 0..r. A key that
    has left never returns. Not causal: all rows keep the best of all keys. Of equal scores the
    later key is kept; NaN, -inf and masked keys never are. On CUDA the host does not wait.

    Args:
        attn_bias: floating ({B|1}, {H|HK|1}, 1, Sk) or ({B|1}, {H|HK|1}, Sk). No gradient flows
            through the choice.
        window_size: at least 1.
        is_causal: choose row by row among the past, rather than once among all keys.
        attn_mask: bool, True where a key may be chosen: (B, Sk), or ({B|1}, {H|HK|1}, 1, Sk), or a
            view of that expanded over the rows.
        cu_seqlens: for documents packed one behind the other, alike in every row of the batch:
            their boundaries, (documents + 1,), rising from 0 to Sk. Keys are chosen within each
            document, and no row sees another document's. Causal only, and for query_len = Sk.
            A tensor, int32 or int64, on the CUDA device of attn_bias is taken as it is, since the
            host would have to wait for its values: wrong ones give a wrong selection. Anything
            else, a sequence of ints or a tensor elsewhere, the host reads and checks.
        query_len: Sq; Sk when None. Causal rows are aligned to the end of the keys: the ones in
            front of the first key, if Sq > Sk, keep nothing.

    Raises:
        TypeError: a tensor or number has the wrong type or dtype.
        ValueError: a shape or number does not fit, or attn_mask differs between query rows.
    """
    check_window_size(window_size)
    scores = _key_scores(attn_bias)
    key_len = scores.shape[2]
    query_len = _check_query_len(query_len, key_len)
    key_mask = None if attn_mask is None else key_only_mask(attn_mask, key_len)
    scores, key_mask = same_heads(scores, key_mask)
    documents = None
    if cu_seqlens is not None:
        if not is_causal:
            raise ValueError("cu_seqlens: got boundaries with is_causal=False, wanted True")
        if query_len != key_len:
            raise ValueError(f"query_len: got {query_len}, wanted {key_len} with cu_seqlens")
        documents = _document_bounds(cu_seqlens, key_len, scores.device)
    rows = min(query_len, key_len) if is_causal else query_len
    lists = select(scores, key_mask, window_size, rows, is_causal, documents)
    return KeySelection(*lists, window_size, is_causal, query_len)


def sliding_window(
    key_len: int,
    window_size: int,
    query_len: int | None = None,
    *,
    device: torch.device | str | None = None,
) -> KeySelection:
    """The selection in which each row keeps the `window_size` keys up to its own position.

    Args:
        key_len: Sk.
        window_size: at least 1.
        query_len: Sq; Sk when None.
        device: of its tensors, which are alike for all batches and heads.

    Raises:
        TypeError, ValueError: a number is no int or too small.
    """
    check_window_size(window_size)
    _check_int("key_len", key_len, 0)
    end = torch.arange(key_len, dtype=torch.int32, device=device) + min(window_size, key_len)
    end = end.clamp(max=key_len)[None, None]
    capacity = capacity_for(window_size + BLOCK_ROWS - 1, key_len)
    return _of_intervals(end, query_len, capacity, window_size, window_size)


def packed_documents(
    cu_seqlens: Tensor | Sequence[int],
    window_size: int | None = None,
    *,
    device: torch.device | str | None = None,
) -> KeySelection:
    """Causal attention within documents that are packed one behind the other.

    Args:
        cu_seqlens: int (documents + 1,): their boundaries, from 0 to Sk. The host reads it.
        window_size: keep only the last keys of the document, this many; None for all of it.
        device: of the selection's tensors; that of cu_seqlens, if it is a tensor, when None.

    Raises:
        TypeError, ValueError: cu_seqlens or window_size is none of that.
    """
    if device is None and isinstance(cu_seqlens, Tensor):
        device = cu_seqlens.device
    bounds = _boundaries(cu_seqlens, None)
    lengths = [b - a for a, b in pairwise(bounds)]
    reach, key_len = max(lengths, default=0), bounds[-1]
    stops, counts = (torch.tensor(x, dtype=torch.int64) for x in (bounds[1:], lengths))
    end = torch.repeat_interleave(stops, counts)
    if window_size is not None:
        check_window_size(window_size)
        end = torch.minimum(end, torch.arange(key_len) + min(window_size, key_len))
        reach = min(reach, window_size)
    end = end.to(device=device, dtype=torch.int32)[None, None]
    # A document that began before the block reaches into it with `reach` keys at most, and the
    # block's own rows are as many keys again.
    capacity = capacity_for(reach + BLOCK_ROWS - 1, key_len)
    return _of_intervals(end, None, capacity, max(1, reach), window_size)


def key_only_mask(attn_mask: Tensor, key_len: int) -> Tensor:
    """attn_mask as ({B|1}, heads, Sk).

    Raises:
        TypeError: it is no bool tensor.
        ValueError: it does not speak of key_len keys, or differs between query rows.
    """
    if _dtype_of(attn_mask) != torch.bool:
        kind = _dtype_of(attn_mask)
        raise TypeError(f"attn_mask: got {kind}, wanted a torch.bool tensor (True = attend)")
    shape = tuple(attn_mask.shape)
    mask = attn_mask[:, None, None] if attn_mask.dim() == 2 else attn_mask
    if mask.dim() != 4 or mask.shape[3] not in (1, key_len):
        raise ValueError(
            f"attn_mask: got shape {shape}, wanted (batch, {key_len}) or "
            f"(batch|1, heads|1, 1, {key_len})"
        )
    if mask.shape[2] != 1 and mask.stride(2) != 0:
        raise ValueError(
            f"attn_mask: got shape {shape} with rows of their own, wanted one that is alike for "
            "all query rows; which keys the rows keep is then no interval of rows for each key. "
            "Build the whole mask with dmattn.create_mask and pass that, without window_size"
        )
    return mask[:, :, 0].expand(-1, -1, key_len)


def _key_scores(attn_bias: Tensor) -> Tensor:
    """attn_bias as ({B|1}, heads, Sk), without gradient."""
    kind = _dtype_of(attn_bias)
    if not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise TypeError(f"attn_bias: got {kind}, wanted a floating tensor, a score per key")
    shape = tuple(attn_bias.shape)
    if len(shape) == 4 and shape[2] == 1:
        return attn_bias.detach().squeeze(2)
    if len(shape) != 3:
        raise ValueError(
            f"attn_bias: got shape {shape}, wanted (batch|1, heads|1, 1, seqlen_k) or "
            "(batch|1, heads|1, seqlen_k)"
        )
    return attn_bias.detach()


def same_heads(scores: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both with the same number of heads (or 1), where one has HK and the other H of them."""
    if key_mask is None:
        return scores, None
    batches = (scores.shape[0], key_mask.shape[0])
    if 1 not in batches and batches[0] != batches[1]:
        raise ValueError(f"attn_mask: got batch {batches[1]}, wanted {batches[0]} or 1")
    a, b = scores.shape[1], key_mask.shape[1]
    if 1 in (a, b) or a == b:
        return scores, key_mask
    if a % b and b % a:
        raise ValueError(f"attn_mask: got {b} heads, wanted them to go with {a} of attn_bias")
    heads = max(a, b)
    return scores.repeat_interleave(heads // a, 1), key_mask.repeat_interleave(heads // b, 1)


def _document_bounds(
    cu_seqlens: Tensor | Sequence[int], key_len: int, device: torch.device
) -> Tensor:
    """int32 (documents + 1,) on `device`, checked unless the host would have to wait for it."""
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.is_cuda and cu_seqlens.device == device:
        _check_boundary_tensor(cu_seqlens)
        return cu_seqlens.to(torch.int32)
    bounds = torch.tensor(_boundaries(cu_seqlens, key_len), dtype=torch.int32)
    return bounds.to(device, non_blocking=True)


def _of_intervals(
    end: Tensor,
    query_len: int | None,
    capacity: int | None,
    reach: int | None,
    window_size: int | None,
) -> KeySelection:
    key_len = end.shape[2]
    query_len = _check_query_len(query_len, key_len)
    end = end.to(torch.int32).contiguous()
    rows = min(query_len, key_len)
    if capacity is None:
        needed = build_key_lists(end, rows, 0, reach).needed
        capacity = capacity_for(int(needed.max()) if needed.numel() > 0 else 0, key_len)
    lists = build_key_lists(end, rows, capacity, reach)
    return KeySelection(end, lists.idx, lists.counts, lists.full, window_size, True, query_len)


def _boundaries(cu_seqlens: Tensor | Sequence[int], key_len: int | None) -> list[int]:
    """cu_seqlens on the host, checked."""
    if isinstance(cu_seqlens, Tensor):
        _check_boundary_tensor(cu_seqlens)
        bounds = cu_seqlens.tolist()
    else:
        bounds = list(cu_seqlens)
        if any(not isinstance(x, int) for x in bounds):
            raise TypeError(f"cu_seqlens: got {bounds[:3]}.., wanted ints")
        if not bounds:
            raise ValueError("cu_seqlens: got no boundary, wanted (documents + 1,)")
    rising = all(a <= b for a, b in pairwise(bounds))
    if bounds[0] != 0 or not rising or key_len not in (None, bounds[-1]):
        last = "the number of keys" if key_len is None else key_len
        raise ValueError(
            f"cu_seqlens: got {bounds[:3]}..{bounds[-1]}, wanted rising from 0 to {last}"
        )
    return bounds


def _check_boundary_tensor(cu_seqlens: Tensor) -> None:
    """Raise unless its dtype and shape are right; its values are not looked at."""
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: got {cu_seqlens.dtype}, wanted torch.int32 or torch.int64")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        shape = tuple(cu_seqlens.shape)
        raise ValueError(f"cu_seqlens: got shape {shape}, wanted (documents + 1,)")


def _check_query_len(query_len: int | None, key_len: int) -> int:
    if query_len is None:
        return key_len
    _check_int("query_len", query_len, 0)
    return query_len


def _check_int(name: str, value: Any, least: int) -> None:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, wanted an int")
    if value < least:
        raise ValueError(f"{name}: got {value}, wanted at least {least}")


def _dtype_of(value: Any) -> Any:
    """The dtype of a tensor; the name of the type of anything else."""
    return value.dtype if isinstance(value, Tensor) else type(value).__name__
