"""create_mask, maybe_create_mask and dynamic_mask."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_gradients import Watch
from torch import Tensor

from dmattn import create_mask, dynamic_mask, maybe_create_mask

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
    """(B, Sk) speaks of all keys; (B, Sq) of the last ones, and the earlier ones are allowed."""
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
    """The fill cannot be mistaken for a bias, nor overflow: the lowest finite bias is above it."""
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


def test_errors_of_options() -> None:
    bias = torch.zeros(B, H, 1, SK)
    with pytest.raises(ValueError, match=r"type: got 'best' \(str\), wanted 'topk' or 'relu'"):
        create_mask(bias, None, B, SQ, SK, 3, type="best")
    with pytest.raises(ValueError, match="block_size: got 0, wanted an int of at least 1"):
        create_mask(bias, None, B, SQ, SK, 3, block_size=0)
    queries = torch.ones(B, SK + 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="fewer keys than queries"):
        create_mask(bias, queries, B, SK + 1, SK, 3)
