"""Masks and biases beside a selection or a window: also those that differ between rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import dmattn
from attention.cases import Case, build
from attention.driver import assert_close, run
from attention.oracle import Problem

KEYS = 260
CASE = Case(200, KEYS, nheads=4, nheads_k=2, head_dim=32, causal=True, dlse=True)
ROWS = (200, KEYS, 300, 1)
DENSE = "a mask of size seqlen_q * seqlen_k"


def repeated(t: Tensor, nheads: int) -> Tensor:
    return t.repeat_interleave(nheads // t.shape[1], 1)


def selections(problem: Problem) -> dict[str, dmattn.KeySelection]:
    rows, keys, device = problem.q.shape[1], problem.k.shape[1], problem.q.device
    scores = torch.randn(2, 2, keys, device=device)
    ids = torch.randint(0, 30, (2, keys), device=device).sort(dim=1).values
    return {
        "top": dmattn.select_keys(scores, 40, query_len=rows),
        "per query head": dmattn.select_keys(
            torch.randn(1, 4, keys, device=device), 9, query_len=rows
        ),
        "sliding": dmattn.sliding_window(keys, 50, rows, device=device),
        "documents": dmattn.packed_documents(document_ids=ids),
    }


KINDS = [(kind, rows) for kind in ("top", "per query head", "sliding") for rows in ROWS]


@pytest.mark.parametrize("mask", ["b11k", "1h1k", "bk1k"])
@pytest.mark.parametrize("kind,rows", [*KINDS, ("documents", KEYS)])
def test_hidden_keys_beside_a_selection(kind: str, rows: int, mask: str) -> None:
    case = CASE.with_(seqlen_q=rows, bias="bk1k", mask=mask, sinks="normal")
    problem = build(case)
    selection = selections(problem)[kind]
    assert problem.mask is not None
    keep = repeated(selection.to_mask(), 4) & repeated(problem.mask, 4)
    found = run(problem, selection=selection)
    assert_close(problem.with_(mask=keep), found)


def test_padding_beside_a_selection() -> None:
    """Integers of shape (B, Sk), as a tokenizer gives them."""
    problem = build(CASE.with_(mask="b11k", mask_fill="prefix", wants=""))
    selection = selections(problem)["sliding"]
    assert problem.mask is not None
    found = run(problem.with_(mask=problem.mask[:, 0, 0].long()), selection=selection)
    assert_close(problem.with_(mask=problem.mask & selection.to_mask()), found)


@pytest.mark.parametrize("mask", ["b11k", "bhqk"])
def test_without_causality(mask: str) -> None:
    problem = build(CASE.with_(causal=False, mask=mask, bias="1hqk", bias_f32=True))
    scores = torch.randn(2, 2, 260, device=problem.q.device)
    # Made for another number of rows, which makes no difference.
    selection = dmattn.select_keys(scores, 40, is_causal=False, query_len=7)
    assert problem.mask is not None
    keep = repeated((selection.end > 0)[:, :, None], 4) & repeated(problem.mask, 4)
    assert_close(problem.with_(mask=keep), run(problem, selection=selection))


@pytest.mark.parametrize(
    "mask,bias", [("b1qk", "bk1k"), ("1hqk", ""), ("", "1hqk"), ("b11k", "bhqk")]
)
@pytest.mark.parametrize("rows", ROWS[:3])
def test_rows_of_their_own_beside_a_selection(rows: int, mask: str, bias: str) -> None:
    """A mask, or a bias that requires a gradient, has rows of its own."""
    problem = build(CASE.with_(seqlen_q=rows, mask=mask, bias=bias))
    selection = selections(problem)["top"]
    keep = repeated(selection.to_mask(), 4)
    if problem.mask is not None:
        keep = keep & repeated(problem.mask, 4)
    assert_close(problem.with_(mask=keep), run(problem, selection=selection))


@pytest.mark.parametrize("window", [30, 300])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "mask,bias", [("b1qk", "bk1k"), ("", "1hqk"), ("bhqk", "1kqk"), ("b11k", "bhqk")]
)
def test_rows_of_their_own_in_a_window(mask: str, bias: str, causal: bool, window: int) -> None:
    case = CASE.with_(mask=mask, bias=bias, causal=causal, bias_fill="some_minus_inf")
    problem = build(case)
    assert problem.bias is not None
    keep = dmattn.top_window_mask(problem.bias, window, 200, causal, problem.mask)
    assert_close(problem.with_(mask=keep), run(problem, window_size=window))


@pytest.mark.parametrize("window", [3, 300])
def test_nan_is_never_kept(window: int) -> None:
    """Rows have scores of their own; all keys are within the window, or not."""
    problem = build(CASE.with_(bias="bhqk", wants="qkv"))
    assert problem.bias is not None
    nan = torch.rand(problem.bias.shape, device=problem.bias.device) < 0.2
    found = run(problem.with_(bias=problem.bias.masked_fill(nan, math.nan)), window_size=window)
    scores = problem.bias.masked_fill(nan, -math.inf)
    keep = dmattn.top_window_mask(scores, window, 200)
    assert_close(problem.with_(bias=scores, mask=keep), found)


def test_explain_names_the_dense_mask() -> None:
    problem = build(CASE.with_(mask="b1qk", bias="bhqk"))
    selection, key_mask = selections(problem)["top"], build(CASE.with_(mask="b11k")).mask
    q, k, v, mask, bias = problem.q, problem.k, problem.v, problem.mask, problem.bias
    assert bias is not None

    def says(**more: object) -> bool:
        return DENSE in dmattn.explain(q, k, v, is_causal=True, **more)

    assert says(selection=selection, attn_mask=mask)
    assert says(selection=selection, attn_bias=bias.clone().requires_grad_())
    assert says(window_size=9, attn_bias=bias)
    assert says(window_size=9, attn_bias=bias[:, :, :1], attn_mask=mask)
    assert not says(selection=selection, attn_mask=key_mask, attn_bias=bias)
    assert not says(window_size=9, attn_bias=bias[:, :, :1], attn_mask=key_mask)
    assert not says(window_size=300, attn_bias=bias, attn_mask=mask)


@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_with_no_rows_in_a_window(causal: bool) -> None:
    problem = build(CASE.with_(seqlen_q=0, bias="bhqk", causal=causal))
    found = run(problem, window_size=24)
    assert found.out.shape[1] == 0
    assert found.dbias is not None and found.dbias.shape[2] == 0
    assert found.dk is not None and not found.dk.any()
