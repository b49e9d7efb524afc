"""Which keys the rows of a problem keep: from `window_size`, `selection` and `attn_mask`.

If each key is kept by one interval of rows, the problem gets key lists, or a mask that is the same
for all rows. If mask or bias differ between rows, that is not possible, and the problem gets a mask
of size Sq * Sk: a slow path, but always correct. Letters as in `dmattn.problem`.
"""

from typing import Any

import torch
from torch import Tensor

from dmattn.arguments import without_nan
from dmattn.checks import check_key_lists
from dmattn.dispatch import select
from dmattn.key_lists import Selection, without_keys
from dmattn.ops.selection import prepared_select
from dmattn.problem import Problem
from dmattn.selection import KeySelection, key_only_mask, may_differ_by_row, same_heads
from dmattn.utils.mask import top_window_mask
from dmattn.validation import check_tensor, in_functorch, refuse_jit_trace

_DENSE = (
    "so a mask of size seqlen_q * seqlen_k says which keys are kept, and time and memory grow "
    "with that"
)


# A problem with its keys chosen, and notes for the user on what is slow about the choice.
Kept = tuple[Problem, tuple[str, ...]]


def keep_window(problem: Problem, window_size: int, given: Any, is_known: bool = False) -> Kept:
    """Let each row keep the `window_size` keys with the highest bias.

    If Sk <= window_size, nothing is selected; keys with a bias of NaN, which a selection would
    leave out, get a bias of -inf.

    Args:
        problem: checked, with a bias.
        window_size: at least 1.
        given: the bias as the caller gave it, for error messages.
        is_known: whether the call is of a known kind, for which torch's dispatcher can be bypassed.

    Raises:
        ValueError: the bias does not have an entry for each key.
    """
    bias, mask, seqlen_k = problem.bias, problem.mask, problem.k.shape[1]
    assert bias is not None  # as `check_scores` has seen
    if bias.shape[3] != seqlen_k:
        raise ValueError(
            f"attn_bias: got shape {tuple(given.shape)}, wanted (batch|1, nheads|nheads_k|1, "
            f"seqlen_q|1, {seqlen_k}) or (batch|1, nheads|nheads_k|1, {seqlen_k}) with window_size"
        )
    has_rows = mask is not None and may_differ_by_row(mask)
    if seqlen_k <= window_size:
        if mask is not None and not has_rows:
            mask = key_only_mask(mask, seqlen_k)[:, :, None]
        return problem.replace(mask=mask, bias=without_nan(bias)), ()
    rows, causal = problem.q.shape[1], problem.is_causal
    if has_rows or bias.shape[2] != 1:
        keep = top_window_mask(bias, window_size, rows, causal, mask)
        name = "attn_mask" if has_rows else "attn_bias"
        slow = f"{name} has rows of its own beside window_size, {_DENSE}"
        return problem.replace(mask=keep), (slow,)
    rows = min(rows, seqlen_k) if causal else rows
    scores = _scores(bias, mask)
    lists = select(*scores, window_size, rows, causal, is_known=is_known, cleared=False)
    return problem.with_lists(lists), ()


class KnownWindow:
    """Makes the key lists of `keep_window` for later calls of the same kind. It holds no tensors.

    Args:
        problem: that of the first call, with its key lists, and no rows in front of its first key.
        window_size: that of all calls of the kind.
    """

    def __init__(self, problem: Problem, window_size: int) -> None:
        assert problem.key_lists is not None
        wanted = (window_size, problem.q.shape[1], problem.is_causal)
        self._select = prepared_select(problem.key_lists, *wanted)

    def __call__(self, bias: Tensor, mask: Tensor | None) -> Selection:
        """The key lists for the bias (4-D, one row) and the mask of a call."""
        return self._select(*_scores(bias, mask))


