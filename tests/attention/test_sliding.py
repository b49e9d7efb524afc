"""Sliding windows without a mask beside them.

Kernels for Hopper compute such a window without reading its lists, alone or beside a bias for each
key, if there are few rows, or enough keys to fill the GPU, and no keys have to be split; other
kernels read the lists. Edges of the window fall into tiles of 128 keys and rows, 80 keys at
head_dim 256, and 64 rows in the backward.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import dmattn
from attention.cases import Case, build, case_id
from attention.driver import assert_close, run
from attention.oracle import Problem, Results
from attention.targets import target

# Eight blocks of 64 rows in the backward, fewer than nine.
CASE = Case(500, 500, 1, 4, 2, causal=True, dlse=True)
LENGTHS = (1, 127, 128, 129, 500)


def slide(problem: Problem, window: int, **settings: object) -> tuple[Problem, Results]:
    """The problem with an equivalent mask, and the results of the call with the window."""
    rows, keys = problem.q.shape[1], problem.k.shape[1]
    selection = dmattn.sliding_window(keys, window, rows, device=problem.q.device)
    found = run(problem, selection=selection, **settings)
    return problem.with_(mask=selection.to_mask()), found


def check(case: Case, window: int, **settings: object) -> None:
    assert_close(*slide(build(case), window, **settings))


@pytest.mark.parametrize("window", [1, 63, 64, 65, 127, 128, 129, 200])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_windows(window: int, head_dim: int) -> None:
    check(CASE.with_(head_dim=head_dim), window)


@pytest.mark.parametrize("window", [1, 63, 64, 65, 127, 128, 129, 200])
@pytest.mark.parametrize("head_dim", [64, 128, 136, 256])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_windows_of_wide_heads_and_beside_softcap(
    softcap: float, window: int, head_dim: int
) -> None:
    check(CASE.with_(head_dim=head_dim, softcap=softcap), window)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window", [1, 100, 128, 499, 600])
def test_lengths(length: int, window: int) -> None:
    check(CASE.with_(seqlen_q=length, seqlen_k=length, head_dim=128), window)


@pytest.mark.parametrize("rows, keys", [(130, 700), (1, 300), (300, 129), (2, 1), (257, 258)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_other_numbers_of_rows_than_keys(rows: int, keys: int, head_dim: int) -> None:
    check(CASE.with_(seqlen_q=rows, seqlen_k=keys, head_dim=head_dim), 150)


@pytest.mark.parametrize("head_dim", [40, 72, 96, 136, 192, 256])
def test_head_dims(head_dim: int) -> None:
    check(CASE.with_(head_dim=head_dim, dtype="f16"), 161)


@pytest.mark.parametrize(
    "case",
    [
        CASE.with_(bias="bk1k"),
        CASE.with_(bias="111k", bias_f32=True, bias_fill="some_minus_inf"),
        CASE.with_(bias="bh1k", bias_fill="some_lowest"),
        CASE.with_(seqlen_k=520, bias="1hqk", wants="qkv"),
        CASE.with_(seqlen_k=520, bias="bkqk", bias_f32=True, wants="qkv"),
        CASE.with_(softcap=5.0),
        CASE.with_(deterministic=True),
        CASE.with_(sinks="normal"),
        CASE.with_(bias="bk1k", softcap=5.0, sinks="normal"),
        CASE.with_(scale=-0.1),
        CASE.with_(nheads_k=4, batch=2),
        CASE.with_(nheads_k=1),
        CASE.with_(layout="heads_shared"),
        CASE.with_(logits=200.0),
    ],
    ids=case_id,
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_beside_other_settings(case: Case, head_dim: int) -> None:
    check(case.with_(head_dim=head_dim), 140, deterministic=case.deterministic)


@pytest.mark.cuda
@pytest.mark.every_case
@pytest.mark.parametrize("bias", ["", "bk1k"])
@pytest.mark.parametrize("head_dim, dtype", [(64, "bf16"), (128, "f16"), (256, "bf16")])
def test_more_blocks_than_fit_the_gpu(head_dim: int, dtype: str, bias: str) -> None:
    check(Case(2200, 2200, 1, 8, 8, head_dim, dtype, causal=True, bias=bias), 700)


@pytest.mark.cuda
@pytest.mark.every_case
@pytest.mark.parametrize("window", [1024, 4094])
def test_long_rows(window: int) -> None:
    check(Case(4095, 4095, 1, 8, 4, 128, causal=True), window)


def without_entries(selection: dmattn.KeySelection) -> dmattn.KeySelection:
    """The same selection with lists that say that rows keep nothing."""
    nothing: dict[str, Tensor] = {
        name: torch.zeros_like(getattr(selection, name)) for name in ("idx", "count", "full")
    }
    return dataclasses.replace(selection, **nothing)  # type: ignore[arg-type]


@pytest.mark.cuda
@pytest.mark.default_backend
@pytest.mark.each_family
@pytest.mark.every_case
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bias", ["", "bk1k"])
def test_hopper_reads_no_lists(head_dim: int, bias: str) -> None:
    problem = build(CASE.with_(head_dim=head_dim, bias=bias))
    selection = dmattn.sliding_window(500, 140, device=problem.q.device)
    found = run(problem, selection=without_entries(selection))
    if target().family == "sm90":
        assert_close(problem.with_(mask=selection.to_mask()), found)
    else:
        assert not found.out.any()
