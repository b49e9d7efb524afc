"""flash_dmattn_varlen_func on the CPU: errors, operators, compilers, and what kernels are handed.

Its results are compared with the oracle in tests/attention of the repository.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from dmattn import explain_varlen, flash_dmattn_func, flash_dmattn_varlen_func
from dmattn.backends.cuda import attention as cuda
from dmattn.backends.cuda import kernels
from dmattn.problem import Needs, Packing, Problem
from dmattn.utils.padding import index_first_axis, unpad_input

NAMES = ("dq", "dk", "dv", "dbias")


@dataclass(repr=False)
class Packed:
    """Inputs of one call over packed sequences, with the gradients to send back."""

    query: Tensor
    key: Tensor
    value: Tensor
    lengths_q: list[int]
    lengths_k: list[int]
    attn_mask: Tensor | None = None
    attn_bias: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dout: Tensor = field(init=False)
    dlse: Tensor = field(init=False)

    def __post_init__(self) -> None:
        total, nheads, _ = self.query.shape
        row_dtype = torch.promote_types(self.query.dtype, torch.float32)
        self.dout = torch.randn(self.query.shape).to(self.query.dtype)
        self.dlse = torch.randn((nheads, total), dtype=row_dtype)

    def __repr__(self) -> str:
        tensors = (self.query, self.key, self.attn_mask, self.attn_bias)
        shapes = [None if t is None else (str(t.dtype), *t.shape) for t in tensors]
        return f"Packed({self.lengths_q}, {self.lengths_k}, {shapes}, {self.options})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    @property
    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        bounds = boundaries(self.lengths_q)
        # One tensor if lengths are equal: with two a causal window takes a slower path.
        return bounds, bounds if self.lengths_k == self.lengths_q else boundaries(self.lengths_k)

    def call(self, **more: Any) -> tuple[Tensor, Tensor]:
        longest = max(self.lengths_q, default=0), max(self.lengths_k, default=0)
        inputs = (self.query, self.key, self.value, *self.cu_seqlens, *longest)
        operands = (self.attn_mask, self.attn_bias)
        options = self.options | more
        result: tuple[Tensor, Tensor] = flash_dmattn_varlen_func(
            *inputs, *operands, return_lse=True, **options
        )
        return result

    def requiring_grad(self) -> "Packed":
        q, k, v = (t.detach().requires_grad_() for t in (self.query, self.key, self.value))
        bias = None if self.attn_bias is None else self.attn_bias.detach().requires_grad_()
        case = replace(self, query=q, key=k, value=v, attn_bias=bias)
        case.dout, case.dlse = self.dout, self.dlse
        return case

    def leaves(self) -> list[Tensor]:
        given = (self.query, self.key, self.value, self.attn_bias)
        return [t for t in given if t is not None]


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(
    lengths_q: list[int],
    lengths_k: list[int] | None = None,
    nheads: int = 4,
    nheads_k: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    mask: tuple[str, int] | None = None,  # ("key" or "row", heads)
    bias: tuple[str, int] | None = None,
    seed: int = 0,
    **options: Any,
) -> Packed:
    torch.manual_seed(seed)
    lengths_k = lengths_q if lengths_k is None else lengths_k
    total_q, total_k = sum(lengths_q), sum(lengths_k)

    def shape(kind: str, heads: int) -> tuple[int, ...]:
        if kind == "key":
            return total_k, heads
        return total_q, heads, max(lengths_k, default=0)

    return Packed(
        torch.randn(total_q, nheads, head_dim).to(dtype),
        torch.randn(total_k, nheads_k, head_dim).to(dtype),
        torch.randn(total_k, nheads_k, head_dim).to(dtype),
        lengths_q,
        lengths_k,
        None if mask is None else torch.rand(shape(*mask)) < 0.67,
        None if bias is None else torch.randn(shape(*bias)).to(dtype),
        options,
    )


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens_at_all(lengths: list[int]) -> None:
    case = packed(lengths, bias=("key", 1)).requiring_grad()
    out, lse = case.call()
    assert out.shape == (0, 4, 8) and lse.shape == (4, 0)
    grads = torch.autograd.grad(out.sum() + lse.sum(), case.leaves())
    assert [g.shape for g in grads] == [t.shape for t in case.leaves()]


def test_numpy_numbers() -> None:
    case = packed([3, 5], bias=("key", 2))
    given = (case.query, case.key, case.value, case.cu_seqlens[0], None)
    plain = flash_dmattn_varlen_func(*given, 5, 5, None, case.attn_bias, window_size=2)
    five, two = np.int64(5), np.int32(2)
    found = flash_dmattn_varlen_func(*given, five, five, None, case.attn_bias, window_size=two)
    assert torch.equal(plain, found)


@pytest.mark.parametrize("same", ["none", "clone"])
def test_equal_boundaries_need_not_be_one_tensor(same: str) -> None:
    case = packed([6, 5], bias=("key", 2))
    cu = case.cu_seqlens[0]
    results = []
    for cu_k in (cu, None if same == "none" else cu.clone()):
        leaves = case.requiring_grad()
        q, k, v, bias = leaves.leaves()
        out = flash_dmattn_varlen_func(
            *(q, k, v, cu, cu_k, 6, 6), attn_bias=bias, is_causal=True, window_size=3
        )
        results.append([out, *torch.autograd.grad(out, leaves.leaves(), case.dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("lengths", [([2, 0, 5, 3], [9, 4, 5, 1]), ([0, 4], [0, 0]), ([4], [11])])
@pytest.mark.parametrize("mask", [None, ("key", 4)])
def test_window_over_other_rows_than_keys(
    lengths: tuple[list[int], list[int]], mask: tuple[str, int] | None
) -> None:
    """As in chunked prefill: results and gradients are those of each sequence alone."""
    rows, keys = lengths
    case = packed(rows, keys, bias=("key", 2), mask=mask).requiring_grad()
    q, k, v, bias = case.leaves()
    settings: dict[str, Any] = {"is_causal": True, "window_size": 3, "return_lse": True}
    longest = max(*rows, 3), max(*keys, 5)
    results = flash_dmattn_varlen_func(
        *(q, k, v, *case.cu_seqlens, *longest, case.attn_mask, bias), **settings
    )
    alone = []
    allowed = torch.ones(sum(keys), 1).bool() if case.attn_mask is None else case.attn_mask
    for part in zip(*(t.split(rows) for t in (q,)), *(t.split(keys) for t in (k, v, allowed, bias)),
                    strict=True):  # fmt: skip
        q1, k1, v1, mask1, bias1 = part
        wide = (t.t()[None, :, None] for t in (mask1, bias1))
        alone.append(flash_dmattn_func(q1[None], k1[None], v1[None], *wide, **settings))
    outs, lses = (
        torch.cat(parts, 1 + (n == 1)) for n, parts in enumerate(zip(*alone, strict=True))
    )
    expected = (outs[0], lses[0])
    sent = (case.dout, case.dlse)
    found = torch.autograd.grad(results, case.leaves(), sent)
    wanted = torch.autograd.grad(expected, case.leaves(), sent)
    for a, b in zip((*results, *found), (*expected, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


# ----------------------------------------------------------------------------------------- errors


def test_errors() -> None:
    case = packed([3, 5], [4, 6], bias=("key", 2))
    cu_q, cu_k = case.cu_seqlens
    good: dict[str, Any] = {
        "query": case.query,
        "key": case.key,
        "value": case.value,
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": 5,
        "max_seqlen_k": 6,
        "attn_bias": case.attn_bias,
    }
    row_bias = torch.randn(8, 2, 6).double()
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"query": case.query[None]}, ValueError, r"query: got shape \(1, 8, 4, 8\), wanted 3"),
        ({"key": case.key[:, :, :4]}, ValueError, r"key: got shape \(10, 2, 4\)"),
        ({"value": case.value[:9]}, ValueError, r"value: got shape \(9, 2, 8\), wanted \(10, 2"),
        ({"cu_seqlens_q": cu_q.long()}, TypeError, "cu_seqlens_q: got dtype torch.int64"),
        (
            {"cu_seqlens_q": [0, 3, 8]},
            TypeError,
            "cu_seqlens_q: got .*list., wanted an int32 tensor",
        ),
        ({"cu_seqlens_k": cu_k[:2]}, ValueError, r"cu_seqlens_k: got shape \(2,\), wanted \(3,\)"),
        ({"cu_seqlens_k": cu_k.flip(0)}, ValueError, "cu_seqlens_k: got 4 at index 1 behind 10"),
        ({"cu_seqlens_q": cu_q - 1}, ValueError, "cu_seqlens_q: got"),
        ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q: got 3, wanted the length of the longest"),
        ({"max_seqlen_k": 5}, ValueError, "max_seqlen_k: got 5, wanted at least 6"),
        ({"max_seqlen_k": 6.0}, TypeError, "max_seqlen_k: got 6.0 .float., wanted an int"),
        ({"attn_bias": row_bias[:, :, :5]}, ValueError, r"attn_bias: got shape \(8, 2, 5\), want"),
        ({"attn_bias": row_bias[:, :1, 0]}, ValueError, r"attn_bias: got shape \(8, 1\), wanted"),
        ({"attn_mask": row_bias}, TypeError, "attn_mask: got dtype torch.float64"),
        ({"attn_bias": None, "window_size": 2}, ValueError, "attn_bias: got None, wanted one sc"),
        ({"attn_bias": row_bias, "window_size": 2}, ValueError, r"attn_bias: got shape \(8, 2, 6"),
        (
            {"attn_mask": row_bias > 0, "window_size": 2},
            ValueError,
            r"attn_mask: got shape \(8, 2, 6\), wanted \(total_k, heads\)",
        ),
        ({"window_size": 0}, ValueError, "window_size"),
        (
            {"window_size": (-1, -1)},
            TypeError,
            "for a sliding window pass the same score for every",
        ),
        (
            {"attn_bias": None, "window_size": 1},
            ValueError,
            "for a sliding window pass the same sc",
        ),
        ({"backend": "cuda"}, ValueError, "query: got device cpu, wanted cuda for backend 'cuda'"),
        ({"softcap": math.inf}, ValueError, "softcap: got inf"),
        ({"softcap": -30.0}, ValueError, "softcap: got -30.0, wanted a finite number of at least"),
        ({"is_causal": "no"}, TypeError, "is_causal: got 'no' .str., wanted True or False"),
        ({"deterministic": "no"}, TypeError, "deterministic: got 'no' .str., wanted True or Fa"),
    ]
    flash_dmattn_varlen_func(**good)
    for change, kind, words in wrong:
        with pytest.raises(kind, match=words):
            flash_dmattn_varlen_func(**(good | change))


@pytest.mark.parametrize("backend", [None, "flex"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window_size", [None, 2, 100])
def test_wrong_boundaries_are_refused_beside_any_window(
    window_size: int | None, is_causal: bool, backend: str | None
) -> None:
    """By each backend, by `explain_varlen`, and also in calls of a kind that is known."""
    case = packed([3, 5], [4, 6], bias=("key", 2))
    cu_q, cu_k = case.cu_seqlens
    wrong: list[tuple[Tensor, Tensor, tuple[int, int], str]] = [
        (boundaries([3, 4]), cu_k, (5, 6), r"cu_seqlens_q: got \[0, 3, 7\], wanted .* 0 to 8"),
        (cu_q, boundaries([4, 5]), (5, 6), r"cu_seqlens_k: got \[0, 4, 9\], wanted .* 0 to 10"),
        (cu_q - 1, cu_k, (5, 6), "cu_seqlens_q: got"),
        (cu_q, cu_k, (4, 6), "max_seqlen_q: got 4, wanted at least 5"),
        (cu_q, cu_k, (5, 5), "max_seqlen_k: got 5, wanted at least 6"),
    ]
    options: dict[str, Any] = {"window_size": window_size, "is_causal": is_causal}
    options |= {"attn_bias": case.attn_bias, "backend": backend}
    flash_dmattn_varlen_func(case.query, case.key, case.value, cu_q, cu_k, 5, 6, **options)
    for rows, keys, longest, message in wrong:
        arguments = (case.query, case.key, case.value, rows, keys, *longest)
        for function in (flash_dmattn_varlen_func, explain_varlen):
            with pytest.raises(ValueError, match=message):
                function(*arguments, **options)


# -------------------------------------------------------------------------------------- operators

SHAPES: list[dict[str, Any]] = [
    {},
    {"mask": ("key", 2), "bias": ("row", 4)},
    {"mask": ("row", 1), "bias": ("key", 1)},
]


def arguments(case: Packed) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of dmattn::fwd: those by position, and those by name."""
    mask, bias = (
        None if t is None else t.transpose(0, 1) for t in (case.attn_mask, case.attn_bias)
    )
    packing = Packing(*case.cu_seqlens, max(case.lengths_q), max(case.lengths_k))
    return (
        case.query,
        case.key,
        case.value,
        mask,
        bias,
        torch.randn(4),
        0.3,
        True,
        2.0,
    ), packing._asdict()


