"""`explain` and `explain_varlen` name every slow path that can be told from a call."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dmattn import (
    KeyState,
    explain,
    explain_varlen,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    packed_documents,
    select_keys,
)
from dmattn.backends import registry
from dmattn.problem import Packing, Problem


def operands(*batch: int, rows: int = 300, head_dim: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(*batch, rows, heads, head_dim) for heads in (4, 2, 2))
    return q, k, v


def half(head_dim: int = 64, rows: int = 300, **fields: Any) -> Problem:
    given = operands(1, rows=rows, head_dim=head_dim)
    return Problem(*(t.bfloat16() for t in given), **fields)


ROWS = torch.ones(1, 1, 300, 300, dtype=torch.bool)
KEYS = torch.ones(1, 2, 1, 300, dtype=torch.bool)
FEW_SCORES = torch.zeros(1, 4, 49, 49)

ON_CUDA = {
    "no multiple of 8": half(60),
    "head_dim 96 costs as much as 128": half(96),
    "attn_mask has rows of its own": half(mask=ROWS),
    "attn_mask differs among the 2 query heads of a key head, so the backward takes 2": half(
        mask=torch.ones(1, 4, 1, 300, dtype=torch.bool)
    ),
    "the kept keys differ among the 2 query heads": half(
        is_causal=True, key_lists=select_keys(torch.zeros(1, 4, 300), 100).lists
    ),
    "on Hopper: attn_bias differs among the 2 query heads": half(
        is_causal=True,
        key_lists=select_keys(torch.zeros(1, 2, 300), 100).lists,
        bias=torch.zeros(1, 4, 1, 300),
    ),
    "attn_bias has rows of its own and is float32": half(bias=torch.zeros(ROWS.shape)),
    "attn_bias is copied first; a view": half(bias=torch.zeros(1, 300, 300, 4).permute(0, 3, 1, 2)),
    "attn_bias is copied first in the backward": half(
        bias=torch.zeros(ROWS.shape, dtype=torch.bfloat16)
    ),
    "read number by number: its last": half(bias=torch.zeros(1, 1, 300, 1).expand(ROWS.shape)),
    "rows that do not start on 16 bytes": half(bias=torch.zeros(ROWS.shape, dtype=torch.bfloat16)),
    "softcap": half(softcap=5.0),
    "deterministic": half(deterministic=True),
    "deterministic: the parts": half(rows=49, bias=FEW_SCORES, deterministic=True),
    "head_dim 24 costs as much as 32": half(24, rows=49),
    "attn_mask has rows": half(rows=65, mask=torch.ones(1, 1, 65, 65, dtype=torch.bool)),
    "except on Hopper": half(rows=49, softcap=5.0),
}


@pytest.mark.parametrize("words", ON_CUDA)
def test_slow_paths_of_the_compiled_kernels(words: str) -> None:
    found = registry.named("cuda").slow_paths(ON_CUDA[words])
    assert any(words in note for note in found), found


def test_what_is_fast_on_the_compiled_kernels() -> None:
    fast = [
        half(is_causal=True),
        half(is_causal=True, key_lists=select_keys(torch.zeros(1, 2, 300), 100).lists),
        half(128, mask=KEYS, bias=torch.zeros(1, 2, 1, 300)),
        half(256, bias=torch.zeros((1, 1, 300, 304), dtype=torch.bfloat16)[..., :300]),
        half(32, rows=49, mask=FEW_SCORES == 0, bias=FEW_SCORES),
        half(64, rows=64, deterministic=True),
    ]
    assert not any(registry.named("cuda").slow_paths(problem) for problem in fast)


def test_packed_slow_paths_of_the_compiled_kernels() -> None:
    bounds = torch.tensor([0, 100, 300], dtype=torch.int32)
    packing = Packing(bounds, bounds, 200, 200)
    given = [t.bfloat16() for t in operands()]
    mask = torch.ones(1, 300, 200, dtype=torch.bool)
    notes = registry.named("cuda").slow_paths(Problem(*given, mask=mask, packing=packing))
    assert any("not split over the GPU" in note for note in notes)
    assert any("attn_mask has rows of its own" in note for note in notes)


def test_masks_on_the_cpu() -> None:
    given = operands(1)
    assert "slow: attn_mask has rows of its own" in explain(*given, ROWS)
    assert "slow" not in explain(*given, KEYS)


def test_before_a_backend() -> None:
    q, k, v = operands(1)
    assert "slow: sinks take some passes" in explain(q, k, v, sinks=torch.zeros(4))
    assert "slow: head_dim is 64 of key and 32 of value" in explain(q, k, v[..., :32])


def test_probabilities_beside_a_state_are_refused_as_in_the_call() -> None:
    q, k, v = operands(1)
    score = torch.randn(1, 2, 1, 300)
    state = KeyState.of(k, v, score, 5)
    given = {"attn_bias": score, "is_causal": True, "window_size": 5, "state": state}
    for function in (explain, flash_dmattn_func):
        with pytest.raises(ValueError, match="return_attn_probs: got True beside state"):
            function(q, k, v, **given, return_attn_probs=True)


def test_probabilities_are_a_slow_path() -> None:
    q, k, v = operands(1, rows=9)
    words = "return_attn_probs computes the probabilities outside the kernels"
    assert words in explain(q, k, v, return_attn_probs=True)
    assert words not in explain(q, k, v)


def test_long_lists() -> None:
    """Lists for documents are as long as the documents, and slow if these are long."""
    given = operands(1, rows=1024)

    def of_documents(length: int) -> str:
        bounds = torch.arange(0, 1025, length, dtype=torch.int32)
        return explain(*given, is_causal=True, selection=packed_documents(bounds))

    assert "slow: the selection has lists of up to 1024 of 1024 keys" in of_documents(1024)
    assert "slow" not in of_documents(128)
    scores = torch.randn(1, 2, 1024)
    assert "slow" not in explain(*given, None, scores, window_size=100, is_causal=True)


def test_varlen() -> None:
    given, bounds = operands(), torch.tensor([0, 100, 300], dtype=torch.int32)
    packing = (bounds, None, 200, 200)
    text = explain_varlen(*given, *packing, is_causal=True, return_lse=True)
    assert text.startswith("backend: cpu\n  not cuda: query: got device cpu")
    assert "slow: packed sequences are computed one after another" in text
    assert "  slow" not in explain_varlen(*given, *packing, backend="cuda")
    scores = torch.randn(300, 2)
    assert "sorts all keys" in explain_varlen(*given, *packing, attn_bias=scores, window_size=9)
    causal = {"attn_bias": scores, "window_size": 9, "is_causal": True}
    assert "slow" not in explain_varlen(*given, *packing, **causal)
    others = torch.tensor([0, 101, 300], dtype=torch.int32)
    moved = explain_varlen(*given, bounds, others, 200, 200, **causal)
    assert "queries are copied to the positions" in moved
    assert "all scores" in explain_varlen(*given, *packing, backend="flex")
    with pytest.raises(ValueError, match="max_seqlen_k"):
        explain_varlen(*given, bounds, None, 200, -1)
    flash_dmattn_varlen_func(*given, *packing, **causal)  # what is explained can be called
