"""The CPU backend: lists of keys, and NaN and INF in keys that no row keeps."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from attention_cases import Case, assert_close_to_oracle, cases, random_case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dmattn import (
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    packed_documents,
    select_keys,
    sliding_window,
)
from dmattn.backends.cpu import attention as cpu
from dmattn.backends.cpu import key_blocks
from dmattn.problem import Gradients, Needs, Packing, Problem, Results
from dmattn.reference import reference_gradients

ALL = Needs(True, True, True, True)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LENGTHS = (0, 1, 127, 128, 129)
SEQLEN = 150  # two blocks of rows with lists of their own


@pytest.fixture(params=["large blocks", "small blocks"])
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that hold these small problems whole, and ones that divide them."""
    if request.param == "small blocks":
        monkeypatch.setattr(key_blocks, "_KEYS_PER_BLOCK", 32)
        monkeypatch.setattr(key_blocks, "_LISTED_KEYS_PER_BLOCK", 32)
        monkeypatch.setattr(key_blocks, "_BLOCK_ELEMENTS", 1024)


# NaN and INF


class Isolation(NamedTuple):
    """A call of q, k, v and a bias per key, and which pairs of rows and keys it keeps."""

    call: Callable[..., tuple[Tensor, Tensor]]
    keep: Tensor  # bool, broadcasts to (1, 4, SEQLEN, SEQLEN)
    bias: Tensor  # (1, 2, 1, SEQLEN)


def dense_call(**named: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True, **named)
        return out, lse

    return call


