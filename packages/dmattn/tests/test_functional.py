"""The public function on the CPU: backends, return values, and the import of the package."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import random_case

import dmattn
from dmattn import (
    arguments,
    dispatch,
    explain,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    get_available_backends,
)
from dmattn.backends import registry
from dmattn.backends.cpu import CpuBackend
from dmattn.backends.cpu import attention as cpu
from dmattn.backends.cuda import kernels as cuda
from dmattn.checks import wrong_strides
from dmattn.ops import attention as ops_attention
from dmattn.problem import Problem, Results


def test_return_values() -> None:
    case = random_case(dtype=torch.bfloat16, mask_shape=(2, 1, 9, 11))
    out = flash_dmattn_func(*case.inputs)
    assert isinstance(out, torch.Tensor)
    with_lse = flash_dmattn_func(*case.inputs, return_lse=True)
    with_probs = flash_dmattn_func(*case.inputs, return_attn_probs=True)
    both = flash_dmattn_func(*case.inputs, return_lse=True, return_attn_probs=True)
    assert [len(r) for r in (with_lse, with_probs, both)] == [2, 2, 3]
    assert torch.equal(both[0], out) and torch.equal(both[1], with_lse[1])
    assert torch.equal(both[2], with_probs[1])
    assert (both[1].dtype, both[1].shape) == (torch.float32, (2, 4, 9))
    assert (both[2].dtype, both[2].shape) == (torch.float32, (2, 4, 9, 11))


def test_probabilities_are_those_of_the_output() -> None:
    case = random_case(mask_shape=(2, 4, 9, 11), bias_shape=(1, 2, 9, 11)).requiring_grad()
    out, lse, probs = flash_dmattn_func(
        *case.inputs, is_causal=True, softcap=2.0, return_lse=True, return_attn_probs=True
    )
    assert out.requires_grad and lse.requires_grad and not probs.requires_grad
    values = case.value.repeat_interleave(2, dim=2)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", probs, values), out)
    sums = probs.sum(-1)
    torch.testing.assert_close(sums, torch.isfinite(lse).to(sums.dtype))


def test_keywords_and_defaults() -> None:
    case = random_case()
    named = flash_dmattn_func(
        query=case.query,
        key=case.key,
        value=case.value,
        attn_mask=None,
        attn_bias=None,
        softmax_scale=8**-0.5,
        is_causal=False,
        softcap=0.0,
        deterministic=False,
        window_size=None,
        return_lse=False,
        backend="cpu",
    )
    assert torch.equal(named, flash_dmattn_func(*case.inputs))


def test_deterministic_algorithms_reach_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    backward = cpu.backward

    def watched(problem: Problem, *rest: Any) -> Any:
        asked.append(problem.deterministic)
        return backward(problem, *rest)

    monkeypatch.setattr(cpu, "backward", watched)
    case = random_case().requiring_grad()
    flash_dmattn_func(*case.inputs).sum().backward()
    flash_dmattn_func(*case.inputs, deterministic=True).sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        flash_dmattn_func(*case.inputs).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True, True]


def test_auto_returns_the_function() -> None:
    case = random_case()
    expected = flash_dmattn_func(*case.inputs, is_causal=True)
    for backend in (None, "cpu"):
        attend = flash_dmattn_func_auto(backend=backend)
        assert torch.equal(attend(*case.inputs, is_causal=True), expected)


def test_unknown_and_unusable_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"backend: got 'tpu', wanted one of 'cuda', .*'cpu'"):
        flash_dmattn_func_auto("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="'cuda', which cannot run here: torch sees no CUDA"):
        flash_dmattn_func_auto("cuda")
    assert get_available_backends()[:2] == ["cpu", "flex"]


def test_cuda_backend_needs_one_usable_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(device: int) -> None:
        if device < usable:
            raise RuntimeError("too old")

    rows = [registry.named("cuda"), registry.named("cpu")]
    monkeypatch.setattr(registry, "BACKENDS", rows)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "check_device", check)
    usable = 1
    assert get_available_backends() == ["cuda", "cpu"]
    usable = 2
    assert get_available_backends() == ["cpu"]
    assert registry.named("cuda").unavailable() == "too old"


def test_import_needs_neither_gpu_nor_kernels() -> None:
    code = (
        "import sys; sys.modules['dmattn_kernels'] = None; import torch, dmattn; "
        "assert not torch.cuda.is_initialized(); "
        "dmattn.flash_dmattn_func(*[torch.ones(1, 2, 1, 4)] * 3); print(dmattn.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == dmattn.__version__


def test_everything_exported_exists() -> None:
    assert all(hasattr(dmattn, name) for name in dmattn.__all__)


class Counting(CpuBackend):
    """The CPU backend under another name."""

    name = "plain"

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, problem: Problem, for_backward: bool = True) -> Results:
        self.calls += 1
        return super().forward(problem, for_backward)


@contextmanager
def preferred(backend: Counting) -> Iterator[Counting]:
    """Within, the registry has this backend as its first row."""
    registry.BACKENDS.insert(0, backend)
    try:
        yield backend
    finally:
        registry.BACKENDS.remove(backend)


def test_a_backend_is_a_row() -> None:
    """Once in the registry it is listed, found by name, preferred by its place, and computes."""
    case = random_case(bias_shape=(1, 2, 1, 11), is_causal=True)
    before = get_available_backends()
    with preferred(Counting()) as plain:
        assert get_available_backends() == ["plain", *before]
        leaves = case.requiring_grad()
        results = []
        for backend in (None, "plain", "cpu"):
            out = flash_dmattn_func(*leaves.inputs, is_causal=True, backend=backend)
            results.append([out, *torch.autograd.grad(out, [leaves.query], case.dout)])
        assert plain.calls == 2
        direct = torch.ops.dmattn.fwd(*case.inputs, None, 8**-0.5, True, backend="plain")
        assert plain.calls == 3 and torch.equal(direct[0], results[1][0])
        compiled = torch.compile(flash_dmattn_func, fullgraph=True, backend="aot_eager")
        compiled(*case.inputs, is_causal=True, backend="plain")
        assert plain.calls == 4
    for a, b in zip(results[1], results[2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    assert get_available_backends() == before


def test_a_backend_says_what_it_does_not_do() -> None:
    class NoCausal(Counting):
        name = "no-causal"

        def unsupported(self, problem: Problem) -> list[Exception]:
            return [ValueError("is_causal: got True, wanted False")] if problem.is_causal else []

    case = random_case()
    with preferred(NoCausal()) as backend:
        flash_dmattn_func(*case.inputs, is_causal=True)  # the next row serves that
        assert backend.calls == 0
        flash_dmattn_func(*case.inputs)
        assert backend.calls == 1
        with pytest.raises(ValueError, match="is_causal: got True, wanted False"):
            flash_dmattn_func(*case.inputs, is_causal=True, backend="no-causal")


def test_no_backend_stands_in_for_a_copy() -> None:
    """If a backend would serve the call with a contiguous key, the error says so.

    Backends that come later in the registry serve the call only if they are named.
    """

    class Dense(Counting):
        name = "dense"

        def unsupported(self, problem: Problem) -> list[Exception]:
            return wrong_strides(problem.q, problem.k, problem.v)

    case = random_case()
    turned = case.key.transpose(1, 3).contiguous().transpose(1, 3)
    with preferred(Dense()) as backend:
        for given in (case, case.requiring_grad()):
            with pytest.raises(ValueError, match=r"key: got stride .*pass key.contiguous\(\)"):
                flash_dmattn_func(given.query, turned, given.value)
        assert explain(case.query, turned, case.value).startswith("backend: none\n  not dense: key")
        out = flash_dmattn_func(case.query, turned, case.value, backend="cpu")
        assert backend.calls == 0
        assert torch.equal(out, flash_dmattn_func(case.query, turned.contiguous(), case.value))
        assert backend.calls == 1


def test_explain_says_what_a_call_does_where_a_backend_lacks_something() -> None:
    """A missing package is an error; if a backend does not serve the device, the next one does."""

    class Lacking(Counting):
        name = "lacking"

        def unavailable(self) -> str | None:
            return "its package is missing"

        def unavailable_on(self, device: torch.device) -> str | None:
            return None

        def forward(self, problem: Problem, for_backward: bool = True) -> Results:
            raise RuntimeError("its package is missing")

    class Elsewhere(Counting):
        name = "elsewhere"

        def unavailable(self) -> str | None:
            return None

        def unavailable_on(self, device: torch.device) -> str | None:
            return f"it leaves {device} alone"

    case = random_case()
    with preferred(Lacking()):
        with pytest.raises(RuntimeError, match="its package is missing"):
            flash_dmattn_func(*case.inputs)
        text = explain(*case.inputs)
        assert text.startswith(
            "backend: none\n  not lacking: cannot run here: its package is missing\n"
        )
        assert "not cpu: it does not stand in for what lacking lacks; backend= takes it" in text
    with preferred(Elsewhere()) as backend:
        flash_dmattn_func(*case.inputs)
        assert backend.calls == 0
        assert explain(*case.inputs).startswith(
            "backend: cpu\n  not elsewhere: cannot run here: it leaves cpu alone\n"
        )


def test_numpy_numbers() -> None:
    case = random_case(bias_shape=(1, 2, 1, 11))
    plain = flash_dmattn_func(
        *case.inputs, softmax_scale=0.5, softcap=3.0, is_causal=True, window_size=4
    )
    given = flash_dmattn_func(
        *case.inputs,
        softmax_scale=np.float32(0.5),
        softcap=np.float64(3),
        is_causal=np.bool_(True),
        window_size=np.int64(4),
    )
    assert torch.equal(plain, given)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.uint16])
def test_padding_masks_of_two_dimensions(dtype: torch.dtype) -> None:
    case = random_case(is_causal=True)
    mask = torch.rand(2, 11) < 0.6
    wide = flash_dmattn_func(*case.inputs[:3], mask[:, None, None], is_causal=True)
    assert torch.equal(wide, flash_dmattn_func(*case.inputs[:3], mask.to(dtype), is_causal=True))


def test_row_masks_of_two_dimensions() -> None:
    case = random_case()
    mask = torch.rand(9, 11) < 0.6
    wide = flash_dmattn_func(*case.inputs[:3], mask[None, None])
    assert torch.equal(wide, flash_dmattn_func(*case.inputs[:3], mask))
    both = random_case(batch=2, seqlen_q=2)
    with pytest.raises(ValueError, match=r"both \(batch, seqlen_k\) and"):
        flash_dmattn_func(*both.inputs[:3], mask[:2])
    for size in (0, 1):  # both readings are the same
        alike = random_case(batch=size, seqlen_q=size)
        out = flash_dmattn_func(*alike.inputs[:3], mask[:size])
        assert out.shape == (size, size, 4, 8)


def test_devices_that_no_backend_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BACKENDS", [registry.named("cuda")])
    case = random_case()
    for leaves in (case, case.requiring_grad()):
        with pytest.raises(ValueError, match="query: got device cpu, wanted cuda"):
            flash_dmattn_func(*leaves.inputs)
    monkeypatch.setattr(dispatch, "_PROBES", None)
    with pytest.raises(ValueError, match="query: got device cpu, wanted cuda"):
        flash_dmattn_func(*case.inputs)


def test_explain_of_shapes_alone() -> None:
    q = torch.empty(1, 5, 2, 8, device="meta")
    assert flash_dmattn_func(q, q, q).shape == q.shape
    assert "device 'meta' a call returns shapes" in explain(q, q, q)


def test_explain() -> None:
    case = random_case(bias_shape=(1, 2, 1, 11))
    text = explain(*case.inputs)
    assert text.startswith(
        "backend: cpu\n  not cuda: query: got device cpu, wanted cuda for backend 'cuda'; "
        f"cannot run here: {registry.named('cuda').unavailable()}\n"
        "  not triton: query: got device cpu, wanted a GPU, or TRITON_INTERPRET=1 set before "
        "triton is imported, for backend 'triton'; "
        f"cannot run here: {registry.named('triton').unavailable()}\n  not flex: cpu comes first"
    )
    assert explain(*case.inputs, window_size=3, is_causal=True, backend="cpu") == "backend: cpu"
    narrow = explain(*case.inputs[:2], case.value[..., :5], backend="cpu")
    note = "head_dim is 8 of key and 5 of value, so value is copied to be padded"
    assert narrow == f"backend: cpu\n  slow: {note}"
    text = explain(*case.inputs, backend="cuda", return_lse=True)
    assert text.startswith("backend: none\n  not cuda: query: got device cpu")
    with preferred(Counting()):
        assert "  not cpu: plain comes first" in explain(*case.inputs)
    with pytest.raises(ValueError, match="softcap"):
        explain(*case.inputs, softcap=-1.0)


def test_a_torch_without_the_private_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call then goes through the operators, with the same numbers."""
    case = random_case(bias_shape=(1, 2, 1, 11), mask_shape=(2, 1, 1, 11))
    results = []
    for probes in (dispatch._PROBES, None):
        monkeypatch.setattr(dispatch, "_PROBES", probes)
        leaves = case.requiring_grad()
        plain = flash_dmattn_func(*case.inputs, is_causal=True)
        out = flash_dmattn_func(*leaves.inputs, is_causal=True)
        name = type(out.grad_fn).__name__
        assert ("Eager" in name) == (probes is not None), name
        assert leaves.attn_bias is not None
        wanted = [leaves.query, leaves.key, leaves.value, leaves.attn_bias]
        results.append([plain, out, *torch.autograd.grad(out, wanted, case.dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_inputs_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager call with a window and a backward checks the whole problem once."""
    checked = []
    monkeypatch.setattr(arguments, "check", checked.append)
    monkeypatch.setattr(ops_attention, "check", checked.append)
    case = random_case(bias_shape=(1, 2, 1, 11)).requiring_grad()
    flash_dmattn_func(*case.inputs, is_causal=True, window_size=4).sum().backward()
    assert len(checked) == 1


def test_results_without_lse_rest_reach_the_operator() -> None:
    """A backend may return no lse_rest.

    With create_graph the backward goes through the operator, which has to accept that.
    """

    class NoRest(Counting):
        def forward(self, problem: Problem, for_backward: bool = True) -> Results:
            return super().forward(problem, for_backward)._replace(lse_rest=None)

    case = random_case()
    leaves = case.requiring_grad()
    grads = []
    for create_graph in (False, True):
        with preferred(NoRest()):
            out = flash_dmattn_func(*leaves.inputs)
            grads += torch.autograd.grad(out, leaves.query, case.dout, create_graph=create_graph)
            through = torch.ops.dmattn.fwd(*case.inputs)
            assert through[2].shape == (0,)
    assert torch.equal(*grads)


def test_gradients_in_batches() -> None:
    """is_grads_batched passes vmap's batches, which are no plain tensors, to an eager backward."""
    leaves = random_case(bias_shape=(1, 2, 1, 11)).requiring_grad()
    out = flash_dmattn_func(*leaves.inputs)
    douts = torch.randn(3, *out.shape, dtype=out.dtype)
    (many,) = torch.autograd.grad(
        out, leaves.query, douts, is_grads_batched=True, retain_graph=True
    )
    for dout, dq in zip(douts, many, strict=True):
        (one,) = torch.autograd.grad(out, leaves.query, dout, retain_graph=True)
        torch.testing.assert_close(dq, one, rtol=0, atol=1e-14)
