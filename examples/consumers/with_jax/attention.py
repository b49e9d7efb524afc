"""Attention for JAX by dmattn_kernels, through XLA's foreign function interface (FFI).

    python examples/consumers/with_jax/attention.py build/libdmattn_jax.so

Needs jax, dmattn_kernels and the library that CMakeLists.txt of this folder makes; no torch.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dmattn_kernels

DTYPES = {
    "float16": dmattn_kernels.FLOAT16,
    "bfloat16": dmattn_kernels.BFLOAT16,
    "float32": dmattn_kernels.FLOAT32,
    "bool": dmattn_kernels.BOOL,
}
_View = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def register(library: Path) -> None:
    """Make the handlers of the built library known to JAX; once per process."""
    handlers = ctypes.CDLL(str(library))
    for platform, handler in (
        ("CUDA", handlers.dmattn_jax_fwd),
        ("cpu", handlers.dmattn_jax_refuse),
    ):
        jax.ffi.register_ffi_target("dmattn_fwd", jax.ffi.pycapsule(handler), platform=platform)


@functools.partial(jax.jit, static_argnames=("softmax_scale", "softcap", "is_causal"))
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """out (batch, seqlen_q, heads, head_dim) and the log-sum-exp (batch, heads, seqlen_q), float32.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16.
        k, v: (batch, seqlen_k, heads_k, head_dim), dtype of q; heads a multiple of heads_k.
        mask: bool, True keeps; ({batch, 1}, {heads, heads_k, 1}, {seqlen_q, 1}, {seqlen_k, 1}).
        bias: dtype of q or float32, shapes as for mask.
        softmax_scale: 1 / sqrt(head_dim) if None.
        softcap: 0 for none.
        is_causal: aligned to the bottom right corner.

    Raises:
        ValueError, TypeError: a shape, a dtype; when the call is traced.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    batch, seqlen_q, heads = q.shape[:3]
    results = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((batch, heads, seqlen_q), jnp.float32),
    )
    check(q, k, v, mask, bias, *results, scale, softcap, is_causal)
    call = jax.ffi.ffi_call("dmattn_fwd", results, vmap_method="sequential")
    out, lse = call(
        *(array for array in (q, k, v, mask, bias) if array is not None),
        softmax_scale=np.float32(scale),
        softcap=np.float32(softcap),
        is_causal=is_causal,
        has_mask=mask is not None,
        has_bias=bias is not None,
    )
    return out, lse


def check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    out: jax.ShapeDtypeStruct,
    lse: jax.ShapeDtypeStruct,
    softmax_scale: float,
    softcap: float,
    is_causal: bool,
) -> None:
    """Let the library check the shapes and dtypes, for which it needs no memory yet.

    Raises:
        ValueError, TypeError: what is wrong, in the library's words.
    """
    params = dmattn_kernels.FwdParams(
        device=0,
        q=view(q),
        k=view(k),
        v=view(v),
        mask=None if mask is None else view(mask),
        bias=None if bias is None else view(bias),
        out=view(out),
        lse=view(lse),
        softmax_scale=softmax_scale,
        softcap=softcap,
        is_causal=is_causal,
    )
    try:
        params.workspace_size()
    except RuntimeError:
        # No GPU in this process, which may be compiling for another machine. The library looks for
        # one only after its checks, and the call itself will say so where there should be one.
        return


def view(array: jax.Array | jax.ShapeDtypeStruct) -> _View:
    """A contiguous array as the library takes it, without its address. 0 is no dtype."""
    strides = [int(np.prod(array.shape[i + 1 :], dtype=np.int64)) for i in range(len(array.shape))]
    return 0, DTYPES.get(array.dtype.name, 0), tuple(array.shape), tuple(strides)


def plain_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The definition, causal, in float32."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    precision = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("bihd,bjhd->bhij", q, k, precision=precision) * q.shape[-1] ** -0.5
    logits += jnp.repeat(bias, group, axis=1)
    rows, keys = logits.shape[2:]
    keep = jnp.tril(jnp.ones((rows, keys), bool), keys - rows)
    logits = jnp.where(keep, logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    probabilities = jnp.exp(logits - lse[..., None])
    return jnp.einsum("bhij,bjhd->bihd", probabilities, v, precision=precision), lse


def example_arrays() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.uniform(keys[0], (2, 100, 4, 64), jnp.bfloat16, -1, 1)
    k = jax.random.uniform(keys[1], (2, 130, 2, 64), jnp.bfloat16, -1, 1)
    v = jax.random.uniform(keys[2], (2, 130, 2, 64), jnp.bfloat16, -1, 1)
    bias = jax.random.uniform(keys[3], (2, 2, 1, 130), jnp.float32, -1, 1)
    return q, k, v, bias


def main() -> None:
    register(Path(sys.argv[1]))
    q, k, v, bias = example_arrays()
    if jax.default_backend() != "gpu":
        print(f"JAX runs on {jax.default_backend()}: lowered for CUDA, not run")
        lowered = attention.trace(q, k, v, bias=bias, is_causal=True).lower(
            lowering_platforms=("cuda",)
        )
        print(
            next(line for line in lowered.as_text().splitlines() if "@dmattn_fwd" in line).strip()
        )
        return
    out, lse = attention(q, k, v, bias=bias, is_causal=True)
    expected_out, expected_lse = plain_attention(q, k, v, bias)
    out_error = float(jnp.max(jnp.abs(out.astype(jnp.float32) - expected_out)))
    lse_error = float(jnp.max(jnp.abs(lse - expected_lse)))
    print(f"largest difference from the definition: out {out_error:.2e}, lse {lse_error:.2e}")
    # The values are below 1, where bfloat16 rounds by at most 2^-9: the probabilities, the result.
    if not (out_error <= 2**-8 and lse_error <= 1e-4):
        sys.exit("the kernels and the definition differ")


if __name__ == "__main__":
    main()
