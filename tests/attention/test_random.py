"""Seeded random cases: every feature drawn at once."""

from __future__ import annotations

import pytest

from attention.cases import LONG_LENGTHS, random_case, seeds
from attention.driver import check
from attention.targets import target

pytestmark = pytest.mark.each_family

COUNT = 600
MOST_SCORES = 1 << 26  # of a long case: with more the float64 oracle takes long
FIRST = 10_000 if target().repeats else 0  # other cases where a backend runs again


@pytest.mark.parametrize("seed", seeds(COUNT, FIRST))
def test_random(seed: int) -> None:
    case = random_case(seed)
    print(case)
    check(case)


@pytest.mark.cuda
@pytest.mark.parametrize("seed", seeds(400, COUNT + FIRST))
def test_random_long(seed: int) -> None:
    """At lengths at which kernels divide the work. Most cases have no bias, and no mask or one of
    keys, as most long calls do."""
    case = random_case(seed, LONG_LENGTHS)
    while case.batch * case.nheads * case.seqlen_q * case.seqlen_k > MOST_SCORES:
        case = case.with_(seqlen_q=-(-case.seqlen_q // 2), seqlen_k=-(-case.seqlen_k // 2))
    case = case.with_(bias=case.bias if seed % 2 else "")
    if seed % 3 and case.mask:
        case = case.with_(mask=("b11k", "bk1k", "bh1k")[seed // 3 % 3])
    print(case)
    check(case)
