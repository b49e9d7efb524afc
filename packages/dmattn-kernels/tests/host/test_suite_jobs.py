"""How the GPU suite spreads its processes, which needs no GPU to be seen."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from gpu.jobs import Job, Pool

SHOW = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"


def run(count: int, folder: Path) -> list[str]:
    jobs = [Job(str(i), [sys.executable, "-c", SHOW], folder / str(i)) for i in range(count)]
    return sorted(job.output.strip() for job in Pool(2, time.monotonic() + 60).run(jobs))


def test_each_of_several_gpus_is_the_first_in_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert run(4, tmp_path) == ["4,6", "4,6", "6,4", "6,4"]


@pytest.mark.parametrize("visible", ["", "3"])
def test_a_single_gpu_stays_what_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert run(1, tmp_path) == [visible]
