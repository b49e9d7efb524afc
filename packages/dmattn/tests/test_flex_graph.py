"""The flex backend's gradients from the graph of its own forward."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex_attention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dmattn import dispatch, flash_dmattn_func, flash_dmattn_varlen_func, select_keys
from dmattn.backends.flex import torch_flex

# Older torch does not tell whether hooks take over saved tensors: then no graph is kept.
keeps_graphs = dispatch._SAVING_HOOKS is not None
# Older torch does not tell whether a graph is retained: a second backward starts from the results.
keeps_retained_graphs = keeps_graphs and dispatch._IS_RETAINED is not None
AGAIN = 0 if keeps_graphs else 1  # how many forwards a backward runs

Attend = Callable[..., tuple[Tensor, Tensor]]


def operands(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((150, 4), (200, 2), (200, 2))
    return [torch.randn(2, n, h, 16, dtype=dtype).requires_grad_() for n, h in sizes]


def causal(q: Tensor, k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return flash_dmattn_func(q, k, v, is_causal=True, return_lse=True, backend=backend)


def masked(q: Tensor, k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Rows 0 to 9 keep nothing."""
    mask = (torch.arange(150)[:, None] >= 10) & (torch.arange(200) % 3 > 0)
    out, lse = flash_dmattn_func(q, k, v, mask[None, None], return_lse=True, backend=backend)
    return out, lse - lse.detach()  # NaN in the rows without keys, and NaN for their gradients


def window(q: Tensor, k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    scores = torch.randn(2, 2, 200, generator=torch.Generator().manual_seed(1))
    kept = select_keys(scores, 30, query_len=150)
    options = {"is_causal": True, "softcap": 3.0, "selection": kept}
    return flash_dmattn_func(q, k, v, **options, return_lse=True, backend=backend)


def packed(q: Tensor, k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """The second document has more rows than keys: its first rows keep nothing."""
    bounds = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 90, 300], [0, 310, 400])]
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    return flash_dmattn_varlen_func(
        *flat, *bounds, 210, 310, is_causal=True, return_lse=True, backend=backend
    )


CALLS: dict[str, Attend] = {
    "causal": causal, "masked": masked, "window": window, "packed": packed,
}  # fmt: skip


def gradients(attend: Attend, backend: str, **options: Any) -> tuple[Tensor, ...]:
    inputs = operands()
    out, lse = attend(*inputs, backend)
    loss = out.float().square().sum() + lse.nan_to_num(0, 0, 0).sin().sum()
    return torch.autograd.grad(loss, inputs, **options)


class Forwards:
    """Counts the forwards of FlexAttention, and knows whether the last one's lse is alive."""

    def __init__(self) -> None:
        self.count = 0
        self.last: weakref.ref[Tensor] | None = None
        self._attend = torch_flex.attend

    def __call__(self, spec: Any, q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        self.count += 1
        out, lse = self._attend(spec, q, *others)
        self.last = weakref.ref(lse)
        return out, lse

    def holds(self) -> bool:
        assert self.last is not None
        return self.last() is not None


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Forwards:
    counted = Forwards()
    monkeypatch.setattr(torch_flex, "attend", counted)
    return counted


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the path of GPUs, with graphs in which torch computes FlexAttention by its formula.

    On the CPU torch refuses gradients there, so its check is replaced.
    """
    monkeypatch.setattr(torch_flex, "COMPILER", "aot_eager")
    monkeypatch.setattr(torch_flex, "runs_compiled", lambda q: True)
    monkeypatch.setattr(torch_flex_attention, "_validate_device", lambda *tensors: None)
    yield
    torch_flex._kernel_of.cache_clear()


def assert_near(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Equal up to the differences between two computations in bfloat16, relative to the norm."""
    for some, other in zip(found, wanted, strict=True):
        error = (some.double() - other.double()).norm() / other.double().norm()
        assert float(error) < 2e-2


def check(attend: Attend) -> None:
    assert_near(gradients(attend, "flex"), gradients(attend, "cpu"))


@pytest.mark.parametrize("name", CALLS)
def test_one_forward(name: str, forwards: Forwards) -> None:
    check(CALLS[name])
    assert forwards.count == 1 + AGAIN


@pytest.mark.parametrize("name", ["causal", "packed"])
def test_one_compiled_forward(name: str, forwards: Forwards, compiled: None) -> None:
    check(CALLS[name])
    assert forwards.count == 1 + AGAIN


def test_the_gradient_of_a_sum(compiled: None) -> None:
    """dout is a single number, expanded."""
    inputs = operands()
    found, wanted = (
        torch.autograd.grad(causal(*inputs, backend)[0].sum(), inputs)
        for backend in ("flex", "cpu")
    )
    assert_near(found[2:], wanted[2:])  # those of query and key are nearly 0


def test_a_second_backward(forwards: Forwards) -> None:
    """It takes the graph that the first one was told to retain; the last one releases it."""
    inputs = operands()
    out, _ = causal(*inputs, "flex")
    first, second, last = (
        torch.autograd.grad(out.float().square().sum(), inputs, retain_graph=retain)
        for retain in (True, True, False)
    )
    assert_near(second, first)
    assert_near(last, first)
    assert forwards.count == (1 if keeps_retained_graphs else 3 + AGAIN)
    assert not forwards.holds()


@pytest.mark.skipif(not keeps_graphs, reason="this torch keeps none")
def test_the_graph_is_released(forwards: Forwards) -> None:
    """It is released after the backward, though the loss is still there, and without a backward.

    In neither case does that wait for the garbage collector.
    """
    inputs = operands()
    gc.disable()
    try:
        out = causal(*inputs, "flex")[0]
        loss = out.sum()
        assert forwards.holds()
        loss.backward()
        assert not forwards.holds()
        out = causal(*inputs, "flex")[0]
        assert forwards.holds()
        del out
        assert not forwards.holds()
    finally:
        gc.enable()


def test_checkpoints_keep_nothing(forwards: Forwards) -> None:
    """Under checkpoints no graph is kept, nor under other hooks that take over saved tensors."""
    inputs = operands()
    out = checkpoint(lambda *given: causal(*given, "flex")[0], *inputs, use_reentrant=False)
    assert forwards.count == 1 and not forwards.holds()
    found = torch.autograd.grad(out.float().square().sum(), inputs)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda saved: saved):
        out = causal(*inputs, "flex")[0]
    assert not forwards.holds()
    other = torch.autograd.grad(out.float().square().sum(), inputs)
    for grads in (found, other):
        wanted = torch.autograd.grad(causal(*inputs, "cpu")[0].float().square().sum(), inputs)
        assert_near(grads, wanted)


