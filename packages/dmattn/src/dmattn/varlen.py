"""Attention over sequences of unequal lengths that are packed one after the other."""

import inspect
from typing import Any, Literal, overload

import torch
from torch import Tensor

from dmattn.arguments import (
    check_scores,
    check_window_size,
    checked_problem,
    heads_first,
    without_nan,
)
from dmattn.backends import registry
from dmattn.checks import read_packing
from dmattn.dispatch import attend, attend_directly, is_direct, is_same_tensor, select
from dmattn.key_lists import BLOCK_ROWS, Selection, best_keys, whole_blocks
from dmattn.known_calls import kind_of_call, kind_with_out, recall, remember
from dmattn.outputs import check_memory_of_out, check_out
from dmattn.problem import Packing, Problem, is_per_key, lse_of_no_key, with_one_head_dim
from dmattn.selection import same_heads
from dmattn.slow_paths import slow_paths
from dmattn.validation import can_be_read, check_bool, check_int


@overload
def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
    window_size: int | None = None,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
    window_size: int | None = None,
    *,
    return_lse: Literal[True],
    backend: str | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
    window_size: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Any: ...  # a Tensor, or a tuple of two


def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
    window_size: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """`flash_dmattn_func` for each of n sequences packed one behind the other, without padding.

    Sequence b has the query rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 and the keys
    cu_seqlens_k[b] .. cu_seqlens_k[b + 1] - 1; a sequence may have no rows, or no keys. Rows see
    keys of their own sequence only. Letters: Tq and Tk number of rows and of keys of all sequences
    together, H query heads, HK key/value heads, D and Dv head dimension of keys and of values.

    On CUDA only the kernels read cu_seqlens, so the host never waits for them and cannot check
    them: boundaries that do not rise from 0 to Tq or Tk, or a sequence longer than its max_seqlen,
    give wrong results, but no access outside the tensors. On the CPU they raise ValueError.

    Args:
        query: (Tq, H, D) with D at most 256; dtypes and views as for `flash_dmattn_func`.
        key, value: (Tk, HK, D) and (Tk, HK, Dv) in the dtype of query; HK divides H. Dv is at most
            256, and a slow path if it differs from D, as for `flash_dmattn_func`.
        cu_seqlens_q, cu_seqlens_k: int32 (n + 1,), on the device of query. None for cu_seqlens_k
            means that it is the same as cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: number of rows (keys) of the longest sequence, or an upper bound
            of it.
        attn_mask: bool, True = attend: (Tk, {H|HK|1}), the same for all rows of a sequence, or
            (Tq, {H|HK|1}, max_seqlen_k), where column c of a row stands for key c of the row's own
            sequence. In the first form the cost follows the number of kept keys.
        attn_bias: the dtype of query, or float32; shapes as attn_mask. A bias of -inf masks. In a
            gradient of shape (Tq, heads, max_seqlen_k), columns beyond the last key of a row's
            sequence are 0. Large causal calls with a mask or a bias for each key take less time on
            Hopper if cu_seqlens_q and cu_seqlens_k are one tensor and there is no softcap; some of
            their memory then grows with max_seqlen_k.
        softmax_scale: D ** -0.5 when None.
        is_causal: the last row of each sequence sees all keys of the sequence, the row before it
            one key less, and so on.
        softcap, deterministic, backend: as for `flash_dmattn_func`.
        window_size: each row keeps only this many keys of its sequence, chosen as by
            `flash_dmattn_func`. attn_bias, and attn_mask if given, must then be (Tk, {H|HK|1}).
            With is_causal, row i of a sequence with r rows and n keys stands at the position of key
            i + n - r. If rows and keys may have different boundaries, each row is first moved to
            the place of that key, which is a slow path: it takes time and memory for Tk rows.
            Boundaries count as the same only if the host can tell without waiting: on the CPU if
            they are equal, on CUDA if they are one tensor or lie at the same address, under
            torch.compile and torch.func if they are one object.
        return_lse: also return the log-sum-exp of each row.
        sinks: (H,), as for `flash_dmattn_func`.
        out: where to write the output, (Tq, H, Dv), as for `flash_dmattn_func`. It is also filled
            by a copy if window_size moves rows to their keys.

    Returns:
        out (Tq, H, Dv) in the dtype of query: contiguous, or the tensor given as `out`. With
        return_lse a tuple of out and lse (H, Tq) with the natural logarithm, float32 (float64 for
        float64 inputs), differentiable.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a layout, shape, stride, device or number does not fit, or no backend takes such
            arguments.
        RuntimeError: as for `flash_dmattn_func`.
    """
    operands = (query, key, value, attn_mask, attn_bias, sinks)
    if return_lse is not False and return_lse is not True:  # no part of a call's kind: check always
        return_lse = check_bool("return_lse", return_lse)
    bounds = (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
    packing = (*bounds, max_seqlen_q, max_seqlen_k)
    kind = None
    if window_size is None:
        options = (softmax_scale, is_causal, softcap, deterministic, backend)
        kind = kind_of_call(operands, options, packing)
        if out is not None:
            kind = kind_with_out(kind, out)
    known = recall(kind)
    if known is not None:
        if out is not None:
            check_memory_of_out(out, operands, bounds, "cu_seqlens_q and cu_seqlens_k")
        operands = (query, key, value, heads_first(attn_mask), heads_first(attn_bias), sinks)
        packed = known.problem(operands, Packing(*packing))
        _check_boundaries(packed)
        found, lse = attend_directly(packed, known.backend, return_lse, out=out)
        return (found, lse) if return_lse else found
    packed, moved = _checked(
        query,
        key,
        value,
        *packing,
        attn_mask,
        attn_bias,
        window_size,
        out,
        sinks=sinks,
        softmax_scale=softmax_scale,
        is_causal=is_causal,
        softcap=softcap,
        deterministic=deterministic,
    )
    if packed.packing is not None:
        packed = _over_lists(packed, packed.packing, backend)
    is_listed = packed.packing is None  # then it has key lists, for all sequences together
    into = out if moved is None else None
    found, lse = attend(packed, backend, into[None] if is_listed and into is not None else into)
    if kind is not None and not is_listed:
        remember(kind, operands, packed, backend)
    if is_listed:
        found, lse = found.squeeze(0), lse.squeeze(0)  # the backward of squeeze copies nothing
    if moved is not None:
        found = torch.nn.functional.pad(found, (0, 0, 0, 0, 0, 1))[moved]
        lse = torch.cat((lse, lse_of_no_key(packed)), 1)[:, moved]
    if out is not None:
        found = out if into is not None else out.copy_(found)
    return (found, lse) if return_lse else found


def explain_varlen(*arguments: Any, **options: Any) -> str:
    """Which backend `flash_dmattn_varlen_func` would use, why not the others, and what slows it.

    Takes the arguments of that function. Nothing is computed except the choice of keys, if there is
    a window_size.

    Returns:
        Some lines of text, for reading, as `dmattn.explain` does.

    Raises:
        TypeError, ValueError: as `flash_dmattn_varlen_func`, except for what only some backends
            refuse, which is part of the text.
    """
    given = inspect.signature(flash_dmattn_varlen_func).bind(*arguments, **options)
    given.apply_defaults()
    named = dict(given.arguments)
    wanted = named.pop("backend")
    check_bool("return_lse", named.pop("return_lse"))
    problem, moved = _checked(**named)
    window, packing = named["window_size"], problem.packing
    notes = slow_paths(problem, window)
    if packing is not None:
        problem = _over_lists(problem, packing, wanted)
        if problem.packing is None:
            packing = None
            notes.append(
                "lists of each sequence's keys are made, without those that attn_mask hides, and "
                "read with attn_bias: 1.2 to 1.9 times the time of packed sequences without either"
            )
    if window is not None and packing is not None and packing.max_seqlen_k > window:
        notes.append("window_size without causality sorts all keys, by score and by sequence")
    if moved is not None:
        notes.append(
            "cu_seqlens_q and cu_seqlens_k are two tensors, so queries are copied to the positions "
            "of their keys, and the output back"
        )
    out = None if moved is not None else named["out"]
    if out is not None and packing is None:
        out = out[None]
    return registry.explain(with_one_head_dim(problem), wanted, notes, out)


def _checked(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    attn_mask: Any,
    attn_bias: Any,
    window_size: Any,
    out: Any = None,
    **settings: Any,
) -> tuple[Problem, Tensor | None]:
    """The checked problem of the arguments of `flash_dmattn_varlen_func`, with its keys chosen.

    Returns what `_in_window` returns.
    """
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    longest = check_int("max_seqlen_q", max_seqlen_q), check_int("max_seqlen_k", max_seqlen_k)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, *longest)
    window = None
    if window_size is not None:
        window = check_window_size(window_size, is_packed=True)
        check_scores(attn_bias, is_packed=True)
    problem = checked_problem(query, key, value, attn_mask, attn_bias, packing, **settings)
    _check_boundaries(problem)
    if out is not None:  # checked first, as choosing keys takes time
        operands = (query, key, value, attn_mask, attn_bias, settings["sinks"])
        check_out(out, problem, operands, packing[:2], "cu_seqlens_q and cu_seqlens_k")
    return (problem, None) if window is None else _in_window(problem, packing, window)


