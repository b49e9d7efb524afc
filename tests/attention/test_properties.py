"""Problems that hypothesis draws, and shrinks to the smallest one that fails, on the CPU.

`test_random` draws from the same fields with larger ranges, for every target.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention.cases import (
    BIAS_FILLS,
    LAYOUTS,
    MASK_FILLS,
    OPERAND_LAYOUTS,
    OPERAND_SHAPES,
    Case,
)
from attention.driver import check
from attention.packed import check_packed
from attention.targets import target

LENGTHS = st.sampled_from((0, 1, 2, 7, 31, 33, 127, 128, 129))
PACKED_SHAPES = [shape for shape in OPERAND_SHAPES if shape[0] + shape[3] == "1k"]
FIXED = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def cases(draw: st.DrawFn, shapes: list[str]) -> Case:
    """Problems of every dtype, shape, broadcast kind and view; `shapes` of mask and bias."""
    nheads_k, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Case(
        draw(LENGTHS),
        draw(LENGTHS),
        batch=draw(st.integers(1, 3)),
        nheads=nheads_k * group,
        nheads_k=nheads_k,
        head_dim=draw(st.sampled_from((1, 5, 8, 24, 64))),
        dtype=draw(st.sampled_from(target().dtypes)),
        causal=draw(st.booleans()),
        softcap=draw(st.sampled_from((0.0, 3.0))),
        scale=draw(st.sampled_from((None, 0.5))),
        mask=draw(st.sampled_from(("", *shapes))),
        mask_fill=draw(st.sampled_from(list(MASK_FILLS))),
        bias=draw(st.sampled_from(("", *shapes))),
        bias_fill=draw(st.sampled_from(list(BIAS_FILLS))),
        bias_f32=draw(st.booleans()),
        layout=draw(st.sampled_from(list(LAYOUTS))),
        operand_layout=draw(st.sampled_from(list(OPERAND_LAYOUTS))),
        logits=draw(st.sampled_from((0.01, 1.0, 4.0))),
        dlse=draw(st.booleans()),
    )


@given(case=cases(OPERAND_SHAPES), block=st.sampled_from((16, 64, 512)))
@settings(FIXED, max_examples=300)
def test_any_problem(case: Case, block: int) -> None:
    """With blocks so small that short sequences take many of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_KEYS_PER_BLOCK", "_LISTED_KEYS_PER_BLOCK"):
            patch.setattr(f"dmattn.backends.cpu.key_blocks.{name}", block)
        patch.setattr("dmattn.backends.cpu.key_blocks._BLOCK_ELEMENTS", block * 64)
        check(case)


@given(
    case=cases(PACKED_SHAPES),
    lengths=st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=5),
)
@settings(FIXED, max_examples=120)
def test_any_packing(case: Case, lengths: list[tuple[int, int]]) -> None:
    check_packed(case, lengths)
