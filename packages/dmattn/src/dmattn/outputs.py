"""Checks of the tensor that a caller gives for the output of attention, `out`.

A backend writes to it while it reads the operands, and autograd, compilers and transforms do not
record that. So it must not share memory with an operand, no gradient may be needed, and the call
must not be compiled or transformed. The kind of a call (`dmattn.known_calls`) covers shape,
strides, dtype, device and type of the tensor. The rest is checked in every call, by
`check_memory_of_out`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dmattn.dispatch import PLAIN_TYPES
from dmattn.problem import Problem
from dmattn.validation import (
    check_same_device,
    check_shape,
    check_tensor,
    check_tensor_dtype,
    in_functorch,
)

_NAMES = ("query", "key", "value", "attn_mask", "attn_bias", "sinks")
# The dimensions of a tensor as (stride in bytes, size), the largest stride first.
_Dims = list[tuple[int, int]]


def check_out(
    out: Any,
    problem: Problem,
    operands: tuple[Any, ...],
    beside: tuple[Any, ...] = (),
    whose: str = "",
) -> None:
    """Check that attention of this problem may write its output into `out`.

    Args:
        out: what the caller gave.
        problem: checked; it has the shape, dtype and device of the output.
        operands: what was given for query, key, value, attn_mask, attn_bias and sinks.
        beside: further tensors that the call reads.
        whose: the argument that those tensors belong to, for error messages.

    Raises:
        TypeError: `out` is no tensor, or has another dtype than the output; `out` or an operand has
            a type other than Tensor and Parameter, or is a negative view.
        ValueError: the call is compiled or transformed; `out` has another shape or device than the
            output, or strides that do not fit; a gradient is needed; or an operand shares memory
            with `out`.
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "out: got a tensor under torch.compile, wanted None there, since a compiled graph has "
            "memory of its own; copy what the call returns, or leave the call out of the graph by "
            "torch.compiler.disable"
        )
    given = check_tensor("out", out, "a torch.Tensor or None")
    if in_functorch():
        raise ValueError(
            "out: got a tensor within a transform of torch.func, wanted None there, since its "
            "tensors may stand for many; copy what the transformed function returns"
        )
    # Some of the tensors in `beside` have not been checked yet.
    beside = tuple(t for t in beside if isinstance(t, Tensor) and t.layout == torch.strided)
    _check_plain(given, (*operands, *beside), whose)
    q = problem.q
    check_tensor_dtype("out", given, (q.dtype,))
    check_same_device("out", given, q.device, "query")
    check_shape("out", given, (*q.shape[:-1], problem.v.shape[-1]))
    _check_strides(given)
    check_memory_of_out(given, operands, beside, whose)


def check_memory_of_out(
    out: Tensor, operands: tuple[Any, ...], beside: tuple[Any, ...] = (), whose: str = ""
) -> None:
    """The part of `check_out` that has to be repeated in each call of a known kind.

    Raises:
        ValueError: a gradient is needed, `out` is an inference tensor that may not be written here,
            or an operand shares memory with it.
    """
    tensors = (*operands, *beside)
    if out.requires_grad:
        raise ValueError("out: got a tensor that requires a gradient, wanted out.detach()")
    if torch.is_grad_enabled():
        for i, t in enumerate(tensors):
            if t is not None and t.requires_grad:
                raise ValueError(
                    f"out: got a tensor although {_name(i, whose)} requires a gradient, wanted "
                    "None, or a call under torch.no_grad()"
                )
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            "out: got a tensor made under torch.inference_mode(), wanted a call under it, too: "
            "elsewhere torch lets nobody write there"
        )
    if out.is_meta or out.numel() == 0:
        return
    start, storage = out.data_ptr(), out.untyped_storage()
    end = storage.data_ptr() + storage.nbytes()
    for i, t in enumerate(tensors):
        # By addresses: two storages may share memory, for example memory of another library.
        if t is None or t.data_ptr() >= end:
            continue
        storage = t.untyped_storage()
        if storage.data_ptr() + storage.nbytes() > start and _share(out, t):
            raise ValueError(
                f"out: got memory that {_name(i, whose)} lies in, wanted memory that no operand "
                "shares: it is written while they are read"
            )


