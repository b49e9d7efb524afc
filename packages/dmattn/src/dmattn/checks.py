"""The rules that relate the arguments of one attention call, each written once over `Problem`.

The same checks run in eager calls, in the operators and in their fake implementations. Messages use
the public argument names (query, key, value, attn_mask, attn_bias) and the layouts of the public
functions. Checks run in many calls, so each first tests quickly whether everything is right, and
only if not finds out what is wrong. What only one backend cannot do is checked by that backend.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dmattn.key_lists import Selection, check_boundaries, larger, num_blocks
from dmattn.problem import (
    Needs,
    Packing,
    Problem,
    Results,
    is_per_key,
    lse_dtype,
    lse_shape,
)
from dmattn.validation import (
    DTYPES,
    check_floating,
    check_int,
    check_optional_tensor,
    check_tensor,
    is_one_or,
    one_of,
    read_integers,
)

MAX_HEAD_DIM = 256
# The CUDA kernels read vectors of 8 half-precision elements along head_dim.
HEAD_DIM_MULTIPLE = 8


def check(problem: Problem) -> None:
    """Check everything about a problem that does not need the values of its tensors.

    Raises:
        TypeError: an operand is no tensor or has the wrong dtype.
        ValueError: a layout, rank, shape or device does not fit, max_seqlen_q or max_seqlen_k is
            too small for the number of tokens, or there is a mask or packing beside key lists.
    """
    check_tensors(problem)
    _check_dtypes(problem)
    _check_devices(problem)
    _check_shapes(problem)
    if problem.packing is not None:
        _check_packing(problem.packing, problem)
    if problem.mask is not None:
        _check_operand("attn_mask", problem.mask, problem)
    if problem.bias is not None:
        _check_operand("attn_bias", problem.bias, problem)
    if problem.sinks is not None:
        _check_sinks(problem.sinks, problem)
    if problem.key_lists is not None:
        check_key_lists(problem.key_lists, problem)


def check_tensors(problem: Problem) -> None:
    """Raise TypeError unless the operands are tensors, and ValueError unless they are dense."""
    check_tensor("query", problem.q)
    check_tensor("key", problem.k)
    check_tensor("value", problem.v)
    if problem.mask is not None:
        check_optional_tensor("attn_mask", problem.mask)
    if problem.bias is not None:
        check_optional_tensor("attn_bias", problem.bias)
    if problem.sinks is not None:
        check_optional_tensor("sinks", problem.sinks)


def check_head_dim(head_dim: int, name: str = "query") -> None:
    """Raise ValueError unless head_dim is 1 to `MAX_HEAD_DIM`. `name`: the argument that has it."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{name}: got head_dim {head_dim}, wanted 1 to {MAX_HEAD_DIM}")


def check_head_dim_number(head_dim: Any) -> int:
    """The argument `head_dim` as an int from 1 to `MAX_HEAD_DIM`.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of range.
    """
    head_dim = check_int("head_dim", head_dim, 1)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim: got {head_dim}, wanted 1 to {MAX_HEAD_DIM}")
    return int(head_dim)


class StrideError(ValueError):
    """An operand has strides that a kernel cannot read; a contiguous copy would solve that."""


def wrong_strides(q: Tensor, k: Tensor, v: Tensor) -> list[Exception]:
    """An error for each operand whose stride along head_dim is not 1, as CUDA kernels need it."""
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return []
    return [
        StrideError(
            f"{name}: got stride {t.stride(-1)} along head_dim, wanted 1 on CUDA; "
            f"pass {name}.contiguous()"
        )
        for name, t in (("query", q), ("key", k), ("value", v))
        if t.stride(-1) != 1 and t.numel() > 0
    ]


