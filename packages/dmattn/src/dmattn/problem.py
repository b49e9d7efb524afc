"""One attention problem: what every stage from the public functions to the backends hands on.

Letters: B batch, Sq/Sk query/key length, Tq/Tk rows/keys of all packed sequences together, H query
heads, HK key/value heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    """Operands and settings of one attention call, checked and normalised.

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


def as_needs(needs: Sequence[bool]) -> Needs:
    """The four flags of an operator call by name."""
    return Needs(*needs)
