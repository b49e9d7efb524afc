"""What a launch on a GPU refuses before anything runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dmattn_kernels

core = dmattn_kernels._core
CODES = {torch.bfloat16: core.BFLOAT16, torch.float32: core.FLOAT32, torch.bool: core.BOOL}


def view(x: Tensor) -> tuple[object, ...]:
    return x.data_ptr(), CODES[x.dtype], tuple(x.shape), x.stride()


def test_small_workspace_is_refused() -> None:
    batch, seqlen_q, seqlen_k, nheads, nheads_k, head_dim = 2, 64, 512, 4, 2, 64
    q = torch.randn(batch, seqlen_q, nheads, head_dim, device="cuda").bfloat16()
    k, v = torch.randn(2, batch, seqlen_k, nheads_k, head_dim, device="cuda").bfloat16()
    bias = torch.randn(batch, nheads_k, 1, seqlen_k, device="cuda").bfloat16()
    out = torch.full_like(q, 7.0)
    lse = torch.full((batch, nheads, seqlen_q), 7.0, device="cuda")
    tensors = (q, k, v, bias > 0, bias, out, lse)
    params = core.FwdParams(0, *map(view, tensors), 0.125, 0.0, False)
    size = params.workspace_size()
    assert size > 0
    scratch = torch.empty(size, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="workspace"):
        params.launch(scratch.data_ptr(), size - 1, 0)
    torch.cuda.synchronize()
    assert bool((out == 7).all()) and bool((lse == 7).all())
