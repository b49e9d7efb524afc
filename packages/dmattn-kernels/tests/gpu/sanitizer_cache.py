"""Appends to the cache, and steps of decoding, for sanitizer_cases.py, checked against numpy."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

import dmattn_kernels as kernels
from gpu.raw_cuda import Array, Gpu, from_bits, to_bits
from gpu.sanitizer_selection import with_odd

Float = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Append:
    """New tokens for a cache that starts with `held` entries."""

    name: str
    score_dtype: str
    evict: bool = True
    queries: int = 0  # query heads per kv head that attend after each token
    tokens: int = 20
    held: int = 5
    capacity: int = 12
    batch: int = 2
    nheads_k: int = 2
    softcap: float = 0.0


def run_append(
    gpu: Gpu, dtype: str, head_dim: int, launch: Append, fill: int | None
) -> tuple[list[str], Float, Float]:
    """Run a call: what is wrong with the cache afterwards, the outputs, the wanted outputs."""
    draw = np.random.default_rng(head_dim)
    arrays = draw_cache(dtype, head_dim, launch, draw)
    buffers = {name: gpu.upload(x, kind) for name, (x, kind) in arrays.items()}
    views = {name: buffer.view for name, buffer in buffers.items()}
    scale = head_dim**-0.5
    out = None
    if launch.queries:
        out = gpu.output(buffers["q"].shape, dtype, fill)
        views |= {"out": out.view}
    params = kernels.CacheAppendParams(
        0, **views, evict=launch.evict, softmax_scale=scale, softcap=launch.softcap
    )
    size = params.workspace_size()
    counts = launch.batch * (launch.nheads_k + 1) if launch.queries else 0
    params.launch(gpu.workspace(size, fill, counts), size, 0)

    wanted = {name: from_bits(to_bits(x, kind), kind) for name, (x, kind) in arrays.items()}
    attended = np.stack([step(wanted, t, launch, scale) for t in range(launch.tokens)], axis=1)
    problems = [
        f"{name}: differs"
        for name in ("k_cache", "v_cache", "score", "position", "seen")
        if not np.array_equal(gpu.download(buffers[name]), wanted[name])
    ]
    return problems, np.zeros(0) if out is None else gpu.download(out), attended


def draw_cache(
    dtype: str, head_dim: int, launch: Append, draw: np.random.Generator
) -> dict[str, tuple[Array, str]]:
    """Values and element types of the arguments of the call, by their names in the module."""
    batch, heads, capacity, tokens = launch.batch, launch.nheads_k, launch.capacity, launch.tokens
    used = np.arange(capacity) < launch.held
    # Many scores are equal, those of some tokens are NaN or -inf, and some tokens are skipped.
    score = np.where(used, np.round(draw.standard_normal((batch, heads, capacity))), -np.inf)
    new = with_odd(np.round(draw.standard_normal((batch, heads, tokens))), draw)
    position = np.broadcast_to(np.where(used, np.arange(capacity), -1), score.shape).copy()

    def rows(count: int, width: int) -> tuple[Array, str]:
        return draw.standard_normal((batch, count, width, head_dim)), dtype

    found: dict[str, tuple[Array, str]] = {
        "k_new": rows(tokens, heads),
        "v_new": rows(tokens, heads),
        "score_new": (new, launch.score_dtype),
        "active": (draw.random((batch, tokens)) < 0.8, "bool"),
        "k_cache": rows(capacity, heads),
        "v_cache": rows(capacity, heads),
        "score": (score, launch.score_dtype),
        "position": (position, "i32"),
        "seen": (np.full(batch, launch.held), "i32"),
    }
    if launch.queries:
        found["q"] = rows(tokens, heads * launch.queries)
    return found


def step(cache: dict[str, Float], t: int, launch: Append, scale: float) -> Float:
    """Put token t in; the attention (batch, heads, D) of its queries, 0 for skipped tokens."""
    heads, width = launch.nheads_k * launch.queries, cache["k_cache"].shape[3]
    out = np.zeros((launch.batch, heads, width))
    for b in range(launch.batch):
        if cache["active"][b, t]:
            put(cache, b, t, launch)
            for h in range(heads):
                out[b, h] = attend(cache, b, t, h, launch, scale)
    return out


def put(cache: dict[str, Float], b: int, t: int, launch: Append) -> None:
    """Put a token in the place of the lowest entry, or without `evict` behind the last entry.

    Of several lowest entries it takes the place of the earliest one.
    """
    score, position, place = cache["score"][b], cache["position"][b], int(cache["seen"][b])
    if not launch.evict and place >= launch.capacity:
        return
    cache["seen"][b] += 1
    for h in range(launch.nheads_k):
        new = cache["score_new"][b, h, t]
        slot = np.lexsort((position[h], score[h]))[0] if launch.evict else place
        if launch.evict and (not new > -np.inf or new < score[h, slot]):
            continue
        score[h, slot] = new if new > -np.inf else -np.inf
        position[h, slot] = place
        cache["k_cache"][b, slot, h] = cache["k_new"][b, t, h]
        cache["v_cache"][b, slot, h] = cache["v_new"][b, t, h]


def attend(cache: dict[str, Float], b: int, t: int, h: int, launch: Append, scale: float) -> Float:
    head = h // launch.queries
    k, v = (cache[name][b, :, head] for name in ("k_cache", "v_cache"))
    logits = scale * (k @ cache["q"][b, t, h])
    if launch.softcap:
        logits = launch.softcap * np.tanh(logits / launch.softcap)
    logits = logits + cache["score"][b, head]
    if logits.max() == -np.inf:  # no key yet
        return np.zeros(v.shape[1])
    weights = np.exp(logits - logits.max())
    found: Float = weights @ v / weights.sum()
    return found
