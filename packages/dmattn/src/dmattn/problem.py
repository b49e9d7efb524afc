"""One attention problem: the value that every stage from public functions to backends passes on.

A public function builds it once, `dmattn.checks.check` checks it once, and all later stages rely on
that. Letters: B batch, Sq/Sk query/key length, Tq/Tk number of rows/keys of all packed sequences
together, H query heads, HK key/value heads, D head dimension; {B|1} is a dimension of size B or 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dmattn.key_lists import Selection
from dmattn.validation import check_bool, check_float32


class Packing(NamedTuple):
    """The boundaries of sequences that are packed one after the other.

    Sequence b has the rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 and the keys
    cu_seqlens_k[b] .. cu_seqlens_k[b + 1] - 1.
    """

    cu_seqlens_q: Tensor  # int32 (sequences + 1,)
    cu_seqlens_k: Tensor  # int32 (sequences + 1,)
    max_seqlen_q: int  # no sequence has more rows
    max_seqlen_k: int  # no sequence has more keys


class Problem(NamedTuple):
    """Operands and settings of one attention call.

    The settings, the fields from `softmax_scale` up to the one before `packing`, are plain numbers
    and flags. A setting that is added among them, with a default, becomes an argument of the
    operators by that alone; `kernel_settings` and `checked_settings` say in which form the kernels
    and the callers give it.

    Attributes:
        q: (B, Sq, H, D), or packed (Tq, H, D).
        k, v: (B, Sk, HK, D), or packed (Tk, HK, D), in the dtype of q. The D of v may differ from
            that of q and k here, but not in the problems that operators and backends get: see
            `with_one_head_dim`.
        mask: bool ({B|1}, {H|HK|1}, {Sq|1}, {Sk|1}), or packed ({H|HK|1}, Tk) or
            ({H|HK|1}, Tq, max_seqlen_k); None = all keys.
        bias: the dtype of q, or float32; shapes as mask; None = 0.
        sinks: floating (H,), a logit of each query head that takes part in the softmax of its rows
            and has no value; None = none. `dmattn.backends.sinks` adds them to what a backend
            computes.
        softmax_scale: factor of the dot products.
        is_causal: whether row i sees only the keys up to position i + Sk - Sq.
        softcap: c > 0 turns the scaled dot product x into c * tanh(x / c); 0 leaves it unchanged.
        deterministic: whether the backward must be bitwise repeatable.
        sliding: what the host knows about causal key_lists without reading them: w > 0 means that
            the row at position r keeps the keys r - w < j <= r and no others. 0: not known.
        keeps_own: what the host knows about causal key_lists without reading them: True means that
            every row keeps the key at its own position, if there is one. False: not known.
        packing: the boundaries of packed sequences, else None.
        key_lists: the keys that each block of rows keeps, instead of a mask; else None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    softmax_scale: float = 1.0
    is_causal: bool = False
    softcap: float = 0.0
    deterministic: bool = False
    sliding: int = 0
    keeps_own: bool = False
    packing: Packing | None = None
    key_lists: Selection | None = None

    @property
    def settings(self) -> tuple[Any, ...]:
        """The values of the settings: the fields from `softmax_scale` up to before `packing`."""
        return self[_OPERANDS:_SIMPLE]

    @property
    def kernel_settings(self) -> tuple[float, float, bool]:
        """The settings that forward and backward share, in the order of the compiled kernels."""
        return self.softmax_scale, self.softcap, self.is_causal

    def replace(self, **changes: Any) -> "Problem":
        """A copy with other values in these fields. (Older torch cannot compile `_replace`.)"""
        return Problem(**{**dict(zip(Problem._fields, self, strict=True)), **changes})

    def with_lists(self, lists: Selection, sliding: int = 0, keeps_own: bool = False) -> "Problem":
        """A copy with key lists and no mask; faster than `replace`, as many calls need it."""
        given: tuple[Any, ...] = (*self,)  # older torch cannot compile a slice of a named tuple
        known = (sliding, keeps_own, self.packing, lists)
        fields: tuple[Any, ...] = (*given[:3], None, *given[4:_KNOWN_OF_LISTS], *known)
        return Problem(*fields)

    def without_lists(self, mask: Tensor) -> "Problem":
        """A copy with a mask instead of key lists."""
        return self.replace(mask=mask, key_lists=None, sliding=0, keeps_own=False)

    def flat(self) -> tuple[Any, ...]:
        """All fields one after the other, in the order of `FLAT_NAMES`."""
        *simple, packing, lists = self
        return (*simple, *(lists or _NO_LISTS), *(packing or NO_PACKING))

    @staticmethod
    def from_flat(values: Sequence[Any]) -> "Problem":
        """The inverse of `flat`."""
        lists, packing = values[_SIMPLE:_LISTED], values[_LISTED:]
        parts = (
            None if packing[0] is None else Packing(*packing),
            None if lists[0] is None else Selection(*lists),
        )
        return Problem._make((*values[:_SIMPLE], *parts))

    def split(self) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
        """The tensors, and everything else: autograd has to save the tensors itself."""
        lists, packing = self.key_lists, self.packing
        return (
            (*self[:_OPERANDS], *(lists or ()), *(packing[:2] if packing else ())),
            (self.settings, lists is not None, packing and packing[2:]),
        )

    @staticmethod
    def join(tensors: Sequence[Tensor | None], rest: Sequence[Any]) -> "Problem":
        """The inverse of `split`: the problem with these tensors and everything else."""
        settings, has_lists, longest = rest
        lists = Selection._make(tensors[_OPERANDS:_TENSORS_LISTED]) if has_lists else None
        packing = Packing._make((*tensors[-2:], *longest)) if longest else None
        return Problem._make((*tensors[:_OPERANDS], *settings, packing, lists))


