"""Calls of a known kind skip the checks, so kinds must differ in all that the checks look at."""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seen_operators import Seen
from torch import Tensor

from dmattn import (
    KeySelection,
    arguments,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    known_calls,
    select_keys,
    sliding_window,
)
from dmattn.backends import registry
from dmattn.backends.cpu import CpuBackend
from dmattn.checks import check
from dmattn.problem import Problem, Results

HALF = torch.bfloat16


def operands(dtype: torch.dtype = torch.float32, grad: bool = False) -> dict[str, Any]:
    """Batch 2, 4 rows, 6 keys, 4 heads over 2, head_dim 8."""
    torch.manual_seed(0)
    made = {
        "query": torch.randn(2, 4, 4, 8, dtype=dtype),
        "key": torch.randn(2, 6, 2, 8, dtype=dtype),
        "value": torch.randn(2, 6, 2, 8, dtype=dtype),
        "attn_bias": torch.randn(2, 2, 1, 6, dtype=dtype),
    }
    return {name: t.requires_grad_(grad) for name, t in made.items()}


def padding() -> Tensor:
    return (torch.arange(6) < torch.tensor([[6], [4]]))[:, None, None]


Change = Callable[[dict[str, Any]], dict[str, Any]]


def to(name: str, value: Any) -> Change:
    return lambda call: call | {name: value}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """A change of an operand; none, if an earlier change has left the operand out."""
    return lambda call: call | ({} if call.get(name) is None else {name: change(call[name])})


def all_to(dtype: torch.dtype) -> Change:
    names = ("query", "key", "value", "attn_bias")
    return lambda call: call | {n: call[n].to(dtype) for n in names if call.get(n) is not None}


def chosen(
    heads: int = 2, is_causal: bool = True, query_len: int = 4, seed: int = 0
) -> KeySelection:
    """Three of six keys."""
    scores = torch.randn(2, heads, 6, generator=torch.Generator().manual_seed(seed))
    return select_keys(scores, 3, is_causal, query_len=query_len)


def over(selection: KeySelection) -> Change:
    return lambda call: call | {"selection": selection, "is_causal": True}


