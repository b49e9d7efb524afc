"""Tests claimed by workers: a file each, named by the test's place in the order of collection.

And places that processes share, of which there are fewer than processes.
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
    """Of the claim of the test at a place in the order of collection."""
    return f"{place:05d}"


def left(folder: Path, tests: Sequence[str]) -> list[str]:
    """Of all tests, in the order of collection, those that nobody has taken."""
    taken = {claim.name for claim in folder.iterdir()}
    return [test for place, test in enumerate(tests) if name(place) not in taken]


def take(claim: Path, test: str, worker: str) -> bool:
    """Whether the test is now this worker's, and not another's before."""
    try:
        descriptor = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(descriptor, f"{test}\n{worker}".encode())
    os.close(descriptor)
    return True


def read(claim: Path) -> tuple[str, str]:
    """The test, and the worker that took it; both empty if that was ended before it had written."""
    test, _, worker = claim.read_text().rpartition("\n")
    return test, worker


def give_back(folder: Path, ended: Collection[str], stopped: Collection[str]) -> None:
    """Leaves the tests to others in which time stopped a worker.

    A test that has not ended otherwise is one that ended its worker.
    """
    for claim in folder.iterdir():
        test, worker = read(claim)
        if not test or (test not in ended and worker in stopped):
            claim.unlink()


@contextmanager
def one_of_places(folder: Path, name: str, places: int) -> Iterator[None]:
    """Waits until one of so many places is free; it is taken until the end, or the process's."""
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
