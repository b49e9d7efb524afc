"""Which biases are copied before the compiled kernels read them, and how."""

import pytest
import torch
from torch import Tensor

from dmattn.backends.cuda import bias_rows
from dmattn.backends.cuda.bias_rows import (
    copies,
    empty_gradient,
    pads_gradient,
    starts_rows_on_16_bytes,
    with_aligned_rows,
)
from dmattn.key_lists import Selection
from dmattn.problem import Packing, Problem


def problem(
    bias: Tensor | None, keys: int = 300, batch: int = 4, rows: int = 300, head_dim: int = 64
) -> Problem:
    q = torch.empty(batch, rows, 2, head_dim, dtype=torch.bfloat16)
    k = torch.empty(batch, keys, 2, head_dim, dtype=torch.bfloat16)
    return Problem(q, k, k, bias=bias)


def scores(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def keys_apart(*shape: int) -> Tensor:
    return scores(*shape[:2], shape[3], shape[2]).transpose(2, 3)


PADDED = scores(1, 2, 300, 304)[..., :300]

# Calls, and whether their bias is copied in the forward, and in the backward.
CASES: dict[str, tuple[Problem, bool, bool]] = {
    "none": (problem(None), False, False),
    "of keys": (problem(scores(1, 2, 1, 301), 301), False, False),
    "of every second key": (problem(scores(1, 2, 1, 600)[..., ::2]), False, False),
    "of rows": (problem(scores(1, 2, 300, 1)), False, False),
    "of rows, expanded": (problem(scores(1, 2, 300, 1).expand(1, 2, 300, 300)), False, False),
    "padded rows": (problem(PADDED), False, False),
    "padded rows, expanded": (problem(PADDED.expand(4, 2, 300, 300)), False, False),
    "even": (problem(scores(1, 2, 300, 304), 304), False, False),
    "fp32, even": (problem(scores(1, 1, 300, 300, dtype=torch.float32)), False, False),
    "odd, shared by 8": (problem(scores(1, 1, 300, 300)), True, True),
    "odd, shared by 4": (problem(scores(1, 2, 300, 300)), False, True),
    "odd, of a batch": (problem(scores(4, 1, 300, 300)), False, False),
    "of keys, expanded": (problem(scores(4, 1, 1, 301).expand(4, 1, 300, 301), 301), False, False),
    "no batch": (problem(scores(0, 2, 300, 301), 301, batch=0), False, False),
    "odd, expanded": (problem(scores(1, 1, 300, 300).expand(4, 2, 300, 300)), True, True),
    "odd, of each": (problem(scores(4, 2, 300, 300)), False, False),
    "fp32, odd, shared": (problem(scores(1, 1, 300, 301, dtype=torch.float32), 301), True, True),
    "keys apart": (problem(keys_apart(4, 2, 300, 300)), True, True),
    "keys apart, few": (problem(keys_apart(4, 2, 60, 64), 64, rows=60), False, False),
    "keys apart, few for many rows": (problem(keys_apart(4, 2, 300, 64), 64), False, True),
    "odd, few keys": (problem(scores(1, 1, 49, 49), 49, rows=49), False, False),
    "keys apart, one row": (problem(scores(4, 2, 1, 600)[..., ::2], rows=1), False, False),
}


@pytest.mark.parametrize("name", CASES)
def test_which_are_copied(name: str) -> None:
    given, forward, backward = CASES[name]
    assert copies(given, backward=False) == forward
    assert copies(given, backward=True) == backward


def ordered(*shape: int, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> Problem:
    rows, keys = shape[2:]
    given = problem(scores(*shape, dtype=dtype), keys, rows=rows, head_dim=head_dim)
    return given._replace(deterministic=True)


# Calls with sums in a fixed order (deterministic), whether the bias is copied in the backward, and
# whether rows of its gradient are padded to whole 16 bytes.
ORDERED: dict[str, tuple[Problem, bool, bool]] = {
    "odd, of each": (ordered(4, 2, 300, 301), True, True),
    "odd, shared by 2": (ordered(4, 1, 300, 301), True, True),
    "odd, shared by 4": (ordered(1, 2, 300, 301), True, False),  # sums in float32
    "odd, fp32, shared by 2": (ordered(4, 1, 300, 301, dtype=torch.float32), True, True),
    "odd, wide heads": (ordered(4, 2, 300, 301, head_dim=192), False, False),
    "even": (ordered(4, 2, 300, 304), False, False),
    "odd, expanded": (
        ordered(1, 2, 300, 301)._replace(bias=scores(1, 2, 300, 301).expand(4, 2, 300, 301)),
        *(True, True),
    ),
    "even, in odd rows": (
        ordered(4, 2, 300, 304)._replace(bias=scores(4, 2, 300, 305)[..., :304]),
        *(True, False),
    ),
    "odd, in even rows": (ordered(4, 2, 300, 300)._replace(bias=PADDED), False, False),
    "odd, causal": (ordered(4, 2, 300, 301)._replace(is_causal=True), True, True),
    "odd, causal, large": (ordered(4, 2, 1100, 1101)._replace(is_causal=True), False, False),
    "of keys": (ordered(4, 2, 1, 301), False, False),
    "of keys, expanded": (
        ordered(4, 2, 300, 301)._replace(bias=scores(4, 2, 1, 301).expand(4, 2, 300, 301)),
        *(False, False),
    ),
    "of rows, expanded": (
        ordered(4, 2, 300, 301)._replace(bias=scores(4, 2, 300, 1).expand(4, 2, 300, 301)),
        *(False, False),
    ),
    # Not copied: the sm80 code takes softcap, and fp32 beside a mask with rows. Kernels for few
    # keys read any rows.
    "softcap": (ordered(4, 2, 300, 301)._replace(softcap=5.0), False, False),
    "fp32 beside a mask": (
        ordered(4, 2, 300, 301, dtype=torch.float32)._replace(mask=scores(1, 1, 300, 301) > 0),
        *(False, False),
    ),
    "beside a mask": (
        ordered(4, 2, 300, 301)._replace(mask=scores(1, 1, 300, 301) > 0),
        *(True, True),
    ),
    "few keys": (ordered(4, 2, 49, 49), False, False),
    "few keys, shared by 2": (ordered(4, 1, 49, 49), True, True),
}


@pytest.mark.parametrize("name", ORDERED)
def test_sums_in_a_fixed_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's kernels for such sums need rows that start on 16 bytes, of bias and gradient."""
    given, backward, room = ORDERED[name]
    elsewhere = copies(given, backward=True)
    assert not pads_gradient(given)
    monkeypatch.setattr(bias_rows, "_is_on_hopper", lambda problem: True)
    assert elsewhere == copies(given._replace(deterministic=False), backward=True)
    assert copies(given, backward=True) == backward
    assert pads_gradient(given) == room
    assert not copies(given, backward=False)
    assert not pads_gradient(given._replace(deterministic=False))


def test_lists_read_single_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bias_rows, "_is_on_hopper", lambda problem: True)
    given, _, _ = ORDERED["odd, of each"]
    lists = Selection(*(torch.zeros(1, dtype=torch.int32) for _ in Selection._fields))
    listed = given.with_lists(lists)
    assert not copies(listed, backward=True) and not pads_gradient(listed)
    window = given.with_lists(lists, sliding=64)
    assert copies(window, backward=True) and pads_gradient(window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_have_room_for_whole_rows(dtype: torch.dtype) -> None:
    bias = scores(2, 1, 5, 301, dtype=dtype)
    grad = empty_gradient(bias)
    assert grad.shape == bias.shape and grad.dtype == dtype
    assert starts_rows_on_16_bytes(grad) and not grad.is_contiguous()
    assert empty_gradient(bias.expand(2, 3, 5, 301)).shape == (2, 3, 5, 301)


def test_packed_ones_are_not() -> None:
    bounds = torch.tensor([0, 300, 600], dtype=torch.int32)
    q = torch.empty(600, 2, 64, dtype=torch.bfloat16)
    packed = Problem(q, q, q, bias=scores(1, 600, 301), packing=Packing(bounds, bounds, 300, 300))
    assert not copies(packed, backward=True)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2]])
def test_copies_have_rows_that_start_on_16_bytes(name: str) -> None:
    given, _, _ = CASES[name]
    bias = given.bias
    assert bias is not None
    copy = with_aligned_rows(bias)
    assert torch.equal(copy, bias) and copy.stride(-1) == 1 and starts_rows_on_16_bytes(copy)
    assert copy.data_ptr() % 16 == 0
    assert not copies(given._replace(bias=copy), backward=True)
    # Expanded dimensions stay expanded.
    assert [s == 0 for s in copy.stride()] == [s == 0 for s in bias.stride()]
