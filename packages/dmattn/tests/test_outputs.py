"""The caller's outputs (`out=`): what is written there, and what is refused before a write."""

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from torch_releases import TELLS_OF_ERRORS

from dmattn import (
    KeyState,
    dispatch,
    explain,
    explain_varlen,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    kept_keys,
    select_keys,
    sliding_window,
)
from dmattn.backends import registry
from dmattn.outputs import _share
from dmattn.problem import Problem

B, SQ, SK, H, HK, D = 2, 5, 7, 4, 2, 8
Q, K, V = torch.randn(B, SQ, H, D), torch.randn(B, SK, HK, D), torch.randn(B, SK, HK, D)
BIAS = torch.randn(B, HK, 1, SK)
PADDING = (torch.arange(SK) < torch.tensor([[SK], [4]]))[:, None, None]
NAN = math.nan


@dataclasses.dataclass
class Room:
    """An output within a larger buffer of NaN."""

    out: Tensor
    around: Tensor
    shape: tuple[int, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.shape = tuple(self.out.shape)

    def check_neighbours(self) -> None:
        """Assert that nothing but the output has been written."""
        kept = self.out.clone()
        self.out.fill_(NAN)
        assert bool(self.around.isnan().all())
        self.out.copy_(kept)


def rows_of_a_longer_one(*shape: int) -> Room:
    *batch, rows, heads, dim = shape
    around = torch.full((*batch, rows + 4, heads, dim), NAN)
    return Room(around[..., 3 : 3 + rows, :, :], around)


def heads_first(*shape: int) -> Room:
    *batch, rows, heads, dim = shape
    around = torch.full((*batch, heads + 1, rows + 2, dim + 3), NAN)
    return Room(around[..., 1:, 2:, 1 : 1 + dim].transpose(-3, -2), around)


def every_other_head(*shape: int) -> Room:
    *batch, rows, heads, dim = shape
    around = torch.full((*batch, rows, 2 * heads, dim), NAN)
    return Room(around[..., 1::2, :], around)


def by_itself(*shape: int) -> Room:
    around = torch.full(shape, NAN)
    return Room(around, around)


ROOMS = (by_itself, rows_of_a_longer_one, heads_first, every_other_head)
MakeRoom = Callable[..., Room]

MASKED: dict[str, Any] = {
    "query": Q,
    "key": K,
    "value": V,
    "is_causal": True,
    "attn_mask": PADDING,
    "attn_bias": BIAS,
}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "plain": (flash_dmattn_func, {"query": Q, "key": K, "value": V}),
    "mask, bias, causal": (flash_dmattn_func, MASKED),
    "window": (flash_dmattn_func, {**MASKED, "window_size": 3}),
    "probabilities": (
        flash_dmattn_func,
        {"query": Q, "key": K, "value": V, "return_attn_probs": True},
    ),
    "sinks": (flash_dmattn_func, {"query": Q, "key": K, "value": V, "sinks": torch.randn(H)}),
    "narrow values": (flash_dmattn_func, {"query": Q, "key": K, "value": V[..., :3]}),
    "wide values": (flash_dmattn_func, {"query": Q[..., :3], "key": K[..., :3], "value": V}),
    "one row": (flash_dmattn_func, {"query": Q[:, :1], "key": K, "value": V}),
    "no rows": (flash_dmattn_func, {"query": Q[:, :0], "key": K, "value": V}),
    "no keys": (flash_dmattn_func, {"query": Q, "key": K[:, :0], "value": V[:, :0]}),
    "rows before the first key": (
        flash_dmattn_func,
        {
            "query": Q.repeat(1, 2, 1, 1),
            "key": K,
            "value": V,
            "is_causal": True,
            "selection": sliding_window(SK, 3, 2 * SQ),
        },
    ),
    "rows before the first key, sinks": (
        flash_dmattn_func,
        {
            "query": Q.repeat(1, 2, 1, 1),
            "key": K,
            "value": V,
            "is_causal": True,
            "selection": sliding_window(SK, 3, 2 * SQ),
            "sinks": torch.randn(H),
        },
    ),
    "selection": (
        flash_dmattn_func,
        {
            "query": Q,
            "key": K,
            "value": V,
            "is_causal": True,
            "selection": select_keys(BIAS, 3, query_len=SQ),
        },
    ),
    "by flex": (flash_dmattn_func, {"query": Q, "key": K, "value": V, "backend": "flex"}),
}
BOUNDS = torch.tensor([0, 3, 7], dtype=torch.int32)
PACKED = {
    "query": torch.randn(7, H, D),
    "key": K[0],
    "value": V[0],
    "cu_seqlens_q": BOUNDS,
    "cu_seqlens_k": None,
    "max_seqlen_q": 4,
    "max_seqlen_k": 4,
    "attn_bias": BIAS[0, :, 0].T,
}
for _name, _options in {
    "packed": {},
    "packed, sinks": {"sinks": torch.randn(H)},
    "packed, narrow values": {"value": V[0, ..., :3]},
    "packed window": {"is_causal": True, "window_size": 2},
    "packed window without causality": {"window_size": 2},
    "packed window of moved rows": {
        "query": torch.randn(4, H, D),
        "cu_seqlens_q": torch.tensor([0, 2, 4]).int(),
        "cu_seqlens_k": BOUNDS,
        "is_causal": True,
        "window_size": 2,
    },
}.items():
    CALLS[_name] = flash_dmattn_varlen_func, {**PACKED, **_options}


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_returns_is_in_the_given_tensor(call: str, room: MakeRoom) -> None:
    """In a first call, and in calls of a known kind; the memory around the output is unchanged."""
    function, given = CALLS[call]
    wanted = function(**given, return_lse=True)
    for with_lse in (False, True, True):
        there = room(*wanted[0].shape)
        found = function(**given, return_lse=with_lse, out=there.out)
        results = found if isinstance(found, tuple) else (found,)
        assert results[0] is there.out and tuple(there.out.shape) == there.shape
        assert torch.equal(there.out, wanted[0])
        if with_lse:
            assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
        there.check_neighbours()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    given = [t.to(dtype) for t in (Q, K, V)]
    out = torch.empty(B, SQ, H, D, dtype=dtype)
    assert torch.equal(flash_dmattn_func(*given, out=out), flash_dmattn_func(*given))


