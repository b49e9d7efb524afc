"""Prepared calls of a backend do what the first call of their kind did."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from seen_operators import Seen
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dmattn import (
    KeySelection,
    flash_dmattn_func,
    known_calls,
    select_keys,
    sliding_window,
)
from dmattn.backends import registry
from dmattn.backends.base import Operands, Prepared
from dmattn.backends.cpu import CpuBackend
from dmattn.problem import Needs, Problem, Results
from dmattn.reference import reference_attention
from dmattn.utils.mask import top_window_mask


class PreparedByCpu(Prepared):
    """Computes by the CPU backend, and records its calls."""

    def __init__(self, backend: str, problem: Problem) -> None:
        super().__init__(backend, problem)
        self.forwards: list[bool] = []
        self.needs: list[tuple[bool, ...]] = []

    def forward(
        self, operands: Operands, for_backward: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        self.forwards.append(for_backward)
        problem = self.problem(operands)
        if out is not None:
            return CpuBackend().forward_into(problem, out, for_backward)
        return CpuBackend().forward(problem, for_backward)

    def backward(
        self,
        operands: Operands,
        results: tuple[Tensor, Tensor, Tensor | None],
        dout: Tensor,
        dlse: Tensor | None,
        needs: tuple[bool, bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        self.needs.append(needs)
        problem = self.problem(operands)
        grads = CpuBackend().backward(problem, Results(*results), dout, dlse, Needs(*needs))
        dq, dk, dv, dbias = (
            grad if need else None for grad, need in zip(grads, needs, strict=False)
        )
        return dq, dk, dv, dbias


class Preparing(CpuBackend):
    def prepare(self, problem: Problem) -> Prepared | None:
        others = problem.sinks is not None or problem.packing is not None
        return None if others else PreparedByCpu(self.name, problem)


@pytest.fixture(autouse=True)
def _preparing() -> Iterator[None]:
    before = list(registry.BACKENDS)
    registry.BACKENDS[:] = [Preparing() if x.name == "cpu" else x for x in before]
    yield
    registry.BACKENDS[:] = before


def prepared() -> PreparedByCpu:
    """The prepared call of the only kind that is known."""
    (known,) = known_calls._known.values()
    assert isinstance(known.prepared, PreparedByCpu)
    return known.prepared


def leaves(wanted: str = "qkvb") -> list[Tensor]:
    """Query, key, value and a bias, which require a gradient if they are wanted."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 4, 4, 8), "k": (2, 6, 2, 8), "v": (2, 6, 2, 8), "b": (2, 2, 1, 6)}
    return [
        torch.randn(shape, generator=generator).requires_grad_(name in wanted)
        for name, shape in shapes.items()
    ]


def attend(*given: Tensor, **options: Any) -> Any:
    q, k, v, bias = given
    mask = torch.tensor([True, True, False, True, True, True])[None, None, None]
    return flash_dmattn_func(q, k, v, mask, bias, is_causal=True, **options)


Act = Callable[[list[Tensor]], Any]


def twice(act: Act, wanted: str = "qkvb") -> Any:
    """Make two calls of one kind, assert that both give the same, and return the results."""
    first, second = act(leaves(wanted)), act(leaves(wanted))
    for x, y in zip(first, second, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)
    assert len(prepared().forwards) >= 1
    return second


