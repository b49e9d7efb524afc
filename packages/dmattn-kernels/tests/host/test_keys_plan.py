"""How keys are joined and kept: the words in which they are copied, and the thread blocks."""

from __future__ import annotations

import ctypes

import pytest

import abi
from abi import BFLOAT16, FLOAT32, INT32, SOME_ADDRESS, tensor
from probe import Probe


@pytest.fixture(scope="module")
def plan(probe: ctypes.CDLL) -> Probe:
    return Probe(probe)


def test_blocks_cover_all_keys(plan: Probe) -> None:
    found = plan.join_keys()
    assert found["word_bytes"] == 16 and (found["k_words"], found["v_words"]) == (8, 16)
    assert (found["first_begin"], found["new_begin"], found["seqlen"]) == (36, 100, 200)
    assert 200 <= found["k_keys"] < 264 and found["score_blocks"] == 1
    # A thread block copies 2048 words: 64 keys of 4 heads of 64 numbers, or 32 of 128 numbers.
    assert (found["k_blocks"], found["v_blocks"]) == (4, 7)


def test_keys_are_kept_early_where_asked(plan: Probe) -> None:
    assert [plan.keep_keys(starts_early=x)["starts_early"] for x in (0, 1)] == [0, 1]


def test_heads_that_stand_for_several(plan: Probe) -> None:
    found = plan.join_keys()
    assert (found["k_ratio"], found["score_ratio"], found["score_batch_stride"]) == (2, 4, 0)
    assert plan.keep_keys(end=tensor((1, 2, 200), INT32))["end_ratio"] == 2


@pytest.mark.parametrize(
    "shape, stride, data, dtype, word",
    [
        ((2, 200, 4, 64), None, SOME_ADDRESS, BFLOAT16, 16),
        ((2, 200, 4, 64), None, SOME_ADDRESS + 8, BFLOAT16, 8),
        ((2, 200, 4, 64), None, SOME_ADDRESS + 2, BFLOAT16, 2),
        ((2, 200, 4, 64), (1 << 20, 1026, 256, 1), SOME_ADDRESS, BFLOAT16, 4),
        ((2, 200, 4, 64), (1 << 20, 1024, 0, 1), SOME_ADDRESS, BFLOAT16, 16),
        ((2, 200, 4, 64), (-(1 << 20), -1028, 256, 1), SOME_ADDRESS, BFLOAT16, 8),
        ((2, 200, 1, 64), (1 << 20, 1024, 3, 1), SOME_ADDRESS, BFLOAT16, 16),
    ],
)
def test_words_are_as_wide_as_all_rows_allow(
    plan: Probe,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    data: int,
    dtype: int,
    word: int,
) -> None:
    assert plan.keep_keys(k=tensor(shape, dtype, stride, data))["word_bytes"] == word


def test_rows_of_odd_widths(plan: Probe) -> None:
    def call(head_dim: int, dtype: int) -> dict[str, object]:
        k = {name: tensor((2, n, 4, head_dim), dtype) for name, n in (("k", 200), ("v", 200))}
        kept = {f"{name}_kept": tensor((2, 64, 4, head_dim), dtype) for name in ("k", "v")}
        return {**k, **kept}

    assert plan.keep_keys(**call(12, BFLOAT16))["word_bytes"] == 8
    assert plan.keep_keys(**call(9, FLOAT32))["word_bytes"] == 4
    assert plan.keep_keys(**call(9, BFLOAT16))["word_bytes"] == 2


@pytest.mark.parametrize("keys, batch, sms", [(1, 1, 132), (10240, 1, 132), (131072, 8, 132)])
def test_segments_cover_all_keys(plan: Probe, keys: int, batch: int, sms: int) -> None:
    fields: dict[str, object] = {
        name: tensor((batch, keys, 4, width)) for name, width in (("k", 64), ("v", 128))
    }
    fields |= {
        f"{name}_kept": tensor((batch, 64, 4, width)) for name, width in (("k", 64), ("v", 128))
    }
    fields |= dict.fromkeys(("place", "position", "seen", "seen_kept"), abi.Tensor())
    found = plan.keep_keys(
        sms,
        row=keys - 1,
        end=tensor((batch, 4, keys), INT32),
        score=tensor((batch, 4, keys), FLOAT32),
        score_kept=tensor((batch, 4, 64), FLOAT32),
        position_kept=tensor((batch, 4, 64), INT32),
        **fields,
    )
    segments, each = found["segments"], found["segment_keys"]
    assert each % 256 == 0 and (segments - 1) * each < keys <= segments * each
    assert found["positions"] == 0
    # Four thread blocks for each SM, if there are enough keys for them.
    assert segments * batch * 4 <= 4 * sms + batch * 4