def _check_boundaries(problem: Problem) -> None:
    """Raise ValueError for wrong boundaries, if the host can read them without waiting."""
    packing = problem.packing
    assert packing is not None
    if can_be_read(packing.cu_seqlens_q) and can_be_read(packing.cu_seqlens_k):
        read_packing(packing, problem.q.shape[0], problem.k.shape[0])


def _in_window(
    problem: Problem, packing: Packing, window_size: int
) -> tuple[Problem, Tensor | None]:
    """Apply `window_size`: as a mask per key, or, if causal, as key lists over all sequences.

    Returns:
        The problem for a backend; over key lists it has a batch of 1 and no packing. And where each
        row has been moved to, int64 (Tq,), as `_rows_of_keys` returns it; None if rows stay.
    """
    bias, mask = _scores("attn_bias", problem.bias), problem.mask
    if mask is not None:
        _scores("attn_mask", mask)
    if packing.max_seqlen_k <= window_size:
        return problem.replace(bias=without_nan(bias)), None
    key_mask = None if mask is None else mask[None]
    scores, key_mask = same_heads(bias.detach()[None], key_mask)
    # If sequences have a single row each, causality hides nothing from it.
    if not problem.is_causal or packing.max_seqlen_q <= 1:
        sequence = _sequence_of_keys(packing.cu_seqlens_k, scores.shape[2])
        keep = best_keys(scores, window_size, key_mask, sequence)
        return problem.replace(mask=keep[0]), None
    total_k = problem.k.shape[0]
    lists = select(scores, key_mask, window_size, total_k, True, packing.cu_seqlens_k)
    rows_of_keys = _rows_of_keys(problem, packing)
    if rows_of_keys is not None:
        q = problem.q
        q = q.new_zeros((total_k + 1, *q.shape[1:])).index_copy(0, rows_of_keys, q)[:total_k]
        problem = problem.replace(q=q)
    return _as_one_sequence(problem, lists), rows_of_keys


