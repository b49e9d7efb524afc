"""Keys joined and kept, for sanitizer_cases.py, checked against numpy."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

import dmattn_kernels as kernels
from gpu.raw_cuda import Array, Buffer, Gpu, from_bits, to_bits

Float = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Moves:
    """Keys of a state and of a stretch are joined, and those that a row keeps are copied."""

    name: str
    score_dtype: str = "f32"  # of the results
    new_score_dtype: str = "f32"
    held: int = 12
    spare: int = 5  # entries without a key in front of them
    fresh: int = 600
    window: int = 40
    kept: float = 0.05  # of all keys
    batch: int = 2
    heads: int = 4
    heads_k: int = 2  # of the keys of the stretch
    skip: int = 0  # elements by which keys and values are shifted off their alignment
    placed: bool = False  # whether the keys lie in another order than that of their positions
    strided: bool = False  # whether the heads' scores of a key are adjacent in the results


def draw_moves(
    dtype: str, head_dim: int, launch: Moves, draw: np.random.Generator
) -> dict[str, tuple[Array, str]]:
    """Values and element types of what both calls read."""
    batch, heads, keys = launch.batch, launch.heads, launch.spare + launch.held + launch.fresh
    shape = (batch, heads, keys)
    end = np.where(draw.random(shape) < launch.kept, keys, draw.integers(-2, keys, shape))
    return {
        "k_first": (draw.standard_normal((batch, launch.held, heads, head_dim)), dtype),
        "v_first": (draw.standard_normal((batch, launch.held, heads, head_dim)), dtype),
        "score_first": (draw.standard_normal((batch, heads, launch.held)), launch.score_dtype),
        "k_new": (draw.standard_normal((batch, launch.fresh, launch.heads_k, head_dim)), dtype),
        "v_new": (draw.standard_normal((batch, launch.fresh, launch.heads_k, head_dim)), dtype),
        "score_new": (draw.standard_normal((1, 1, launch.fresh)), launch.new_score_dtype),
        "mask_new": (draw.random((batch, launch.heads_k, launch.fresh)) < 0.9, "bool"),
        "end": (end, "i32"),
        "position": (draw.integers(0, 100, (batch, heads, launch.spare + launch.held)), "i32"),
        "seen": (draw.integers(100, 200, (batch,)), "i32"),
        "place": (np.argsort(draw.random(shape), -1), "i32"),
        "place_first": (np.argsort(draw.random((batch, heads, launch.held)), -1), "i32"),
    }


def run_moves(gpu: Gpu, dtype: str, head_dim: int, launch: Moves, fill: int | None) -> list[str]:
    """Run both calls, and return what is wrong with their results."""
    draw = np.random.default_rng(head_dim)
    arrays = draw_moves(dtype, head_dim, launch, draw)
    buffers = {
        name: gpu.upload(x, kind, launch.skip if name[:2] in ("k_", "v_") else 0)
        for name, (x, kind) in arrays.items()
    }
    values = {name: from_bits(to_bits(x, kind), kind) for name, (x, kind) in arrays.items()}
    joined, kept = enqueue_moves(gpu, dtype, head_dim, launch, buffers, fill)
    wanted_joined = join(values, launch)
    wanted_kept = keep(values, wanted_joined, launch)
    return [
        f"{name}: differs"
        for name, buffer, wanted in (
            *zip(("k", "v", "score"), joined, wanted_joined, strict=True),
            *zip(("k kept", "v kept", "score kept"), kept, wanted_kept, strict=False),
            *zip(("position", "seen"), kept[3:], wanted_kept[3:], strict=True),
        )
        if not np.array_equal(contents(gpu, buffer), wanted)
    ]


def contents(gpu: Gpu, buffer: Buffer) -> Float:
    """The contents of a tensor that is contiguous, maybe with its last two dimensions swapped."""
    if buffer.stride[-1] == 1:
        return gpu.download(buffer)
    return np.swapaxes(gpu.download(buffer.swapped()), -1, -2)


def enqueue_moves(
    gpu: Gpu,
    dtype: str,
    head_dim: int,
    launch: Moves,
    buffers: dict[str, Buffer],
    fill: int | None,
) -> tuple[list[Buffer], list[Buffer]]:
    """Join the keys, and keep some of them; returns the results of both calls."""
    batch, heads, window = launch.batch, launch.heads, launch.window
    keys = launch.spare + launch.held + launch.fresh

    def outputs(count: int) -> list[Buffer]:
        rows = [gpu.output((batch, count, heads, head_dim), dtype, fill) for _ in range(2)]
        shape = (batch, count, heads) if launch.strided else (batch, heads, count)
        score = gpu.output(shape, launch.score_dtype, fill)
        return [*rows, score.swapped() if launch.strided else score]

    views = {name: buffer.view for name, buffer in buffers.items()}
    joined = outputs(keys)
    names = ("k_first", "v_first", "score_first", "k_new", "v_new", "score_new", "mask_new")
    join_params = kernels.JoinKeysParams(
        *(0, *(views[name] for name in names), *(buffer.view for buffer in joined)),
        views["place_first"] if launch.placed and launch.held else None,
    )
    join_params.launch(0, join_params.workspace_size(), 0)
    kept = outputs(window)
    kept += [gpu.output((batch, heads, window), "i32", fill), gpu.output((batch,), "i32", fill)]
    keep_params = kernels.KeepKeysParams(
        *(0, keys - 1, views["end"], views["place"] if launch.placed else None),
        *(*(buffer.view for buffer in joined), views["position"], views["seen"]),
        *(buffer.view for buffer in kept),
    )
    keep_params.launch(0, keep_params.workspace_size(), 0)
    return joined, kept


def join(values: dict[str, Float], launch: Moves) -> list[Float]:
    ratio, shape = launch.heads // launch.heads_k, (launch.batch, launch.heads, launch.fresh)
    found, first_score = [], values["score_first"]
    order = values["place_first"].astype(np.int64)
    if launch.placed:
        first_score = np.take_along_axis(first_score, order, 2)
    for name in ("k", "v"):
        first, fresh = values[f"{name}_first"], np.repeat(values[f"{name}_new"], ratio, 2)
        if launch.placed:
            first = np.take_along_axis(first, np.swapaxes(order, 1, 2)[..., None], 1)
        spare = np.zeros((launch.batch, launch.spare, *first.shape[2:]))
        found.append(np.concatenate((spare, first, fresh), 1))
    masked = np.repeat(values["mask_new"], ratio, 1) == 0
    score = np.where(masked, -np.inf, np.broadcast_to(values["score_new"], shape))
    spare = np.full((*shape[:2], launch.spare), -np.inf)
    return [*found, np.concatenate((spare, first_score, score), 2)]


def keep(values: dict[str, Float], joined: list[Float], launch: Moves) -> list[Float]:
    k, v, score = joined
    batch, heads, keys = score.shape
    window, held = launch.window, launch.spare + launch.held
    found = [
        np.zeros((batch, window, *k.shape[2:])),
        np.zeros((batch, window, *v.shape[2:])),
        np.full((batch, heads, window), -np.inf),
        np.full((batch, heads, window), -1.0),
        values["seen"] + keys - held,
    ]
    for b in range(batch):
        places = np.concatenate(
            (
                values["position"][b],
                np.broadcast_to(values["seen"][b] + np.arange(keys - held), (heads, keys - held)),
            ),
            1,
        )
        for h in range(heads):
            at = np.flatnonzero(values["end"][b, h] >= keys)[-window:]
            if launch.placed:
                at = values["place"][b, h][at].astype(np.int64)
            first = window - len(at)
            found[0][b, first:, h], found[1][b, first:, h] = k[b, at, h], v[b, at, h]
            found[2][b, h, first:], found[3][b, h, first:] = score[b, h, at], places[h, at]
    return found


MOVES = (
    ("bf16", 64, Moves("keys moved")),
    ("f16", 128, Moves("keys moved, not in order", placed=True, heads_k=4)),
    ("bf16", 256, Moves("keys moved, 16-bit scores", "bf16", "bf16", spare=0)),
    ("f16", 64, Moves("keys moved, scores made wider", new_score_dtype="f16", heads_k=1)),
    ("bf16", 72, Moves("keys moved, bf16 scores made wider", new_score_dtype="bf16")),
    ("bf16", 64, Moves("keys moved, more than entries", kept=0.5)),
    ("bf16", 64, Moves("keys moved, none kept", kept=0.0, fresh=1)),
    ("bf16", 64, Moves("keys moved, nothing before", held=0, spare=0)),
    ("bf16", 64, Moves("keys moved, scores of results with strides", strided=True)),
    ("bf16", 128, Moves("keys moved, a number of them that is odd", fresh=8999, strided=True)),
    # Keys that are copied in words of 8, 4 and 2 bytes.
    ("bf16", 12, Moves("keys moved by 8 bytes", fresh=300)),
    ("f32", 9, Moves("keys moved by 4 bytes", fresh=300)),
    ("f16", 9, Moves("keys moved by 2 bytes", fresh=300)),
    ("f16", 8, Moves("keys moved off their alignment", fresh=300, skip=1)),
    ("bf16", 64, Moves("many keys moved", fresh=70000, kept=0.001, window=100, heads=160, batch=1)),
)
