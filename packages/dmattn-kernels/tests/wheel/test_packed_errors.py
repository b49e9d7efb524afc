"""Wrong calls over packed sequences of unequal lengths."""

from __future__ import annotations

import ctypes

import pytest

import abi
from abi import BOOL, FLOAT32, INT32, packed_bwd_params, packed_fwd_params, tensor
from calls import call, size

KEY_MASK, ROW_MASK = tensor((2, 700), BOOL), tensor((2, 500, 400), BOOL)

WRONG: list[tuple[dict[str, object], int, str]] = [
    ({"q": tensor((1, 500, 4, 64))}, abi.INVALID_VALUE, "q has 4 dimensions; wanted 3"),
    ({"cu_seqlens_k": abi.Tensor()}, abi.INVALID_VALUE, "cu_seqlens_k is absent"),
    ({"cu_seqlens_q": abi.Tensor()}, abi.INVALID_VALUE, "cu_seqlens_q is absent"),
    ({"cu_seqlens_q": tensor((4,), FLOAT32)}, abi.INVALID_DTYPE, "cu_seqlens_q has dtype float32"),
    ({"cu_seqlens_k": tensor((5,), INT32)}, abi.INVALID_VALUE, "cu_seqlens_k has shape (5); wa"),
    (
        {"cu_seqlens_q": tensor((4,), INT32, stride=(2,))},
        abi.INVALID_VALUE,
        "cu_seqlens_q has strides (2)",
    ),
    ({"cu_seqlens_q": tensor((2, 2), INT32)}, abi.INVALID_VALUE, "cu_seqlens_q has 2 dimensions"),
    (
        {"cu_seqlens_k": tensor((4,), INT32, data=None)},
        abi.INVALID_VALUE,
        "cu_seqlens_k has a null data pointer",
    ),
    ({"max_seqlen_q": -1}, abi.INVALID_VALUE, "max_seqlen_q is -1; wanted 0 to"),
    ({"max_seqlen_q": 166}, abi.INVALID_VALUE, "max_seqlen_q is 166; wanted a bound on the"),
    ({"max_seqlen_k": 233}, abi.INVALID_VALUE, "of 3 sequences with total_k = 700"),
    ({"v": tensor((699, 2, 64))}, abi.INVALID_VALUE, "v has shape (699, 2, 64); wanted (700, 2,"),
    ({"out": tensor((700, 2, 64))}, abi.INVALID_VALUE, "out has shape (700, 2, 64); wanted (500"),
    (
        {"softmax_lse": tensor((500, 4), FLOAT32)},
        abi.INVALID_VALUE,
        "softmax_lse has shape (500, 4); wanted (4, 500), (nheads, total_q)",
    ),
    ({"mask": tensor((3, 700), BOOL)}, abi.INVALID_VALUE, "mask has shape (3, 700); wanted (4 or"),
    ({"mask": tensor((2, 500, 700), BOOL)}, abi.INVALID_VALUE, "mask has shape (2, 500, 700)"),
    ({"bias": tensor((1, 4, 500, 400))}, abi.INVALID_VALUE, "bias has 4 dimensions; wanted 3"),
    ({"bias": tensor((4, 400))}, abi.INVALID_VALUE, "bias has shape (4, 400); wanted"),
    (
        {"selection": abi.selection(500, 700, 256), "is_causal": 1},
        abi.INVALID_VALUE,
        "selection is given with cu_seqlens_q",
    ),
]


@pytest.mark.parametrize("fields, status, words", WRONG, ids=[w for _, _, w in WRONG])
def test_wrong_calls(
    library: ctypes.CDLL, fields: dict[str, object], status: int, words: str
) -> None:
    for make in (packed_fwd_params, packed_bwd_params):
        found, message = call(library, make(**fields))
        assert (found, words in message) == (status, True), message


def test_splits_are_refused(library: ctypes.CDLL) -> None:
    status, message = call(library, packed_fwd_params(num_splits=2))
    assert status == abi.INVALID_VALUE
    assert "num_splits is 2; wanted 0 or 1 with cu_seqlens_q" in message


def test_lengths_without_sequences(library: ctypes.CDLL) -> None:
    status, message = call(library, abi.fwd_params(max_seqlen_q=5))
    assert status == abi.INVALID_VALUE
    assert "max_seqlen_q and max_seqlen_k are 5 and 0; wanted 0" in message


def test_dbias_has_the_shape_of_bias(library: ctypes.CDLL) -> None:
    fields: dict[str, object] = {"bias": tensor((4, 700)), "dbias": tensor((2, 700))}
    status, message = call(library, packed_bwd_params(**fields))
    assert status == abi.INVALID_VALUE
    assert "dbias has shape (2, 700); wanted (4, 700)" in message


@pytest.mark.parametrize("operands", [{}, {"mask": KEY_MASK}, {"mask": ROW_MASK}])
@pytest.mark.parametrize("bias", [None, tensor((1, 700), FLOAT32), tensor((4, 500, 400))])
def test_valid_calls_get_as_far_as_the_device(
    library: ctypes.CDLL, operands: dict[str, object], bias: abi.Tensor | None
) -> None:
    fields = operands | {"device": 63} | ({} if bias is None else {"bias": bias})
    for make in (packed_fwd_params, packed_bwd_params):
        status, message = size(library, make(**fields))
        assert (status, "device is 63" in message) == (abi.NO_DEVICE, True), message