def _scores(bias: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Bias and mask without their row dimension, as selection takes them: ({B|1}, heads, Sk)."""
    scores = (bias.detach() if bias.requires_grad else bias).squeeze(2)
    if mask is None:
        return scores, None
    return same_heads(scores, key_only_mask(mask, scores.shape[2]))


def check_selection(selection: Any) -> None:
    """Raise unless it is a KeySelection of tensors, and of one batch.

    Raises:
        TypeError: it is anything else.
        ValueError: it has further dimensions, as the result of torch.vmap has.
        RuntimeError: torch.jit.trace records the call.
    """
    refuse_jit_trace("a selection of keys")
    if not isinstance(selection, KeySelection):
        kind = type(selection).__name__
        raise TypeError(f"selection: got {kind}, wanted a dmattn.KeySelection or None")
    for name, t in zip(Selection._fields, selection.lists, strict=True):
        check_tensor(f"selection.{name}", t)
    if selection.end.dim() != 3:
        shape = tuple(selection.end.shape)
        raise ValueError(f"selection: got end of shape {shape}, wanted (batch|1, heads|1, Sk)")


def keep_selection(problem: Problem, selection: KeySelection) -> Kept:
    """Let each row keep the keys of a selection, except those that the mask of the problem hides.

    Raises:
        TypeError: a tensor of the selection is not int32.
        ValueError: the selection was made for other lengths, batch, heads, device or causality.
    """
    if selection.is_causal != problem.is_causal:
        raise ValueError(
            f"selection: got one with is_causal={selection.is_causal}, wanted {problem.is_causal}"
        )
    if selection.is_causal and selection.query_len != problem.q.shape[1]:
        raise ValueError(
            f"selection: got one for {selection.query_len} query rows, wanted {problem.q.shape[1]}"
        )
    mask, bias = problem.mask, problem.bias
    sliding = selection.window_size if selection.is_sliding else None
    problem = problem.with_lists(selection.lists, sliding or 0, selection.keeps_own)
    check_key_lists(selection.lists, without_leading_rows(problem))
    if mask is not None and may_differ_by_row(mask):
        slow = f"attn_mask has rows of its own beside a selection, {_DENSE}"
        return _with_dense_mask(problem, selection, mask), (slow,)
    if _learns(bias):
        slow = f"attn_bias has rows of its own and a gradient beside a selection, {_DENSE}"
        return _with_dense_mask(problem, selection, mask), (slow,)
    if mask is None:
        return problem, ()
    end, keep = same_heads(selection.end, key_only_mask(mask, problem.k.shape[1]))
    assert keep is not None
    if not selection.is_causal:
        return problem.without_lists(((end > 0) & keep)[:, :, None]), ()
    return problem.with_lists(without_keys(selection.lists, keep)), ()


def keeps_as_given(problem: Problem, selection: KeySelection) -> bool:
    """Whether `keep_selection` only passes the lists on, in this and every call of its kind.

    Args:
        problem: what `keep_selection` returned for this call.
        selection: that of this call.
    """
    bias, lists = problem.bias, problem.key_lists
    return (
        lists is not None
        and all(a is b for a, b in zip(lists, selection.lists, strict=True))
        and leading_rows(problem) == 0
        and (bias is None or bias.shape[2] == 1)  # for others it depends on whether it is learned
    )


def leading_rows(problem: Problem) -> int:
    """How many rows of a causal problem over key lists stand in front of the first key.

    These rows have negative positions and see no key; 0 for other problems.
    """
    if problem.key_lists is None or not problem.is_causal:
        return 0
    return max(0, problem.q.shape[1] - problem.k.shape[1])


def without_leading_rows(problem: Problem) -> Problem:
    """The problem without the rows that `leading_rows` counts, which keep nothing."""
    skip, bias = leading_rows(problem), problem.bias
    if skip == 0:
        return problem
    if bias is not None and bias.shape[2] > 1:
        bias = bias[:, :, skip:]
    return problem.replace(q=problem.q[:, skip:], bias=bias)


def _with_dense_mask(problem: Problem, selection: KeySelection, mask: Tensor | None) -> Problem:
    # A selection that is not causal serves any number of rows, whatever number it was made for.
    keep = selection.to_mask() if selection.is_causal else (selection.end > 0)[:, :, None]
    keep, mask = same_heads(keep, mask)
    return problem.without_lists(keep if mask is None else keep & mask)


def _learns(bias: Tensor | None) -> bool:
    """Whether a bias needs a gradient for each row and key, which key lists do not support."""
    if bias is None or bias.shape[2] == 1:
        return False
    # A tensor wrapped by a torch.func transform does not say whether a gradient is needed outside
    # of the transform, so one is assumed.
    return (bias.requires_grad or in_functorch()) and torch.is_grad_enabled()
