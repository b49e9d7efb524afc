"""The largest finite numbers, and constants that cancel in the softmax."""

from __future__ import annotations

import math

import pytest
import torch

from attention.cases import DTYPES, Case, build
from attention.driver import assert_close, run
from attention.oracle import max_error
from attention.targets import target

pytestmark = pytest.mark.each_family


@pytest.mark.parametrize("kind", ["lowest", "highest", "mixed"])
@pytest.mark.parametrize("shape", ["bhqk", "111k", "1111"])
@pytest.mark.parametrize("dtype", target().dtypes)
def test_largest_finite_bias(dtype: str, shape: str, kind: str) -> None:
    """It outweighs the products, so that the keys of the highest bias have equal probabilities."""
    seqlen_k = 600
    case = Case(20, seqlen_k, dtype=dtype, bias=shape, bias_f32=dtype == "f16", dlse=False)
    problem = build(case)
    assert problem.bias is not None
    limit = torch.finfo(problem.bias.dtype).max
    problem.bias.fill_(limit if kind == "highest" else -limit)
    winners = torch.ones(seqlen_k, dtype=torch.bool, device=problem.q.device)
    if kind == "mixed" and shape[3] == "k":
        winners = torch.arange(seqlen_k, device=problem.q.device) % 100 == 7
        problem.bias[..., winners] = limit
    found = run(problem)
    for name, value in found.items():
        assert bool(value.isfinite().all()), name
    weights = winners.double() / winners.sum()
    values = problem.v.double().repeat_interleave(2, dim=2)
    out = torch.einsum("j,bjhd->bhd", weights, values)[:, None].expand(found.out.shape)
    dout = problem.dout.double().unflatten(2, (2, 2))
    dv = torch.einsum("j,bihgd->bjhd", weights, dout)
    assert found.dv is not None
    for name, value, exact in (("out", found.out, out), ("dv", found.dv, dv)):
        # Probabilities and the result are rounded to the dtype, sums of 600 terms to float32.
        allowed = (2 * torch.finfo(value.dtype).eps + 600 * 2**-24) * float(exact.abs().max())
        assert max_error(value, exact) <= allowed + 1e-6, name


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e8])
def test_constant_in_the_bias_changes_nothing(offset: float) -> None:
    """It cancels in the softmax, and must not reach the backward by a rounded lse either."""
    problem = build(Case(20, 700, bias="1111", bias_f32=True, wants="qkv"))
    # Multiples of 1/16 and a scale of 1/4: their sums with 1e4 are exact in float32.
    q, k = ((4 * x).round() / 4 for x in (problem.q, problem.k))
    scale = 0.0 if abs(offset) > 1e5 else 0.25
    assert problem.bias is not None
    results = [
        run(problem.with_(q=q, k=k, softmax_scale=scale, bias=torch.full_like(problem.bias, shift)))
        for shift in (0.0, offset)
    ]
    for (name, a), (_, b) in zip(*(found.items() for found in results), strict=True):
        if name != "lse":
            room = 2 * torch.finfo(a.dtype).eps * float(a.abs().max())
            torch.testing.assert_close(b, a, rtol=0, atol=max(room, 2e-3), msg=name)


@pytest.mark.parametrize("offset", [1e8, -1e8])
def test_constant_in_bias_and_sinks_changes_nothing(offset: float) -> None:
    """A sink must not be compared with a rounded lse."""
    case = Case(20, 300, bias="1111", bias_f32=True, sinks="normal", sinks_f32=True, wants="qkvs")
    problem = build(case).with_(softmax_scale=0.0)
    assert problem.bias is not None and problem.sinks is not None
    sinks = torch.arange(len(problem.sinks), device=problem.q.device) % 2 * 8
    results = [
        run(
            problem.with_(
                bias=torch.full_like(problem.bias, shift),
                sinks=sinks.to(problem.sinks.dtype) + shift,  # log(300) is between 0 and 8
            )
        )
        for shift in (0.0, offset)
    ]
    for (name, a), (_, b) in zip(*(found.items() for found in results), strict=True):
        if name != "lse":
            room = 2 * torch.finfo(problem.q.dtype).eps * float(a.abs().max())
            torch.testing.assert_close(b, a, rtol=0, atol=room, msg=name)


@pytest.mark.parametrize("dtype", target().dtypes)
@pytest.mark.parametrize("shape", ["bhqk", "bk1k"])
def test_bias_of_minus_infinity_is_a_mask(shape: str, dtype: str) -> None:
    """Compared with the oracle for the equal mask; the gradient of such entries is zero."""
    problem = build(Case(70, 90, mask=shape, bias=shape, dtype=dtype, dlse=True))
    assert problem.mask is not None and problem.bias is not None
    hidden = problem.bias.masked_fill(~problem.mask, -math.inf)
    found = run(problem.with_(mask=None, bias=hidden))
    assert_close(problem, found)
    assert found.dbias is not None and not found.dbias[~problem.mask].any()


@pytest.mark.parametrize("dtype", target().dtypes)
def test_tiny_and_huge_numbers(dtype: str) -> None:
    """Entries of q from 1e-4 to some hundreds, and so logits from next to nothing to thousands."""
    for size in (1e-4, 30.0, 200.0):
        problem = build(Case(40, 150, scale=1.0, dtype=dtype))
        problem = problem.with_(q=(problem.q * size).to(DTYPES[dtype]))
        assert_close(problem, run(problem))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@pytest.mark.parametrize("dtype", target().dtypes)
def test_products_near_the_limits_of_float32(dtype: str, head_dim: int) -> None:
    """A row's logits are 5.8e7, or 6.4e7, for keys with the same nonzero entry, and 0 for others.

    The product of the maximum and log2(e) is then off by up to four in float32, here by 2.7 and
    1.4: kernels that subtract it get exponentials of 6.5 and 2.6 instead of 1, which only the
    division by their sum corrects.
    """
    for size in (7648.0, 8000.0):  # exact in 16 bits, and their squares in float32
        problem = build(Case(200, 500, 1, scale=1.0, dtype=dtype, head_dim=head_dim, wants=""))
        q, k = torch.zeros_like(problem.q), torch.zeros_like(problem.k)
        rows = torch.arange(q.shape[1], device=q.device) % head_dim
        keys = 7 * torch.arange(k.shape[1], device=q.device) % head_dim
        q[:, torch.arange(len(rows)), :, rows] = size
        k[:, torch.arange(len(keys)), :, keys] = size
        found = run(problem.with_(q=q, k=k))
        same = (rows[:, None] == keys).double()
        weights = same / same.sum(1, keepdim=True)
        values = problem.v.double().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        out = torch.einsum("ij,bjhd->bihd", weights, values)
        # Probabilities and the result are rounded to the dtype, sums of 15 terms to float32.
        eps = torch.finfo(found.out.dtype).eps
        assert max_error(found.out, out) <= (2 * eps + 15 * 2**-24) * float(values.abs().max())
