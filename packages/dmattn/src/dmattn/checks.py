"""Shapes, dtypes and devices of the operators: the one authority, for eager, fake and CUDA code.

Messages use the public argument names (query, key, value, attn_mask, attn_bias).
"""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from dmattn.key_lists import Selection, num_blocks

MAX_HEAD_DIM = 256
# The kernels read vectors of 8 half-precision elements along head_dim.
HEAD_DIM_MULTIPLE = 8

_CUDA_DTYPES = (torch.float16, torch.bfloat16)
_CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Dims(NamedTuple):
    """Sizes of one attention problem."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int
    head_dim: int


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the log-sum-exp, and of all arithmetic, for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """(B, H, Sq) for q of shape (B, Sq, H, D), (H, Tq) for packed sequences (Tq, H, D)."""
    return (*q.shape[:-3], q.shape[-2], q.shape[-3])


def check_inputs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> Dims:
    """Validate the inputs of an attention call.

    Args:
        q: (B, Sq, H, D), float16 or bfloat16; on the CPU also float32 and float64.
        k, v: (B, Sk, HK, D), dtype of q, with HK a divisor of H.
        mask: bool ({B|1}, {H|HK|1}, {Sq|1}, {Sk|1}) or None.
        bias: dtype of q or float32, shapes as mask, or None.

    Raises:
        TypeError: an argument is not a tensor or has the wrong dtype.
        ValueError: a rank, shape, device or stride is wrong.
    """
    check_tensors(q, k, v, mask, bias)
    check_dtypes(q, k, v, mask, bias)
    check_devices(q, k, v, mask, bias)
    dims = _check_shapes(q, k, v)
    if mask is not None:
        _check_broadcast("attn_mask", mask, dims)
    if bias is not None:
        _check_broadcast("attn_bias", bias, dims)
    if q.is_cuda and dims.head_dim % HEAD_DIM_MULTIPLE == 0:
        # Any other head_dim is padded, hence copied, and its strides do not matter.
        check_last_stride(q, k, v)
    return dims


def check_selection(
    selection: Selection | None, mask: Tensor | None, dims: Dims, is_causal: bool, device: object
) -> None:
    """Validate a selection for an attention call of these sizes; None is fine.

    Raises:
        TypeError: one of its tensors is not int32.
        ValueError: a shape or device does not fit, there are more query rows than keys under
            causality, or there is a mask as well.
    """
    if selection is None:
        return
    if mask is not None:
        raise ValueError("attn_mask: got a mask beside a selection, wanted it in the selection")
    if is_causal and dims.seqlen_q > dims.seqlen_k:
        raise ValueError(
            f"query: got {dims.seqlen_q} rows for {dims.seqlen_k} keys, wanted no more rows than "
            "keys with a causal selection"
        )
    if selection.idx.dim() != 4:
        raise ValueError(f"selection: got idx of shape {tuple(selection.idx.shape)}, wanted 4-D")
    batch, heads, _, capacity = selection.idx.shape
    if batch not in (1, dims.batch) or heads not in (1, dims.nheads_k, dims.nheads):
        raise ValueError(
            f"selection: got batch {batch} and {heads} heads, wanted batch {dims.batch} or 1 and "
            f"{dims.nheads}, {dims.nheads_k} or 1 heads"
        )
    blocks = num_blocks(dims.seqlen_q, is_causal)
    full = (batch, heads, blocks) if is_causal else (0,)
    wanted: tuple[tuple[int, ...], ...] = (
        (batch, heads, dims.seqlen_k),
        (batch, heads, blocks, capacity),
        (batch, heads, blocks),
        full,
    )
    for name, t, shape in zip(Selection._fields, selection, wanted, strict=True):
        if t.dtype != torch.int32:
            raise TypeError(f"selection: got {name} of dtype {t.dtype}, wanted torch.int32")
        if tuple(t.shape) != shape:
            raise ValueError(
                f"selection: got {name} of shape {tuple(t.shape)}, wanted {shape}, of "
                f"{dims.seqlen_q} query rows and {dims.seqlen_k} keys"
            )
        if t.device != device:
            raise ValueError(f"selection: got device {t.device}, wanted {device} as query")


def check_selected_bias(selection: Selection | None, bias: Tensor | None, needed: bool) -> None:
    """Raise ValueError for a gradient that the kernels over a selection do not compute."""
    if selection is None or bias is None or not needed or bias.shape[2] == 1:
        return
    raise ValueError(
        f"attn_bias: got shape {tuple(bias.shape)} that requires a gradient, wanted one row "
        "(batch|1, nheads|nheads_k|1, 1, seqlen_k) with a selection"
    )


def check_backward_inputs(
    dout: Tensor, dlse: Tensor | None, q: Tensor, out: Tensor, lse: Tensor, needs: Sequence[bool]
) -> None:
    """Validate what the backward operators take beyond the forward's inputs.

    Raises:
        TypeError: a dtype differs from the forward's.
        ValueError: a shape or device differs from the forward's, or `needs` has not 4 entries.
    """
    row_shape = lse_shape(q)
    row_dtype = lse_dtype(q.dtype)
    wanted = (
        ("dout", dout, tuple(q.shape), q.dtype),
        ("out", out, tuple(q.shape), q.dtype),
        ("lse", lse, row_shape, row_dtype),
        ("dlse", dlse, row_shape, row_dtype),
    )
    for name, t, shape, dtype in wanted:
        if t is None:
            continue
        if t.dtype != dtype:
            raise TypeError(f"{name}: got dtype {t.dtype}, wanted {dtype}")
        if tuple(t.shape) != shape:
            raise ValueError(f"{name}: got shape {tuple(t.shape)}, wanted {shape}")
        if t.device != q.device:
            raise ValueError(f"{name}: got device {t.device}, wanted {q.device} as query")
    if len(needs) != 4:
        raise ValueError(f"needs: got {len(needs)} entries, wanted 4 (dq, dk, dv, dbias)")


def empty_forward_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised out, as q and contiguous, and lse."""
    out = q.new_empty(q.shape)
    return out, q.new_empty(lse_shape(q), dtype=lse_dtype(q.dtype))


