"""Additive bias: every broadcast shape, dtype and layout, infinite and nearly infinite entries."""

from __future__ import annotations

import pytest
import torch

from attention.cases import BIAS_FILLS, OPERAND_LAYOUTS, OPERAND_SHAPES, Case, build
from attention.driver import check, run
from dmattn.backends.cuda import attention

pytestmark = pytest.mark.each_family


@pytest.mark.parametrize("head_dim,dtype", [(64, "bf16"), (128, "f16"), (256, "bf16")])
@pytest.mark.parametrize("shape", OPERAND_SHAPES)
@pytest.mark.parametrize("f32", [False, True])
def test_broadcast(shape: str, head_dim: int, dtype: str, f32: bool) -> None:
    check(
        Case(
            141, 205, bias=shape, bias_f32=f32, head_dim=head_dim, dtype=dtype, nheads=8, dlse=True
        )
    )


@pytest.mark.parametrize(
    "head_dim,dtype", [(64, "f16"), (128, "bf16"), (192, "bf16"), (256, "f16")]
)
@pytest.mark.parametrize("shape", ["bhqk", "bkqk", "1hqk", "b1qk", "11qk"])
@pytest.mark.parametrize("seqlen_k", [120, 1032])
def test_rows_on_16_bytes(shape: str, seqlen_k: int, head_dim: int, dtype: str) -> None:
    """More rows than keys and fewer, causal and not; no number of keys is a multiple of 64."""
    case = Case(300, seqlen_k, bias=shape, head_dim=head_dim, dtype=dtype, dlse=True)
    check(case)
    check(case.with_(bias_fill="some_minus_inf", causal=True))


@pytest.mark.parametrize("shape", OPERAND_SHAPES)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_broadcast_with_masks(shape: str, head_dim: int) -> None:
    """Beside a dense mask, and beside a key mask (keys are gathered), causal both times."""
    check(Case(210, 131, bias=shape, mask="b1qk", causal=True, head_dim=head_dim))
    check(Case(210, 331, bias=shape, mask="bk1k", causal=True, head_dim=head_dim, dlse=True))


@pytest.mark.parametrize("fill", ["half", "prefix", "suffix", "none", "one_key", "dead_heads"])
@pytest.mark.parametrize("f32", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 200])
def test_rows_beside_a_mask_of_keys(fill: str, f32: bool, head_dim: int) -> None:
    """The bias is read in tiles, in which the mask hides all keys, some or none. Bias and mask are
    shared by the heads of a group, or by all heads, or each head has its own."""
    case = Case(150, 519, 3, 4, 2, head_dim, mask="b11k", mask_fill=fill, bias="1hqk", dlse=True)
    case = case.with_(bias_f32=f32)
    check(case)
    check(case.with_(mask="bk1k", bias="bhqk", causal=True))
    check(case.with_(mask="bh1k", bias="11qk", seqlen_k=333))
    check(case.with_(mask="111k", bias="b1qk", seqlen_q=600, causal=True, wants="qkv"))
    check(case.with_(seqlen_q=300, seqlen_k=512, batch=2, nheads_k=4, dtype="f16"))


@pytest.mark.parametrize("fill", BIAS_FILLS)
@pytest.mark.parametrize("shape", ["bhqk", "bk1k", "1hq1"])
@pytest.mark.parametrize("dtype,f32", [("bf16", False), ("f16", False), ("bf16", True)])
@pytest.mark.parametrize("causal", [False, True])
def test_entries(fill: str, shape: str, dtype: str, f32: bool, causal: bool) -> None:
    check(Case(133, 150, bias=shape, bias_fill=fill, bias_f32=f32, dtype=dtype, causal=causal))


