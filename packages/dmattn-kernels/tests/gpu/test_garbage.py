"""Whatever numbers kernels read on the device, they access nothing outside the tensors of a call.

sanitizer_garbage.py runs the same launches under compute-sanitizer, which sees reads as well.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dmattn

pytest.importorskip("dmattn_kernels")

from gpu.sanitizer_garbage import (
    GUARD,
    SEEDS,
    Case,
    WatchedGpu,
    cases,
    garbage,
    run_case,
)

pytestmark = [pytest.mark.each_family, pytest.mark.cuda]


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_nothing_is_damaged(case: Case, seed: int) -> None:
    """The margins around every allocation and int32 inputs are unchanged, and launches end."""
    torch.zeros(1, device=torch.device("cuda"))  # lets torch make the context of the device
    problems = run_case(WatchedGpu(GUARD), case, seed)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("same", [True, False], ids=["one tensor", "two tensors"])
def test_packed_sequences_through_torch(
    same: bool, window: int | None, deterministic: bool, seed: int
) -> None:
    """Wrong cu_seqlens in the public function, forward and backward: no other tensor changes."""
    device, draw = torch.device("cuda"), np.random.default_rng(seed)
    total, sequences, longest = 400, 6, 130
    q, k, v = (
        torch.randn(total, heads, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    bias = torch.randn(total, 2, device=device, dtype=torch.bfloat16, requires_grad=True)
    numbers = garbage(draw, seed, (sequences + 1,), total)
    cu_seqlens = torch.tensor(numbers, dtype=torch.int32, device=device)
    others = [torch.full((1 << 16,), 7, device=device, dtype=torch.int32) for _ in range(8)]
    out = dmattn.flash_dmattn_varlen_func(
        *(q, k, v, cu_seqlens, cu_seqlens if same else cu_seqlens.clone(), longest, longest),
        attn_bias=bias,
        is_causal=True,
        deterministic=deterministic,
        window_size=window,
    )
    gradients = torch.autograd.grad(out, (q, k, v, bias), torch.randn_like(out))
    torch.cuda.synchronize()
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v, bias)]
    assert all(bool((other == 7).all()) for other in others)
    assert torch.equal(cu_seqlens.cpu(), torch.tensor(numbers, dtype=torch.int32))
