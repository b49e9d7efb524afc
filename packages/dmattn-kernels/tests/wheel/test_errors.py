"""Wrong arguments, through C and through Python: all are found before a GPU is looked for."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable

import pytest

import abi
import dmattn_kernels
from abi import BOOL, FLOAT16, FLOAT32, SOME_ADDRESS, bwd_params, fwd_params, tensor
from calls import LSE, K, Q, call, module_params, size, view

WRONG_FORWARD: list[tuple[dict[str, object], int, str]] = [
    ({"q": tensor((2, 128, 64))}, abi.INVALID_VALUE, "q has 3 dimensions; wanted 4"),
    ({"q": abi.Tensor()}, abi.INVALID_VALUE, "q is absent"),
    ({"q": tensor(Q, FLOAT32)}, abi.INVALID_DTYPE, "q has dtype float32 (3); wanted float16 or"),
    ({"q": tensor(Q, 77)}, abi.INVALID_DTYPE, "q has dtype unknown (77)"),
    ({"k": tensor(K, FLOAT16)}, abi.INVALID_DTYPE, "k has dtype float16 (1); wanted bfloat16"),
    ({"v": tensor(K, FLOAT16)}, abi.INVALID_DTYPE, "v has dtype"),
    ({"k": tensor((3, 128, 2, 64))}, abi.INVALID_VALUE, "k has shape (3, 128, 2, 64); wanted (2,"),
    ({"k": tensor((2, 128, 2, 32))}, abi.INVALID_VALUE, "k has shape"),
    ({"v": tensor((2, 127, 2, 64))}, abi.INVALID_VALUE, "v has shape"),
    ({"k": tensor((2, 128, 3, 64)), "v": tensor((2, 128, 3, 64))}, abi.INVALID_VALUE, "3 heads"),
    ({"q": tensor(Q, stride=(1 << 16, 512, 128, 2))}, abi.INVALID_VALUE, "q has strides"),
    ({"q": tensor((2, -1, 4, 64))}, abi.INVALID_VALUE, "q has shape (2, -1, 4, 64)"),
    ({"mask": tensor((2, 4, 128, 128))}, abi.INVALID_DTYPE, "mask has dtype bfloat16 (2); wanted"),
    (
        {"mask": tensor((2, 3, 128, 128), BOOL)},
        abi.INVALID_VALUE,
        "mask has shape (2, 3, 128, 128)",
    ),
    ({"mask": tensor((128, 128), BOOL)}, abi.INVALID_VALUE, "mask has 2 dimensions; wanted 4"),
    ({"bias": tensor((2, 4, 128, 128), FLOAT16)}, abi.INVALID_DTYPE, "bias has dtype float16"),
    ({"bias": tensor((2, 4, 64, 128))}, abi.INVALID_VALUE, "bias has shape (2, 4, 64, 128)"),
    (
        {"out": tensor(K)},
        abi.INVALID_VALUE,
        "out has shape (2, 128, 2, 64); wanted (2, 128, 4, 64)",
    ),
    ({"out": tensor(Q, stride=(0, 256, 64, 1))}, abi.INVALID_VALUE, "out has strides (0, 256"),
    ({"softmax_lse": tensor((2, 128, 4), FLOAT32)}, abi.INVALID_VALUE, "softmax_lse has shape"),
    ({"softmax_lse": tensor(LSE)}, abi.INVALID_DTYPE, "softmax_lse has dtype bfloat16"),
    ({"q": tensor(Q, data=None)}, abi.INVALID_VALUE, "q has a null data pointer"),
    ({"k": tensor(K, data=SOME_ADDRESS + 1)}, abi.INVALID_VALUE, "k has data pointer"),
    ({"softmax_scale": float("nan")}, abi.INVALID_VALUE, "softmax_scale is nan"),
    ({"softcap": float("inf")}, abi.INVALID_VALUE, "softcap is inf"),
    ({"is_causal": 2}, abi.INVALID_VALUE, "is_causal is 2; wanted 0 or 1"),
    ({"device": -1}, abi.INVALID_VALUE, "device is -1"),
    ({"num_splits": 129}, abi.INVALID_VALUE, "num_splits is 129; wanted 0 to 128"),
    ({"reserved": 1}, abi.INVALID_VALUE, "reserved is 1"),
    ({"reserved_end": 1}, abi.INVALID_VALUE, "reserved_end is 1"),
    ({"window": -1}, abi.INVALID_VALUE, "window is -1; wanted at least 1, or 0"),
    ({"window": 5}, abi.INVALID_VALUE, "window is 5; wanted 0 without a causal selection"),
    ({"struct_size": 0}, abi.INVALID_VALUE, "struct_size is 0; wanted sizeof(dmattn_fwd_params)"),
]


@pytest.mark.parametrize(
    "fields, status, words", WRONG_FORWARD, ids=[w for _, _, w in WRONG_FORWARD]
)
def test_forward(library: ctypes.CDLL, fields: dict[str, object], status: int, words: str) -> None:
    found, message = call(library, fwd_params(**fields))  # type: ignore[arg-type]
    assert words in message
    assert found == status


@pytest.mark.parametrize("head_dim, words", [(264, "at most 256"), (60, "multiple of 8")])
def test_head_dim_without_kernel(library: ctypes.CDLL, head_dim: int, words: str) -> None:
    status, message = call(library, fwd_params(head_dim=head_dim))
    assert status == abi.UNSUPPORTED
    assert f"head_dim {head_dim}" in message and words in message


WRONG_BACKWARD: list[tuple[dict[str, object], int, str]] = [
    ({"dout": tensor(K)}, abi.INVALID_VALUE, "dout has shape"),
    ({"dout": tensor(Q, FLOAT16)}, abi.INVALID_DTYPE, "dout has dtype"),
    ({"dq": tensor(K)}, abi.INVALID_VALUE, "dq has shape"),
    ({"dk": tensor(Q)}, abi.INVALID_VALUE, "dk has shape (2, 128, 4, 64); wanted (2, 128, 2, 64)"),
    ({"dv": tensor(K, stride=(1 << 14, 128, 0, 1))}, abi.INVALID_VALUE, "dv has strides"),
    ({"dsoftmax_lse": tensor(LSE)}, abi.INVALID_DTYPE, "dsoftmax_lse has dtype"),
    ({"dbias": tensor((1, 1, 1, 128))}, abi.INVALID_VALUE, "dbias is given but bias is absent"),
    (
        {"bias": tensor((1, 1, 1, 128)), "dbias": tensor((1, 1, 128, 128))},
        abi.INVALID_VALUE,
        "dbias has shape (1, 1, 128, 128); wanted (1, 1, 1, 128), the shape of bias",
    ),
    (
        {"bias": tensor((2, 1, 1, 128)), "dbias": tensor((2, 1, 1, 128), stride=(256, 1, 1, 2))},
        abi.INVALID_VALUE,
        "wanted a contiguous tensor",
    ),
    (
        {
            "bias": tensor((2, 1, 128, 128)),
            "dbias": tensor((2, 1, 128, 128), stride=(12800, 12800, 100, 1)),
        },
        abi.INVALID_VALUE,
        "dbias has strides (12800, 12800, 100, 1) for shape (2, 1, 128, 128); "
        "wanted a contiguous tensor, or one of padded rows",
    ),
    (
        {
            "bias": tensor((2, 1, 128, 128)),
            "dbias": tensor((2, 1, 128, 128), stride=(16384, 16384, 136, 1)),
        },
        abi.INVALID_VALUE,
        "wanted a contiguous tensor, or one of padded rows",
    ),
    ({"deterministic": 7}, abi.INVALID_VALUE, "deterministic is 7; wanted 0 or 1"),
]


@pytest.mark.parametrize(
    "fields, status, words", WRONG_BACKWARD, ids=[w for _, _, w in WRONG_BACKWARD]
)
def test_backward(library: ctypes.CDLL, fields: dict[str, object], status: int, words: str) -> None:
    params = bwd_params()
    abi.replace(params, fields)
    found, message = call(library, params)
    assert words in message
    assert found == status


REST = tensor(LSE, FLOAT32, stride=(512, 1, 4))

WRONG_SELECTION: list[tuple[dict[str, object], int, str]] = [
    ({"selection": abi.selection(128, 128, 128)}, abi.INVALID_VALUE, "selection.full is given but"),
    (
        {"selection": abi.selection(128, 128, 128, causal=False), "is_causal": 1},
        abi.INVALID_VALUE,
        "selection.full",
    ),
    (
        {
            "selection": abi.selection(128, 128, 128, causal=False),
            "mask": tensor((1, 1, 1, 1), BOOL),
        },
        abi.INVALID_VALUE,
        "mask is given with a selection",
    ),
    (
        {"selection": abi.selection(128, 128, 100, causal=False)},
        abi.INVALID_VALUE,
        "capacity 100; wanted a multiple of 128",
    ),
    (
        {"selection": abi.selection(128, 128, 128, heads=3, causal=False)},
        abi.INVALID_VALUE,
        "selection.idx has shape (1, 3, 1, 128)",
    ),
    (
        {"selection": abi.selection(128, 127, 128, causal=False)},
        abi.INVALID_VALUE,
        "selection.end has shape (1, 1, 127); wanted (1, 1, 128)",
    ),
    ({"softmax_lse_rest": REST}, abi.INVALID_VALUE, "wanted those of softmax_lse"),
]


@pytest.mark.parametrize("fields, status, words", WRONG_SELECTION)
@pytest.mark.parametrize("make", [fwd_params, bwd_params])
def test_selection_of_attention(
    library: ctypes.CDLL,
    make: Callable[..., abi.Params],
    fields: dict[str, object],
    status: int,
    words: str,
) -> None:
    found, message = call(library, make(**fields))
    assert words in message
    assert found == status


BOUNDS = tensor((4,), abi.INT32)
PACKED: dict[str, object] = {
    "seqlen_q": 1000,
    "selection": abi.selection(1000, 1000, 256, batch=2, heads=4),
}

WRONG_SELECT: list[tuple[dict[str, object], int, str]] = [
    ({"window": 0}, abi.INVALID_VALUE, "window is 0; wanted at least 1"),
    ({"seqlen_q": 1001}, abi.INVALID_VALUE, "seqlen_q is 1001"),
    ({"scores": tensor((2, 4, 1000), BOOL)}, abi.INVALID_DTYPE, "scores has dtype bool"),
    ({"key_mask": tensor((2, 4, 1000), FLOAT32)}, abi.INVALID_DTYPE, "key_mask has dtype float32"),
    (
        {"key_mask": tensor((3, 1, 1000), BOOL)},
        abi.INVALID_VALUE,
        "key_mask has shape (3, 1, 1000)",
    ),
    (
        {"selection": abi.selection(300, 1000, 128, batch=2, heads=4)},
        abi.INVALID_VALUE,
        "capacity 128; wanted at least 256",
    ),
    (
        {"selection": abi.selection(300, 1000, 256, batch=1, heads=4)},
        abi.INVALID_VALUE,
        "selection.idx has shape (1, 4, 3, 256); wanted (2, 4, 3, 256)",
    ),
    (
        {"cu_seqlens": BOUNDS},
        abi.INVALID_VALUE,
        "seqlen_q is 300; wanted the 1000 keys of scores with cu_seqlens",
    ),
    (
        {
            "cu_seqlens": BOUNDS,
            "is_causal": 0,
            "selection": abi.selection(300, 1000, 128, batch=2, heads=4, causal=False),
        },
        abi.INVALID_VALUE,
        "cu_seqlens is given but is_causal is 0; wanted 1",
    ),
    (PACKED | {"cu_seqlens": tensor((4,), FLOAT32)}, abi.INVALID_DTYPE, "cu_seqlens has dtype"),
    (PACKED | {"cu_seqlens": tensor((1, 4), abi.INT32)}, abi.INVALID_VALUE, "wanted 1"),
    (
        PACKED | {"cu_seqlens": tensor((0,), abi.INT32)},
        abi.INVALID_VALUE,
        "cu_seqlens has shape (0); wanted (documents + 1)",
    ),
    (
        PACKED | {"cu_seqlens": tensor((4,), abi.INT32, stride=(2,))},
        abi.INVALID_VALUE,
        "cu_seqlens has strides (2) for shape (4)",
    ),
    (
        PACKED | {"cu_seqlens": tensor((4,), abi.INT32, data=None)},
        abi.INVALID_VALUE,
        "cu_seqlens has a null data pointer",
    ),
]


@pytest.mark.parametrize("fields, status, words", WRONG_SELECT)
def test_select(library: ctypes.CDLL, fields: dict[str, object], status: int, words: str) -> None:
    found, message = call(library, abi.select_params(**fields))
    assert words in message
    assert found == status


@pytest.mark.parametrize(
    "window, seqlen_k, causal, capacity",
    [
        (100, 1000, 1, 256),
        (100, 1000, 0, 128),
        (100, 50, 1, 128),
        (1 << 40, 300, 1, 384),
        (0, 1000, 1, 0),
        (5, 0, 1, 0),
    ],
)
def test_select_capacity(
    library: ctypes.CDLL, window: int, seqlen_k: int, causal: int, capacity: int
) -> None:
    assert library.dmattn_select_capacity(window, seqlen_k, causal) == capacity


WRONG_LISTS: list[tuple[dict[str, object], int, str]] = [
    ({"seqlen_q": 1001}, abi.INVALID_VALUE, "seqlen_q is 1001; wanted 0 to the 1000 keys"),
    ({"seqlen_q": 200}, abi.INVALID_VALUE, "selection.idx has shape (2, 4, 3, 256); wanted (2, 4,"),
    ({"reach": -1}, abi.INVALID_VALUE, "reach is -1; wanted the largest end[j] - j, or 0"),
    ({"reserved": 1}, abi.INVALID_VALUE, "reserved is 1"),
    (
        {"selection": abi.selection(300, 1000, 100, batch=2, heads=4)},
        abi.INVALID_VALUE,
        "capacity 100; wanted a multiple of 128",
    ),
    (
        {"selection": abi.selection(300, 1000, 256, batch=2, heads=4, causal=False)},
        abi.INVALID_VALUE,
        "selection.idx has shape (2, 4, 1, 256); wanted (2, 4, 3, 256)",
    ),
    ({"needed": tensor((2, 4, 3), FLOAT32)}, abi.INVALID_DTYPE, "needed has dtype float32"),
    (
        {"needed": tensor((2, 4, 4), abi.INT32)},
        abi.INVALID_VALUE,
        "needed has shape (2, 4, 4); wanted (2, 4, 3), the shape of selection.count",
    ),
    (
        {"needed": tensor((2, 4, 3), abi.INT32, data=None)},
        abi.INVALID_VALUE,
        "needed has a null data pointer",
    ),
    (
        {
            "seqlen_q": 0,
            "selection": abi.selection(0, 1 << 30, 0, batch=2, heads=4),
        },
        abi.INVALID_VALUE,
        "selection.end has 1073741824 keys; wanted at most 1073741823",
    ),
]


@pytest.mark.parametrize("fields, status, words", WRONG_LISTS)
def test_build_key_lists(
    library: ctypes.CDLL, fields: dict[str, object], status: int, words: str
) -> None:
    found, message = call(library, abi.build_key_lists_params(**fields))
    assert words in message
    assert found == status


WRONG_APPEND: list[tuple[dict[str, object], int, str]] = [
    ({"v_new": tensor((2, 4, 4, 64))}, abi.INVALID_VALUE, "v_new has shape (2, 4, 4, 64)"),
    ({"k_cache": tensor((2, 64, 4, 64), FLOAT32)}, abi.INVALID_DTYPE, "k_cache has dtype float32"),
    ({"score_new": tensor((2, 4, 3))}, abi.INVALID_DTYPE, "score_new has dtype bfloat16"),
    ({"active": tensor((2, 4), abi.BOOL)}, abi.INVALID_VALUE, "active has shape (2, 4)"),
    ({"active": tensor((2, 3), abi.INT32)}, abi.INVALID_DTYPE, "active has dtype int32"),
    ({"seen": tensor((2, 1), abi.INT32)}, abi.INVALID_VALUE, "seen has 2 dimensions"),
    ({"seen": tensor((3,), abi.INT32)}, abi.INVALID_VALUE, "seen has shape (3)"),
    ({"evict": 2}, abi.INVALID_VALUE, "evict is 2; wanted 0 or 1"),
    ({"evict": 0}, abi.INVALID_VALUE, "evict is 0 with q; wanted 1, or no q"),
    ({"q": tensor((2, 3, 6, 64))}, abi.INVALID_VALUE, "q has 6 heads; wanted a multiple of the 4"),
    ({"q": tensor((2, 2, 8, 64))}, abi.INVALID_VALUE, "q has shape (2, 2, 8, 64)"),
    ({"q": abi.Tensor()}, abi.INVALID_VALUE, "out is given but q is absent"),
    ({"out": abi.Tensor()}, abi.INVALID_VALUE, "out is absent"),
    ({"out": tensor((2, 3, 8, 64), FLOAT32)}, abi.INVALID_DTYPE, "out has dtype float32"),
    ({"softmax_scale": math.nan}, abi.INVALID_VALUE, "softmax_scale is nan"),
    ({"softcap": math.inf}, abi.INVALID_VALUE, "softcap is inf"),
    ({"position": tensor((2, 4, 64), FLOAT32)}, abi.INVALID_DTYPE, "position has dtype float32"),
    ({"v_cache": tensor((2, 64, 4, 64), stride=(0, 256, 64, 1))}, abi.INVALID_VALUE, "v_cache has"),
    ({"score": tensor((2, 4, 64), FLOAT32, data=None)}, abi.INVALID_VALUE, "score has a null data"),
]


@pytest.mark.parametrize("fields, status, words", WRONG_APPEND)
def test_cache_append(
    library: ctypes.CDLL, fields: dict[str, object], status: int, words: str
) -> None:
    found, message = call(library, abi.cache_append_params(**fields))
    assert words in message
    assert found == status


# Wrong fields that a draft and its commit have in common; then those of one of them.
WRONG_DRAFT: list[tuple[dict[str, object], int, str]] = [
    ({"reserved": 1}, abi.INVALID_VALUE, "reserved is 1"),
    ({"k_cache": tensor((2, 66, 4, 64))}, abi.INVALID_VALUE, "v_cache has shape (2, 72, 4, 64)"),
    (
        {name: tensor((2, 66, 4, 64)) for name in ("k_cache", "v_cache")},
        abi.INVALID_VALUE,
        "k_cache has 66 rows; wanted at least 67, the entries of score and the draft",
    ),
    ({"k_cache": tensor((2, 72, 4, 64), FLOAT32)}, abi.INVALID_DTYPE, "k_cache has dtype float32"),
    ({"v_cache": tensor((2, 72, 4, 64), stride=(0, 256, 64, 1))}, abi.INVALID_VALUE, "v_cache has"),
    ({"score": tensor((2, 4, 64), FLOAT16)}, abi.INVALID_DTYPE, "score has dtype float16"),
    ({"score": tensor((2, 4, 0), FLOAT32)}, abi.INVALID_VALUE, "position has shape (2, 4, 64)"),
    ({"position": tensor((2, 4, 64), FLOAT32)}, abi.INVALID_DTYPE, "position has dtype float32"),
    ({"seen": tensor((3,), abi.INT32)}, abi.INVALID_VALUE, "seen has shape (3)"),
    ({"draft": tensor((2, 4, 3), abi.INT32)}, abi.INVALID_VALUE, "draft has 3 dimensions"),
    ({"draft": tensor((2, 4, 3, 2), abi.INT32)}, abi.INVALID_VALUE, "draft has shape (2, 4, 3, 2)"),
    ({"draft": tensor((2, 4, 33, 4), abi.INT32)}, abi.UNSUPPORTED, "draft has 33 tokens; wanted"),
    ({"draft": tensor((2, 4, 3, 4), FLOAT32)}, abi.INVALID_DTYPE, "draft has dtype float32"),
    (
        {"draft": tensor((2, 4, 3, 4), abi.INT32, data=abi.SOME_ADDRESS + 4)},
        abi.INVALID_VALUE,
        "wanted a multiple of 16",
    ),
]
WRONG_LOOK: list[tuple[dict[str, object], int, str]] = [
    ({"k_new": tensor((2, 4, 4, 64))}, abi.INVALID_VALUE, "k_new has shape (2, 4, 4, 64)"),
    ({"v_new": tensor((2, 3, 4, 64), FLOAT16)}, abi.INVALID_DTYPE, "v_new has dtype float16"),
    ({"score_new": tensor((2, 4, 3))}, abi.INVALID_DTYPE, "score_new has dtype bfloat16"),
    ({"q": abi.Tensor()}, abi.INVALID_VALUE, "q is absent"),
    ({"q": tensor((2, 3, 6, 64))}, abi.INVALID_VALUE, "q has 6 heads; wanted a multiple of the 4"),
    ({"out": tensor((2, 3, 8, 64), FLOAT32)}, abi.INVALID_DTYPE, "out has dtype float32"),
    ({"softmax_scale": math.nan}, abi.INVALID_VALUE, "softmax_scale is nan"),
    ({"softcap": math.inf}, abi.INVALID_VALUE, "softcap is inf"),
]
WRONG_COMMIT: list[tuple[dict[str, object], int, str]] = [
    ({"count": tensor((3,), abi.INT32)}, abi.INVALID_VALUE, "count has shape (3)"),
    ({"count": tensor((2,), FLOAT32)}, abi.INVALID_DTYPE, "dtype float32 (3); wanted int32 or int"),
    ({"count": tensor((2,), abi.INT64, data=None)}, abi.INVALID_VALUE, "count has a null data"),
]


@pytest.mark.parametrize(
    "make, fields, status, words",
    [
        *((abi.cache_draft_params, *row) for row in (*WRONG_DRAFT, *WRONG_LOOK)),
        *((abi.cache_commit_params, *row) for row in (*WRONG_DRAFT, *WRONG_COMMIT)),
    ],
)
def test_drafts(
    library: ctypes.CDLL,
    make: Callable[..., abi.Params],
    fields: dict[str, object],
    status: int,
    words: str,
) -> None:
    found, message = call(library, make(**fields))
    assert words in message
    assert found == status


WRONG_JOIN: list[tuple[dict[str, object], int, str]] = [
    ({"reserved": 1}, abi.INVALID_VALUE, "reserved is 1"),
    (
        {"k": tensor((2, 163, 4, 64)), "v": tensor((2, 163, 4, 128)), "score": tensor((2, 4, 163))},
        abi.INVALID_VALUE,
        "k has 163 keys; wanted at least the 64 of k_first and 100 of k_new",
    ),
    ({"v": tensor((2, 199, 4, 128))}, abi.INVALID_VALUE, "v has shape (2, 199, 4, 128)"),
    ({"score": tensor((2, 4, 200), abi.INT32)}, abi.INVALID_DTYPE, "score has dtype int32"),
    ({"score": tensor((2, 4, 200), FLOAT16)}, abi.INVALID_DTYPE, "score_first has dtype float32"),
    ({"k_first": tensor((2, 64, 4, 32))}, abi.INVALID_VALUE, "k_first has shape (2, 64, 4, 32)"),
    ({"v_new": tensor((2, 100, 3, 128))}, abi.INVALID_VALUE, "v_new has 3 heads; wanted a divisor"),
    ({"k_new": tensor((2, 100, 2, 64), FLOAT16)}, abi.INVALID_DTYPE, "k_new has dtype float16"),
    ({"mask_new": tensor((2, 4, 100))}, abi.INVALID_DTYPE, "mask_new has dtype bfloat16"),
    ({"score_new": tensor((2, 4, 99))}, abi.INVALID_VALUE, "score_new has shape (2, 4, 99)"),
    ({"k": tensor((2, 200, 4, 64), stride=(0, 256, 64, 1))}, abi.INVALID_VALUE, "k has strides"),
    ({"k": tensor((2, 200, 4, 64), data=None)}, abi.INVALID_VALUE, "k has a null data pointer"),
    (
        {"score": tensor((2, 4, 200), FLOAT32, (800, 0, 1))},
        abi.INVALID_VALUE,
        "score has strides (800, 0, 1)",
    ),
    ({"place_first": tensor((2, 4, 64))}, abi.INVALID_DTYPE, "place_first has dtype bfloat16"),
    ({"place_first": tensor((2, 1, 64), abi.INT32)}, abi.INVALID_VALUE, "place_first has shape"),
    ({"k": tensor((2, 200, 1 << 16, 128))}, abi.INVALID_VALUE, "v has shape"),
    ({"k": tensor((2, 200, 4, 0))}, abi.INVALID_VALUE, "wanted a head_dim of at least 1"),
]


@pytest.mark.parametrize("fields, status, words", WRONG_JOIN)
def test_join_keys(
    library: ctypes.CDLL, fields: dict[str, object], status: int, words: str
) -> None:
    found, message = call(library, abi.join_keys_params(**fields))
    assert words in message
    assert found == status


WRONG_KEEP: list[tuple[dict[str, object], int, str]] = [
    (
        {"v_kept": tensor((2, 64, 4, 0))},
        abi.INVALID_VALUE,
        "v_kept has shape (2, 64, 4, 0); wanted a head_dim of at least 1",
    ),
    ({"starts_early": 2}, abi.INVALID_VALUE, "starts_early is 2; wanted 0 or 1"),
    ({"row": 198}, abi.INVALID_VALUE, "row is 198; wanted at least 199"),
    ({"end": abi.Tensor()}, abi.INVALID_VALUE, "end is absent"),
    ({"end": tensor((2, 4, 200), FLOAT32)}, abi.INVALID_DTYPE, "end has dtype float32"),
    ({"end": tensor((2, 4, 200), abi.INT32, (1600, 400, 2))}, abi.INVALID_VALUE, "end has strides"),
    ({"place": tensor((2, 1, 200), abi.INT32)}, abi.INVALID_VALUE, "place has shape (2, 1, 200)"),
    ({"position": tensor((2, 4, 201), abi.INT32)}, abi.INVALID_VALUE, "position has 201 entries"),
    ({"position": tensor((2, 3, 50), abi.INT32)}, abi.INVALID_VALUE, "position has 3 heads"),
    ({"seen": tensor((3,), abi.INT32)}, abi.INVALID_VALUE, "seen has shape (3)"),
    ({"seen_kept": tensor((2,))}, abi.INVALID_DTYPE, "seen_kept has dtype bfloat16"),
    ({"score": tensor((2, 4, 200), abi.BOOL)}, abi.INVALID_DTYPE, "score has dtype bool"),
    ({"v_kept": tensor((2, 63, 4, 128))}, abi.INVALID_VALUE, "v_kept has shape (2, 63, 4, 128)"),
    (
        {"score_kept": tensor((2, 4, 64), FLOAT32, (256, 64, 0))},
        abi.INVALID_VALUE,
        "score_kept has strides (256, 64, 0)",
    ),
    ({"position_kept": tensor((2, 4, 64))}, abi.INVALID_DTYPE, "position_kept has dtype bfloat16"),
    ({"k": tensor((3, 200, 4, 64))}, abi.INVALID_VALUE, "k has shape (3, 200, 4, 64)"),
    ({"k": tensor((2, 200, 4, 64), data=None)}, abi.INVALID_VALUE, "k has a null data pointer"),
]


@pytest.mark.parametrize("fields, status, words", WRONG_KEEP)
def test_keep_keys(
    library: ctypes.CDLL, fields: dict[str, object], status: int, words: str
) -> None:
    found, message = call(library, abi.keep_keys_params(**fields))
    assert words in message
    assert found == status


@pytest.mark.parametrize(
    "make, fields",
    [
        (fwd_params, {}),
        (bwd_params, {}),
        (abi.select_params, {}),
        (abi.select_params, PACKED | {"cu_seqlens": BOUNDS}),
        (abi.build_key_lists_params, {}),
        (
            abi.build_key_lists_params,
            {"reach": 1 << 40, "selection": abi.selection(300, 1000, 0, batch=2, heads=4)},
        ),
        (abi.build_key_lists_params, {"needed": tensor((2, 4, 3), abi.INT32)}),
        (abi.cache_append_params, {}),
        (abi.cache_draft_params, {}),
        (abi.cache_commit_params, {}),
        (abi.cache_commit_params, {"count": tensor((2,), abi.INT32, stride=(3,))}),
        (abi.join_keys_params, {}),
        (abi.join_keys_params, dict.fromkeys(("mask_new", "place_first"), abi.Tensor())),
        (abi.join_keys_params, {"score": tensor((2, 4, 200), FLOAT32, (8000, 7, 28))}),
        (abi.keep_keys_params, {}),
        (abi.keep_keys_params, dict.fromkeys(("place", "position", "seen"), abi.Tensor())),
        (abi.keep_keys_params, {"score_kept": tensor((2, 4, 64), FLOAT32, (8000, 7, 28))}),
    ],
)
def test_valid_calls_get_as_far_as_the_device(
    library: ctypes.CDLL, make: Callable[..., abi.Params], fields: dict[str, object]
) -> None:
    status, message = size(library, make(**fields, device=63))
    assert (status, "device is 63" in message) == (abi.NO_DEVICE, True), message


def test_null_arguments(library: ctypes.CDLL) -> None:
    assert library.dmattn_fwd(None, None, 0, None) == abi.INVALID_VALUE
    assert b"params is null" in library.dmattn_last_error()
    assert library.dmattn_bwd_workspace_size(None, None) == abi.INVALID_VALUE
    assert library.dmattn_fwd_workspace_size(ctypes.byref(fwd_params()), None) == abi.INVALID_VALUE
    assert b"bytes is null" in library.dmattn_last_error()


def test_size_needs_no_pointers(library: ctypes.CDLL) -> None:
    without = {
        name: tensor(shape, dtype, data=None)
        for name, shape, dtype in [
            ("q", Q, abi.BFLOAT16),
            ("k", K, abi.BFLOAT16),
            ("v", K, abi.BFLOAT16),
            ("out", Q, abi.BFLOAT16),
            ("softmax_lse", LSE, FLOAT32),
        ]
    }
    status, message = size(library, fwd_params(**without))  # type: ignore[arg-type]
    assert status in (abi.OK, abi.NO_DEVICE), message


class _Longer(ctypes.Structure):
    _fields_ = [("known", abi.FwdParams), ("unknown", ctypes.c_int64 * 2)]


def test_structs_of_other_versions(library: ctypes.CDLL) -> None:
    longer = _Longer(known=fwd_params())
    longer.known.struct_size = ctypes.sizeof(_Longer)
    pointer = ctypes.cast(ctypes.byref(longer), ctypes.POINTER(abi.FwdParams))
    longer.known.num_splits = 500  # checked only after the unknown fields, all 0, are accepted
    assert library.dmattn_fwd(pointer, None, 0, None) == abi.INVALID_VALUE
    assert b"num_splits is 500" in library.dmattn_last_error()
    longer.unknown[1] = 1
    assert library.dmattn_fwd(pointer, None, 0, None) == abi.INVALID_VALUE
    assert b"this library knows the first" in library.dmattn_last_error()

    shorter = fwd_params(num_splits=500)
    shorter.struct_size = abi.FwdParams.num_splits.offset
    status, message = size(library, shorter)
    assert status in (abi.OK, abi.NO_DEVICE), message


def test_selections_of_callers_that_know_no_documents(library: ctypes.CDLL) -> None:
    """Callers whose struct ends before cu_seqlens: what lies behind it in memory is not read."""
    older = abi.select_params(cu_seqlens=tensor((0,), FLOAT32), device=63)
    assert size(library, older)[0] == abi.INVALID_DTYPE
    older.struct_size = abi.SelectParams.cu_seqlens.offset
    status, message = size(library, older)
    assert (status, "device is 63" in message) == (abi.NO_DEVICE, True), message


def test_messages_belong_to_their_thread(library: ctypes.CDLL) -> None:
    messages: dict[int, str] = {}

    def fail(num_splits: int) -> None:
        for _ in range(200):
            _, messages[num_splits] = call(library, fwd_params(num_splits=num_splits))

    threads = [threading.Thread(target=fail, args=(n,)) for n in (501, 502, 503)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"num_splits is {n};" in message for n, message in messages.items())


# ------------------------------------------------------------------------------ the Python module


@pytest.mark.parametrize("method", [lambda p: p.workspace_size(), lambda p: p.launch(0, 0, 0)])
@pytest.mark.parametrize(
    "replaced, error, words",
    [
        ({"v": view(tensor((2, 5, 2, 64)))}, ValueError, "v has shape"),
        ({"k": view(tensor(K, FLOAT16))}, TypeError, "k has dtype"),
        ({"q": view(tensor((2, 128, 4, 512)))}, ValueError, "k has shape"),
    ],
)
def test_module_maps_statuses(
    method: Callable[[dmattn_kernels.FwdParams], object],
    replaced: dict[str, object],
    error: type[Exception],
    words: str,
) -> None:
    params = module_params(**replaced)
    with pytest.raises(error, match=words):
        method(params)


@pytest.mark.parametrize(
    "value, words",
    [
        (3, "q is a int; wanted None or a tuple"),
        ((1, 2, 3), "q is a tuple; wanted None or a tuple"),
        ((1, 2, (1, 2), (1,)), "q: stride must be a tuple of 2 integers"),
        ((1, "x", (1, 2), (2, 1)), "int"),
    ],
)
def test_module_wants_tuples(value: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        module_params(q=value)


def test_module_rejects_five_dimensions() -> None:
    with pytest.raises(ValueError, match="q has 5 dimensions"):
        module_params(q=(1, 2, (1,) * 5, (1,) * 5))
