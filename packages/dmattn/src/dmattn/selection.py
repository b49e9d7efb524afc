"""Which keys each query row keeps, as an object to inspect, to reuse and to build by other rules.

A selection says for every key from which row on it is no longer kept: row i stands at position
r = i + Sk - Sq and keeps the keys j with j <= r < end[j]. In addition to `end` it holds, for each
block of 128 rows, the list of the keys that any of its rows keeps, which attention loads. Letters:
B batch, H query heads, HK key/value heads, Sq/Sk query/key length; {B|1} is a dimension of size B
or 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils import _pytree as pytree

from dmattn.dispatch import is_plain_call
from dmattn.key_lists import (
    BLOCK_ROWS,
    Selection,
    capacity_for,
    check_boundaries,
    larger,
    smaller,
)
from dmattn.ops.selection import build_key_lists, document_ends
from dmattn.ops.selection import select_keys as select
from dmattn.validation import (
    check_bool,
    check_can_move,
    check_device,
    check_floating,
    check_int,
    check_mask,
    check_optional_tensor,
    check_same_device,
    check_tensor,
    check_tensor_dtype,
    describe,
    has_values,
    is_integer,
    is_one_or,
    read_integers,
    refuse_jit_trace,
)

_INTEGERS = (torch.int32, torch.int64)
SCORE_PER_KEY = "a floating tensor of 16 to 64 bits, a score per key"


@dataclass(frozen=True, eq=False, repr=False)
class KeySelection:
    """The keys that each query row keeps, for `flash_dmattn_func(..., selection=...)`.

    Made by `select_keys`, `from_intervals`, `sliding_window` or `packed_documents`. It serves any
    number of calls with the same lengths and causality, forward and backward. It can be pickled,
    read by `torch.load` with weights_only=True, and passed in and out of functions that torch
    compiles or exports.

    Attributes:
        end: int32 ({B|1}, {H|HK|1}, Sk). Causal: the row at position r keeps key j when
            j <= r < end[j]. Not causal: Sk for the kept keys, 0 for the others.
        idx: int32 ({B|1}, {H|HK|1}, blocks, capacity): the list of each block of 128 rows (one
            block in all when not causal): the keys that any row of the block keeps. First those
            that all rows of the block keep, then the others, both in ascending order.
        count: int32 ({B|1}, {H|HK|1}, blocks): the number of keys in each list. Under torch.compile
            and in vmap there may be further lists behind those of the blocks, which are empty.
        full: int32, shape of count: how many leading keys of each list all rows of the block keep;
            of shape (0,) when not causal.
        window_size: the largest number of keys that a row keeps, if a window was given, else None.
        is_causal: True: row i stands at position i + Sk - Sq. False: all rows keep the same keys,
            and the selection serves any number of rows.
        first_row: Sk - Sq, the position of the first row; negative when Sq > Sk.
        query_len: Sq.
        is_sliding: True if rows are known to keep the `window_size` keys up to their own position
            and no others, as from `sliding_window` without a mask. A backend then need not read the
            tensors. False: not known.
        keeps_own: True if every row is known to keep the key at its own position, if there is one.
            False: not known.
    """

    end: Tensor
    idx: Tensor
    count: Tensor
    full: Tensor
    window_size: int | None
    is_causal: bool
    # Stored instead of Sq: with as many rows as keys it is 0 whatever the length, so that a program
    # exported with one selection takes selections of other lengths.
    first_row: int
    is_sliding: bool = False
    keeps_own: bool = False

    @property
    def query_len(self) -> int:
        """Sq, the number of query rows that the selection is for."""
        return self.end.shape[2] - self.first_row

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
            end: int32 or int64 ({B|1}, {H|HK|1}, Sk). Values are clamped to 0 .. Sk, so that any
                large number stands for a key that never leaves.
            query_len: Sq; Sk when None. Row i stands at position i + Sk - Sq.
            reach: an upper bound of end[j] - j, if known. The lists then have room for reach + 127
                keys each, and the host does not wait. Longer intervals are cut: a key is seen by at
                most `reach` rows. None: the lists are as long as the longest of them needs to be;
                the host waits for that length, which torch.compile cannot know.

        Returns:
            The selection, with the batch entries and heads of `end`, on its device.

        Raises:
            TypeError: end is no int32 or int64 tensor, or query_len or reach no int.
            ValueError: end does not have three dimensions, query_len is negative, or reach is
                below 1.
            RuntimeError: torch.jit.trace records the call.
        """
        refuse_jit_trace("a selection of keys")
        check_tensor_dtype("end", check_tensor("end", end), _INTEGERS)
        if end.dim() != 3:
            raise ValueError(f"end: got shape {tuple(end.shape)}, wanted (batch|1, heads|1, Sk)")
        if reach is not None:
            reach = check_int("reach", reach, 1)
        return _of_intervals(end, query_len, reach, None)

    def to(self, device: torch.device | str | int) -> "KeySelection":
        """The same selection with its tensors on another device; this object if they are there."""
        lists = Selection(*[t.to(device) for t in self.lists])
        if all(a is b for a, b in zip(lists, self.lists, strict=True)):
            return self
        return KeySelection(*lists, *_facts(self))

    def cpu(self) -> "KeySelection":
        """The same selection with its tensors on the CPU."""
        return self.to("cpu")

    def cuda(self, device: torch.device | str | int = "cuda") -> "KeySelection":
        """The same selection with its tensors on a GPU, the current one by default."""
        return self.to(device)

    def __repr__(self) -> str:
        # A tree_map may have put other values here, and torch.vmap adds a dimension.
        if not all(isinstance(t, Tensor) for t in self.lists) or self.end.dim() != 3:
            return f"KeySelection({', '.join(map(describe, self.lists))})"
        batch, heads, key_len = self.end.shape
        return (
            f"KeySelection(batch={batch}, heads={heads}, query_len={self.query_len}, "
            f"key_len={key_len}, window_size={self.window_size}, is_causal={self.is_causal}, "
            f"{self.idx.shape[2]} lists of at most {self.idx.shape[3]} keys, "
            f"device={str(self.end.device)!r})"
        )

    def to_mask(self) -> Tensor:
        """The selection as a mask, bool ({B|1}, {H|HK|1}, Sq, Sk), True where a key is kept.

        Takes memory for Sq * Sk entries per batch entry and head of the selection.
        """
        end = self.end[:, :, None]
        if not self.is_causal:
            return (end > 0).expand(-1, -1, self.query_len, -1)
        position = torch.arange(self.end.shape[2], device=end.device)
        row = torch.arange(self.query_len, device=end.device)[:, None] + self.first_row
        return (position <= row) & (row < end)

    def plot(
        self, path: str | Path | None = None, ax: Any = None, head: int = 0, batch: int = 0
    ) -> Any:
        """Draw which keys each query keeps, by `dmattn.plot.mask`. Needs matplotlib.

        Args:
            path: file to save the picture to, in the format of its suffix; None to save nothing.
            ax: the matplotlib axes to draw on; a new figure when None.
            head, batch: which of the selection's heads and batch entries.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
            IndexError: there is no such head or batch entry.
        """
        from dmattn.plot import mask  # here, since dmattn.plot imports this module

        return mask(self, head=head, batch=batch, path=path, ax=ax)


