"""Attention on CuPy arrays by dmattn_kernels; calls can be checked on numpy arrays, too.

    python examples/consumers/with_cupy/attention.py

Needs dmattn_kernels and numpy, and for the computation CuPy and a GPU; no torch.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import dmattn_kernels

# numpy.ndarray or cupy.ndarray; cupy has no type annotations.
Array: TypeAlias = Any
_View = tuple[int, int, tuple[int, ...], tuple[int, ...]]

DTYPES = {
    "float16": dmattn_kernels.FLOAT16,
    "float32": dmattn_kernels.FLOAT32,
    "bool": dmattn_kernels.BOOL,
    "int32": dmattn_kernels.INT32,
}


def view(array: Array) -> _View:
    """The array as the library reads it in place: (address, dtype, shape, strides in elements).

    The dtype is 0 for one that the library does not know; its error then names the argument.
    """
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    strides = tuple(step // array.itemsize for step in array.strides)
    return address, DTYPES.get(array.dtype.name, 0), array.shape, strides


def forward_params(
    device: int,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    bias: Array | None,
    out: Array,
    lse: Array,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = False,
) -> dmattn_kernels.FwdParams:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return dmattn_kernels.FwdParams(
        device=device,
        q=view(q),
        k=view(k),
        v=view(v),
        mask=None if mask is None else view(mask),
        bias=None if bias is None else view(bias),
        out=view(out),
        lse=view(lse),
        softmax_scale=scale,
        softcap=softcap,
        is_causal=is_causal,
    )


def check(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    bias: Array | None = None,
    **numbers: Any,
) -> str | None:
    """Whether `attention` would take these arrays, which may be numpy's.

    Returns:
        None, or why a right call cannot be launched on this machine.

    Raises:
        ValueError, TypeError: what is wrong with the call.
    """
    out = np.empty(q.shape, q.dtype)
    lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    params = forward_params(0, q, k, v, mask, bias, out, lse, **numbers)
    try:
        params.workspace_size()
    except RuntimeError as error:
        return str(error)
    return None


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    bias: Array | None = None,
    **numbers: Any,
) -> tuple[Array, Array]:
    """out as q, and the log-sum-exp (batch, heads, seqlen_q), float32; on CuPy's current stream.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16.
        k, v: (batch, seqlen_k, heads_k, head_dim), float16; heads a multiple of heads_k.
        mask: bool, True keeps; ({batch, 1}, {heads, heads_k, 1}, {seqlen_q, 1}, {seqlen_k, 1}).
        bias: float16 or float32, shapes as for mask.
        numbers: softmax_scale, softcap and is_causal, as for `forward_params`.

    Raises:
        ValueError, TypeError: what is wrong with the call.
        RuntimeError: no kernel for this GPU, or an error of the CUDA runtime.
    """
    import cupy as cp

    with q.device:
        out = cp.empty(q.shape, q.dtype)
        lse = cp.empty((q.shape[0], q.shape[2], q.shape[1]), cp.float32)
        params = forward_params(q.device.id, q, k, v, mask, bias, out, lse, **numbers)
        size = params.workspace_size()
        # Freed on return, while the kernels may still use it: CuPy's pool gives the memory only to
        # later work on the same stream.
        workspace = cp.empty(size, cp.uint8)
        params.launch(workspace.data.ptr if size else 0, size, cp.cuda.get_current_stream().ptr)
    return out, lse


def plain_attention(
    q: npt.NDArray[Any], k: npt.NDArray[Any], v: npt.NDArray[Any], bias: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The definition, causal, in float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v, bias = (x.astype(np.float64) for x in (q, k, v, bias))
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    logits = np.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    logits = logits + np.repeat(bias, group, axis=1)
    rows, keys = logits.shape[2:]
    logits[:, :, ~np.tri(rows, keys, keys - rows, dtype=bool)] = -np.inf
    highest = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - highest)
    total = weights.sum(axis=-1, keepdims=True)
    out = np.einsum("bhij,bjhd->bihd", weights / total, v)
    return out, (highest + np.log(total))[..., 0]


def example_arrays() -> tuple[npt.NDArray[Any], ...]:
    """q, k, v and a bias for each key; k is a view with its dimensions in another order."""
    random = np.random.default_rng(0)
    q = random.uniform(-1, 1, (2, 100, 4, 64)).astype(np.float16)
    k = random.uniform(-1, 1, (2, 2, 130, 64)).astype(np.float16).transpose(0, 2, 1, 3)
    v = random.uniform(-1, 1, (2, 130, 2, 64)).astype(np.float16)
    bias = random.uniform(-1, 1, (2, 2, 1, 130)).astype(np.float32)
    return q, k, v, bias


def main() -> None:
    q, k, v, bias = example_arrays()
    try:
        check(q, k, v[:, 1:], bias=bias)
    except ValueError as error:
        print(f"refused: {error}")
    reason = check(q, k, v, bias=bias, is_causal=True)
    if reason is not None:
        print(f"checked, not run: {reason}")
        return
    import cupy as cp

    # Arrays on the GPU keep the order of dimensions in memory that they had: k stays a view.
    arrays = [cp.asarray(x) for x in (q, k.transpose(0, 2, 1, 3), v, bias)]
    arrays[1] = arrays[1].transpose(0, 2, 1, 3)
    out, lse = attention(arrays[0], arrays[1], arrays[2], bias=arrays[3], is_causal=True)
    expected_out, expected_lse = plain_attention(q, k, v, bias)
    out_error = np.abs(cp.asnumpy(out) - expected_out).max()
    lse_error = np.abs(cp.asnumpy(lse) - expected_lse).max()
    print(f"largest difference from the definition: out {out_error:.2e}, lse {lse_error:.2e}")
    # The values are below 1, where float16 rounds by at most 2^-12: once the probabilities, once
    # the result.
    if not (out_error <= 2**-11 and lse_error <= 1e-4):
        sys.exit("the kernels and the definition differ")


if __name__ == "__main__":
    main()
