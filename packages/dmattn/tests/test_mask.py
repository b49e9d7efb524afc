"""create_mask, maybe_create_mask and dynamic_mask."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gradients import Watch
from torch import Tensor

from dmattn import (
    create_mask,
    dynamic_mask,
    flash_dmattn_func,
    maybe_create_mask,
    top_window_mask,
)

B, H, SQ, SK = 2, 3, 5, 8


def bias_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Distinct numbers in random order, so that there are no ties."""
    size = torch.Size(shape).numel()
    return (torch.randperm(size) - size // 2).to(dtype).reshape(shape)


def brute_force(bias: Tensor, allowed: Tensor, window_size: int) -> Tensor:
    """Row by row: the highest biases among the allowed ones."""
    keep = torch.zeros(bias.shape, dtype=torch.bool)
    allowed = allowed.expand(bias.shape)
    for row in torch.cartesian_prod(*[torch.arange(n) for n in bias.shape[:-1]]).tolist():
        values, may = bias[tuple(row)].tolist(), allowed[tuple(row)].tolist()
        best = sorted((j for j in range(len(values)) if may[j]), key=lambda j: values[j])
        keep[tuple(row)][best[-window_size:]] = True
    return keep


@given(
    seed=st.integers(0, 1000),
    bias_shape=st.sampled_from([(B, H, 1, SK), (1, H, SQ, SK), (B, 1, SQ, SK), (B, H, SK)]),
    masked=st.sampled_from(["none", "same", "keys", "one"]),
    window_size=st.integers(1, SK + 2),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_topk_equals_brute_force(
    seed: int, bias_shape: tuple[int, ...], masked: str, window_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    bias = bias_of(*bias_shape, dtype=dtype)
    shape = {"same": bias_shape, "keys": (1,) * (len(bias_shape) - 1) + (SK,)}.get(masked)
    mask = None if masked == "none" else torch.rand(shape or (1,) * len(bias_shape)) < 0.6
    before = bias.clone()
    keep = create_mask(bias, mask, B, SQ, SK, window_size)
    allowed = torch.ones(1, dtype=torch.bool) if mask is None else mask
    assert keep.dtype == torch.bool
    assert torch.equal(keep, brute_force(bias, allowed, window_size))
    assert torch.equal(bias, before)
    assert torch.equal(dynamic_mask(bias, mask, window_size), keep)


def test_maybe_returns_the_very_mask() -> None:
    bias, mask = bias_of(B, H, 1, SK), torch.ones(B, SK, dtype=torch.bool)
    for window_size in (None, SK, SK + 1):
        with Watch() as watch:
            assert maybe_create_mask(bias, mask, B, SQ, SK, window_size) is mask
            assert maybe_create_mask(bias, None, B, SQ, SK, window_size) is None
        assert not watch.calls
    made = maybe_create_mask(bias, mask, B, SQ, SK, SK - 1)
    assert made is not None and made.shape == bias.shape


def test_keys_mask_is_normalised() -> None:
    """A mask (B, Sk) is for all keys, and (B, Sq) for the last ones: earlier ones are allowed."""
    bias = bias_of(B, H, 1, SK)
    keys = torch.rand(B, SK) < 0.5
    expected = brute_force(bias, keys[:, None, None, :], 3)
    assert torch.equal(create_mask(bias, keys, B, SQ, SK, 3), expected)
    queries = torch.rand(B, SQ) < 0.5
    padded = torch.cat([torch.ones(B, SK - SQ, dtype=torch.bool), queries], 1)
    expected = brute_force(bias, padded[:, None, None, :], 3)
    assert torch.equal(create_mask(bias, queries, B, SQ, SK, 3), expected)
    flat = maybe_create_mask(bias[:, :, 0], keys, B, SQ, SK, 3)
    assert flat is not None and flat.shape == (B, H, SK)
    assert torch.equal(flat, brute_force(bias, keys[:, None, None, :], 3)[:, :, 0])


@pytest.mark.parametrize("rows", [1, SQ])
def test_three_dimensional_bias_with_a_four_dimensional_mask(rows: int) -> None:
    bias, mask = bias_of(B, H, SK), torch.rand(B, 1, rows, SK) < 0.4
    keep = maybe_create_mask(bias, mask, B, SQ, SK, 3)
    assert keep is not None and keep.shape == bias.shape
    assert torch.equal(keep, brute_force(bias, mask.any(2), 3))


def test_mask_heads_are_shared_by_groups() -> None:
    bias, mask = bias_of(B, 6, 1, SK), torch.rand(B, 2, 1, SK) < 0.5
    keep = create_mask(bias, mask, B, SQ, SK, 2)
    assert torch.equal(keep, brute_force(bias, mask.repeat_interleave(3, 1), 2))


def test_fewer_allowed_keys_than_the_window() -> None:
    bias = bias_of(B, H, 1, SK)
    mask = torch.zeros(B, 1, 1, SK, dtype=torch.bool)
    mask[0, ..., 2] = True
    assert torch.equal(create_mask(bias, mask, B, SQ, SK, 5), mask.expand(bias.shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_finite_bias_of_an_allowed_key_beats_a_masked_key(dtype: torch.dtype) -> None:
    """Masked keys rank below the lowest finite bias, and what stands for them does not overflow."""
    bias = torch.full((1, 1, 1, SK), torch.finfo(dtype).min, dtype=dtype)
    mask = torch.arange(SK) % 2 == 1
    keep = create_mask(bias, mask[None, None, None], 1, SQ, SK, 4)
    assert torch.equal(keep[0, 0, 0], mask)


def test_bias_at_min_dtype_counts_as_masked() -> None:
    bias = torch.tensor([[[[-1e4, 3.0, -2e4, -5.0, -1e4, 1.0]]]], dtype=torch.float16)
    keep = create_mask(bias, None, 1, 1, 6, 5, min_dtype=-1e4)
    assert keep[0, 0, 0].tolist() == [False, True, False, True, False, True]
    lowest = torch.finfo(torch.float32).min  # beyond float16, and harmless
    assert int(create_mask(bias, None, 1, 1, 6, 5, min_dtype=lowest).sum()) == 5
    bias[..., 0] = -torch.inf
    assert not create_mask(bias, None, 1, 1, 6, 6)[0, 0, 0, 0]


def test_nan_takes_no_place() -> None:
    bias = torch.tensor([[[[torch.nan, 3.0, 2.0, torch.nan, 1.0]]]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for mask in (None, torch.tensor([[True, True, True, True, True]])):
            keep = create_mask(bias.to(dtype), mask, 1, 1, 5, 2)
            assert keep.flatten().tolist() == [False, True, True, False, False]
            assert int(create_mask(bias.to(dtype), mask, 1, 1, 5, 4).sum()) == 3
    assert torch.equal(create_mask(bias, None, 1, 1, 5, 1, type="relu"), bias > 0)


@pytest.mark.filterwarnings("error")
def test_vmap() -> None:
    bias, mask = torch.randn(3, 2, 2, 1, 6), torch.rand(3, 2, 6) < 0.7

    def make(b: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        return (
            create_mask(b, m, 2, 6, 6, 2),
            create_mask(b, None, 2, 6, 6, 4, block_size=4),
            top_window_mask(b, 2, attention_mask=m),
        )

    together = torch.func.vmap(make)(bias, mask)
    for i in range(3):
        for got, want in zip(together, make(bias[i], mask[i]), strict=True):
            assert torch.equal(got[i], want)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_padding_masks_of_integers(dtype: torch.dtype) -> None:
    bias, mask = bias_of(B, H, 1, SK), torch.rand(B, SK) < 0.5
    for function in (create_mask, maybe_create_mask):
        keep = function(bias, mask.to(dtype), B, SQ, SK, 3)
        assert keep is not None and torch.equal(keep, create_mask(bias, mask, B, SQ, SK, 3))


def test_numbers_of_numpy() -> None:
    bias = bias_of(B, H, 1, SK)
    sizes: Any = [np.int64(n) for n in (B, SQ, SK, 3)]
    keep = create_mask(bias, None, *sizes, np.float32(-1e9), np.int32(2))  # type: ignore[arg-type]
    assert torch.equal(keep, create_mask(bias, None, B, SQ, SK, 3, -1e9, 2))


def test_top_window_mask_is_what_window_size_means() -> None:
    """With a mask that has rows, rows choose among the keys that they see, as under causality."""
    q, k, v = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    bias = torch.randn(1, 2, 1, 6)
    lower = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    keep = top_window_mask(bias, 2, attention_mask=lower)
    got = flash_dmattn_func(q, k, v, keep, bias, is_causal=True)
    want = flash_dmattn_func(q, k, v, attn_bias=bias, window_size=2, is_causal=True)
    torch.testing.assert_close(got, want)


@given(
    seed=st.integers(0, 1000),
    causal=st.booleans(),
    heads=st.sampled_from(((1, 1), (2, 4), (4, 2), (2, 1), (1, 4))),
    rows=st.sampled_from((1, 5, 8)),
    padded=st.booleans(),
    by_pair=st.booleans(),
    window=st.integers(1, 9),
)
@settings(max_examples=60)
def test_top_window_mask_row_by_row(
    seed: int,
    causal: bool,
    heads: tuple[int, int],
    rows: int,
    padded: bool,
    by_pair: bool,
    window: int,
) -> None:
    """Also with a bias that differs between rows."""
    torch.manual_seed(seed)
    bias = torch.randn(B, heads[0], rows if by_pair else 1, SK).round()
    shape = (B, SK) if padded else (B, heads[1], rows, SK)
    mask = torch.rand(shape) < 0.6
    keep = top_window_mask(bias, window, rows, causal, mask)
    wide = mask[:, None, None] if padded else mask
    together = max(heads[0], wide.shape[1])
    wide = wide.repeat_interleave(together // wide.shape[1], 1).expand(B, together, rows, SK)
    given_ = bias.repeat_interleave(together // heads[0], 1).expand(B, together, rows, SK)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (B, together, rows))).tolist():
        last = i + SK - rows if causal else SK - 1
        seen = [j for j in range(SK) if j <= last and wide[b, h, i, j]]
        best = sorted(seen, key=lambda j: (float(given_[b, h, i, j]), j))[-window:]
        assert keep.expand(wide.shape)[b, h, i].nonzero().flatten().tolist() == sorted(best)


def test_no_keys() -> None:
    assert top_window_mask(torch.zeros(1, 2, 1, 0), 3).shape == (1, 2, 0, 0)
    assert top_window_mask(torch.zeros(1, 2, 1, 0), 3, 5, False).shape == (1, 2, 1, 0)
    assert top_window_mask(torch.zeros(1, 2, 0), 3, 4).shape == (1, 2, 4, 0)
    assert create_mask(torch.zeros(1, 2, 1, 0), None, 1, 4, 0, 3).shape == (1, 2, 1, 0)


def test_relu_keeps_what_is_above_zero() -> None:
    bias, mask = bias_of(B, H, SQ, SK), torch.rand(B, SK) < 0.5
    keep = create_mask(bias, mask, B, SQ, SK, 1, type="relu")
    assert torch.equal(keep, (bias > 0) & mask[:, None, None, :])


@pytest.mark.parametrize("kind", ["topk", "relu"])
@pytest.mark.parametrize("block_size", [None, 1, 2, 3, 4, 8, 20])
def test_blocks_are_decided_by_majority(kind: str, block_size: int | None) -> None:
    torch.manual_seed(0)
    bias, mask = bias_of(B, H, SQ, SK), torch.rand(B, 1, 1, SK) < 0.9
    chosen = create_mask(bias, mask, B, SQ, SK, 4, type=kind)
    expected = chosen.clone()
    if block_size is not None:
        for start in range(0, SK, block_size):
            block = chosen[..., start : start + block_size]
            majority = block.sum(-1, keepdim=True) * 2 > block.shape[-1]
            expected[..., start : start + block_size] = majority
    expected &= mask
    got = create_mask(bias, mask, B, SQ, SK, 4, block_size=block_size, type=kind)
    assert torch.equal(got, expected)


def test_no_gradient_and_no_further_allocation() -> None:
    bias = torch.randn(B, H, 64, 64, requires_grad=True)
    with Watch() as watch:
        keep = maybe_create_mask(bias, None, B, 64, 64, 4)
    assert keep is not None and not keep.requires_grad and keep.grad_fn is None
    names = [name for name, _ in watch.calls]
    assert names.count("aten::topk") == 1
    large = [name for name in names if name in ("aten::clone", "aten::masked_fill.Scalar")]
    assert not large and names.count("aten::zeros") == 1


ERRORS = [
    ({"bias": torch.zeros(B, H, 1, SK, dtype=torch.int64)}, TypeError, "attention_bias: got dtype"),
    ({"bias": torch.zeros(B, H, 1, SK + 1)}, ValueError, "attention_bias: got shape"),
    ({"bias": torch.zeros(SK)}, ValueError, "attention_bias: got shape"),
    ({"mask": torch.zeros(B, SK)}, TypeError, "attention_mask: got dtype torch.float32, wanted"),
    ({"mask": torch.zeros(B, SK - 1, dtype=torch.bool)}, ValueError, r"got shape \(2, 7\), wanted"),
    ({"mask": torch.zeros(B + 1, SK, dtype=torch.bool)}, ValueError, "attention_mask: got shape"),
    ({"mask": torch.zeros(B, SQ, SK, dtype=torch.bool)}, ValueError, "wanted 2 or 4 dimensions"),
    (
        {"mask": torch.zeros(B, SK, dtype=torch.bool), "bias": torch.zeros(1, H, 1, SK)},
        ValueError,
        "broadcasts to the shape",
    ),
    (
        {"mask": torch.zeros(B, SK, dtype=torch.bool), "bias": torch.zeros(1, H, 1, SK)},
        ValueError,
        r"attention_mask: got shape \(2, 8\), wanted one",  # as it was given
    ),
    ({"bias": None}, TypeError, "attention_bias: got None, wanted a torch.Tensor"),
    ({"bias": [0.0]}, TypeError, r"attention_bias: got \[0.0\] \(list\), wanted a torch.Tensor"),
    ({"bias": torch.zeros(B, SK).to_sparse()}, ValueError, "attention_bias: got .*sparse"),
    ({"mask": [True]}, TypeError, r"attention_mask: got \[True\] \(list\), wanted a torch.Tensor"),
    ({"mask": torch.zeros(B, 1, 1, SK).int()}, TypeError, r"attention_mask: .*mask.bool\(\)"),
    (
        {"mask": torch.ones(B, SK, dtype=torch.bool, device="meta")},
        ValueError,
        "attention_mask: got device meta, wanted cpu as attention_bias",
    ),
    ({"window_size": 2**63}, ValueError, "window_size: got 9223372036854775808"),
    ({"window_size": 0}, ValueError, "window_size: got 0"),
    ({"window_size": 1.5}, TypeError, "window_size: got 1.5"),
]


@pytest.mark.parametrize("changes, error, message", ERRORS)
def test_errors(changes: dict[str, object], error: type[Exception], message: str) -> None:
    bias: Any = changes.get("bias", torch.zeros(B, H, 1, SK))
    mask: Any = changes.get("mask")
    window_size: Any = changes.get("window_size", 3)
    for function in (create_mask, maybe_create_mask):
        with pytest.raises(error, match=message):
            function(bias, mask, B, SQ, SK, window_size)


def test_each_wanted_shape_is_named_once() -> None:
    with pytest.raises(ValueError, match=r"got shape \(2, 7\), wanted \(2, 8\)$"):
        create_mask(torch.zeros(2, H, 1, 8), torch.ones(2, 7).bool(), 2, 8, 8, 3)
    with pytest.raises(ValueError, match=r"got shape \(2, 7\), wanted \(2, 8\) or \(2, 3\)$"):
        create_mask(torch.zeros(2, H, 1, 8), torch.ones(2, 7).bool(), 2, 3, 8, 3)


def test_errors_of_options() -> None:
    bias = torch.zeros(B, H, 1, SK)
    with pytest.raises(ValueError, match=r"type: got 'best' \(str\), wanted 'topk' or 'relu'"):
        create_mask(bias, None, B, SQ, SK, 3, type="best")
    with pytest.raises(ValueError, match="block_size: got 0, wanted an int of at least 1"):
        create_mask(bias, None, B, SQ, SK, 3, block_size=0)
    with pytest.raises(TypeError, match=r"block_size: got 2.5 \(float\), wanted an int"):
        create_mask(bias, None, B, SQ, SK, 3, block_size=2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"min_dtype: got 'x' \(str\), wanted a finite number"):
        create_mask(bias, None, B, SQ, SK, 3, min_dtype="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"key_len: got 8.0 \(float\), wanted an int"):
        create_mask(bias, None, B, SQ, 8.0, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"attention_bias: got shape \(\), wanted"):
        dynamic_mask(torch.tensor(1.0), None, 3)
    queries = torch.ones(B, SK + 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="fewer keys than queries"):
        create_mask(bias, queries, B, SK + 1, SK, 3)


BAD_WINDOW_MASKS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"attention_bias": None}, TypeError, "attention_bias: got None, wanted a torch.Tensor"),
    ({"attention_bias": torch.zeros(2, 2, 3, 8)}, ValueError, "attention_bias: got shape"),
    ({"attention_bias": torch.zeros(8)}, ValueError, r"attention_bias: got shape \(8,\), wanted"),
    ({"attention_bias": torch.zeros(2, 2, 8).int()}, TypeError, "attention_bias: got dtype"),
    ({"window_size": 0}, ValueError, "window_size: got 0"),
    ({"query_len": -1}, ValueError, "query_len: got -1, wanted an int of at least 0"),
    ({"is_causal": 1}, TypeError, r"is_causal: got 1 \(int\), wanted True or False"),
    ({"attention_mask": torch.zeros(2, 8)}, TypeError, "attention_mask: got dtype torch.float32"),
    ({"attention_mask": torch.zeros(3, 8).bool()}, ValueError, r"attention_mask: got shape \(3, 8"),
    ({"attention_mask": torch.zeros(2, 1, 5, 8).bool()}, ValueError, "attention_mask: got shape"),
    ({"attention_mask": torch.zeros(2, 3, 1, 8).bool()}, ValueError, "attention_mask: got 3 heads"),
]


@pytest.mark.parametrize("changes, error, message", BAD_WINDOW_MASKS)
def test_errors_of_window_masks(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        top_window_mask(**({"attention_bias": torch.zeros(2, 2, 8), "window_size": 3} | changes))
