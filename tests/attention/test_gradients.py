"""Every combination of gradients that are asked for; those that are not asked for stay None."""

from __future__ import annotations

import itertools

import pytest
import torch

import dmattn
from attention.cases import Case, build, case_id
from attention.driver import assert_close, check, run
from attention.selections import brute_force

pytestmark = pytest.mark.each_family

SUBSETS = [
    "".join(x for x, on in zip("qkvb", bits, strict=True) if on)
    for bits in itertools.product((0, 1), repeat=4)
]


@pytest.mark.parametrize("wants", SUBSETS)
@pytest.mark.parametrize(
    "bias,mask", [("bk1k", ""), ("bhqk", ""), ("1hqk", "bk1k"), ("bh1k", "bkqk")]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_subset(wants: str, bias: str, mask: str, deterministic: bool) -> None:
    check(
        Case(
            150,
            180,
            bias=bias,
            mask=mask,
            wants=wants,
            causal=True,
            dlse=True,
            deterministic=deterministic,
        )
    )


@pytest.mark.parametrize("wants", ["q", "k", "v", "b", "qk", "kv", "qb"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_subset_other_head_dims(wants: str, head_dim: int) -> None:
    check(Case(150, 180, head_dim=head_dim, bias="bk1k", mask="bk1k", wants=wants, dtype="f16"))


@pytest.mark.parametrize("wants", ["q", "k", "v", "qv", "kv"])
@pytest.mark.parametrize(
    "case",
    [
        Case(700, 900, 2, 4, 2, 128, causal=True),
        Case(513, 513, 1, 8, 1, 72, dtype="f16"),
        Case(600, 1300, 2, 4, 2, 64, mask="b1qk", mask_fill="blocks", deterministic=True),
        Case(600, 1304, 2, 8, 2, 128, bias="11qk", bias_f32=True, deterministic=True),
        Case(600, 1300, 1, 4, 2, 256, mask="bkqk", bias="b1qk", causal=True),
        Case(500, 100, 2, 4, 4, 128),  # keys of one tile
        Case(900, 1100, 1, 8, 1, 192, softcap=5.0),
    ],
    ids=case_id,
)
def test_subset_of_long_calls(wants: str, case: Case) -> None:
    """On Hopper all gradients are computed then, and those that nobody asked for are dropped."""
    check(case.with_(wants=wants, dlse=True))


@pytest.mark.parametrize("wants", ["q", "k", "v", "qk", "qv", "kv", "b", "vb"])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("deterministic", [False, True])
def test_subset_over_kept_keys(wants: str, head_dim: int, deterministic: bool) -> None:
    case = Case(700, 900, 2, 4, 2, head_dim, causal=True, bias="bk1k", wants=wants)
    problem = build(case)
    assert problem.bias is not None
    found = run(problem, deterministic, window_size=200)
    keep = brute_force(problem.bias[:, :, 0], 200, case.seqlen_q, True)
    assert_close(problem.with_(mask=keep), found)
    for letter in "qkvb":
        name = "dbias" if letter == "b" else f"d{letter}"
        assert (getattr(found, name) is not None) == (letter in wants)


def test_unasked_stay_none() -> None:
    problem = build(Case(64, 64, bias="bk1k"))
    assert problem.bias is not None
    q, k, v = problem.q.clone(), problem.k.clone(), problem.v.clone()
    bias = problem.bias.clone().requires_grad_()
    out = dmattn.flash_dmattn_func(q, k, v, attn_bias=bias)
    torch.autograd.backward(out, problem.dout)
    assert bias.grad is not None and bool(bias.grad.isfinite().all())
    assert q.grad is None and k.grad is None and v.grad is None


@pytest.mark.parametrize("mask", ["", "bk1k", "bhqk"])
def test_lse_gradient_alone(mask: str) -> None:
    """A loss on lse only (a zero dout): dv is zero."""
    problem = build(Case(150, 160, mask=mask, bias="bk1k", dlse=True))
    problem = problem.with_(dout=torch.zeros_like(problem.dout))
    found = run(problem)
    assert_close(problem, found)
    assert found.dv is not None and not bool(found.dv.any())


def test_inputs_are_not_written() -> None:
    problem = build(Case(150, 160, mask="bhqk", bias="bhqk", dlse=True))
    names = ("q", "k", "v", "mask", "bias", "dout", "dlse")
    before = {name: getattr(problem, name).clone() for name in names}
    run(problem)
    for name, value in before.items():
        assert torch.equal(getattr(problem, name), value), name
