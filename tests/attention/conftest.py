"""Which tests run for the target of this process, and which share of their cases."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from attention.targets import share, target

HERE = Path(__file__).parent

if target().device == "cpu":
    torch.set_num_threads(1)  # sums in one order, and the cores are for other processes
if target().name != "cpu":
    collect_ignore = ["test_properties.py"]  # looks into the blocks of the CPU backend


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "each_family: also runs for targets that repeat a backend with other tile shapes",
        "default_backend: makes calls that take no backend=; left out for targets that name one",
        "every_case: its cases have little in common, so that no share of them is left out",
        "cuda: speaks of a CUDA device, of its streams, memory or limits",
        "slow: takes seconds on a GPU; started first, and has more time",
    ):
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what does not fit the target or its share; items of other folders stay."""
    mine = [item for item in items if HERE in item.path.parents]
    fit = [item for item in mine if _fits(item)]
    whole = [item for item in fit if item.get_closest_marker("every_case")]
    left_out = set(mine) - set(whole) - set(_sample(fit, share()))
    items[:] = [item for item in items if item not in left_out]
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))


def _fits(item: pytest.Item) -> bool:
    row = target()
    if item.get_closest_marker("cuda") and row.device != "cuda":
        return False
    if item.get_closest_marker("default_backend") and row.backend is not None:
        return False
    return not row.repeats or item.get_closest_marker("each_family") is not None


def _sample(items: list[pytest.Item], share: int) -> list[pytest.Item]:
    """About one case in `share`, the same ones every time, and at least one of each test."""
    tests: dict[str, list[tuple[int, pytest.Item]]] = {}
    for item in items:
        draw = zlib.crc32(item.name.encode())
        tests.setdefault(item.nodeid.partition("[")[0], []).append((draw, item))
    kept = []
    for cases in tests.values():
        drawn = [item for draw, item in cases if draw % share == 0]
        kept += drawn or [min(cases, key=lambda case: case[0])[1]]
    return kept


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    torch.manual_seed(0)
