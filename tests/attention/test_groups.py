"""Query heads that share keys, under causality, with more rows than stay in the L2 cache.

On Hopper the backward then takes blocks of keys two by two, the second of them with its rows from
the first to the last (docs/kernels/backward.md).
"""

from __future__ import annotations

import pytest

from attention.cases import Case, case_id
from attention.driver import check
from attention.packed import check_packed

pytestmark = pytest.mark.cuda

GROUPS = [
    Case(512, 512, 66, 12, 4, 64),
    Case(512, 512, 66, 12, 4, 128, "f16"),
    Case(1024, 1024, 8, 32, 8, 64, dlse=True),
    Case(1100, 1024, 8, 32, 8, 128, layout="heads_first"),  # rows without keys
    Case(1024, 700, 11, 48, 24, 128),  # many of them
    Case(1400, 1400, 3, 44, 22, 128),  # 11 blocks of keys: one is by itself
    Case(1920, 1920, 8, 20, 4, 40),
]


@pytest.mark.parametrize("case", GROUPS, ids=case_id)
def test_blocks_of_keys_two_by_two(case: Case) -> None:
    check(case.with_(causal=True))


# No block of keys, one, two and more, even numbers and odd; rows without keys, and the reverse.
LENGTHS = (
    *((1100, 1100), (3, 700), (0, 77), (129, 129), (1025, 900), (600, 1), (128, 128), (5, 0)),
    *((257, 257), (700, 1400), (513, 513), (0, 0), (64, 384), (1, 1), (640, 640)),
)


@pytest.mark.parametrize(
    "head_dim, dtype, nheads, nheads_k",
    [(64, "bf16", 32, 16), (128, "f16", 40, 10), (96, "bf16", 36, 18)],
)
def test_those_of_packed_sequences(head_dim: int, dtype: str, nheads: int, nheads_k: int) -> None:
    case = Case(nheads=nheads, nheads_k=nheads_k, dtype=dtype, head_dim=head_dim, causal=True)
    check_packed(case, 3 * LENGTHS)
