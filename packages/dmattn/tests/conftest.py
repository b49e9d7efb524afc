"""Settings of the whole suite: few threads, and the same examples in every run."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from plain_backend import PlainBackend, preferred

settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,  # each_backend, which serves all examples alike
    ],
)
# More examples, other ones each time: HYPOTHESIS_PROFILE=search pytest ...
settings.register_profile("search", parent=settings.get_profile("fixed"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

torch.set_num_threads(1)


@pytest.fixture(params=["cpu", "plain"])
def each_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """A test that uses this runs once on each backend that computes on the CPU."""
    plain = PlainBackend()
    with preferred(plain) if request.param == "plain" else nullcontext():
        yield request.param


# The source distribution of the package comes without the repository's example.
if not (Path(__file__).parents[3] / "examples").is_dir():
    collect_ignore = ["test_modules_example.py", "test_modules_generation.py"]
