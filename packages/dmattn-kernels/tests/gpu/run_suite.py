"""The GPU suite as one command; writes the report that the repository commits.

    python packages/dmattn-kernels/tests/gpu/run_suite.py [--report PATH] [--quick]
        [--time-limit S] [--folder PATH] [--into REPORT --targets NAME ...] [--into REPORT --left]

It runs the attention suite (tests/attention), models of transformers and CUDA graphs (tests/models)
and the tests of the kernels themselves (this folder).
pytest runs in several processes that share the GPUs and claim the tests one by one, for each
target in tests/attention/targets.py that is on CUDA (newer chips can run the tile shapes of sm89,
too), while compute-sanitizer watches small launches. `dmattn`, `dmattn_kernels`, torch, numpy,
pytest and transformers must be importable. Exit code 0: everything passed.

If a time limit, SIGTERM or Ctrl-C has ended a run, the report says what was not run, and the same
command with the same folder does the rest. On another machine --into REPORT --left runs the tests
that a report lists as not run, and --into REPORT --targets NAME ... runs whole targets.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
ATTENTION = ROOT / "tests" / "attention"
MODELS = ROOT / "tests" / "models"
IMPORTED_FROM = (str(ROOT / "tests"), str(HERE.parent))
sys.path[:0] = IMPORTED_FROM

from attention.targets import SHARE_VARIABLE, TARGET_VARIABLE, TARGETS, Target  # noqa: E402
from check_report import REPORT  # noqa: E402
from gpu import claims, report  # noqa: E402
from gpu.jobs import Job, Pool, stop_signals, workers_of_each  # noqa: E402
from gpu.progress import Progress  # noqa: E402
from gpu.sanitize import (  # noqa: E402
    judge,
    kernel_jobs,
    lacked_memory,
    once_more,
    planted_jobs,
)
from source_hash import source_hash  # noqa: E402

RESTARTS = 25  # workers started again after a lost context or a crash, per target
# Workers of all targets, beside compute-sanitizer: enough to keep the GPU busy, few enough for 16
# cores.
ALL_WORKERS = 12
# When a target is done, each of its workers is replaced by one of a target with so many tests left.
WORTH_A_WORKER = 40
NEVER_ENDED = "never ended"
# The library has machine code for the chip, so that tests need no compiler in the driver.
NO_JIT = {"CUDA_DISABLE_PTX_JIT": "1"}
ON_GPU = [row.name for row in TARGETS.values() if row.device == "cuda"]


class Workers:
    """The pytest workers of one target and what they have found."""

    def __init__(self, target: Target, folder: Path, arguments: argparse.Namespace) -> None:
        self.target = target
        self._left: list[str] | None = arguments.left_tests and arguments.left_tests[target.name]
        self._folder = folder / target.name
        self._claims = self._folder / "claims"
        self._claims.mkdir(parents=True, exist_ok=True)
        self._arguments = arguments
        self._restarts = RESTARTS
        self._started = len(list(self._folder.glob("worker-*.log")))  # by runs before this one
        self.others: list[Workers] = []

    def jobs(self, count: int) -> list[Job]:
        return [self._worker() for _ in range(count)]

    def _worker(self) -> Job:
        index = self._started
        self._started += 1
        results = self._folder / f"results-{index}.jsonl"
        command = [sys.executable, "-m", "pytest", *self._what()]
        command += ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "gpu.workers"]
        command += [f"--claims={self._claims}", f"--results={results}", *self._arguments.pytest]
        paths = [*IMPORTED_FROM, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {
            **self.target.env,
            TARGET_VARIABLE: self.target.name,
            SHARE_VARIABLE: str(self._arguments.every * self.target.share),
            "PYTHONPATH": os.pathsep.join(paths),
            **(NO_JIT if self.target.family else {}),
            # One thread in each for work on the host, as there are many workers.
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # or each one starts a process for every core
            "PYTHONUNBUFFERED": "1",
        }
        log = self._folder / f"worker-{index}.log"
        name = f"{self.target.name} worker {index}"
        return Job(name, command, log, env, self._arguments.time_limit, self._again)

    def _what(self) -> list[str]:
        """What pytest is to run: folders, or a file that names tests."""
        if self._left is not None:
            names = self._folder / "left"
            names.write_text("\n".join(f"{ROOT}/{test}" for test in self._left))
            return [f"@{names}"]
        suites = [ATTENTION, HERE] if self.target.family else [ATTENTION]
        if self.target.family and not self.target.repeats:
            suites.append(MODELS)
        return list(map(str, suites))

    def _again(self, job: Job) -> Job | None:
        """A worker to start in place of one that has ended, or None.

        After a crash or a lost CUDA context it is one of the same target. A worker that found no
        more tests is replaced by one of another target that still has much to do.
        """
        if job.timed_out:
            return None
        if job.returncode in (0, 1, 5):
            slow = [other for other in self.others if other.unclaimed() >= WORTH_A_WORKER]
            return slow[0]._worker() if slow else None
        self._restarts -= 1
        return self._worker() if self._restarts > 0 else None

    def unclaimed(self) -> int:
        """The number of tests that no worker has begun."""
        return len(claims.left(self._claims, self._collected()))

    def _collected(self) -> list[str]:
        """All tests in the order of their numbers; none until a worker has collected them."""
        collected = self._folder / "collected"
        return json.loads(collected.read_text()) if collected.is_file() else []

    def outcomes(self) -> list[dict[str, Any]]:
        """One entry per test; "crashed" for those never ended, "not run" for those never begun."""
        lines = [
            json.loads(line)
            for file in sorted(self._folder.glob("results-*.jsonl"))
            for line in file.read_text().splitlines()
        ]
        ended = {line["test"] for line in lines}
        taken = sorted(self._claims.iterdir())
        for claim in taken:
            test, _ = claims.read(claim)
            if test not in ended:
                lines.append(
                    {"test": test, "outcome": "crashed", "seconds": 0.0, "reason": NEVER_ENDED}
                )
        tests = self._collected()
        never = {"outcome": "not run", "seconds": 0.0, "reason": "out of time"}
        missing = claims.left(self._claims, tests) if tests else [""]
        return lines + [{"test": test, **never} for test in missing]

    def give_back(self, jobs: list[Job]) -> None:
        """Let tests that the time limit cut off count as not begun."""
        stopped = {job.log.stem for job in jobs if job.timed_out and job.log.parent == self._folder}
        ended = {line["test"] for line in self.outcomes() if line["reason"] != NEVER_ENDED}
        claims.give_back(self._claims, ended, stopped)

    def complaint(self) -> str | None:
        """The end of a worker's log if no test was run at all, else None."""
        if any(self._claims.iterdir()):
            return None
        return (self._folder / "worker-0.log").read_text(errors="replace")[-3000:]