# Each makes one change to a call. Calls with different changes differ in something that is checked,
# or by which a backend is chosen.
CHANGES: dict[str, Change] = {
    "none": lambda call: call,
    "half": all_to(HALF),
    "double": all_to(torch.float64),
    "another dtype of key": changed("key", lambda t: t.to(HALF)),
    "float bias": changed("attn_bias", lambda t: t.float()),
    "wrong bias": changed("attn_bias", lambda t: t.to(torch.float16)),
    "bias with rows": changed("attn_bias", lambda t: t.repeat(1, 1, 4, 1)),
    "expanded bias": changed("attn_bias", lambda t: t.expand(-1, -1, 4, -1)),
    "bias of 3-D": changed("attn_bias", lambda t: t.squeeze(2)),
    "no bias": to("attn_bias", None),
    "gradient of the bias": changed("attn_bias", lambda t: t.detach().requires_grad_()),
    "gradient of the query": changed("query", lambda t: t.detach().requires_grad_()),
    "parameter": changed("query", torch.nn.Parameter),
    "head_dim first": changed("query", lambda t: t.mT.contiguous().mT),
    "negative view": changed("query", torch._neg_view),
    "short value": changed("value", lambda t: t[:, :5]),
    "narrow value": changed("value", lambda t: t[..., :4]),
    "3-D query": changed("query", lambda t: t[0]),
    "meta key": changed("key", lambda t: t.to("meta")),
    "meta": lambda call: {n: t.to("meta") if isinstance(t, Tensor) else t for n, t in call.items()},
    "sparse query": changed("query", lambda t: t.detach().to_sparse()),
    "mkldnn query": changed("query", lambda t: t.detach().float().to_mkldnn()),
    "list for a tensor": to("query", [1.0]),
    "padding": to("attn_mask", padding()),
    "padding of 2-D": to("attn_mask", padding()[:, 0, 0]),
    "padding of integers": to("attn_mask", padding()[:, 0, 0].long()),
    "mask of integers": to("attn_mask", padding().long()),
    "mask with rows": to("attn_mask", padding().repeat(1, 1, 4, 1)),
    "sinks": to("sinks", torch.ones(4)),
    "too many sinks": to("sinks", torch.ones(5)),
    "sinks of integers": to("sinks", torch.ones(4).int()),
    "scale": to("softmax_scale", 0.5),
    "scale of an int": to("softmax_scale", 1),
    "scale of a float": to("softmax_scale", 1.0),
    "scale of a bool": to("softmax_scale", True),
    "scale of a tensor": to("softmax_scale", torch.tensor(1.0)),
    "causal": to("is_causal", True),
    "causal, 1": to("is_causal", 1),
    "causal of numpy": to("is_causal", np.bool_(True)),
    "softcap": to("softcap", 2.0),
    "softcap of an int": to("softcap", 2),
    "softcap of a bool": to("softcap", False),
    "softcap of a list": to("softcap", [2.0]),
    "no softcap": to("softcap", None),
    "deterministic": to("deterministic", True),
    "deterministic, 1": to("deterministic", 1),
    "window": to("window_size", 3),
    "window of all": to("window_size", 6),
    "window of a float": to("window_size", 3.0),
    "window of a bool": to("window_size", True),
    "window of 1": to("window_size", 1),
    "window of numpy": to("window_size", np.int64(3)),
    "named backend": to("backend", "cpu"),
    "wrong backend": to("backend", "cuda"),
    "no backend": to("backend", 3),
    "selection": over(chosen()),
    "another selection": over(chosen(seed=1)),
    "selection of intervals": over(KeySelection.from_intervals(chosen().end, 4)),
    "selection for rows": over(chosen(query_len=6)),
    "selection of 4 heads": over(chosen(heads=4)),
    "selection of 3 heads": over(chosen(heads=3)),
    "selection of long ints": over(replace(chosen(), idx=chosen().idx.long())),
    "sliding": over(sliding_window(6, 3, 4)),
    "sliding, 1": over(replace(sliding_window(6, 3, 4), is_sliding=1)),  # type: ignore[arg-type]
    "sliding further": over(replace(sliding_window(6, 3, 4), window_size=4)),
    "not known to slide": over(replace(sliding_window(6, 3, 4), is_sliding=False)),
    "not known to keep its own": over(replace(sliding_window(6, 3, 4), keeps_own=False)),
    "lists that are said not to be causal": over(replace(chosen(), is_causal=False)),
    "selection beside a mask": lambda call: over(chosen())(call) | {"attn_mask": padding()},
    "causal selection where none is wanted": to("selection", chosen()),
    "selection that is not causal": to("selection", chosen(is_causal=False)),
    "list for a selection": to("selection", [1]),
    "out": lambda call: call | {"out": torch.zeros(2, 4, 4, 8)},
    "strided out": lambda call: call | {"out": torch.zeros(2, 4, 5, 8)[:, :, 1:]},
    "half out": lambda call: call | {"out": torch.zeros(2, 4, 4, 8, dtype=HALF)},
    "short out": lambda call: call | {"out": torch.zeros(2, 3, 4, 8)},
    "expanded out": lambda call: call | {"out": torch.zeros(2, 4, 1, 8).expand(2, 4, 4, 8)},
    "meta out": lambda call: call | {"out": torch.zeros(2, 4, 4, 8, device="meta")},
    "sparse out": lambda call: call | {"out": torch.zeros(2, 4, 4, 8).to_sparse()},
    "negative out": lambda call: call | {"out": torch._neg_view(torch.zeros(2, 4, 4, 8))},
    "learned out": lambda call: call | {"out": torch.zeros(2, 4, 4, 8, requires_grad=True)},
    "parameter as out": lambda call: (
        call | {"out": torch.nn.Parameter(torch.zeros(2, 4, 4, 8), requires_grad=False)}
    ),
    "query as out": lambda call: call | {"out": call["query"]},
    "list as out": to("out", [1.0]),
    "state asked for by 0": to("return_state", 0),
    "state asked for by None": to("return_state", None),
}


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "autocast": lambda: torch.autocast("cpu", HALF),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic": deterministic_algorithms,
}


