"""Kernels that are launched before the previous kernel has ended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import dmattn

pytestmark = pytest.mark.cuda

# A program with chains of the shortest kernels there are, one after the other, each in memory that
# the previous one has just given back. Prints a hash of all that they computed.
PROGRAM = """
import hashlib
import torch
import dmattn

generator = torch.Generator("cuda").manual_seed(1)

def normal(*shape):
    return torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)

def build(n):
    shapes = (1, n, 4, 64), (1, n, 2, 64), (1, n, 2, 64), (1, 2, 1, n)
    return *(normal(*shape).requires_grad_() for shape in shapes), normal(1, n, 4, 64)

problems = [build(n) for n in (300, 1000, 2049, 130, 4096, 700, 40000)]

def run(q, k, v, bias, dout):
    out = dmattn.flash_dmattn_func(
        q, k, v, attn_bias=bias, is_causal=True, window_size=64, deterministic=True
    )
    return out.detach(), *torch.autograd.grad(out, (q, k, v, bias), dout)

found = hashlib.sha256()
for _ in range(10):
    results = [run(*problems[(5 * i + i // 7) % len(problems)]) for i in range(25)]
    for result in results:
        for x in result:
            found.update(x.view(torch.uint8).cpu().numpy().tobytes())
print(found.hexdigest())
"""

# A program with drafts, whose kernel reads queries and entries before the previous kernel has
# ended. Both are written by the kernels right before that one, and entries again by the commit
# behind the draft.
DRAFTS = """
import hashlib
import torch
import dmattn

generator = torch.Generator("cuda").manual_seed(1)

def normal(*shape):
    return torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)

def build(batch, heads, heads_k, head_dim, window, tokens):
    shape = heads_k, head_dim
    cache = dmattn.DynamicMaskCache(batch, window, *shape, torch.bfloat16, "cuda")
    score = normal(batch, heads_k, window + tokens).float()
    keys, values = normal(2, batch, window, *shape)
    cache.prefill(keys, values, score[..., :window])
    query, (key, value) = normal(batch, tokens, heads, head_dim), normal(2, batch, tokens, *shape)
    return cache, (keys, values), [query, key, value, score[..., window:]]

problems = [build(8, 32, 8, 128, 2048, 8), build(1, 8, 2, 64, 300, 5)]
problems += [build(2, 4, 1, 256, 700, 3), build(3, 6, 6, 96, 90, 20)]

def run(cache, entries, new, by):
    for x, source in zip((cache.k, cache.v), entries):
        x[:, : source.shape[1]] = source * by
    out = cache.peek(new[0] * by, *new[1:])
    cache.commit(torch.full_like(cache.seen, new[0].shape[1] // 2))
    return out

found = hashlib.sha256()
for turn in range(10):
    results = [run(*problems[(5 * i + i // 7) % len(problems)], 1 + i % 3) for i in range(25)]
    for cache, _, _ in problems:
        results += [cache.k, cache.v, cache.score, cache.position, cache.seen]
    for x in results:
        found.update(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
print(found.hexdigest())
"""


def _results(program: str, setting: str) -> str:
    env = {**os.environ, "DMATTN_EARLY_START": setting}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("program", [PROGRAM, DRAFTS], ids=["chains", "drafts"])
def test_250_chains_are_as_if_each_kernel_had_its_turn(program: str) -> None:
    assert _results(program, "1") == _results(program, "0")


def test_captured_on_two_streams() -> None:
    """Selections behind kernels of torch, behind another stream's event, and beside that stream."""
    generator = torch.Generator("cuda").manual_seed(1)
    first = torch.randn((1, 4, 1, 3000), device="cuda", generator=generator)
    second = torch.randn((2, 2, 1, 40000), device="cuda", generator=generator)
    graph = torch.cuda.CUDAGraph()
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        found = [dmattn.select_keys(first, 100)]
        other.wait_stream(main)
        with torch.cuda.stream(other):
            found += [dmattn.select_keys(second, 300), dmattn.select_keys(second, 30)]
        found += [dmattn.select_keys(first * 2 - 1, 50)]
        main.wait_stream(other)
        found += [dmattn.select_keys(second, 7)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    calls = (first, 100), (second, 300), (second, 30), (first * 2 - 1, 50), (second, 7)
    for got, (scores, window) in zip(found, calls, strict=True):
        want = dmattn.select_keys(scores, window)
        assert torch.equal(got.end, want.end)
        assert torch.equal(got.count, want.count)
        here = torch.arange(got.idx.shape[-1], device="cuda") < got.count[..., None]
        assert torch.equal(got.idx[here], want.idx[here])
