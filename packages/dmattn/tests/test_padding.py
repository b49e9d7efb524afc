"""Padded batches to packed sequences and back."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dmattn import flash_dmattn_func, flash_dmattn_varlen_func
from dmattn.utils.padding import (
    get_unpad_data,
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
    upad_input,
)

DTYPES = (torch.bool, torch.int32, torch.int64)


def tokens_of(mask: Tensor) -> list[tuple[int, int]]:
    return [(b, s) for b, row in enumerate(mask.tolist()) for s, keep in enumerate(row) if keep]


@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(0, 4), st.integers(0, 7)),
    share=st.sampled_from((0.0, 0.5, 1.0)),
    dtype=st.sampled_from(DTYPES),
    unused=st.booleans(),
)
def test_unpad_and_pad(
    seed: int, shape: tuple[int, int], share: float, dtype: torch.dtype, unused: bool
) -> None:
    torch.manual_seed(seed)
    mask, more = torch.rand(shape) < share, torch.rand(shape) < 0.3
    hidden = torch.randn(*shape, 2, 3)
    given_masks = (mask.to(dtype), more.to(dtype)) if unused else (mask.to(dtype),)
    flat, indices, cu_seqlens, longest, used = unpad_input(hidden, *given_masks)
    every = mask | more if unused else mask
    where = tokens_of(every)
    assert flat.shape == (len(where), 2, 3)
    for got, (b, s) in zip(flat, where, strict=True):
        assert torch.equal(got, hidden[b, s])
    assert indices.tolist() == [b * shape[1] + s for b, s in where]
    counts = [sum(row) for row in every.tolist()]
    assert cu_seqlens.tolist() == [sum(counts[:b]) for b in range(shape[0] + 1)]
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert longest == max(counts, default=0) and isinstance(longest, int)
    assert used.tolist() == [sum(row) for row in mask.tolist()]
    assert torch.equal(pad_input(flat, indices, *shape), hidden * every[..., None, None])


def test_gradients_pass() -> None:
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    hidden = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: Tensor) -> Tensor:
        flat, indices, *_ = unpad_input(x, mask)
        return pad_input(flat * 2, indices, 2, 3)

    assert torch.autograd.gradcheck(there_and_back, hidden)
    (grad,) = torch.autograd.grad(there_and_back(hidden).sum(), hidden)
    assert torch.equal(grad, 2.0 * mask[..., None].expand(2, 3, 4).double())


def test_index_first_axis_takes_rows() -> None:
    x = torch.randn(5, 2, 3)
    for dtype in (torch.int32, torch.int64):
        picked = torch.tensor([4, 0, 0], dtype=dtype)
        assert torch.equal(index_first_axis(x, picked), torch.stack([x[4], x[0], x[0]]))


def test_unpad_data() -> None:
    indices, cu_seqlens, longest = get_unpad_data(torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0]]))
    assert indices.tolist() == [1, 2, 6]
    assert cu_seqlens.tolist() == [0, 2, 2, 3]
    assert longest == 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_attention_over_a_padded_batch(side: str) -> None:
    """Unpadding, packed attention and padding again give what attention with the mask gives."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 9, 4, 8), torch.randn(3, 9, 2, 8), torch.randn(3, 9, 2, 8)
    position = torch.arange(9)
    lengths = torch.tensor([[9], [4], [1]])
    mask = position < lengths if side == "right" else position >= 9 - lengths
    packed_q, packed_k, packed_v, indices, bounds, longest = upad_input(q, k, v, mask, 9)
    assert bounds[0] is bounds[1] and longest == (9, 9)
    out = flash_dmattn_varlen_func(packed_q, packed_k, packed_v, *bounds, *longest, is_causal=True)
    expected = flash_dmattn_func(q, k, v, mask[:, None, None], is_causal=True)
    torch.testing.assert_close(pad_input(out, indices, 3, 9), expected * mask[..., None, None])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_length", [1, 4])
