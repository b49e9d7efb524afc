"""Query heads that share keys.

Under causality, with more rows than stay in the L2 cache, the backward on Hopper takes key blocks
in pairs, the second of which goes through its rows from the first to the last
(docs/kernels/backward.md). Heads with keys or biases of their own have separate launches or items.
"""

from __future__ import annotations

import pytest

from attention.cases import Case, build, case_id
from attention.driver import assert_close, check, run
from attention.packed import check_packed
from attention.selections import brute_force

pytestmark = pytest.mark.cuda

GROUPS = [
    Case(512, 512, 66, 12, 4, 64),
    Case(512, 512, 66, 12, 4, 128, "f16"),
    Case(1024, 1024, 8, 32, 8, 64, dlse=True),
    Case(1100, 1024, 8, 32, 8, 128, layout="heads_first"),  # rows without keys
    Case(1024, 700, 11, 48, 24, 128),  # many of them
    Case(1400, 1400, 3, 44, 22, 128),  # 11 key blocks: one has no partner
    Case(1920, 1920, 8, 20, 4, 40),
]


@pytest.mark.parametrize("case", GROUPS, ids=case_id)
def test_blocks_of_keys_two_by_two(case: Case) -> None:
    check(case.with_(causal=True))


# No key block, one, two and more, in even and odd numbers; rows without keys, keys without rows.
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


# Several head ratios and head dimensions, lengths around multiples of row blocks and key blocks,
# and unequal numbers of rows and keys.
SINGLE_HEADS = [
    Case(700, 700, 2, 12, 3, 64, causal=True, dlse=True),
    Case(513, 513, 1, 10, 2, 128, "f16", causal=True),
    Case(129, 1300, 3, 7, 1, 96, causal=True, layout="heads_first"),
    Case(1300, 1300, 1, 16, 8, 200, causal=True),
    Case(640, 900, 2, 4, 2, 256, "f16", causal=True, logits=4.0),
    Case(65, 127, 5, 8, 4, 40, causal=True),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bias, f32", [("bh1k", False), ("1h1k", True)])
@pytest.mark.parametrize("case", SINGLE_HEADS, ids=case_id)
class TestSingleHeads:
    """Heads of a group that share neither scores nor a mask."""

    def test_scores(self, case: Case, bias: str, f32: bool, deterministic: bool) -> None:
        problem = build(case.with_(bias=bias, bias_f32=f32))
        assert problem.bias is not None
        scores = problem.bias[:, :, 0].expand(case.batch, -1, -1)
        for window in (1, 100, 384):
            keep = brute_force(scores, window, case.seqlen_q, True)
            found = run(problem, deterministic, window_size=window)
            assert_close(problem.with_(mask=keep), found)

    def test_bias(self, case: Case, bias: str, f32: bool, deterministic: bool) -> None:
        case = case.with_(bias=bias, bias_f32=f32, deterministic=deterministic)
        check(case)
        check(case.with_(causal=False, mask="b11k"))

    def test_mask(self, case: Case, bias: str, f32: bool, deterministic: bool) -> None:
        case = case.with_(mask=bias, deterministic=deterministic)
        check(case)
        check(case.with_(causal=False, bias="bk1k", bias_f32=f32))