def checked_settings(is_causal: Any, softcap: Any, deterministic: Any) -> tuple[bool, float, bool]:
    """The settings after `softmax_scale` that a caller gives, checked, in the order of the fields.

    `deterministic` is also True if torch.use_deterministic_algorithms(True) is in force.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a number is out of range.
    """
    return (
        check_bool("is_causal", is_causal),
        check_float32("softcap", softcap, 0),
        check_bool("deterministic", deterministic) or torch.are_deterministic_algorithms_enabled(),
    )


_OPERANDS = 6  # fields that are operands: q, k, v, mask, bias, sinks
_SIMPLE = len(Problem._fields) - 2  # operands and settings: all fields but packing and key_lists
_KNOWN_OF_LISTS = _SIMPLE - 2  # the fields before sliding and keeps_own, which describe key lists
_LISTED = _SIMPLE + len(Selection._fields)
_TENSORS_LISTED = _OPERANDS + len(Selection._fields)
_NO_LISTS = (None,) * len(Selection._fields)
NO_PACKING = (None, None, 0, 0)  # stands for the fields of a `Packing` if there is none

SETTINGS = Problem._fields[_OPERANDS:_SIMPLE]
FLAT_NAMES = (
    *Problem._fields[:_SIMPLE],
    *(f"sel_{name}" for name in Selection._fields),
    *Packing._fields,
)


class Needs(NamedTuple):
    """Which gradients a backward call has to compute."""

    q: bool
    k: bool
    v: bool
    bias: bool
    sinks: bool = False


class Results(NamedTuple):
    """The results of a forward call, which its backward starts from."""

    out: Tensor  # shape and dtype of q; contiguous, or the `out` of the caller
    lse: Tensor  # (B, H, Sq), or packed (H, Tq): float32, or float64 for float64 inputs
    # What rounding to float32 dropped from lse, in the shape of lse: lse + lse_rest is the more
    # exact log-sum-exp, from which backwards start, and by which sinks beside a bias are weighed.
    # Of shape (0,), or None, if nothing reads it.
    lse_rest: Tensor | None


