"""Launches with a sliding window, for sanitizer_cases.py, which Hopper computes without lists.

There are windows of one key, of less than a tile and of several tiles, tiles that are cut on both
sides, as many rows as keys or fewer rows, and more blocks of rows than thread blocks.
"""

from __future__ import annotations

from gpu.sanitizer_launch import Launch
from gpu.sanitizer_selection import Selecting


def _sliding(name: str, rows: int, keys: int, window: int, *sizes: int, **more: object) -> Launch:
    select = Selecting(window, "11", fill="none")
    return Launch(
        f"dense rows, window{name}",
        *(rows, keys, *(sizes or (1, 4, 2))),
        **{"causal": True, "select": select, **more},  # type: ignore[arg-type]
    )


HOPPER_WINDOWS = (
    _sliding("", 400, 400, 200),
    _sliding(" of one key", 261, 300, 1),
    _sliding(" behind many keys", 133, 700, 250),
    _sliding(", key bias", 300, 333, 150, bias="bk1k"),
    _sliding(", softcap", 300, 333, 150, softcap=3.0),
    _sliding(", more than thread blocks", 261, 261, 100, 35, 4, 2),
    _sliding(", deterministic", 700, 700, 150, deterministic=True),
)
HOPPER_WIDE_WINDOWS = (
    _sliding(", wide heads", 400, 400, 200),
    _sliding(", wide heads, softcap", 133, 400, 250, softcap=3.0),
    _sliding(", wide heads, bias", 300, 336, 150, bias="bhqk"),
    _sliding(", wide heads, key bias", 300, 333, 150, bias="bk1k"),
    _sliding(", wide heads, deterministic", 600, 600, 150, deterministic=True),
    _sliding(
        ", wide heads, softcap, deterministic", 500, 500, 100, softcap=3.0, deterministic=True
    ),
)
