"""These tests need a GPU: the CPU is tested in packages/dmattn/tests/integrations.

With DMATTN_TEST_TARGET=cpu tests that are not marked `cuda` run on the CPU as well, for work on the
tests themselves.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from attention.targets import SHARE_VARIABLE, TARGET_VARIABLE, target
from dmattn.integrations.transformers.registration import check_transformers

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# The models come from the tests on the CPU.
sys.path.append(str(ROOT / "packages" / "dmattn" / "tests" / "integrations"))

_wanted = torch.cuda.is_available() or os.environ.get(TARGET_VARIABLE) == "cpu"
if not _wanted or target().backend is not None or target().repeats:
    collect_ignore_glob = ["test_*.py"]
else:
    try:
        check_transformers()
    except ImportError:  # test_versions.py fails, and says so
        collect_ignore = ["test_transformers.py", "test_doge.py"]


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "cuda: needs a CUDA device",
        "slow: takes seconds; started first, has more time, and is left out of a quick run",
    ):
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests that cannot or should not run here; items of other folders stay."""
    items[:] = [item for item in items if HERE not in item.path.parents or _runs(item)]


def _runs(item: pytest.Item) -> bool:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        return False
    is_quick = int(os.environ.get(SHARE_VARIABLE, "1")) > 1 and torch.cuda.is_available()
    return not (is_quick and item.get_closest_marker("slow"))


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    torch.manual_seed(0)
