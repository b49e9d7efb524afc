"""Boolean masks: every broadcast shape, density and layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attention.cases import MASK_FILLS, OPERAND_LAYOUTS, OPERAND_SHAPES, Case, build, case_id
from attention.driver import assert_close, check, run
from attention.targets import target

pytestmark = pytest.mark.each_family


@pytest.mark.parametrize("head_dim,dtype", [(64, "bf16"), (128, "f16"), (256, "bf16")])
@pytest.mark.parametrize("shape", OPERAND_SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_broadcast(shape: str, head_dim: int, dtype: str, causal: bool) -> None:
    check(Case(137, 203, mask=shape, head_dim=head_dim, dtype=dtype, causal=causal, nheads=8))


@pytest.mark.parametrize("fill", MASK_FILLS)
@pytest.mark.parametrize("shape", ["bhqk", "11qk", "bkqk"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_fill(fill: str, shape: str, head_dim: int, causal: bool) -> None:
    check(Case(330, 321, mask=shape, mask_fill=fill, head_dim=head_dim, causal=causal, dlse=True))


KEY_FILLS = ("none", "one_key", "percent", "half", "most", "all", "prefix", "suffix", "dead_heads")


@pytest.mark.parametrize("fill", KEY_FILLS)
@pytest.mark.parametrize("shape", ["b11k", "bk1k", "bh1k", "111k"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_key_fill(fill: str, shape: str, head_dim: int, causal: bool) -> None:
    """Key-only masks are turned into lists, by which keys are gathered; some have a key bias."""
    bias = "bk1k" if fill in ("half", "percent", "prefix") else ""
    check(Case(260, 519, mask=shape, mask_fill=fill, bias=bias, head_dim=head_dim, causal=causal))


LONG = [
    Case(seqlen_q, seqlen_k, 1, 4, 2, head_dim, mask=mask, mask_fill=fill, bias=bias, causal=causal)
    for seqlen_q, seqlen_k in ((700, 4095), (1000, 1000), (2000, 513))
    for head_dim in (64, 128, 192)
    for mask, bias in (("bk1k", "bk1k"), ("bh1k", "11qk"), ("bhqk", "bk1k"))
    for fill, causal in (("percent", False), ("half", True), ("blocks", True))
]


@pytest.mark.parametrize("case", LONG, ids=case_id)
def test_many_tiles(case: Case) -> None:
    check(case)


# Lengths around multiples of a word (32 keys), of a cell (64 x 64), and of 32 cells.
PACKED_ROWS = ((1, 1), (1, 2049), (64, 63), (65, 65), (100, 4095), (2113, 70), (2049, 2047))


@pytest.mark.parametrize("fill", ["half", "blocks", "all"])
@pytest.mark.parametrize("shape, layout", [("b11k", "plain"), ("1h1k", "every_third_key")])
@pytest.mark.parametrize("seqlen_q, seqlen_k", PACKED_ROWS)
def test_one_row_of_bits(seqlen_q: int, seqlen_k: int, shape: str, layout: str, fill: str) -> None:
    """A key mask is read as bits beside a bias for each row and key, or if there is little work."""
    case = Case(seqlen_q, seqlen_k, mask=shape, mask_fill=fill, operand_layout=layout)
    check(case.with_(bias="11qk", nheads_k=4))
    check(case.with_(nheads=2, causal=True))


@pytest.mark.parametrize("layout", OPERAND_LAYOUTS)
@pytest.mark.parametrize("shape", ["bhqk", "1kqk", "bh1k", "b1q1", "111k"])
def test_layout(layout: str, shape: str) -> None:
    check(Case(150, 201, mask=shape, operand_layout=layout, head_dim=128, causal=True))


@pytest.mark.parametrize("shape", ["1hqk", "b1qk", "bhqk", "bh1k"])
def test_expanded_view(shape: str) -> None:
    """A mask expanded by its owner (stride 0) gives bit for bit what the broadcast mask gives."""
    problem = build(Case(140, 150, mask=shape, bias="bk1k", deterministic=True))
    assert problem.mask is not None
    expanded = problem.mask.expand(2, 4, 140, 150)
    want = run(problem, deterministic=True)
    found = run(problem.with_(mask=expanded), deterministic=True)
    for (name, a), (_, b) in zip(want.items(), found.items(), strict=True):
        if shape != "bh1k":  # a key-only mask is gathered, its expansion is not: other sums
            assert torch.equal(a, b), name
        else:
            torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("value", [2, 255])
def test_true_is_any_nonzero_byte(value: int) -> None:
    """Masks viewed from bytes hold other values than 1 for True."""
    problem = build(Case(100, 120, mask="bhqk", deterministic=True))
    assert problem.mask is not None
    odd = (problem.mask.to(torch.uint8) * value).view(torch.bool)
    found = run(problem.with_(mask=odd), deterministic=True)
    for (name, a), (_, b) in zip(run(problem, True).items(), found.items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_all_true_mask_equals_none(head_dim: int) -> None:
    with_mask = build(Case(200, 200, mask="b11k", mask_fill="all", causal=True, head_dim=head_dim))
    without = dataclasses.replace(with_mask, mask=None)
    for (name, a), (_, b) in zip(run(with_mask).items(), run(without).items(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2, msg=name)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "case",
    [
        Case(256, 256, 16, 12, 12, 64, mask="b11k", mask_fill="prefix"),
        Case(300, 200, 24, 10, 10, 64, mask="111k", mask_fill="half", dlse=True),
        Case(512, 512, 8, 12, 12, 96, mask="b11k", mask_fill="most", causal=True),
        Case(300, 512, 8, 24, 12, 128, mask="bh1k", mask_fill="half"),
        Case(128, 512, 8, 24, 12, 64, mask="bh1k", mask_fill="half"),
        Case(512, 512, 8, 12, 4, 128, mask="bk1k", mask_fill="suffix", bias="bk1k"),
        Case(1000, 1000, 4, 12, 12, 64, mask="b11k", mask_fill="blocks", causal=True),
        Case(512, 512, 4, 16, 16, 192, mask="b11k", mask_fill="prefix"),
        Case(512, 512, 8, 8, 8, 256, mask="b11k", mask_fill="half", causal=True),
        Case(300, 333, 8, 8, 4, 200, mask="bk1k", mask_fill="half", bias="bk1k"),
    ],
    ids=case_id,
)
def test_hidden_keys_of_many_tiles_may_hold_anything(case: Case) -> None:
    """Kernels may read a list of the kept keys, or whole tiles, which have hidden keys, too."""
    check_with_nan_in_hidden_keys(case)


# Rows and keys: all keys of a head are in one tile of Hopper's kernels, which then write dq.
ONE_TILE = [(128, 128), (200, 77), (65, 66), (300, 1), (97, 128)]


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
@pytest.mark.parametrize("rows, keys", ONE_TILE)
@pytest.mark.parametrize(
    "shape, fill",
    [
        *(("b11k", "prefix"), ("b11k", "none"), ("bh1k", "half"), ("1k1k", "one_key")),
        *(("bkqk", "half"), ("b1qk", "dead_rows"), ("bhqk", "dead_heads"), ("1hqk", "percent")),
        *(("b1q1", "half"), ("11qk", "blocks")),
    ],
)
def test_keys_of_one_tile(shape: str, fill: str, rows: int, keys: int, head_dim: int) -> None:
    """Rows without a key get their gradient, too, from the thread block that has all keys."""
    case = Case(rows, keys, 3, 4, 2, head_dim, mask=shape, mask_fill=fill)
    check(case)
    if rows <= keys:
        check(case.with_(causal=True, dtype="f16", dlse=True))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "case",
    [
        Case(128, 128, 48, 12, 12, 64, mask="b11k", mask_fill="prefix"),
        Case(100, 100, 64, 12, 12, 48, mask="b11k", mask_fill="suffix", causal=True),
        Case(77, 128, 40, 16, 4, 64, mask="bk1k", mask_fill="blocks"),
        Case(700, 77, 8, 8, 8, 64, mask="111k", mask_fill="one_key", dtype="f16"),
        Case(90, 90, 5, 8, 4, 128, mask="bh1k", mask_fill="half", causal=True),
        Case(128, 128, 3, 6, 3, 96, mask="b11k", mask_fill="half"),
    ],
    ids=case_id,
)
def test_hidden_keys_of_one_tile_may_hold_anything(case: Case) -> None:
    """Also in calls with enough work for the mask to be packed into bits first."""
    check(case)
    check_with_nan_in_hidden_keys(case)


def check_with_nan_in_hidden_keys(case: Case) -> None:
    """Check with NaN in the keys that are hidden from all query heads of their kv head."""
    if target().backend == "flex":
        pytest.skip("this backend reads all keys and multiplies hidden ones by 0")
    problem = build(case)
    assert problem.mask is not None
    batch, heads = case.batch, case.nheads
    kept = problem.mask.expand(batch, problem.mask.shape[1], 1, case.seqlen_k)
    kept = kept.repeat_interleave(heads // kept.shape[1], 1)  # for each query head
    kept = kept.reshape(batch, case.nheads_k, -1, case.seqlen_k).any(2)
    hidden = ~kept.transpose(1, 2).unsqueeze(3)
    assert hidden.any() and not hidden.all()
    k, v = (x.masked_fill(hidden, float("nan")) for x in (problem.k, problem.v))
    assert_close(problem, run(problem.with_(k=k, v=v)))
