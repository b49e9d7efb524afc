"""Seeded random cases: every feature drawn at once."""

from __future__ import annotations

import os

import pytest

from gpu.cases import random_case
from gpu.device import FAMILY_VARIABLE
from gpu.harness import check

pytestmark = pytest.mark.each_family

COUNT = 600
FIRST = (
    10_000 if os.environ.get(FAMILY_VARIABLE) == "sm89" else 0
)  # other cases for the other family


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_random(seed: int) -> None:
    case = random_case(seed)
    print(case)
    check(case)
