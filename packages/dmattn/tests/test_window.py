"""window_size: each row keeps the best-scored of the keys that it may see."""

import pytest
import torch
from attention_cases import assert_close_to_oracle, random_case
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dmattn import flash_dmattn_func
from dmattn.utils.mask import top_window_mask


def brute_force(
    scores: Tensor, window: int, query_len: int, is_causal: bool, mask: Tensor | None
) -> Tensor:
    """scores (B, H, 1, Sk) -> bool (B, H, Sq, Sk), by sorting the visible keys of each row."""
    batch, heads, _, key_len = scores.shape
    keep = torch.zeros(batch, heads, query_len, key_len, dtype=torch.bool)
    allowed = torch.ones_like(keep) if mask is None else mask.expand(keep.shape)
    for b, h, i in torch.cartesian_prod(
        torch.arange(batch), torch.arange(heads), torch.arange(query_len)
    ).tolist():
        last = i + key_len - query_len if is_causal else key_len - 1
        seen = [j for j in range(last + 1) if allowed[b, h, i, j]]
        best = sorted(seen, key=lambda j: (float(scores[b, h, 0, j]), j))[-window:]
        keep[b, h, i, best] = True
    return keep


@given(
    seed=st.integers(0, 1000),
    query_len=st.sampled_from((1, 2, 7, 12)),
    key_len=st.sampled_from((1, 5, 12)),
    window=st.integers(1, 13),
    is_causal=st.booleans(),
    mask_shape=st.sampled_from((None, (2, 1, 1), (1, 3, 1), (2, 3, None), (1, 1, None))),
    ties=st.booleans(),
)
def test_selection_equals_brute_force(
    seed: int,
    query_len: int,
    key_len: int,
    window: int,
    is_causal: bool,
    mask_shape: tuple[int, int, int | None] | None,
    ties: bool,
) -> None:
    torch.manual_seed(seed)
    scores = torch.randn(2, 3, 1, key_len)
    if ties:
        scores = torch.round(scores)
    mask = None
    if mask_shape is not None:
        rows = query_len if mask_shape[2] is None else mask_shape[2]
        mask = torch.rand(*mask_shape[:2], rows, key_len) < 0.7
    keep = top_window_mask(scores, window, query_len, is_causal, mask)
    expected = brute_force(scores, window, query_len, is_causal, mask)
    assert torch.equal(keep.expand(expected.shape), expected)


def test_each_row_keeps_its_share_and_none_returns() -> None:
    scores = torch.randn(1, 2, 1, 200)
    keep = top_window_mask(scores, 30, 200, True)
    assert torch.equal(keep.sum(-1)[0, 0], torch.arange(1, 201).clamp(max=30))
    changes = keep.int().diff(dim=2)  # along rows, a key enters once and leaves at most once
    assert (changes == 1).sum(2).le(1).all() and (changes == -1).sum(2).le(1).all()


def test_constant_score_is_a_sliding_window() -> None:
    keep = top_window_mask(torch.zeros(1, 1, 1, 9), 4, 9, True)
    every = torch.ones(9, 9, dtype=torch.bool)
    assert torch.equal(keep[0, 0], every.tril() & every.triu(-3))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", [None, 1, 6])
def test_nan_and_minus_infinity_are_never_chosen(rows: int | None, is_causal: bool) -> None:
    scores = torch.tensor([1.0, torch.nan, -torch.inf, 3.0, -torch.inf, 2.0]).reshape(1, 1, 1, 6)
    mask = None if rows is None else torch.ones(1, 1, rows, 6, dtype=torch.bool)
    keep = top_window_mask(scores, 4, 6, is_causal, mask)
    assert keep[0, 0, -1].tolist() == [True, False, False, True, False, True]


def test_without_causality_one_row_serves_all() -> None:
    keep = top_window_mask(torch.randn(2, 3, 1, 12), 5, 7, False)
    assert keep.shape == (2, 3, 1, 12) and keep.sum(-1).eq(5).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bias_heads", [1, 2, 4])
