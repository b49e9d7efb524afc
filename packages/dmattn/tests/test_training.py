"""Attention within the tools of training: checkpointing, functional transforms, DDP."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch_releases import TORCH

from dmattn import DynamicMaskAttention, flash_dmattn_func, flash_dmattn_varlen_func, select_keys
from dmattn.backends.cpu import CpuBackend, attention
from dmattn.problem import Problem, Results

BOUNDS = torch.tensor([0, 7, 7, 20], dtype=torch.int32)


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
    out, lse = flash_dmattn_func(
        q, k, v, attn_bias=bias, is_causal=True, sinks=sinks, return_lse=True
    )
    return out * lse.transpose(1, 2)[..., None]


def window(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
    return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, window_size=5, sinks=sinks)


def selected(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
    selection, padding = select_keys(bias, 6), torch.arange(20) > torch.tensor([[3], [0]])
    return flash_dmattn_func(
        q, k, v, padding, bias, is_causal=True, selection=selection, sinks=sinks
    )


def rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
    """Masks with rows beside a window, and values of another head dimension."""
    lower = torch.ones(20, 20, dtype=torch.bool).tril()
    return flash_dmattn_func(q, k, v[..., :3], lower, bias, window_size=5, sinks=sinks)


def packed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
    return flash_dmattn_varlen_func(
        *(q[0], k[0], v[0], BOUNDS, None, 13, 13),
        attn_bias=bias[0, :, 0].t(),
        is_causal=True,
        window_size=5,
        sinks=sinks,
    )


KINDS: dict[str, Callable[..., Tensor]] = {
    "dense": dense,
    "window": window,
    "selected": selected,
    "rows": rows,
    "packed": packed,
}
kinds = pytest.mark.parametrize("kind", KINDS)


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 20, 4, 8), (2, 20, 2, 8), (2, 20, 2, 8), (2, 2, 1, 20), (4,))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def gradients(attend: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(attend(*given).square().sum(), given))


@kinds
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(kind: str, reentrant: bool) -> None:
    given, attend = leaves(), KINDS[kind]
    loss = checkpoint(attend, *given, use_reentrant=reentrant).square().sum()
    loss.backward()
    for leaf, want in zip(given, gradients(attend, leaves()), strict=True):
        assert leaf.grad is not None and torch.equal(leaf.grad, want)


@kinds
@pytest.mark.parametrize("kept", [False, True])
def test_selective_checkpoint(kind: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of attention are saved, or computed again like everything else."""
    wanted, calls = gradients(KINDS[kind], leaves()), []

    def forward(self: CpuBackend, problem: Problem, for_backward: bool = True) -> Results:
        calls.append(problem)
        return attention.forward(problem)

    def decide(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        keeps = kept and op == torch.ops.dmattn.fwd.default
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    monkeypatch.setattr(CpuBackend, "forward", forward)
    contexts = functools.partial(create_selective_checkpoint_contexts, decide)
    attend = functools.partial(checkpoint, KINDS[kind], use_reentrant=False, context_fn=contexts)
    for a, b in zip(gradients(attend, leaves()), wanted, strict=True):
        assert torch.equal(a, b)
    assert len(calls) == (1 if kept else 2)


@kinds
def test_compiled_checkpoint(kind: str) -> None:
    torch._dynamo.reset()

    def attend(*given: Tensor) -> Tensor:
        out: Tensor = checkpoint(KINDS[kind], *given, use_reentrant=False)
        return out

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for a, b in zip(gradients(compiled, leaves()), gradients(attend, leaves()), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(TORCH < (2, 13), reason="compiled autograd was tried with torch 2.13 alone")
@kinds
def test_compiled_backward_of_an_eager_call(kind: str) -> None:
    """A compiler traces the backward in one graph, also of a call whose kind is known."""
    torch._dynamo.reset()
    for _ in range(2):
        given = leaves()
        loss = KINDS[kind](*given).square().sum()
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            loss.backward()
        for leaf, want in zip(given, gradients(KINDS[kind], leaves()), strict=True):
            torch.testing.assert_close(leaf.grad, want)


@pytest.mark.parametrize("kind", ["dense", "window", "selected", "rows"])
def test_gradients_of_each_sample(kind: str) -> None:
    """vmap over grad, with operands that all samples share."""
    given = [t.detach() for t in leaves()]
    q = torch.stack([given[0], -given[0], 2 * given[0]])

    def loss(q: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        return KINDS[kind](q, given[1], given[2], bias, sinks).square().sum()

    one = torch.func.grad(loss, argnums=(0, 1, 2))
    together = torch.func.vmap(one, (0, None, None))(q, *given[3:])
    for i in range(3):
        for a, b in zip(together, one(q[i], *given[3:]), strict=True):
            torch.testing.assert_close(a[i], b)


def test_layer_as_a_function_of_its_parameters() -> None:
    torch.manual_seed(0)
    layer, x = DynamicMaskAttention(16, 4, 2, window_size=5), torch.randn(2, 20, 16)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(layer, parameters, (x,))
        return out.square().sum()

    found = torch.func.grad(loss)(parameters)
    layer(x).square().sum().backward()
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layer_under_checkpoint(reentrant: bool) -> None:
    torch.manual_seed(0)
    layer = DynamicMaskAttention(16, 4, 2, window_size=5)
    x = torch.randn(2, 20, 16, requires_grad=True)
    results = []
    for run in (layer, functools.partial(checkpoint, layer, use_reentrant=reentrant)):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = run(x)
        out.float().square().sum().backward()
        results.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    assert len(results[0]) == len(list(layer.parameters()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("static", [False, True])
def test_distributed_data_parallel(static: bool) -> None:
    """The hooks of DDP see every gradient, also of a layer that is compiled within."""
    torch.manual_seed(0)
    layer, x = DynamicMaskAttention(16, 4, 2, window_size=5), torch.randn(2, 20, 16)
    wanted = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    for inner in (layer, torch.compile(layer, backend="aot_eager")):
        layer.zero_grad()
        parallel = DistributedDataParallel(inner, static_graph=static)  # its hooks hold it weakly
        parallel(x).square().sum().backward()
        for parameter, want in zip(layer.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, want)
