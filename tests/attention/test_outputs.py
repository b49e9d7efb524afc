"""Outputs that the caller gives: strided slices of buffers that are full of NaN."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dmattn
from attention.cases import Case, build, case_id
from attention.driver import assert_close, bytes_of, call, peak_bytes_beside
from attention.oracle import Results
from attention.packed import build_packed, call_packed, judge_packed
from attention.poison import poisoned
from attention.selections import make_scores
from attention.targets import target_device


@dataclasses.dataclass(frozen=True)
class Place:
    """An output, and the buffer around it."""

    out: Tensor
    around: Tensor

    def check_neighbours(self) -> None:
        """Assert that nothing but the output has been written."""
        found = self.out.clone()
        self.out.fill_(math.nan)
        assert bool(self.around.isnan().all()), "written beside the output"
        self.out.copy_(found)


def _buffer(like: Tensor, *shape: int) -> Tensor:
    return like.new_full(shape, math.nan)


def _whole(like: Tensor) -> Place:
    around = _buffer(like, *like.shape)
    return Place(around, around)


def _rows(like: Tensor) -> Place:
    """A stretch of a longer output."""
    *batch, rows, heads, dim = like.shape
    around = _buffer(like, *batch, rows + 200, heads, dim)
    return Place(around.narrow(-3, 70, rows), around)


def _spaced(like: Tensor) -> Place:
    """Other data between rows and heads; rows start on 16 bytes where head_dim allows it."""
    *batch, rows, heads, dim = like.shape
    around = _buffer(like, *batch, 2 * rows, heads + 1, dim + 8)
    return Place(around[..., ::2, 1:, 8:], around)


def _heads_first(like: Tensor) -> Place:
    *batch, rows, heads, dim = like.shape
    around = _buffer(like, *batch, heads, rows + 3, dim)
    return Place(around.narrow(-2, 2, rows).transpose(-3, -2), around)


def _odd_rows(like: Tensor) -> Place:
    """Rows are aligned to no more than 2 bytes."""
    *others, dim = like.shape
    around = _buffer(like, *others, dim + 3)
    return Place(around[..., 1:-2], around)


def _odd_start(like: Tensor) -> Place:
    """Strides are multiples of a vector, but the start address is not."""
    around = _buffer(like, like.numel() + 8)
    return Place(around[1 : 1 + like.numel()].view(like.shape), around)


PLACES: dict[str, Callable[[Tensor], Place]] = {
    "whole": _whole,
    "rows": _rows,
    "spaced": _spaced,
    "heads_first": _heads_first,
    "odd_rows": _odd_rows,
    "odd_start": _odd_start,
}

CASES = [
    *(
        Case(131, 140, head_dim=head_dim, causal=causal, mask=mask, bias=bias, wants="")
        for head_dim in (64, 72, 128)
        for causal, mask, bias in (
            (True, "", ""),
            (False, "bk1k", ""),
            (True, "bhqk", ""),
            (False, "", "bh1k"),
            (True, "", "1hqk"),
        )
    ),
    *(Case(300, 700, head_dim=head_dim, dtype="f16", wants="") for head_dim in (20, 96, 256)),
    *(
        Case(1, 3001, 2, 8, 2, head_dim, mask=mask, wants="")
        for head_dim in (64, 72, 128)
        for mask in ("", "bk1k")
    ),
    Case(5, 9001, 1, 2, 1, 128, causal=True, wants=""),  # keys split among blocks
    Case(49, 49, head_dim=32, mask="b11k", bias="1hqk", wants=""),
    Case(33, 20, head_dim=64, wants=""),
    Case(131, 140, softcap=5.0, wants=""),
    Case(131, 140, sinks="normal", bias="bk1k", wants=""),
    Case(131, 140, head_dim=64, value_dim=40, wants=""),
    Case(131, 140, head_dim=40, value_dim=64, wants=""),
    Case(90, 50, causal=True, wants=""),  # rows without keys
    Case(5, 0, wants=""),
    Case(0, 5, wants=""),
]


@pytest.mark.each_family
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_each_place(case: Case, place: str) -> None:
    """By a first call and by one of a known kind."""
    problem = build(case)
    for _ in range(2):
        there = PLACES[place](problem.dout)
        with poisoned():
            found, lse = call(problem, out=there.out)
        assert found is there.out
        assert_close(problem, Results(found, lse))
        there.check_neighbours()


@pytest.mark.each_family
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("causal, mask", [(True, ""), (False, ""), (True, "1h1k")])
def test_packed(place: str, head_dim: int, causal: bool, mask: str) -> None:
    """Row blocks at the end of a sequence write nothing into rows of the next one."""
    case = Case(head_dim=head_dim, causal=causal, mask=mask, wants="")
    problem = build_packed(case, ((130, 130), (1, 77), (0, 9), (200, 333), (64, 64)))
    for _ in range(2):
        there = PLACES[place](problem.dout)
        with poisoned():
            found, lse = call_packed(problem, out=there.out)
        assert found is there.out
        judge_packed(problem, {"out": found, "lse": lse})
        there.check_neighbours()


@pytest.mark.default_backend
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("rows, keys", [(500, 500), (1, 500), (260, 700), (600, 500)])
def test_window(place: str, head_dim: int, rows: int, keys: int) -> None:
    problem = build(Case(rows, keys, head_dim=head_dim, causal=True, bias="bk1k", wants=""))
    if rows > keys:  # whose first rows stand before the first key
        assert problem.bias is not None
        lists = dmattn.select_keys(problem.bias, 100, query_len=rows)
        options: dict[str, Any] = {"selection": lists}
    else:
        options = {"window_size": 100}
    wanted, its_lse = call(problem, **options)
    for _ in range(2):
        there = PLACES[place](problem.dout)
        with poisoned():
            found, lse = call(problem, **options, out=there.out)
        assert found is there.out
        torch.testing.assert_close((found, lse), (wanted, its_lse))
        there.check_neighbours()


@pytest.mark.default_backend
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("moved", [True, False])
def test_packed_window(causal: bool, moved: bool) -> None:
    device = target_device()
    keys = torch.tensor([0, 150, 151, 400], dtype=torch.int32, device=device)
    rows = torch.tensor([0, 100, 101, 300], dtype=torch.int32, device=device) if moved else keys
    q, k = (
        torch.randn(int(bounds[-1]), heads, 64, device=device).bfloat16()
        for bounds, heads in ((rows, 4), (keys, 2))
    )
    given = (q, k, k, rows, keys, 250, 250, None, make_scores("random", 400, 2))
    options: dict[str, Any] = {"is_causal": causal, "window_size": 50}
    wanted = dmattn.flash_dmattn_varlen_func(*given, **options)
    there = _rows(q)
    with poisoned():
        found = dmattn.flash_dmattn_varlen_func(*given, **options, out=there.out)
    assert found is there.out
    torch.testing.assert_close(found, wanted)
    there.check_neighbours()


@pytest.mark.default_backend
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [(256, 256, 256, 256), (200, 1, 133, 300)])
def test_stretches_are_put_together(head_dim: int, lengths: tuple[int, ...]) -> None:
    device, cuts = target_device(), [0, *itertools.accumulate(lengths)]
    q = torch.randn(2, cuts[-1], 4, head_dim, device=device).bfloat16()
    k, v = torch.randn(2, 2, cuts[-1], 2, head_dim, device=device).bfloat16().unbind()
    score = make_scores("random", 2, 2, cuts[-1])
    options: dict[str, Any] = {"is_causal": True, "window_size": 100, "return_state": True}
    outs, whole, states = [], torch.full_like(q, math.nan), [None, None]
    for start, stop in itertools.pairwise(cuts):
        now = slice(start, stop)
        given = (q[:, now], k[:, now], v[:, now], None, score[..., now])
        out, states[0] = dmattn.flash_dmattn_func(*given, **options, state=states[0])
        outs.append(out)
        part = whole[:, now]
        with poisoned():
            found = dmattn.flash_dmattn_func(*given, **options, state=states[1], out=part)
        assert found[0] is part and bool(whole[:, stop:].isnan().all())
        states[1] = found[1]
    torch.testing.assert_close(whole, torch.cat(outs, 1))


@pytest.mark.cuda
@pytest.mark.default_backend
@pytest.mark.parametrize("place", ["rows", "spaced", "heads_first"])
@pytest.mark.parametrize("mask", ["", "bk1k"])
def test_no_other_output_is_made(mask: str, place: str) -> None:
    """If rows start on 16 bytes, a call needs memory beside the output only for lse and a list."""
    problem = build(Case(4096, 2048, mask=mask, head_dim=128, wants=""))
    there = PLACES[place](problem.dout)

    def step() -> tuple[Tensor, ...]:
        return call(problem, out=there.out)[1:]

    assert peak_bytes_beside(step) < bytes_of(problem.dout) // 2


@pytest.mark.cuda
@pytest.mark.default_backend
def test_graph_replay() -> None:
    """A buffer that a graph writes anew at each replay."""
    problem = build(Case(200, 300, head_dim=128, causal=True, wants=""))
    there = _rows(problem.dout)
    call(problem, out=there.out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(problem, out=there.out)
    for _ in range(2):
        problem.q.normal_()
        there.out.fill_(math.nan)
        graph.replay()
        assert torch.equal(there.out, call(problem)[0])
    there.check_neighbours()
