"""The torch.library operators: schemas, fakes, autograd and compilers, on the CPU."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attention_cases import Case, random_case
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode
from torch_releases import TRACES_EXTREMES

import dmattn
from dmattn import (
    arguments,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    maybe_create_mask,
    sliding_window,
)


@pytest.fixture(autouse=True)
def _forget_compilations() -> None:
    torch._dynamo.reset()


SHAPES: list[dict[str, Any]] = [
    {},
    {"mask_shape": (2, 1, 1, 11), "is_causal": True},
    {"bias_shape": (1, 2, 9, 1), "softcap": 2.0},
    {"mask_shape": (1, 4, 9, 11), "bias_shape": (2, 4, 9, 11), "is_causal": True},
    {"seqlen_k": 0},
    {"seqlen_q": 0, "bias_shape": (1, 1, 1, 11)},
]


def forward_arguments(case: Case) -> tuple[Any, ...]:
    options = case.options
    return (
        *case.inputs,
        torch.tensor([0.5, -1.0, 2.0, -torch.inf]) if options.get("is_causal") else None,
        0.3,
        bool(options.get("is_causal", False)),
        float(options.get("softcap") or 0.0),
    )


@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("grad", [False, True])
def test_forward_operator(options: dict[str, Any], grad: bool) -> None:
    case = random_case(dtype=torch.float32, **options)
    opcheck(torch.ops.dmattn.fwd, forward_arguments(case.requiring_grad() if grad else case))


@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("needs", [[True] * 5, [False, True, False, False, True], [False] * 5])
def test_backward_operator(options: dict[str, Any], needs: list[bool]) -> None:
    case = random_case(dtype=torch.float32, **options)
    arguments = forward_arguments(case)
    results = torch.ops.dmattn.fwd(*arguments)
    for dlse in (None, case.dlse):
        opcheck(torch.ops.dmattn.bwd, (case.dout, dlse, *results, needs, *arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_fake_and_real_agree(dtype: torch.dtype) -> None:
    """Shape, stride and dtype of every result, for inputs that are not contiguous."""
    case = random_case(dtype=dtype, bias_shape=(1, 4, 9, 1))
    case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    case.dout = torch.ones((), dtype=dtype).expand(case.dout.shape)
    arguments = forward_arguments(case)
    real = torch.ops.dmattn.fwd(*arguments)
    fake = torch.ops.dmattn.fwd(*_to_meta(arguments))
    more = (case.dout, case.dlse, *real, [True] * 5, *arguments)
    real += torch.ops.dmattn.bwd(*more)
    fake += torch.ops.dmattn.bwd(*_to_meta(more))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def _to_meta(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.to("meta") if isinstance(a, Tensor) else a for a in arguments)


@pytest.mark.parametrize("window_size", [None, 4])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_graph_breaks(backend: str, window_size: int | None) -> None:
    case = random_case(mask_shape=(2, 1, 1, 11), bias_shape=(2, 4, 1, 11), is_causal=True)

    def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        out, lse = flash_dmattn_func(
            q, k, v, mask, bias, is_causal=True, window_size=window_size, return_lse=True
        )
        result: Tensor = out.sum(-1).mT * lse.masked_fill(lse.isinf(), 0.0)
        return result

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    results = []
    for function in (step, compiled):
        leaves = case.requiring_grad()
        result = function(*leaves.inputs)
        wanted: list[Any] = [leaves.query, leaves.key, leaves.value, leaves.attn_bias]
        results.append([result, *torch.autograd.grad(result.sum(), wanted)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


class Dense(torch.nn.Module):
    """Attention with its mask and bias in buffers, which are cut to the length of the query."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("mask", torch.rand(2, 1, 1, 300) < 0.8)
        self.register_buffer("bias", torch.randn(1, 2, 1, 300))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[1]
        mask = self.mask[..., :n] if "mask" in self.kind else None
        bias = None if self.kind == "plain" else self.bias[..., :n]
        window = 8 if "window" in self.kind else None
        return flash_dmattn_func(q, k, v, mask, bias, is_causal=True, window_size=window)


