"""The operators that make selections.

dmattn::select_keys       choose, by a score per key, which keys each query row keeps
dmattn::build_key_lists   make the lists that belong to given intervals
dmattn::document_ends     make the intervals of packed documents
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dmattn.backends.cpu import selection as cpu
from dmattn.backends.cuda import selection as cuda
from dmattn.backends.cuda.kernels import serves
from dmattn.key_lists import (
    BLOCK_ROWS,
    KeyLists,
    Selection,
    capacity_for,
    num_blocks,
    num_lists,
)
from dmattn.ops import batching
from dmattn.ops.register import Operator, register
from dmattn.ops.sharding import register_for
from dmattn.validation import check_floating, is_one_or

# Sizes are SymInt, so that one compiled graph serves every length. `lists`: how many lists to make,
# at least one per block of rows (None: one per block); lists beyond the blocks are empty.
_SELECT = (
    "(Tensor scores, Tensor? key_mask, SymInt window, SymInt seqlen_q, bool is_causal, "
    "Tensor? cu_seqlens=None, SymInt? lists=None) "
    "-> (Tensor end, Tensor idx, Tensor count, Tensor full)"
)
_BUILD = (
    "(Tensor end, SymInt seqlen_q, SymInt capacity, SymInt reach, SymInt? lists=None) "
    "-> (Tensor idx, Tensor count, Tensor full, Tensor needed)"
)
_DOCUMENT_ENDS = "(Tensor cu_seqlens, SymInt seqlen_k) -> Tensor"
_CUDA_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


# --- dmattn::select_keys --------------------------------------------------------------------------


def select_keys(
    scores: Tensor,
    key_mask: Tensor | None,
    window: int,
    seqlen_q: int,
    is_causal: bool,
    cu_seqlens: Tensor | None = None,
    direct: bool = False,
    cleared: bool = True,
) -> Selection:
    """Choose the keys with the highest scores, by the operator dmattn::select_keys.

    Args:
        scores: floating ({B|1}, {heads|1}, Sk), any strides; on CUDA not float64. Detached: the
            choice has no gradient.
        key_mask: bool ({B|1}, {heads|1}, Sk), True where a key may be kept, or None.
        window: number of keys to keep, at least 1.
        seqlen_q: Sq, at most Sk when causal; row i stands at position i + Sk - Sq.
        is_causal: True: each row keeps the best of the keys up to its position. False: all rows
            keep the best of all keys.
        cu_seqlens: int32 (documents + 1,), rising from 0 to Sk: boundaries of packed documents.
            Keys are chosen, and seen, within their document only. Needs is_causal and Sq = Sk. The
            compiled kernels do not check the values; wrong ones give another selection, not an
            invalid one.
        direct: call the implementation instead of the operator, where torch's dispatcher would do
            nothing else.
        cleared: whether the unused entries of a list have to be zeros. Attention does not read
            them. If False, which saves a launch on CUDA, entries beyond the length of a list
            rounded up to a multiple of 128 may have any values.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, device or number does not fit, or, without the compiled kernels, values
            of cu_seqlens.
    """
    lists = num_lists(seqlen_q, is_causal)
    if not direct or scores.requires_grad:
        scores = scores.detach()
    arguments = (scores, key_mask, window, seqlen_q, is_causal, cu_seqlens, lists)
    if direct:
        return _select(*arguments, cleared)
    register_for(scores, key_mask)
    return Selection(*torch.ops.dmattn.select_keys(*arguments))


def prepared_select(
    found: Selection, window: int, seqlen_q: int, is_causal: bool
) -> Callable[[Tensor, Tensor | None], Selection]:
    """A function of (scores, key_mask) that is `select_keys` for later calls of one kind.

    It calls the implementation directly, does not clear unused entries, and makes exactly one list
    per block of rows, as attention wants it.

    Args:
        found: the selection of the first call, with scores and mask of the same shapes.
        window, seqlen_q, is_causal: those of all calls.
    """
    if serves(found.end) and found.idx.numel() > 0:
        return cuda.PreparedSelection(found, window, seqlen_q, is_causal)
    return partial(
        select_keys,
        window=window,
        seqlen_q=seqlen_q,
        is_causal=is_causal,
        direct=True,
        cleared=False,
    )


def _empty_selection(
    scores: Tensor,
    key_mask: Tensor | None,
    window: int,
    seqlen_q: int,
    is_causal: bool,
    cu_seqlens: Tensor | None = None,
    lists: int | None = None,
    cleared: bool = True,
) -> Selection:
    """An uninitialised selection to be filled, with zeros in idx if `cleared`.

    Raises TypeError or ValueError for arguments that do not fit together.
    """
    if scores.dim() != 3:
        raise ValueError(
            f"scores: got shape {tuple(scores.shape)}, wanted (batch|1, heads|1, seqlen_k)"
        )
    check_floating("scores", scores)
    if scores.is_cuda and scores.dtype not in _CUDA_DTYPES:
        raise TypeError(f"scores: got dtype {scores.dtype}, wanted float16, bfloat16 or float32")
    if window < 1:
        raise ValueError(f"window: got {window}, wanted at least 1")
    batch, heads, seqlen_k = scores.shape
    if seqlen_q < 0 or (is_causal and seqlen_q > seqlen_k):
        raise ValueError(f"seqlen_q: got {seqlen_q}, wanted 0 to {seqlen_k}, the number of keys")
    if cu_seqlens is not None:
        _check_documents(cu_seqlens, scores, seqlen_q, is_causal)
    if key_mask is not None:
        _check_key_mask(key_mask, scores)
        batch = key_mask.shape[0] if batch == 1 else batch
        heads = key_mask.shape[1] if heads == 1 else heads
    if lists is None:
        lists = num_blocks(seqlen_q, is_causal)
    capacity = capacity_for(window + (BLOCK_ROWS if is_causal else 0), seqlen_k)

    empty = scores.new_zeros if cleared else scores.new_empty
    idx = empty((batch, heads, lists, capacity), dtype=torch.int32)
    count = idx.new_empty((batch, heads, lists))
    full = torch.empty_like(count) if is_causal else idx.new_empty(0)
    return Selection(idx.new_empty((batch, heads, seqlen_k)), idx, count, full)


def _check_key_mask(key_mask: Tensor, scores: Tensor) -> None:
    if key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask: got dtype {key_mask.dtype}, wanted torch.bool")
    if key_mask.device != scores.device:
        raise ValueError(f"key_mask: got device {key_mask.device}, wanted {scores.device}")
    fits = key_mask.dim() == 3 and key_mask.shape[2] == scores.shape[2]
    if not fits or not all(
        is_one_or(n, m) or m == 1 for n, m in zip(key_mask.shape[:2], scores.shape[:2], strict=True)
    ):
        raise ValueError(
            f"key_mask: got shape {tuple(key_mask.shape)}, wanted one that broadcasts with "
            f"scores of shape {tuple(scores.shape)}"
        )


def _check_documents(cu_seqlens: Tensor, scores: Tensor, seqlen_q: int, is_causal: bool) -> None:
    _check_bounds(cu_seqlens)
    if cu_seqlens.device != scores.device:
        raise ValueError(f"cu_seqlens: got device {cu_seqlens.device}, wanted {scores.device}")
    if not is_causal:
        raise ValueError("cu_seqlens: got boundaries with is_causal=False, wanted is_causal=True")
    if seqlen_q != scores.shape[2]:
        raise ValueError(f"seqlen_q: got {seqlen_q}, wanted {scores.shape[2]} with cu_seqlens")


def _check_bounds(cu_seqlens: Tensor) -> None:
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens: got dtype {cu_seqlens.dtype}, wanted torch.int32")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}, wanted (documents + 1)")


def chooses_on_host(t: Tensor) -> bool:
    """Whether running top-w of scores on the device of t, a GPU, is computed on the host."""
    return not (t.is_cpu or t.is_meta or serves(t))


def _select(scores: Tensor, *others: Any, **named: Any) -> Selection:
    """dmattn::select_keys by the implementation for the device of the scores."""
    return (_select_cuda if serves(scores) else _select_cpu)(scores, *others, **named)


def _select_cpu(
    scores: Tensor,
    key_mask: Tensor | None,
    window: int,
    seqlen_q: int,
    is_causal: bool,
    cu_seqlens: Tensor | None = None,
    lists: int | None = None,
    cleared: bool = True,  # unused entries are zeros here in any case
) -> Selection:
    shaped = _empty_selection(scores, key_mask, window, seqlen_q, is_causal, cu_seqlens)
    if key_mask is not None:
        scores = torch.where(key_mask, scores, -math.inf)
    capacity = shaped.idx.shape[3]
    selection = cpu.select(scores, window, seqlen_q, is_causal, capacity, cu_seqlens)
    return Selection(selection.end, *_as_many(selection[1:], lists))


def _select_cuda(
    scores: Tensor,
    key_mask: Tensor | None,
    window: int,
    seqlen_q: int,
    is_causal: bool,
    cu_seqlens: Tensor | None = None,
    lists: int | None = None,
    cleared: bool = True,
) -> Selection:
    arguments = (scores, key_mask, window, seqlen_q, is_causal, cu_seqlens)
    selection = _empty_selection(*arguments, cleared=cleared)
    if selection.end.numel() == 0 or selection.idx.numel() == 0:
        for t in selection:
            t.zero_()
    else:
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.contiguous()
        cuda.select(scores, key_mask, window, seqlen_q, is_causal, selection, cu_seqlens)
    if lists is None or lists == selection.idx.shape[2]:
        return selection
    return Selection(selection.end, *_as_many(selection[1:], lists))


def _as_many(tensors: tuple[Tensor, ...], lists: int | None) -> tuple[Tensor, ...]:
    """idx, count, full and so on, with empty lists appended until there are `lists` of them."""
    blocks = tensors[0].shape[2]
    if lists is None or lists == blocks:
        return tensors
    if lists < blocks:
        raise ValueError(f"lists: got {lists}, wanted at least {blocks}")
    more = lists - blocks
    return tuple(
        torch.nn.functional.pad(t, (0, 0, 0, more) if t.dim() == 4 else (0, more)) for t in tensors
    )


# --- dmattn::build_key_lists ----------------------------------------------------------------------


def build_key_lists(
    end: Tensor, seqlen_q: int, capacity: int, reach: int | None, direct: bool = False
) -> KeyLists:
    """Make the lists of given intervals, by the operator dmattn::build_key_lists.

    Args:
        end: int32 ({B|1}, heads, Sk): the rows at positions j <= r < end[j] keep key j.
        seqlen_q: Sq <= Sk; row i stands at position i + Sk - Sq.
        capacity: room of each list, a multiple of 128. A list that does not fit is left empty;
            `needed` has its length. A capacity of 0 gives the lengths alone.
        reach: the largest end[j] - j, or None if it is unknown. For a block of rows, keys further
            than this before its first row are not searched.
        direct: call the implementation instead of the operator, where torch's dispatcher would do
            nothing else.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape or number does not fit.
    """
    reach = 0 if reach is None else reach
    arguments = (end, seqlen_q, capacity, reach, num_lists(seqlen_q, True))
    if direct:
        return KeyLists(*_build(*arguments))
    return KeyLists(*torch.ops.dmattn.build_key_lists(*arguments))


def _empty_lists(
    end: Tensor, seqlen_q: int, capacity: int, reach: int, lists: int | None = None
) -> KeyLists:
    """Uninitialised lists to be filled, with zeros in idx.

    Raises TypeError or ValueError for arguments that do not fit together.
    """
    if end.dim() != 3:
        raise ValueError(f"end: got shape {tuple(end.shape)}, wanted (batch|1, heads|1, seqlen_k)")
    if end.dtype != torch.int32:
        raise TypeError(f"end: got dtype {end.dtype}, wanted torch.int32")
    batch, heads, seqlen_k = end.shape
    if seqlen_q < 0 or seqlen_q > seqlen_k:
        raise ValueError(f"seqlen_q: got {seqlen_q}, wanted 0 to {seqlen_k}, the number of keys")
    if capacity < 0 or capacity % BLOCK_ROWS != 0:
        raise ValueError(f"capacity: got {capacity}, wanted a multiple of {BLOCK_ROWS}")
    if reach < 0:
        raise ValueError(f"reach: got {reach}, wanted at least 1, or 0 where it is unknown")
    shape = (batch, heads, num_blocks(seqlen_q, True) if lists is None else lists)
    return KeyLists(
        end.new_zeros((*shape, capacity)),
        end.new_empty(shape),
        end.new_empty(shape),
        end.new_empty(shape),
    )


def _build(end: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dmattn::build_key_lists by the implementation for the device of the intervals."""
    return (_build_cuda if serves(end) else _build_cpu)(end, *others, **named)


