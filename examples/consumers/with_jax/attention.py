"""Attention for JAX by dmattn_kernels, through XLA's foreign function interface (FFI).

    python examples/consumers/with_jax/attention.py build/libdmattn_jax.so

Needs jax, dmattn_kernels and the library that CMakeLists.txt of this folder makes; no torch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The settings of a call, that is, all but its arrays."""

    softmax_scale: float
    softcap: float
    is_causal: bool

    def attributes(self, mask: jax.Array | None, bias: jax.Array | None) -> dict[str, Any]:
        """The attributes of the call, as handlers.cpp reads them."""
        return {
            "softmax_scale": np.float32(self.softmax_scale),
            "softcap": np.float32(self.softcap),
            "is_causal": self.is_causal,
            "has_mask": mask is not None,
            "has_bias": bias is not None,
        }


def register(library: Path) -> None:
    """Make the handlers of the built library known to JAX; once per process."""
    handlers = ctypes.CDLL(str(library))
    for name in ("fwd", "bwd"):
        for platform in ("CUDA", "cpu"):
            handler = jax.ffi.pycapsule(getattr(handlers, f"dmattn_jax_{name}_{platform}"))
            jax.ffi.register_ffi_target(f"dmattn_{name}", handler, platform=platform)


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

    Both have gradients with respect to q, k, v and bias.

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
    out, lse = differentiable(q, k, v, mask, bias, Numbers(scale, softcap, is_causal))
    return out, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def differentiable(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    numbers: Numbers,
) -> tuple[jax.Array, jax.Array]:
    batch, seqlen_q, heads = q.shape[:3]
    results = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((batch, heads, seqlen_q), jnp.float32),
    )
    check(q, k, v, mask, bias, *results, numbers)
    call = jax.ffi.ffi_call("dmattn_fwd", results, vmap_method="sequential")
    out, lse = call(*present(q, k, v, mask, bias), **numbers.attributes(mask, bias))
    return out, lse


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    numbers: Numbers,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    out, lse = differentiable(q, k, v, mask, bias, numbers)
    return (out, lse), (q, k, v, mask, bias, out, lse)


def backward(numbers: Numbers, kept: Any, gradients: tuple[jax.Array, jax.Array]) -> Any:
    """Gradients of q, k, v, of the mask (none) and of the bias."""
    q, k, v, mask, bias, out, lse = kept
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in present(q, k, v, bias)]
    call = jax.ffi.ffi_call("dmattn_bwd", results, vmap_method="sequential")
    arrays = present(q, k, v, mask, bias, out, lse, *gradients)
    dq, dk, dv, *dbias = call(*arrays, **numbers.attributes(mask, bias))
    return dq, dk, dv, None, dbias[0] if dbias else None


differentiable.defvjp(forward, backward)


def present(*arrays: jax.Array | None) -> list[jax.Array]:
    return [array for array in arrays if array is not None]


def check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    out: jax.ShapeDtypeStruct,
    lse: jax.ShapeDtypeStruct,
    numbers: Numbers,
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
        softmax_scale=numbers.softmax_scale,
        softcap=numbers.softcap,
        is_causal=numbers.is_causal,
    )
    try:
        params.workspace_size()
    except RuntimeError:
        # There is no GPU in this process, which may be compiling for another machine. The library
        # looks for a GPU after its checks, so these have passed. If a GPU is needed here, the call
        # itself fails.
        return


def view(array: jax.Array | jax.ShapeDtypeStruct) -> _View:
    """A contiguous array as the library takes it, without an address. Unknown dtypes become 0."""
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


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array]:
    out, lse = attention(q, k, v, bias=bias, is_causal=True)
    return out, lse


def loss(function: Any, *arrays: jax.Array) -> jax.Array:
    """A number that depends on every output of attention, by factors that differ."""
    out, lse = function(*arrays)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.sin(lse))


gradients = jax.jit(jax.grad(loss, argnums=(1, 2, 3, 4)), static_argnums=0)


def differences(found: Any, expected: Any) -> list[float]:
    """The largest error of each array, in units of the largest number that is expected in it."""
    pairs = [[z.astype(jnp.float32) for z in pair] for pair in zip(found, expected, strict=True)]
    return [float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))) for x, y in pairs]


def main() -> None:
    register(Path(sys.argv[1]))
    arrays = example_arrays()
    if jax.default_backend() != "gpu":
        print(f"JAX runs on {jax.default_backend()}: lowered for CUDA, not run")
        lowered = gradients.trace(causal_attention, *arrays).lower(lowering_platforms=("cuda",))
        lines = lowered.as_text().splitlines()
        print("\n".join(line.strip() for line in lines if "@dmattn_" in line))
        return
    errors = differences(causal_attention(*arrays), plain_attention(*arrays))
    errors += differences(gradients(causal_attention, *arrays), gradients(plain_attention, *arrays))
    # bfloat16 rounds by 2^-9 of a number. The probabilities and the results are rounded; in the
    # backward so are the gradients of the logits, of which each result is a sum of many.
    limits = {"out": 2**-7, "lse": 1e-4, "dq": 2**-6, "dk": 2**-6, "dv": 2**-6, "dbias": 2**-6}
    for (name, limit), error in zip(limits.items(), errors, strict=True):
        print(f"{name}: largest relative difference from the definition {error:.2e}")
        if not error <= limit:
            sys.exit(f"{name} differs from the definition by more than {limit:.2e}")


if __name__ == "__main__":
    main()