@pytest.mark.parametrize("bias_batch", [1, 2])
@pytest.mark.parametrize("mask_shape", [None, (2, 1, 1, 12), (2, 4, 1, 12), (1, 2, 1, 12)])
def test_attention_equals_the_oracle_under_the_selected_mask(
    bias_batch: int, bias_heads: int, mask_shape: tuple[int, ...] | None, is_causal: bool
) -> None:
    shape = (bias_batch, bias_heads, 1, 12)
    case = random_case(seqlen_q=12, seqlen_k=12, bias_shape=shape, mask_shape=mask_shape)
    leaves = case.requiring_grad()
    out = flash_dmattn_func(*leaves.inputs, is_causal=is_causal, window_size=4)
    assert case.attn_bias is not None and leaves.attn_bias is not None

    def per_head(t: Tensor) -> Tensor:
        return t if t.shape[1] in (1, 4) else t.repeat_interleave(4 // t.shape[1], 1)

    scores = per_head(case.attn_bias).expand(2, 4, 1, 12)
    mask = None if case.attn_mask is None else per_head(case.attn_mask)
    case.attn_mask = brute_force(scores, 4, 12, is_causal, mask)
    case.dlse.zero_()
    oracle = case.reference()
    assert_close_to_oracle("out", out.detach(), oracle.out, oracle.out, torch.float64)
    wanted = [leaves.query, leaves.key, leaves.value, leaves.attn_bias]
    grads = torch.autograd.grad(out, wanted, case.dout)
    for name, grad in zip(("dq", "dk", "dv", "dbias"), grads, strict=True):
        expected = getattr(oracle, name)
        assert_close_to_oracle(name, grad, expected, expected, torch.float64)


def test_three_dimensional_bias() -> None:
    case = random_case(bias_shape=(2, 4, 11), is_causal=True)
    q, k, v, _, bias = case.requiring_grad().inputs
    assert bias is not None
    out = flash_dmattn_func(q, k, v, None, bias, is_causal=True, window_size=3)
    wide = flash_dmattn_func(q, k, v, None, bias[:, :, None], is_causal=True, window_size=3)
    assert torch.equal(out, wide)
    (dbias,) = torch.autograd.grad(out, bias, case.dout)
    assert dbias.shape == bias.shape and dbias.any()


@pytest.mark.parametrize("window_size", [11, 12, 10**9])
@pytest.mark.parametrize("mask_shape", [None, (2, 1, 1, 11)])
def test_wide_window_chooses_nothing(window_size: int, mask_shape: tuple[int, ...] | None) -> None:
    case = random_case(bias_shape=(1, 2, 1, 11), mask_shape=mask_shape)
    for causal in (False, True):
        windowed = flash_dmattn_func(*case.inputs, is_causal=causal, window_size=window_size)
        assert torch.equal(windowed, flash_dmattn_func(*case.inputs, is_causal=causal))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_unusable_scores_at_every_window(masked: bool, causal: bool, dtype: torch.dtype) -> None:
    """NaN and -inf: never attended to, and no gradient, however wide the window is."""
    shape = (2, 1, 1, 11) if masked else None
    case = random_case(bias_shape=(2, 2, 1, 11), mask_shape=shape, dtype=dtype)
    bias = case.attn_bias
    assert bias is not None
    bias[:, :, :, [1, 6]] = torch.nan
    bias[:, :, :, 4] = -torch.inf
    bias[0, 1] = torch.nan  # nothing left
    usable = bias > -torch.inf
    leaves = case.requiring_grad()
    q, k, v, mask, scores = leaves.inputs
    keep = usable if mask is None else usable & mask
    finite = torch.where(usable, bias, 0.0).requires_grad_()
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 2e-2}
    for window in (9, 10, 11, 12):  # eight keys are usable
        results = [
            flash_dmattn_func(*inputs, is_causal=causal, return_lse=True, window_size=w)
            for inputs, w in (((q, k, v, mask, scores), window), ((q, k, v, keep, finite), None))
        ]
        grads = [
            torch.autograd.grad(x[0], (q, k, v, b), case.dout)
            for x, b in zip(results, (scores, finite), strict=True)
        ]
        for got, want in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
            torch.testing.assert_close(got, want, **tolerance)


def test_decoding_agrees_with_training() -> None:
    """The last row alone, over the same keys, equals the last row of the whole."""
    case = random_case(seqlen_q=11, bias_shape=(2, 2, 1, 11))
    q, k, v, _, bias = case.inputs
    whole = flash_dmattn_func(q, k, v, None, bias, is_causal=True, window_size=4)
    last = flash_dmattn_func(q[:, -1:], k, v, None, bias, is_causal=True, window_size=4)
    torch.testing.assert_close(last, whole[:, -1:], rtol=0, atol=1e-14)


def test_lengths_of_zero() -> None:
    for seqlen_q, seqlen_k in ((0, 5), (5, 0), (0, 0)):
        case = random_case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, bias_shape=(1, 4, 1, seqlen_k))
        out = flash_dmattn_func(*case.inputs, is_causal=True, window_size=2)
        assert out.shape == (2, seqlen_q, 4, 8) and not out.any()
