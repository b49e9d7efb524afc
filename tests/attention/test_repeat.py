"""Running the same thing again: what must be bitwise equal is, and nothing drifts."""

from __future__ import annotations

import pytest
import torch

from attention.cases import Case, build, case_id
from attention.driver import assert_close, call, run, times

pytestmark = [pytest.mark.each_family, pytest.mark.slow]

SHAPES = [
    Case(777, 777, 2, 8, 2, 64, causal=True, bias="bk1k"),
    Case(513, 1025, 1, 8, 2, 128, bias="1hqk", mask="b1qk"),
    Case(700, 1500, 2, 4, 2, 128, bias="bk1k", mask="bk1k", dtype="f16"),
    Case(700, 900, 1, 8, 4, 64, bias="1k1k", mask="bh1k", causal=True),
    Case(300, 700, 1, 4, 2, 256, bias="11qk", causal=True),
    Case(300, 700, 1, 4, 1, 256, bias="b11k", mask="b11k"),
    Case(5, 3000, 2, 8, 2, 128, bias="bk1k", mask="bk1k"),
    # Calls for Hopper's own kernels: no mask, and no bias or one of whole tiles; in the backward
    # few rows or many keys.
    Case(250, 700, 2, 8, 4, 128, causal=True),
    Case(650, 700, 2, 4, 4, 64, causal=True, dtype="f16"),
    Case(300, 1300, 5, 4, 4, 128),
    Case(200, 1000, 3, 4, 2, 128, bias="bhqk", causal=True),
    Case(200, 1000, 3, 4, 4, 64, bias="1hqk"),
    # Wide heads on Hopper: two thread blocks share keys, and take turns at dq; with few tiles,
    # parts of them take turns at dk and dv.
    Case(700, 900, 2, 8, 4, 256, causal=True),
    Case(513, 1300, 1, 6, 6, 192, dtype="f16"),
    Case(1100, 200, 1, 8, 1, 160, softcap=5.0),
]
# With a mask or a bias on Hopper: key blocks take turns at dq, also where a mask hides blocks from
# some rows only; groups whose heads share a mask or have several; biases of both widths and for
# each key; and lists of the keys of a mask.
ORDERED = [
    Case(900, 1700, 2, 8, 2, 128, mask="1hqk", mask_fill="blocks"),
    Case(900, 1700, 2, 8, 2, 96, mask="b1qk", mask_fill="blocks", causal=True, dtype="f16"),
    Case(700, 1300, 3, 4, 2, 64, mask="bkqk", bias="bk1k", causal=True),
    Case(520, 2096, 2, 6, 2, 128, mask="1kqk", mask_fill="blocks", bias="bhqk"),
    Case(520, 2096, 2, 4, 4, 64, bias="11qk", causal=True),
    Case(520, 2096, 2, 4, 4, 128, bias="1hqk", bias_f32=True, mask="b11k"),
    Case(900, 1700, 1, 8, 1, 128, bias="1k1k", mask="bk1k"),
    # Batch entries, heads, or heads of a group that share the gradient of a bias take turns at it,
    # or are computed by consecutive launches if their masks differ.
    Case(700, 1304, 3, 4, 2, 64, bias="1hqk", causal=True),
    Case(700, 1304, 3, 8, 2, 128, bias="11qk", mask="11qk", mask_fill="blocks", causal=True),
    Case(520, 1304, 2, 8, 2, 96, bias="bkqk", dtype="f16"),
    Case(520, 1304, 3, 4, 4, 128, bias="11qk", bias_f32=True),
    Case(700, 1304, 2, 8, 2, 64, bias="1kqk", bias_f32=True, mask="111k", causal=True),
    Case(520, 1304, 3, 4, 4, 64, bias="1hqk", mask="b1qk", mask_fill="blocks"),
    Case(2500, 2700, 2, 4, 2, 80, mask="bk1k", causal=True),
    # Rows of a bias and of its gradient that start anywhere, which are padded to start on 16 bytes.
    Case(700, 1301, 2, 8, 2, 128, bias="bhqk", causal=True),
    Case(520, 1303, 2, 4, 4, 64, bias="1hqk", bias_f32=True),
    # Wide heads, which read masks and biases of any strides; the last one has parts of few tiles.
    Case(700, 1300, 2, 8, 2, 256, mask="1hqk", mask_fill="blocks", causal=True),
    Case(520, 1301, 2, 4, 2, 192, mask="b1qk", mask_fill="blocks", bias="bhqk", dtype="f16"),
    Case(700, 1301, 2, 4, 4, 256, bias="1hqk", bias_f32=True, mask="b11k"),
    Case(900, 1100, 1, 8, 1, 256, bias="1k1k", mask="bk1k", causal=True),
    # Lists of the keys of a mask, for wide heads too.
    Case(2500, 2700, 2, 4, 2, 160, mask="bk1k", causal=True),
]
# Running top-w. In the backward on Hopper keys lie in the lists of several chunks of rows, whose
# shares of dk, dv and dbias are kept apart, and tiles of a list take turns at dq.
LISTED = [
    Case(1300, 1300, 2, 8, 2, 64, causal=True, bias="bk1k"),
    Case(1000, 1000, 1, 12, 12, 128, causal=True, bias="1k1k", dtype="f16"),
    Case(700, 1900, 2, 16, 2, 96, causal=True, bias="bk1k", bias_f32=True),
    # Wide heads: clusters take a tile of a list each.
    Case(1300, 1300, 2, 8, 2, 256, causal=True, bias="bk1k"),
    Case(700, 1900, 1, 6, 6, 192, causal=True, bias="1k1k", dtype="f16"),
]
# Forwards on Hopper with enough rows to fill the GPU: tiles of a bias, of both widths, a bias for
# each key, and the tiles that a mask leaves.
FULL = Case(900, 520, 2, 8, 4, 128, wants="")
FORWARDS = [
    FULL.with_(bias="1hqk"),
    FULL.with_(bias="1hqk", bias_f32=True, head_dim=64, causal=True),
    FULL.with_(bias="bk1k", causal=True),
    FULL.with_(mask="b1qk", mask_fill="blocks"),
    FULL.with_(mask="b1qk", mask_fill="blocks", bias="11qk", softcap=5.0),
    # Two thread blocks per SM, whose warpgroups skip tiles of which their rows see nothing; in the
    # second case some rows see no key at all.
    Case(640, 640, 12, 8, 4, 64, causal=True, wants=""),
    Case(900, 300, 10, 8, 4, 64, causal=True, wants=""),
    # Lists of keys, for two thread blocks per SM, and too long for that.
    Case(600, 1500, 5, 8, 4, 64, mask="bk1k", wants=""),
    Case(600, 2300, 5, 8, 4, 64, bias="bk1k", mask="bk1k", wants=""),
]


