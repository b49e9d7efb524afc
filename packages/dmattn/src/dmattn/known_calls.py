"""A cache of the results of argument checks and backend choice, by the kind of a call.

For a small eager call the checks of its arguments and the choice of its backend take longer than
everything else that the host does. They depend on nothing but the kind of the call: shapes,
strides, dtypes, devices and options, which `kind_of_call` collects without judging them. A call
that passed the checks, and that does not need torch's dispatcher, is remembered by its kind.
Another call of that kind starts from the remembered results. No rule about arguments is in this
module: a call of an unknown kind goes through the checks as usual.
"""

from typing import Any, NamedTuple

import torch

from dmattn.arguments import is_autocast
from dmattn.backends import registry
from dmattn.backends.base import Backend, Prepared
from dmattn.backends.cuda import kernels
from dmattn.dispatch import PLAIN_TYPES, is_direct, may_autocast, nobody_intercepts
from dmattn.kept_keys import KnownWindow, leading_rows
from dmattn.key_lists import Selection
from dmattn.problem import Packing, Problem

# A kind takes about 2 KB. When this many are stored, as happens if every call has a new length, all
# are forgotten at once.
MOST_KINDS = 1024

# Values of these types are immutable, so a stored kind cannot change.
PLAIN_OPTIONS = frozenset({bool, int, float, str, type(None)})

Kind = tuple[Any, ...]


class Known(NamedTuple):
    """What was found for the first call of a kind.

    Attributes:
        settings: those of the problem of the call.
        backend: the backend that computes it.
        backends: the list of backends from which that one was chosen.
        prepared: what the backend has worked out for all calls of the kind, or None.
        window: makes the key lists of a call with window_size, if lists are all that window_size
            leads to; otherwise None.
    """

    settings: tuple[Any, ...]
    backend: Backend
    backends: list[Backend]
    prepared: Prepared | None
    window: KnownWindow | None

    def problem(self, operands: tuple[Any, ...], packing: Packing | None = None) -> Problem:
        """The problem of another call of the kind.

        Args:
            operands: query, key, value, attn_mask, attn_bias and sinks of that call.
            packing: that of the call, if its sequences are packed.
        """
        return Problem._make((*operands, *self.settings, packing, None))

    def with_lists(self, operands: tuple[Any, ...], lists: Selection | None) -> tuple[Any, ...]:
        """The operands of `attend_prepared` for another call of the kind.

        Args:
            operands: as for `problem`.
            lists: the key lists of the selection that was given, or None.
        """
        query, key, value, attn_mask, attn_bias, _ = operands
        if self.window is not None:
            lists, attn_mask = self.window(attn_bias, attn_mask), None
        return query, key, value, attn_mask, attn_bias, lists


_known: dict[Kind, Known] = {}


def kind_of_call(
    operands: tuple[Any, ...],
    options: tuple[Any, ...],
    packing: tuple[Any, ...] | None = None,
    more: tuple[Any, ...] | None = None,
) -> Kind | None:
    """A hashable value of everything that the checks and the choice of a backend depend on.

    None for calls that are not to be remembered: those that a compiler, a mode or a transform has
    to see, and those under autocast, which casts operands.

    Args:
        operands: what was given for query, key, value, attn_mask, attn_bias and sinks.
        options: what was given for every other argument on which a check or the choice of a backend
            depends.
        packing: for packed sequences, the fields of a `Packing`.
        more: further tensors of the call: those of its `KeyState` or `KeySelection`.
    """
    if torch.compiler.is_compiling() or not nobody_intercepts():
        return None
    tensors = operands
    if packing is not None:
        tensors, options = (*operands, *packing[:2]), (*options, *packing[2:])
    readers = kernels.kind_readers
    kind_of = readers[0] if readers else _kind_of
    kinds = kind_of(PLAIN_TYPES, *tensors)
    query = operands[0]
    if kinds is not None and more is not None:  # in a second call: each takes at most 8 tensors
        of_more = kind_of(PLAIN_TYPES, *more)
        kinds = None if of_more is None else (kinds, of_more)
    if kinds is None or (may_autocast() and (query is None or is_autocast(query))):
        return None
    # 1 == True and 64 == 64.0, but one of them may be an error where the other is not: so types are
    # part of the kind.
    types = tuple(map(type, options))
    return types, kinds, options, torch.are_deterministic_algorithms_enabled()


def kind_with_out(kind: Kind | None, out: Any) -> Kind | None:
    """The kind of the same call with `out` given; None: not to be remembered.

    The output is read in a separate call of the compiled module, which takes at most 8 tensors per
    call: there may already be as many.
    """
    if kind is None:
        return None
    readers = kernels.kind_readers
    of_out = (readers[0] if readers else _kind_of)(PLAIN_TYPES, out)
    return None if of_out is None else (*kind, of_out)


def _kind_of(types: tuple[type, ...], *tensors: Any) -> Kind | None:
    """Shape, strides, dtype and device of each tensor, where a tensor may be None.

    Returns None if a tensor has a type that is not in `types`, has no strides, or is a negative
    view (`Tensor.is_neg`). `kind_of` in the compiled kernels does the same in a fifth of the time.
    """
    kinds: list[Kind | None] = []
    try:
        for t in tensors:
            if t is None:
                kinds.append(None)
            elif type(t) not in types or t.is_neg():
                return None
            else:
                kinds.append((t.shape, t.stride(), t.dtype, t.device))
    except RuntimeError:  # sparse, nested and mkldnn tensors have no strides
        return None
    return tuple(kinds)


def recall(kind: Kind | None) -> Known | None:
    """The results of an earlier call of this kind; None if there are none that can be used."""
    if kind is None:
        return None
    try:
        known = _known.get(kind)
    except TypeError:  # an option that is not hashable, which the checks refuse
        return None
    return known if known is not None and known.backends == registry.BACKENDS else None


def remember(
    kind: Kind,
    operands: tuple[Any, ...],
    problem: Problem,
    backend: str | None,
    window_size: int | None = None,
) -> None:
    """Store the results for a call, if they are the same for every call of its kind.

    Nothing is stored if the type of an option is not in `PLAIN_OPTIONS`: its value might change
    while the kind of the call stays the same.

    Args:
        kind: that of the call.
        operands: what was given for query, key, value, attn_mask, attn_bias and sinks.
        problem: the checked problem of the call, with its keys chosen.
        backend: the name of the backend that the caller insisted on, or None.
        window_size: that of the call; None also if the call makes or takes a state.
    """
    types, *_ = kind
    _, key, value, attn_mask, attn_bias, _ = operands
    # Masks and biases of other ranks are reshaped before they enter a problem.
    as_given = problem.packing is not None or (
        (attn_mask is None or attn_mask.dim() == 4) and (attn_bias is None or attn_bias.dim() == 4)
    )
    same_width = key.shape[-1] == value.shape[-1]
    if not (PLAIN_OPTIONS.issuperset(types) and as_given and same_width and is_direct(*operands)):
        return
    chosen = registry.choose(problem, backend)
    if chosen.goes_by_kind:
        if len(_known) >= MOST_KINDS:
            _known.clear()
        backends, prepared, window = list(registry.BACKENDS), chosen.prepare(problem), None
        if window_size is not None and problem.key_lists is not None:
            window = KnownWindow(problem, window_size) if leading_rows(problem) == 0 else None
        _known[kind] = Known(problem.settings, chosen, backends, prepared, window)


def forget() -> None:
    """Drop all stored results."""
    _known.clear()
