"""Random attention problems, and the rule by which results are compared with the oracle."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dmattn.reference import ReferenceGradients, reference_gradients

# The tolerance that is added to twice the error of the plain computation, relative to the largest
# value of the oracle (or to 1). In half precision it is two roundings, 2 * 2^-11 and 2 * 2^-8: with
# one or two keys the plain computation may be exact, while the backward is not, since it computes
# the dot product of dout and out from an out that was rounded.
_TINY = {
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
    torch.float32: 1e-5,
    torch.float64: 4e-14,
}
_LENGTHS = (0, 1, 2, 7, 31, 33, 127, 128, 129)


@dataclass(repr=False)
class Case:
    """Inputs of one attention call, with the gradients to send back."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    attn_bias: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dout: Tensor = field(init=False)
    dlse: Tensor = field(init=False)

    def __post_init__(self) -> None:
        batch, seqlen_q, nheads, _ = self.query.shape
        row_dtype = torch.promote_types(self.query.dtype, torch.float32)
        self.dout = torch.randn(self.query.shape, dtype=self.query.dtype)
        self.dlse = torch.randn((batch, nheads, seqlen_q), dtype=row_dtype)

    def __repr__(self) -> str:
        shapes = [None if t is None else (str(t.dtype), *t.shape) for t in self.inputs]
        return f"Case({shapes}, {self.options})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # else hypothesis prints every number

    @property
    def inputs(self) -> tuple[Any, Any, Any, Any, Any]:
        return self.query, self.key, self.value, self.attn_mask, self.attn_bias

    def requiring_grad(self) -> "Case":
        """The same case with leaves that require gradients, keeping strides."""
        q, k, v = (t.detach().requires_grad_() for t in (self.query, self.key, self.value))
        bias = None if self.attn_bias is None else self.attn_bias.detach().requires_grad_()
        case = replace(self, query=q, key=k, value=v, attn_bias=bias)
        case.dout, case.dlse = self.dout, self.dlse
        return case

    def reference(self, dtype: torch.dtype = torch.float64) -> ReferenceGradients:
        return reference_gradients(
            *self.inputs, **self.options, dout=self.dout, dlse=self.dlse, compute_dtype=dtype
        )


def random_case(
    batch: int = 2,
    seqlen_q: int = 9,
    seqlen_k: int = 11,
    nheads: int = 4,
    nheads_k: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    mask_shape: tuple[int, ...] | None = None,
    bias_shape: tuple[int, ...] | None = None,
    seed: int = 0,
    **options: Any,
) -> Case:
    """A case of normal numbers with a mask that keeps two keys of three."""
    torch.manual_seed(seed)
    return Case(
        torch.randn(batch, seqlen_q, nheads, head_dim).to(dtype),
        torch.randn(batch, seqlen_k, nheads_k, head_dim).to(dtype),
        torch.randn(batch, seqlen_k, nheads_k, head_dim).to(dtype),
        None if mask_shape is None else torch.rand(mask_shape) < 0.67,
        None if bias_shape is None else torch.randn(bias_shape).to(dtype),
        options,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Problems of every dtype, shape, broadcast kind and view, with ordinary magnitudes."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(list(_TINY)))
    batch, nheads_k, group = draw(st.tuples(*[st.integers(1, 3)] * 3))
    seqlen_q, seqlen_k = draw(st.sampled_from(_LENGTHS)), draw(st.sampled_from(_LENGTHS))
    head_dim = draw(st.sampled_from((1, 5, 8, 24, 64)))
    nheads = nheads_k * group
    full = (batch, (nheads, nheads_k), seqlen_q, seqlen_k)
    size = draw(st.sampled_from((0.01, 1.0, 4.0)))
    mask = bias = None
    if draw(st.booleans()):
        mask = torch.rand(draw(_broadcast_shapes(full))) < draw(st.sampled_from((0.0, 0.2, 0.9)))
    if draw(st.booleans()):
        bias = size * torch.randn(draw(_broadcast_shapes(full)))
        if draw(st.booleans()):
            bias = bias.masked_fill(torch.rand(bias.shape) < 0.3, -math.inf)
        bias = bias.to(draw(st.sampled_from((dtype, torch.float32))))
    return Case(
        size * draw(_views((batch, seqlen_q, nheads, head_dim), dtype)),
        draw(_views((batch, seqlen_k, nheads_k, head_dim), dtype)),
        draw(_views((batch, seqlen_k, nheads_k, head_dim), dtype)),
        mask,
        bias,
        {
            "is_causal": draw(st.booleans()),
            "softcap": draw(st.sampled_from((0.0, 3.0))),
            "softmax_scale": draw(st.sampled_from((None, 0.5))),
        },
    )


@st.composite
def _broadcast_shapes(
    draw: st.DrawFn, full: tuple[int, tuple[int, int], int, int]
) -> tuple[int, int, int, int]:
    batch, (nheads, nheads_k), seqlen_q, seqlen_k = full
    return (
        draw(st.sampled_from((batch, 1))),
        draw(st.sampled_from((nheads, nheads_k, 1))),
        draw(st.sampled_from((seqlen_q, 1))),
        draw(st.sampled_from((seqlen_k, 1))),
    )


@st.composite
def _views(draw: st.DrawFn, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """A (B, S, heads, D) tensor: contiguous, head-major, a slice, expanded, or D outermost."""
    batch, seqlen, heads, dim = shape
    match draw(st.sampled_from(("contiguous", "head-major", "slice", "expanded", "transposed"))):
        case "head-major":
            return torch.randn(batch, heads, seqlen, dim).to(dtype).transpose(1, 2)
        case "slice":
            return torch.randn(batch, seqlen, heads + 1, 2 * dim).to(dtype)[:, :, 1:, dim:]
        case "expanded":
            return torch.randn(1, seqlen, 1, dim).to(dtype).expand(shape)
        case "transposed":
            return torch.randn(dim, batch, heads, seqlen).to(dtype).permute(1, 3, 2, 0)
        case _:
            return torch.randn(shape).to(dtype)


def assert_close_to_oracle(
    name: str,
    got: Tensor,
    oracle: Tensor,
    plain: Tensor,
    dtype: torch.dtype,
    summed_rows: int = 1,
) -> None:
    """Assert that the error is at most twice that of the plain computation in `dtype`, plus a bit.

    The gradient of a bias that `summed_rows` rows share collects the rounding errors of all of
    them. They add up like noise, to the square root of their number.
    """
    assert got.shape == oracle.shape, f"{name}: shape {tuple(got.shape)}"
    if got.numel() == 0:
        return
    infinite = oracle == -math.inf
    assert torch.equal(got == -math.inf, infinite), f"{name}: -inf in other places"
    tiny = max(_TINY[dtype], _TINY[got.dtype])
    plain = plain.to(got.dtype)
    got, oracle, plain = (t.double().masked_fill(infinite, 0.0) for t in (got, oracle, plain))
    assert torch.isfinite(got).all(), f"{name}: not finite"
    plain_error = float((plain - oracle).abs().max())
    assert math.isfinite(plain_error), f"{name}: the plain computation overflows, so shows nothing"
    limit = 2 * plain_error + tiny * max(summed_rows**0.5, float(oracle.abs().max()))
    error = float((got - oracle).abs().max())
    assert error <= limit, f"{name}: error {error:.3g}, allowed {limit:.3g}"