class Gradients(NamedTuple):
    """Gradients of the operands in their own shapes and dtypes; of shape (0,) where not needed.

    Backends do not compute the gradient of the sinks; it is None where it is not needed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    sinks: Tensor | None = None


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the log-sum-exp, and of all arithmetic, for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """(B, H, Sq) for q of shape (B, Sq, H, D), (H, Tq) for packed sequences (Tq, H, D)."""
    *batch, rows, nheads, _ = q.shape
    return (*batch, nheads, rows)


def lse_of_no_key(problem: Problem) -> Tensor:
    """(H, 1): the lse of a row that keeps no key: the sink of its head, or -inf without sinks.

    Differentiable with respect to the sinks, except that a sink of -inf, which means that there is
    none, gets no gradient.
    """
    q, sinks = problem.q, problem.sinks
    dtype = lse_dtype(q.dtype)
    if sinks is not None:
        return sinks.to(dtype).where(sinks != -torch.inf, -torch.inf)[:, None]
    return q.new_full((q.shape[-2], 1), -torch.inf, dtype=dtype)


def with_one_head_dim(problem: Problem) -> Problem:
    """The problem with zeros appended to q and k, or to v, whichever has the smaller head_dim.

    Zeros appended to q and k change no dot product. Zeros appended to v give further columns of
    out, which the caller has to cut off.
    """
    q, k, v = problem.q, problem.k, problem.v
    missing = v.shape[-1] - q.shape[-1]
    if missing > 0:
        return problem.replace(q=pad(q, (0, missing)), k=pad(k, (0, missing)))
    return problem.replace(v=pad(v, (0, -missing))) if missing < 0 else problem


def is_per_key(operand: Tensor) -> bool:
    """Whether a packed mask or bias is the same for all rows of a sequence: (heads, Tk)."""
    return operand.dim() == 2


def has_rows(operand: Tensor) -> bool:
    """Whether a mask or bias, dense or packed, may differ between query rows."""
    return operand.shape[2] > 1 if operand.dim() == 4 else not is_per_key(operand)


def empty_results(problem: Problem) -> Results:
    """Results in the shapes that the operator returns; out and lse are uninitialised."""
    q = problem.q
    lse = q.new_empty(lse_shape(q), dtype=lse_dtype(q.dtype))
    return Results(_empty_like(q), lse, zero_lse_rest(problem))


def zero_lse_rest(problem: Problem) -> Tensor:
    """An lse_rest for results without one: with a bias zeros in the shape of lse, else (0,).

    The backwards on GPUs compute probabilities from lse. Only a bias makes logits so large that the
    rounding of lse matters.
    """
    q = problem.q
    shape = lse_shape(q) if problem.bias is not None else (0,)
    return q.new_zeros(shape, dtype=torch.float32)


def empty_gradients(problem: Problem, needs: Needs) -> Gradients:
    """Uninitialised gradients: contiguous, in the operand's shape and dtype where needed.

    A gradient that is not needed, or of a bias that is None, has shape (0,); that of the sinks is
    then None.
    """
    q, k, v, bias, sinks = problem.q, problem.k, problem.v, problem.bias, problem.sinks
    return Gradients(
        _empty_like(q) if needs.q else q.new_empty(0),
        _empty_like(k) if needs.k else q.new_empty(0),
        _empty_like(v) if needs.v else q.new_empty(0),
        (q if bias is None else bias).new_empty(0)
        if bias is None or not needs.bias
        else _empty_like(bias),
        None if sinks is None or not needs.sinks else _empty_like(sinks),
    )


def _empty_like(t: Tensor) -> Tensor:
    """An uninitialised contiguous tensor like t; takes half the time of new_empty with a shape."""
    return torch.empty_like(t, memory_format=torch.contiguous_format)