def main() -> int:
    arguments = parse()
    start = time.monotonic()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="dmattn-gpu-suite-"))
    folder.mkdir(parents=True, exist_ok=True)
    progress = Progress.read(folder, what_is_tested(arguments))
    every = [Workers(TARGETS[name], folder, arguments) for name in arguments.targets]
    for workers in every:
        workers.others = [other for other in every if other is not workers]
    counts = zip(every, arguments.worker_counts, strict=True)
    pytest_jobs = [job for workers, count in counts for job in workers.jobs(count)]
    sanitized: list[Job] = []
    deadline = start + arguments.time_limit
    stop = stop_signals()

    def sanitize() -> None:
        jobs = [] if arguments.no_sanitizer else planted_jobs(folder, 60.0)
        if jobs:
            families = [family for workers in every if (family := workers.target.family)]
            jobs = kernel_jobs(folder, families, arguments.time_limit) + jobs
        done = {finding.name for finding in progress.findings}
        jobs = [job for job in jobs if job.name not in done]
        sanitized.extend(Pool(arguments.sanitizer_width, deadline, stop).run(jobs))

    beside = threading.Thread(target=sanitize)
    beside.start()
    pytest_jobs = Pool(len(pytest_jobs), deadline, stop).run(pytest_jobs)
    beside.join()
    # Jobs that found no memory run once more, now without tests beside them and one by one; if the
    # time is up, in a later run in this folder.
    lacking = [job for job in sanitized if lacked_memory(job)]
    if lacking and time.monotonic() < deadline and not stop.is_set():
        sanitized = [job for job in sanitized if job not in lacking]
        sanitized += Pool(1, deadline, stop).run(once_more(lacking))
        lacking = []
    unfinished = [job for job in sanitized if job.timed_out or job in lacking]
    for workers in every:
        workers.give_back(pytest_jobs)
    ended = [judge(job) for job in sanitized if job not in unfinished]
    progress.add(time.monotonic() - start, ended)
    progress.write(folder)
    stopped = [judge(job) for job in unfinished]
    found = report.compose(
        [(workers.target, workers.outcomes()) for workers in every],
        [*progress.findings, *stopped],
        complete=not (arguments.no_sanitizer or arguments.pytest or arguments.every > 1)
        and set(ON_GPU) <= set(arguments.targets),
        seconds=progress.seconds,
        runs=progress.runs,
    )
    if arguments.into is not None:
        newer, found = found, json.loads(arguments.into.read_text())
        backends = {row.name: row.backend_name for row in TARGETS.values()}
        if arguments.left:
            outcomes = {workers.target.name: workers.outcomes() for workers in every}
            about = {name: newer[name] for name in ("date", "gpu", "seconds")}
            report.put_left_into(found, outcomes, about, backends)
        else:
            report.put_into(found, newer, backends)
    place = arguments.into or arguments.report
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(found, indent=1) + "\n")
    for workers in every:
        if complaint := workers.complaint():
            print(f"--- {workers.target.name}: no test was run\n{complaint}")
    print(report.table(found))
    print(f"report: {place}; logs: {folder}")
    if stopped or any(counts["not run"] for counts in found["tests"].values()):
        print(f"the time was up; to go on, add --folder {folder}")
    return 0 if found["ok"] else 1