@pytest.mark.parametrize("wanted", ["q", "b", "kv", "qkv", "qkvb"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_are_those_of_the_first_call(wanted: str, with_lse: bool) -> None:
    def act(given: list[Tensor]) -> list[Tensor]:
        found = attend(*given, return_lse=with_lse)
        total = found[0].square().sum() + found[1].sin().sum() if with_lse else found.square().sum()
        inputs = [t for t in given if t.requires_grad]
        out = found[0] if with_lse else found
        return [out.detach(), *torch.autograd.grad(total, inputs)]

    twice(act, wanted)
    assert prepared().forwards == [True]
    assert prepared().needs == [tuple(name in wanted for name in "qkvb")]


def test_without_gradients_nothing_is_kept_for_them() -> None:
    def act(given: list[Tensor]) -> Any:
        with torch.no_grad():
            return attend(*given, return_lse=True)

    out, lse = twice(act)
    assert prepared().forwards == [False] and not out.requires_grad and not lse.requires_grad
    with torch.inference_mode():
        assert torch.equal(attend(*leaves("")), out)
    assert prepared().forwards[1:] == [False]


def test_an_output_of_the_callers() -> None:
    def act(given: list[Tensor]) -> Any:
        around = torch.full((2, 6, 4, 8), torch.nan)
        for options in ({}, {"window_size": 3}):
            wanted = attend(*given, return_lse=True, **options)
            out, lse = attend(*given, return_lse=True, out=around[:, 1:5], **options)
            assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
            assert torch.equal(around[:, 1:5], out) and around[:, ::5].isnan().all()
        return out, lse

    for _ in range(2):
        act(leaves(""))
    kinds = [known.prepared for known in known_calls._known.values()]
    assert len(kinds) == 4
    assert all(isinstance(x, PreparedByCpu) and x.forwards == [False] for x in kinds)


def test_only_lse_is_differentiated() -> None:
    twice(lambda given: torch.autograd.grad(attend(*given, return_lse=True)[1].sum(), given[:2]))


def test_an_expanded_gradient() -> None:
    twice(lambda given: torch.autograd.grad(attend(*given).sum(), given))


def test_a_graph_that_is_retained() -> None:
    def act(given: list[Tensor]) -> Any:
        out = attend(*given)
        first = torch.autograd.grad(out.sum(), given, retain_graph=True)
        second = torch.autograd.grad(out.sum(), given)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(out.sum(), given)
        return (*first, *second)

    twice(act)


def test_second_derivatives_are_refused() -> None:
    def act(given: list[Tensor]) -> Any:
        (dq,) = torch.autograd.grad(attend(*given).square().sum(), given[0], create_graph=True)
        with pytest.raises(RuntimeError, match="first derivatives only"):
            dq.sum().backward()
        return (dq.detach(),)

    twice(act)


def test_batches_of_gradients() -> None:
    def act(given: list[Tensor]) -> Any:
        out = attend(*given)
        douts = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(1))
        found = torch.autograd.grad(out, given, douts, retain_graph=True, is_grads_batched=True)
        for i in range(3):
            single = torch.autograd.grad(out, given, douts[i], retain_graph=True)
            for x, y in zip(found, single, strict=True):
                torch.testing.assert_close(x[i], y)
        return found

    twice(act)


def test_a_mode_around_the_backward_sees_the_operator() -> None:
    def act(given: list[Tensor]) -> Any:
        out = attend(*given)
        with Seen() as seen:
            found = torch.autograd.grad(out.sum(), given)
        assert "dmattn.bwd.default" in seen.names
        return found

    twice(act)
    assert prepared().needs == []


def test_a_gradient_of_another_type_goes_through_the_operator() -> None:
    class Other(Tensor):
        pass

    def act(given: list[Tensor]) -> Any:
        out = attend(*given)
        return torch.autograd.grad(out, given, torch.ones_like(out).as_subclass(Other))

    twice(act)
    assert prepared().needs == []


def test_hooks_of_the_node_are_called() -> None:
    def act(given: list[Tensor]) -> Any:
        seen: list[Any] = []
        out = attend(*given)
        assert out.grad_fn is not None
        out.grad_fn.register_prehook(lambda douts: seen.append(douts[0]))
        out.grad_fn.register_hook(lambda grads, _: seen.append(grads[0]))
        found = torch.autograd.grad(out, given, torch.ones_like(out))
        assert torch.equal(seen[0], torch.ones_like(out)) and torch.equal(seen[1], found[0])
        return found

    twice(act)


def test_a_changed_operand_is_noticed() -> None:
    def act(given: list[Tensor]) -> Any:
        out = attend(*given)
        with torch.no_grad():
            given[1].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        return (out.detach(),)

    twice(act)


def test_hooks_of_saved_tensors_see_all_that_is_kept() -> None:
    def act(given: list[Tensor]) -> Any:
        kept: list[Tensor] = []

        def keep(t: Tensor) -> Tensor:
            kept.append(t)
            return t.detach().mT.contiguous()

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t.mT):
            out = attend(*given)
        shapes = sorted(tuple(t.shape) for t in kept if t.dim() > 1)
        assert len(shapes) >= 7 and shapes.count((2, 6, 2, 8)) == 2  # mask, results and operands
        return torch.autograd.grad(out.square().sum(), given)

    plain = torch.autograd.grad(attend(*(given := leaves())).square().sum(), given)
    known_calls.forget()
    for x, y in zip(twice(act), plain, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("window", [None, 3, 6])
def test_checkpoints_compute_again(window: int | None) -> None:
    def act(given: list[Tensor]) -> Any:
        out = checkpoint(attend, *given, window_size=window, use_reentrant=False)
        return torch.autograd.grad(out.square().sum(), given)

    twice(act)
    assert len(prepared().forwards) == 3  # the first call's second forward is of a known kind


@pytest.mark.parametrize("window", [None, 3, 6])
def test_checkpoints_of_known_calls_survive_forgetting(window: int | None) -> None:
    def act(given: list[Tensor], forgets: bool = False) -> Any:
        out = checkpoint(attend, *given, window_size=window, use_reentrant=False)
        if forgets:
            known_calls.forget()
        return torch.autograd.grad(out.square().sum(), given)

    given = leaves()
    expected = act(given)
    for x, y in zip(act(given, forgets=True), expected, strict=True):
        torch.testing.assert_close(x, y)


def test_functional_transforms_and_compilers_see_the_operator() -> None:
    given = leaves()
    expected = torch.autograd.grad(attend(*given).square().sum(), given)
    found = torch.func.grad(lambda *x: attend(*x).square().sum(), argnums=(0, 1, 2, 3))(*given)
    assert prepared().forwards == []
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    compiled = torch.compile(lambda *x: attend(*x).square().sum(), backend="eager", fullgraph=True)
    for x, y in zip(torch.autograd.grad(compiled(*given), given), expected, strict=True):
        torch.testing.assert_close(x, y)
    assert prepared().forwards == []


@pytest.mark.parametrize("window", [3, 6])
def test_keys_are_chosen_anew_for_each_call(window: int) -> None:
    def act(given: list[Tensor]) -> Any:
        out = attend(*given, window_size=window)
        return (out.detach(), *torch.autograd.grad(out.square().sum(), given))

    twice(act)
    assert len(prepared().forwards) == 1
    # Six keys within a window of six are not chosen by lists.
    (known,) = known_calls._known.values()
    assert (known.window is not None) == (window == 3)
    given = leaves()
    given[3].data.neg_()  # other keys
    found = act(given)
    known_calls.forget()
    for x, y in zip(found, act(given), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [None, (2, 2, 1, 6), (1, 4, 1, 6), (1, 1, 1, 1), (2, 1, 4, 6)])
def test_windows_beside_masks(causal: bool, shape: tuple[int, ...] | None) -> None:
    generator = torch.Generator().manual_seed(2)
    masks = [None if shape is None else torch.rand(shape, generator=generator) < 0.7 for _ in "abc"]
    if shape is not None and shape[2] == 4:  # alike for all rows
        masks = [None if x is None else x[:, :, :1].expand(-1, -1, 4, -1) for x in masks]

    def act(given: list[Tensor], mask: Tensor | None) -> list[Tensor]:
        q, k, v, bias = given
        out = flash_dmattn_func(q, k, v, mask, bias, is_causal=causal, window_size=3)
        with torch.inference_mode():
            again = flash_dmattn_func(q, k, v, mask, bias, is_causal=causal, window_size=3)
        assert torch.equal(out, again)
        kept = top_window_mask(bias, 3, q.shape[1], causal, mask)
        torch.testing.assert_close(out, reference_attention(q, k, v, kept, bias).out.to(out.dtype))
        return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]

    expected = []
    for mask in masks:
        known_calls.forget()
        expected.append(act(leaves(), mask))
    for mask, wanted in zip(masks, expected, strict=True):
        for x, y in zip(act(leaves(), mask), wanted, strict=True):
            assert torch.equal(x, y)
    (known,) = known_calls._known.values()
    assert known.window is not None and len(prepared().forwards) == 7