def _name(place: int, whose: str) -> str:
    return _NAMES[place] if place < len(_NAMES) else f"a tensor of {whose}"


def _check_plain(out: Tensor, tensors: Sequence[Any], whose: str) -> None:
    """Raise TypeError unless all are of type Tensor or Parameter and no negative views."""
    for i, t in enumerate((out, *tensors)):
        if t is not None and (type(t) not in PLAIN_TYPES or t.is_neg()):
            kind = type(t).__name__ if type(t) not in PLAIN_TYPES else "negative view"
            of = "" if i == 0 else f" beside {_name(i - 1, whose)}"
            got = f"a {kind}" if i == 0 else f"a tensor{of}, which is a {kind}"
            raise TypeError(
                f"out: got {got}, wanted ordinary tensors for it and for all operands; call on the "
                "parts of this process (to_local() of a DTensor), or copy what the call returns"
            )


def _check_strides(out: Tensor) -> None:
    """Raise ValueError unless head_dim is contiguous and no two elements share memory."""
    if out.numel() == 0:
        return
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise ValueError(
            f"out: got stride {out.stride(-1)} along head_dim, wanted 1; a slice of a larger "
            "tensor along its other dimensions has that"
        )
    extent = 1
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1:
            if stride < extent:
                raise ValueError(
                    f"out: got strides {out.stride()} for shape {tuple(out.shape)}, by which its "
                    "elements overlap, wanted each stride to step over the dimensions of smaller "
                    "strides, as in slices and transposes of a contiguous tensor"
                )
            extent += (size - 1) * stride


def _dims(t: Tensor) -> _Dims:
    """The dimensions of a tensor that has elements, with the bytes of an element as the last one.

    Dimensions of size 1 or stride 0 are left out, as they reach no further memory.
    """
    step = t.element_size()
    found = [
        (n * step, size) for n, size in zip(t.stride(), t.shape, strict=True) if size > 1 and n
    ]
    found.sort(reverse=True)
    return [*found, (1, step)] if step > 1 else found


def _extent(dims: _Dims) -> int:
    """How many bytes lie from the first to the last byte of these dimensions, both included."""
    extent = 1
    for stride, size in dims:
        extent += (size - 1) * stride
    return extent


def _share(a: Tensor, b: Tensor) -> bool:
    return b.numel() > 0 and _meet(a.data_ptr(), _dims(a), b.data_ptr(), _dims(b))


def _meet(a_start: int, a: _Dims, b_start: int, b: _Dims) -> bool:
    """Whether two tensors have a byte in common; also True if that is hard to tell.

    Slices of one buffer, such as the queries and the output of each token in one row, may be
    interleaved without sharing anything. They have the same largest stride, so a pair of rows only
    depends, in how it overlaps, on the distance of the two row indices. It is enough to look at
    those few distances at which rows can meet.
    """
    a_extent, b_extent = _extent(a), _extent(b)
    if a_start + a_extent <= b_start or b_start + b_extent <= a_start:
        return False
    if not a and not b:
        return True
    step = max(dims[0][0] for dims in (a, b) if dims)
    (a_size, a_inner), (b_size, b_inner) = _split(a, step), _split(b, step)
    # Rows whose indices differ by n can only meet if first <= n <= last.
    distance = b_start - a_start
    first = max((distance - _extent(a_inner)) // step + 1, 1 - b_size)
    last = min(-(-(distance + _extent(b_inner)) // step) - 1, a_size - 1)
    if last - first > 1:
        return True  # rows are longer than their stride: not worked out further
    ways = range(first, last + 1)
    return any(_meet(a_start + n * step, a_inner, b_start, b_inner) for n in ways)


def _split(dims: _Dims, step: int) -> tuple[int, _Dims]:
    """The size of the first dimension and the other dimensions, if the first has stride `step`.

    Otherwise size 1 and all dimensions.
    """
    if dims and dims[0][0] == step:
        return dims[0][1], dims[1:]
    return 1, dims