def test_under_autocast_it_has_the_dtype_of_the_output() -> None:
    out = torch.empty(B, SQ, H, D, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_dmattn_func(Q, K, V, out=out) is out
        assert torch.equal(flash_dmattn_func(Q, K, V), out)
        with pytest.raises(TypeError, match=r"out: got dtype torch.float32, wanted torch.bfloat16"):
            flash_dmattn_func(Q, K, V, out=out.float())


@pytest.mark.parametrize("cu_seqlens", [None, [0, 11, 30, 90]])
def test_stretches_of_a_sequence_are_put_together_without_a_copy(
    cu_seqlens: list[int] | None,
) -> None:
    q, k, v = torch.randn(B, 90, H, D), torch.randn(B, 90, HK, D), torch.randn(B, 90, HK, D)
    score = torch.randn(B, HK, 1, 90)
    options: dict[str, Any] = {
        "is_causal": True,
        "window_size": 10,
        "cu_seqlens": cu_seqlens,
        "return_state": True,
    }
    whole, last = flash_dmattn_func(q, k, v, attn_bias=score, **options)
    out, state = torch.full_like(whole, NAN), None
    for start in range(0, 90, 30):
        now = slice(start, start + 30)
        part = out[:, now]
        given = (q[:, now], k[:, now], v[:, now], None, score[..., now])
        found, state = flash_dmattn_func(*given, **options, state=state, out=part)
        assert found is part and out[:, start + 30 :].isnan().all()
    torch.testing.assert_close(out, whole)
    assert state is not None and torch.equal(state.position, last.position)


def test_a_layer_may_use_the_memory_again() -> None:
    """The earlier values of `out` are overwritten, not added to."""
    out = torch.randn(B, SQ, H, D)
    for scale in (1.0, 2.0, 3.0):
        flash_dmattn_func(Q, K, V, softmax_scale=scale, out=out)
        assert torch.equal(out, flash_dmattn_func(Q, K, V, softmax_scale=scale))


# --- errors ---------------------------------------------------------------------------------------


class Subclass(Tensor):
    """Stands in for DTensor."""


def expanded() -> Tensor:
    return torch.zeros(1, SQ, H, D).expand(B, SQ, H, D)


def overlapping() -> Tensor:
    return torch.zeros(999).as_strided((B, SQ, H, D), (SQ * H * D, H * D - 1, D, 1))


GOOD = torch.zeros(B, SQ, H, D)
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a list": ([1.0], TypeError, r"out: got \[1.0\] \(list\), wanted a torch.Tensor or None"),
    "True": (True, TypeError, r"out: got True \(bool\), wanted a torch.Tensor or None"),
    "sparse": (GOOD.to_sparse(), ValueError, "out: got a tensor of layout torch.sparse_coo"),
    "dtype": (GOOD.double(), TypeError, "out: got dtype torch.float64, wanted torch.float32"),
    "device": (GOOD.to("meta"), ValueError, "out: got device meta, wanted cpu as query"),
    "rows": (GOOD[:, :4], ValueError, r"out: got shape \(2, 4, 4, 8\), wanted \(2, 5, 4, 8\)"),
    "flat": (GOOD.flatten(2), ValueError, r"out: got shape \(2, 5, 32\), wanted \(2, 5, 4, 8\)"),
    "last stride": (
        torch.zeros(B, SQ, H, 2 * D)[..., ::2],
        ValueError,
        "out: got stride 2 along head_dim, wanted 1",
    ),
    "expanded": (expanded(), ValueError, r"out: got strides \(0, 32, 8, 1\) for shape"),
    "overlapping": (overlapping(), ValueError, r"out: got strides \(160, 31, 8, 1\) .* overlap"),
    "learned": (
        GOOD.clone().requires_grad_(),
        ValueError,
        r"out: got a tensor that requires a gradient, wanted out.detach\(\)",
    ),
    "subclass": (GOOD.as_subclass(Subclass), TypeError, r"out: got a Subclass, .*to_local\(\)"),
    "negative": (torch._neg_view(GOOD), TypeError, "out: got a negative view, wanted ordinary"),
    "query": (Q, ValueError, "out: got memory that query lies in, wanted memory that no operand"),
}


