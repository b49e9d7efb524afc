"""Few row blocks over many keys: on a large GPU the keys of each are divided into shares.

On Hopper there are separate kernels for whatever changes the scores, most of them with a second
version for shares; so there are for lists. The tiles of a call depend on its number of rows, so few
row blocks are tested in both ways: few rows of some heads, and many rows of few heads.
"""

from __future__ import annotations

import random

import pytest
import torch

import dmattn
from attention.cases import Case, build, case_id, random_case, seeds
from attention.driver import assert_close, check, run

pytestmark = [pytest.mark.each_family, pytest.mark.cuda]

FEW = Case(200, 3000, 1, 4, 2, logits=2.0)
MANY = Case(1500, 2056, 1, 2, 1)  # more than 1024 rows: tall tiles at head_dim 64
HEAD_DIMS = (64, 128, 192, 256)

KINDS = [
    {},
    {"softcap": 5.0},
    {"mask": "b1qk", "mask_fill": "half"},
    {"mask": "1hqk", "mask_fill": "blocks"},
    {"mask": "11qk", "mask_fill": "banded"},  # some shares have no tile
    {"mask": "bkqk", "mask_fill": "dead_rows"},
    {"bias": "1hqk"},
    {"bias": "11qk", "bias_fill": "some_minus_inf"},
    {"bias": "b1qk", "bias_f32": True, "bias_fill": "some_lowest"},
    {"bias": "bk1k"},
    {"bias": "1h1k", "bias_f32": True, "bias_fill": "some_minus_inf"},
    {"bias": "1hqk", "mask": "11qk", "mask_fill": "blocks"},
    {"bias": "b1qk", "bias_f32": True, "mask": "bkqk", "mask_fill": "dead_rows"},
    {"bias": "bk1k", "mask": "b1qk", "mask_fill": "banded"},
    {"softcap": 5.0, "bias": "b11k", "mask": "b1qk"},
    {"softcap": 5.0, "bias": "1hqk", "bias_f32": True},
    {"scale": -0.2, "bias": "11qk", "mask": "11qk"},
    {"mask": "b11k", "mask_fill": "prefix"},  # over a list of keys
    {"mask": "bk1k", "bias": "bk1k"},
]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("shape", [FEW, MANY], ids=case_id)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: case_id(FEW.with_(**kind)))
def test_kinds(kind: dict[str, object], shape: Case, head_dim: int) -> None:
    """Also the gradients, which need the log-sum-exps and what rounding has dropped from these."""
    check(shape.with_(**kind, head_dim=head_dim, dlse=True))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("shape", [FEW, MANY], ids=case_id)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: case_id(FEW.with_(**kind)))
def test_causal(kind: dict[str, object], shape: Case, head_dim: int) -> None:
    """Row blocks see unequal numbers of keys, and some shares have none."""
    check(shape.with_(**kind, head_dim=head_dim, causal=True, dtype="f16", wants=""))


@pytest.mark.parametrize("odd", [2047, 2050])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
@pytest.mark.parametrize("bias", ["11qk", "1hqk", "bk1k"])
@pytest.mark.parametrize("rows", [300, 2000])
def test_biases_of_any_number_of_keys(rows: int, bias: str, head_dim: int, odd: int) -> None:
    """Rows of a bias that do not start on 16 bytes are loaded in another way."""
    check(Case(rows, odd, 1, 2, 2, head_dim, bias=bias))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rows, heads", [(200, 4), (1500, 2)])
def test_lists(rows: int, heads: int, head_dim: int) -> None:
    case = Case(rows, 3000, 1, heads, heads // 2, head_dim, bias="bk1k", causal=True)
    problem = build(case)
    scores = torch.randn(1, heads // 2, 3000, device=problem.q.device)
    selection = dmattn.select_keys(scores, 900, query_len=rows)
    found = run(problem, selection=selection)
    keep = selection.to_mask().repeat_interleave(2, 1)
    assert_close(problem.with_(mask=keep), found)


@pytest.mark.parametrize("seed", seeds(200))
def test_random(seed: int) -> None:
    """Cases with at most as many row blocks as a GPU has SMs."""
    draw = random.Random(seed)
    case = random_case(seed).with_(
        seqlen_q=draw.choice((130, 300, 1030, 1500, 2047)),
        seqlen_k=draw.choice((513, 1000, 2048, 3001, 4095)),
        batch=draw.choice((1, 1, 2)),
        nheads=draw.choice((2, 4)),
        nheads_k=draw.choice((1, 2)),
    )
    print(case)
    check(case)
