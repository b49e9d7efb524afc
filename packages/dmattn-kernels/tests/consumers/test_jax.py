"""Attention for JAX: the handlers built against the wheel, registered, lowered, called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from programs import EXAMPLES, cmake_build, load, run


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    xla = f"-DXLA_INCLUDE_DIR={jax.ffi.include_dir()}"
    return cmake_build("with_jax", tmp_path_factory.mktemp("jax"), xla) / "libdmattn_jax.so"


@pytest.fixture(scope="module")
def example(library: Path) -> ModuleType:
    module = load("with_jax")
    module.register(library)
    return module


def test_lowers_for_cuda_anywhere(example: ModuleType) -> None:
    q, k, v, bias = example.example_arrays()

    def loss(q: Any, k: Any, v: Any, bias: Any) -> Any:
        out, lse = example.attention(q, k, v, bias=bias, is_causal=True, softcap=3.0)
        return out.sum() + lse.sum()

    allowed = [jax.export.DisabledSafetyCheck.custom_call("dmattn_fwd")]
    export = jax.export.export(jax.jit(loss), platforms=["cuda"], disabled_checks=allowed)
    exported = export(q, k, v, bias)
    (call,) = [line for line in exported.mlir_module().splitlines() if "@dmattn_fwd" in line]
    for words in (
        "softmax_scale = 1.250000e-01 : f32",
        "softcap = 3.000000e+00 : f32",
        "is_causal = true",
        "has_mask = false",
        "has_bias = true",
        "-> (tensor<2x100x4x64xbf16>, tensor<2x4x100xf32>)",
    ):
        assert words in call


def test_gradients_lower(example: ModuleType) -> None:
    """One forward and one backward; the gradients have the shapes and dtypes of their arrays."""
    arrays = example.example_arrays()
    traced = example.gradients.trace(example.causal_attention, *arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (forward,) = [line for line in text.splitlines() if "@dmattn_fwd" in line]
    (backward,) = [line for line in text.splitlines() if "@dmattn_bwd" in line]
    settings = forward[forward.index("{has_bias") : forward.index("}, operand_layouts")]
    assert settings in backward
    results = "tensor<2x100x4x64xbf16>, tensor<2x130x2x64xbf16>, tensor<2x130x2x64xbf16>"
    assert backward.endswith(f"-> ({results}, tensor<2x2x1x130xf32>)")


def test_a_batch_of_calls_lowers(example: ModuleType) -> None:
    """vmap becomes a loop over calls, each with the shapes of a single call."""
    q, k, v, _ = example.example_arrays()
    batch = jax.jit(jax.vmap(lambda *x: example.attention(*(a[None] for a in x))[0][0]))
    text = batch.trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" in text
    assert "-> (tensor<1x100x4x64xbf16>, tensor<1x4x100xf32>)" in text


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("q", lambda x: x[0], ValueError, "q has 3 dimensions; wanted 4"),
    ("v", lambda x: x[:, 1:], ValueError, r"v has shape \(2, 129, 2, 64\); wanted \(2, 130"),
    ("k", lambda x: x.astype(jnp.float16), TypeError, r"k has dtype float16 \(1\); wanted bf"),
    ("q", lambda x: x.astype(jnp.int8), TypeError, "q has dtype unknown .*; wanted float16 or"),
    ("bias", lambda x: x[..., :7], ValueError, r"bias has shape \(2, 2, 1, 7\)"),
]


@pytest.mark.parametrize("name, spoil, error, words", WRONG, ids=[words for *_, words in WRONG])
def test_wrong_arrays_are_refused_when_traced(
    example: ModuleType, name: str, spoil: Any, error: type[Exception], words: str
) -> None:
    arrays = dict(zip(("q", "k", "v", "bias"), example.example_arrays(), strict=True))
    arrays[name] = spoil(arrays[name])
    with pytest.raises(error, match=words):
        jax.eval_shape(example.attention, **arrays)


def call_unchecked(target: str, arrays: Any, results: Any, **changed: Any) -> Any:
    """Call the handler for the CPU without the checks of attention.py: it checks, then refuses."""
    settings: dict[str, Any] = {"softmax_scale": np.float32(1), "softcap": np.float32(0)}
    settings |= {"is_causal": False, "has_mask": False, "has_bias": False}
    call = jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results])
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        arrays = [jax.device_put(x, cpu) for x in arrays]
        return jax.block_until_ready(call(*arrays, **(settings | changed)))


def test_the_forward_hands_on_what_the_library_says(example: ModuleType) -> None:
    q, k, v, bias = example.example_arrays()
    mask, lse = jnp.ones((1, 1, 1, 130), bool), jnp.zeros((2, 4, 100))
    for arrays, changed, words in (
        ((q, k, v[:, 1:]), {}, r"INVALID_ARGUMENT: v has shape \(2, 129, 2, 64\)"),
        ((q, k, v, bias), {"has_mask": True}, "INVALID_ARGUMENT: mask has dtype float32"),
        ((q, k, v, mask), {"has_bias": True}, "INVALID_ARGUMENT: bias has dtype bool"),
        ((q, k, v, bias), {}, "INVALID_ARGUMENT: got 4 arrays and 2 results; wanted 3 and 2"),
        ((q, k, v), {"softmax_scale": np.float32("nan")}, "INVALID_ARGUMENT: softmax_scale"),
        ((q, k[:, :50], v[:, :50]), {"is_causal": True}, "FAILED_PRECONDITION"),
        ((q, k, v, mask, bias), {"has_mask": True, "has_bias": True}, "FAILED_PRECONDITION"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            call_unchecked("dmattn_fwd", arrays, (q, lse), **changed)


def test_the_backward_hands_on_what_the_library_says(example: ModuleType) -> None:
    q, k, v, bias = example.example_arrays()
    mask, lse = jnp.ones((1, 1, 1, 130), bool), jnp.zeros((2, 4, 100))
    whole = {"has_mask": True, "has_bias": True}
    for arrays, results, changed, words in (
        ((q, k, v, q, lse, q[:, 1:], lse), (q, k, v), {}, "INVALID_ARGUMENT: dout has shape"),
        ((q, k, v, q, lse, q, q), (q, k, v), {}, "INVALID_ARGUMENT: dsoftmax_lse has"),
        ((q, k, v, q, lse, q, lse), (q, k, k[:, 1:]), {}, "INVALID_ARGUMENT: dv has shape"),
        ((q, k, v, mask, bias, q, lse, q, lse), (q, k, v, mask), whole, "dbias has dtype bool"),
        ((q, k, v, mask, bias, q, lse, q, lse), (q, k, v), whole, "wanted 9 and 4"),
        ((q, k, v, mask, bias, q, lse, q, lse), (q, k, v, bias), whole, "FAILED_PRECONDITION"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            call_unchecked("dmattn_bwd", arrays, results, **changed)


def test_definitions_agree(example: ModuleType) -> None:
    """The definitions of attention that the programs for JAX and for CuPy compare with."""
    arrays = example.example_arrays()
    out, lse = example.plain_attention(*arrays)
    expected = load("with_cupy").plain_attention(*(np.asarray(x, np.float64) for x in arrays))
    assert np.allclose(out, expected[0], rtol=0, atol=1e-5)
    assert np.allclose(lse, expected[1], rtol=0, atol=1e-5)


def test_program_without_a_gpu(library: Path) -> None:
    program = [sys.executable, str(EXAMPLES / "with_jax" / "attention.py"), str(library)]
    result = subprocess.run(
        program,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "lowered for CUDA, not run" in result.stdout


@pytest.mark.usefixtures("need_gpu")
def test_program_on_a_gpu(library: Path) -> None:
    said = run(sys.executable, EXAMPLES / "with_jax" / "attention.py", library)
    assert "dbias: largest relative difference from the definition " in said


@pytest.mark.usefixtures("need_gpu")
def test_vmap_and_a_mask_on_a_gpu(example: ModuleType) -> None:
    q, k, v, bias = example.example_arrays()
    mask = jnp.arange(130) % 3 > 0
    barred = jnp.where(mask, bias, -jnp.inf)
    expected, _ = example.plain_attention(q, k, v, barred)

    def one(q: Any, k: Any, v: Any, bias: Any) -> Any:
        arrays = (x[None] for x in (q, k, v))
        where = mask[None, None, None]
        return example.attention(*arrays, mask=where, bias=bias[None], is_causal=True)[0][0]

    out = jax.vmap(one)(q, k, v, bias)
    assert example.differences([out], [expected])[0] <= 2**-7
