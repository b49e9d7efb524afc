"""The table of timed models says which limits were met or missed, and what did not run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import models_table

STEP = {"case": "Doge training step", "shape": "S100"}
TOKEN = {"case": "Doge generate", "shape": "B8 prompt 20"}
RESULTS: dict[str, Any] = {
    "gpu": "a GPU",
    "date": "2026-01-01",
    "torch": "2",
    "transformers": "5",
    "dmattn": "0",
    "dtype": "bfloat16",
    "notes": ["A note."],
    "sizes": {
        "training": 100,
        "long_training": 400,
        "batch": 8,
        "prompts": [10, 40],
        "peer_prompt": 20,
    },
    "rows": [
        STEP | {"contender": "dmattn", "quantity": "step", "ms": 10.0},
        STEP | {"contender": "sdpa", "quantity": "step", "ms": 100.0},
        STEP | {"contender": "eager", "error": "OutOfMemoryError: too large"},
        TOKEN | {"contender": "dmattn", "quantity": "token", "ms": 1.0},
        STEP | {"contender": "dmattn", "quantity": "memory", "bytes": 2**30},
        STEP | {"contender": "sdpa", "quantity": "memory", "bytes": 2**32},
    ],
}


def test_limits_are_judged() -> None:
    time, memory, long, *others = models_table.judged(RESULTS)
    assert time[1:] == (0.1, True)
    assert memory[1:] == (0.25, False)
    assert long[1:] == (None, False)
    assert len(others) == 3 and all(got is None and not met for _, got, met in others)
    only = {**RESULTS, "rows": RESULTS["rows"][:1]}
    assert len(models_table.judged(only)) == 3


def test_section_of_the_page() -> None:
    text = "\n".join(models_table.section(RESULTS))
    assert "| 0.100 | 0.111 | met |" in text
    assert "| 0.250 | 0.125 | **missed** |" in text
    assert "| did not run |  | **missed** |" in text
    assert "| not measured | 0.4 |  |" in text
    assert "| **dmattn** | memory | 1.000 GiB |" in text
    assert "OutOfMemoryError: too large" in text