def packed_call(cu_seqlens: Tensor, **named: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        packing = (cu_seqlens, cu_seqlens, SEQLEN, SEQLEN)
        out, lse = flash_dmattn_varlen_func(
            *(q[0], k[0], v[0], *packing),
            attn_bias=bias[0, :, 0].T,
            is_causal=True,
            return_lse=True,
            **named,
        )
        return out[None], lse[None]

    return call


def masked(kind: str, bias: Tensor) -> Isolation:
    if kind == "row mask":
        mask = torch.rand(1, 2, SEQLEN, SEQLEN) < 0.1
        return Isolation(dense_call(attn_mask=mask), mask.repeat_interleave(2, 1), bias)
    if kind == "causal":
        keep = torch.ones(1, 1, SEQLEN, SEQLEN, dtype=torch.bool).tril()
        return Isolation(dense_call(is_causal=True), keep, bias)
    if kind == "bias of -inf":
        bias = bias.masked_fill(torch.rand(bias.shape) < 0.3, -math.inf)
        keep = (bias != -math.inf).repeat_interleave(2, 1)
        return Isolation(dense_call(softcap=2.0), keep, bias)
    share = {"few kept": 0.1, "half kept": 0.5, "most kept": 0.9}[kind]
    mask = torch.rand(1, 4, 1, SEQLEN) < share
    return Isolation(dense_call(attn_mask=mask), mask, bias)


def selected(kind: str, bias: Tensor) -> Isolation:
    if kind == "sliding window":
        selection = sliding_window(SEQLEN, 9)
        call = dense_call(is_causal=True, selection=selection)
        return Isolation(call, selection.to_mask(), bias)
    is_causal = kind == "window"
    keep = select_keys(bias, 20, is_causal).to_mask().repeat_interleave(2, 1)
    return Isolation(dense_call(is_causal=is_causal, window_size=20), keep, bias)


def with_documents(kind: str, bias: Tensor) -> Isolation:
    bounds = torch.tensor([0, 40, 41, 41, SEQLEN], dtype=torch.int32)
    number = torch.searchsorted(bounds, torch.arange(SEQLEN), right=True)
    keep = (number[:, None] == number).tril()[None, None]
    if kind == "documents":
        call = dense_call(is_causal=True, selection=packed_documents(bounds))
        return Isolation(call, keep, bias)
    if kind == "packed":
        return Isolation(packed_call(bounds), keep, bias)
    keep = select_keys(bias, 20, cu_seqlens=bounds).to_mask().repeat_interleave(2, 1)
    return Isolation(packed_call(bounds, window_size=20), keep, bias)


KINDS = {
    "few kept": masked,
    "half kept": masked,
    "most kept": masked,
    "causal": masked,
    "row mask": masked,
    "bias of -inf": masked,
    "window": selected,
    "window, not causal": selected,
    "sliding window": selected,
    "documents": with_documents,
    "packed": with_documents,
    "packed, window": with_documents,
}


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("poisoned", ["rows", "keys", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_kept_has_no_effect(kind: str, poisoned: str, value: float) -> None:
    """NaN and INF reach the rows that keep them, and keys that such rows keep, and nothing else."""
    torch.manual_seed(0)
    case = KINDS[kind](kind, torch.randn(1, 2, 1, SEQLEN, dtype=torch.float64))
    keep = case.keep.expand(1, 4, SEQLEN, SEQLEN)
    bad_row, bad_key = (torch.zeros(SEQLEN, dtype=torch.bool) for _ in range(2))
    if poisoned in ("rows", "both"):
        bad_row[[3, 60, 149]] = True
    if poisoned in ("keys", "both"):
        bad_key[[20, 50, 140]] = True
    touched = bad_row | (keep & bad_key).any(-1)  # (1, 4, S)
    reached = bad_key | (keep & touched[..., None]).any(2)  # (1, 4, S)
    reached_key = torch.unflatten(reached, 1, (2, 2)).any(2)

    shapes = ((1, SEQLEN, 4, 8), (1, SEQLEN, 2, 8), (1, SEQLEN, 2, 8), (1, SEQLEN, 4, 8))
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    dlse = torch.randn(1, 4, SEQLEN, dtype=torch.float64)

    def results(fill: float) -> list[Tensor]:
        q, k, v, dout = (t.clone() for t in given)
        for t, bad in ((q, bad_row), (k, bad_key), (v, bad_key), (dout, bad_row)):
            t[:, bad] = fill
        leaves = [t.requires_grad_() for t in (q, k, v)]
        leaves.append(case.bias.clone().requires_grad_())
        out, lse = case.call(*leaves)
        return [out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))]

    clean, dirty = results(0.0), results(value)
    rows, keys = ~touched.transpose(1, 2), ~reached_key.transpose(1, 2)  # (1, S, heads)
    unaffected = (rows, ~touched, rows, keys, keys, ~reached_key[:, :, None])
    for name, a, b, where in zip(
        ("out", "lse", "dq", "dk", "dv", "dbias"), clean, dirty, unaffected, strict=True
    ):
        torch.testing.assert_close(b[where], a[where], rtol=1e-12, atol=1e-12, msg=name)
    if poisoned != "keys" or keep[..., bad_key].any():
        assert not torch.isfinite(dirty[0][touched.transpose(1, 2)]).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 30, 74, 76, 99])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unused_places_of_a_buffer(dtype: torch.dtype, length: int, is_causal: bool) -> None:
    """Keys that a mask hides have no effect, whatever their number and whatever they hold."""
    case = random_case(1, 3, 100, dtype=dtype, is_causal=is_causal)
    mask = (torch.arange(100) < length)[None, None, None]
    case.key[:, length:] = math.nan
    case.value[:, length:] = math.inf
    leaves = replace(case, attn_mask=mask).requiring_grad()
    out, lse = flash_dmattn_func(*leaves.inputs, **case.options, return_lse=True)
    grads = torch.autograd.grad(
        (out, lse), (leaves.query, leaves.key, leaves.value), (case.dout, case.dlse)
    )
    for grad in grads[1:]:
        assert not grad[:, length:].any()

    case.key, case.value = case.key[:, :length], case.value[:, :length]
    case.options = {"is_causal": False}
    if is_causal:  # rows are aligned to the end of the buffer, not of its used part
        case.attn_mask = torch.ones(3, 100, dtype=torch.bool).tril(97)[None, None, :, :length]
    oracle, plain = case.reference(), case.reference(dtype)
    got = (out, lse, grads[0], grads[1][:, :length], grads[2][:, :length])
    for name, value in zip(("out", "lse", "dq", "dk", "dv"), got, strict=True):
        expected = getattr(oracle, name), getattr(plain, name)
        assert_close_to_oracle(name, value.detach(), *expected, dtype)