def chosen(sign: float = 1.0) -> KeySelection:
    return select_keys(sign * torch.arange(12.0).view(1, 2, 6).cos(), 3, query_len=4)


@pytest.mark.parametrize("selections", [(chosen(), chosen(-1.0)), (sliding_window(6, 3, 4),) * 2])
def test_selections_are_used_as_they_are_given(
    selections: tuple[KeySelection, KeySelection],
) -> None:
    """The kind of a call does not say which keys are kept."""

    def act(selection: KeySelection) -> list[Tensor]:
        q, k, v, bias = given = leaves()
        out = flash_dmattn_func(q, k, v, None, bias, is_causal=True, selection=selection)
        exact = reference_attention(q, k, v, selection.to_mask(), bias).out
        torch.testing.assert_close(out, exact.to(out.dtype))
        return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]

    first = [act(selection) for selection in selections]
    again = [act(selection) for selection in selections]
    for x, y in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))
    assert len(prepared().forwards) == 3


@pytest.mark.parametrize("wanted", ["qkv", "qkvb"])
def test_a_bias_with_rows_beside_a_selection(wanted: str) -> None:
    """How it is computed depends on what requires a gradient, so its kind is not remembered."""
    selection = chosen()

    def act(wanted: str) -> list[Tensor]:
        q, k, v, _ = given = leaves(wanted)
        given[3] = bias = torch.ones(2, 2, 4, 6).requires_grad_("b" in wanted)
        out = flash_dmattn_func(q, k, v, None, bias, is_causal=True, selection=selection)
        inputs = [t for t in given if t.requires_grad]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    first = act(wanted)
    for other in ("qkv", "qkvb"):
        for x, y in zip(first, act(other), strict=False):
            torch.testing.assert_close(x, y)
    assert known_calls._known == {}


