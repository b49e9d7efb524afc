"""The memory that a step of training takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dmattn
from gpu.device import require_device

pytestmark = [pytest.mark.cuda, pytest.mark.slow]


@pytest.mark.parametrize("mask,window", [(False, 0), (True, 0), (False, 1024)])
@pytest.mark.parametrize("nheads_k", [1, 2, 4, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_memory_of_training(head_dim: int, nheads_k: int, mask: bool, window: int) -> None:
    """With a key bias: beside inputs, outputs and gradients at most 1.5 times q, k and v."""
    seqlen = 65536 if window else 16384
    device = require_device()

    def rows(heads: int) -> Tensor:
        x = torch.randn(1, seqlen, heads, head_dim, device=device, dtype=torch.bfloat16)
        return x.requires_grad_()

    q, k, v = rows(16), rows(nheads_k), rows(nheads_k)
    bias = torch.randn(1, nheads_k, 1, seqlen, device=device).requires_grad_()
    keep = torch.rand(1, 1, 1, seqlen, device=device) < 0.06 if mask else None
    dout = torch.randn_like(q)
    inputs = [q, k, v, bias]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = dmattn.flash_dmattn_func(
        q, k, v, attn_mask=keep, attn_bias=bias, is_causal=True, window_size=window or None
    )
    gradients = torch.autograd.grad(out, inputs, dout)
    torch.cuda.synchronize()

    def size(*tensors: Tensor) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    beside = torch.cuda.max_memory_allocated() - before - size(out, *gradients)
    assert beside <= 1.5 * size(q, k, v), f"{beside / size(q, k, v):.2f} times q, k and v"