_FACTS = ("window_size", "is_causal", "first_row", "is_sliding", "keeps_own")


def _facts(selection: KeySelection) -> tuple[Any, ...]:
    """The fields that are no tensors, in their order."""
    return tuple(getattr(selection, name) for name in _FACTS)


def _flatten(selection: KeySelection) -> tuple[list[Tensor], tuple[Any, ...]]:
    return list(selection.lists), _facts(selection)


def _flatten_with_keys(
    selection: KeySelection,
) -> tuple[list[tuple[pytree.KeyEntry, Any]], tuple[Any, ...]]:
    tensors, facts = _flatten(selection)
    keys = [pytree.GetAttrKey(name) for name in Selection._fields]
    return list(zip(keys, tensors, strict=True)), facts


def _unflatten(tensors: Any, facts: tuple[Any, ...]) -> KeySelection:
    end, idx, count, full = tensors
    return KeySelection(end, idx, count, full, *facts)


def _flatten_as(selection: KeySelection, spec: pytree.TreeSpec) -> list[Any]:
    """The tensors of an input of an exported program.

    The other fields have to be those of the exported selection, which the oldest torch that we
    support does not compare by itself.
    """
    tensors, facts = _flatten(selection)
    if facts != tuple(spec.context):
        raise ValueError(
            f"selection: got ({', '.join(_FACTS)}) {facts}, wanted {tuple(spec.context)} as when "
            "the program was exported"
        )
    return list(tensors)


