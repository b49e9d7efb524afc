"""The memory that calls take on the device beside their inputs and results."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor

import dmattn
from attention.driver import bytes_of, peak_bytes_beside
from attention.targets import target_device

pytestmark = [pytest.mark.cuda, pytest.mark.slow]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=target_device(), dtype=torch.bfloat16).requires_grad_()


def beside_training(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> int:
    """Peak bytes of a forward and a backward to all inputs, beside inputs, output and gradients."""
    dout = torch.randn_like(inputs[0])

    def step() -> tuple[Tensor, ...]:
        out = forward()
        return (out, *torch.autograd.grad(out, inputs, dout))

    return peak_bytes_beside(step)


SHORT = [(4096, 16, 4, 128), (4095, 8, 8, 64), (8192, 8, 2, 64)]
LONG = [(16384, 16, nheads_k, d) for nheads_k in (1, 2, 4, 16) for d in (64, 80, 128)]


@pytest.mark.parametrize("kept", [None, 0.06, 0.5], ids=["all keys", "few", "half"])
@pytest.mark.parametrize("seqlen,nheads,nheads_k,head_dim", [*SHORT, *LONG])
def test_training(
    seqlen: int, nheads: int, nheads_k: int, head_dim: int, kept: float | None
) -> None:
    """With a key bias it is at most 1.5 times that of q, k and v."""
    q, k, v = (normal(1, seqlen, heads, head_dim) for heads in (nheads, nheads_k, nheads_k))
    bias = normal(1, nheads_k, 1, seqlen)
    mask = None if kept is None else torch.rand_like(bias) < kept
    beside = beside_training(
        lambda: dmattn.flash_dmattn_func(q, k, v, attn_mask=mask, attn_bias=bias, is_causal=True),
        (q, k, v, bias),
    )
    assert beside <= 1.5 * bytes_of(q, k, v), f"{beside / bytes_of(q, k, v):.2f} times"


@pytest.mark.parametrize("nheads_k", [1, 2, 4, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_training_with_a_window(head_dim: int, nheads_k: int) -> None:
    """Running top-w has the same limit if there is enough work to fill the GPU."""
    seqlen = 65536
    q, k, v = (normal(1, seqlen, heads, head_dim) for heads in (16, nheads_k, nheads_k))
    score = torch.randn(1, nheads_k, 1, seqlen, device=q.device).requires_grad_()
    beside = beside_training(
        lambda: dmattn.flash_dmattn_func(
            q, k, v, attn_bias=score, is_causal=True, window_size=1024
        ),
        (q, k, v, score),
    )
    assert beside <= 1.5 * bytes_of(q, k, v), f"{beside / bytes_of(q, k, v):.2f} times"


def test_forward_with_a_window() -> None:
    """Running top-w over a million keys takes less than k and v together."""
    q, k, v = (normal(1, 1 << 20, heads, 128).detach() for heads in (8, 2, 2))
    score = torch.randn(1, 2, 1, 1 << 20, device=q.device)

    def step() -> tuple[Tensor, ...]:
        out = dmattn.flash_dmattn_func(q, k, v, attn_bias=score, is_causal=True, window_size=2048)
        return (out,)

    beside = peak_bytes_beside(step)
    assert beside < bytes_of(k, v), f"{beside / 2**20:.0f} MB"


def test_packed_sequences_follow_the_total() -> None:
    """One long sequence among many short ones takes far less than padding all to its length."""
    lengths = (8000, *(16 for _ in range(250)))
    total = sum(lengths)
    q, k, v = (normal(total, heads, 64) for heads in (8, 2, 2))
    bias = normal(total, 2)
    mask = torch.rand_like(bias) < 0.5
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=q.device)
    beside = beside_training(
        lambda: dmattn.flash_dmattn_varlen_func(
            *(q, k, v, cu, cu, 8000, 8000), attn_mask=mask, attn_bias=bias, is_causal=True
        ),
        (q, k, v, bias),
    )
    # Each sequence may start a block of 128 rows of its own.
    padded_rows = total + 128 * len(lengths)
    assert beside <= 1.5 * padded_rows * (8 + 2 + 2) * 64 * 2
