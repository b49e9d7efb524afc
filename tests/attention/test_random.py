"""Seeded random cases: every feature drawn at once."""

from __future__ import annotations

import pytest

from attention.cases import random_case
from attention.driver import check
from attention.targets import target

pytestmark = pytest.mark.each_family

COUNT = 600
FIRST = 10_000 if target().repeats else 0  # other cases where a backend runs again


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_random(seed: int) -> None:
    case = random_case(seed)
    print(case)
    check(case)
