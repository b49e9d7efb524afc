"""Lengths, magnitudes and masks at the edges of what attention means, on the CPU."""

import math
from typing import Any

import pytest
import torch
from attention_cases import assert_close_to_oracle, random_case
from test_attention import check_against_oracle
from torch import Tensor

from dmattn import flash_dmattn_func

pytestmark = pytest.mark.usefixtures("each_backend")

LENGTHS = (0, 1, 127, 128, 129)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def gradients(case_leaves: list[Tensor], *results: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    sent = [torch.randn_like(t) for t in results]
    return list(torch.autograd.grad(results, case_leaves, sent))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_lengths(seqlen_q: int, seqlen_k: int, is_causal: bool) -> None:
    check_against_oracle(
        random_case(
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            dtype=torch.float32,
            mask_shape=(2, 1, 1, seqlen_k),
            bias_shape=(1, 4, seqlen_q, seqlen_k),
            is_causal=is_causal,
        )
    )


def test_empty_batch() -> None:
    nothing = torch.randn(0, 5, 2, 8)
    out, lse = flash_dmattn_func(nothing, nothing, nothing, return_lse=True)
    assert out.shape == (0, 5, 2, 8) and lse.shape == (0, 2, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["key mask", "row mask", "dense mask", "bias", "causal", "no keys"])
def test_rows_without_keys(how: str, dtype: torch.dtype) -> None:
    """Batch 0, and with causality the first rows, keep nothing: zero, -inf and no gradient."""
    seqlen_k = {"no keys": 0, "causal": 3}.get(how, 6)
    case = random_case(2, 5, seqlen_k, dtype=dtype, is_causal=how == "causal")
    empty = torch.zeros(2, 4, 5, dtype=torch.bool)
    empty[0] = True
    if how == "no keys":
        empty[:] = True
    elif how == "causal":
        empty[:] = False
        empty[:, :, :2] = True
    elif how == "bias":
        case.attn_bias = torch.randn(2, 4, 5, 6).to(dtype)
        case.attn_bias[0] = -math.inf
    else:
        shape = {"key mask": (2, 1, 1, 6), "row mask": (2, 1, 5, 1)}.get(how, (2, 4, 5, 6))
        case.attn_mask = torch.ones(shape, dtype=torch.bool)
        case.attn_mask[0] = False
    leaves = case.requiring_grad()
    out, lse = flash_dmattn_func(*leaves.inputs, **case.options, return_lse=True)
    assert torch.equal(lse == -math.inf, empty)
    assert not out[empty.transpose(1, 2)].any()
    assert torch.isfinite(out).all()
    for grad in gradients([leaves.query, leaves.key, leaves.value], out, lse):
        assert torch.isfinite(grad).all()
        if how not in ("causal", "no keys"):
            assert not grad[0].any() and grad[1].any()
    check_against_oracle(case)


def test_rows_without_keys_ignore_what_is_sent_back() -> None:
    """Their gradients are zero even for the NaN that arithmetic with lse = -inf sends back."""
    case = random_case(mask_shape=(2, 1, 9, 11), bias_shape=(2, 4, 9, 11))
    assert case.attn_mask is not None
    case.attn_mask[0, :, :5] = False
    leaves = case.requiring_grad()
    out, lse = flash_dmattn_func(*leaves.inputs, return_lse=True)
    wanted: list[Any] = [leaves.query, leaves.key, leaves.value, leaves.attn_bias]
    results = []
    for junk in (0.0, math.nan):
        dout, dlse = case.dout.clone(), case.dlse.clone()
        dout[0, :5], dlse[0, :, :5] = junk, junk
        results.append(torch.autograd.grad((out, lse), wanted, (dout, dlse), retain_graph=True))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("mask_heads", [1, 2, 4])
def test_heads_masked_altogether(mask_heads: int) -> None:
    case = random_case(mask_shape=(2, mask_heads, 1, 11))
    assert case.attn_mask is not None
    case.attn_mask[:, 0] = False
    check_against_oracle(case)


@pytest.mark.parametrize("kind", ["lowest", "highest", "mixed"])
@pytest.mark.parametrize("bias_shape", [(2, 4, 9, 600), (1, 1, 1, 600), (1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_finite_bias(dtype: torch.dtype, bias_shape: tuple[int, ...], kind: str) -> None:
    """The largest numbers drown the products, so that probabilities are uniform, exactly."""
    case = random_case(seqlen_k=600, dtype=dtype)
    bias_dtype = torch.float32 if dtype == torch.float16 else dtype
    limit = torch.finfo(bias_dtype).max
    bias = torch.full(bias_shape, limit if kind == "highest" else -limit, dtype=bias_dtype)
    winners = torch.ones(600, dtype=torch.bool)
    if kind == "mixed" and bias_shape[3] > 1:
        winners = torch.arange(600) % 100 == 7
        bias[..., winners] = limit
    case.attn_bias = bias
    leaves = case.requiring_grad()
    out, lse = flash_dmattn_func(*leaves.inputs, return_lse=True)
    weights = winners.double() / winners.sum()
    values = case.value.double().repeat_interleave(2, dim=2)
    expected = torch.einsum("j,bjhd->bhd", weights, values)[:, None].expand(out.shape)
    plain = expected.to(dtype)
    assert_close_to_oracle("out", out.detach(), expected, plain, dtype)
    assert torch.isfinite(lse).all()
    leaf_bias = leaves.attn_bias
    assert leaf_bias is not None
    grads = torch.autograd.grad(out, [leaves.query, leaves.value, leaf_bias], case.dout)
    assert all(torch.isfinite(g).all() for g in grads)
    dv = torch.einsum("j,bihgd->bjhd", weights, torch.unflatten(case.dout.double(), 2, (2, 2)))
    assert_close_to_oracle("dv", grads[1], dv, dv.to(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-4, 30.0, 200.0])
def test_tiny_and_huge_logits(size: float, dtype: torch.dtype) -> None:
    case = random_case(seqlen_q=40, seqlen_k=150, dtype=dtype, softmax_scale=1.0)
    case.query = case.query * size
    leaves = case.requiring_grad()
    out, lse = flash_dmattn_func(*leaves.inputs, **case.options, return_lse=True)
    oracle = case.reference()
    # The inputs are exact for the oracle, so only the result's own rounding is left to allow, and
    # the rounding of logits as large as `size` times a few.
    wide = torch.promote_types(dtype, torch.float32)
    room = torch.finfo(dtype).eps + 50 * size * torch.finfo(wide).eps
    torch.testing.assert_close(out.double(), oracle.out, rtol=0, atol=4 * room)
    torch.testing.assert_close(lse.double(), oracle.lse, rtol=4 * torch.finfo(wide).eps, atol=room)
    for grad in gradients([leaves.query, leaves.key, leaves.value], out, lse):
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e8])
def test_constant_in_the_bias_changes_nothing(offset: float) -> None:
    """Softmax does not see it; the backward pass must not see it through a rounded lse either."""
    case = random_case(seqlen_k=700, dtype=torch.float32)
    case.query = torch.round(case.query * 4) / 4  # so that adding the offset to 1e4 loses nothing
    case.key = torch.round(case.key * 4) / 4
    case.options = {"softmax_scale": 0.0 if abs(offset) > 1e5 else 0.25}
    results = []
    for shift in (0.0, offset):
        leaves = case.requiring_grad()
        bias = torch.full((1, 1, 1, 1), shift)
        out = flash_dmattn_func(leaves.query, leaves.key, leaves.value, None, bias, **case.options)
        grads = torch.autograd.grad(out, [leaves.query, leaves.key, leaves.value], case.dout)
        results.append([out.detach(), *grads])
    for plain, shifted in zip(*results, strict=True):
        torch.testing.assert_close(shifted, plain, rtol=2e-3, atol=2e-3)


def test_bias_of_minus_infinity_is_a_mask() -> None:
    case = random_case(mask_shape=(2, 4, 9, 11), bias_shape=(2, 4, 9, 11))
    mask, bias = case.attn_mask, case.attn_bias
    assert mask is not None and bias is not None
    masked = flash_dmattn_func(case.query, case.key, case.value, mask, bias)
    biased = flash_dmattn_func(
        case.query, case.key, case.value, None, bias.masked_fill(~mask, -math.inf)
    )
    torch.testing.assert_close(masked, biased, rtol=0, atol=1e-14)


def test_causal_is_aligned_to_the_last_key() -> None:
    case = random_case(seqlen_q=3, seqlen_k=7, is_causal=True)
    probs = flash_dmattn_func(*case.inputs, is_causal=True, return_attn_probs=True)[1]
    assert torch.equal(probs[0, 0] > 0, torch.ones(3, 7, dtype=torch.bool).tril(4))


def test_key_heads_are_shared_by_groups() -> None:
    case = random_case(nheads=6, nheads_k=2)
    expanded = flash_dmattn_func(
        case.query, case.key.repeat_interleave(3, 2), case.value.repeat_interleave(3, 2)
    )
    torch.testing.assert_close(flash_dmattn_func(*case.inputs), expanded, rtol=0, atol=1e-14)


def test_inputs_are_not_changed() -> None:
    case = random_case(mask_shape=(2, 1, 1, 11), bias_shape=(2, 4, 1, 11), softcap=2.0)
    before = [t.clone() for t in case.inputs if t is not None]
    leaves = case.requiring_grad()
    flash_dmattn_func(*leaves.inputs, **case.options).sum().backward()
    after = [t for t in case.inputs if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