def _build_cpu(
    end: Tensor, seqlen_q: int, capacity: int, reach: int, lists: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _empty_lists(end, seqlen_q, capacity, reach)
    made = cpu.interval_lists(end.contiguous(), seqlen_q, capacity, reach or None)
    return KeyLists(*_as_many(made, lists))


def _build_cuda(
    end: Tensor, seqlen_q: int, capacity: int, reach: int, lists: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = _empty_lists(end, seqlen_q, capacity, reach)
    if made.count.numel() > 0:
        cuda.build_key_lists(end.contiguous(), seqlen_q, reach, made)
    return KeyLists(*_as_many(made, lists))


# --- dmattn::document_ends ------------------------------------------------------------------------


def document_ends(cu_seqlens: Tensor, seqlen_k: int) -> Tensor:
    """The interval ends of packed documents, by the operator dmattn::document_ends.

    Args:
        cu_seqlens: int32 (documents + 1,), rising from 0 to Sk: boundaries of packed documents. On
            GPUs the values are not checked; wrong ones give other documents.
        seqlen_k: Sk.

    Returns:
        int32 (Sk,): for each key the index of the first key after its document.

    Raises:
        TypeError: cu_seqlens is not int32.
        ValueError: its shape does not fit, or, on the CPU, its values.
    """
    ends: Tensor = torch.ops.dmattn.document_ends(cu_seqlens, seqlen_k)
    return ends


def _empty_ends(cu_seqlens: Tensor, seqlen_k: int) -> Tensor:
    _check_bounds(cu_seqlens)
    return cu_seqlens.new_empty((seqlen_k,))


def _document_ends(cu_seqlens: Tensor, seqlen_k: int) -> Tensor:
    _check_bounds(cu_seqlens)
    # Both are operations of torch. On every GPU those are used for which the host does not wait.
    find = cpu.document_ends if cu_seqlens.is_cpu else cuda.document_ends
    return find(cu_seqlens, seqlen_k)


register(
    Operator(
        "dmattn::select_keys",
        _SELECT,
        _select,
        _empty_selection,
        batching=batching.along_batch,
    )
)
register(
    Operator(
        "dmattn::build_key_lists",
        _BUILD,
        _build,
        _empty_lists,
        batching=batching.along_batch,
    )
)
register(
    Operator(
        "dmattn::document_ends",
        _DOCUMENT_ENDS,
        _document_ends,
        _empty_ends,
        batching=batching.one_by_one,
    )
)
