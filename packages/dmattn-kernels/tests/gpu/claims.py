"""Tests claimed by workers: one file for each, named by the test's place in collection order.

Also places for which processes wait, as there are fewer places than processes.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LOOK_AGAIN_SECONDS = 0.2


def name(place: int) -> str:
    """The file name of the claim of the test at this place in collection order."""
    return f"{place:05d}"


def left(folder: Path, tests: Sequence[str]) -> list[str]:
    """Those of all tests, given in collection order, that no worker has claimed."""
    taken = {claim.name for claim in folder.iterdir()}
    return [test for place, test in enumerate(tests) if name(place) not in taken]


def take(claim: Path, test: str, worker: str) -> bool:
    """Claim a test for a worker. False if another worker has claimed it before."""
    try:
        descriptor = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(descriptor, f"{test}\n{worker}".encode())
    os.close(descriptor)
    return True


def read(claim: Path) -> tuple[str, str]:
    """The test, and the worker that claimed it; both empty if it ended before it wrote them."""
    test, _, worker = claim.read_text().rpartition("\n")
    return test, worker


def give_back(folder: Path, ended: Collection[str], stopped: Collection[str]) -> None:
    """Remove the claims of tests during which the time limit stopped a worker.

    Another test that has not ended is one that has ended its worker, so that its claim stays.
    """
    for claim in folder.iterdir():
        test, worker = read(claim)
        if not test or (test not in ended and worker in stopped):
            claim.unlink()


@contextmanager
def one_of_places(folder: Path, name: str, places: int) -> Iterator[None]:
    """Wait for one of so many places, and hold it until the `with` block or the process ends."""
    files = [(folder / f"{name}-{place}").open("w") for place in range(places)]
    try:
        for file in itertools.cycle(files):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOOK_AGAIN_SECONDS / places)
        yield
    finally:
        for file in files:
            file.close()
