"""What was found for calls that were made before, so that it is not worked out again.

For a small eager call the checks of its arguments and the choice of its backend take longer than
all else that the host does. They look at nothing but the kind of the call: `kind_of_call` collects
what they look at, without judging any of it. A call that went through them without an error, and in
which the dispatcher of torch has no part, is remembered by its kind, and another call of that kind
starts from what was found. Nothing is decided here: a call of an unknown kind is worked out.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn.arguments import is_autocast
from dmattn.backends import registry
from dmattn.backends.base import Backend
from dmattn.dispatch import PLAIN_TYPES, is_direct, nobody_intercepts
from dmattn.problem import Packing, Problem

# A kind takes about 2 KB. Where ever new ones come, such as new lengths, all are forgotten at once.
MOST_KINDS = 1024

Kind = tuple[Any, ...]


class Known(NamedTuple):
    """What was found for the first call of a kind.

    Attributes:
        settings: those of its problem.
        backend: the one that computes it.
        backends: those that it was chosen from.
    """

    settings: tuple[Any, ...]
    backend: Backend
    backends: list[Backend]

    def problem(self, operands: tuple[Any, ...], packing: Packing | None = None) -> Problem:
        """The problem of another call of the kind, of its query, key, value, mask, bias, sinks."""
        return Problem._make((*operands, *self.settings, packing, None))


_known: dict[Kind, Known] = {}


def kind_of_call(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    attn_bias: Any,
    sinks: Any,
    softmax_scale: Any,
    is_causal: Any,
    softcap: Any,
    deterministic: Any,
    window_size: Any,
    backend: Any,
    packing: tuple[Any, Any, Any, Any] | None = None,
) -> Kind | None:
    """All that the checks and the choice of a backend look at; None: not to be remembered.

    Takes what was given for these arguments of `flash_dmattn_func`, whatever it is; for packed
    sequences also what makes a `Packing`. Not remembered are calls that somebody else has to see,
    calls under autocast, which casts operands, and calls with arguments of unusual types: 1 is
    equal to True, and 64.0 to 64, but they are errors where those are none.
    """
    if (
        torch.compiler.is_compiling()
        or not nobody_intercepts()
        or type(query) not in PLAIN_TYPES
        or type(key) not in PLAIN_TYPES
        or type(value) not in PLAIN_TYPES
        or (attn_mask is not None and type(attn_mask) not in PLAIN_TYPES)
        or (attn_bias is not None and type(attn_bias) not in PLAIN_TYPES)
        or (sinks is not None and type(sinks) not in PLAIN_TYPES)
        or (softmax_scale is not None and type(softmax_scale) is not float)
        or type(is_causal) is not bool
        or type(softcap) is not float
        or type(deterministic) is not bool
        or (window_size is not None and type(window_size) is not int)
        or (backend is not None and type(backend) is not str)
        or is_autocast(query)
    ):
        return None
    try:
        packed = None if packing is None else _kind_of_packing(*packing)
        return (
            query.shape,
            query.stride(),
            query.dtype,
            query.device,
            query.is_neg(),
            key.shape,
            key.stride(),
            key.dtype,
            key.device,
            key.is_neg(),
            value.shape,
            value.stride(),
            value.dtype,
            value.device,
            value.is_neg(),
            None if attn_mask is None else _kind_of_tensor(attn_mask),
            None if attn_bias is None else _kind_of_tensor(attn_bias),
            None if sinks is None else _kind_of_tensor(sinks),
            softmax_scale,
            is_causal,
            softcap,
            deterministic or torch.are_deterministic_algorithms_enabled(),
            window_size,
            backend,
            packed,
        )
    except (RuntimeError, _Unusual):  # sparse, nested and mkldnn tensors have no strides
        return None


class _Unusual(Exception):
    """An argument is of a type that is not remembered."""


def _kind_of_tensor(t: Tensor) -> Kind:
    return t.shape, t.stride(), t.dtype, t.device, t.is_neg()


def _kind_of_packing(
    cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any
) -> Kind:
    if (
        type(cu_seqlens_q) not in PLAIN_TYPES
        or type(cu_seqlens_k) not in PLAIN_TYPES
        or type(max_seqlen_q) is not int
        or type(max_seqlen_k) is not int
    ):
        raise _Unusual
    bounds = _kind_of_tensor(cu_seqlens_q), _kind_of_tensor(cu_seqlens_k)
    return (*bounds, max_seqlen_q, max_seqlen_k)


def recall(kind: Kind | None) -> Known | None:
    """What was found for a call of this kind; None where that has to be worked out."""
    if kind is None:
        return None
    known = _known.get(kind)
    return known if known is not None and known.backends == registry.BACKENDS else None


def remember(kind: Kind, operands: tuple[Any, ...], problem: Problem, backend: str | None) -> None:
    """Keep what was found for a call, if it is the same for every call of its kind.

    Args:
        kind: the call's.
        operands: what was given for query, key, value, attn_mask, attn_bias and sinks.
        problem: what came of the call, keys chosen.
        backend: the name of the backend that was insisted on, or None.
    """
    _, key, value, attn_mask, attn_bias, _ = operands
    # Others are viewed in another way first.
    as_given = problem.packing is not None or (
        (attn_mask is None or attn_mask.dim() == 4) and (attn_bias is None or attn_bias.dim() == 4)
    )
    if not as_given or key.shape[-1] != value.shape[-1] or not is_direct(*operands):
        return
    chosen = registry.choose(problem, backend)
    if chosen.goes_by_kind:
        if len(_known) >= MOST_KINDS:
            _known.clear()
        _known[kind] = Known(problem.settings, chosen, list(registry.BACKENDS))


def forget() -> None:
    """As if no call had been made."""
    _known.clear()
