"""Padded batches: keys of padding are masked, and rows of padding send no gradient back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention.cases import Case, build
from attention.driver import assert_close, run
from attention.oracle import Problem
from attention.targets import on_cuda, target

pytestmark = pytest.mark.each_family

# Rows without any token and with one, around the edges of tiles, and full ones.
LENGTHS = (300, 0, 1, 64, 65, 127, 128, 129, 255, 299)
SIDES = ("right", "left", "both", "holes")


def is_token(side: str, batch: int, seqlen: int, device: torch.device) -> Tensor:
    """bool (batch, seqlen)."""
    lengths = torch.tensor(LENGTHS, device=device)
    lengths = (lengths * seqlen // 300 if seqlen > 1000 else lengths).clamp(max=seqlen)
    lengths = lengths[torch.arange(batch, device=device) % len(LENGTHS), None]
    place = torch.arange(seqlen, device=device)
    if side == "left":
        return place >= seqlen - lengths
    if side == "both":
        return (place >= lengths // 3) & (place < lengths)
    tokens = place < lengths
    return tokens & (place % 7 != 3) if side == "holes" else tokens


def pad(problem: Problem, side: str, zero: float = 0.0) -> Problem:
    """The problem with padding: a key mask of its tokens, and an output gradient of `zero` in rows
    of padding."""
    batch, seqlen_q = problem.q.shape[:2]
    device = problem.q.device
    keys = is_token(side, batch, problem.k.shape[1], device)
    rows = is_token(side, batch, seqlen_q, device)
    dout = problem.dout.masked_fill(~rows[..., None, None], zero)
    mask = keys[:, None, None]
    if problem.mask is not None:
        mask = mask & problem.mask
    return problem.with_(mask=mask, dout=dout)


# The kernels for Hopper distribute few key tiles in another way than many. With 132 SMs, 330 tiles
# are enough, unless they have many rows or little work, and 1584 are many. In SMALL calls the
# kernels walk the tiles of the mask. test_hopper_key_masks.py checks this for these shapes.
SMALL = Case(300, 300, dtype=target().dtypes[0])
FEW = SMALL.with_(seqlen_q=1000, seqlen_k=1000, batch=12, nheads=8)
MANY = SMALL.with_(batch=40, nheads=16, nheads_k=16)
ENOUGH = SMALL.with_(batch=8, nheads=16, nheads_k=16, seqlen_q=1024, seqlen_k=1024)
MANY_GROUPS = SMALL.with_(batch=80, nheads=16, nheads_k=4, seqlen_q=256, seqlen_k=600)
GROUPS_IN_CHUNKS = SMALL.with_(batch=8, nheads=16, nheads_k=4, seqlen_q=900, seqlen_k=900)
if not on_cuda():  # where these sizes make no difference
    SMALL = SMALL.with_(seqlen_q=140, seqlen_k=140)
    FEW = MANY = ENOUGH = MANY_GROUPS = GROUPS_IN_CHUNKS = SMALL.with_(
        batch=10, nheads=2, nheads_k=2
    )


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        SMALL.with_(batch=10, head_dim=128),
        SMALL.with_(batch=10, head_dim=200),
        FEW,
        ENOUGH,
        ENOUGH.with_(head_dim=120, batch=4),
        MANY,
        MANY.with_(head_dim=128, seqlen_q=170),
        MANY.with_(head_dim=56),
        MANY.with_(head_dim=120),
        MANY.with_(head_dim=40, seqlen_q=120),
        MANY_GROUPS,
        MANY_GROUPS.with_(seqlen_q=128, head_dim=72),
        GROUPS_IN_CHUNKS.with_(head_dim=72),
    ],
    ids=str,
)
def test_gradients(case: Case, causal: bool, side: str) -> None:
    problem = pad(build(case.with_(causal=causal)), side, zero=-0.0 if causal else 0.0)
    found = run(problem)
    assert_close(problem, found)
    assert problem.mask is not None
    for gradient in (found.dk, found.dv):
        assert gradient is not None
        assert not gradient[~problem.mask[:, 0, 0]].any()


@pytest.mark.parametrize("mask", ["", "1k1k", "bk1k"])
@pytest.mark.parametrize("bias", ["", "bk1k"])
def test_masks_of_heads_and_biases(mask: str, bias: str) -> None:
    problem = pad(build(MANY_GROUPS.with_(causal=True, mask=mask, bias=bias)), "right")
    assert_close(problem, run(problem))


@pytest.mark.parametrize("case", [SMALL, FEW, MANY], ids=str)
def test_rows_that_only_the_log_sum_exp_sends_back_to(case: Case) -> None:
    """Rows that get a gradient of lse alone are not padding, though their output gradient is
    zero."""
    problem = pad(build(case.with_(causal=True, dlse=True)), "right")
    assert problem.dlse is not None
    rows = torch.arange(case.seqlen_q, device=problem.q.device)
    problem = problem.with_(dlse=problem.dlse.masked_fill(rows % 89 != 11, 0.0))
    assert_close(problem, run(problem))


@pytest.mark.parametrize("case", [SMALL, FEW, MANY], ids=str)
def test_no_gradient_at_all(case: Case) -> None:
    problem = pad(build(case), "right")
    found = run(problem.with_(dout=torch.zeros_like(problem.dout)))
    for gradient in (found.dq, found.dk, found.dv):
        assert gradient is not None and not gradient.any()


def test_long_rows() -> None:
    """More rows than the 1024 that a chunk has at most over the list of a mask."""
    case = MANY.with_(seqlen_q=1300, seqlen_k=1300, causal=True, batch=10 if on_cuda() else 1)
    problem = pad(build(case), "right")
    assert problem.dout[0, -1].any()
    assert_close(problem, run(problem))


@pytest.mark.parametrize("case", [SMALL.with_(batch=6), FEW, MANY, MANY_GROUPS], ids=str)
def test_a_mask_for_all_batches_and_a_gradient_in_one(case: Case) -> None:
    problem = pad(build(case.with_(causal=True)), "right")
    assert problem.mask is not None
    alone = torch.arange(case.batch, device=problem.q.device) == 5
    dout = problem.dout.masked_fill(~alone[:, None, None, None], 0.0)
    problem = problem.with_(mask=problem.mask[9 % case.batch, None], dout=dout)
    assert problem.mask is not None and problem.mask.shape[0] == 1 and dout.any()
    assert_close(problem, run(problem))


@pytest.mark.parametrize("case", [FEW, MANY, MANY_GROUPS], ids=str)
def test_rows_without_a_gradient_are_left_out(case: Case) -> None:
    """On Hopper they are left out in whole tiles, so that not even NaN comes from them."""
    if target().family != "sm90":
        pytest.skip("other kernels read all rows")
    problem = pad(build(case), "right", zero=-0.0)
    rows = torch.arange(case.seqlen_q, device=problem.q.device)
    last = problem.dout.ne(0).any(-1).any(-1).mul(rows + 1).amax(1)
    behind = rows >= last[:, None] + 64
    found = run(problem.with_(q=problem.q.masked_fill(behind[..., None, None], torch.nan)))
    assert found.out[behind].isnan().any()  # where an entry has keys
    for gradient in (found.dk, found.dv):
        assert gradient is not None and gradient.isfinite().all() and gradient.any()


@pytest.mark.parametrize("case", [FEW, MANY, MANY_GROUPS], ids=str)
def test_a_gradient_that_is_nan_is_one(case: Case) -> None:
    problem = pad(build(case), "right")
    dout = problem.dout.clone()
    dout[1, case.seqlen_q - 1] = torch.nan  # no token, in a batch entry without any
    dout[3, case.seqlen_q - 1] = torch.nan
    found = run(problem.with_(dout=dout))
    assert problem.mask is not None
    for gradient in (found.dk, found.dv):
        assert gradient is not None
        assert gradient[3][problem.mask[3, 0, 0]].isnan().all()
        assert not gradient[1].any() and gradient[2].isfinite().all()
