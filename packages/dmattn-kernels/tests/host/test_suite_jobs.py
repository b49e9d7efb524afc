"""How the GPU suite shares out its processes and is continued later; this needs no GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gpu import OUT_OF_MEMORY, claims, report
from gpu.jobs import Job, Pool, stop_signals, workers_of_each
from gpu.progress import Progress
from gpu.sanitize import Finding, judge, lacked_memory, once_more

SHOW = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"


def run(count: int, folder: Path) -> list[str]:
    jobs = [Job(str(i), [sys.executable, "-c", SHOW], folder / str(i)) for i in range(count)]
    return sorted(job.output.strip() for job in Pool(2, time.monotonic() + 60).run(jobs))


def test_each_of_several_gpus_is_the_first_in_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert run(4, tmp_path) == ["4,6", "4,6", "6,4", "6,4"]


@pytest.mark.parametrize("visible", ["", "3"])
def test_a_single_gpu_stays_what_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert run(1, tmp_path) == [visible]


def test_all_are_killed_before_any_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process with a GPU takes a second to go: one after the other that would be minutes."""
    events = []
    kill, wait = os.killpg, subprocess.Popen.wait

    def note_kill(group: int, number: int) -> None:
        events.append("kill")
        kill(group, number)

    def note_wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        events.append("wait")
        return wait(process, timeout)

    monkeypatch.setattr(os, "killpg", note_kill)
    monkeypatch.setattr(subprocess.Popen, "wait", note_wait)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    jobs = [Job(str(i), sleep, tmp_path / str(i), again=lambda job: job) for i in range(5)]
    start = time.monotonic()
    ended = Pool(3, start + 1.0).run(jobs)
    assert time.monotonic() - start < 30
    assert sorted(job.name for job in ended) == list("01234")
    assert all(job.timed_out for job in ended)
    assert events == ["kill"] * 3 + ["wait"] * 3  # and two never began
    assert [job.returncode for job in ended].count(None) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_end_with_the_suite(number: signal.Signals, tmp_path: Path) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    job = Job("job", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    try:
        stop = stop_signals()
        threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
        assert Pool(1, time.monotonic() + 60, stop).run([job]) == [job]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert job.timed_out and job.seconds < 30


def test_a_job_has_a_limit_of_its_own(tmp_path: Path) -> None:
    commands = ["import time; time.sleep(60)", "pass"]
    jobs = [
        Job(str(i), [sys.executable, "-c", command], tmp_path / str(i), limit=limit)
        for i, (command, limit) in enumerate(zip(commands, (1.0, 60.0), strict=True))
    ]
    Pool(2, time.monotonic() + 60).run(jobs)
    assert [job.timed_out for job in jobs] == [True, False] and jobs[1].returncode == 0


def test_workers_of_the_suite() -> None:
    shares = [1, 1, 1, 1, 2]
    assert workers_of_each(0, shares, 12, cores=16) == [2, 2, 2, 2, 4]
    assert workers_of_each(8, shares, 12, cores=32) == [8, 8, 8, 8, 16]
    assert workers_of_each(0, [1], 12, cores=2) == [12]
    assert sum(workers_of_each(0, [1] * 8, 12, cores=2)) == 16  # the usual is never refused
    with pytest.raises(ValueError, match=r"got 12 .* 72 processes on 16 cores; wanted at most 5"):
        workers_of_each(12, shares, 12, cores=16)


@pytest.mark.parametrize(
    ("output", "code", "lacked"),
    [
        ("RuntimeError: cuMemAlloc_v2 failed with CUDA error 2", 1, True),
        ("launching the backward kernel: out of memory", 1, True),
        ("Error: process didn't terminate successfully", 9, True),
        ("ERROR SUMMARY: 3 errors", 66, False),  # another try might not find these
        ("CUDA error 700", 1, False),
        ("ERROR SUMMARY: 0 errors\nfinished 5 launches, 0 wrong", 0, False),
    ],
)
def test_a_sanitizer_that_found_no_memory_runs_once_more(
    tmp_path: Path, output: str, code: int, lacked: bool
) -> None:
    script = f"import sys; print({output!r}); sys.exit({code})"
    job = Job("memcheck sm80 1/1", [sys.executable, "-c", script], tmp_path / "log")
    Pool(1, time.monotonic() + 60).run([job])
    assert lacked_memory(job) == lacked and judge(job).ok == (code == 0)
    (again,) = once_more([job])
    assert (again.name, again.command) == (job.name, job.command) and not again.output
    job.timed_out = True
    assert not lacked_memory(job)


def test_a_test_is_taken_once_and_given_back_if_time_stopped_its_worker(tmp_path: Path) -> None:
    taken = {"ended": "worker-0", "cut off": "worker-0", "crashed": "worker-1"}
    for test, worker in taken.items():
        assert claims.take(tmp_path / test, f"file.py::{test}[\n]", worker)
        assert not claims.take(tmp_path / test, test, "worker-2")
        assert claims.read(tmp_path / test) == (f"file.py::{test}[\n]", worker)
    (tmp_path / "stopped while taking").touch()
    claims.give_back(tmp_path, {"file.py::ended[\n]"}, {"worker-0"})
    assert {left.name for left in tmp_path.iterdir()} == {"ended", "crashed"}


def test_no_more_than_so_many_have_a_place(tmp_path: Path) -> None:
    """Processes wait like this to run a large test; here two of four threads have a place."""
    here, most = [0], [0]
    count = threading.Lock()

    def stay() -> None:
        with claims.one_of_places(tmp_path, "large-0", 2):
            with count:
                here[0] += 1
                most[0] = max(most[0], here[0])
            time.sleep(0.3)
            with count:
                here[0] -= 1

    threads = [threading.Thread(target=stay) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (here[0], most[0]) == (0, 2)


def test_a_run_goes_on_with_what_the_one_before_found(tmp_path: Path) -> None:
    of = {"library": "a", "targets": ["cuda-sm90"]}
    first = Progress.read(tmp_path, of)
    first.add(590.0, [Finding("b", True, 0, 3, 1.0, ""), Finding("a", False, 1, 3, 1.0, "wrong")])
    first.write(tmp_path)
    second = Progress.read(tmp_path, of)
    assert second == first
    second.add(10.0, [Finding("aa", True, 0, 3, 1.0, "")])
    assert (second.seconds, second.runs) == (600.0, 2)
    assert [finding.name for finding in second.findings] == ["a", "aa", "b"]


def test_a_run_of_something_else_does_not_go_on(tmp_path: Path) -> None:
    Progress.read(tmp_path, {"library": "a"}).write(tmp_path)
    with pytest.raises(ValueError, match=r"library: got 'b', .* had 'a'"):
        Progress.read(tmp_path, {"library": "b"})


def test_what_a_later_run_says_of_a_target_takes_the_place_of_the_first() -> None:
    def counts(passed: int, failed: int, not_run: int) -> dict[str, int]:
        found = {"passed": passed, "failed": failed, "crashed": 0, "skipped": 1}
        return {**found, "not run": not_run}

    lost = {"target": "flex-cuda", "test": "a", "outcome": "failed"}
    left = {"target": "flex-cuda", "test": "b"}
    found = {
        "ok": False,
        "complete": True,
        "tests": {"cuda-sm90": counts(9, 0, 0), "flex-cuda": counts(3, 1, 5)},
        "backends": {"cuda": counts(9, 0, 0), "flex": counts(3, 1, 5)},
        "failed_tests": [lost],
        "tests_not_run": [left],
        "sanitizer": [{"ok": True}],
    }
    about = {"date": "2026-01-02", "gpu": "another", "seconds": 7, "skipped_reasons": {}}
    newer = {"tests": {"flex-cuda": counts(9, 0, 0)}, "failed_tests": [], "tests_not_run": []}
    newer |= about
    report.put_into(found, newer, {"flex-cuda": "flex"})
    assert found["ok"] and found["tests_not_run"] == []
    assert found["tests"]["flex-cuda"] == found["backends"]["flex"] == counts(9, 0, 0)
    assert found["run_again"] == [{"target": "flex-cuda", **about}]


def test_what_no_worker_has_begun_is_named(tmp_path: Path) -> None:
    assert claims.left(tmp_path, ["a", "b", "c"]) == ["a", "b", "c"]
    assert claims.take(tmp_path / claims.name(1), "b", "worker-0")
    assert claims.left(tmp_path, ["a", "b", "c"]) == ["a", "c"]


@pytest.mark.parametrize("outcome", ["passed", "skipped", "failed"])
def test_what_failed_is_run_alone(outcome: str) -> None:
    lost = {"target": "flex-cuda", "test": "b", "outcome": "crashed", "seconds": 1.0, "reason": "x"}
    counts = {"passed": 1, "failed": 0, "skipped": 0, "crashed": 1, "not run": 1}
    found = {"tests": {"flex-cuda": dict(counts)}, "backends": {"flex": dict(counts)}}
    found |= {"failed_tests": [dict(lost)]}
    ran: list[str] = []

    def run(target: str, test: str) -> str:
        ran.append(f"{target} {test}")
        return outcome

    again = report.run_failed_tests(found, {"flex-cuda": "flex"}, run)
    assert ran == ["flex-cuda b"]
    assert [line["passed"] for line in again] == [outcome == "passed"]
    now = {**counts, "crashed": 0, "passed": 2} if outcome == "passed" else counts
    assert found["tests"]["flex-cuda"] == found["backends"]["flex"] == now
    assert found["failed_tests"] == ([] if outcome == "passed" else [lost])


@pytest.mark.parametrize("outcome", ["passed", "skipped", "failed", "crashed"])
def test_what_time_had_left_goes_into_the_report(outcome: str) -> None:
    counts = {"passed": 1, "failed": 0, "skipped": 0, "crashed": 0, "not run": 2}
    left = [{"target": "flex-cuda", "test": test} for test in "ab"]
    found: dict[str, Any] = {
        "complete": True,
        "tests": {"flex-cuda": dict(counts)},
        "backends": {"flex": dict(counts)},
        "tests_not_run": left,
        "failed_tests": [],
        "sanitizer": [{"ok": True}],
    }
    assert report.left_tests(found) == {"flex-cuda": ["a", "b"]}
    line = {"test": "a", "outcome": outcome, "seconds": 1.0, "reason": "x"}
    lines = [line, {"test": "b", "outcome": "not run", "seconds": 0.0, "reason": "out of time"}]
    about, backends = {"date": "2026-01-02"}, {"flex-cuda": "flex"}
    report.put_left_into(found, {"flex-cuda": lines}, about, backends)
    now = {**counts, "not run": 1}
    now[outcome] += 1
    assert found["tests"]["flex-cuda"] == found["backends"]["flex"] == now
    assert found["tests_not_run"] == left[1:] and not found["ok"]
    assert found["run_again"] == [{"target": "flex-cuda", "left": 1, **about}]
    fails = outcome in ("failed", "crashed")
    assert found["failed_tests"] == ([{"target": "flex-cuda", **line}] if fails else [])
    last = [{**line, "test": "b"}]
    report.put_left_into(found, {"flex-cuda": last}, about, backends)
    assert found["tests_not_run"] == [] and found["ok"] != fails


def test_what_found_no_memory_has_not_run() -> None:
    line = {"test": "a", "outcome": "failed", "seconds": 1.0}
    lacking = {**line, "reason": f"torch.{OUT_OF_MEMORY}: CUDA out of memory"}
    wrong = {**line, "reason": "AssertionError: too far from the oracle"}
    passed = {"test": "b", "outcome": "passed", "seconds": 1.0, "reason": ""}
    assert [x["outcome"] for x in report.lacking_memory_as_not_run([lacking, wrong, passed])] == [
        *("not run", "failed", "passed")
    ]
    found: dict[str, Any] = {
        "complete": True,
        "tests": {"flex-cuda": {"passed": 0, "failed": 0, "not run": 1}},
        "backends": {"flex": {"passed": 0, "failed": 0, "not run": 1}},
        "tests_not_run": [{"target": "flex-cuda", "test": "a"}],
        "failed_tests": [],
        "sanitizer": [{"ok": True}],
    }
    report.put_left_into(found, {"flex-cuda": [lacking]}, {}, {"flex-cuda": "flex"})
    assert found["tests_not_run"] and not found["failed_tests"] and not found["ok"]
