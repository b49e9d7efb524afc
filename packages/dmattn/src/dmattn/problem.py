"""One attention problem: what every stage from the public functions to the backends hands on.

A public function builds it once, `dmattn.checks.check` looks at it once, and everything after that
trusts it. Letters: B batch, Sq/Sk query/key length, Tq/Tk rows/keys of all packed sequences
together, H query heads, HK key/value heads, D head dimension.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dmattn.key_lists import Selection
from dmattn.validation import check_bool, check_float32


class Packing(NamedTuple):
    """Where sequences lie that are packed one after the other.

    Sequence b has rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 and keys likewise.
    """

    cu_seqlens_q: Tensor  # int32 (sequences + 1,)
    cu_seqlens_k: Tensor  # int32 (sequences + 1,)
    max_seqlen_q: int
    max_seqlen_k: int


class Problem(NamedTuple):
    """Operands and settings of one attention call.

    The settings, from `softmax_scale` to what stands before `packing`, are plain numbers and flags.
    One that is added there, with a default, is an argument of the operators at once;
    `kernel_settings` and `checked_settings` say how kernels and callers give it.

    Attributes:
        q: (B, Sq, H, D), or packed (Tq, H, D).
        k, v: (B, Sk, HK, D), or packed (Tk, HK, D), in the dtype of q. Of v, D may be another one;
            operators and backends get problems with a single one.
        mask: bool ({B|1}, {H|HK|1}, {Sq|1}, {Sk|1}), or packed ({H|HK|1}, Tk) or
            ({H|HK|1}, Tq, max_seqlen_k); None = all keys.
        bias: the dtype of q, or float32; shapes as mask; None = 0.
        sinks: floating (H,), a logit of each query head that takes part in the softmax of its rows
            and has no value; None = none. `dmattn.backends.sinks` says who computes them.
        softmax_scale: factor of the dot products.
        is_causal: whether row i sees only the keys up to position i + Sk - Sq.
        softcap: c > 0 turns the scaled dot product x into c * tanh(x / c); 0 leaves it.
        deterministic: whether the backward must be bitwise repeatable.
        packing: of packed sequences, else None.
        key_lists: the keys that each block of rows keeps, instead of a mask; else None.
        sliding: of causal key_lists, what is known without reading them: w > 0 means that the row
            at position r keeps the keys r - w < j <= r and no others. 0 means nothing.
        keeps_own: likewise, whether every row keeps the key at its own position, if there is one.
            False means nothing.
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
        """From `softmax_scale` to what stands before `packing`."""
        return self[_OPERANDS:_SIMPLE]

    @property
    def kernel_settings(self) -> tuple[float, float, bool]:
        """Those of forward and backward both, in the order in which compiled kernels take them."""
        return self.softmax_scale, self.softcap, self.is_causal

    def replace(self, **changes: Any) -> "Problem":
        """With other values in these fields; `_replace`, which older torch cannot compile."""
        return Problem(**{**dict(zip(Problem._fields, self, strict=True)), **changes})

    def with_lists(self, lists: Selection, sliding: int = 0, keeps_own: bool = False) -> "Problem":
        """With key lists in the place of a mask; in less time than `replace`, as for each call."""
        given: tuple[Any, ...] = (*self,)  # older torch cannot compile a slice of a named tuple
        known = (sliding, keeps_own, self.packing, lists)
        fields: tuple[Any, ...] = (*given[:3], None, *given[4:_KNOWN_OF_LISTS], *known)
        return Problem(*fields)

    def without_lists(self, mask: Tensor) -> "Problem":
        """With a mask in the place of key lists."""
        return self.replace(mask=mask, key_lists=None, sliding=0, keeps_own=False)

    def flat(self) -> tuple[Any, ...]:
        """All fields one after the other, in the order of `FLAT_NAMES`."""
        *simple, packing, lists = self
        return (*simple, *(lists or _NO_LISTS), *(packing or NO_PACKING))

    @staticmethod
    def from_flat(values: Sequence[Any]) -> "Problem":
        """The problem of which these are the `flat` values."""
        lists, packing = values[_SIMPLE:_LISTED], values[_LISTED:]
        parts = (
            None if packing[0] is None else Packing(*packing),
            None if lists[0] is None else Selection(*lists),
        )
        return Problem._make((*values[:_SIMPLE], *parts))

    def split(self) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
        """The tensors, and all else: autograd has to save the tensors itself."""
        lists, packing = self.key_lists, self.packing
        return (
            (*self[:_OPERANDS], *(lists or ()), *(packing[:2] if packing else ())),
            (self.settings, lists is not None, packing and packing[2:]),
        )

    @staticmethod
    def join(tensors: Sequence[Tensor | None], rest: Sequence[Any]) -> "Problem":
        """The problem of which these are the parts that `split` made."""
        settings, has_lists, longest = rest
        lists = Selection._make(tensors[_OPERANDS:_TENSORS_LISTED]) if has_lists else None
        packing = Packing._make((*tensors[-2:], *longest)) if longest else None
        return Problem._make((*tensors[:_OPERANDS], *settings, packing, lists))