def empty_lse_rest(q: Tensor, bias: Tensor | None) -> Tensor:
    """Uninitialised lse_rest: float32, as lse, where the backward reads it, else (0,).

    It is what the rounding of lse to float32 dropped. The CUDA backward starts from lse, and only a
    bias makes logits so large that the difference shows; the CPU backward is exact without it.
    """
    shape = lse_shape(q) if q.is_cuda and bias is not None else (0,)
    return q.new_empty(shape, dtype=torch.float32)


def empty_backward_outputs(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised dq, dk, dv, dbias: contiguous, in the input's shape and dtype where needed.

    One that is not needed, or dbias without a bias, has shape (0,).
    """
    dq, dk, dv = (
        t.new_empty(t.shape if need else (0,)) for t, need in zip((q, k, v), needs, strict=False)
    )
    if bias is None:
        return dq, dk, dv, q.new_empty((0,))
    return dq, dk, dv, bias.new_empty(bias.shape if needs[3] else (0,))


def check_tensors(
    q: object, k: object, v: object, mask: object | None, bias: object | None
) -> None:
    """Raise TypeError unless all are tensors; mask and bias may be None."""
    if (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and (mask is None or isinstance(mask, Tensor))
        and (bias is None or isinstance(bias, Tensor))
    ):
        return
    for name, t in (("query", q), ("key", k), ("value", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}, wanted a torch.Tensor")
    for name, t in (("attn_mask", mask), ("attn_bias", bias)):
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}, wanted a torch.Tensor or None")


# The checks below run on every call: each looks for what is right at once, and takes its time to
# name what is wrong only then.


def check_head_dim(head_dim: int) -> None:
    """Raise ValueError unless there are kernels for it."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"query: got head_dim {head_dim}, wanted 1 to {MAX_HEAD_DIM}")


def check_dtypes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> None:
    """Raise TypeError for a dtype that attention does not take on the device of q."""
    dtype = q.dtype
    allowed = _CUDA_DTYPES if q.is_cuda else _CPU_DTYPES
    if dtype not in allowed:
        where = "CUDA" if q.is_cuda else "the CPU"
        raise TypeError(f"query: got dtype {dtype}, wanted {_one_of(allowed)} on {where}")
    if k.dtype != dtype or v.dtype != dtype:
        name, t = ("key", k) if k.dtype != dtype else ("value", v)
        raise TypeError(f"{name}: got dtype {t.dtype}, wanted {dtype} as query")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(
            f"attn_mask: got dtype {mask.dtype}, wanted torch.bool (True = attend); "
            "an additive mask is an attn_bias"
        )
    if bias is not None and bias.dtype not in (dtype, torch.float32):
        wanted = dtype if dtype == torch.float32 else _one_of((dtype, torch.float32))
        raise TypeError(f"attn_bias: got dtype {bias.dtype}, wanted {wanted}")


def check_devices(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None
) -> None:
    """Raise ValueError unless all are on one device, one that there is an implementation for."""
    device = q.device
    if (
        device.type in ("cuda", "cpu", "meta")
        and k.device == device
        and v.device == device
        and (mask is None or mask.device == device)
        and (bias is None or bias.device == device)
    ):
        return
    if device.type not in ("cuda", "cpu", "meta"):
        raise ValueError(f"query: got device {device}, wanted cuda or cpu")
    for name, t in (("key", k), ("value", v), ("attn_mask", mask), ("attn_bias", bias)):
        if t is not None and t.device != device:
            raise ValueError(f"{name}: got device {t.device}, wanted {device} as query")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> Dims:
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if len(q_shape) != 4 or len(k_shape) != 4 or len(v_shape) != 4:
        _raise_rank(q, k, v)
    batch, seqlen_q, nheads, head_dim = q_shape
    k_batch, seqlen_k, nheads_k, k_head_dim = k_shape
    check_head_dim(head_dim)
    if k_batch != batch or k_head_dim != head_dim:
        raise ValueError(
            f"key: got shape {tuple(k_shape)}, wanted ({batch}, seqlen_k, nheads_k, {head_dim}) "
            f"for query of shape {tuple(q_shape)}"
        )
    if v_shape != k_shape:
        raise ValueError(f"value: got shape {tuple(v_shape)}, wanted {tuple(k_shape)} as key")
    if nheads < 1:
        raise ValueError(f"query: got {nheads} heads, wanted at least 1")
    if nheads_k < 1 or nheads % nheads_k != 0:
        raise ValueError(
            f"key: got {nheads_k} heads, wanted a divisor of the {nheads} heads of query"
        )
    return Dims(batch, seqlen_q, seqlen_k, nheads, nheads_k, head_dim)


def _raise_rank(q: Tensor, k: Tensor, v: Tensor) -> NoReturn:
    wrong = (("query", q), ("key", k), ("value", v))
    name, shape = next((name, tuple(t.shape)) for name, t in wrong if t.dim() != 4)
    raise ValueError(
        f"{name}: got shape {shape}, wanted 4 dimensions (batch, seqlen, heads, head_dim)"
    )


def _check_broadcast(name: str, t: Tensor, dims: Dims) -> None:
    shape = t.shape
    if len(shape) == 4:
        batch, heads, rows, keys = shape
        if (
            (batch == dims.batch or batch == 1)
            and (heads == dims.nheads or heads == dims.nheads_k or heads == 1)
            and (rows == dims.seqlen_q or rows == 1)
            and (keys == dims.seqlen_k or keys == 1)
        ):
            return
    sizes = (
        (dims.batch, 1),
        (dims.nheads, dims.nheads_k, 1),
        (dims.seqlen_q, 1),
        (dims.seqlen_k, 1),
    )
    wanted = ", ".join("|".join(dict.fromkeys(str(n) for n in options)) for options in sizes)
    raise ValueError(
        f"{name}: got shape {tuple(shape)}, wanted ({wanted}) as "
        "(batch|1, nheads|nheads_k|1, seqlen_q|1, seqlen_k|1)"
    )


def check_last_stride(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless the kernels can read vectors along head_dim."""
    if q.stride(-1) == 1 and k.stride(-1) == 1 and v.stride(-1) == 1:
        return
    for name, t in (("query", q), ("key", k), ("value", v)):
        if t.stride(-1) != 1 and t.numel() > 0:
            raise ValueError(
                f"{name}: got stride {t.stride(-1)} along head_dim, wanted 1 on CUDA; "
                f"pass {name}.contiguous()"
            )


def _one_of(dtypes: Sequence[torch.dtype]) -> str:
    names = [str(dtype) for dtype in dtypes]
    return ", ".join(names[:-1]) + " or " + names[-1]
