"""What was found for calls that were made before, so that it is not worked out again.

For a small eager call the checks of its arguments and the choice of its backend take longer than
all else that the host does. They look at nothing but the kind of the call: `kind_of_call` collects
what they look at, without judging any of it. A call that went through them without an error, and in
which the dispatcher of torch has no part, is remembered by its kind, and another call of that kind
starts from what was found. Nothing is decided here: a call of an unknown kind is worked out.
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

# A kind takes about 2 KB. Once there are so many, as where every call has a new length, all are
# forgotten at once.
MOST_KINDS = 1024

# Values of these types never change, so that a kind stays what it was.
PLAIN_OPTIONS = frozenset({bool, int, float, str, type(None)})

Kind = tuple[Any, ...]


class Known(NamedTuple):
    """What was found for the first call of a kind.

    Attributes:
        settings: those of its problem.
        backend: the one that computes it.
        backends: those that it was chosen from.
        prepared: what the backend offers for all of them, if anything.
        window: chooses the keys of each, where window_size means key lists for attention and
            nothing else; otherwise None.
    """

    settings: tuple[Any, ...]
    backend: Backend
    backends: list[Backend]
    prepared: Prepared | None
    window: KnownWindow | None

    def problem(self, operands: tuple[Any, ...], packing: Packing | None = None) -> Problem:
        """The problem of another call of the kind, of its query, key, value, mask, bias, sinks."""
        return Problem._make((*operands, *self.settings, packing, None))

    def with_lists(self, operands: tuple[Any, ...], lists: Selection | None) -> tuple[Any, ...]:
        """What `attend_prepared` takes for another call of the kind.

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
    """All that the checks and the choice of a backend look at; None: not to be remembered.

    Not remembered are calls that somebody else has to see, and calls under autocast, which casts
    operands.

    Args:
        operands: what was given for query, key, value, attn_mask, attn_bias and sinks.
        options: what was given for every other argument that a check or the choice of a backend
            comes to look at.
        packing: of packed sequences, what makes a `Packing`.
        more: tensors beside the operands: of the `KeyState` or the `KeySelection` of a call.
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
    if kinds is not None and more is not None:  # by itself: one call takes 8 tensors
        of_more = kind_of(PLAIN_TYPES, *more)
        kinds = None if of_more is None else (kinds, of_more)
    if kinds is None or (may_autocast() and (query is None or is_autocast(query))):
        return None
    # 1 is equal to True, and 64.0 to 64, but they may be errors where those are none.
    types = tuple(map(type, options))
    return types, kinds, options, torch.are_deterministic_algorithms_enabled()


def kind_with_out(kind: Kind | None, out: Any) -> Kind | None:
    """The kind of the same call with a tensor for its output; None: not to be remembered.

    By itself, as one call of the compiled module takes 8 tensors, which a call may have already.
    """
    if kind is None:
        return None
    readers = kernels.kind_readers
    of_out = (readers[0] if readers else _kind_of)(PLAIN_TYPES, out)
    return None if of_out is None else (*kind, of_out)


def _kind_of(types: tuple[type, ...], *tensors: Any) -> Kind | None:
    """As `kind_of` of the compiled kernels, which takes a fifth of the time.

    Shape, strides, dtype and device of each tensor or None. None: one is of another type than
    `types`, has no strides, or is a view with another sign.
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
    """What was found for a call of this kind; None where that has to be worked out."""
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
    """Keep what was found for a call, if it is the same for every call of its kind.

    Nothing is kept where the type of an option is none of `PLAIN_OPTIONS`: its value may change
    while the kind of the call stays the same.

    Args:
        kind: the call's.
        operands: what was given for query, key, value, attn_mask, attn_bias and sinks.
        problem: what came of the call, keys chosen.
        backend: the name of the backend that was insisted on, or None.
        window_size: that of the call; None also where a state is made of the keys that it chose.
    """
    types, *_ = kind
    _, key, value, attn_mask, attn_bias, _ = operands
    # Others are viewed in another way first.
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
    """As if no call had been made."""
    _known.clear()
