"""Sinks: a learned logit per query head that takes part in the softmax and has no value."""

from __future__ import annotations

import math

import pytest
import torch

import dmattn
from attention.cases import DTYPES, SINK_FILLS, Case, build
from attention.driver import assert_close, call, check, run, skipped_when_refused
from attention.packed import check_packed
from attention.targets import target

pytestmark = pytest.mark.each_family

FEATURES = {
    "plain": Case(),
    "causal": Case(causal=True, dlse=True, softcap=5.0),
    "key_mask": Case(mask="b11k", mask_fill="percent", dlse=True),
    "dense_mask": Case(mask="bhqk", mask_fill="blocks", causal=True),
    "dead_rows": Case(mask="bhqk", mask_fill="dead_rows", dlse=True),
    "key_bias": Case(bias="bk1k", mask="bk1k", causal=True, dlse=True),
    "dense_bias": Case(bias="1hqk", bias_f32=True),
    "huge_bias": Case(bias="b1qk", bias_fill="huge", bias_f32=True, dlse=True),
    "value_dim": Case(value_dim=40, bias="1h1k", deterministic=True),
    "no_keys": Case(seqlen_k=0, dlse=True),
    "decode": Case(seqlen_q=1, mask="b11k", bias="bh1k"),
}


@pytest.mark.parametrize("sinks", SINK_FILLS)
@pytest.mark.parametrize("dtype", target().dtypes)
@pytest.mark.parametrize("feature", FEATURES)
def test_sinks(feature: str, dtype: str, sinks: str) -> None:
    case = FEATURES[feature]
    lengths = {"seqlen_q": min(case.seqlen_q, 90), "seqlen_k": min(case.seqlen_k, 110)}
    check(case.with_(**lengths, sinks=sinks, sinks_f32=feature != "plain", dtype=dtype))


@pytest.mark.parametrize("nheads,nheads_k", [(1, 1), (4, 1), (12, 3)])
@pytest.mark.parametrize("wants", ["s", "qs", "kvb", "qkvbs"])
def test_heads_and_subsets_of_gradients(nheads: int, nheads_k: int, wants: str) -> None:
    case = Case(70, 80, nheads=nheads, nheads_k=nheads_k, sinks="normal", wants=wants)
    check(case.with_(bias="1h1k", causal=True))


PACKED = ((33, 70), (0, 5), (64, 0), (1, 129), (20, 20))


@pytest.mark.parametrize("mask,bias", [("", ""), ("1k1k", ""), ("1hqk", "1k1k"), ("", "1hqk")])
@pytest.mark.parametrize("sinks", ["normal", "some_minus_inf"])
def test_packed(sinks: str, mask: str, bias: str) -> None:
    """Among the sequences one has no rows, and one no keys."""
    check_packed(Case(mask=mask, bias=bias, causal=True, sinks=sinks, dlse=True), PACKED)


@pytest.mark.parametrize("rows,keys", [(150, 150), (60, 150), (160, 100)])
@pytest.mark.parametrize("causal", [False, True])
def test_window(causal: bool, rows: int, keys: int) -> None:
    """Also with rows in front of the first key, whose lse is the sink."""
    case = Case(rows, keys, bias="bk1k", causal=causal, sinks="normal", sinks_f32=True, dlse=True)
    problem = build(case)
    assert problem.bias is not None
    found = run(problem, window_size=24)
    keep = dmattn.top_window_mask(problem.bias, 24, rows, causal)
    assert_close(problem.with_(mask=keep), found)


def test_packed_window_with_moved_rows() -> None:
    """Rows and keys have different boundaries; the lse of a row without keys is its sink."""
    dtype = DTYPES[target().dtypes[-1]]
    device = build(Case()).q.device
    q, k, v = (
        torch.randn(n, h, 16, device=device).to(dtype) for n, h in ((9, 4), (12, 2), (12, 2))
    )
    bounds = [torch.tensor(x, device=device).int() for x in ([0, 6, 9], [0, 4, 12])]
    bias, sinks = torch.randn(12, 2, device=device).to(dtype), torch.randn(4, device=device)
    with skipped_when_refused():
        out, lse = dmattn.flash_dmattn_varlen_func(
            *(q, k, v, *bounds, 6, 8),
            attn_bias=bias,
            is_causal=True,
            window_size=3,
            return_lse=True,
            sinks=sinks.to(dtype),
            **target().options(),
        )
    assert not out[:2].any()  # six rows for four keys
    assert torch.equal(lse[:, :2], sinks.to(dtype).to(lse.dtype)[:, None].expand(4, 2))
    assert bool((lse[:, 2:] > lse[:, :1]).all())


def test_minus_infinity_is_no_sink() -> None:
    """Results are those without sinks, bit for bit, also in rows without keys."""
    case = Case(mask="bhqk", mask_fill="dead_rows", bias="bk1k", sinks="minus_inf")
    problem = build(case)
    with_sinks = run(problem, deterministic=True)
    without = run(problem.with_(sinks=None, wants="qkvb"), deterministic=True)
    for (name, a), (_, b) in zip(with_sinks.items(), without.items(), strict=False):
        assert torch.equal(a, b), name
    assert with_sinks.dsinks is not None and not with_sinks.dsinks.any()


def test_minus_infinity_gets_nothing_from_rows_in_front_of_the_first_key() -> None:
    case = Case(9, 5, bias="bk1k", causal=True, dlse=True, sinks="minus_inf", sinks_f32=True)
    problem = build(case)
    assert problem.sinks is not None
    found = run(problem, window_size=3)
    assert found.dsinks is not None
    assert not found.dsinks[problem.sinks == -math.inf].any()


@pytest.mark.parametrize("size", [-3.0, 2.0**20, -(2.0**40), 2.0**66, -(2.0**127)])
def test_weighs_as_much_as_equal_keys_of_any_size(size: float) -> None:
    """n keys whose logits are all equal to the sink have a weight of 1 / (n + 1) each."""
    if target().name == "plain" and abs(size) > 2**20:
        pytest.skip("this backend has the log-sum-exp as one float64 number")
    dtype = target().dtypes[-1]
    case = Case(9, 70, bias="111k", bias_f32=True, sinks="normal", sinks_f32=True, dtype=dtype)
    problem = build(case)
    assert problem.sinks is not None and problem.bias is not None
    problem = problem.with_(
        q=torch.zeros_like(problem.q),
        v=torch.ones_like(problem.v),
        bias=torch.full_like(problem.bias, size),
        sinks=torch.full_like(problem.sinks, size),
    )
    found = run(problem)
    want = torch.full_like(found.out, 70 / 71)
    # What lse lacks of the sum is in float32.
    tolerance = 4 * max(torch.finfo(found.out.dtype).eps, torch.finfo(torch.float32).eps)
    torch.testing.assert_close(found.out, want, rtol=tolerance, atol=0)
    assert found.dsinks is not None and bool(torch.isfinite(found.dsinks).all())


def test_is_one_more_key_without_a_value() -> None:
    """The same results as from a call without sinks, with one more key of zeros whose bias is the
    sink."""
    problem = build(Case(40, 50, nheads_k=4, dtype=target().dtypes[-1], sinks="normal"))
    assert problem.sinks is not None
    out, lse = call(problem)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (problem.k, problem.v))
    bias = torch.nn.functional.pad(problem.sinks[None, :, None, None], (50, 0))
    same_out, same_lse = call(problem.with_(k=k, v=v, bias=bias, sinks=None))
    tolerance = 4 * torch.finfo(out.dtype).eps
    torch.testing.assert_close(out, same_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, same_lse, rtol=1e-5, atol=1e-5)
