"""Gradients of all inputs where a bias or a dense mask changes the scores.

The backward for Hopper takes calls with few rows, or with enough keys to fill the GPU. In other
calls the rows of a head are split, which other kernels compute. Rows of a dense bias start on 16
bytes here, as the backward for Hopper needs them.
"""

from __future__ import annotations

import pytest

from attention.cases import Case, case_id
from attention.driver import check

pytestmark = [pytest.mark.each_family, pytest.mark.cuda, pytest.mark.every_case]

# Eight blocks of 64 rows, the last one short; keys end within a block.
SHORT = Case(500, 520, 2, 4, 4)
GROUPS = Case(250, 680, 2, 8, 4)
# More than 32 row blocks, whose states are read 32 at a time, and nearly as many key blocks as SMs.
LONG = Case(2200, 1704, 1, 8, 8)
HEAD_DIMS_AND_DTYPES = [
    (head_dim, dtype) for head_dim in (64, 128, 192, 256) for dtype in ("bf16", "f16")
]

MASKS = [
    SHORT.with_(mask="b1qk", mask_fill="half"),
    SHORT.with_(mask="1hqk", mask_fill="blocks", causal=True),
    GROUPS.with_(mask="bkqk", mask_fill="dead_rows"),
    GROUPS.with_(mask="bhqk", mask_fill="half", causal=True),
    GROUPS.with_(mask="11q1", mask_fill="half"),
    SHORT.with_(mask="11qk", mask_fill="banded"),  # most tiles are empty
    SHORT.with_(mask="bhqk", mask_fill="none"),
    LONG.with_(mask="11qk", mask_fill="blocks"),
    LONG.with_(mask="1hqk", mask_fill="banded"),
]
BIASES = [
    SHORT.with_(bias="bhqk", bias_f32=True),
    SHORT.with_(bias="1hqk", bias_f32=True, causal=True),
    GROUPS.with_(bias="bkqk", bias_f32=True, bias_fill="some_minus_inf"),
    GROUPS.with_(bias="11qk", bias_f32=True, causal=True),
    LONG.with_(bias="11qk", bias_f32=True),
    GROUPS.with_(bias="bk1k", causal=True),
    SHORT.with_(bias="1h1k", bias_f32=True, bias_fill="some_minus_inf"),
    LONG.with_(bias="111k", bias_fill="some_lowest"),
]
# So many heads or batch entries share a bias that on Hopper two of them share a thread block.
MANY = Case(130, 680, 2, 16, 16)
PAIRS = [
    MANY.with_(bias="1hqk"),
    MANY.with_(bias="b1qk", bias_fill="some_minus_inf"),
    MANY.with_(bias="11qk", dlse=True),
    MANY.with_(batch=1, nheads=64, nheads_k=32, bias="11qk", bias_fill="some_lowest"),
    MANY.with_(seqlen_q=3, batch=4, nheads_k=8, bias="1hqk"),
    Case(130, 264, 4, 68, 68, bias="1hqk", causal=True),
    Case(300, 264, 3, 92, 92, bias="11qk", causal=True),  # the first rows see no key
]
TOGETHER = [
    SHORT.with_(bias="bhqk", mask="b1qk", mask_fill="blocks"),
    GROUPS.with_(bias="1hqk", mask="bhqk", mask_fill="half", causal=True),
    SHORT.with_(bias="11qk", mask="11qk", mask_fill="banded"),
    SHORT.with_(bias="bhqk", mask="1hqk", mask_fill="none"),
    GROUPS.with_(bias="bk1k", bias_f32=True, mask="bkqk", mask_fill="dead_rows"),
    SHORT.with_(bias="111k", mask="b1qk", mask_fill="blocks", causal=True),
    SHORT.with_(bias="bhqk", bias_f32=True, mask="b1qk", mask_fill="half"),
    LONG.with_(bias="11qk", bias_f32=True, mask="1hqk", mask_fill="banded", seqlen_k=1701),
]


@pytest.mark.parametrize("head_dim, dtype", HEAD_DIMS_AND_DTYPES)
@pytest.mark.parametrize("case", MASKS, ids=case_id)
def test_masks(case: Case, head_dim: int, dtype: str) -> None:
    check(case.with_(head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("head_dim, dtype", HEAD_DIMS_AND_DTYPES)
@pytest.mark.parametrize("case", BIASES, ids=case_id)
def test_biases(case: Case, head_dim: int, dtype: str) -> None:
    check(case.with_(head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("head_dim, dtype", [(64, "bf16"), (64, "f16"), (40, "bf16")])
@pytest.mark.parametrize("case", PAIRS, ids=case_id)
def test_pairs(case: Case, head_dim: int, dtype: str) -> None:
    check(case.with_(head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("head_dim, dtype", HEAD_DIMS_AND_DTYPES)
@pytest.mark.parametrize("case", TOGETHER, ids=case_id)
def test_together(case: Case, head_dim: int, dtype: str) -> None:
    check(case.with_(head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("head_dim", [40, 96, 136, 200])
@pytest.mark.parametrize("case", [MASKS[1], BIASES[2], BIASES[5], TOGETHER[1]], ids=case_id)
def test_head_dims_between_tiles(case: Case, head_dim: int) -> None:
    check(case.with_(head_dim=head_dim))