def check_last_stride(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise StrideError unless the stride along head_dim is 1, as CUDA kernels need it."""
    for error in wrong_strides(q, k, v):
        raise error


def check_one_head_dim(problem: Problem) -> None:
    """Raise ValueError unless values have the head_dim of keys, as operators require it."""
    k, v = problem.k.shape, problem.v.shape
    if k[-1] != v[-1]:
        raise ValueError(f"value: got head_dim {v[-1]}, wanted {k[-1]} as key in an operator")


def check_listed_bias(problem: Problem, needed: bool) -> None:
    """Raise ValueError if the gradient of a bias with rows is needed over key lists.

    Backends do not compute it. `needed`: whether the gradient of the bias is needed.
    """
    bias = problem.bias
    if problem.key_lists is None or bias is None or not needed or bias.shape[2] == 1:
        return
    raise ValueError(
        f"attn_bias: got shape {tuple(bias.shape)} that requires a gradient, wanted one row "
        "(batch|1, nheads|nheads_k|1, 1, seqlen_k) with a selection"
    )


def check_backward(
    problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
) -> None:
    """Check what the backward operator takes in addition to a checked problem.

    Raises:
        TypeError: a dtype differs from that in the forward.
        ValueError: a shape or device differs from that in the forward, or a gradient is needed that
            is not computed (see `check_listed_bias`).
    """
    check_listed_bias(problem, needs.bias)
    q = problem.q
    rows, row_dtype = lse_shape(q), lse_dtype(q.dtype)
    for name, t, shape, dtype in (
        ("dout", dout, q.shape, q.dtype),
        ("out", results.out, q.shape, q.dtype),
        ("lse", results.lse, rows, row_dtype),
        ("dlse", dlse, rows, row_dtype),
    ):
        if t is None:
            continue
        if t.dtype != dtype:
            raise TypeError(f"{name}: got dtype {t.dtype}, wanted {dtype}")
        if tuple(t.shape) != tuple(shape):
            raise ValueError(f"{name}: got shape {tuple(t.shape)}, wanted {tuple(shape)}")
        if t.device != q.device:
            raise ValueError(f"{name}: got device {t.device}, wanted {q.device} as query")


def _check_dtypes(problem: Problem) -> None:
    q, k, v, mask, bias = problem.q, problem.k, problem.v, problem.mask, problem.bias
    dtype = q.dtype
    if dtype not in DTYPES:
        raise TypeError(f"query: got dtype {dtype}, wanted {one_of(DTYPES)}")
    if k.dtype != dtype or v.dtype != dtype:
        name, t = ("key", k) if k.dtype != dtype else ("value", v)
        raise TypeError(f"{name}: got dtype {t.dtype}, wanted {dtype} as query")
    if mask is not None and mask.dtype != torch.bool:
        other = (
            "an additive mask is an attn_bias" if mask.is_floating_point() else "pass mask.bool()"
        )
        raise TypeError(
            f"attn_mask: got dtype {mask.dtype}, wanted torch.bool (True = attend); {other}"
        )
    if bias is not None and bias.dtype != dtype and bias.dtype != torch.float32:
        wanted = one_of(tuple(dict.fromkeys((dtype, torch.float32))))
        other = "; a boolean mask is an attn_mask" if bias.dtype == torch.bool else ""
        raise TypeError(f"attn_bias: got dtype {bias.dtype}, wanted {wanted}{other}")


def _check_devices(problem: Problem) -> None:
    k, v, mask, bias = problem.k, problem.v, problem.mask, problem.bias
    device = problem.q.device
    if (
        k.device == device
        and v.device == device
        and (mask is None or mask.device == device)
        and (bias is None or bias.device == device)
    ):
        return
    for name, t in (("key", k), ("value", v), ("attn_mask", mask), ("attn_bias", bias)):
        if t is not None and t.device != device:
            raise ValueError(f"{name}: got device {t.device}, wanted {device} as query")


def _check_shapes(problem: Problem) -> None:
    """Check the shapes of query, key and value, dense or packed."""
    q, k, v = problem.q.shape, problem.k.shape, problem.v.shape
    rank, layout = 4, "(batch, seqlen, heads, head_dim)"
    if problem.packing is not None:
        rank, layout = 3, "(total, heads, head_dim)"
    if len(q) != rank or len(k) != rank or len(v) != rank:
        wrong = (("query", q), ("key", k), ("value", v))
        name, shape = next((name, shape) for name, shape in wrong if len(shape) != rank)
        raise ValueError(f"{name}: got shape {tuple(shape)}, wanted {rank} dimensions {layout}")
    nheads, head_dim = q[-2], q[-1]
    nheads_k = k[-2]
    check_head_dim(head_dim)
    if k[-1] != head_dim or (rank == 4 and k[0] != q[0]):
        first = "total_k" if rank == 3 else f"{q[0]}, seqlen_k"
        raise ValueError(
            f"key: got shape {tuple(k)}, wanted ({first}, nheads_k, {head_dim}) for query of shape "
            f"{tuple(q)}"
        )
    if v != k:
        if v[:-1] != k[:-1]:
            wanted = ", ".join(str(n) for n in k[:-1])
            raise ValueError(f"value: got shape {tuple(v)}, wanted ({wanted}, head_dim) as key")
        check_head_dim(v[-1], "value")
    if nheads < 1:
        raise ValueError(f"query: got {nheads} heads, wanted at least 1")
    if nheads_k < 1 or nheads % nheads_k != 0:
        raise ValueError(
            f"key: got {nheads_k} heads, wanted a divisor of the {nheads} heads of query"
        )


def _check_operand(name: str, t: Tensor, problem: Problem) -> None:
    """Check the shape of a mask or bias."""
    if problem.packing is None:
        _check_dense_operand(name, t, problem)
    else:
        _check_packed_operand(name, t, problem, problem.packing)


def _check_dense_operand(name: str, t: Tensor, problem: Problem) -> None:
    shape = t.shape
    batch, seqlen_q, nheads, _ = problem.q.shape
    seqlen_k, nheads_k = problem.k.shape[1], problem.k.shape[2]
    if (
        len(shape) == 4
        and is_one_or(shape[0], batch)
        and (is_one_or(shape[1], nheads) or shape[1] == nheads_k)
        and is_one_or(shape[2], seqlen_q)
        and is_one_or(shape[3], seqlen_k)
    ):
        return
    sizes = ((batch, 1), (nheads, nheads_k, 1), (seqlen_q, 1), (seqlen_k, 1))
    wanted = ", ".join("|".join(dict.fromkeys(str(n) for n in options)) for options in sizes)
    raise ValueError(
        f"{name}: got shape {tuple(shape)}, wanted ({wanted}) as "
        "(batch|1, nheads|nheads_k|1, seqlen_q|1, seqlen_k|1)"
    )


def _check_packed_operand(name: str, t: Tensor, problem: Problem, packing: Packing) -> None:
    """Check the shape of a mask or bias of packed sequences, with heads first."""
    total_q, nheads, _ = problem.q.shape
    total_k, nheads_k, _ = problem.k.shape
    if t.dim() in (2, 3) and (is_one_or(t.shape[0], nheads) or t.shape[0] == nheads_k):
        if is_per_key(t):
            fits = t.shape[1] == total_k
        else:
            fits = t.shape[1] == total_q and t.shape[2] == packing.max_seqlen_k
        if fits:
            return
    some = "|".join(dict.fromkeys(str(n) for n in (nheads, nheads_k, 1)))
    got = tuple(t.transpose(0, 1).shape) if t.dim() in (2, 3) else tuple(t.shape)
    raise ValueError(
        f"{name}: got shape {got}, wanted ({total_k}, {some}) as (total_k, heads), or "
        f"({total_q}, {some}, {packing.max_seqlen_k}) as (total_q, heads, max_seqlen_k)"
    )


def _check_sinks(sinks: Tensor, problem: Problem) -> None:
    nheads = problem.q.shape[-2]
    check_floating("sinks", sinks)
    if sinks.dim() != 1 or sinks.shape[0] != nheads:
        raise ValueError(
            f"sinks: got shape {tuple(sinks.shape)}, wanted ({nheads},), one for each head of query"
        )
    if sinks.device != problem.q.device:
        raise ValueError(f"sinks: got device {sinks.device}, wanted {problem.q.device} as query")


def _check_packing(packing: Packing, problem: Problem) -> None:
    """Check what can be known of packed sequences without reading cu_seqlens."""
    q = problem.q
    sequences = -1
    for name, t in (("cu_seqlens_q", packing.cu_seqlens_q), ("cu_seqlens_k", packing.cu_seqlens_k)):
        check_tensor(name, t, "an int32 tensor")
        if t.dtype != torch.int32:
            raise TypeError(f"{name}: got dtype {t.dtype}, wanted torch.int32")
        if t.device != q.device:
            raise ValueError(f"{name}: got device {t.device}, wanted {q.device} as query")
        if t.dim() != 1 or t.shape[0] < 1 or (sequences != -1 and t.shape[0] - 1 != sequences):
            entries = "sequences + 1" if sequences == -1 else str(sequences + 1)
            raise ValueError(f"{name}: got shape {tuple(t.shape)}, wanted ({entries},)")
        sequences = t.shape[0] - 1
    for name, longest, total in (
        ("max_seqlen_q", packing.max_seqlen_q, q.shape[0]),
        ("max_seqlen_k", packing.max_seqlen_k, problem.k.shape[0]),
    ):
        if longest < 0 or sequences * longest < total:
            raise ValueError(
                f"{name}: got {longest}, wanted the length of the longest of {sequences} "
                f"sequences with {total} tokens together"
            )


def read_packing(packing: Packing, total_q: int, total_k: int) -> tuple[list[int], list[int]]:
    """The boundaries of rows and of keys, read by the host and checked.

    Raises:
        ValueError: they do not rise from 0 to total_q or total_k, or a sequence is longer than
            max_seqlen_q or max_seqlen_k.
    """
    return (
        _boundaries("q", packing.cu_seqlens_q, packing.max_seqlen_q, total_q),
        _boundaries("k", packing.cu_seqlens_k, packing.max_seqlen_k, total_k),
    )


def _boundaries(name: str, cu_seqlens: Tensor, longest: int, total: int) -> list[int]:
    bounds = read_integers(cu_seqlens)
    check_boundaries(bounds, total, f"cu_seqlens_{name}")
    lengths = [b - a for a, b in pairwise(bounds)]
    if lengths and max(lengths) > longest:
        raise ValueError(f"max_seqlen_{name}: got {longest}, wanted at least {max(lengths)}")
    return bounds


def check_key_lists(lists: Selection, problem: Problem) -> None:
    """Check that key lists fit the rest of a problem.

    Raises:
        TypeError: one of their tensors is not int32.
        ValueError: a shape or device does not fit, a causal problem has more query rows than keys,
            or there is a mask or packing as well.
    """
    if problem.packing is not None:
        raise ValueError("selection: got one for packed sequences, wanted None")
    nbatch, seqlen_q, nheads, _ = problem.q.shape
    _, seqlen_k, nheads_k, _ = problem.k.shape
    is_causal = problem.is_causal
    if problem.mask is not None:
        raise ValueError("attn_mask: got a mask beside a selection, wanted it in the selection")
    if is_causal and seqlen_q > seqlen_k:
        raise ValueError(
            f"query: got {seqlen_q} rows for {seqlen_k} keys, wanted no more rows than "
            "keys with a causal selection"
        )
    if lists.idx.dim() != 4:
        raise ValueError(f"selection: got idx of shape {tuple(lists.idx.shape)}, wanted 4-D")
    batch, heads, _, capacity = lists.idx.shape
    if not is_one_or(batch, nbatch) or not (is_one_or(heads, nheads) or heads == nheads_k):
        raise ValueError(
            f"selection: got batch {batch} and {heads} heads, wanted batch {nbatch} or 1 and "
            f"{nheads}, {nheads_k} or 1 heads"
        )
    # There may be more lists than blocks of rows, as `num_lists` says.
    blocks = larger(num_blocks(seqlen_q, is_causal), lists.idx.shape[2])
    wanted: tuple[tuple[int, ...], ...] = (
        (batch, heads, seqlen_k),
        (batch, heads, blocks, capacity),
        (batch, heads, blocks),
        (batch, heads, blocks) if is_causal else (0,),
    )
    for name, t, shape in zip(Selection._fields, lists, wanted, strict=True):
        if t.dtype != torch.int32:
            raise TypeError(f"selection: got {name} of dtype {t.dtype}, wanted torch.int32")
        if tuple(t.shape) != shape:
            raise ValueError(
                f"selection: got {name} of shape {tuple(t.shape)}, wanted {shape}, of "
                f"{seqlen_q} query rows and {seqlen_k} keys"
            )
        if t.device != problem.q.device:
            raise ValueError(
                f"selection: got device {t.device}, wanted {problem.q.device} as query"
            )
