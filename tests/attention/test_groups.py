"""Query heads that share keys, under causality, with more than stays in the L2 cache.

On Hopper the backward then takes blocks of keys two by two, the second of them with its rows from
the first to the last (docs/kernels/backward.md).
"""

from __future__ import annotations

import pytest

from attention.cases import Case, case_id
from attention.driver import check

pytestmark = pytest.mark.cuda

GROUPS = [
    Case(512, 512, 66, 12, 4, 64),
    Case(512, 512, 66, 12, 4, 128, "f16"),
    Case(700, 1024, 8, 32, 8, 64, dlse=True),
    Case(1000, 1024, 8, 32, 8, 128, layout="heads_first"),
    Case(1024, 700, 11, 48, 24, 96),  # rows without keys
    Case(1400, 1400, 3, 44, 22, 128),  # 11 blocks of keys: one is by itself
    Case(1920, 1920, 3, 20, 4, 40),
]


@pytest.mark.parametrize("case", GROUPS, ids=case_id)
def test_blocks_of_keys_two_by_two(case: Case) -> None:
    check(case.with_(causal=True))