@pytest.mark.parametrize("options", [{}, {"attn_bias": BIAS, "window_size": 3, "is_causal": True}])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_an_output(
    wrong: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors come before keys are chosen or anything is computed, also if the kind is known."""
    out, error, message = WRONG[wrong]
    flash_dmattn_func(Q, K, V, **options, out=torch.empty_like(GOOD))

    def nothing(*_: Any, **__: Any) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(dispatch.sinks, "forward", nothing)
    monkeypatch.setattr(kept_keys, "select", nothing)
    before = out.clone() if wrong in ("learned", "query") else None
    for _ in range(2):
        with pytest.raises(error, match=message):
            flash_dmattn_func(Q, K, V, **options, out=out)
        with pytest.raises(error, match=message):
            explain(Q, K, V, **options, out=out)
    assert before is None or torch.equal(before, out)


def test_packed_outputs_are_checked_as_well() -> None:
    for out, message in (
        (torch.empty(7, H, D - 1), r"out: got shape \(7, 4, 7\), wanted \(7, 4, 8\)"),
        (PACKED["query"], "out: got memory that query lies in"),
        (torch.empty(7, H, 1).expand(7, H, D), "out: got stride 0 along head_dim"),
    ):
        for options in ({}, {"window_size": 2, "is_causal": True}):
            with pytest.raises(ValueError, match=message):
                flash_dmattn_varlen_func(**PACKED, **options, out=out)
            with pytest.raises(ValueError, match=message):
                explain_varlen(**PACKED, **options, out=out)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_bias", "sinks"])
def test_no_operand_may_want_a_gradient(name: str) -> None:
    given = {"query": Q, "key": K, "value": V, "attn_bias": BIAS, "sinks": torch.randn(H)}
    out = torch.full_like(GOOD, NAN)
    for known in (False, True):
        if known:
            flash_dmattn_func(**given, out=torch.empty_like(out))
        learning = given | {name: given[name].clone().requires_grad_()}
        with pytest.raises(ValueError, match=f"out: got a tensor although {name} requires a grad"):
            flash_dmattn_func(**learning, out=out)
        assert out.isnan().all()
    with torch.no_grad():
        assert torch.equal(flash_dmattn_func(**learning, out=out), flash_dmattn_func(**given))


def test_what_is_read_beside_the_operands() -> None:
    """A state that requires a gradient, and a state or lists that lie in the output's memory."""
    score, out = torch.randn(B, HK, SK), torch.empty(B, SK, H, D)
    options: dict[str, Any] = {"is_causal": True, "window_size": SK}
    q, where = torch.randn(B, SK, H, D), "a tensor of state, selection or cu_seqlens"
    state = KeyState.of(out[:, :, :HK], out[:, :, HK:], score, SK)
    inside = KeyState(
        out[:, :, :HK], out[:, :, HK:], state.score, state.position, state.seen, state.has_start
    )
    learning = KeyState.of(K.clone().requires_grad_(), V, score, SK)
    selection = select_keys(score, 3)
    end = out.view(torch.int32).flatten()[: selection.end.numel()].view(selection.end.shape)
    chosen = dataclasses.replace(selection, end=end.copy_(selection.end))
    for _ in range(2):
        for wrong, message in (
            (inside, f"out: got memory that {where} lies in"),
            (learning, f"out: got a tensor although {where} requires a gradient"),
        ):
            with pytest.raises(ValueError, match=message):
                flash_dmattn_func(q, K, V, None, score, **options, state=wrong, out=out)
        with pytest.raises(ValueError, match=f"out: got memory that {where} lies in"):
            flash_dmattn_func(q, K, V, is_causal=True, selection=chosen, out=out)
        # Calls that are right, so that the kinds are known in the second round.
        flash_dmattn_func(q, K, V, None, score, **options, state=state, out=out)
        flash_dmattn_func(q, K, V, is_causal=True, selection=selection, out=out)
    bounds = torch.empty(7, H, D).view(torch.int32)
    packed = {**PACKED, "cu_seqlens_q": bounds.flatten()[:3].copy_(BOUNDS)}
    with pytest.raises(ValueError, match="out: got memory that a tensor of cu_seqlens_q and"):
        flash_dmattn_varlen_func(**packed, out=bounds.view(torch.float32))


def test_inference_tensors() -> None:
    with torch.inference_mode():
        out = torch.empty_like(GOOD)
        for _ in range(2):
            assert flash_dmattn_func(Q, K, V, out=out) is out
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out: got a tensor made under torch.inference_mode"):
            flash_dmattn_func(Q, K, V, out=out)


def test_compilers_and_transforms_are_told_what_to_do_instead() -> None:
    def attend(query: Tensor) -> Tensor:
        return flash_dmattn_func(query, K, V, out=torch.empty_like(query))

    refused = "out: got a tensor under torch.compile, wanted None there"
    refused = refused if TELLS_OF_ERRORS else "Observed exception"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=refused):
        torch.compile(attend, backend="eager", fullgraph=True)(Q)
    # Without fullgraph the call is left out of the graph, as by torch.compiler.disable.
    assert torch.equal(torch.compile(attend, backend="eager")(Q), flash_dmattn_func(Q, K, V))
    within = r"out: got a tensor within a transform of torch.func, wanted None"
    with pytest.raises(ValueError, match=within):
        torch.func.vmap(attend)(Q[None])
    with pytest.raises(ValueError, match=within):
        torch.func.grad(lambda q: attend(q).sum())(Q)
    with pytest.raises(TypeError, match=r"out: got a tensor beside key, which is a Subclass"):
        flash_dmattn_func(Q, K.as_subclass(Subclass), V, out=torch.empty_like(GOOD))