@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("grad", [False, True])
def test_forward_operator(options: dict[str, Any], grad: bool) -> None:
    case = packed([3, 0, 5], [4, 2, 6], dtype=torch.float32, **options)
    case = case.requiring_grad() if grad else case
    opcheck(torch.ops.dmattn.fwd, *arguments(case))


@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("needs", [[True] * 5, [False, True, False, False, True], [False] * 5])
def test_backward_operator(options: dict[str, Any], needs: list[bool]) -> None:
    case = packed([3, 0, 5], [4, 2, 6], dtype=torch.float32, **options)
    given, packing = arguments(case)
    results = torch.ops.dmattn.fwd(*given, **packing)
    for dlse in (None, case.dlse):
        opcheck(torch.ops.dmattn.bwd, (case.dout, dlse, *results, needs, *given), packing)


@pytest.mark.parametrize("window_size", [None, 4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_compiles(is_causal: bool, window_size: int | None) -> None:
    torch._dynamo.reset()
    case = packed([7, 0, 9, 5], bias=("key", 2))
    cu = case.cu_seqlens[0]

    def step(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flash_dmattn_varlen_func(
            *(q, k, v, cu, cu, 9, 9), attn_bias=bias, is_causal=is_causal, window_size=window_size
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function in (step, compiled):
        leaves = case.requiring_grad().leaves()
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, case.dout)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scores_heads", [1, 2])
@pytest.mark.parametrize("window_size", [None, 4])
def test_compiles_behind_unpad_input(window_size: int | None, scores_heads: int) -> None:
    """The number of tokens then depends on the values of the mask."""

    def step(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        rows, indices, cu, *_ = unpad_input(q, mask)
        k, v, bias = (index_first_axis(t.flatten(0, 1), indices) for t in (k, v, bias))
        return flash_dmattn_varlen_func(
            *(rows, k, v, cu, cu, q.shape[1], q.shape[1]),
            attn_bias=bias,
            is_causal=True,
            window_size=window_size,
        )

    torch._dynamo.reset()
    leaves = [torch.randn(2, 9, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    leaves.append(torch.randn(2, 9, scores_heads, requires_grad=True))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 6:] = False
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    with torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    ):
        for function in (step, compiled):
            out = function(*leaves, mask)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives_are_refused() -> None:
    case = packed([3, 2]).requiring_grad()
    out, _ = case.call()
    (dq,) = torch.autograd.grad(out.sum(), case.query, create_graph=True)
    with pytest.raises(RuntimeError, match="dmattn::bwd is not differentiable"):
        torch.autograd.grad(dq.sum(), case.query)


def test_gradcheck() -> None:
    case = packed([3, 0, 2], [2, 1, 4], bias=("row", 2), is_causal=True).requiring_grad()

    def attend(*leaves: Tensor) -> Tensor:
        q, k, v, bias = leaves
        return replace(case, query=q, key=k, value=v, attn_bias=bias).call()[0]

    assert torch.autograd.gradcheck(attend, case.leaves())


# ------------------------------------------------------------------- what the kernels are handed


def test_the_kernels_get_the_callers_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views by stride, and cu_seqlens by address: nothing is copied, padded or read."""
    from test_cuda_path import Recorder, install, view

    recorder = install(Recorder(), monkeypatch)
    q = torch.randn(8, 4, 16).bfloat16()
    k, v = torch.randn(2, 2, 10, 16).bfloat16().transpose(1, 2).unbind(0)
    cu_q, cu_k = boundaries([3, 5]), boundaries([4, 6])
    mask, bias = torch.rand(10, 1).t() < 0.5, torch.randn(8, 4, 6).transpose(0, 1)
    packing = Packing(cu_q, cu_k, 5, 6)
    problem = Problem(q, k, v, mask, bias, None, 0.25, True, 1.0, True, packing=packing)
    results = cuda.forward(problem)
    out, lse, rest = results
    dout = torch.ones((), dtype=torch.bfloat16).expand(8, 4, 16)
    grads = cuda.backward(problem, results, dout, None, Needs(True, True, True, True))
    forward, backward = recorder.calls
    for call in (forward, backward):
        for name, t in (("q", q), ("k", k), ("v", v), ("mask", mask), ("bias", bias)):
            assert call[name] == view(t), name
        assert call["out"] == view(out) and call["lse"] == view(lse)
        assert call["cu_seqlens_q"] == view(cu_q) and call["cu_seqlens_k"] == view(cu_k)
        assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (5, 6)
        assert call["selection"] is None and call["lse_rest"] == view(rest)
    assert out.shape == q.shape and lse.shape == (4, 8)
    assert backward["deterministic"] is True
    assert backward["dout"][3] == (64, 16, 1)
    for name, grad in zip(NAMES, grads[:4], strict=True):
        assert backward[name] == view(grad) and grad.is_contiguous()
    kernels.load_kernels.cache_clear()
