"""flash_dmattn_func against the float64 oracle, on the CPU."""

import pytest
import torch
from attention_cases import Case, assert_close_to_oracle, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from dmattn import flash_dmattn_func
from dmattn.backends.cpu import key_blocks

NAMES = ("dq", "dk", "dv", "dbias")


def check_against_oracle(case: Case) -> None:
    dtype = case.query.dtype
    oracle, plain = case.reference(), case.reference(dtype)
    leaves = case.requiring_grad()
    out, lse = flash_dmattn_func(*leaves.inputs, **case.options, return_lse=True)
    assert out.dtype == dtype and out.is_contiguous()
    assert_close_to_oracle("out", out.detach(), oracle.out, plain.out, dtype)
    assert_close_to_oracle("lse", lse.detach(), oracle.lse, plain.lse, dtype)

    wanted = [
        t for t in (leaves.query, leaves.key, leaves.value, leaves.attn_bias) if t is not None
    ]
    grads = torch.autograd.grad((out, lse), wanted, (case.dout, case.dlse))
    for name, leaf, grad in zip(NAMES, wanted, grads, strict=False):
        assert grad.dtype == leaf.dtype
        summed_rows = 1
        if name == "dbias" and grad.numel() > 0:
            summed_rows = lse.numel() // grad[..., 0].numel()
        expected = getattr(oracle, name), getattr(plain, name)
        assert_close_to_oracle(name, grad, *expected, dtype, summed_rows)


@given(case=cases(), block=st.sampled_from((16, 64, 512)))
@settings(max_examples=500)
def test_random_problems(case: Case, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_blocks, "_KEYS_PER_BLOCK", block)
        patch.setattr(key_blocks, "_LISTED_KEYS_PER_BLOCK", block)
        patch.setattr(key_blocks, "_BLOCK_ELEMENTS", block * 64)
        check_against_oracle(case)