@pytest.mark.parametrize("fill", ["some_minus_inf", "lowest_rows", "all_lowest", "wide"])
@pytest.mark.parametrize("mask", ["bk1k", "bhqk"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_entries_with_masks(fill: str, mask: str, head_dim: int) -> None:
    bias = "bk1k" if mask == "bk1k" else "1hqk"
    check(Case(133, 260, bias=bias, bias_fill=fill, mask=mask, head_dim=head_dim, softcap=9.0))


@pytest.mark.parametrize("fill", ["lowest_rows", "all_lowest", "huge"])
@pytest.mark.parametrize("shape", ["bhqk", "bk1k", "1hq1"])
@pytest.mark.parametrize("f32", [False, True])
def test_gradients_stay_finite(fill: str, shape: str, f32: bool) -> None:
    """Rows of finfo.min get output gradients, unlike in other tests: cases._silence_coarse_rows."""
    problem = build(Case(133, 150, bias=shape, bias_fill=fill, bias_f32=f32, dlse=True))
    problem = problem.with_(dout=torch.ones_like(problem.dout))
    for name, value in run(problem).items():
        assert bool(value.isfinite().all()), name


@pytest.mark.parametrize("layout", OPERAND_LAYOUTS)
@pytest.mark.parametrize("shape", ["bhqk", "1kqk", "bh1k", "11q1", "111k"])
@pytest.mark.parametrize("f32", [False, True])
def test_layout(layout: str, shape: str, f32: bool) -> None:
    check(Case(150, 199, bias=shape, bias_f32=f32, operand_layout=layout, head_dim=64, causal=True))
    check(
        Case(150, 192, bias=shape, bias_f32=f32, operand_layout=layout, head_dim=128, mask="bk1k")
    )


def test_kernels_read_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts that callers of the kernel library may pass on CUDA; this package would copy them."""
    monkeypatch.setattr(attention, "_as_kernels_read", lambda problem, backward: problem.bias)
    for layout in ("transposed", "keys_outermost", "every_third_key"):
        case = Case(150, 199, bias="bhqk", operand_layout=layout, causal=True)
        check(case)
        check(case.with_(bias="1kqk", bias_f32=True, mask="bk1k", head_dim=128))


@pytest.mark.parametrize("seqlen_k", [128, 136, 4096, 4095])
@pytest.mark.parametrize("shape", ["bhqk", "11qk", "bh1k"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_odd_row_pitch(seqlen_k: int, shape: str, head_dim: int) -> None:
    """Rows of an odd number of keys start on 2 bytes only."""
    check(Case(200, seqlen_k, 1, 2, 1, bias=shape, head_dim=head_dim))


@pytest.mark.parametrize("layout", ["plain", "odd_pitch", "heads_apart"])
@pytest.mark.parametrize("seqlen_k", [1, 63, 129, 262])
@pytest.mark.parametrize("head_dim,dtype", [(64, "f16"), (128, "bf16"), (256, "bf16")])
def test_rows_that_start_anywhere(seqlen_k: int, layout: str, head_dim: int, dtype: str) -> None:
    """Biases of several shapes, with a mask and without, with their gradient and without.

    There are fewer rows than a tile has, or more than 1024.
    """
    case = Case(1, seqlen_k, bias="bhqk", operand_layout=layout, head_dim=head_dim, dtype=dtype)
    check(case.with_(seqlen_q=130, mask="b1qk", bias_fill="some_minus_inf"))
    check(case.with_(seqlen_q=9, bias="bkqk", causal=True))
    check(case.with_(seqlen_q=7, batch=1, bias="11qk"))
    check(case.with_(seqlen_q=1027, bias="1hqk", causal=True))
    check(case.with_(seqlen_q=150, wants="qkv"))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_dbias_sums_over_many_rows(head_dim: int, deterministic: bool) -> None:
    """fp32 sums over 2 x 16 x 1500 rows, rounded once."""
    case = Case(1500, 130, 2, 16, 2, head_dim, bias="111k", deterministic=deterministic)
    check(case)
    check(case.with_(bias="11qk", seqlen_q=300))


@pytest.mark.parametrize("seqlen_k", [129, 262, 1301])
@pytest.mark.parametrize("shape", ["bhqk", "b1qk", "1hqk", "11qk"])
@pytest.mark.parametrize("head_dim", [64, 96, 192])
@pytest.mark.parametrize("f32", [False, True])
def test_fixed_order_of_any_number_of_keys(
    f32: bool, head_dim: int, shape: str, seqlen_k: int
) -> None:
    """Rows of the bias, and of its gradient, are padded to start on 16 bytes, or they are not."""
    case = Case(200, seqlen_k, 2, 2, 2, head_dim, bias=shape, bias_f32=f32, deterministic=True)
    check(case)
    check(case.with_(seqlen_q=1100, nheads=4, causal=True, bias_fill="some_minus_inf"))
    check(case.with_(mask="b1qk", mask_fill="blocks", operand_layout="odd_pitch", dtype="f16"))