def _as_one_sequence(problem: Problem, lists: Selection) -> Problem:
    """The packed problem as one of batch 1, with key lists instead of packing and mask."""
    bias = problem.bias
    return problem.replace(
        q=problem.q[None],
        k=problem.k[None],
        v=problem.v[None],
        mask=None,
        bias=None if bias is None else bias[None, :, None],
        packing=None,
        key_lists=lists,
    )


# If query has fewer entries, making lists costs the host more time than the lists save.
_FEWEST_ENTRIES = 1 << 25
# Lists may take at most one byte for every 8 bytes of query, key and value.
_PART_OF_OPERANDS = 8


def _over_lists(problem: Problem, packing: Packing, backend: str | None) -> Problem:
    """The packed problem rewritten as one of batch 1 over lists of each sequence's own keys.

    Done where the backend takes less time for that; otherwise returns the problem unchanged. On an
    H200, for 32768 tokens in sequences of 200 to 1800, 16 query heads over 4 key/value heads,
    head_dim 128 and a bias for each key, the forward takes 0.52 ms instead of 0.82 and the backward
    1.55 ms instead of 2.67.
    """
    q, k, mask, bias = problem.q, problem.k, problem.mask, problem.bias
    of_keys = [t for t in (mask, bias) if t is not None]
    if not of_keys or not problem.is_causal or problem.softcap > 0:
        return problem
    if not all(map(is_per_key, of_keys)):
        return problem
    # Compiled code has no lower limit: its lengths may be unknown, and lists take no host time in
    # it.
    if torch.compiler.is_compiling():
        from dmattn.backends.constants import prefers_lists
    else:
        prefers_lists = registry.prefers_lists
        operands = (q, k, problem.v, mask, bias, packing.cu_seqlens_k)
        if not is_direct(*operands) or q.numel() < _FEWEST_ENTRIES:
            return problem
    if not prefers_lists(q.device, q.dtype, backend):
        return problem
    total_k, heads = k.shape[0], 1 if mask is None else mask.shape[0]
    # Bytes per token: of query, key and value, and of the lists.
    row_bytes = (q.shape[1] + 2 * k.shape[1]) * q.shape[2] * q.element_size()
    list_bytes = 4 * heads * whole_blocks(packing.max_seqlen_k) // BLOCK_ROWS
    if packing.max_seqlen_k < 1 or _PART_OF_OPERANDS * list_bytes > row_bytes:
        return problem
    if _rows_of_keys(problem, packing) is not None:
        return problem
    # All scores are equal and the window is the longest sequence, so every key is kept.
    scores = torch.zeros((), dtype=torch.float32, device=q.device).expand(1, heads, total_k)
    key_mask = None if mask is None else mask[None]
    bounds, longest = packing.cu_seqlens_k, packing.max_seqlen_k
    lists = select(scores, key_mask, longest, total_k, True, bounds, cleared=False)
    return _as_one_sequence(problem, lists)


