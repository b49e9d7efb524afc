"""The public attention function for sequences of equal length."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from dmattn.arguments import check_scores, check_window_size, checked_problem
from dmattn.backends import registry
from dmattn.dispatch import attend, attend_directly, attend_prepared
from dmattn.kept_keys import (
    Kept,
    check_selection,
    keep_selection,
    keep_window,
    keeps_as_given,
    leading_rows,
    without_leading_rows,
)
from dmattn.key_lists import KeptKeys
from dmattn.key_state import KeyState, tensors_of
from dmattn.known_calls import Kind, Known, kind_of_call, kind_with_out, recall, remember
from dmattn.outputs import check_memory_of_out, check_out
from dmattn.problem import Problem, lse_dtype, lse_of_no_key, with_one_head_dim
from dmattn.reference import reference_attention
from dmattn.selection import KeySelection
from dmattn.slow_paths import slow_paths
from dmattn.stretches import Stretch, checked_stretch, known_stretch
from dmattn.validation import check_bool


@overload
def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    selection: KeySelection | None = None,
    sinks: Tensor | None = None,
    return_attn_probs: Literal[False] = False,
    state: KeyState | None = None,
    return_state: Literal[False] = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    selection: KeySelection | None = None,
    sinks: Tensor | None = None,
    return_attn_probs: Literal[False] = False,
    state: KeyState | None = None,
    return_state: Literal[False] = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    selection: KeySelection | None = None,
    sinks: Tensor | None = None,
    return_attn_probs: bool = False,
    state: KeyState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Any: ...  # a Tensor, or a tuple of two to four values


def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    selection: KeySelection | None = None,
    sinks: Tensor | None = None,
    return_attn_probs: bool = False,
    state: KeyState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Any:
    """Softmax attention with a mask, a bias, or both, which are neither expanded nor padded.

        logits[b,h,i,j] = softcap(softmax_scale * query[b,i,h] . key[b,j,h//G]) + attn_bias[b,h,i,j]
        out[b,i,h]      = sum over kept j of softmax_j(logits) * value[b,j,h//G]

    Row i of head h keeps key j if attn_mask, causality, and window_size or selection all allow it
    and its bias is not -inf. A query row that keeps no key gives out = 0 and lse = -inf, and adds
    nothing to any gradient. Gradients reach query, key, value, attn_bias and sinks, each computed
    only if required.

    Letters: B batch, Sq/Sk query/key length, H query heads, HK key/value heads, G = H / HK, D and
    Dv head dimension of keys and of values. {B|1} is a dimension of size B or 1.

    Args:
        query: (B, Sq, H, D) with D at most 256; float16 or bfloat16 on CUDA (float32 by backends
            other than "cuda"), on the CPU also float32 or float64. Query, key and value may be any
            view whose last dimension is contiguous (on the CPU, any view at all).
        key, value: (B, Sk, HK, D) and (B, Sk, HK, Dv) in the dtype of query; HK divides H. Dv is
            at most 256, too. If Dv differs from D, the call takes a slow path: query and key, or
            value, whichever has the smaller head dimension, are copied with zeros appended.
        attn_mask: bool ({B|1}, {H|HK|1}, {Sq|1}, {Sk|1}), True = attend. If the mask is the same
            for all queries (its Sq dimension is 1), the cost follows the number of kept keys. A
            mask of two dimensions is either a padding mask ({B|1}, Sk), of bools or of the integers
            that a tokenizer returns (0 = padding), or a bool (Sq, Sk), as
            scaled_dot_product_attention takes it. If B = Sq > 1 it could be either, and is refused.
        attn_bias: the dtype of query, or float32; shapes as attn_mask has them in four dimensions.
            A bias of -inf masks. The gradient of the bias is summed in float32 or wider and rounded
            once.
        softmax_scale: D ** -0.5 when None.
        is_causal: query i sees keys 0 .. i + Sk - Sq, so that the last query sees the last key.
        softcap: c > 0 turns the scaled dot product x into c * tanh(x / c); 0 turns it off.
        deterministic: make gradients bitwise repeatable, at some cost in time. This is also in
            force while torch.use_deterministic_algorithms(True) is.
        window_size: each query keeps only this many of the keys that it may see (by attn_mask, and
            by causality when is_causal): those with the highest attn_bias. Of two equal biases the
            later key is kept, and keys whose bias is NaN or -inf are never kept. attn_bias must
            then be ({B|1}, {H|HK|1}, {Sq|1}, Sk) or ({B|1}, {H|HK|1}, Sk). The choice itself is not
            differentiated; the bias of the kept keys is. Time grows with Sq * window_size, and
            nothing of size Sq * Sk is formed, unless attn_mask or attn_bias differs between query
            rows: then a mask of that size is made, which is a slow path. If Sk <= window_size,
            nothing is chosen: a row keeps all keys that it may see, except those whose bias is NaN
            or -inf.
        return_lse: also return the log-sum-exp of each row.
        backend: one of the names in `get_available_backends`, to insist on that backend; None for
            the first backend that can compute the call.
        selection: which keys each row keeps, instead of window_size: from `select_keys`, to share
            one choice among calls, or from `KeySelection.from_intervals`. Keys that attn_mask hides
            are then not attended to, but they are not replaced by others either. attn_bias may
            be ({B|1}, {H|HK|1}, Sk) as well. It is a slow path if attn_mask differs between query
            rows, or if attn_bias does and requires a gradient: a mask of size Sq * Sk is made.
        sinks: floating (H,), a learned logit of each query head that takes part in the softmax of
            each row as if it were one more key, whose value is 0: out is multiplied by
            sigmoid(lse - sinks), and lse becomes logaddexp(lse, sinks). A row that keeps no key
            then has out = 0 and lse = sinks. A sink of -inf is the same as no sink.
        return_attn_probs: also return the probabilities, for testing. They are computed apart, in
            float64 and with memory of Sq * Sk per head, and carry no gradient. With sinks they do
            not add up to 1. Cannot be combined with `state`.
        state: what `return_state` gave for the tokens before these, to attend to a long sequence
            stretch by stretch: the rows attend to the keys of the state and to those of their own
            stretch, exactly as in the whole sequence, forward and backward. None for the first
            stretch. Needs window_size, is_causal, one score per key in attn_bias, an attn_mask (if
            any) that is the same for all queries, and Sq at most Sk. Row i stands at position
            i + Sk - Sq of the stretch. The keys of the state are copied in front of key and value,
            and the rows choose among these window_size + Sk keys.
        return_state: also return the `KeyState` of all tokens up to the end of this stretch. Needs
            what `state` needs.
        cu_seqlens: boundaries of packed documents, in non-decreasing order: an int32 or int64
            tensor of one dimension on any device, or a sequence of ints. They count from the first
            token of the whole sequence (which is state.seen tokens before this stretch) and hold
            for every batch entry. A row chooses, and sees, only keys of its own document.
            Boundaries outside this stretch have no effect. Needs what `state` needs, Sq = Sk, and
            the same state.seen for every batch entry.
        out: where to write the output, like the `out` of torch's functions: a tensor of the
            output's exact shape, dtype and device, of any strides with a contiguous head_dim, such
            as a slice of a larger tensor. It is for calls without gradients, outside of
            torch.compile and torch.func, and with plain tensors (no DTensor). No operand may share
            its memory. The CUDA kernels write there without a copy. Otherwise the output is
            computed elsewhere and copied, which is a slow path: with other backends, if Dv is not
            D, if head_dim is no multiple of 8, and if the rows of `out` do not start at multiples
            of 16 bytes (unless Sq = 1).

    Under torch.autocast for the device of query, query, key and value are cast to its dtype, except
    those of float64, and so is attn_bias unless it is float32. The arithmetic stays in float32.
    Finite operands may still give INF or NaN where their dot products exceed float32.

    Returns:
        out (B, Sq, H, Dv) in the dtype of query: contiguous, or the tensor given as `out`. With
        return_lse, return_attn_probs or return_state a tuple of out and what was asked for, in this
        order: lse (B, H, Sq), with the natural logarithm, differentiable; the probabilities
        (B, H, Sq, Sk); and the `KeyState`. lse and probabilities are float32, or float64 for
        float64 inputs.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a layout, shape, stride, device or number does not fit, there is no backend of
            that name, or no backend takes such arguments.
        RuntimeError: the backend cannot run on this machine (on CUDA: the compiled kernels are
            missing or of another version, or the GPU is older than sm_80), or second or
            forward-mode derivatives are asked for.
    """
    chooses = window_size is not None or selection is not None
    bias = _four_dimensional(attn_bias) if chooses else attn_bias  # the form that kinds are told by
    operands = (query, key, value, attn_mask, bias, sinks)
    # These two flags are not a part of a call's kind, so they are checked in every call.
    if return_lse is not False and return_lse is not True:
        return_lse = check_bool("return_lse", return_lse)
    if return_attn_probs is not False and return_attn_probs is not True:
        return_attn_probs = check_bool("return_attn_probs", return_attn_probs)
    kind, stretch = None, None
    if cu_seqlens is None:
        options = (
            *(softmax_scale, is_causal, softcap, deterministic, window_size, backend),
            return_state,
        )
        kind = (
            kind_of_call(operands, options)
            if state is None and selection is None and out is None
            else _kind_beside(operands, options, state, selection, out)
        )
    _check_probs(return_attn_probs, state)
    known = recall(kind) if out is None else _recall_beside(kind, operands, state, selection, out)
    lse: Tensor | None
    if known is None:
        (problem, _), stretch = _checked_call(
            query,
            key,
            value,
            attn_mask,
            attn_bias,
            window_size,
            selection,
            state,
            return_state,
            cu_seqlens,
            out,
            sinks=sinks,
            softmax_scale=softmax_scale,
            is_causal=is_causal,
            softcap=softcap,
            deterministic=deterministic,
        )
        room = _room_for_state(stretch, problem, backend) if return_state else None
        found, lse = _attend(problem, backend, out)
        if kind is not None and (selection is None or keeps_as_given(problem, selection)):
            remember(kind, operands, problem, backend, window_size if stretch is None else None)
    elif (
        known.prepared is not None
        and (window_size is None or known.window is not None)
        and not return_attn_probs
    ):
        given = known.with_lists(operands, None if selection is None else selection.lists)
        found, lse = attend_prepared(known.prepared, given, return_lse, out)
        return (found, lse) if return_lse else found
    else:
        problem, stretch = _known_problem(
            known.problem(operands), window_size, attn_bias, selection, state, return_state
        )
        room = _room_for_state(stretch, problem, backend) if return_state else None
        if problem.key_lists is None or leading_rows(problem) == 0:
            found, lse = attend_directly(problem, known.backend, return_lse, known.prepared, out)
        else:
            found, lse = _attend(problem, backend, out)
    if not (return_lse or return_attn_probs or return_state):
        return found
    state_behind = None
    if return_state:
        assert stretch is not None
        state_behind = stretch.state_behind(problem, room)
    result: tuple[Any, ...] = (found, lse) if return_lse else (found,)
    if return_attn_probs:
        result = (*result, _probabilities(problem))
    return result if state_behind is None else (*result, state_behind)


def _room_for_state(
    stretch: Stretch | None, problem: Problem, backend: str | None
) -> KeptKeys | None:
    """Memory for the state behind a call, if the state may be computed while the attention runs.

    None if that is not allowed: other GPU backends than "cuda" may have kernels that let the next
    kernel start too early. They compute a call if the caller names one, or if the operands are
    wider than 16 bits.
    """
    if stretch is None or (problem.q.is_cuda and problem.q.element_size() > 2):
        return None
    return stretch.room_for_state(problem) if backend in (None, "cuda", "cpu") else None


def _kind_beside(
    operands: tuple[Any, ...], options: tuple[Any, ...], state: Any, selection: Any, out: Any
) -> Kind | None:
    """`kind_of_call` for a call with a state, a selection or an output given by the caller.

    None where the arguments are ones that the checks have to refuse.
    """
    kind = None
    if state is None and selection is None:
        kind = kind_of_call(operands, options)
    elif selection is None and type(state) is KeyState:
        kind = kind_of_call(operands, options, more=tensors_of(state))
    elif state is None and type(selection) is KeySelection:
        s = selection
        about = (s.window_size, s.is_causal, s.first_row, s.is_sliding, s.keeps_own)
        kind = kind_of_call(operands, (*options, *about), more=s.lists)
    return kind if out is None else kind_with_out(kind, out)


def _recall_beside(
    kind: Kind | None, operands: tuple[Any, ...], state: Any, selection: Any, out: Tensor
) -> Known | None:
    """`recall` for a call with `out`; checks what the kind of a call does not say of `out`."""
    known = recall(kind)
    if known is not None:
        check_memory_of_out(out, operands, *_read_beside(state, selection))
    return known


def _read_beside(
    state: Any, selection: Any, cu_seqlens: Any = None
) -> tuple[tuple[Tensor, ...], str]:
    """The tensors that a call reads besides its operands, and the names of their arguments."""
    tensors: tuple[Tensor, ...] = ()
    if isinstance(state, KeyState):
        tensors = tensors_of(state)
    elif isinstance(selection, KeySelection):
        tensors = selection.lists
    if isinstance(cu_seqlens, Tensor):
        tensors = (*tensors, cu_seqlens)
    return tensors, "state, selection or cu_seqlens"


def _known_problem(
    problem: Problem,
    window_size: int | None,
    attn_bias: Tensor | None,
    selection: KeySelection | None,
    state: KeyState | None,
    return_state: bool,
) -> tuple[Problem, Stretch | None]:
    """`_checked_call` for arguments of a known kind, which need no checks."""
    stretch = None
    if selection is not None:
        return problem.with_lists(selection.lists, problem.sliding, problem.keeps_own), None
    if state is not None or return_state:
        assert window_size is not None  # as the checks have seen
        stretch = known_stretch(problem, state, window_size)
        if stretch.needs_keys():
            return stretch.with_keys(), stretch
    if window_size is not None:
        problem, _ = keep_window(problem, window_size, attn_bias, is_known=True)
    return problem, stretch


def explain(*arguments: Any, **options: Any) -> str:
    """Which backend `flash_dmattn_func` would use, why not the others, and what makes it slow.

    Takes the arguments of that function. Nothing is computed except the choice of keys, if there is
    a window_size. For packed sequences there is `explain_varlen`.

    Returns:
        Some lines of text, for reading.

    Raises:
        TypeError, ValueError: as `flash_dmattn_func`, except for what only some backends refuse,
            which is part of the text.
    """
    given = inspect.signature(flash_dmattn_func).bind(*arguments, **options)
    given.apply_defaults()
    named = dict(given.arguments)
    wanted = named.pop("backend")
    check_bool("return_lse", named.pop("return_lse"))
    has_probs = check_bool("return_attn_probs", named.pop("return_attn_probs"))
    _check_probs(has_probs, named["state"])
    (problem, slow), _ = _checked_call(**named)
    notes = (*slow, *slow_paths(problem, named["window_size"], has_probs))
    return registry.explain(with_one_head_dim(problem), wanted, notes, named["out"])


def _check_probs(return_attn_probs: bool, state: Any) -> None:
    if return_attn_probs and state is not None:
        raise ValueError("return_attn_probs: got True beside state, wanted False")


def flash_dmattn_func_auto(backend: str | None = None) -> Callable[..., Any]:
    """`flash_dmattn_func`, bound to a backend.

    Args:
        backend: one of `get_available_backends`, or None to go by the tensors of each call.

    Returns:
        A callable with the signature of `flash_dmattn_func`.

    Raises:
        TypeError: backend is no string.
        ValueError: there is no such backend.
        RuntimeError: that backend cannot run on this machine; the message says why.
    """
    if backend is None:
        return flash_dmattn_func
    chosen = registry.named(backend)
    reason = registry.why_unavailable(chosen)
    if reason is not None:
        raise registry.unusable(chosen, reason)
    return functools.partial(flash_dmattn_func, backend=backend)


def problem_with_keys_chosen(*arguments: Any, **settings: Any) -> Problem:
    """The checked problem of a call of `flash_dmattn_func` without `state` and `cu_seqlens`.

    Takes the arguments of `_checked_call`.
    """
    (problem, _), _ = _checked_call(*arguments, **settings)
    return problem


def _checked_call(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    attn_bias: Any,
    window_size: Any,
    selection: Any,
    state: Any = None,
    return_state: Any = False,
    cu_seqlens: Any = None,
    out: Any = None,
    **settings: Any,
) -> tuple[Kept, Stretch | None]:
    """The checked problem of the arguments of `flash_dmattn_func`, with its keys chosen.

    Also returns the stretch, from which the state behind the call is made, if any of `state`,
    `return_state` and `cu_seqlens` is given.
    """
    is_stretch = check_bool("return_state", return_state)
    is_stretch |= state is not None or cu_seqlens is not None
    if is_stretch and window_size is None:
        documents = (
            "; for packed documents without a window pass "
            "selection=dmattn.packed_documents(cu_seqlens)"
        )
        raise ValueError(
            "window_size: got None, wanted an int with state, return_state or cu_seqlens"
            + (documents if cu_seqlens is not None else "")
        )
    window = None
    if window_size is not None:
        if selection is not None:
            raise ValueError("window_size: got a value beside selection, wanted one of them")
        window = check_window_size(window_size)
        check_scores(attn_bias)
    if selection is not None:
        check_selection(selection)
    given = attn_bias
    if window is not None or selection is not None:
        attn_bias = _four_dimensional(attn_bias)
    problem = checked_problem(query, key, value, attn_mask, attn_bias, **settings)
    if out is not None:  # checked first, as choosing keys takes time
        operands = (query, key, value, attn_mask, given, settings["sinks"])
        check_out(out, problem, operands, *_read_beside(state, selection, cu_seqlens))
    if is_stretch:
        assert window is not None
        stretch = checked_stretch(problem, state, window, cu_seqlens)
        if stretch.needs_keys():
            return (stretch.with_keys(), ()), stretch
        return keep_window(problem, window, given), stretch
    if window is not None:
        return keep_window(problem, window, given), None
    if selection is not None:
        return keep_selection(problem, selection), None
    return (problem, ()), None


def _four_dimensional(bias: Any) -> Any:
    """A bias ({B|1}, {H|HK|1}, Sk) with a row dimension of size 1 inserted; others unchanged."""
    return bias.unsqueeze(2) if isinstance(bias, Tensor) and bias.dim() == 3 else bias


def _attend(
    problem: Problem, backend: str | None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse of a problem with its keys chosen.

    Over causal key lists, rows in front of the first key (Sq > Sk) keep nothing; they are left out
    of the attention and filled in afterwards.
    """
    skip = leading_rows(problem)
    if skip == 0:
        return attend(problem, backend, out)
    problem = without_leading_rows(problem)
    found, lse = attend(problem, backend, None if out is None else out[:, skip:])
    if out is None:
        out = torch.nn.functional.pad(found, (0, 0, 0, 0, skip, 0))
    else:
        out[:, :skip] = 0
    lse = torch.cat((lse_of_no_key(problem).expand(*lse.shape[:2], skip), lse), 2)
    return out, lse


@torch.no_grad()
def _probabilities(problem: Problem) -> Tensor:
    """(B, H, Sq, Sk): the attention probabilities, by the definition in `dmattn.reference`."""
    mask, first_row = problem.mask, problem.k.shape[1] - problem.q.shape[1]
    if problem.key_lists is not None:
        mask = KeySelection(*problem.key_lists, None, problem.is_causal, first_row).to_mask()
    exact = reference_attention(
        problem.q,
        problem.k,
        problem.v,
        mask,
        problem.bias,
        problem.softmax_scale,
        problem.is_causal,
        problem.softcap,
        sinks=problem.sinks,
    )
    return exact.probs.to(lse_dtype(problem.q.dtype))
