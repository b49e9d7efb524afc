"""Pairs of lengths around every tile edge, with the causal corner in all positions."""

from __future__ import annotations

import pytest

from attention.cases import Case, case_id
from attention.driver import check

pytestmark = pytest.mark.each_family

LENGTHS = (0, 1, 3, 63, 64, 65, 127, 128, 129, 255, 513, 1000, 2049, 4095)
# One head dimension and dtype for each compiled tile; together they see every pair of lengths.
ANCHORS = (("bf16", 64), ("f16", 128), ("bf16", 256))


def _crossed() -> list[Case]:
    cases = []
    for i, seqlen_q in enumerate(LENGTHS):
        for j, seqlen_k in enumerate(LENGTHS):
            dtype, head_dim = ANCHORS[(i + 2 * j) % len(ANCHORS)]
            large = seqlen_q * seqlen_k > 1_100_000
            case = Case(seqlen_q, seqlen_k, dtype=dtype, head_dim=head_dim, dlse=(i + j) % 3 == 0)
            case = case.with_(batch=1, nheads=2, nheads_k=1) if large else case
            cases.append(case.with_(causal=(i + j) % 2 == 0))
            if not large:
                cases.append(
                    case.with_(causal=(i + j) % 2 == 1, dtype="f16" if dtype == "bf16" else "bf16")
                )
    return cases


@pytest.mark.parametrize("case", _crossed(), ids=case_id)
def test_crossed(case: Case) -> None:
    check(case)


EDGES = (1, 31, 33, 63, 64, 65, 96, 127, 129, 192, 193)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_k", EDGES)
@pytest.mark.parametrize("rows_ahead", [-70, -1, 0, 1, 64, 130])
def test_causal_corner(head_dim: int, seqlen_k: int, rows_ahead: int) -> None:
    """Sq = Sk + rows_ahead: rows without keys above the corner, whole prefixes below it."""
    seqlen_q = seqlen_k + rows_ahead
    if seqlen_q < 1:
        pytest.skip("no rows")
    check(Case(seqlen_q, seqlen_k, batch=1, head_dim=head_dim, causal=True, dlse=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_k", [0, 1, 127, 128, 129])
@pytest.mark.parametrize("seqlen_q", [0, 1, 127, 128, 129])
def test_with_operands(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    """A key mask and a bias with rows, each of which takes paths of its own at the edges."""
    check(Case(seqlen_q, seqlen_k, mask="b11k", bias="1hqk", causal=causal, dlse=True))


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [34, 50, 67, 90, 130])
def test_row_blocks_of_several_waves(heads: int, head_dim: int, causal: bool) -> None:
    """More row blocks than a GPU has room for: from a few more to five times as many.

    Persistent kernels take them in a fixed order, or whenever a thread block is free.
    """
    check(Case(400, 150, batch=1, nheads=heads, nheads_k=heads, head_dim=head_dim, causal=causal))
    if head_dim == 64:  # tall row blocks, several to a head
        check(Case(1100, 700, batch=1, nheads=heads // 2, nheads_k=heads // 2, causal=causal))


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 96, 120, 128])
@pytest.mark.parametrize("seqlen_k", [65, 77, 127, 128])
def test_keys_of_one_tile(seqlen_k: int, head_dim: int, ratio: int, causal: bool) -> None:
    """Hopper's backward then writes dq directly, unless a row has no key."""
    case = Case(seqlen_k, seqlen_k, nheads=4, nheads_k=4 // ratio, head_dim=head_dim, causal=causal)
    for seqlen_q in (65, seqlen_k, seqlen_k + 1, 1030):
        check(case.with_(seqlen_q=seqlen_q, dlse=seqlen_q > 1000))
    check(case.with_(seqlen_q=40, batch=70))