class Watched(CpuBackend):
    """The CPU backend, which records the settings that reach it."""

    def __init__(self) -> None:
        self.settings: list[Any] = []

    def forward(self, problem: Problem, for_backward: bool = True) -> Results:
        self.settings.append((problem.settings, for_backward))
        return super().forward(problem, for_backward)


WATCHED = Watched()
Variant = tuple[tuple[str, ...], str]


def outcome(variant: Variant) -> tuple[Any, ...]:
    """All that a caller sees of a call, and what the backend saw."""
    call = operands()
    WATCHED.settings.clear()
    changes, mode = variant
    try:
        for name in changes:
            call = CHANGES[name](call)
        with MODES[mode]():
            out, lse = flash_dmattn_func(**call, return_lse=True)
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    grads: list[Tensor] = []
    if out.requires_grad and not out.is_meta:
        leaves = [t for t in call.values() if isinstance(t, Tensor) and t.requires_grad]
        grads = list(torch.autograd.grad(out.double().square().sum(), leaves))
    about = (out.dtype, out.shape, out.device, out.requires_grad, lse.dtype, lse.shape, len(grads))
    values = [t.detach().double() for t in (out, lse) if not t.is_meta]
    return (*about, tuple(WATCHED.settings), *values, *grads)


@pytest.fixture(autouse=True, scope="module")
def _watched() -> Iterator[None]:
    before = list(registry.BACKENDS)
    registry.BACKENDS[:] = [WATCHED if x.name == "cpu" else x for x in before]
    yield
    registry.BACKENDS[:] = before


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    if len(a) != len(b):
        return False
    pairs = list(zip(a, b, strict=True))
    tensors = [(x, y) for x, y in pairs if isinstance(x, Tensor) and isinstance(y, Tensor)]
    others = [(x, y) for x, y in pairs if not isinstance(x, Tensor) or not isinstance(y, Tensor)]
    return all(x is y or bool(x == y) for x, y in others) and all(
        torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in tensors
    )


def cold(variant: Variant) -> tuple[Any, ...]:
    known_calls.forget()
    return outcome(variant)


def test_a_known_call_is_told_from_all_others() -> None:
    """Whatever calls were made before, a call does what it would do as the first one."""
    variants: list[Variant] = [((name,), mode) for name in CHANGES for mode in MODES]
    wanted = {variant: cold(variant) for variant in variants}
    for order in (variants, variants[::-1]):
        known_calls.forget()
        for variant in order:  # modes that change nothing make known calls of the same kind
            assert same(outcome(variant), wanted[variant]), variant
    assert len(known_calls._known) > 30


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(sorted(CHANGES)), min_size=2, max_size=4).map(tuple),
            st.sampled_from(sorted(MODES)),
        ),
        min_size=3,
        max_size=6,
    )
)
def test_several_changes_at_once(variants: list[Variant]) -> None:
    wanted = [cold(variant) for variant in variants]
    known_calls.forget()
    for _ in range(2):
        for variant, found in zip(variants, wanted, strict=True):
            assert same(outcome(variant), found), variant


class Changing:
    """A number that may be another one at the next call, though it is the same object."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __float__(self) -> float:
        return self.now


def test_a_number_that_may_change_is_read_each_time() -> None:
    call, scale = operands(), Changing(0.5)
    for now in (0.5, 0.5, 2.0):
        scale.now = now
        found = flash_dmattn_func(**call, softmax_scale=scale)  # type: ignore[call-overload]
        assert torch.equal(found, flash_dmattn_func(**call, softmax_scale=now))


def test_a_state_is_refused_beside_a_selection_of_a_known_call() -> None:
    given = operands() | {"is_causal": True, "attn_mask": None}
    score = given["attn_bias"]
    six_rows = given | {"query": given["key"].repeat(1, 1, 2, 1)}
    _, state = flash_dmattn_func(**six_rows, window_size=3, return_state=True)
    selection = select_keys(score, 3, query_len=4)
    for _ in range(2):
        flash_dmattn_func(**given, selection=selection)
        with pytest.raises(ValueError, match=r"window_size: got None, wanted an int with state"):
            flash_dmattn_func(**given, selection=selection, state=state)


# Arguments that are no part of the kind: calls with them are never remembered, or they change
# nothing that is remembered.
NO_PART = {
    flash_dmattn_func: {
        *("selection", "state", "cu_seqlens"),  # the first two are looked at by their fields
        *("return_lse", "return_attn_probs"),
        "out",  # has a kind of its own, beside that of the call
    },
    flash_dmattn_varlen_func: {"window_size", "return_lse", "out"},
}


@pytest.mark.parametrize("function", NO_PART)
def test_every_argument_is_a_part_of_the_kind(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An argument that is added to a public function has to be part of the kind, or in NO_PART."""

    def collected(operands: Any, options: Any, packing: Any = ()) -> None:
        raise LookupError(*operands, *options, *packing)

    module = inspect.getmodule(function)
    monkeypatch.setattr(module, "kind_of_call", collected)
    names = set(inspect.signature(function).parameters) - NO_PART[function]
    with pytest.raises(LookupError) as found:
        function(**{name: name for name in names})
    assert set(found.value.args) - {None} == names


