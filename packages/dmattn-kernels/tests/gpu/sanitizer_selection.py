"""Selections of keys for sanitizer_cases.py, checked against numpy."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import dmattn_kernels as kernels
from gpu.raw_cuda import Buffer, Gpu, View

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
BLOCK_ROWS = 128  # query rows that share a list of keys


@dataclasses.dataclass(frozen=True)
class Selecting:
    """The selection that a launch makes."""

    window: int
    heads: str = "bk"  # of the scores: batch (b|1), then query heads, kv heads or one (h|k|1)
    fill: str = "random"  # a key of FILLS
    own_dtype: bool = False  # scores in the dtype of q, instead of float32
    bounds: tuple[int, ...] = ()  # of packed documents

    @property
    def known_window(self) -> int:
        """The window that attention is told if it is a sliding window, else 0."""
        return self.window if self.fill == "none" else 0


def with_odd(x: Float, draw: np.random.Generator) -> Float:
    odd = draw.random(x.shape)
    return np.where(odd < 0.1, np.nan, np.where(odd < 0.2, -np.inf, np.where(odd < 0.25, 0.0, x)))


FILLS = {
    "random": lambda x, draw: x,
    "ties": lambda x, draw: np.round(x),
    "none": lambda x, draw: np.zeros_like(x),  # each row keeps the last keys: a sliding window
    "odd": with_odd,
}


def draw_scores(
    selecting: Selecting, shape: tuple[int, ...], draw: np.random.Generator
) -> npt.NDArray[np.float64]:
    values: Float = FILLS[selecting.fill](draw.standard_normal(shape), draw)
    return values


# --- what is wanted -------------------------------------------------------------------------------


def wanted_end(
    scores: Float, window: int, seqlen_q: int, causal: bool, bounds: tuple[int, ...] = ()
) -> Int:
    """Interval ends, int (heads, Sk), from scores (heads, Sk): 0 if no query row sees the key."""
    if not bounds:
        return np.stack([_end_of_row(row, window, seqlen_q, causal) for row in scores])
    found = np.zeros(scores.shape, np.int64)
    for start, stop in itertools.pairwise(bounds):
        for row, end in zip(scores, found, strict=True):
            alone = _end_of_row(row[start:stop], window, stop - start, causal)
            end[start:stop] = np.where(alone > 0, alone + start, 0)
    return found


def _end_of_row(scores: Float, window: int, seqlen_q: int, causal: bool) -> Int:
    """Keys are added one after the other; once there are too many, the lowest is dropped."""
    seqlen_k = len(scores)
    end = np.zeros(seqlen_k, np.int64)
    kept: list[tuple[float, int]] = []
    for key, score in enumerate(scores.tolist()):
        if not score > -np.inf:
            continue
        heapq.heappush(kept, (score, key))
        if len(kept) > window:
            end[heapq.heappop(kept)[1]] = key if causal else 0
    for _, key in kept:
        end[key] = seqlen_k
    return visible(end, seqlen_q) if causal else end


def visible(end: Int, seqlen_q: int) -> Int:
    """`end`, with 0 for every key that is dropped before a query row could see it."""
    seqlen_k = end.shape[-1]
    start = np.maximum(np.arange(seqlen_k), seqlen_k - seqlen_q)
    return np.where(end > start, end, 0)


def keep_mask(end: Int, seqlen_q: int, causal: bool) -> npt.NDArray[np.bool_]:
    """Which keys each row keeps, bool (..., Sq, Sk), from end (..., Sk)."""
    seqlen_k = end.shape[-1]
    if not causal:
        return np.broadcast_to((end > 0)[..., None, :], (*end.shape[:-1], seqlen_q, seqlen_k))
    row = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    kept: npt.NDArray[np.bool_] = (np.arange(seqlen_k) <= row) & (row < end[..., None, :])
    return kept


def _wanted_lists(end: Int, seqlen_q: int, causal: bool) -> Iterator[tuple[Int, Int]]:
    """For each block of rows, the keys that all its rows keep and those that only some keep."""
    seqlen_k = len(end)
    key = np.arange(seqlen_k)
    if not causal:
        yield np.flatnonzero(end > 0), np.zeros(0, np.int64)
        return
    for first in range(seqlen_k - seqlen_q, seqlen_k, BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, seqlen_k) - 1
        listed = (key <= last) & (end > np.maximum(key, first))
        full = listed & (key <= first) & (end > last)
        yield np.flatnonzero(full), np.flatnonzero(listed & ~full)


# --- the launches ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Selection:
    """The device arrays of one selection, each (batch|1, heads, ...)."""

    end: Buffer
    idx: Buffer
    count: Buffer
    full: Buffer | None

    @property
    def views(self) -> tuple[View, View, View, View | None]:
        full = None if self.full is None else self.full.view
        return self.end.view, self.idx.view, self.count.view, full


def select(
    gpu: Gpu,
    scores: Buffer,
    key_mask: Buffer | None,
    window: int,
    seqlen_q: int,
    causal: bool,
    fill: int | None,
    bounds: tuple[int, ...] = (),
) -> Selection:
    """Enqueue a selection by scores (batch|1, heads|1, Sk)."""
    shapes = [x.shape for x in (scores, key_mask) if x is not None]
    batch, heads = (max(shape[axis] for shape in shapes) for axis in (0, 1))
    seqlen_k = scores.shape[2]
    capacity = kernels.select_capacity(window, seqlen_k, causal)
    blocks = -(-seqlen_q // BLOCK_ROWS) if causal else 1
    selection = Selection(
        gpu.output((batch, heads, seqlen_k), "i32", fill),
        gpu.output((batch, heads, blocks, capacity), "i32", fill),
        gpu.output((batch, heads, blocks), "i32", fill),
        gpu.output((batch, heads, blocks), "i32", fill) if causal else None,
    )
    mask = None if key_mask is None else key_mask.view
    documents = gpu.upload(np.array(bounds), "i32").view if bounds else None
    params = kernels.SelectParams(
        0, scores.view, mask, selection.views, window, seqlen_q, causal, documents
    )
    size = params.workspace_size()
    params.launch(gpu.allocate(size, fill), size, 0)
    return selection


def check_selection(
    gpu: Gpu, selection: Selection, end: Int, seqlen_q: int, causal: bool
) -> list[str]:
    """What differs from `end` (batch|1, heads, Sk), the wanted interval ends."""
    found = gpu.download(selection.end).astype(np.int64)
    found = visible(found, seqlen_q) if causal else found
    problems = [] if np.array_equal(found, end) else ["end: differs"]
    counts = gpu.download(selection.count).astype(np.int64).ravel()
    full = counts
    if selection.full is not None:
        full = gpu.download(selection.full).astype(np.int64).ravel()
    lists = [
        x for row in end.reshape(-1, end.shape[2]) for x in _wanted_lists(row, seqlen_q, causal)
    ]
    capacity = selection.idx.shape[3]
    for i, (every, some) in enumerate(lists):
        if (counts[i], full[i]) != (len(every) + len(some), len(every)):
            problems.append(f"list {i}: {counts[i]} keys, {full[i]} of them full")
            continue
        # Entries behind the rounded count are not written.
        rounded = min(-(-int(counts[i]) // 128) * 128, capacity)
        keys = gpu.download(selection.idx, i * capacity, rounded)
        split = np.split(keys, [len(every), counts[i]])
        if not (
            np.array_equal(np.sort(split[0]), every)
            and np.array_equal(np.sort(split[1]), some)
            and not split[2].any()
        ):
            problems.append(f"list {i}: wrong keys")
    return problems[:3]


@dataclasses.dataclass(frozen=True)
class Lists:
    """Key lists of given intervals: most are short, a few may last up to the last key."""

    name: str
    seqlen_q: int
    seqlen_k: int
    reach: int = 0  # 0: unknown; then a few intervals last to the end
    capacity: int | None = None  # None: all keys
    batch: int = 2
    heads: int = 2


def run_lists(gpu: Gpu, launch: Lists, fill: int | None) -> list[str]:
    """Build the lists, and return what is wrong with them, if anything."""
    draw = np.random.default_rng(launch.seqlen_k)
    shape = (launch.batch, launch.heads, launch.seqlen_k)
    end = np.arange(launch.seqlen_k) + draw.integers(-2, (launch.reach or 40) + 1, shape)
    if launch.reach == 0:
        end = np.where(draw.random(shape) < 0.03, launch.seqlen_k, end)
    lists = (*shape[:2], -(-launch.seqlen_q // BLOCK_ROWS))
    capacity = launch.capacity
    if capacity is None:
        capacity = -(-launch.seqlen_k // BLOCK_ROWS) * BLOCK_ROWS
    given = gpu.upload(end, "i32")
    idx = gpu.output((*lists, capacity), "i32", fill)
    count, full, needed = (gpu.output(lists, "i32", fill) for _ in range(3))
    views = (given.view, idx.view, count.view, full.view)
    params = kernels.BuildKeyListsParams(0, views, launch.seqlen_q, launch.reach, needed.view)
    size = params.workspace_size()
    params.launch(gpu.allocate(size, fill), size, 0)
    wanted = [
        (*split, len(split[0]) + len(split[1]))
        for row in end.reshape(-1, launch.seqlen_k)
        for split in _wanted_lists(row, launch.seqlen_q, True)
    ]
    lengths = np.array([n for *_, n in wanted])
    kept = np.where(lengths <= capacity, lengths, 0)
    leading = np.where(lengths <= capacity, [len(every) for every, *_ in wanted], 0)
    problems = [
        f"{name}: differs"
        for name, buffer, values in (
            ("needed", needed, lengths),
            ("count", count, kept),
            ("full", full, leading),
        )
        if not np.array_equal(gpu.download(buffer).ravel(), values)
    ]
    for i, (every, some, n) in enumerate(wanted):
        if 0 < n <= capacity:
            rounded = -(-n // BLOCK_ROWS) * BLOCK_ROWS  # entries behind that are not written
            keys = np.concatenate([every, some, np.zeros(rounded - n)])
            if not np.array_equal(gpu.download(idx, i * capacity, rounded), keys):
                problems.append(f"list {i}: wrong keys")
    return problems[:3]