def _rows_of_keys(problem: Problem, packing: Packing) -> Tensor | None:
    """int64 (Tq,): the index of the key at whose position each row stands; Tk if there is none.

    None if row i is known to stand at key i for all rows. Otherwise rows have to be moved. That is
    slower but always correct, so it does no harm if equal boundaries are not recognised as such.
    """
    cu_seqlens_q, cu_seqlens_k = packing.cu_seqlens_q, packing.cu_seqlens_k
    total_q, total_k = problem.q.shape[0], problem.k.shape[0]
    if is_same_tensor(cu_seqlens_q, cu_seqlens_k) and total_q == total_k:
        return None
    row = torch.arange(total_q, device=cu_seqlens_q.device)
    stops_q, stops_k = cu_seqlens_q[1:].long(), cu_seqlens_k[1:].long()
    sequence = torch.searchsorted(stops_q, row, right=True).clamp(max=len(stops_q) - 1)
    position = row + (stops_k - stops_q)[sequence]
    first = cu_seqlens_k.long()[sequence].clamp(min=0)  # wrong boundaries may be negative
    in_sequence = (position >= first) & (position < total_k)
    return torch.where(in_sequence, position, total_k)


def _scores(name: str, operand: Tensor | None) -> Tensor:
    """A mask or bias (heads, Tk) unchanged; ValueError if it is None or has another form."""
    if operand is None:
        raise ValueError(
            f"{name}: got None, wanted one score per key, by which window_size chooses"
        )
    if not is_per_key(operand):
        shape = tuple(operand.transpose(0, 1).shape)
        raise ValueError(
            f"{name}: got shape {shape}, wanted (total_k, heads), alike for all rows, with "
            "window_size"
        )
    return operand


def _sequence_of_keys(cu_seqlens: Tensor, total_k: int) -> Tensor:
    """int64 (Tk,): the sequence that each key belongs to."""
    key = torch.arange(total_k, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].long(), key, right=True)
