"""top_window_mask: the boolean mask that is equivalent to window_size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

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
