"""Packed sequences on the CPU: each sequence is computed as a problem of batch 1."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from dmattn.checks import read_packing
from dmattn.problem import Gradients, Needs, Problem, is_per_key


class Part(NamedTuple):
    """One sequence of a packed problem, with the slices of all rows and keys that belong to it."""

    problem: Problem
    rows: slice
    keys: slice

    def rows_of(self, t: Tensor) -> Tensor:
        """(Tq, H, D) -> (1, Sq, H, D), a view."""
        return t[None, self.rows]

    def lse_of(self, t: Tensor) -> Tensor:
        """(H, Tq) -> (1, H, Sq), a view."""
        return t[None, :, self.rows]

    def gradients_of(self, grads: Gradients, needs: Needs) -> Gradients:
        """Views of the gradients of all sequences, to write those of this sequence to.

        Gradients that are not needed keep their shape (0,).
        """
        return Gradients(
            grads.q[None, self.rows] if needs.q else grads.q,
            grads.k[None, self.keys] if needs.k else grads.k,
            grads.v[None, self.keys] if needs.v else grads.v,
            _operand(grads.bias, self.rows, self.keys) if grads.bias.dim() > 1 else grads.bias,
        )


def sequences(problem: Problem) -> Iterator[Part]:
    """The sequences of a packed problem.

    Raises:
        ValueError: cu_seqlens do not rise from 0 to the number of tokens, or a sequence is longer
            than max_seqlen_q or max_seqlen_k.
    """
    packing = problem.packing
    assert packing is not None
    total_q, total_k = problem.q.shape[0], problem.k.shape[0]
    row_bounds, key_bounds = read_packing(packing, total_q, total_k)
    for row, key in zip(
        itertools.pairwise(row_bounds), itertools.pairwise(key_bounds), strict=True
    ):
        rows, keys = slice(*row), slice(*key)
        part = problem._replace(
            q=problem.q[None, rows],
            k=problem.k[None, keys],
            v=problem.v[None, keys],
            mask=None if problem.mask is None else _operand(problem.mask, rows, keys),
            bias=None if problem.bias is None else _operand(problem.bias, rows, keys),
            packing=None,
        )
        yield Part(part, rows, keys)


def _operand(t: Tensor, rows: slice, keys: slice) -> Tensor:
    """The part of a packed mask, bias or dbias for one sequence: (1, heads, 1 or rows, keys).

    A view.
    """
    if is_per_key(t):
        return t[None, :, None, keys]
    return t[None, :, rows, : keys.stop - keys.start]