class PackedTokens(Dense):
    """The same for packed sequences."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None = None) -> Tensor:
        n = q.shape[0]
        assert cu is not None
        mask = self.mask[0, 0, 0, :n, None] if "mask" in self.kind else None
        bias = None if self.kind == "plain" else self.bias[0, :, 0, :n].t()
        window = 8 if "window" in self.kind else None
        return flash_dmattn_varlen_func(
            *(q, k, v, cu, None, n, n, mask, bias), is_causal=True, window_size=window
        )


@pytest.mark.parametrize("kind", ["plain", "mask and bias", "window", "window and mask"])
@pytest.mark.parametrize("packed", [False, True])
def test_one_graph_serves_all_lengths(packed: bool, kind: str) -> None:
    torch.manual_seed(0)
    attend = PackedTokens(kind) if packed else Dense(kind)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for n in range(20, 260, 20):
        shape = (n,) if packed else (2, n)
        inputs = [torch.randn(*shape, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        more = [torch.tensor([0, n // 3, n], dtype=torch.int32)] if packed else []
        results = []
        for function in (attend, compiled):
            out = function(*inputs, *more)
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
        if n == 20:
            graphs = counter.frame_count  # those of one compilation, which may restart
    sides = 1 if TRACES_EXTREMES or "window" not in kind else 2
    assert counter.frame_count <= graphs * sides


@pytest.mark.parametrize("window_size", [None, 4, 40])
@pytest.mark.parametrize("mask_shape", [None, (2, 11), (2, 9), (2, 1, 1, 11)])
def test_mask_utilities_compile(
    window_size: int | None, mask_shape: tuple[int, ...] | None
) -> None:
    bias = torch.randn(2, 4, 1, 11)
    mask = None if mask_shape is None else torch.rand(mask_shape) < 0.7
    compiled = torch.compile(maybe_create_mask, fullgraph=True, backend="aot_eager")
    got = compiled(bias, mask, 2, 9, 11, window_size)
    expected = maybe_create_mask(bias, mask, 2, 9, 11, window_size)
    assert (got is None) == (expected is None)
    if got is not None and expected is not None:
        assert torch.equal(got, expected)


def test_export() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_dmattn_func(q, k, v, is_causal=True)

    case = random_case()
    exported = torch.export.export(Attend(), case.inputs[:3])
    assert any("dmattn.fwd" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(
        exported.module()(*case.inputs[:3]), flash_dmattn_func(*case.inputs[:3], is_causal=True)
    )


def test_direct_call_equals_the_operator() -> None:
    """Without gradients and modes the dispatcher is left out; the numbers are the same."""
    case = random_case(mask_shape=(2, 1, 9, 11), bias_shape=(1, 1, 1, 11))
    direct = flash_dmattn_func(*case.inputs, return_lse=True)
    through = torch.ops.dmattn.fwd(*case.inputs, None, 8**-0.5, False, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(direct, through[:2], strict=True))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("way", ["device", "flops", "compile"])
def test_arguments_that_equal_the_defaults_of_the_schema(way: str, with_bias: bool) -> None:
    """The dispatcher drops them at the end of a call, so that autograd gets fewer inputs."""
    q, k, v = (torch.randn(2, 9, 4, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 4, 9, 9, requires_grad=True) if with_bias else None
    wanted = [t for t in (q, k, v, bias) if t is not None]

    def loss(*tensors: Tensor | None) -> Tensor:
        query, key, value, attn_bias = tensors
        return (
            flash_dmattn_func(query, key, value, attn_bias=attn_bias, softmax_scale=1.0)
            .square()
            .sum()
        )

    want = torch.autograd.grad(loss(q, k, v, bias), wanted)
    contexts = {"device": torch.device("cpu"), "flops": FlopCounterMode(display=False)}
    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if way == "compile" else loss
    with contexts.get(way, nullcontext()):
        got = torch.autograd.grad(run(q, k, v, bias), wanted)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore")  # torch.jit warns that it is deprecated
def test_traces_that_would_keep_a_length_are_refused() -> None:
    q, k = torch.randn(1, 9, 4, 8), torch.randn(1, 9, 2, 8)
    score = torch.randn(1, 2, 1, 9)

    def window(query: Tensor, key: Tensor, attn_bias: Tensor) -> Tensor:
        return flash_dmattn_func(query, key, key, None, attn_bias, is_causal=True, window_size=4)

    def sliding(query: Tensor, key: Tensor) -> Tensor:
        selection = sliding_window(key.shape[1], 4)
        return flash_dmattn_func(query, key, key, is_causal=True, selection=selection)

    def chosen(attn_bias: Tensor) -> Tensor:
        return dmattn.select_keys(attn_bias, 4).end

    def documents(attn_bias: Tensor) -> Tensor:
        return dmattn.packed_documents([0, 4, attn_bias.shape[-1]]).end

    def intervals(end: Tensor) -> Tensor:
        return dmattn.KeySelection.from_intervals(end).end

    def whole(query: Tensor, key: Tensor, attn_bias: Tensor) -> Tensor:
        return flash_dmattn_func(query, key, key, None, attn_bias, is_causal=True)

    end = torch.full((1, 2, 9), 9, dtype=torch.int32)
    calls = ((window, (q, k, score)), (sliding, (q, k)), (chosen, (score,)))
    for function, given in (*calls, (documents, (score,)), (intervals, (end,))):
        with pytest.raises(RuntimeError, match=r"torch.jit.trace: got a s.*wanted torch.export"):
            torch.jit.trace(function, given)
    made = dmattn.sliding_window(9, 4)

    def with_selection(query: Tensor) -> Tensor:
        return flash_dmattn_func(query, query, query, is_causal=True, selection=made)

    with pytest.raises(RuntimeError, match=r"torch.jit.trace: got a selection of keys"):
        torch.jit.trace(with_selection, (k,))
    traced = torch.jit.trace(whole, (q, k, score))
    longer = [torch.cat((t, t), 3 if t is score else 1) for t in (q, k, score)]
    torch.testing.assert_close(traced(*longer), whole(*longer))


def test_autocast_casts_as_sdpa_does() -> None:
    """Operands are cast to its dtype, but not a float32 bias; the arithmetic stays the same."""
    case = random_case(dtype=torch.float32, bias_shape=(2, 4, 9, 11)).requiring_grad()
    q, k, v, _, bias = case.inputs
    low = [t.detach().bfloat16() for t in (q, k, v)]
    for given, meant in ((bias, bias), (bias.half(), bias.half().bfloat16())):
        expected = flash_dmattn_func(*low, attn_bias=meant)
        with torch.autocast("cpu", torch.bfloat16):
            out = flash_dmattn_func(q, k, v, attn_bias=given)
            plain = torch.nn.functional.scaled_dot_product_attention(q, k[:, :9, :1], v[:, :9, :1])
        assert out.dtype == plain.dtype == torch.bfloat16
        assert torch.equal(out, expected)
    grads = torch.autograd.grad(out.sum(), [q, k])
    assert all(g.dtype == torch.float32 for g in grads)


def test_autocast_mixes_dtypes_and_leaves_float64() -> None:
    case = random_case(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_dmattn_func(case.query, case.key.bfloat16(), case.value)
        wide = flash_dmattn_func(*(t.double() for t in case.inputs[:3]))
    assert out.dtype == torch.bfloat16 and wide.dtype == torch.float64


@pytest.mark.parametrize("kind", ["cuda", "cpu", "xpu"])
def test_autocast_counts_on_every_device_that_a_backend_serves(kind: str) -> None:
    query = Mock(is_cuda=kind == "cuda", is_cpu=kind == "cpu", is_xpu=kind == "xpu")
    found = [arguments.is_autocast(query)]
    torch.set_autocast_enabled(kind, True)
    try:
        found.append(arguments.is_autocast(query))
    finally:
        torch.set_autocast_enabled(kind, False)
    assert found == [False, True]


def test_negative_view() -> None:
    case = random_case()
    negative = torch.view_as_complex(torch.stack([case.query] * 2, -1)).conj().imag
    assert negative.is_neg()
    expected = flash_dmattn_func(-case.query, case.key, case.value)
    torch.testing.assert_close(flash_dmattn_func(negative, case.key, case.value), expected)


def test_functorch_transforms() -> None:
    """grad, vjp and jacrev give autograd's numbers, and vmap a loop's."""
    case = random_case(bias_shape=(1, 2, 9, 11), mask_shape=(2, 1, 1, 11), is_causal=True)
    q, k, v, mask, bias = case.inputs

    def attend(q: Tensor, bias: Tensor) -> Tensor:
        return flash_dmattn_func(q, k, v, mask, bias, is_causal=True)

    leaves = case.requiring_grad()
    out = flash_dmattn_func(*leaves.inputs, is_causal=True)
    assert leaves.attn_bias is not None
    want = torch.autograd.grad(out, (leaves.query, leaves.attn_bias), case.dout)
    got = torch.func.grad(lambda *x: (attend(*x) * case.dout).sum(), argnums=(0, 1))(q, bias)
    _, pull = torch.func.vjp(attend, q, bias)
    for found in (got, pull(case.dout)):
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    jacobian = torch.func.jacrev(lambda q: attend(q, bias)[0, 5, 1])(q)
    assert jacobian.shape == (8, *q.shape)
    basis = torch.zeros_like(case.dout)
    basis[0, 5, 1, 3] = 1
    torch.testing.assert_close(jacobian[3], pull(basis)[0], rtol=0, atol=1e-13)
    many = torch.stack([q, 2 * q])
    looped = torch.stack([attend(x, bias) for x in many])
    torch.testing.assert_close(torch.func.vmap(attend, (0, None))(many, bias), looped)
    each = torch.func.vmap(torch.func.grad(lambda q: attend(q, bias).square().sum()))(many)
    one = torch.func.grad(lambda q: attend(q, bias).square().sum())(2 * q)
    torch.testing.assert_close(each[1], one, rtol=0, atol=1e-13)


def test_derivatives_that_are_not_there_are_refused() -> None:
    """An error that says so, rather than a gradient that is silently zero."""
    case = random_case()

    def loss(q: Tensor) -> Tensor:
        return flash_dmattn_func(q, case.key, case.value).square().sum()

    with pytest.raises(RuntimeError, match="forward-mode derivatives"):
        torch.func.hessian(loss)(case.query)  # forward mode over reverse mode
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(case.query)
    make_dual: Any = torch.autograd.forward_ad.make_dual
    with torch.autograd.forward_ad.dual_level():
        dual = make_dual(case.query, case.dout)
        with pytest.raises(RuntimeError, match="forward-mode derivatives"):
            loss(dual)
    with pytest.raises(RuntimeError, match="forward-mode derivatives"):
        torch.func.jvp(loss, (case.query,), (case.dout,))


def test_dtensors_are_split_by_batch_and_by_heads() -> None:
    """Over two processes: see the script."""
    script = Path(__file__).with_name("sharded_attention.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Older releases of torch print lines of their own, and those of two ranks may be mixed up.
    assert done.stdout.count("equal") == 4
