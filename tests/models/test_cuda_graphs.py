"""torch.compile(mode="reduce-overhead"): every step is replayed from CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dmattn
from dmattn.modules.rotary import rotary_embedding
from models.graphs import graph_launches, only_cuda_graphs

pytestmark = [pytest.mark.cuda, pytest.mark.slow]

ROUNDS = 6  # one to compile, one to warm up, one to record, and replays
BATCH, LENGTH, WINDOW, HIDDEN = 2, 300, 100, 256


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def check(
    step: Callable[..., tuple[Tensor, ...]], inputs: Callable[[], tuple[Tensor, ...]]
) -> None:
    """A compiled step gives what the plain one gives, from new inputs each time.

    Both run the same kernels of dmattn; `close` allows for differences between those of torch.
    """
    with only_cuda_graphs():
        compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
        for _ in range(ROUNDS):
            given = inputs()
            torch.compiler.cudagraph_mark_step_begin()
            found = [t.clone() for t in compiled(*given)]
            for a, b in zip(found, step(*given), strict=True):
                close(a, b)
        assert graph_launches(lambda: compiled(*inputs())) >= 1


def close(found: Tensor, wanted: Tensor) -> None:
    """Equal up to a few roundings of bfloat16, relative to the largest entry."""
    error = float((found - wanted).abs().max()) / float(wanted.abs().max())
    assert error <= 4 * torch.finfo(torch.bfloat16).eps


def attend(kind: str) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        options: dict[str, Any] = {"is_causal": True, "deterministic": True}
        if kind == "key mask":
            options["attn_mask"] = mask
        if kind != "plain":
            options["attn_bias"] = bias
        if kind == "running top-w":
            options["window_size"] = WINDOW
        return dmattn.flash_dmattn_func(q, k, v, **options)

    return function


def operands(requires_grad: bool) -> tuple[Tensor, ...]:
    q, k, v = (normal(BATCH, LENGTH, heads, 64) for heads in (8, 2, 2))
    tensors = q, k, v, normal(BATCH, 2, 1, LENGTH)
    mask = torch.rand(BATCH, 1, 1, LENGTH, device="cuda") < 0.8
    return (*(t.requires_grad_(requires_grad) for t in tensors), mask)


@pytest.mark.parametrize("kind", ["plain", "key mask", "running top-w"])
def test_function(kind: str) -> None:
    function = attend(kind)

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        return (function(*tensors),)

    with torch.no_grad():
        check(step, lambda: operands(False))


@pytest.mark.parametrize("kind", ["plain", "running top-w"])
def test_function_and_gradients(kind: str) -> None:
    """Forward and backward are a CUDA graph each."""
    function = attend(kind)
    with only_cuda_graphs():
        compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True)

        def gradients(f: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> list[Tensor]:
            leaves = tensors[: 3 if kind == "plain" else 4]
            torch.compiler.cudagraph_mark_step_begin()
            out = f(*tensors)
            found = torch.autograd.grad(out, leaves, torch.ones_like(out))
            return [out.detach().clone(), *(t.clone() for t in found)]

        for _ in range(ROUNDS):
            tensors = operands(True)
            pairs = zip(gradients(compiled, tensors), gradients(function, tensors), strict=True)
            for a, b in pairs:
                close(a, b)
        assert graph_launches(lambda: gradients(compiled, operands(True))) >= 2


def test_layer() -> None:
    """A training step of DynamicMaskAttention."""
    layer = dmattn.DynamicMaskAttention(HIDDEN, 4, 2, window_size=WINDOW).to("cuda", torch.bfloat16)
    parameters = list(layer.parameters())
    with only_cuda_graphs():
        compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)

        def gradients(f: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
            torch.compiler.cudagraph_mark_step_begin()
            out = f(x)
            found = torch.autograd.grad(out.float().square().mean(), parameters)
            return [out.detach().clone(), *(t.clone() for t in found)]

        for _ in range(ROUNDS):
            x = normal(BATCH, LENGTH, HIDDEN)
            found, wanted = gradients(compiled, x), gradients(layer, x)
            # The compiled layer rounds at fewer places, so that other keys may be kept.
            error = float((found[0] - wanted[0]).float().norm() / wanted[0].float().norm())
            assert error <= 0.05
            assert all(bool(t.isfinite().all()) for t in found)
        assert graph_launches(lambda: gradients(compiled, normal(BATCH, LENGTH, HIDDEN))) >= 2


@torch.no_grad()
def test_cache_step() -> None:
    """A token goes into a cache and attends to what the cache keeps, which changes in place."""
    prompt = normal(BATCH, LENGTH, 2, 64), normal(BATCH, LENGTH, 2, 64)
    scores = torch.randn(BATCH, 2, LENGTH, device="cuda")
    caches = [dmattn.DynamicMaskCache(BATCH, WINDOW, 2, 64, torch.bfloat16, "cuda") for _ in "ab"]
    for cache in caches:
        cache.prefill(*prompt, scores)
    mine, other = caches
    for t in (mine.k, mine.v, mine.score, mine.position, mine.seen):
        torch._dynamo.mark_static_address(t, guard=False)

    def step(q: Tensor, k: Tensor, v: Tensor, score: Tensor) -> Tensor:
        return mine.append_and_attend(q, k, v, score)

    with only_cuda_graphs():
        compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
        for _ in range(2 * ROUNDS):
            q, k, v = (normal(BATCH, 1, heads, 64) for heads in (8, 2, 2))
            given = q, k, v, torch.randn(BATCH, 2, 1, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(*given).clone()
            assert torch.equal(found, other.append_and_attend(*given))
        assert torch.equal(mine.position, other.position)
        assert graph_launches(lambda: compiled(*given)) >= 1


@torch.no_grad()
@pytest.mark.parametrize("evict", [True, False], ids=["top-w", "every key"])
def test_layer_step(evict: bool) -> None:
    """Two layers rotate by the positions of one cache, which their own step then changes."""
    options: dict[str, Any] = {"window_size": WINDOW, "init_std": 0.3}
    layers = [
        dmattn.DynamicMaskAttention(HIDDEN, 4, 2, **options).to("cuda", torch.bfloat16)
        for _ in "ab"
    ]
    options = {} if evict else {"evict": False, "capacity": 2 * LENGTH}
    prompt = normal(BATCH, LENGTH, HIDDEN)
    mine, other = ([layer.make_cache(BATCH, **options) for layer in layers] for _ in "ab")
    for caches in (mine, other):
        for layer, cache in zip(layers, caches, strict=True):
            layer(prompt, cache=cache)
    for cache in mine:
        for t in (cache.k, cache.v, cache.score, cache.position, cache.seen):
            torch._dynamo.mark_static_address(t, guard=False)

    def step(x: Tensor, caches: list[dmattn.DynamicMaskCache]) -> Tensor:
        shared = rotary_embedding(caches[0].seen[:, None], layers[0].head_dim, 10000.0)
        for layer, cache in zip(layers, caches, strict=True):
            x = x + layer(x, position_embeddings=shared, cache=cache)
        return x

    with only_cuda_graphs():
        compiled = torch.compile(lambda x: step(x, mine), mode="reduce-overhead", fullgraph=True)
        for _ in range(2 * ROUNDS):
            x = normal(BATCH, 1, HIDDEN)
            torch.compiler.cudagraph_mark_step_begin()
            found, wanted = compiled(x).clone(), step(x, other)
            # The compiled layer rounds at fewer places: 0.008 was seen. Positions of the next token
            # in place of these, where every key is kept, give 0.2.
            assert float((found - wanted).float().norm() / wanted.float().norm()) <= 0.05
        for cache, same in zip(mine, other, strict=True):
            assert torch.equal(cache.seen, same.seen)
        assert graph_launches(lambda: compiled(x)) >= 1
