"""The caller's outputs (`out=`) on the CUDA path: which of them the kernels write to directly.

A recorder stands in for the kernels, as in `test_cuda_path.py`.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_cuda_path import Recorder, half, install, view
from torch import Tensor

from dmattn import flash_dmattn_func, flash_dmattn_varlen_func, select_keys, sliding_window
from dmattn.backends import registry, sinks
from dmattn.backends.cuda import CudaBackend, kernels
from dmattn.backends.cuda import attention as cuda
from dmattn.problem import Packing, Problem

K, BIAS = half(2, 7, 2, 64), torch.randn(2, 2, 1, 7)


class OnTheCpu(CudaBackend):
    """The CUDA backend for tensors on the CPU, where a recorder stands in for the kernels."""

    devices = ("cpu",)

    def unavailable(self) -> str | None:
        return None

    def unavailable_on(self, device: torch.device) -> str | None:
        return None


@pytest.fixture(autouse=True)
def _recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    RECORDER.calls.clear()
    install(RECORDER, monkeypatch)
    before = list(registry.BACKENDS)
    registry.BACKENDS[:] = [OnTheCpu()]
    # New tensors are filled with ones, since the recorder writes nothing.
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: _ones(empty(*a, **k)))
    yield
    registry.BACKENDS[:] = before
    kernels.load_kernels.cache_clear()


RECORDER = Recorder()


def _ones(t: Tensor) -> Tensor:
    return t if t.is_meta else t.fill_(1)


def aligned_slices(rows: int = 5) -> dict[str, Tensor]:
    """Slices of larger tensors; each row of a slice starts at a multiple of 16 bytes."""
    return {
        "whole": half(2, rows, 4, 64),
        "rows": half(2, rows + 9, 4, 64)[:, 3 : 3 + rows],
        "heads": half(2, rows, 9, 64)[:, :, 5:],
        "every other head": half(2, rows, 8, 64)[:, :, ::2],
        "heads first": half(2, 4, rows, 64).transpose(1, 2),
        "columns": half(2, rows, 4, 80)[..., 8:72],
    }


def odd_slices(rows: int = 5) -> dict[str, Tensor]:
    return {
        "stride": half(2, rows, 4, 66)[..., :64],
        "start": half(2 * rows * 4 * 64 + 1)[1:].view(2, rows, 4, 64),
        "row": half(2, rows * 260 + 4)[:, : rows * 260]
        .view(2, rows, 260)[..., :256]
        .unflatten(2, (4, 64)),
    }


def forward(problem: Problem, out: Tensor, prepared: bool) -> tuple[Any, ...]:
    if not prepared:
        return cuda.forward(problem, False, out)
    call = CudaBackend().prepare(problem)
    assert call is not None
    return call.forward((*problem[:5], problem.key_lists), False, out)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("name", aligned_slices())
def test_slices_are_handed_to_the_kernels(name: str, prepared: bool) -> None:
    out = aligned_slices()[name]
    version = out._version
    problem = Problem(half(2, 5, 4, 64), K, K, bias=BIAS)
    found, lse, _ = forward(problem, out, prepared)
    (call,) = RECORDER.calls
    assert found is out and call["out"] == view(out) and call["lse"] == view(lse)
    assert out._version > version  # autograd learns of it


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("name", odd_slices())
def test_rows_that_do_not_start_on_16_bytes_are_copied_to(name: str, prepared: bool) -> None:
    """If kernels got such an output, those of older chips would have to serve the call.

    That is not so for a single row (decoding), which is written directly.
    """
    out = odd_slices()[name]
    found, *_ = forward(Problem(half(2, 5, 4, 64), K, K), out, prepared)
    (call,) = RECORDER.calls
    assert found is out and bool((out == 1).all())
    assert call["out"][0] != out.data_ptr() and call["out"][1:] == view(half(2, 5, 4, 64))[1:]
    row = odd_slices(rows=1)[name]
    found, *_ = forward(Problem(half(2, 1, 4, 64), K, K), row, prepared)
    assert found is row and RECORDER.calls[1]["out"] == view(row)


def test_a_single_row_of_a_packed_call_is_no_decoding() -> None:
    bounds = torch.tensor([0, 1]).int()
    problem = Problem(half(1, 4, 64), half(7, 2, 64), half(7, 2, 64))
    problem = problem.replace(packing=Packing(bounds, torch.tensor([0, 7]).int(), 1, 7))
    for out, in_place in ((half(2, 5, 64)[1:, 1:], True), (half(1, 4, 66)[..., :64], False)):
        found = cuda.forward(problem, False, out).out
        assert found is out and (RECORDER.calls[-1]["out"] == view(out)) == in_place


def test_padded_columns_stay_outside() -> None:
    around = torch.zeros(2, 5, 4, 24).bfloat16()
    out = around[..., :20]
    problem = Problem(half(2, 5, 4, 20), half(2, 7, 2, 20), half(2, 7, 2, 20))
    assert cuda.forward(problem, False, out).out is out
    assert RECORDER.calls[0]["out"][2] == (2, 5, 4, 24)
    assert bool((out == 1).all()) and not around[..., 20:].any()


def test_without_keys_it_is_zero() -> None:
    out = aligned_slices()["rows"]
    problem = Problem(half(2, 5, 4, 64), K[:, :0], K[:, :0])
    assert cuda.forward(problem, False, out).out is out
    assert not out.any() and not RECORDER.calls


def test_sinks_change_it_in_place() -> None:
    out = aligned_slices()["rows"].fill_(1)
    problem = Problem(half(2, 5, 4, 64), K, K, None, BIAS, torch.zeros(4))
    found = sinks.forward(OnTheCpu(), problem, False, out).out
    assert found is out and RECORDER.calls[0]["out"] == view(out)


def test_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        out = aligned_slices()["rows"]
        assert forward(Problem(half(2, 5, 4, 64), K, K), out, True)[0] is out


@pytest.mark.parametrize("options", ["plain", "window", "selection", "leading rows"])
def test_public_calls(options: str) -> None:
    """The first call, and the next ones, whose kind is known."""
    q, given = half(2, 5, 4, 64), (K, K, None, BIAS)
    more: dict[str, Any] = {
        "plain": {},
        "window": {"is_causal": True, "window_size": 3},
        "selection": {"is_causal": True, "selection": select_keys(BIAS, 3, query_len=5)},
        "leading rows": {"is_causal": True, "selection": sliding_window(7, 3, 9)},
    }[options]
    skip = 0
    if options == "leading rows":
        q, skip = half(2, 9, 4, 64), 2
    for _ in range(3):
        out = aligned_slices(q.shape[1])["rows"]
        RECORDER.calls.clear()
        assert flash_dmattn_func(q, *given, **more, out=out) is out
        (call,) = RECORDER.calls
        assert call["out"] == view(out[:, skip:]) and not out[:, :skip].any()


@pytest.mark.parametrize("window", [None, 3])
def test_public_packed_calls(window: int | None) -> None:
    q, k, bias = half(7, 4, 64), half(7, 2, 64), torch.randn(7, 2)
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    options: dict[str, Any] = {"attn_bias": bias, "is_causal": True, "window_size": window}
    for _ in range(2):
        out = half(9, 4, 64)[1:8]
        RECORDER.calls.clear()
        found = flash_dmattn_varlen_func(q, k, k, bounds, None, 4, 4, **options, out=out)
        (call,) = RECORDER.calls
        assert found is out and call["out"] == view(out if window is None else out[None])


def test_a_stretch_behind_a_state_is_written_where_it_belongs() -> None:
    q, k, bias = half(2, 40, 4, 64), half(2, 40, 2, 64), torch.randn(2, 2, 1, 40)
    whole, state = half(2, 40, 4, 64), None
    options: dict[str, Any] = {"is_causal": True, "window_size": 6, "return_state": True}
    for start in range(0, 40, 10):
        now = slice(start, start + 10)
        part = whole[:, now]
        RECORDER.calls.clear()
        given = (q[:, now], k[:, now], k[:, now], None, bias[..., now])
        found, state = flash_dmattn_func(*given, **options, state=state, out=part)
        assert found is part
        (call,) = RECORDER.calls
        assert call["out"] == view(part) and call["q"] == view(q[:, now])
