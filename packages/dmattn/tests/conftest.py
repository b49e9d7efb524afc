"""Settings of the whole suite: few threads, and the same numbers in every run."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from dmattn import known_calls

settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# More examples, other ones each time: HYPOTHESIS_PROFILE=search pytest ...
settings.register_profile("search", parent=settings.get_profile("fixed"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _as_if_it_were_the_first_test() -> None:
    """Random numbers, and calls remembered as checked, must not depend on the tests before.

    Which tests ran before in this process depends on the speed of the processes that share the
    tests.
    """
    torch.manual_seed(0)
    known_calls.forget()


# The source distribution of the package comes without the repository's example.
if not (Path(__file__).parents[3] / "examples").is_dir():
    collect_ignore = [
        "test_compare_attention.py",
        "test_modules_example.py",
        "test_modules_generation.py",
        "test_modules_serving.py",
    ]
