"""Drafts of a cache and their commits, for sanitizer_cases.py, checked against numpy."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

import dmattn_kernels as kernels
from gpu.raw_cuda import Array, Gpu, from_bits, to_bits
from gpu.sanitizer_cache import Append, draw_cache, step

Float = npt.NDArray[np.float64]
STATE = ("k_cache", "v_cache", "score", "position", "seen")


@dataclasses.dataclass(frozen=True)
class Draft:
    """Tokens that attend behind the entries of a cache; the first ones are then put in."""

    name: str
    cache: Append  # `queries` and `tokens` are those of the draft
    spare: int = 32  # rows behind the entries
    count: str = "i64"  # type of the numbers of tokens to put in


def _cache(
    kind: str, queries: int = 4, tokens: int = 8, softcap: float = 0.0, **sizes: int
) -> Append:
    return Append("", kind, queries=queries, tokens=tokens, softcap=softcap, **sizes)


DRAFTS = (
    *(
        (dtype, d, Draft("cache draft", _cache(kind, capacity=200, held=198)))
        for dtype in ("bf16", "f16")
        for kind in (dtype, "f32")
        for d in (64, 128, 256)
    ),
    *(
        (dtype, d, Draft("cache draft", _cache("f32", capacity=200, held=198)))
        for dtype in ("bf16", "f16")
        for d in (40, 72, 136)
    ),
    *(
        (dtype, d, Draft("cache draft, softcap", _cache("f32", 2, 5, 3.0, capacity=70, held=69)))
        for dtype in ("bf16", "f16")
        for d in (64, 128, 256)
    ),
    ("bf16", 72, Draft("cache draft, short", _cache("f32", 3, 5, capacity=3, held=2), 5, "i32")),
    ("bf16", 128, Draft("cache draft, many tokens", _cache("f32", 1, 32, capacity=40, held=0))),
    ("f16", 64, Draft("cache draft, many entries", _cache("f16", 2, 3, capacity=4500, held=4490))),
)


def draw_draft(
    dtype: str, head_dim: int, launch: Draft, draw: np.random.Generator
) -> dict[str, tuple[Array, str]]:
    """Values and element types of the inputs of both calls, except what the first call writes."""
    arrays = draw_cache(dtype, head_dim, launch.cache, draw)
    active = arrays.pop("active")[0]
    for name in ("k_cache", "v_cache"):
        x, kind = arrays[name]
        behind = np.zeros((x.shape[0], launch.spare, *x.shape[2:]))
        arrays[name] = np.concatenate((x, behind), axis=1), kind
    arrays["count"] = active.sum(axis=1), launch.count
    return arrays


def run_draft(
    gpu: Gpu, dtype: str, head_dim: int, launch: Draft, fill: int | None
) -> tuple[list[str], Float, Float]:
    """Run both calls: what is wrong with the cache afterwards, the outputs, the wanted outputs."""
    cache = launch.cache
    arrays = draw_draft(dtype, head_dim, launch, np.random.default_rng(head_dim))
    buffers = {name: gpu.upload(x, kind) for name, (x, kind) in arrays.items()}
    state = {name: buffers[name].view for name in STATE}
    shape = (cache.batch, cache.nheads_k, cache.tokens, 4)
    draft, out = gpu.output(shape, "i32", fill), gpu.output(buffers["q"].shape, dtype, fill)
    scale = head_dim**-0.5
    given = {name: buffers[name].view for name in ("q", "k_new", "v_new", "score_new")} | state
    given |= {"draft": draft.view, "out": out.view}
    look = kernels.CacheDraftParams(0, **given, softmax_scale=scale, softcap=cache.softcap)
    size = look.workspace_size()
    rows = cache.tokens * cache.queries
    words = cache.batch * cache.nheads_k * -(-rows // 16)
    look.launch(gpu.workspace(size, fill, words), size, 0)
    found = gpu.download(out)
    kernels.CacheCommitParams(0, draft.view, buffers["count"].view, **state).launch(0, 0, 0)

    wanted = {name: from_bits(to_bits(x, kind), kind) for name, (x, kind) in arrays.items()}
    for name in ("k_cache", "v_cache"):
        wanted[name] = wanted[name][:, : cache.capacity]
    committed = {name: x.copy() for name, x in wanted.items()}
    all_tokens = np.ones((cache.batch, cache.tokens), np.bool_)
    wanted["active"] = all_tokens.astype(np.float64)
    committed["active"] = np.arange(cache.tokens) < committed["count"][:, None]
    outs = [step(wanted, t, cache, scale) for t in range(cache.tokens)]
    for t in range(cache.tokens):
        step(committed, t, cache, scale)
    problems = []
    for name in STATE:
        got = gpu.download(buffers[name])
        got = got[:, : cache.capacity] if name in ("k_cache", "v_cache") else got
        problems += [] if np.array_equal(got, committed[name]) else [f"{name}: differs"]
    return problems, found, np.stack(outs, axis=1)
