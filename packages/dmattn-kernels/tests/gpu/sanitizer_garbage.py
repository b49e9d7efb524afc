"""Wrong numbers in everything that kernels read on the device: results may be wrong, nothing else.

    compute-sanitizer --tool memcheck python sanitizer_garbage.py [--only NAMES]

In each operation the boundaries of packed sequences, the lists of keys and their counts, the ends
of intervals, or the positions and counts of a cache are replaced by arbitrary int32 numbers, in
several ways. The operation has to end, without an access outside its tensors and its workspace.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import dmattn_kernels as kernels

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.raw_cuda import Array, Buffer, Gpu
from gpu.sanitizer_cache import Append, draw_cache
from gpu.sanitizer_cases import (
    SELECTED,
    draw_inputs,
    enqueue_both,
    is_named,
)
from gpu.sanitizer_draft import DRAFTS, STATE, Draft, draw_draft
from gpu.sanitizer_keys import Moves, draw_moves, enqueue_moves
from gpu.sanitizer_launch import Launch
from gpu.sanitizer_listed import MANY_LISTS
from gpu.sanitizer_packed import join
from gpu.sanitizer_packed_launches import HOPPER_PACKED_GRADIENTS, LENGTHS, PACKED
from gpu.sanitizer_selection import BLOCK_ROWS, select

Int = npt.NDArray[np.int64]
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
SEEDS = 5  # one for each way in which numbers are wrong, see garbage()
GUARD = 1 << 16  # bytes on either side of an allocation
GUARD_BYTE = 0xA5


# --- wrong numbers --------------------------------------------------------------------------------


def garbage(draw: np.random.Generator, seed: int, shape: tuple[int, ...], top: int) -> Int:
    """int32 values in place of numbers from 0 to `top`; the seed chooses how they are wrong."""
    if seed == 0:  # anything
        return draw.integers(INT_MIN, INT_MAX, shape, endpoint=True)
    if seed == 1:  # the edges
        return draw.choice([INT_MIN, INT_MAX, -1, 0, 1, top - 1, top, top + 1], shape)
    if seed == 2:  # not far from right
        return draw.integers(-top - 1, 2 * top + 2, shape)
    if seed == 3:  # falling
        return np.sort(draw.integers(0, top + 1, shape))[..., ::-1].copy()
    return draw.integers(0, top + 1, shape)  # in range, in no order


# --- memory ---------------------------------------------------------------------------------------


class WatchedGpu(Gpu):
    """Remembers what has been uploaded and, with `guard`, puts a margin around each allocation.

    Under compute-sanitizer no margins are needed: it sees all accesses outside allocations, even
    reads.
    """

    def __init__(self, guard: int = 0) -> None:
        super().__init__()
        self._guard = guard
        self._ranges: list[tuple[int, int]] = []
        self._uploads: list[tuple[Buffer, Array]] = []

    def allocate(self, size: int, fill: int | None = None) -> int:
        if not self._guard:
            return super().allocate(size, fill)
        start = super().allocate(size + 2 * self._guard, GUARD_BYTE) + self._guard
        self._ranges.append((start, size))
        if fill is not None and size:
            args = ctypes.c_uint64(start), ctypes.c_ubyte(fill), ctypes.c_size_t(size)
            self._call("cuMemsetD8_v2", *args)
        return start

    def upload(self, values: Array, dtype: str, skip: int = 0) -> Buffer:
        buffer = super().upload(values, dtype, skip)
        self._uploads.append((buffer, values))
        return buffer

    def forget_uploads(self) -> None:
        """Forget what has been uploaded so far: the launches may change it."""
        self._uploads.clear()

    def damage(self) -> list[str]:
        """What the launches have changed: int32 inputs, and margins around allocations."""
        self._call("cuCtxSynchronize")
        problems = []
        for buffer, values in self._uploads:
            if buffer.dtype == "i32" and not np.array_equal(self.download(buffer), values):
                problems.append(f"an input of shape {buffer.shape} has changed")
        for start, size in self._ranges:
            for margin in (start - self._guard, start + size):
                if (self._bytes(margin) != GUARD_BYTE).any():
                    problems.append(f"written outside an allocation of {size} bytes")
        return problems

    def _bytes(self, address: int) -> npt.NDArray[np.uint8]:
        host = np.empty(self._guard, np.uint8)
        to = host.ctypes.data_as(ctypes.c_void_p)
        self._call("cuMemcpyDtoH_v2", to, ctypes.c_uint64(address), ctypes.c_size_t(host.nbytes))
        return host

    def release(self) -> None:
        super().release()
        self._ranges.clear()
        self._uploads.clear()


# --- the operations -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """`run(gpu, draw, seed)` launches the operation once."""

    name: str
    run: Callable[[WatchedGpu, np.random.Generator, int], None]


def attend_packed(
    launch: Launch, dtype: str, head_dim: int
) -> Callable[[WatchedGpu, np.random.Generator, int], None]:
    """Forward and backward over sequences whose boundaries are wrong."""

    def run(gpu: WatchedGpu, draw: np.random.Generator, seed: int) -> None:
        alone = [
            dataclasses.replace(launch, batch=1, seqlen_q=m, seqlen_k=n) for m, n in launch.packed
        ]
        joined = join([draw_inputs(part, dtype, head_dim, draw) for part in alone])
        inputs = {
            name: gpu.upload(x, kind, 0 if name == "dlse" else launch.skip)
            for name, (x, kind) in joined.items()
        }
        rows, keys = joined["q"][0].shape[0], joined["k"][0].shape[0]
        bounds = (len(launch.packed) + 1,)
        call: dict[str, Any] = {
            "cu_seqlens_q": gpu.upload(garbage(draw, seed, bounds, rows), "i32").view,
            "cu_seqlens_k": gpu.upload(garbage(draw, seed, bounds, keys), "i32").view,
            "max_seqlen_q": max(m for m, _ in launch.packed),
            "max_seqlen_k": max(n for _, n in launch.packed),
        }
        enqueue_both(gpu, launch, inputs, (launch.nheads, rows), call, 0xFF)

    return run


def attend_selected(
    launch: Launch, dtype: str, head_dim: int
) -> Callable[[WatchedGpu, np.random.Generator, int], None]:
    """Forward and backward over lists of keys, counts and ends of intervals that are wrong."""

    def run(gpu: WatchedGpu, draw: np.random.Generator, seed: int) -> None:
        raw = draw_inputs(launch, dtype, head_dim, draw)
        raw.pop("mask", None)
        inputs = {
            name: gpu.upload(x, kind, 0 if name == "dlse" else launch.skip)
            for name, (x, kind) in raw.items()
        }
        batch, heads, keys = raw["scores"][0].shape
        assert launch.select is not None
        blocks = -(-launch.seqlen_q // BLOCK_ROWS) if launch.causal else 1
        capacity = kernels.select_capacity(launch.select.window, keys, launch.causal)

        def wrong(shape: tuple[int, ...], top: int) -> Any:
            return gpu.upload(garbage(draw, seed, shape, top), "i32").view

        call = {
            "selection": (
                wrong((batch, heads, keys), keys),
                wrong((batch, heads, blocks, capacity), keys - 1),
                wrong((batch, heads, blocks), capacity),
                wrong((batch, heads, blocks), capacity) if launch.causal else None,
            )
        }
        row_shape = (launch.batch, launch.nheads, launch.seqlen_q)
        enqueue_both(gpu, launch, inputs, row_shape, call, 0xFF)

    return run


def select_documents(keys: int, window: int) -> Callable[..., None]:
    """A selection within documents whose boundaries are wrong."""

    def run(gpu: WatchedGpu, draw: np.random.Generator, seed: int) -> None:
        scores = gpu.upload(draw.standard_normal((1, 2, keys)), "f32")
        bounds = tuple(int(x) for x in garbage(draw, seed, (9,), keys))
        select(gpu, scores, None, window, keys, True, 0xFF, bounds)

    return run


def build_lists(seqlen_q: int, keys: int, reach: int, capacity: int) -> Callable[..., None]:
    """Lists of intervals that end anywhere."""

    def run(gpu: WatchedGpu, draw: np.random.Generator, seed: int) -> None:
        end = gpu.upload(garbage(draw, seed, (1, 2, keys), keys), "i32")
        lists = (1, 2, -(-seqlen_q // BLOCK_ROWS))
        idx = gpu.output((*lists, capacity), "i32", 0xFF)
        count, full, needed = (gpu.output(lists, "i32", 0xFF) for _ in range(3))
        views = (end.view, idx.view, count.view, full.view)
        params = kernels.BuildKeyListsParams(0, views, seqlen_q, reach, needed.view)
        size = params.workspace_size()
        params.launch(gpu.allocate(size, 0xFF), size, 0)

    return run


def append(launch: Append, dtype: str, head_dim: int) -> Callable[..., None]:
    """Tokens for a cache whose positions and counts are wrong and whose scores are NaN or inf."""

    def run(gpu: WatchedGpu, draw: np.random.Generator, seed: int) -> None:
        arrays = draw_cache(dtype, head_dim, launch, draw)
        for name in ("position", "seen"):
            shape = arrays[name][0].shape
            arrays[name] = garbage(draw, seed, shape, launch.capacity), "i32"
        for name in ("score", "score_new"):
            shape = arrays[name][0].shape
            # With seed 0 every score of the cache is NaN, so that no entry is the lowest.
            odd = [np.nan, np.inf, -np.inf, 0.0] if seed else [np.nan]
            odd = odd if name == "score" else [np.inf, np.inf, np.nan, 1.0]
            arrays[name] = draw.choice(odd, shape), launch.score_dtype
        views = {name: gpu.upload(x, kind).view for name, (x, kind) in arrays.items()}
        gpu.forget_uploads()  # the cache changes
        if launch.queries:
            views["out"] = gpu.output(arrays["q"][0].shape, dtype, 0xFF).view
        params = kernels.CacheAppendParams(0, **views, evict=launch.evict)
        size = params.workspace_size()
        params.launch(gpu.allocate(size, 0xFF), size, 0)

    return run


def draft(launch: Draft, dtype: str, head_dim: int) -> Callable[..., None]:
    """A draft on such a cache, its commit, and the commit of a draft of wrong numbers."""

    def run(gpu: WatchedGpu, draw: np.random.Generator, seed: int) -> None:
        arrays, cache = draw_draft(dtype, head_dim, launch, draw), launch.cache
        for name in ("position", "seen", "count"):
            shape = arrays[name][0].shape
            arrays[name] = garbage(draw, seed, shape, cache.capacity), arrays[name][1]
        shape = arrays["score"][0].shape
        arrays["score"] = draw.choice([np.nan, np.inf, -np.inf, 0.0], shape), cache.score_dtype
        views = {name: gpu.upload(x, kind).view for name, (x, kind) in arrays.items()}
        shape = (cache.batch, cache.nheads_k, cache.tokens, 4)
        wrong = gpu.upload(garbage(draw, seed, shape, cache.capacity), "i32").view
        gpu.forget_uploads()  # the cache changes
        out = gpu.output(arrays["q"][0].shape, dtype, 0xFF).view
        fresh = gpu.output(shape, "i32", 0xFF).view
        count = views.pop("count")
        params = kernels.CacheDraftParams(0, **views, draft=fresh, out=out)
        size = params.workspace_size()
        params.launch(gpu.allocate(size, 0xFF), size, 0)
        state = {name: views[name] for name in STATE}
        for tokens in (fresh, wrong):
            kernels.CacheCommitParams(0, tokens, count, **state).launch(0, 0, 0)

    return run


def move(launch: Moves, dtype: str, head_dim: int) -> Callable[..., None]:
    """Keys that are joined and kept with wrong ends, places, positions and counts."""

    def run(gpu: WatchedGpu, draw: np.random.Generator, seed: int) -> None:
        arrays = draw_moves(dtype, head_dim, launch, draw)
        for name in ("end", "place", "place_first", "position", "seen"):
            shape = arrays[name][0].shape
            arrays[name] = garbage(draw, seed, shape, arrays["end"][0].shape[2]), "i32"
        buffers = {name: gpu.upload(x, kind) for name, (x, kind) in arrays.items()}
        enqueue_moves(gpu, dtype, head_dim, launch, buffers, 0xFF)

    return run


# Deterministic launches, for each way in which the backward finds its keys: there thread blocks
# wait for one another, which must not last forever.
DETERMINISTIC = (
    Launch(
        "packed, key mask, causal, deterministic",
        nheads=4,
        nheads_k=2,
        mask="1k1k",
        bias="1k1k",
        causal=True,
        deterministic=True,
        packed=LENGTHS,
    ),
    Launch(
        "packed, dense mask, deterministic",
        mask="1hqk",
        bias="1hqk",
        causal=True,
        deterministic=True,
        packed=LENGTHS,
    ),
    # Lists of several tiles, over many row blocks.
    Launch(
        "packed, long, key mask, causal, deterministic",
        mask="1k1k",
        causal=True,
        deterministic=True,
        packed=((700, 700), (300, 900), (900, 100), (1, 600)),
    ),
)


def cases() -> Iterator[Case]:
    for launch in (*PACKED, *DETERMINISTIC, *HOPPER_PACKED_GRADIENTS):
        for dtype, head_dim in (("bf16", 64), ("f16", 128)):
            yield Case(f"{dtype} {head_dim} {launch.name}", attend_packed(launch, dtype, head_dim))
    for name in ("packed", "packed, key mask", "packed, dense mask and bias"):
        launch = next(x for x in PACKED if x.name == name)
        yield Case(f"bf16 256 {name}", attend_packed(launch, "bf16", 256))
    for launch in HOPPER_PACKED_GRADIENTS:
        yield Case(f"bf16 256 {launch.name}", attend_packed(launch, "bf16", 256))
    for launch in (*SELECTED, MANY_LISTS):
        if launch.attend and not (launch.select and launch.select.bounds):
            yield Case(f"bf16 64 {launch.name}", attend_selected(launch, "bf16", 64))
    for name in ("running top-w", "top-w of all keys", "one query, top-w"):
        launch = next(x for x in SELECTED if x.name == name)
        for head_dim in (128, 256):
            yield Case(f"f16 {head_dim} {name}", attend_selected(launch, "f16", head_dim))
    yield Case("selection within documents", select_documents(300, 50))
    yield Case("selection within long documents", select_documents(33000, 40))
    yield Case("lists of intervals", build_lists(300, 333, 0, 384))
    yield Case("lists of intervals that do not fit", build_lists(200, 333, 64, 128))
    yield Case("lists of long intervals", build_lists(4200, 4300, 0, 512))
    for launch_ in (
        Append("cache append", "f32"),
        Append("cache that keeps all", "f32", evict=False),
        Append("cache step", "f32", queries=4, tokens=3, capacity=40, held=38),
        Append("cache step, 16-bit scores", "bf16", queries=1, tokens=3, capacity=200, held=38),
    ):
        yield Case(launch_.name, append(launch_, "bf16", 64))
    for dtype, head_dim, drafted in DRAFTS:
        yield Case(f"{dtype} {head_dim} {drafted.name}", draft(drafted, dtype, head_dim))
    for moves in (Moves("keys moved"), Moves("keys moved, not in order", placed=True)):
        yield Case(moves.name, move(moves, "bf16", 64))


def run_case(gpu: WatchedGpu, case: Case, seed: int) -> list[str]:
    """Run a case; returns what it has damaged. An access outside all memory raises RuntimeError."""
    try:
        case.run(gpu, np.random.default_rng(100 * seed + len(case.name)), seed)
        return gpu.damage()
    finally:
        gpu.release()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help=is_named.__doc__)
    only = parser.parse_args().only
    gpu, failures, launches = WatchedGpu(), 0, 0
    print("architecture", kernels.device_architecture(0), flush=True)
    for case in (case for case in cases() if is_named(case.name, only)):
        for seed in range(SEEDS):
            start = time.perf_counter()
            problems = run_case(gpu, case, seed)
            failures += bool(problems)
            launches += 1
            seconds = time.perf_counter() - start
            verdict = "; ".join(problems) or "ok"
            print(f"garbage {seed}: {case.name}: {verdict} ({seconds:.2f} s)", flush=True)
    print(f"finished {launches} launches, {failures} wrong", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