def checked_settings(is_causal: Any, softcap: Any, deterministic: Any) -> tuple[bool, float, bool]:
    """What a caller gave for the settings behind `softmax_scale`, in the order of the fields.

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
_SIMPLE = len(Problem._fields) - 2  # and settings; packing and key_lists have parts of their own
_KNOWN_OF_LISTS = _SIMPLE - 2  # settings before those that speak of key lists
_LISTED = _SIMPLE + len(Selection._fields)
_TENSORS_LISTED = _OPERANDS + len(Selection._fields)
_NO_LISTS = (None,) * len(Selection._fields)
NO_PACKING = (None, None, 0, 0)  # in the place of the fields of a `Packing`

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
    """What a forward call returns, and its backward starts from."""

    out: Tensor  # as q, contiguous
    lse: Tensor  # (B, H, Sq), or packed (H, Tq): float32, or float64 for float64 inputs
    # What the rounding of lse to float32 dropped, as lse: backwards start from it, and sinks beside
    # a bias are weighed by it. (0,) or None where nobody reads it.
    lse_rest: Tensor | None


class Gradients(NamedTuple):
    """Gradients of the operands in their own shapes and dtypes; (0,) where not needed.

    That of the sinks is no business of backends: None where it is not needed.
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
    """(H, 1): lse of a row that keeps no key, which is the sink, or -inf without sinks.

    Differentiable by the sinks. One of -inf means none, and gets no gradient.
    """
    q, sinks = problem.q, problem.sinks
    dtype = lse_dtype(q.dtype)
    if sinks is not None:
        return sinks.to(dtype).where(sinks != -torch.inf, -torch.inf)[:, None]
    return q.new_full((q.shape[-2], 1), -torch.inf, dtype=dtype)


def with_one_head_dim(problem: Problem) -> Problem:
    """The problem with zeros appended to q and k, or to v, whichever has the smaller head_dim.

    Zeros change no dot product, and make further columns of out that are to be cut off.
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
    """Results in the shapes of the operator's; out and lse uninitialised."""
    q = problem.q
    lse = q.new_empty(lse_shape(q), dtype=lse_dtype(q.dtype))
    return Results(_empty_like(q), lse, zero_lse_rest(problem))


def zero_lse_rest(problem: Problem) -> Tensor:
    """lse_rest for results that have none: with a bias zeros in the shape of lse, else (0,).

    The backwards of GPUs start from lse, and only a bias makes logits so large that the rounding of
    lse shows.
    """
    q = problem.q
    shape = lse_shape(q) if problem.bias is not None else (0,)
    return q.new_zeros(shape, dtype=torch.float32)


def empty_gradients(problem: Problem, needs: Needs) -> Gradients:
    """Uninitialised gradients: contiguous, in the operand's shape and dtype where needed.

    One that is not needed, or that of a bias that is not there, has shape (0,).
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
    """Contiguous; takes half the time of new_empty with a shape."""
    return torch.empty_like(t, memory_format=torch.contiguous_format)