@pytest.mark.parametrize("is_given", [False, True])
def test_more_rows_than_keys_over_lists(is_given: bool) -> None:
    def act(given: list[Tensor]) -> Any:
        q, k, v, bias = given
        selection = select_keys(bias, 3, query_len=12) if is_given else None
        out = flash_dmattn_func(
            *(q.repeat(1, 3, 1, 1), k, v, None, bias),
            is_causal=True,
            window_size=None if is_given else 3,
            selection=selection,
        )
        return (out.detach(), *torch.autograd.grad(out.square().sum(), given))

    first, second = act(leaves()), act(leaves())
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)
    # A prepared call does not handle rows in front of the first key.
    assert is_given or (
        prepared().forwards == [] and known_calls._known.popitem()[1].window is None
    )
    assert known_calls._known == {}


def test_stretches() -> None:
    def act(given: list[Tensor]) -> Any:
        q, k, v, bias = given
        total, state = [], None
        for part in (slice(0, 3), slice(3, 6)):
            out, state = flash_dmattn_func(
                *(q.repeat(1, 2, 1, 1)[:, part], k[:, part], v[:, part]),
                attn_bias=bias[..., part],
                is_causal=True,
                window_size=2,
                state=state,
                return_state=True,
            )
            total.append(out)
        out = torch.cat(total, 1)
        return (out.detach(), *torch.autograd.grad(out.square().sum(), given))

    first, second = act(leaves()), act(leaves())
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)
    assert {type(x.prepared) for x in known_calls._known.values()} == {PreparedByCpu}
    assert {x.window for x in known_calls._known.values()} == {None}


def test_sinks_are_for_others() -> None:
    def act(given: list[Tensor]) -> Any:
        out = attend(*given, sinks=torch.ones(4))
        return (out.detach(), *torch.autograd.grad(out.square().sum(), given))

    first, second = act(leaves()), act(leaves())
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)
    (known,) = known_calls._known.values()
    assert known.prepared is None


def test_probabilities_beside_a_call_of_a_known_kind() -> None:
    given = leaves()
    first = attend(*given, return_attn_probs=True)
    second = attend(*given, return_attn_probs=True)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
