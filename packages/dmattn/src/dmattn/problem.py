"""One attention problem: what every stage from the public functions to the backends hands on.

A public function builds it once, `dmattn.checks.check` looks at it once, and everything after that
trusts it. Letters: B batch, Sq/Sk query/key length, Tq/Tk rows/keys of all packed sequences
together, H query heads, HK key/value heads, D head dimension.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn.key_lists import Selection


class Packing(NamedTuple):
    """Where sequences lie that are packed one after the other.

    Sequence b has rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 and keys likewise.
    """

    cu_seqlens_q: Tensor  # int32 (sequences + 1,)
    cu_seqlens_k: Tensor  # int32 (sequences + 1,)
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Operands and settings of one attention call.

    The settings, from `softmax_scale` on to those before `packing`, are plain numbers and flags. A
    setting that is added here with a default is an argument of the operators at once.

    Attributes:
        q: (B, Sq, H, D), or packed (Tq, H, D).
        k, v: (B, Sk, HK, D), or packed (Tk, HK, D), in the dtype of q.
        mask: bool ({B|1}, {H|HK|1}, {Sq|1}, {Sk|1}), or packed ({H|HK|1}, Tk) or
            ({H|HK|1}, Tq, max_seqlen_k); None = all keys.
        bias: the dtype of q, or float32; shapes as mask; None = 0.
        softmax_scale: factor of the dot products.
        is_causal: whether row i sees only the keys up to position i + Sk - Sq.
        softcap: c > 0 turns the scaled dot product x into c * tanh(x / c); 0 leaves it.
        deterministic: whether the backward must be bitwise repeatable.
        packing: of packed sequences, else None.
        key_lists: the keys that each block of rows keeps, instead of a mask; else None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    softmax_scale: float = 1.0
    is_causal: bool = False
    softcap: float = 0.0
    deterministic: bool = False
    packing: Packing | None = None
    key_lists: Selection | None = None

    @property
    def has_keys(self) -> bool:
        """Whether there is any key for any row."""
        return self.k.shape[-3] > 0

    @property
    def has_rows(self) -> bool:
        """Whether there is any row to compute."""
        return self.q.shape[-3] > 0 and self.q.shape[0] > 0

    def flat(self) -> tuple[Any, ...]:
        """All fields one after the other, in the order of `FLAT_NAMES`."""
        return (
            *(self.q, self.k, self.v, self.mask, self.bias),
            *[getattr(self, name) for name in SETTINGS],
            *(self.key_lists or _NO_LISTS),
            *(self.packing or _NO_PACKING),
        )

    @staticmethod
    def from_flat(values: Sequence[Any]) -> "Problem":
        """The problem of which these are the `flat` values."""
        lists, packing = values[_LISTS], Packing(*values[_PACKING])
        parts = (
            None if packing.cu_seqlens_q is None else packing,
            None if lists[0] is None else Selection(*lists),
        )
        return Problem(*values[: _LISTS.start], *parts)  # type: ignore[call-arg]  # by position

    def split(self) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
        """The tensors, and all else: autograd has to save the tensors itself."""
        flat = self.flat()
        return flat[:5] + flat[_SAVED], flat[5 : _LISTS.start] + flat[_BOUNDS]

    @staticmethod
    def join(tensors: Sequence[Tensor | None], rest: Sequence[Any]) -> "Problem":
        """The problem of which these are the parts that `split` made."""
        return Problem.from_flat((*tensors[:5], *rest[:-2], *tensors[5:], *rest[-2:]))


_NO_LISTS = (None,) * len(Selection._fields)
_NO_PACKING = (None, None, 0, 0)

FIELDS = {field.name: field for field in dataclasses.fields(Problem)}
# The plain settings: what stands between the operands and what may be packed or listed.
SETTINGS = tuple(FIELDS)[5:-2]
FLAT_NAMES = (
    *tuple(FIELDS)[:5],
    *SETTINGS,
    *(f"sel_{name}" for name in Selection._fields),
    *Packing._fields,
)
# Where things are among the flat values.
_LISTS = slice(5 + len(SETTINGS), 5 + len(SETTINGS) + len(Selection._fields))
_PACKING = slice(_LISTS.stop, _LISTS.stop + len(Packing._fields))
_SAVED = slice(_LISTS.start, _LISTS.stop + 2)  # the lists and both cu_seqlens
_BOUNDS = slice(_LISTS.stop + 2, _PACKING.stop)  # both max_seqlens


class Needs(NamedTuple):
    """Which gradients a backward call has to compute."""

    q: bool
    k: bool
    v: bool
    bias: bool


class Results(NamedTuple):
    """What a forward call returns, and its backward starts from."""

    out: Tensor  # as q, contiguous
    lse: Tensor  # (B, H, Sq), or packed (H, Tq): float32, or float64 for float64 inputs
    # What the rounding of lse to float32 dropped, as lse; (0,) where the backward does not read it.
    lse_rest: Tensor


class Gradients(NamedTuple):
    """Gradients of the operands in their own shapes and dtypes; (0,) where not needed."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the log-sum-exp, and of all arithmetic, for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """(B, H, Sq) for q of shape (B, Sq, H, D), (H, Tq) for packed sequences (Tq, H, D)."""
    return (*q.shape[:-3], q.shape[-2], q.shape[-3])


def is_per_key(operand: Tensor) -> bool:
    """Whether a packed mask or bias is the same for all rows of a sequence: (heads, Tk)."""
    return operand.dim() == 2


def empty_results(problem: Problem) -> Results:
    """Uninitialised results in the shapes that every backend returns.

    lse_rest has the shape of lse where the CUDA backward reads it, else (0,): that backward starts
    from lse, and only a bias makes logits so large that the rounding of lse shows.
    """
    q = problem.q
    shape = lse_shape(q)
    rest = shape if problem.bias is not None and q.is_cuda else (0,)
    return Results(
        q.new_empty(q.shape),
        q.new_empty(shape, dtype=lse_dtype(q.dtype)),
        q.new_empty(rest, dtype=torch.float32),
    )


def empty_gradients(problem: Problem, needs: Needs) -> Gradients:
    """Uninitialised gradients: contiguous, in the operand's shape and dtype where needed.

    One that is not needed, or that of a bias that is not there, has shape (0,).
    """
    q, k, v, bias = problem.q, problem.k, problem.v, problem.bias
    return Gradients(
        q.new_empty(q.shape if needs.q else (0,)),
        k.new_empty(k.shape if needs.k else (0,)),
        v.new_empty(v.shape if needs.v else (0,)),
        q.new_empty((0,)) if bias is None else bias.new_empty(bias.shape if needs.bias else (0,)),
    )