def packed_operands() -> dict[str, Any]:
    torch.manual_seed(0)
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    return {
        "query": torch.randn(5, 4, 8),
        "key": torch.randn(5, 2, 8),
        "value": torch.randn(5, 2, 8),
        "cu_seqlens_q": bounds,
        "cu_seqlens_k": None,
        "max_seqlen_q": 3,
        "max_seqlen_k": 3,
        "attn_bias": torch.randn(5, 2),
    }


PACKED_CHANGES: dict[str, Change] = {
    "none": lambda call: call,
    "two bounds": lambda call: call | {"cu_seqlens_k": call["cu_seqlens_q"].clone()},
    "long bounds": changed("cu_seqlens_q", lambda t: t.long()),
    "other bounds": to("cu_seqlens_q", torch.tensor([0, 3, 5], dtype=torch.int32)),
    "three sequences": to("cu_seqlens_q", torch.tensor([0, 2, 3, 5], dtype=torch.int32)),
    "strided bounds": changed("cu_seqlens_q", lambda t: t.repeat_interleave(2)[::2]),
    "meta bounds": changed("cu_seqlens_q", lambda t: t.to("meta")),
    "no bounds": to("cu_seqlens_q", None),
    "longer": to("max_seqlen_k", 4),
    "too short": to("max_seqlen_k", 2),
    "length of a float": to("max_seqlen_q", 3.0),
    "length of a bool": lambda call: call | {"max_seqlen_q": True},
    "length of numpy": to("max_seqlen_q", np.int64(3)),
    "bias with rows": to("attn_bias", torch.ones(5, 2, 3)),
    "no bias": to("attn_bias", None),
    "window": to("window_size", 2),
    "mask": to("attn_mask", torch.tensor([True, False, True, True, True])[:, None]),
    "dense": changed("query", lambda t: t[None]),
    "causal": to("is_causal", True),
    "narrow value": changed("value", lambda t: t[..., :4]),
    "out": lambda call: call | {"out": torch.zeros(5, 4, 8)},
    "strided out": lambda call: call | {"out": torch.zeros(5, 5, 8)[:, 1:]},
    "short out": lambda call: call | {"out": torch.zeros(4, 4, 8)},
    "query as out": lambda call: call | {"out": call["query"]},
}


def test_a_known_packed_call_is_told_from_all_others() -> None:
    def outcome(name: str) -> tuple[Any, ...]:
        try:
            return flash_dmattn_varlen_func(
                **PACKED_CHANGES[name](packed_operands()), return_lse=True
            )
        except Exception as error:
            return type(error), str(error).splitlines()[0]

    wanted = {}
    for name in PACKED_CHANGES:
        known_calls.forget()
        wanted[name] = outcome(name)
    known_calls.forget()
    for _ in range(2):
        for name, found in wanted.items():
            assert same(outcome(name), found), name
    assert len(known_calls._known) > 5