def test_sums_that_overflow_are_no_reason_for_other_results() -> None:
    """The quick check for NaN and INF adds all numbers up, where finite numbers may overflow."""
    case = random_case(1, 16, 30, dtype=torch.float32, mask_shape=(1, 1, 16, 30))
    case.value = torch.full_like(case.value, 3e36)
    out = flash_dmattn_func(*case.inputs)
    assert not torch.isfinite(out.sum())
    torch.testing.assert_close(out, torch.full_like(out, 3e36))


# Lists of keys


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operators += 1
        return func(*args, **(kwargs or {}))


def changed(problem: Problem, **fields: Any) -> Problem:
    """The problem with other values of these fields."""
    old = {name: getattr(problem, name) for name in Problem.__annotations__}
    return Problem(**{**old, **fields})


def list_problem(seqlen: int, window: int, dtype: torch.dtype = torch.float32) -> Problem:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, seqlen, 1, 8, dtype=dtype) for _ in range(3))
    bias = torch.randn(1, 1, 1, seqlen, dtype=dtype)
    lists = select_keys(bias, window).lists
    return Problem(q, k, v, None, bias, softmax_scale=0.3, is_causal=True, key_lists=lists)


def test_short_lists_are_computed_together() -> None:
    """The number of operations follows the work, not the number of lists.

    Every operation on the CPU starts and joins threads, which is slow while others use the cores.
    """
    counts = []
    for seqlen in (256, 4096):
        problem = list_problem(seqlen, 32)
        with Count() as count:
            cpu.backward(problem, cpu.forward(problem), problem.q, None, ALL)
        counts.append(count.operators)
    assert counts[1] == counts[0]


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("seqlen_q", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_listed_keys(dtype: torch.dtype, seqlen_q: int, heads: int) -> None:
    """One list for all heads, for each key head, and for each query head."""
    case = random_case(
        2, seqlen_q, 300, dtype=dtype, bias_shape=(2, heads, 1, 300), is_causal=True, softcap=2.0
    )
    assert case.attn_bias is not None
    selection = select_keys(case.attn_bias, 40, query_len=seqlen_q)
    leaves = case.requiring_grad()
    out, lse = flash_dmattn_func(
        *leaves.inputs, **case.options, selection=selection, return_lse=True
    )
    assert leaves.attn_bias is not None
    wanted = (leaves.query, leaves.key, leaves.value, leaves.attn_bias)
    grads = torch.autograd.grad((out, lse), wanted, (case.dout, case.dlse))
    case.attn_mask = selection.to_mask()
    oracle, plain = case.reference(), case.reference(dtype)
    summed = [1, 1, 1, 1, 1, 4 // heads * seqlen_q]
    names = ("out", "lse", "dq", "dk", "dv", "dbias")
    for name, got, rows in zip(names, (out, lse, *grads), summed, strict=True):
        expected = getattr(oracle, name), getattr(plain, name)
        assert_close_to_oracle(name, got.detach(), *expected, dtype, rows)


def test_wrong_lists_find_only_keys_that_exist() -> None:
    problem = list_problem(200, 32)
    assert problem.key_lists is not None
    wrong = problem.key_lists.idx.clone()
    wrong[..., ::2] = 1_000_000
    wrong[..., 1::4] = -5
    problem = changed(problem, key_lists=problem.key_lists._replace(idx=wrong))
    results = cpu.forward(problem)
    grads = cpu.backward(problem, results, problem.q, None, ALL)
    assert all(torch.isfinite(t).all() for t in (results.out, *grads[:4]))


# Problems as the backend takes them


def packed_problem(dtype: torch.dtype, per_key: bool, is_causal: bool) -> Problem:
    """Sequences of (rows, keys): (3, 0), (0, 5), (130, 129), (7, 9)."""
    torch.manual_seed(1)
    bounds_q, bounds_k = (0, 3, 3, 133, 140), (0, 0, 5, 134, 143)
    shape = (2, 143) if per_key else (4, 140, 129)
    return Problem(
        torch.randn(140, 4, 8, dtype=dtype),
        torch.randn(143, 2, 8, dtype=dtype),
        torch.randn(143, 2, 8, dtype=dtype),
        torch.rand(shape) < 0.6,
        torch.randn(shape, dtype=dtype),
        softmax_scale=0.4,
        is_causal=is_causal,
        softcap=3.0,
        packing=Packing(torch.tensor(bounds_q), torch.tensor(bounds_k), 130, 129),
    )


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("per_key", [False, True])
def test_packed_sequences(per_key: bool, is_causal: bool) -> None:
    problem = packed_problem(torch.float64, per_key, is_causal)
    results = cpu.forward(problem)
    dout, dlse = torch.randn_like(results.out), torch.randn_like(results.lse)
    grads = cpu.backward(problem, results, dout, dlse, ALL)
    assert problem.packing is not None
    bounds = (problem.packing.cu_seqlens_q.tolist(), problem.packing.cu_seqlens_k.tolist())
    for (a, b), (c, d) in zip(*(pairwise(x) for x in bounds), strict=True):
        mask, bias = (
            t[None, :, None, c:d] if per_key else t[None, :, a:b, : d - c]
            for t in (problem.mask, problem.bias)
            if t is not None
        )
        oracle = reference_gradients(
            *(problem.q[None, a:b], problem.k[None, c:d], problem.v[None, c:d], mask, bias),
            *(0.4, is_causal, 3.0),
            dout=dout[None, a:b],
            dlse=dlse[None, :, a:b],
        )
        target = grads.bias[None, :, None, c:d] if per_key else grads.bias[None, :, a:b, : d - c]
        for got, expected in (
            (results.out[None, a:b], oracle.out),
            (results.lse[None, :, a:b], oracle.lse),
            (grads.q[None, a:b], oracle.dq),
            (grads.k[None, c:d], oracle.dk),
            (grads.v[None, c:d], oracle.dv),
            (target, oracle.dbias),
        ):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        if not per_key:
            assert not grads.bias[:, a:b, d - c :].any()


@pytest.mark.parametrize(
    ("bounds", "longest", "named"),
    [
        ([1, 140], 140, "cu_seqlens_q"),
        ([0, 139], 140, "cu_seqlens_q"),
        ([0, 90, 80, 140], 140, "cu_seqlens_q"),
        ([0, 100, 140], 99, "max_seqlen_q"),
    ],
)
def test_boundaries_are_checked(bounds: list[int], longest: int, named: str) -> None:
    problem = packed_problem(torch.float32, True, False)
    assert problem.packing is not None
    packing = problem.packing._replace(cu_seqlens_q=torch.tensor(bounds), max_seqlen_q=longest)
    with pytest.raises(ValueError, match=named):
        cpu.forward(changed(problem, packing=packing))


def some_problem(kind: str) -> Problem:
    if kind == "packed":
        return packed_problem(torch.float64, False, True)
    if kind == "lists":
        return list_problem(140, 20, torch.float64)
    mask_shape = (2, 1, 1, 11) if kind == "key mask" else (1, 4, 9, 11)
    bias_shape = (1, 4, 1, 11) if kind == "key mask" else (2, 2, 9, 1)
    case = random_case(mask_shape=mask_shape, bias_shape=bias_shape)
    return Problem(*case.inputs, softmax_scale=0.3, is_causal=True)


@pytest.mark.parametrize("kind", ["dense", "key mask", "packed", "lists"])
@pytest.mark.parametrize("number", range(16))
def test_needed_gradients_alone(number: int, kind: str) -> None:
    """Any subset of the gradients equals them in a call for all; the others have shape (0,)."""
    problem = some_problem(kind)
    results = cpu.forward(problem)
    dout, dlse = torch.ones_like(results.out), torch.ones_like(results.lse)
    expected = cpu.backward(problem, results, dout, dlse, ALL)
    needs = Needs(*(bool(number & 1 << i) for i in range(4)))
    grads = cpu.backward(problem, results, dout, dlse, needs)
    for got, whole, need in zip(grads[:4], expected, needs, strict=False):
        if need:
            assert torch.equal(got, whole)
        else:
            assert got.shape == (0,)


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("kind", ["dense", "key mask", "packed", "lists"])
def test_gradients_are_derivatives(kind: str, softcap: float) -> None:
    """A step along a random direction changes the results as the gradients say (float64)."""
    problem = changed(some_problem(kind), softcap=softcap)
    results = cpu.forward(problem)
    dout, dlse = torch.randn_like(results.out), torch.randn_like(results.lse)
    grads = cpu.backward(problem, results, dout, dlse, ALL)
    assert problem.bias is not None
    operands = {"q": problem.q, "k": problem.k, "v": problem.v, "bias": problem.bias}

    def objective(found: Results) -> Tensor:
        lse = found.lse.masked_fill(found.lse == -math.inf, 0.0)
        return (found.out * dout).sum() + (lse * dlse).sum()

    step = 1e-6
    for name, operand in operands.items():
        direction = torch.randn_like(operand)
        up, down = (
            objective(cpu.forward(changed(problem, **{name: operand + sign * step * direction})))
            for sign in (1, -1)
        )
        slope = (getattr(grads, name) * direction).sum()
        torch.testing.assert_close((up - down) / (2 * step), slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_key_masks_of_all_shares(seqlen_q: int, seqlen_k: int, is_causal: bool) -> None:
    """Masks turned into lists, and masks applied to slices, with a bias near float32's maximum."""
    for share in (0.0, 0.3, 0.95, 1.0):
        case = random_case(
            1, seqlen_q, seqlen_k, dtype=torch.float32, bias_shape=(1, 1, 1, seqlen_k)
        )
        case.attn_mask = torch.rand(1, 4, 1, seqlen_k) < share
        case.attn_bias = torch.where(torch.rand(1, 1, 1, seqlen_k) < 0.5, 3e38, 2.9e38)
        case.options = {"is_causal": is_causal, "softmax_scale": 8**-0.5}
        # No gradient of lse: torch computes that of logsumexp by exp(x - lse), which is wrong here,
        # where x is so large that rounding removes log(sum) from lse.
        case.dlse = torch.zeros_like(case.dlse)
        problem = Problem(*case.inputs, **case.options)
        results = cpu.forward(problem)
        grads = cpu.backward(problem, results, case.dout, case.dlse, ALL)
        oracle, plain = case.reference(), case.reference(torch.float32)
        got = dict(zip(("dq", "dk", "dv", "dbias"), grads[:4], strict=True))
        for name, value in {"out": results.out, "lse": results.lse, **got}.items():
            expected = getattr(oracle, name), getattr(plain, name)
            rows = 4 * seqlen_q if name == "dbias" else 1
            assert_close_to_oracle(name, value, *expected, torch.float32, rows)


@given(case=cases(), block=st.sampled_from((8, 100)))
@settings(max_examples=100)
def test_exact_blocks_give_the_same(case: Case, block: int) -> None:
    """Blocks are computed as if they contained NaN or INF, though they do not."""
    problem = Problem(*case.inputs, **{**case.options, "softmax_scale": 0.5})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_blocks, "_KEYS_PER_BLOCK", block)
        patch.setattr(key_blocks, "_LISTED_KEYS_PER_BLOCK", block)
        found = both(problem, case.dout, case.dlse)
        patch.setattr(cpu, "_all_finite", lambda *_: False)
        exact = both(problem, case.dout, case.dlse)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(problem.q.dtype, 1e-4)
    for a, b in zip((*found[0], *found[1][:4]), (*exact[0], *exact[1][:4]), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def both(problem: Problem, dout: Tensor, dlse: Tensor) -> tuple[Results, Gradients]:
    results = cpu.forward(problem)
    return results, cpu.backward(problem, results, dout, dlse, ALL)
