"""Attention on CuPy arrays without torch, checked on numpy arrays where there is no GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from programs import EXAMPLES, load, run


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("with_cupy")


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("q", lambda x: x[0], ValueError, "q has 3 dimensions; wanted 4"),
    ("k", lambda x: x[..., :32], ValueError, r"k has shape \(2, 130, 2, 32\)"),
    ("v", lambda x: x[:, 1:], ValueError, r"v has shape \(2, 129, 2, 64\); wanted \(2, 130"),
    ("v", lambda x: x.astype(np.float32), TypeError, "v has dtype float32"),
    ("q", lambda x: x.astype(np.float64), TypeError, "q has dtype unknown .*; wanted float16 or"),
    ("bias", lambda x: x[:, :, :, :7], ValueError, r"bias has shape \(2, 2, 1, 7\)"),
]


@pytest.mark.parametrize("name, spoil, error, words", WRONG, ids=[words for *_, words in WRONG])
def test_wrong_numpy_arrays_are_refused(
    example: ModuleType, name: str, spoil: Any, error: type[Exception], words: str
) -> None:
    arrays = dict(zip(("q", "k", "v", "bias"), example.example_arrays(), strict=True))
    arrays[name] = spoil(arrays[name])
    with pytest.raises(error, match=words):
        example.check(**arrays)


def test_a_view_is_passed_by_its_strides(example: ModuleType) -> None:
    x = np.zeros((2, 6, 5), np.float16)[:, ::2].transpose(0, 2, 1)
    assert example.view(x) == (x.ctypes.data, 1, (2, 5, 3), (30, 1, 10))


def test_right_numpy_arrays_get_as_far_as_the_gpu(
    example: ModuleType, without_gpu: str | None
) -> None:
    q, k, v, bias = example.example_arrays()
    mask = np.ones((1, 1, 1, 130), bool)
    assert example.check(q, k, v, mask=mask, bias=bias, is_causal=True) == without_gpu


def test_the_definition_that_the_program_compares_with(example: ModuleType) -> None:
    """One row, by hand: the last row sees every key."""
    q, k, v, bias = example.example_arrays()
    out, lse = example.plain_attention(q, k, v, bias)
    row = q[1, -1, 3].astype(np.float64)
    weights = np.exp(k[1, :, 1].astype(np.float64) @ row / 8 + bias[1, 1, 0])
    assert np.allclose(lse[1, 3, -1], np.log(weights.sum()), rtol=0, atol=1e-12)
    assert np.allclose(out[1, -1, 3], weights @ v[1, :, 1] / weights.sum(), rtol=0, atol=1e-12)
    # The first row has position 30, so that keys behind that position do not change its output.
    changed = v.copy()
    changed[:, 31:] = 7
    assert np.array_equal(example.plain_attention(q, k, changed, bias)[0][:, 0], out[:, 0])


def test_program_without_a_gpu(without_gpu: str | None) -> None:
    if without_gpu is None:
        pytest.skip("there is a GPU: test_program_on_a_gpu")
    said = run(sys.executable, EXAMPLES / "with_cupy" / "attention.py")
    assert f"checked, not run: {without_gpu}" in said


@pytest.mark.usefixtures("need_gpu")
def test_program_on_a_gpu() -> None:
    said = run(sys.executable, EXAMPLES / "with_cupy" / "attention.py")
    assert "largest difference from the definition: out " in said


@pytest.mark.usefixtures("need_gpu")
def test_the_launch_is_on_the_current_stream(example: ModuleType) -> None:
    """A capture of the current stream contains the launch: its graph computes the output again."""
    import cupy as cp

    q, k, v, bias = (cp.asarray(x) for x in example.example_arrays())
    expected, _ = example.attention(q, k, v, bias=bias)
    cp.cuda.Device().synchronize()
    with cp.cuda.Stream(non_blocking=True) as stream:
        # Leaves memory in CuPy's pool for this stream: none can be allocated during the capture.
        example.attention(q, k, v, bias=bias)
        stream.begin_capture()
        out, _ = example.attention(q, k, v, bias=bias)
        graph = stream.end_capture()
        stream.synchronize()
        out.data.memset(0, out.nbytes)
        graph.launch(stream)
        stream.synchronize()
    assert np.array_equal(cp.asnumpy(out), cp.asnumpy(expected))


def test_no_torch(example: ModuleType) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES / 'with_cupy')!r})\n"
        "import attention\n"
        "attention.check(*attention.example_arrays()[:3])\n"
        "assert 'torch' not in sys.modules and 'cupy' not in sys.modules\n"
    )
    run(sys.executable, "-c", code)