def test_operands_that_changed_are_refused() -> None:
    inputs = operands()
    out, _ = causal(*inputs, "flex")
    with torch.no_grad():
        inputs[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class _SeesAll(TorchDispatchMode):
    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return operator(*args, **(kwargs or {}))


def loss_of(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    out, lse = masked(q, k, v, backend)
    return out.float().square().sum() + lse.nan_to_num(0, 0, 0).sin().sum()


def by_transform(inputs: list[Tensor]) -> tuple[Tensor, ...]:
    given = [t.detach() for t in inputs]
    return torch.func.grad(loss_of, argnums=(0, 1, 2))(*given, "flex")


def by_compiler(backend: str) -> Callable[[list[Tensor]], tuple[Tensor, ...]]:
    def find(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
        return torch.autograd.grad(compiled(*inputs, "flex"), inputs)

    return find


def with_a_graph(inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss_of(*inputs, "flex"), inputs, create_graph=True)


def under_a_mode(inputs: list[Tensor]) -> tuple[Tensor, ...]:
    with _SeesAll():
        return torch.autograd.grad(loss_of(*inputs, "flex"), inputs)


@pytest.mark.parametrize(
    "find",
    [by_transform, by_compiler("eager"), by_compiler("aot_eager"), with_a_graph, under_a_mode],
)
def test_by_operators(find: Callable[[list[Tensor]], tuple[Tensor, ...]]) -> None:
    """Within operators torch has switched off autograd and vmap, both of which are needed."""
    inputs = operands()
    wanted = torch.autograd.grad(loss_of(*inputs, "cpu"), inputs)
    assert_near(find(inputs), wanted)


def test_second_derivatives_are_refused() -> None:
    grads = gradients(causal, "flex", create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        grads[0].float().sum().backward()


def test_batches_of_gradients() -> None:
    inputs = operands()
    out, _ = causal(*inputs, "flex")
    douts = torch.randn(3, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, inputs, douts, retain_graph=True, is_grads_batched=True)
    for i, dout in enumerate(douts):
        single = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        assert_near([t[i] for t in batched], list(single))


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False)])
def test_gradients_of_some_operands(needed: tuple[bool, ...], forwards: Forwards) -> None:
    inputs = operands()
    for t, need in zip(inputs, needed, strict=True):
        t.requires_grad_(need)
    leaf = inputs[needed.index(True)]
    (found,), (wanted,) = (
        torch.autograd.grad(causal(*inputs, backend)[0].float().square().sum(), leaf)
        for backend in ("flex", "cpu")
    )
    assert_near([found], [wanted])
    assert forwards.count == 1 + AGAIN


def test_float32_is_shifted_by_lse(forwards: Forwards) -> None:
    """In float32 the rounding of an lse in base 2 would show, so the forward runs once more."""
    inputs = operands(torch.float32)
    causal(*inputs, "flex")[0].sum().backward()
    assert forwards.count == 2
