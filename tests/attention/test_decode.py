"""Few query rows over long caches: keys are split between thread blocks, and results merged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.cases import OPERAND_SHAPES, Case, build, case_id
from attention.driver import check, run, times

pytestmark = pytest.mark.each_family

ROWS = [
    Case(
        seqlen_q,
        seqlen_k,
        batch,
        nheads,
        nheads_k,
        head_dim,
        dtype=dtype,
        causal=seqlen_q > 1,
        wants=wants,
    )
    for seqlen_q, seqlen_k in (
        (1, 8192),
        (1, 30_001),
        (2, 4095),
        (5, 10_000),
        (16, 16_384),
        (1, 100),
        (3, 257),
    )
    for batch, nheads, nheads_k in ((1, 2, 1), (3, 8, 2), (1, 16, 16))
    for head_dim, dtype, wants in ((64, "bf16", ""), (128, "f16", "qkvb"), (256, "bf16", ""))
]


def _where(case: Case) -> object:
    """Long caches of many heads take the CPU most of a minute each, and show nothing new there."""
    is_large = case.seqlen_k * case.batch * case.nheads > 100_000
    return pytest.param(case, marks=pytest.mark.cuda if is_large else (), id=case_id(case))


@pytest.mark.parametrize("case", [_where(case) for case in ROWS])
def test_few_rows(case: Case) -> None:
    check(case)


OPERANDS = [
    Case(
        seqlen_q,
        9001,
        2,
        8,
        2,
        head_dim,
        mask=mask,
        mask_fill=fill,
        bias=bias,
        softcap=cap,
        wants="",
    )
    for seqlen_q in (1, 7)
    for head_dim in (64, 128, 256)
    for mask, fill in (
        ("bk1k", "half"),
        ("bk1k", "percent"),
        ("b11k", "prefix"),
        ("bhqk", "half"),
        ("bh1k", "none"),
    )
    for bias, cap in (("", 0.0), ("bk1k", 8.0), ("bhqk", 0.0))
]


@pytest.mark.parametrize("case", OPERANDS, ids=case_id)
def test_few_rows_with_operands(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("shape", OPERAND_SHAPES)
@pytest.mark.parametrize("f32", [False, True])
@pytest.mark.parametrize("mask", ["", "b11k", "bk1k", "bh1k", "bhqk"])
def test_one_row_packs_its_heads(shape: str, f32: bool, mask: str) -> None:
    """With one query per head, the heads of a group become the rows of one row block."""
    check(Case(1, 777, 2, 8, 2, 128, bias=shape, bias_f32=f32, mask=mask, causal=True, dlse=True))


@pytest.mark.parametrize("mask_fill", ["one_key", "prefix", "suffix", "percent"])
@pytest.mark.parametrize("shape", ["bh1k", "bhqk"])
def test_parts_without_keys(mask_fill: str, shape: str) -> None:
    """Most parts of the split keep nothing and must not disturb the merge."""
    check(Case(1, 20_000, 2, 4, 2, 128, mask=shape, mask_fill=mask_fill, wants=""))
    check(Case(4, 20_000, 1, 2, 1, 64, mask=shape, mask_fill=mask_fill, dlse=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("ratio", [1, 7, 16, 40])
def test_groups_of_any_size(ratio: int, head_dim: int) -> None:
    """A row block has 16 rows, so that the heads of large groups are in several."""
    check(Case(1, 4000, 2, 2 * ratio, 2, head_dim, bias="bk1k", dlse=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("ratio", [1, 4, 7, 9])
@pytest.mark.parametrize("seqlen_k", [300, 700, 1100, 2300, 4200, 8200])
def test_any_number_of_splits(seqlen_k: int, ratio: int, head_dim: int) -> None:
    """2 to 64 splits on an H200: the lanes of a warp share them, above 32 with several each."""
    check(Case(1, seqlen_k, 1, ratio, 1, head_dim, wants=""))
    check(Case(1, seqlen_k, 1, 2 * ratio, 2, head_dim, mask="bk1k", bias="bk1k", wants=""))


TOKENS = [
    Case(seqlen_q, seqlen_k, 2, 2 * ratio, 2, head_dim, causal=True, wants="")
    for seqlen_q, ratio in ((2, 16), (3, 5), (8, 4), (16, 4), (16, 1), (31, 2), (33, 2))
    for seqlen_k in (5, 33, 700, 8200)
    for head_dim in (40, 64, 72, 128, 256)
]


@pytest.mark.parametrize("case", [_where(case) for case in TOKENS])
def test_tokens_and_heads_of_a_group_together(case: Case) -> None:
    """The tokens of a group's heads are one or two row blocks, or too many; some see no key."""
    check(case)
    check(replace(case, mask="bk1k", bias="bk1k", dlse=True))
    check(replace(case, mask="b11k", mask_fill="prefix", causal=False))


GROUPS = [
    Case(seqlen_q, seqlen_k, 2, 2 * ratio, 2, head_dim, dtype=dtype, causal=True, wants="")
    for seqlen_q, ratio in ((17, 4), (33, 8), (40, 3), (65, 5), (96, 16), (129, 2))
    for seqlen_k in (3, 97, 700, 8200)
    for head_dim, dtype in ((40, "f16"), (64, "bf16"), (72, "bf16"), (128, "f16"), (256, "bf16"))
]


@pytest.mark.parametrize("case", [_where(case) for case in GROUPS])
def test_rows_of_a_group_together(case: Case) -> None:
    """With so many tokens, the rows of a group's heads may be computed as if of one head."""
    check(case)
    check(replace(case, causal=False))


@pytest.mark.parametrize("shape", ["bk1k", "bh1k"])
def test_tokens_with_their_gradients(shape: str) -> None:
    """The backward starts from what the kernel leaves: lse, and its rest beside a bias."""
    check(Case(6, 2300, 2, 8, 2, 128, causal=True, bias=shape, dlse=True))
    check(Case(6, 2300, 2, 8, 2, 64, causal=True, mask=shape))
    check(Case(37, 2300, 2, 8, 2, 64, causal=True, dlse=True))


@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_splits_are_summed_in_their_order(seqlen_q: int) -> None:
    """The same bits each time, whichever thread block ends last."""
    problem = build(Case(seqlen_q, 9000, 2, 8, 2, 128, bias="bk1k", causal=True, wants=""))
    first = run(problem)
    for _ in range(times(30)):
        again = run(problem)
        assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_row_by_row_equals_whole(head_dim: int) -> None:
    """Decoding token by token gives what one causal pass over the sequence gives."""
    problem = build(Case(40, 40, 1, 4, 2, head_dim, causal=True, bias="bk1k", wants=""))
    whole = run(problem).out
    assert problem.bias is not None
    for row in range(40):
        seen = slice(0, row + 1)
        step = problem.with_(
            q=problem.q[:, row : row + 1],
            k=problem.k[:, seen],
            v=problem.v[:, seen],
            bias=problem.bias[..., seen],
        )
        torch.testing.assert_close(run(step).out, whole[:, row : row + 1], atol=1e-2, rtol=1e-2)
