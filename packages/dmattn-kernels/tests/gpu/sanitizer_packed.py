"""Packed sequences for sanitizer_cases.py: inputs joined for a launch, and its results split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.raw_cuda import Array, Buffer, Gpu

Float = npt.NDArray[np.float64]
Lengths = Sequence[tuple[int, int]]  # of query rows and keys


def join(parts: list[dict[str, tuple[Array, str]]]) -> dict[str, tuple[Array, str]]:
    """Packed inputs, as the library takes them, from those of each sequence alone (batch 1)."""
    return {
        name: (_join([part[name][0] for part in parts], name), kind)
        for name, (_, kind) in parts[0].items()
    }


def _join(values: list[Array], name: str) -> Array:
    if name == "dlse":  # (1, nheads, rows)
        return np.concatenate(values, axis=2)[0]
    if name not in ("mask", "bias"):  # (1, rows, heads, head_dim)
        return np.concatenate(values, axis=1)[0]
    if all(x.shape[2] == 1 for x in values):  # per key: (1, heads, 1, keys)
        return np.concatenate(values, axis=3)[0, :, 0]
    longest = max(x.shape[3] for x in values)
    wide = [np.pad(x, ((0, 0), (0, 0), (0, 0), (0, longest - x.shape[3]))) for x in values]
    return np.concatenate(wide, axis=2)[0]


def arguments(gpu: Gpu, lengths: Lengths) -> dict[str, Any]:
    """The arguments that tell a call how its sequences are packed."""

    def boundaries(counts: list[int]) -> Buffer:
        return gpu.upload(np.array([0, *accumulate(counts)]), "i32")

    rows, keys = [m for m, _ in lengths], [n for _, n in lengths]
    return {
        "cu_seqlens_q": boundaries(rows).view,
        "cu_seqlens_k": boundaries(keys).view,
        "max_seqlen_q": max(rows),
        "max_seqlen_k": max(keys),
    }


def split(found: dict[str, Float], lengths: Lengths) -> Iterator[dict[str, Float]]:
    """Results of each sequence, with a batch of 1 in front again."""
    bounds = (pairwise([0, *accumulate(counts)]) for counts in zip(*lengths, strict=True))
    for (row, row_end), (key, key_end) in zip(*bounds, strict=True):
        part = {}
        for name, value in found.items():
            if name == "lse":
                part[name] = value[None, :, row:row_end]
            elif name in ("out", "dq"):
                part[name] = value[None, row:row_end]
            elif name in ("dk", "dv"):
                part[name] = value[None, key:key_end]
            elif value.ndim == 2:
                part[name] = value[None, :, None, key:key_end]
            else:
                part[name] = value[None, :, row:row_end, : key_end - key]
        yield part
