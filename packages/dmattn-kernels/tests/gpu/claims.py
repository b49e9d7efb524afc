"""Tests claimed by workers: a file each, named by the test's place in the order of collection."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path


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
