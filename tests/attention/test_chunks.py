"""Backwards in several rounds of launches, since their fp32 sums are large beside q, k and v."""

from __future__ import annotations

import pytest
import torch

from attention.cases import Case, build, case_id
from attention.driver import assert_close, check, run
from attention.oracle import Problem
from attention.packed import check_packed
from attention.selections import brute_force

pytestmark = [pytest.mark.cuda, pytest.mark.each_family, pytest.mark.slow]

BATCHES = Case(500, 500, 3, 16, 1, 128, causal=True, bias="bk1k")
KV_HEADS = Case(600, 600, 1, 48, 3, 128, causal=True, bias="bk1k")
GROUP = Case(520, 520, 1, 41, 1, 128, causal=True, bias="bk1k")

CASES = [
    *(
        case.with_(**changes)
        for case in (BATCHES, KV_HEADS, GROUP)
        for changes in (
            {},
            {"mask": "bk1k"},
            {"mask": "bh1k", "dtype": "f16"},
            {"mask": "1hqk", "bias": "bhqk"},
            {"mask": "11qk", "bias": "11qk", "bias_f32": True},
        )
    ),
    BATCHES.with_(head_dim=72, layout="misaligned"),
    KV_HEADS.with_(head_dim=80, layout="heads_first", dlse=True),
    GROUP.with_(head_dim=200, nheads=24, causal=False),
    GROUP.with_(bias="", wants="qkv"),
    GROUP.with_(wants="qv", mask="b11k"),
    GROUP.with_(wants="qb"),
    KV_HEADS.with_(bias="", wants="qkv", layout="spaced"),
    KV_HEADS.with_(bias="bhq1", causal=False, softcap=10.0),
    GROUP.with_(bias="", softcap=10.0),
    GROUP.with_(bias="", nheads=83, head_dim=64, causal=False),
    GROUP.with_(bias="", nheads=24, head_dim=256),
    # Items are single heads; the rounds have 12 and 11 of them.
    GROUP.with_(seqlen_q=1000, seqlen_k=1000, nheads=23, bias="bh1k"),
    GROUP.with_(seqlen_q=1000, seqlen_k=1000, nheads=23, bias="1h1k", head_dim=200),
]
# One round, but so few key blocks that each is divided into parts: by heads, and by their rows.
PARTS = [
    Case(1300, 1300, 1, 2, 1, 128, causal=True),
    Case(1700, 1290, 1, 1, 1, 64, causal=True, softcap=10.0),
    Case(1100, 700, 1, 3, 1, 64),
    Case(1090, 1500, 1, 3, 1, 128, causal=True, mask="11qk"),
    Case(1100, 600, 1, 2, 1, 256),
    Case(1100, 600, 1, 2, 1, 128, bias="1hqk"),
    Case(1100, 600, 1, 2, 1, 128, causal=True, bias="bk1k"),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", [*CASES, *PARTS], ids=case_id)
def test_gradients(case: Case, deterministic: bool) -> None:
    check(case.with_(deterministic=deterministic))


LENGTHS = ((300, 300), (0, 5), (129, 64), (1, 1), (270, 400), (3, 0))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("nheads,nheads_k", [(48, 3), (41, 1)])
@pytest.mark.parametrize(
    "operands",
    [
        {},
        {"bias": "1k1k", "dlse": True},
        {"mask": "1h1k", "bias": "1k1k"},
        {"mask": "1k1k", "bias": "1h1k"},
        {"mask": "1hqk", "bias": "1hqk"},
        {"bias": "11qk", "bias_f32": True},
    ],
    ids=lambda operands: "-".join(operands) or "plain",
)
def test_packed(
    operands: dict[str, object], nheads: int, nheads_k: int, deterministic: bool
) -> None:
    case = Case(nheads=nheads, nheads_k=nheads_k, head_dim=128, causal=True)
    check_packed(case.with_(**operands, deterministic=deterministic), LENGTHS)


# Lists of intervals: each round has at least eight blocks for each SM, and saves 64 MiB.
WINDOWED = [
    Case(1024, 1024, 2, 24, 24, 128, causal=True, bias="bk1k"),
    Case(1000, 1000, 1, 48, 48, 128, causal=True, bias="bk1k", dlse=True),
    Case(1000, 1000, 2, 40, 20, 128, causal=True, bias="bh1k", dtype="f16"),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", WINDOWED, ids=case_id)
def test_window(case: Case, deterministic: bool) -> None:
    problem = build(case)
    assert problem.bias is not None
    keep = brute_force(problem.bias[:, :, 0], 768, case.seqlen_q, True)
    assert_close(problem.with_(mask=keep), run(problem, deterministic, window_size=768))


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_of_one_kv_head(deterministic: bool) -> None:
    """Too long for the oracle: compared with calls of two heads each, which need no rounds."""
    problem = build(Case(20_000, 20_000, 1, 12, 1, 128, causal=True, bias="bk1k"))
    whole = run(problem, deterministic, window_size=2048)
    pairs = [
        dict(run(_heads(problem, slice(first, first + 2)), deterministic, window_size=2048).items())
        for first in range(0, 12, 2)
    ]
    for name, found in whole.items():
        parts = [pair[name].double() for pair in pairs]
        dim_of_heads = {"out": 2, "dq": 2, "lse": 1}.get(name)
        other = (
            torch.stack(parts).sum(0) if dim_of_heads is None else torch.cat(parts, dim_of_heads)
        )
        # The same products are summed in another order and rounded once. Gradients of keys are
        # rounded once for each of six pairs, each by 2**-9 of what is on average 1/sqrt(6) of the
        # sum. The limit is two units in the last place of bfloat16.
        error = (found.double() - other).abs().amax() / other.abs().amax()
        assert float(error) <= 2**-7, f"{name}: {float(error)}"
    if deterministic:
        again = run(problem, deterministic, window_size=2048)
        for (name, a), (_, b) in zip(again.items(), whole.items(), strict=True):
            assert torch.equal(a, b), name


ROW_ROUNDS = [
    (Case(66_001, 66_001, 1, 2, 1, 64, causal=True, bias="bk1k"), 2048),
    (Case(40_000, 70_000, 1, 2, 1, 64, causal=True, bias="bk1k", wants="qkv"), 2048),
    (Case(33_000, 33_000, 1, 8, 1, 72, causal=True, bias="bk1k", dtype="f16"), 1024),
    (Case(20_000, 20_000, 1, 12, 1, 128, causal=True, bias="bk1k", wants="qkv", dlse=True), 2048),
    (Case(33_000, 33_000, 1, 4, 1, 256, causal=True, bias="bk1k"), 2048),
    # Lists of single heads: in each round their launches go on with the sums.
    (Case(33_000, 33_000, 1, 4, 1, 256, causal=True, bias="bh1k"), 256),
    (Case(66_001, 66_001, 1, 4, 2, 64, causal=True, bias="bh1k"), 2048),
]


@pytest.mark.parametrize("case, window", ROW_ROUNDS, ids=case_id)
def test_sums_of_keys_go_on_through_rounds_of_rows(case: Case, window: int) -> None:
    """Sums in a fixed order. On Hopper each round leaves its partial sums for the keys that the
    next round sees. Compared with sums in any order; and bit for bit the same each time."""
    problem = build(case)
    found = run(problem, True, window_size=window)
    free = run(problem, False, window_size=window)
    for (name, a), (_, b) in zip(found.items(), free.items(), strict=True):
        # For each key and row by itself: keys that few rows see have the smallest gradients.
        rows = (b if name in ("out", "dq", "dk", "dv") else b.unsqueeze(-1)).double()
        error = (a.view_as(rows).double() - rows).norm(dim=-1)
        size = rows.norm(dim=-1)
        assert bool((error <= 2**-6 * size + 2**-12 * size.amax()).all()), name
        if name in ("dk", "dv"):  # keys that no row sees
            assert not bool(error[size == 0].any()), name
    for _ in range(5):
        again = run(problem, True, window_size=window)
        for (name, a), (_, b) in zip(again.items(), found.items(), strict=True):
            assert torch.equal(a, b), name


def _heads(problem: Problem, heads: slice) -> Problem:
    return problem.with_(q=problem.q[:, :, heads], dout=problem.dout[:, :, heads])


@pytest.mark.parametrize(
    "case",
    [BATCHES, KV_HEADS, GROUP, GROUP.with_(bias=""), GROUP.with_(bias="", softcap=9.0), *PARTS[:3]],
    ids=case_id,
)
def test_deterministic_repeat(case: Case) -> None:
    problem = build(case)
    want = run(problem, deterministic=True)
    for _ in range(10):
        for (name, a), (_, b) in zip(
            run(problem, deterministic=True).items(), want.items(), strict=True
        ):
            assert torch.equal(a, b), name
