"""Shapes, dtypes and devices of attention over packed sequences: for eager, fake and CUDA code.

Letters: Tq and Tk rows and keys of all sequences together, n sequences. Messages use the public
argument names, and the layout of the public function.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.checks import (
    HEAD_DIM_MULTIPLE,
    check_devices,
    check_dtypes,
    check_head_dim,
    check_last_stride,
    check_tensors,
)


class Packing(NamedTuple):
    """Where sequences lie that are packed one behind the other.

    Sequence b has rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 and keys likewise.
    """

    cu_seqlens_q: Tensor  # int32 (n + 1,)
    cu_seqlens_k: Tensor  # int32 (n + 1,)
    max_seqlen_q: int
    max_seqlen_k: int


class PackedDims(NamedTuple):
    """Sizes of one attention problem over packed sequences."""

    sequences: int
    total_q: int
    total_k: int
    nheads: int
    nheads_k: int
    head_dim: int


def check_packed_inputs(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, packing: Packing
) -> PackedDims:
    """Validate the inputs of an attention call over packed sequences, without reading cu_seqlens.

    Args:
        q: (Tq, H, D), float16 or bfloat16; on the CPU also float32 and float64.
        k, v: (Tk, HK, D), dtype of q, with HK a divisor of H.
        mask: bool ({H|HK|1}, Tk) or ({H|HK|1}, Tq, max_seqlen_k), or None.
        bias: dtype of q or float32, shapes as mask, or None.
        packing: where the sequences lie.

    Raises:
        TypeError: an argument is not a tensor or has the wrong dtype.
        ValueError: a rank, shape, device, stride or bound is wrong.
    """
    check_tensors(q, k, v, mask, bias)
    check_dtypes(q, k, v, mask, bias)
    check_devices(q, k, v, mask, bias)
    dims = _check_shapes(q, k, v, packing)
    if mask is not None:
        _check_operand("attn_mask", mask, dims, packing.max_seqlen_k)
    if bias is not None:
        _check_operand("attn_bias", bias, dims, packing.max_seqlen_k)
    if q.is_cuda and dims.head_dim % HEAD_DIM_MULTIPLE == 0:
        check_last_stride(q, k, v)
    return dims


def is_per_key(operand: Tensor) -> bool:
    """Whether a mask or bias is the same for all rows of a sequence: (heads, Tk)."""
    return operand.dim() == 2


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> PackedDims:
    for name, t in (("query", q), ("key", k), ("value", v)):
        if t.dim() != 3:
            raise ValueError(
                f"{name}: got shape {tuple(t.shape)}, wanted 3 dimensions (total, heads, head_dim)"
            )
    total_q, nheads, head_dim = q.shape
    total_k, nheads_k, _ = k.shape
    check_head_dim(head_dim)
    if k.shape[2] != head_dim:
        raise ValueError(
            f"key: got shape {tuple(k.shape)}, wanted (total_k, nheads_k, {head_dim}) for query "
            f"of shape {tuple(q.shape)}"
        )
    if v.shape != k.shape:
        raise ValueError(f"value: got shape {tuple(v.shape)}, wanted {tuple(k.shape)} as key")
    if nheads < 1:
        raise ValueError(f"query: got {nheads} heads, wanted at least 1")
    if nheads_k < 1 or nheads % nheads_k != 0:
        raise ValueError(
            f"key: got {nheads_k} heads, wanted a divisor of the {nheads} heads of query"
        )
    return PackedDims(
        _check_packing(packing, q, total_q, total_k), total_q, total_k, nheads, nheads_k, head_dim
    )


def _check_packing(packing: Packing, q: Tensor, total_q: int, total_k: int) -> int:
    """The number of sequences."""
    sequences = -1
    for name, t in (("cu_seqlens_q", packing.cu_seqlens_q), ("cu_seqlens_k", packing.cu_seqlens_k)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}, wanted an int32 tensor")
        if t.dtype != torch.int32:
            raise TypeError(f"{name}: got dtype {t.dtype}, wanted torch.int32")
        if t.device != q.device:
            raise ValueError(f"{name}: got device {t.device}, wanted {q.device} as query")
        if t.dim() != 1 or t.shape[0] < 1 or sequences not in (-1, t.shape[0] - 1):
            entries = "sequences + 1" if sequences == -1 else str(sequences + 1)
            raise ValueError(f"{name}: got shape {tuple(t.shape)}, wanted ({entries},)")
        sequences = t.shape[0] - 1
    for name, longest, total in (
        ("max_seqlen_q", packing.max_seqlen_q, total_q),
        ("max_seqlen_k", packing.max_seqlen_k, total_k),
    ):
        if not isinstance(longest, (int, torch.SymInt)) or isinstance(longest, bool):
            raise TypeError(f"{name}: got {type(longest).__name__}, wanted an int")
        if longest < 0 or sequences * longest < total:
            raise ValueError(
                f"{name}: got {longest}, wanted the length of the longest of {sequences} "
                f"sequences with {total} tokens together"
            )
    return sequences


def _check_operand(name: str, t: Tensor, dims: PackedDims, max_seqlen_k: int) -> None:
    heads, rest = t.shape[:1], tuple(t.shape[1:])
    fits = rest == ((dims.total_k,) if is_per_key(t) else (dims.total_q, max_seqlen_k))
    if t.dim() in (2, 3) and heads[0] in (1, dims.nheads_k, dims.nheads) and fits:
        return
    some = "|".join(dict.fromkeys(str(n) for n in (dims.nheads, dims.nheads_k, 1)))
    got = tuple(t.transpose(0, 1).shape) if t.dim() in (2, 3) else tuple(t.shape)
    raise ValueError(
        f"{name}: got shape {got}, wanted ({dims.total_k}, {some}) as (total_k, heads), or "
        f"({dims.total_q}, {some}, {max_seqlen_k}) as (total_q, heads, max_seqlen_k)"
    )