@pytest.mark.parametrize("case", [*SHAPES, *ORDERED], ids=case_id)
def test_deterministic_backward(case: Case) -> None:
    """50 backward passes, bit for bit the same, dbias included."""
    problem = build(case)
    want = run(problem, deterministic=True)
    assert_close(problem, want)
    wrong = {name: torch.zeros((), dtype=torch.int64, device=a.device) for name, a in want.items()}
    for _ in range(times(50) - 1):
        for (name, a), (_, b) in zip(
            run(problem, deterministic=True).items(), want.items(), strict=True
        ):
            # Not `a != b`, which holds for NaN.
            wrong[name] += (a.view(torch.uint8) != b.view(torch.uint8)).sum()
    assert {name: int(count) for name, count in wrong.items()} == dict.fromkeys(wrong, 0)


@pytest.mark.cuda
@pytest.mark.parametrize("case", LISTED, ids=case_id)
def test_deterministic_lists_beside_other_work(case: Case) -> None:
    _compare_beside_other_work(case, window_size=300)


@pytest.mark.cuda
@pytest.mark.parametrize("case", ORDERED, ids=case_id)
def test_deterministic_masks_beside_other_work(case: Case) -> None:
    _compare_beside_other_work(case)


def _compare_beside_other_work(case: Case, **options: int) -> None:
    """250 backward passes, while another stream takes SMs away and gives them back."""
    problem = build(case)
    want = run(problem, deterministic=True, **options)
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    busy = torch.randn(1024, 1024, device=problem.q.device)
    wrong = torch.zeros((), dtype=torch.int64, device=problem.q.device)
    for i in range(times(250) - 1):
        with torch.cuda.stream(other):
            for _ in range(i % 4):
                torch.mm(busy, busy)
        for (_, a), (_, b) in zip(
            run(problem, deterministic=True, **options).items(), want.items(), strict=True
        ):
            wrong += (a.view(torch.uint8) != b.view(torch.uint8)).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("case", [*SHAPES, *FORWARDS], ids=case_id)
def test_forward_races(case: Case) -> None:
    """250 forward passes, bit for bit the same: the forward sums nothing in an undefined order."""
    problem = build(case)
    want_out, want_lse = call(problem)
    wrong = torch.zeros((), dtype=torch.int64, device=problem.q.device)
    for _ in range(times(250) - 1):
        out, lse = call(problem)
        wrong += (out != want_out).sum() + (lse != want_lse).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("case", SHAPES, ids=case_id)
def test_backward_races(case: Case) -> None:
    """100 backward passes with an undefined order of summation stay within rounding of each
    other."""
    problem = build(case)
    want = run(problem)
    # Looked at once, at the end: each look makes the host wait for a GPU that many share.
    worst = {name: torch.zeros((), device=a.device) for name, a in want.items()}
    for _ in range(times(100)):
        for (name, a), (_, b) in zip(run(problem).items(), want.items(), strict=True):
            worst[name] = torch.maximum(worst[name], (a.float() - b.float()).abs().amax())
    for name, b in want.items():
        limit = 2 * torch.finfo(b.dtype).eps * float(b.abs().amax()) + 1e-4
        assert float(worst[name]) <= limit, f"{name} moved by {float(worst[name])}"


def test_results_do_not_depend_on_neighbours() -> None:
    """A batch element's results are the same alone and among others."""
    problem = build(Case(300, 310, 3, 4, 2, 64, causal=True, bias="bkqk"))
    whole = run(problem, deterministic=True)
    for b in range(3):
        part = {x: getattr(problem, x)[b : b + 1] for x in ("q", "k", "v", "bias", "dout")}
        alone = run(problem.with_(**part), deterministic=True)
        for (name, a), (_, full) in zip(alone.items(), whole.items(), strict=True):
            torch.testing.assert_close(a, full[b : b + 1], atol=2e-2, rtol=2e-2, msg=name)
