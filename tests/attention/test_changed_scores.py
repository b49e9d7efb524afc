"""Forwards in which a bias, a dense mask or softcap changes the scores, of many rows.

The rows are enough to fill a large GPU. In calls with many keys and few rows, the keys of a row may
be split instead, which other kernels compute. Rows of a dense bias start on 16 bytes here, as the
kernels for Hopper need them.
"""

from __future__ import annotations

import pytest

from attention.cases import BIAS_FILLS, Case, case_id
from attention.driver import check

pytestmark = pytest.mark.each_family

# 128 blocks of 128 rows and keys of several tiles, which end within one.
FULL = Case(900, 520, 2, 8, 4, wants="")
HEAD_DIMS_AND_DTYPES = [(64, "bf16"), (64, "f16"), (128, "bf16"), (128, "f16"), (256, "bf16")]

MASKS = [
    FULL.with_(mask="b1qk", mask_fill="half"),
    FULL.with_(mask="1hqk", mask_fill="blocks", causal=True),
    FULL.with_(mask="bkqk", mask_fill="dead_rows"),
    FULL.with_(mask="11qk", mask_fill="banded"),  # most tiles are empty, all rows of some blocks
    FULL.with_(mask="bhqk", mask_fill="none"),
]
BIASES = [
    FULL.with_(bias="1hqk"),
    FULL.with_(bias="bkqk", bias_f32=True, causal=True),
    FULL.with_(bias="11qk", bias_f32=True, bias_fill="some_minus_inf"),
    FULL.with_(bias="b1qk", bias_fill="some_lowest", causal=True),
    FULL.with_(bias="bk1k", causal=True),
    FULL.with_(bias="1h1k", bias_f32=True, bias_fill="some_minus_inf"),
]
TOGETHER = [
    FULL.with_(softcap=5.0, causal=True),
    FULL.with_(softcap=5.0, bias="b11k", mask="b1qk"),
    FULL.with_(softcap=5.0, bias="1hqk", bias_f32=True, causal=True),
    FULL.with_(bias="1hqk", mask="11qk", mask_fill="blocks", causal=True),
    FULL.with_(bias="b1qk", bias_f32=True, mask="bkqk", mask_fill="dead_rows"),
    FULL.with_(bias="bk1k", bias_f32=True, mask="b1qk", mask_fill="banded"),
    FULL.with_(scale=-0.2, bias="11qk", mask="11qk"),
]


@pytest.mark.parametrize("head_dim, dtype", HEAD_DIMS_AND_DTYPES)
@pytest.mark.parametrize("case", MASKS, ids=case_id)
def test_masks(case: Case, head_dim: int, dtype: str) -> None:
    check(case.with_(head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("head_dim, dtype", HEAD_DIMS_AND_DTYPES)
@pytest.mark.parametrize("case", BIASES, ids=case_id)
def test_biases(case: Case, head_dim: int, dtype: str) -> None:
    check(case.with_(head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("head_dim, dtype", HEAD_DIMS_AND_DTYPES)
@pytest.mark.parametrize("case", TOGETHER, ids=case_id)
def test_together(case: Case, head_dim: int, dtype: str) -> None:
    check(case.with_(head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("head_dim", [40, 96, 192])
@pytest.mark.parametrize(
    "case", [MASKS[1], BIASES[0], BIASES[1], BIASES[4], TOGETHER[1]], ids=case_id
)
def test_head_dims_between_tiles(case: Case, head_dim: int) -> None:
    check(case.with_(head_dim=head_dim))


@pytest.mark.cuda
@pytest.mark.parametrize("fill", BIAS_FILLS)
@pytest.mark.parametrize("dtype, f32", [("bf16", False), ("f16", False), ("bf16", True)])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_key_bias_of_many_rows(head_dim: int, fill: str, dtype: str, f32: bool) -> None:
    """On Hopper the tensor cores add the bias tile by tile, unless a tile has large entries."""
    many = Case(1100, 700, 2, 10, 5, head_dim, bias="bk1k", bias_fill=fill, bias_f32=f32)
    check(many.with_(dtype=dtype, wants="", dlse=True))
    check(many.with_(dtype=dtype, wants="", seqlen_k=1031, causal=True))


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 160, 256])
def test_key_bias_and_its_gradient(head_dim: int) -> None:
    """Few rows and many, and rows that see no key; heads of a group with a bias each."""
    check(Case(260, 1031, 2, 10, 5, head_dim, bias="bk1k", dlse=True))
    check(Case(1100, 1300, 2, 10, 5, head_dim, bias="bk1k", causal=True, dlse=True))
    check(Case(1300, 1100, 2, 8, 2, head_dim, bias="bh1k", causal=True, dtype="f16"))


@pytest.mark.cuda
@pytest.mark.parametrize("seqlen_k", [1, 50, 128, 129, 200])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_key_bias_of_many_rows_over_few_keys(head_dim: int, seqlen_k: int) -> None:
    """More blocks of rows than SMs, with one or a few tiles of keys each."""
    case = Case(1100, seqlen_k, 4, 10, 5, head_dim, bias="bk1k", dlse=True)
    check(case)
    check(case.with_(causal=True, dtype="f16"))  # most rows see no key


@pytest.mark.parametrize("scale", [1e-4, 0.02, 30.0, 1e4])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_key_bias_beside_a_scale(dtype: str, scale: float) -> None:
    """The bias is divided by the scale first: it gets as large as 16 bits can hold, or tiny."""
    check(Case(1100, 700, 2, 10, 5, bias="bk1k", dtype=dtype, scale=scale, wants=""))


@pytest.mark.parametrize("f32", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_rows_and_few_keys(head_dim: int, f32: bool) -> None:
    """Too few keys to be split: more keys than rows, and fewer."""
    check(Case(70, 328, 2, 2, 1, head_dim, bias="1kqk", bias_f32=f32, mask="b1qk", wants=""))
    check(Case(150, 40, 2, 2, 1, head_dim, bias="bhqk", bias_f32=f32, causal=True, wants=""))