pytree.register_pytree_node(
    KeySelection,
    _flatten,
    _unflatten,
    serialized_type_name="dmattn.KeySelection",
    # A program that torch.export saves has them in JSON, which has no tuples.
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)
register_pytree_flatten_spec(KeySelection, _flatten_as)
torch.serialization.add_safe_globals([KeySelection])


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
    has left never returns. Not causal: all rows keep the `window_size` best of all keys. Of equal
    scores the later key is kept; masked keys, and those with a score of NaN or -inf, never are. On
    a GPU that the compiled kernels serve the host does not wait. On other GPUs it makes the causal
    choice itself, which is a slow path.

    Args:
        attn_bias: floating ({B|1}, {H|HK|1}, 1, Sk) or ({B|1}, {H|HK|1}, Sk), on CUDA not float64:
            the scores. No gradient flows through the choice.
        window_size: at least 1.
        is_causal: True: each row chooses among the keys up to its own position. False: one choice
            among all keys, for all rows.
        attn_mask: True where a key may be chosen: bool or integer (B, Sk), or bool
            ({B|1}, {H|HK|1}, 1, Sk), or a view of that expanded over the rows.
        cu_seqlens: boundaries of packed documents, the same for every batch entry:
            (documents + 1,), rising from 0 to Sk; a sequence of ints, or an int32 or int64 tensor.
            Keys are chosen within each document, and no row sees keys of another document. Needs
            is_causal, and query_len = Sk. The values are checked, except those of a tensor on the
            CUDA device of attn_bias, for which the host would have to wait, and under
            torch.compile: there wrong boundaries may give a wrong selection (or a ValueError, on a
            GPU that the compiled kernels do not serve).
        query_len: Sq; Sk when None. With is_causal the last row is at the last key. If Sq > Sk, the
            rows in front of the first key keep nothing.

    Returns:
        The selection, on the device of attn_bias.

    Raises:
        TypeError: a tensor or number has the wrong type or dtype.
        ValueError: a shape, device or number does not fit, or attn_mask differs between query rows.
        RuntimeError: torch.jit.trace records the call.
    """
    refuse_jit_trace("a selection of keys")
    window_size = check_int("window_size", window_size, 1)
    is_causal = check_bool("is_causal", is_causal)
    scores = _key_scores(attn_bias)
    key_len = scores.shape[2]
    query_len = _check_query_len(query_len, key_len)
    key_mask = None
    if attn_mask is not None:
        key_mask = key_only_mask(attn_mask, key_len)
        check_same_device("attn_mask", key_mask, scores.device, "attn_bias")
    scores, key_mask = same_heads(scores, key_mask)
    documents = None
    if cu_seqlens is not None:
        if not is_causal:
            raise ValueError("cu_seqlens: got boundaries with is_causal=False, wanted True")
        if query_len != key_len:
            raise ValueError(f"query_len: got {query_len}, wanted {key_len} with cu_seqlens")
        documents = _document_bounds(cu_seqlens, key_len, scores.device)
    rows = smaller(query_len, key_len) if is_causal else query_len
    lists = select(scores, key_mask, window_size, rows, is_causal, documents)
    return KeySelection(*lists, window_size, is_causal, key_len - query_len)


def sliding_window(
    key_len: int,
    window_size: int,
    query_len: int | None = None,
    *,
    attn_mask: Tensor | None = None,
    device: torch.device | str | None = None,
) -> KeySelection:
    """The selection in which each row keeps the `window_size` keys up to its own position.

    Args:
        key_len: Sk.
        window_size: at least 1.
        query_len: Sq; Sk when None.
        attn_mask: True where a key may be seen: bool or integer (B, Sk), or bool
            ({B|1}, {H|HK|1}, 1, Sk). A masked key still counts as one of the `window_size` keys.
        device: of the selection's tensors; that of attn_mask, or the default device, when None.

    Returns:
        The selection, causal; its batch and its number of heads are 1 without attn_mask.

    Raises:
        TypeError: a number is no int, attn_mask is no mask, or device is no device.
        ValueError: a number is too small, or attn_mask has the wrong shape or device.
        RuntimeError: torch.jit.trace records the call.
    """
    refuse_jit_trace("a sliding window")
    window_size = check_int("window_size", window_size, 1)
    key_len = check_int("key_len", key_len, 0)
    if device is not None:
        device = check_device(device)
    elif attn_mask is not None:
        device = check_tensor("attn_mask", attn_mask).device
    reach = larger(1, smaller(window_size, key_len))
    end = torch.arange(reach, key_len + reach, dtype=torch.int32, device=device)
    end = _hide_masked(end.clamp_(max=key_len)[None, None], attn_mask)
    found = _within_reach(end.contiguous(), query_len, reach, window_size)
    return found if attn_mask is not None else _keeping_own(found, is_sliding=True)


def packed_documents(
    cu_seqlens: Tensor | Sequence[int] | None = None,
    window_size: int | None = None,
    *,
    document_ids: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_len: int | None = None,
    max_seqlen: int | None = None,
    device: torch.device | str | None = None,
) -> KeySelection:
    """The selection for causal attention within documents that are packed one after the other.

    The documents are given either by `cu_seqlens`, the same for all batch entries, or by
    `document_ids`, which may differ between batch entries.

    Each block of 128 rows has room for a list of about as many keys as the longest document has (or
    the window, if that is smaller). One document of Sk keys therefore takes Sk * Sk / 128 int32
    entries: 134 MB for 65536 keys. For long documents without a window `flash_dmattn_varlen_func`
    is the better choice, as it needs no lists.

    Args:
        cu_seqlens: the boundaries of the documents, (documents + 1,), rising from 0 to Sk: a
            sequence of ints, or an int32 or int64 tensor. In general the host reads and checks
            them. It does not read a CUDA tensor if the selection stays on the device of the tensor,
            `key_len` is given, and `max_seqlen` or `window_size` is given as well. Then the host
            does not wait, and wrong values give wrong documents. Under torch.compile tensors are
            never read by the host, and `key_len` has to be given.
        window_size: each row keeps at most this many keys, the last of its document up to its own
            position; None for all keys of the document up to there.
        document_ids: integer (B, Sk): a new document starts where the number differs from the one
            before it. Never read by the host.
        attn_mask: True where a key may be seen: bool or integer (B, Sk), or bool
            ({B|1}, {H|HK|1}, 1, Sk).
        key_len: Sk. When None, the last value of cu_seqlens, or the size of document_ids.
        max_seqlen: the length of the longest document, at least 0. A row sees at most this many
            keys, even if its document is longer. When None, it is taken from cu_seqlens if the host
            reads them, and is Sk otherwise.
        device: of the selection's tensors. When None, that of cu_seqlens, if it is a tensor, of
            document_ids, or of attn_mask, or else the default device.

    Returns:
        The selection, causal, with as many rows as keys.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: both or none of cu_seqlens and document_ids are given; a shape, number, value or
            device does not fit.
        RuntimeError: torch.jit.trace records the call.
    """
    refuse_jit_trace("a selection of keys")
    if window_size is not None:
        window_size = check_int("window_size", window_size, 1)
    if key_len is not None:
        key_len = check_int("key_len", key_len, 0)
    if max_seqlen is not None:
        max_seqlen = check_int("max_seqlen", max_seqlen, 0)
    check_optional_tensor("attn_mask", attn_mask)
    if device is not None:
        device = check_device(device)
    if (cu_seqlens is None) == (document_ids is None):
        got = "None" if document_ids is None else "boundaries beside document_ids"
        raise ValueError(f"cu_seqlens: got {got}, wanted either cu_seqlens or document_ids")
    if document_ids is not None:
        end = _ends_by_ids(document_ids, key_len)
        end = end if device is None else end.to(device)
    else:
        assert cu_seqlens is not None
        if device is None and not isinstance(cu_seqlens, Tensor) and attn_mask is not None:
            device = attn_mask.device
        bounded = max_seqlen is not None or window_size is not None
        bounds, key_len, longest = _documents(cu_seqlens, key_len, bounded, device)
        if max_seqlen is not None and longest is not None and longest > max_seqlen:
            raise ValueError(
                f"max_seqlen: got {max_seqlen}, wanted at least {longest}, the longest document"
            )
        max_seqlen = longest if max_seqlen is None else max_seqlen
        end = document_ends(bounds, key_len)[None, None]
    reach = end.shape[2] if max_seqlen is None else max_seqlen
    if window_size is not None:
        reach = smaller(reach, window_size)
    found = _of_intervals(_hide_masked(end, attn_mask), None, reach, window_size)
    # Each key is seen by the row at its own position, if its document ends behind it. Boundaries
    # that the host has not checked may not have that property.
    is_checked = document_ids is not None or longest is not None
    return found if attn_mask is not None or not is_checked else _keeping_own(found)


def key_only_mask(attn_mask: Tensor, key_len: int) -> Tensor:
    """An attn_mask that is the same for all query rows, as bool ({B|1}, heads, Sk).

    Args:
        attn_mask: bool or integer (B, Sk), or bool ({B|1}, heads, rows, {Sk|1}).
        key_len: Sk.

    Raises:
        TypeError: it is no bool tensor, and no integer (B, Sk).
        ValueError: it is not for key_len keys, or differs between query rows.
    """
    given = check_mask("attn_mask", attn_mask)
    shape = tuple(given.shape)
    mask = given[:, None, None] if given.dim() == 2 else given
    if mask.dim() != 4 or not is_one_or(mask.shape[3], key_len):
        raise ValueError(
            f"attn_mask: got shape {shape}, wanted (batch, {key_len}) or "
            f"(batch|1, heads|1, 1, {key_len})"
        )
    if mask.shape[2] == 0 and key_len == 0:  # an empty stretch, without rows and keys
        return mask.new_empty((*mask.shape[:2], 0))
    if mask.shape[2] == 0:
        raise ValueError(
            f"attn_mask: got shape {shape}, whose 0 rows have no entry for any key, wanted "
            f"(batch|1, heads|1, 1, {key_len}), as later rows need it"
        )
    if may_differ_by_row(mask):
        raise ValueError(
            f"attn_mask: got shape {shape} with rows of their own, wanted one that is alike for "
            "all query rows; which keys the rows keep is then no interval of rows for each key. "
            "Pass it to flash_dmattn_func beside a selection or window_size, for the whole "
            "sequence in one call without state, return_state and cu_seqlens, or choose the keys "
            "of each row with dmattn.top_window_mask"
        )
    # Older torch can do neither mask[:, :, 0] nor mask[:, :, :1] with a sharded DTensor.
    return mask.narrow(2, 0, 1).squeeze(2).expand(-1, -1, key_len)


def may_differ_by_row(mask: Tensor) -> bool:
    """Whether a 4-D mask may differ between query rows.

    False for a single row and for a view expanded over the rows (stride 0). A mask expanded to 0
    rows has no entry for any key, and counts as one that may differ.
    """
    return mask.shape[2] != 1 and (mask.stride(2) != 0 or mask.shape[2] == 0)


def same_heads(scores: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scores and mask with the same number of heads, or 1 head, if one has HK and the other H.

    Raises:
        ValueError: their batches or their numbers of heads do not fit together.
    """
    if key_mask is None:
        return scores, None
    n, m = scores.shape[0], key_mask.shape[0]
    if not (is_one_or(m, n) or n == 1):
        raise ValueError(f"attn_mask: got batch {m}, wanted {n} or 1")
    a, b = scores.shape[1], key_mask.shape[1]
    if is_one_or(a, b) or b == 1:
        return scores, key_mask
    if a % b != 0 and b % a != 0:
        raise ValueError(f"attn_mask: got {b} heads, wanted them to go with {a} of attn_bias")
    heads = max(a, b)
    return scores.repeat_interleave(heads // a, 1), key_mask.repeat_interleave(heads // b, 1)


def _key_scores(attn_bias: Tensor) -> Tensor:
    """attn_bias as ({B|1}, heads, Sk), detached from the graph."""
    attn_bias = check_floating("attn_bias", attn_bias, SCORE_PER_KEY)
    shape = tuple(attn_bias.shape)
    if len(shape) == 4 and shape[2] == 1:
        return attn_bias.detach().squeeze(2)
    if len(shape) != 3:
        raise ValueError(
            f"attn_bias: got shape {shape}, wanted (batch|1, heads|1, 1, seqlen_k) or "
            "(batch|1, heads|1, seqlen_k)"
        )
    return attn_bias.detach()


def _of_intervals(
    end: Tensor, query_len: int | None, reach: int | None, window_size: int | None
) -> KeySelection:
    key_len = end.shape[2]
    # Clamped before the conversion, in which a large int64 could become any int32.
    end = end.clamp(0, key_len).to(torch.int32)
    if reach is None:
        rows = smaller(_check_query_len(query_len, key_len), key_len)
        needed = build_key_lists(end.contiguous(), rows, 0, None).needed
        most = int(needed.max()) if needed.numel() > 0 else 0
        return _listed(end.contiguous(), query_len, most, None, window_size)
    reach = larger(1, smaller(reach, key_len))
    key = torch.arange(key_len, dtype=torch.int32, device=end.device)
    # Intervals must not be longer than the lists have room for.
    end = torch.minimum(end, key + reach)
    return _within_reach(end.contiguous(), query_len, reach, window_size)


def _within_reach(
    end: Tensor, query_len: int | None, reach: int, window_size: int | None
) -> KeySelection:
    """The causal selection with the interval ends `end`, int32 and contiguous.

    No interval has more than `reach` rows.
    """
    # The first row of a block keeps at most `reach` keys, and each of the other 127 rows of the
    # block adds one.
    return _listed(end, query_len, reach + BLOCK_ROWS - 1, reach, window_size)


def _listed(
    end: Tensor, query_len: int | None, most: int, reach: int | None, window_size: int | None
) -> KeySelection:
    """The causal selection with the interval ends `end`, int32 and contiguous.

    `most`: the largest number of keys that a block of rows keeps.
    """
    key_len = end.shape[2]
    query_len = _check_query_len(query_len, key_len)
    rows = smaller(query_len, key_len)
    capacity = capacity_for(most, key_len)
    # Bypasses torch's dispatcher where that is possible.
    lists = build_key_lists(end, rows, capacity, reach, direct=is_plain_call(end))
    return KeySelection(
        end, lists.idx, lists.count, lists.full, window_size, True, key_len - query_len
    )


def _keeping_own(selection: KeySelection, is_sliding: bool = False) -> KeySelection:
    """The selection, of which it is known that every row keeps the key at its own position."""
    s = selection  # dataclasses.replace() cannot be compiled by older releases of torch
    return KeySelection(*s.lists, s.window_size, s.is_causal, s.first_row, is_sliding, True)


def _hide_masked(end: Tensor, attn_mask: Tensor | None) -> Tensor:
    """The interval ends, 0 for masked keys, so that their intervals are empty."""
    if attn_mask is None:
        return end
    keep = key_only_mask(attn_mask, end.shape[2])
    check_same_device("attn_mask", keep, end.device, "the selection")
    n, m = end.shape[0], keep.shape[0]
    if not (is_one_or(m, n) or n == 1):
        raise ValueError(f"attn_mask: got batch {m}, wanted {n} or 1 as document_ids")
    return torch.where(keep, end, 0)


def _ends_by_ids(document_ids: Tensor, key_len: int | None) -> Tensor:
    """int32 (B, 1, Sk): for each key the index of the first key after its document."""
    check_tensor("document_ids", document_ids)
    if not is_integer(document_ids.dtype):
        raise TypeError(f"document_ids: got dtype {document_ids.dtype}, wanted an integer dtype")
    shape = tuple(document_ids.shape)
    if len(shape) != 2 or (key_len is not None and shape[1] != key_len):
        seqlen = "seqlen_k" if key_len is None else key_len
        raise ValueError(f"document_ids: got shape {shape}, wanted (batch, {seqlen})")
    seqlen = document_ids.shape[1]
    key = torch.arange(seqlen, dtype=torch.int32, device=document_ids.device)
    # roll compares the last key with the first one; its entry is Sk whatever the outcome.
    is_last = document_ids != document_ids.roll(-1, 1)
    stop = torch.where(is_last, key + 1, seqlen)
    return stop.flip(1).cummin(1).values.flip(1)[:, None]


def _documents(
    cu_seqlens: Tensor | Sequence[int],
    key_len: int | None,
    bounded: bool,
    device: torch.device | None,
) -> tuple[Tensor, int, int | None]:
    """int32 boundaries, Sk, and the length of the longest document where the host knows it.

    `bounded`: whether the length of intervals is bounded by something else than that length.
    """
    if isinstance(cu_seqlens, Tensor):
        device = cu_seqlens.device if device is None else device
        stays = cu_seqlens.is_cuda and cu_seqlens.device == device
        check_can_move("cu_seqlens", cu_seqlens, device)
        if not has_values(cu_seqlens) or (stays and bounded and key_len is not None):
            check_boundary_tensor(cu_seqlens)
            if key_len is None:
                raise ValueError(
                    "key_len: got None, wanted the number of keys, as cu_seqlens is a tensor, "
                    "which is not read under torch.compile, as a fake or on the meta device"
                )
            return to_int32(cu_seqlens, key_len).to(device), key_len, None
    bounds = read_boundaries(cu_seqlens, key_len)
    longest = max([0, *(b - a for a, b in pairwise(bounds))])
    return torch.tensor(bounds, dtype=torch.int32, device=device), bounds[-1], longest


def _document_bounds(
    cu_seqlens: Tensor | Sequence[int], key_len: int, device: torch.device
) -> Tensor:
    """cu_seqlens as int32 (documents + 1,) on `device`.

    The host checks the values, unless it would have to wait for them or torch compiles. Values that
    it has not checked are checked by the operator, if it runs without the compiled kernels; these
    access nothing outside the tensors, whatever the values.
    """
    if isinstance(cu_seqlens, Tensor):
        stays = cu_seqlens.is_cuda and cu_seqlens.device == device
        check_can_move("cu_seqlens", cu_seqlens, device)
        if stays or not has_values(cu_seqlens):
            check_boundary_tensor(cu_seqlens)
            return to_int32(cu_seqlens, key_len).to(device)
    bounds = torch.tensor(read_boundaries(cu_seqlens, key_len), dtype=torch.int32, device="cpu")
    return bounds.to(device, non_blocking=True)


def read_boundaries(cu_seqlens: Tensor | Sequence[int], key_len: int | None) -> list[int]:
    """cu_seqlens as checked Python ints; the host waits for a tensor on a GPU."""
    if isinstance(cu_seqlens, Tensor):
        check_boundary_tensor(cu_seqlens)
        bounds = read_integers(cu_seqlens)
    else:
        bounds = listed_boundaries(cu_seqlens)
    check_boundaries(bounds, key_len)
    return bounds


def listed_boundaries(cu_seqlens: Any) -> list[int]:
    """cu_seqlens given as a sequence, as Python ints; their order is not checked."""
    wanted = "a sequence of ints or an int32 or int64 tensor"
    try:
        given = list(cu_seqlens)
    except TypeError:
        raise TypeError(f"cu_seqlens: got {describe(cu_seqlens)}, wanted {wanted}") from None
    return [check_int("cu_seqlens", x, wanted=wanted) for x in given]


def check_boundary_tensor(cu_seqlens: Any, name: str = "cu_seqlens") -> Tensor:
    """cu_seqlens, if it is an int32 or int64 tensor of one dimension; values are not checked."""
    bounds = check_tensor(name, cu_seqlens, "an integer tensor")
    check_tensor_dtype(name, bounds, _INTEGERS)
    if bounds.dim() != 1 or bounds.shape[0] < 1:
        raise ValueError(f"{name}: got shape {tuple(bounds.shape)}, wanted (documents + 1,)")
    return bounds


def to_int32(cu_seqlens: Tensor, key_len: int = 2**31 - 2) -> Tensor:
    """cu_seqlens as int32. Values outside 0 .. key_len are clamped so that they stay outside."""
    if cu_seqlens.dtype == torch.int32:
        return cu_seqlens
    return cu_seqlens.clamp(-1, key_len + 1).to(torch.int32)


def _check_query_len(query_len: int | None, key_len: int) -> int:
    return key_len if query_len is None else check_int("query_len", query_len, 0)
