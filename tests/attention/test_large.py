"""Sizes that are too large for 32-bit offsets and 16-bit grid dimensions."""

from __future__ import annotations

import pytest
import torch

from attention.cases import Case, build, case_id
from attention.driver import assert_close, call, check, run
from attention.oracle import Problem, Results
from attention.targets import target_device

pytestmark = [pytest.mark.cuda, pytest.mark.slow]

CROWDS = [
    Case(3, 5, 9000, 8, 1, 64, bias="bk1k", mask="bh1k"),  # 72 000 (batch, head) pairs
    Case(2, 2, 70_000, 1, 1, 64, causal=True, bias="bhqk"),
    Case(1, 3, 1, 70_000, 70_000, 64, mask="bhqk"),
    Case(1, 4, 66_000, 2, 1, 128, wants="qkv"),
    Case(70_000, 40, 1, 1, 1, 64, mask="b11k", bias="b11k"),
    Case(40, 70_000, 1, 1, 1, 64, bias="1111", mask="1111", mask_fill="all"),
]


@pytest.mark.parametrize("case", CROWDS, ids=case_id)
def test_many_heads_or_rows(case: Case) -> None:
    check(case)


def _free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30


@pytest.mark.parametrize("head_dim", [64, 128])
def test_strides_beyond_32_bits(head_dim: int) -> None:
    """A small problem whose batch entries lie more than 2^31 elements apart."""
    if _free_gib() < 40:
        pytest.skip("needs 40 GiB of free GPU memory")
    problem = build(Case(70, 90, 2, 4, 2, head_dim, causal=True, bias="bhqk", mask="bhqk"))
    far = torch.empty(2**31 + 2**27, dtype=problem.q.dtype, device=target_device())

    def spread(x: torch.Tensor, gap: int) -> torch.Tensor:
        """A copy of `x` whose batch entries lie `gap` elements apart."""
        view = far.as_strided(x.shape, (gap, *x[0].contiguous().stride()), 64)
        view.copy_(x)
        return view

    want = run(problem, deterministic=True)
    for name in ("q", "k", "v", "bias", "dout"):
        moved = problem.with_(**{name: spread(getattr(problem, name), 2**31 + 8)})
        found = run(moved, deterministic=True)
        for (label, a), (_, b) in zip(found.items(), want.items(), strict=True):
            assert torch.equal(a, b), f"{label} changed when {name} moved"


def test_more_than_2_31_elements() -> None:
    """q, out and dout of more than 2^31 elements: the last batch entries are as right as any.

    They are compared with the oracle, and not with calls for single batch entries, which are
    planned differently: if fp32 sums differ in their last bit, numbers that are rounded to 16 bits
    next may differ in theirs.
    """
    if _free_gib() < 50:
        pytest.skip("needs 50 GiB of free GPU memory")
    batch, rows, nheads, head_dim = 130, 4096, 32, 128  # 2.18e9 elements
    device = target_device()
    q = torch.empty(batch, rows, nheads, head_dim, dtype=torch.bfloat16, device=device).normal_()
    small = build(Case(rows, 96, 2, nheads, 4, head_dim, causal=False, bias="bk1k", mask="bk1k"))
    k, v = (x[:1].expand(batch, -1, -1, -1) for x in (small.k, small.v))
    bias, mask = (None if x is None else x[:1] for x in (small.bias, small.mask))
    q.requires_grad_()
    problem = small.with_(q=q, k=k, v=v, bias=bias, mask=mask, wants="q")
    out, lse = call(problem)
    dout = torch.empty(1, rows, nheads, head_dim, dtype=q.dtype, device=device).normal_()
    (dq,) = torch.autograd.grad(out, q, dout.expand_as(out))
    for b in (0, 127, 128, 129):
        alone = {"q": q[b : b + 1].detach(), "k": k[:1], "v": v[:1], "dout": dout}
        found = Results(out[b : b + 1].detach(), lse[b : b + 1].detach(), dq=dq[b : b + 1])
        assert_close(problem.with_(**alone), found)


def test_long_keys() -> None:
    """k and v of more than 2^31 elements under a key mask that keeps a few of the last rows."""
    if _free_gib() < 30:
        pytest.skip("needs 30 GiB of free GPU memory")
    length, nheads_k, head_dim = 2**24 + 1000, 1, 128
    device = target_device()
    kv = torch.zeros(length, nheads_k, head_dim, dtype=torch.bfloat16, device=device)
    tail = torch.randn(2000, nheads_k, head_dim, device=device).to(kv.dtype)
    kv[-2000:] = tail
    mask = torch.zeros(1, 1, 1, length, dtype=torch.bool, device=device)
    mask[..., -2000::3] = True
    q = torch.randn(1, 4, 2, head_dim, device=device).to(kv.dtype)
    problem = Problem(q, kv[None], kv[None], mask, None, q, None, 0.09, False, 0.0, "")
    found = run(problem)
    short = problem.with_(k=tail[None], v=tail[None], mask=mask[..., -2000:])
    assert_close(short, found)