def what_is_tested(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all runs in one folder have in common."""
    return {
        "library": report.built_from(importlib.import_module("dmattn_kernels").library_path()),
        "sources": source_hash(),
        **{name: getattr(arguments, name) for name in ("targets", "every", "pytest", "left")},
        "sanitizer": not arguments.no_sanitizer,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument(
        "--quick", action="store_true", help="every 8th test, no sanitizer; never counts as ok"
    )
    parser.add_argument("--every", type=int, default=1, help="only every n-th test")
    parser.add_argument(
        "--time-limit", type=float, default=1200.0, help="seconds after which all is stopped"
    )
    parser.add_argument(
        "--folder", type=Path, help="of logs and results; what a time limit left there goes on"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help=f"pytest processes for each target (flex-cuda: twice); 0: {ALL_WORKERS} in all",
    )
    parser.add_argument("--targets", nargs="+", default=ON_GPU, choices=list(TARGETS))
    parser.add_argument("--no-sanitizer", action="store_true")
    parser.add_argument(
        "--into",
        type=Path,
        help="a report of the same library: only what it says of the targets is replaced",
    )
    parser.add_argument(
        "--left", action="store_true", help="with --into: only tests that it lists as not run"
    )
    parser.add_argument(
        "--sanitizer-width", type=int, default=max(2, min(8, (os.cpu_count() or 4) // 2))
    )
    parser.add_argument("pytest", nargs="*", help="further arguments for pytest, after --")
    arguments = parser.parse_args()
    arguments.left_tests = None
    if arguments.left and arguments.into is None:
        parser.error("--left: wanted --into as well, a report that lists tests as not run")
    if arguments.into is not None:
        arguments.no_sanitizer = True
        into = json.loads(arguments.into.read_text())
        if not report.is_of_this_library(into):
            parser.error("--into: the report, the library and the tree differ: run the whole suite")
        if arguments.quick or arguments.every > 1 or arguments.pytest:
            parser.error("--into: got a part of the tests, wanted whole targets")
        if missing := set(arguments.targets) - set(into["tests"]):
            parser.error(f"--into: the report has nothing of {', '.join(sorted(missing))}")
        if arguments.left:
            arguments.left_tests = report.left_tests(into)
            arguments.targets = [x for x in arguments.targets if x in arguments.left_tests]
        if not arguments.targets:
            parser.error("--left: the report lists no test as not run")
    shares = [TARGETS[name].workers for name in arguments.targets]
    try:
        arguments.worker_counts = workers_of_each(
            arguments.workers, shares, ALL_WORKERS, os.cpu_count() or 1
        )
    except ValueError as problem:
        parser.error(str(problem))
    if arguments.quick:
        arguments.every, arguments.no_sanitizer = max(arguments.every, 8), True
    return arguments


if __name__ == "__main__":
    sys.exit(main())
