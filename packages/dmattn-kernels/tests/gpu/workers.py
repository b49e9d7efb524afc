"""A pytest plugin for the workers of run_suite.py, which loads it with `-p gpu.workers`.

Workers claim tests one by one, append a line of JSON for each finished test, start the slow ones
first, and end themselves when a kernel hangs or the CUDA context is lost.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from _pytest.runner import runtestprotocol

from attention.targets import target
from gpu import OUT_OF_MEMORY
from gpu.claims import name, one_of_places, take

ON_CUDA = torch.cuda.is_available()
# Exit code of a worker whose CUDA context a kernel has destroyed, or in which memory of a test that
# has ended is still allocated.
GPU_LOST = 77
GPU_HUNG = 78  # ... and of one whose test ran past its limit
CACHED_BYTES = 1 << 30  # of torch's cache, that a worker may keep between tests
# More than this that is still allocated between tests is held by something that a test left behind:
# a worker has been seen with 25 GB of it, after tests that had found no memory.
HELD_BYTES = 2 << 30
# How often a test is tried that finds no memory, since large tests of other workers may run at the
# same time, and the pause before each further try.
ATTEMPTS, PAUSE_SECONDS = 4, 5.0
# Tests of this file take up to 40 GB each. Of all targets together so many run on a GPU at a time.
LARGE, LARGE_AT_ONCE = "test_large.py", 2
SLOW_SECONDS = 300  # limit of a test that is marked slow; for other tests the target has a limit


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dmattn GPU suite")
    group.addoption(
        "--claims", help="folder in which workers that share the tests claim them one by one"
    )
    group.addoption(
        "--results", help="file to which each finished test is appended as a line of JSON"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _leave_memory_to_others() -> Iterator[None]:
    """Many workers share the GPU, so memory that a large test has taken is freed at its end."""
    yield
    if ON_CUDA and torch.cuda.memory_reserved() > CACHED_BYTES:
        torch.cuda.empty_cache()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Claim the test by creating a file; tests that other workers have claimed are skipped."""
    claims = item.config.getoption("claims", None)
    if claims is None:
        return None
    claim: str = item.claim  # type: ignore[attr-defined]
    results = item.config.getoption("results", None)
    worker = "" if results is None else Path(results).stem.replace("results", "worker")
    if not take(Path(claims) / claim, item.nodeid, worker):
        return True
    # Which test comes next depends on the other workers, so every fixture is torn down here.
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    with _place_for(item, Path(claims).parents[1]):
        reports, tries = _run(item)
    _tries[:] = [tries]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    if ON_CUDA and torch.cuda.memory_allocated() > HELD_BYTES:
        gc.collect()
        if torch.cuda.memory_allocated() > HELD_BYTES:
            _end(item, "memory of a test that has ended is still taken")
    return True


def _end(item: pytest.Item, why: str) -> None:
    """End this worker after the test. Another worker takes its place."""
    item.session.shouldstop = why
    item.config.gpu_lost = True  # type: ignore[attr-defined]


def _place_for(item: pytest.Item, folder: Path) -> AbstractContextManager[None]:
    """Let a large test wait until at most one other one runs on the GPU.

    `folder`: the folder of all targets.
    """
    if item.path.name != LARGE:
        return nullcontext()
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    return one_of_places(folder, f"large-{gpu}", LARGE_AT_ONCE)


def _run(item: pytest.Item) -> tuple[list[pytest.TestReport], int]:
    """The reports of the last try of a test, and how many tries there were.

    A test is tried again only if it found no memory beside the tests of other workers.
    """
    for tries in range(1, ATTEMPTS + 1):
        if tries > 1:
            time.sleep(PAUSE_SECONDS)
            item._initrequest()  # type: ignore[attr-defined]  # new fixtures
        reports = runtestprotocol(item, log=False, nextitem=None)
        if any(r.failed for r in reports):
            _forget_failure()
        if not any(r.failed and OUT_OF_MEMORY in r.longreprtext for r in reports):
            break
    return reports, tries


def _forget_failure() -> None:
    """pytest keeps the last failure for debuggers, and with its frames every tensor of the test."""
    for attribute in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, attribute):
            delattr(sys, attribute)
    gc.collect()
    if ON_CUDA:
        torch.cuda.empty_cache()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    for index, item in enumerate(session.items):
        item.claim = name(index)  # type: ignore[attr-defined]
    claims = session.config.getoption("claims", None)
    if claims is not None:
        collected = Path(claims).with_name("collected")
        own = collected.with_name(f"collected-{os.getpid()}")  # others may be reading it
        own.write_text(json.dumps([item.nodeid for item in session.items]))
        own.replace(collected)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _finished.append(report)


_finished: list[pytest.TestReport] = []
_tries: list[int] = []  # of the test that has finished


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str, location: object) -> None:
    if not _finished:
        return
    reports = list(_finished)
    _finished.clear()
    outcomes = [r.outcome for r in reports]
    outcome = next((o for o in ("failed", "skipped") if o in outcomes), "passed")
    for results in _results:
        text = "\n".join(r.longreprtext for r in reports if r.failed)
        line = {
            "test": nodeid,
            "outcome": outcome,
            "seconds": round(sum(r.duration for r in reports), 3),
            "reason": _skip_reason(reports) if outcome == "skipped" else text[-4000:],
            "tries": max(_tries, default=1),
        }
        with results.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


_results: list[Path] = []  # the --results file, if there is one


def pytest_sessionstart(session: pytest.Session) -> None:
    wanted = session.config.getoption("results", None)
    _results[:] = [] if wanted is None else [Path(wanted)]


def _skip_reason(reports: list[pytest.TestReport]) -> str:
    for report in reports:
        if report.skipped and isinstance(report.longrepr, tuple):
            return str(report.longrepr[2])
    return ""


@pytest.fixture(autouse=True)
def _survive(request: pytest.FixtureRequest) -> Iterator[None]:
    """End this worker if the CUDA context is lost, as every later test would fail because of it."""
    limit = SLOW_SECONDS if request.node.get_closest_marker("slow") else target().seconds
    watch = threading.Timer(limit, _give_up, (request.node.nodeid, limit))
    if ON_CUDA:
        watch.start()
    yield
    watch.cancel()
    if not ON_CUDA:
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        _end(request.node, f"the CUDA context is lost: {error}")
        raise


def _give_up(nodeid: str, limit: int) -> None:
    """A kernel that hangs cannot be interrupted: only the end of its process stops it."""
    for results in _results:
        line = {"test": nodeid, "outcome": "crashed", "seconds": limit, "reason": "hung"}
        with results.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
    faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
    os._exit(GPU_HUNG)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if getattr(session.config, "gpu_lost", False):
        session.exitstatus = GPU_LOST
