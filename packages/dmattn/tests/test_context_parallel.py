"""Context parallel attention gives on every rank what a single process gives.

The cases are in `parallel_cases.py`, which is run once for all tests.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from parallel_cases import CASES

from dmattn.distributed import context_parallel_attention, groups

WORLDS = (1, 2, 3, 4)
SCRIPT = Path(__file__).with_name("parallel_cases.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(SCRIPT), str(folder), *map(str, WORLDS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=900, env=environment
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\u6f22", "\U0001f600"])
def test_an_error_of_any_text_fits_its_message(letter: str) -> None:
    """A character may take twelve bytes in a message."""
    message = groups._as_message({}, ValueError(letter * 5000))
    assert len(message) <= groups.MESSAGE_BYTES
    assert set(json.loads(message)["error"]) == {letter}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_agrees_with_one_process(results: Path, name: str, world: int) -> None:
    for rank in range(world):
        found = json.loads((results / f"{world}.{rank}.json").read_text())
        assert name in found, f"rank {rank} did not get so far"
        assert found[name] == "", f"rank {rank}:\n{found[name]}"


def test_a_lost_rank_ends_the_others_with_an_error(results: Path) -> None:
    for rank in range(2):
        assert json.loads((results / "lost" / f"dead.{rank}.json").read_text()) != ""


def test_needs_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="init_process_group"):
        context_parallel_attention(None, None, None, None, window_size=4)  # type: ignore[call-overload]
