"""Tests of the compiled kernels themselves; without a GPU none of them is collected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu.device import family, is_quick

HERE = Path(__file__).parent

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "each_family: also runs for the other kernel families, not only for the first",
        "cuda: needs a CUDA device, as all tests of this folder do",
        "slow: takes seconds; started first, has more time, and is left out of a quick run",
    ):
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests of this folder that this run does not need; other folders' tests stay."""
    items[:] = [item for item in items if HERE not in item.path.parents or _runs(item)]


def _runs(item: pytest.Item) -> bool:
    if is_quick() and item.get_closest_marker("slow"):
        return False
    return family() == "sm90" or item.get_closest_marker("each_family") is not None
