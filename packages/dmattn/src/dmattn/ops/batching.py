"""The rules of the operators for `torch.func.vmap`: one call for all entries of its dimension.

The entries become further batch entries of the call. If that is not possible they become further
heads: packed sequences have no batch, sinks are the same for the whole batch, and the gradient of a
bias is summed over the batch entries that share it. Query, key and value are then copied, as the
entries and the heads do not lie side by side in memory. Only if the entries have different
boundaries of packed sequences, or of documents, are they computed one after the other.

A rule takes the operator to call and what torch passes to a vmap rule: `info` with the size of the
vmapped dimension, `in_dims` with the index of that dimension in each argument (None: all entries
share the argument), and the arguments. It returns the results, and the index of the vmapped
dimension in each of them.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from dmattn.key_lists import larger
from dmattn.ops.arguments import AXES, BATCH, BWD_NAMES, FWD_NAMES, HEADS, PACKED_AXES
from dmattn.problem import Needs, Results, lse_dtype

MappedResults = tuple[Any, Any]  # a tensor or several, and for each its vmapped dimension or None
# Arguments that are always expanded, so that each entry has its own, even if entries share them:
# the results have the shape of some of these, and each entry has results of its own.
_ALWAYS_OWN = {"q", "k", "v", "dout", "dlse", *Results._fields}


def forward(
    call: Callable[..., Any], info: Any, in_dims: Sequence[Any], *given: Any
) -> MappedResults:
    """The rule of dmattn::fwd."""
    named, dims = (dict(zip(FWD_NAMES, x, strict=False)) for x in (given, in_dims))
    if _have_bounds_of_their_own(dims):
        return one_by_one(call, info, in_dims, *given)
    fold = _Fold(named, dims, info.batch_size)
    found = call(*fold.arguments())
    return _together(
        fold.parted(name, t, "q") for name, t in zip(Results._fields, found, strict=True)
    )


def backward(
    call: Callable[..., Any], info: Any, in_dims: Sequence[Any], *given: Any
) -> MappedResults:
    """The rule of dmattn::bwd.

    Each entry gets gradients of its own, also of operands that the entries share.
    """
    named, dims = (dict(zip(BWD_NAMES, x, strict=False)) for x in (given, in_dims))
    if _have_bounds_of_their_own(dims):
        return one_by_one(call, info, in_dims, *given)
    needs = Needs(*named["needs"])
    fold = _Fold(named, dims, info.batch_size, needs)
    found = call(*fold.arguments())
    return _together(
        fold.parted(name, t, name) if need and named.get(name) is not None else (t, None)
        for name, t, need in zip(Needs._fields, found, needs, strict=True)
    )


def along_batch(
    call: Callable[..., Any], info: Any, in_dims: Sequence[Any], *given: Any
) -> MappedResults:
    """The rule of operators on tensors ({B|1}, ...) and possibly boundaries of documents.

    Boundaries are the only tensors of one dimension, and are the same for the whole batch. Results
    are (B, ...), or of one dimension if they stand for no result.
    """
    found: list[Any] = list(given)
    for i, (t, dim) in enumerate(zip(given, in_dims, strict=True)):
        if isinstance(t, Tensor) and _rank(t, dim) > 1:
            found[i] = _apart(t, dim, 0)
        elif dim is not None:
            return one_by_one(call, info, in_dims, *given)
    tensors = [t for t in found if isinstance(t, Tensor) and t.dim() > 1]
    entries, sizes = info.batch_size, [t.shape[1] for t in tensors]
    batch = 0 if 0 in sizes else reduce(larger, sizes)
    for i, t in enumerate(found):
        if isinstance(t, Tensor) and t.dim() > 1:
            own = batch if t.shape[1] == 1 else t.shape[1]  # the operator refuses what does not fit
            found[i] = t.expand(entries, own, *t.shape[2:]).flatten(0, 1)
    results = call(*found)
    return _together(
        (t.unflatten(0, (entries, batch)), 0) if t.dim() > 1 else (t, None) for t in results
    )


def one_by_one(
    call: Callable[..., Any], info: Any, in_dims: Sequence[Any], *given: Any
) -> MappedResults:
    """The rule of any operator: a call for each entry."""
    _check_some(info.batch_size)
    results = []
    for i in range(info.batch_size):
        pairs = zip(given, in_dims, strict=True)
        results.append(call(*(t.select(d, i) if isinstance(d, int) else t for t, d in pairs)))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return _together((torch.stack(parts), 0) for parts in zip(*results, strict=True))


class _Fold:
    """How the entries of a vmapped dimension become one call of attention.

    Args:
        named: the arguments by name.
        dims: the index of the vmapped dimension in each, or None.
        entries: the size of that dimension.
        needs: the gradients that a backward has to compute; None for a forward.
    """

    def __init__(
        self, named: dict[str, Any], dims: dict[str, Any], entries: int, needs: Needs | None = None
    ) -> None:
        packed = named.get("cu_seqlens_q") is not None
        needed = needs or Needs(*[False] * len(Needs._fields))
        self._named, self._dims, self._entries = named, dims, entries
        self._axes = PACKED_AXES if packed else AXES
        self._own = _ALWAYS_OWN.union(
            name for name, need in zip(Needs._fields, needed, strict=True) if need
        )
        self._along = BATCH
        if packed or dims.get("sinks") is not None or needed.sinks:
            self._along = HEADS
        elif dims.get("bias") is not None or (needed.bias and named.get("bias") is not None):
            # The kernels sum the gradient of a bias that the whole batch shares, in float32: the
            # entries must then become heads, not batch entries.
            shared = self._size("bias") == 1 and self._size("k") != 1
            self._along = HEADS if shared else BATCH
        if self._along == HEADS:
            _check_some(entries)

    def arguments(self) -> list[Any]:
        """The arguments of the one call for all entries."""
        return [self._argument(name, value) for name, value in self._named.items()]

    def parted(self, name: str, result: Tensor, operand: str) -> tuple[Tensor, int | None]:
        """A result of that call with a dimension for the entries, and the index of that dimension.

        Args:
            name: the name of the result, or of the operand whose gradient it is.
            result: of the call. A tensor that stands for no result is returned unchanged.
            operand: the argument whose number of batch entries and heads the result shall have.
        """
        if self._stands_for_none(name, result, None):
            return result, None
        axis, size = self._axis(name), self._size(operand)
        shape = (*result.shape[:axis], self._entries, self._room(size), *result.shape[axis + 1 :])
        parts = result.view(shape)
        if self._room(size) != size:
            given: Tensor = self._named[operand]
            parts = parts.sum(axis + 1, keepdim=True).to(given.dtype)
        return parts, axis

    def _argument(self, name: str, value: Any) -> Any:
        dim = self._dims[name]
        if not isinstance(value, Tensor) or name not in self._axes:
            return value
        if self._stands_for_none(name, value, dim):
            return value.new_empty(0)
        if self._axes[name][self._along] is None:
            return value
        axis, size = self._axis(name), self._size(name)
        if size == 1 and dim is None and name not in self._own and name != "sinks":
            return value  # broadcast over everything; sinks have an entry for each query head
        room = self._room(size)
        if room != size and name == "bias":  # so that its gradient is summed and rounded only once
            value = value.to(lse_dtype(self._named["q"].dtype))
        value = _apart(value, dim, axis)
        sizes = (*value.shape[:axis], self._entries, room, *value.shape[axis + 2 :])
        return value.expand(sizes).flatten(axis, axis + 1)

    def _axis(self, name: str) -> int:
        axis = self._axes[name][self._along]
        assert axis is not None
        return axis

    def _size(self, name: str) -> int:
        """The number of batch entries, or heads, that an argument has for each vmapped entry."""
        axis = self._axis(name)
        return _apart(self._named[name], self._dims[name], axis).shape[axis + 1]

    def _room(self, size: int) -> int:
        """The size of an argument's dimension for each entry in the one call.

        A size of 1 is widened to that of k: arguments of different entries lie side by side in the
        dimension, so nothing in it can be broadcast any more.
        """
        return self._size("k") if size == 1 else size

    def _stands_for_none(self, name: str, t: Tensor, dim: int | None) -> bool:
        return name != "sinks" and _rank(t, dim) < 2


def _apart(t: Tensor, dim: int | None, axis: int) -> Tensor:
    """t with the vmapped dimension moved to `axis`, of size 1 if the entries share the tensor."""
    return t.unsqueeze(axis) if dim is None else t.movedim(dim, axis)


def _check_some(entries: int) -> None:
    if entries == 0:
        raise ValueError(
            "vmap: got a dimension of 0 entries, wanted at least 1 with packed sequences, and "
            "where each entry has its own sinks, boundaries, or bias for the whole batch"
        )


def _rank(t: Tensor, dim: int | None) -> int:
    """The number of dimensions without the vmapped one."""
    return t.dim() - (dim is not None)


def _have_bounds_of_their_own(dims: dict[str, Any]) -> bool:
    """Whether the entries have different boundaries of packed sequences."""
    return dims.get("cu_seqlens_q") is not None or dims.get("cu_seqlens_k") is not None


def _together(results: Iterable[tuple[Tensor, int | None]]) -> MappedResults:
    tensors, dims = zip(*results, strict=True)
    return tensors, dims