def test_fewer_queries_than_keys(query_length: int, dtype: torch.dtype) -> None:
    """The queries are at the last positions; a single query counts even if the mask hides it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(4, query_length, 4, 8), torch.randn(4, 9, 2, 8), torch.randn(4, 9, 2, 8)
    mask = torch.arange(9) >= torch.tensor([[0], [6], [8], [0]])
    mask[3, 5:] = False  # hides the last positions, where the queries are
    packed_q, packed_k, packed_v, indices, bounds, longest = upad_input(
        q, k, v, mask.to(dtype), query_length
    )
    rows = mask[:, 9 - query_length :] | (query_length == 1)
    counts = rows.sum(-1)
    assert bounds[0].tolist() == [0, *counts.cumsum(0).tolist()]
    assert bounds[1].tolist() == [0, 9, 12, 13, 18]
    assert longest == (int(counts.max()), 9)
    assert torch.equal(packed_q, q[rows]) and torch.equal(packed_k, k[mask])
    out = flash_dmattn_varlen_func(packed_q, packed_k, packed_v, *bounds, *longest, is_causal=True)
    expected = flash_dmattn_func(q, k, v, mask[:, None, None], is_causal=True)
    padded = pad_input(out, indices, 4, query_length)
    torch.testing.assert_close(padded, expected * rows[..., None, None])


def test_another_unpad_function_is_used_for_queries() -> None:
    calls = []

    def unpad(hidden: Tensor, mask: Tensor) -> tuple[Any, ...]:
        calls.append(mask.shape)
        return unpad_input(hidden, mask)

    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8)
    upad_input(q, k, k, torch.ones(2, 5, dtype=torch.bool), 3, unpad)
    assert calls == [(2, 3)]


def test_index_put_first_axis() -> None:
    values = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    for dtype in (torch.int32, torch.int64):
        places = torch.tensor([4, 0, 2], dtype=dtype)
        put = index_put_first_axis(values, places, 6)
        assert put.shape == (6, 2) and not put[[1, 3, 5]].any()
        assert torch.equal(index_first_axis(put, places), values)
    assert torch.autograd.gradcheck(lambda x: index_put_first_axis(x, places, 6), values)


@given(
    rows=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from((torch.int32, torch.int64)),
)
def test_unpad_sequences_one_behind_the_other(rows: list[list[int]], dtype: torch.dtype) -> None:
    seqlen = 12
    lengths = torch.tensor([row + [0] * (seqlen - len(row)) for row in rows], dtype=dtype)
    hidden = torch.randn(len(rows), seqlen, 3)
    flat, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(hidden, lengths)
    assert torch.equal(flat, torch.cat([hidden[b, : sum(row)] for b, row in enumerate(rows)]))
    assert torch.equal(index_first_axis(hidden.flatten(0, 1), indices), flat)
    every = [n for row in rows for n in row]
    assert cu_seqlens.tolist() == [sum(every[:i]) for i in range(len(every) + 1)]
    assert cu_seqlens.dtype == torch.int32
    assert longest == max(every, default=0) and isinstance(longest, int)


BAD: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
    (unpad_input, (None, torch.ones(2, 5)), TypeError, "hidden_states: got None, wanted a torch"),
    (unpad_input, (torch.ones(2, 5), [1]), TypeError, r"attention_mask: got \[1\] \(list\)"),
    (
        unpad_input,
        (torch.ones(2, 5), torch.ones(2, 5, device="meta").bool()),
        ValueError,
        "attention_mask: got device meta, wanted cpu",
    ),
    (get_unpad_data, (None,), TypeError, "attention_mask: got None, wanted a torch.Tensor"),
    (pad_input, (torch.ones(3), None, 1, 3), TypeError, "indices: got None, wanted a torch.Tens"),
    (pad_input, (torch.ones(3), torch.arange(3), 1.5, 3), TypeError, "batch: got 1.5"),
    (index_first_axis, ([1], torch.arange(1)), TypeError, r"input: got \[1\] \(list\), wanted"),
    (index_put_first_axis, (torch.ones(3), torch.arange(2), 5), ValueError, r"indices: .* \(3,\)"),
    (index_put_first_axis, (torch.ones(3), torch.arange(3), -1), ValueError, "first_axis_dim: got"),
    (
        unpad_input_for_concatenated_sequences,
        (torch.ones(2, 5), torch.ones(2, 5).bool()),
        TypeError,
        "attention_mask_in_length: got dtype torch.bool, wanted an integer dtype",
    ),
    (
        unpad_input_for_concatenated_sequences,
        (torch.ones(2, 5), torch.ones(2, 4).int()),
        ValueError,
        r"attention_mask_in_length: got shape \(2, 4\), wanted \(2, 5\)",
    ),
    (
        upad_input,
        (torch.ones(2, 5, 1, 8), torch.ones(2, 5, 1, 8), None, torch.ones(2, 5).int(), 5),
        TypeError,
        "value_layer: got None, wanted a torch.Tensor",
    ),
]


@pytest.mark.parametrize("function, arguments, error, message", BAD)
def test_wrong_kinds_of_arguments(
    function: Any, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        function(*arguments)


def test_errors() -> None:
    x, mask = torch.randn(2, 5, 3), torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"attention_mask: got dtype torch\.float32, wanted bool"):
        unpad_input(x, mask.float())
    with pytest.raises(ValueError, match=r"attention_mask: got shape \(2, 4\), wanted \(2, 5\)"):
        unpad_input(x, mask[:, :4])
    with pytest.raises(ValueError, match=r"unused_mask: got shape \(5,\)"):
        unpad_input(x, mask, mask[0])
    with pytest.raises(ValueError, match=r"attention_mask: got shape \(5,\), wanted \(batch"):
        get_unpad_data(mask[0])
    with pytest.raises(TypeError, match=r"indices: got dtype torch\.float32"):
        index_first_axis(x, torch.zeros(1))
    with pytest.raises(ValueError, match=r"indices: got shape \(1, 1\)"):
        index_first_axis(x, torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"indices: got shape \(3,\), wanted \(2,\)"):
        pad_input(x, torch.arange(3), 2, 5)
    q = torch.randn(2, 6, 4, 8)
    k = torch.randn(2, 5, 4, 8)
    with pytest.raises(ValueError, match=r"query_layer: got shape \(2, 6, 4, 8\) with query_len"):
        upad_input(q, k, k, mask, 6)
    with pytest.raises(ValueError, match=r"value_layer: got shape \(2, 6, 4, 8\), wanted \(2, 5\)"):
        upad_input(k, k, q, mask, 5)


@pytest.mark.parametrize(
    "row, words", [([3, 4, 0, 0, 0, 0], "7 tokens in a row, wanted at most 6"), ([4, -1], "got -1")]
)
def test_lengths_that_no_row_has(row: list[int], words: str) -> None:
    lengths = torch.tensor([[0] * len(row), row])
    with pytest.raises(ValueError, match=f"attention_mask_in_length: .*{words}"):
        unpad_input_for_concatenated_sequences(torch.randn(2, len(row), 3), lengths)