CALLS: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: flash_dmattn_func(**operands()),
    "with a gradient": lambda: flash_dmattn_func(**operands(grad=True)),
    "window": lambda: flash_dmattn_func(**operands(), is_causal=True, window_size=3),
    "window, scores of three dimensions": lambda: flash_dmattn_func(
        **changed("attn_bias", lambda bias: bias[:, :, 0])(operands()),
        is_causal=True,
        window_size=3,
    ),
    "packed": lambda: flash_dmattn_varlen_func(**packed_operands()),
    "out": lambda: flash_dmattn_func(**operands(), out=torch.zeros(2, 4, 4, 8)),
    "packed, out": lambda: flash_dmattn_varlen_func(**packed_operands(), out=torch.zeros(5, 4, 8)),
    "flex": lambda: flash_dmattn_func(**operands(), backend="flex"),
    "flex, packed": lambda: flash_dmattn_varlen_func(**packed_operands(), backend="flex"),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_checked_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(arguments, "check", lambda problem: (looks.append(1), check(problem)))
    first, second = CALLS[name](), CALLS[name]()
    assert torch.equal(first, second) and len(looks) == 1
    assert first.requires_grad == second.requires_grad == (name == "with a gradient")


def test_no_tensor_is_kept() -> None:
    for call in CALLS.values():
        call()

    def contents(value: Any) -> Iterator[Any]:
        if isinstance(value, (tuple, list)):
            for x in value:
                yield from contents(x)
        else:
            yield value

    kept = [x for entry in known_calls._known.items() for x in contents(entry)]
    assert len(known_calls._known) == 7 and not any(isinstance(x, Tensor) for x in kept)


def test_memory_is_bounded_whoever_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "MOST_KINDS", 5)
    wrong = []

    def work(seed: int) -> None:
        for i in range(40):
            q = torch.full((1, 1 + (i * seed) % 13, 1, 8), float(seed))
            out = flash_dmattn_func(q, q, q)
            if out.shape != q.shape or not torch.equal(out, q):
                wrong.append((seed, i))
            if len(known_calls._known) > 5 + 4:
                wrong.append("too many")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_another_list_of_backends_is_chosen_from_anew() -> None:
    call = operands()
    flash_dmattn_func(**call)
    other, before = Watched(), list(registry.BACKENDS)
    registry.BACKENDS.insert(0, other)
    try:
        flash_dmattn_func(**call)
    finally:
        registry.BACKENDS[:] = before
    assert len(other.settings) == 1


class Asked(CpuBackend):
    """Whether it takes a problem may change, so it is asked each time."""

    name = "asked"
    goes_by_kind = False

    def __init__(self) -> None:
        self.asked = 0

    def unsupported(self, problem: Problem) -> list[Exception]:
        self.asked += 1
        return []


def test_a_backend_that_does_not_go_by_the_kind_is_asked_each_time() -> None:
    backend, before = Asked(), list(registry.BACKENDS)
    registry.BACKENDS.insert(0, backend)
    try:
        flash_dmattn_func(**operands())
        first = backend.asked
        flash_dmattn_func(**operands())
        assert first > 0 and backend.asked == 2 * first
    finally:
        registry.BACKENDS[:] = before


class Wrapped(Tensor):
    """A subclass, which has to see the operator."""


def test_who_has_to_see_a_call_sees_a_known_one() -> None:
    call = operands()
    plain = flash_dmattn_func(**call)
    flash_dmattn_func(**call)
    with Seen() as seen:
        flash_dmattn_func(**call)
    assert "dmattn.fwd.default" in seen.names
    wrapped = flash_dmattn_func(**call | {"query": call["query"].as_subclass(Wrapped)})
    assert type(wrapped) is Wrapped
    names = ("query", "key", "value", "attn_bias")
    batch = [call[name][None].repeat(2, 1, 1, 1, 1) for name in names]

    def of(*given: Tensor) -> Tensor:
        return flash_dmattn_func(**dict(zip(names, given, strict=True)))

    torch.testing.assert_close(torch.func.vmap(of)(*batch), plain[None].repeat(2, 1, 1, 1, 1))


def test_second_derivatives_of_a_known_call_are_refused() -> None:
    for _ in range(2):
        call = operands(grad=True)
        out = flash_dmattn_func(**call)
        (dq,) = torch.autograd.grad(out.square().sum(), call["query"], create_graph=True)
        with pytest.raises(RuntimeError, match="first derivatives only"):
            dq.sum().backward()