def test_modes_and_devices_without_values() -> None:
    out = torch.empty_like(GOOD)
    with FlopCounterMode(display=False):
        assert flash_dmattn_func(Q, K, V, out=out) is out
    assert torch.equal(out, flash_dmattn_func(Q, K, V))
    q, k, v, out = (t.to("meta") for t in (Q, K, V, GOOD))
    assert flash_dmattn_func(q, k, v, out=out) is out


def test_autograd_notices_that_a_saved_tensor_is_overwritten() -> None:
    weight, out = torch.randn_like(GOOD).requires_grad_(), torch.randn_like(GOOD)
    total = (weight * out).sum()
    flash_dmattn_func(Q, K, V, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


# --- memory ---------------------------------------------------------------------------------------


def test_slices_of_one_buffer() -> None:
    """Operands and output are interleaved slices of the rows of one buffer."""
    buffer = torch.randn(B, SK, 2 * H + 2 * HK, D)
    q, k, v, out = buffer.split((H, HK, HK, H), 2)
    score = torch.randn(B, HK, 1, SK)
    wanted = flash_dmattn_func(q, k, v, None, score, is_causal=True)
    for _ in range(2):
        out.fill_(NAN)
        flash_dmattn_func(q, k, v, None, score, is_causal=True, out=out)
        assert torch.equal(out, wanted)
        last = flash_dmattn_func(q[:, -1:], k, v, None, score, out=out[:, -1:])
        torch.testing.assert_close(last, wanted[:, -1:])
    for wrong in (buffer[:, :, :H], buffer[:, :, 1 : 1 + H], buffer[:, :, H + 2 * HK - 1 : -1]):
        with pytest.raises(ValueError, match=r"out: got memory that (query|value) lies in"):
            flash_dmattn_func(q, k, v, out=wrong)


def test_memory_of_another_library() -> None:
    """Two tensors that have storages of their own, but share memory of NumPy."""
    numbers = torch.randn(B, SQ + 3, H, D).numpy()
    q, out = torch.from_numpy(numbers[:, :SQ]), torch.from_numpy(numbers[:, 1 : SQ + 1])
    with pytest.raises(ValueError, match="out: got memory that query lies in"):
        flash_dmattn_func(q, K, V, out=out)


def bytes_of(t: Tensor) -> set[int]:
    places = torch.arange(t.untyped_storage().nbytes() // 4)
    seen = places.as_strided(t.shape, t.stride(), t.storage_offset())
    return set(seen.flatten().tolist())


def test_shared_memory_is_told_exactly_for_slices() -> None:
    """For slices and transposes of one buffer, also of a single row, whose stride says nothing."""
    rng = random.Random(0)

    def some_slice(t: Tensor) -> Tensor:
        for dim in range(t.dim()):
            start = rng.randrange(t.shape[dim])
            stop = rng.randint(start + 1, t.shape[dim])
            t = t.narrow(dim, start, stop - start)
        return t.transpose(rng.randrange(t.dim()), rng.randrange(t.dim()))

    found = set()
    for shape in ((3, 4, 5, 3), (2, 3, 2, 4), (6, 7)):
        buffer = torch.zeros(shape)
        for _ in range(300):
            a, b = some_slice(buffer), some_slice(buffer)
            wanted = bool(bytes_of(a) & bytes_of(b))
            assert _share(a, b) == wanted, (a.shape, a.stride(), b.shape, b.stride())
            found.add(wanted)
    assert found == {True, False}


def test_shared_memory_is_never_overlooked() -> None:
    """For any strides, for which sharing may be reported where there is none."""
    rng, buffer = random.Random(0), torch.zeros(400)

    def any_view() -> Tensor:
        dims = rng.randrange(1, 4)
        sizes = [rng.randint(1, 4) for _ in range(dims)]
        strides = [rng.randrange(0, 30) for _ in range(dims)]
        return buffer.as_strided(sizes, strides, rng.randrange(0, 100))

    for _ in range(1000):
        a, b = any_view(), any_view()
        assert _share(a, b) or not bytes_of(a) & bytes_of(b)


# --- what explain says ----------------------------------------------------------------------------


def test_explain_says_where_it_is_copied() -> None:
    assert "slow: out is filled by a copy: backend 'cpu'" in explain(Q, K, V, out=GOOD.clone())
    out = torch.empty(7, H, D)
    assert "slow: out is filled by a copy" in explain_varlen(**PACKED, out=out)
    windowed = explain_varlen(**PACKED, is_causal=True, window_size=2, out=out)
    assert "slow: out is filled by a copy" in windowed

    def notes(out: Tensor, head_dim: int = 64, rows: int = SQ) -> list[str]:
        q, k = out.new_empty(B, rows, H, head_dim), out.new_empty(B, SK, HK, head_dim)
        return registry.named("cuda").slow_outputs(Problem(q, k, k), out)

    around = torch.empty(B, SQ, H, 68).bfloat16()
    assert notes(around[..., :64]) == [
        "out has rows that do not start on 16 bytes, so it is filled by a copy"
    ]
    assert notes(around[:, :1, :, :64], rows=1) == []
    assert notes(torch.empty(B, SQ, 2 * H, 64).bfloat16()[:, :, ::2]) == []
    for dim in (60, 64):
        (note,) = notes(torch.empty(B, SQ, H, 60).bfloat16(), head_dim=dim)
        assert "head_dim is padded" in note
