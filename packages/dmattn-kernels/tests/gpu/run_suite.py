"""The GPU suite as one command; writes the report that the repository commits.

    python packages/dmattn-kernels/tests/gpu/run_suite.py [--report PATH] [--quick] [--time-limit S]

pytest runs in several processes that share the one GPU and claim the tests one by one, for the
kernel family sm80 and again for sm89 (its tile configurations run on any newer chip), while
compute-sanitizer watches small launches. `dmattn`, `dmattn_kernels`, torch, numpy and pytest must
be importable. Exit code 0: everything passed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from check_report import REPORT  # noqa: E402
from gpu import report  # noqa: E402
from gpu.device import FAMILY_VARIABLE  # noqa: E402
from gpu.jobs import Job, Pool  # noqa: E402
from gpu.sanitize import Finding, judge, kernel_jobs, planted_jobs  # noqa: E402

RESTARTS = 25  # workers started again after a lost context or a crash, per family
# Started while compute-sanitizer runs: enough to keep the GPU busy, few enough for 16 cores.
WORKERS = {"sm80": 6, "sm89": 4}
# A worker whose family is done takes the place of one more of a family with so many tests left.
WORTH_A_WORKER = 40


class Family:
    """The pytest workers of one kernel family and what they have found."""

    def __init__(self, name: str, folder: Path, arguments: argparse.Namespace) -> None:
        self.name = name
        self._folder = folder / name
        self._claims = self._folder / "claims"
        self._claims.mkdir(parents=True)
        self._arguments = arguments
        self._restarts = RESTARTS
        self._started = 0
        self.others: list[Family] = []

    def jobs(self) -> list[Job]:
        return [self._worker() for _ in range(self._arguments.workers or WORKERS[self.name])]

    def _worker(self) -> Job:
        index = self._started
        self._started += 1
        results = self._folder / f"results-{index}.jsonl"
        command = [
            sys.executable,
            "-m",
            "pytest",
            str(HERE),
            "-q",
            "-p",
            "no:cacheprovider",
            "--tb=short",
        ]
        command += [
            f"--claims={self._claims}",
            f"--results={results}",
            f"--every={self._arguments.every}",
        ]
        command += self._arguments.pytest
        log = self._folder / f"worker-{index}.log"
        # One thread each for host-side work: there are many workers.
        env = {FAMILY_VARIABLE: self.name, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        limit = self._arguments.time_limit
        return Job(
            f"{self.name} worker {index}",
            command,
            log,
            env,
            limit,
            self._again,
        )

    def _again(self, job: Job) -> Job | None:
        """A new worker for one that a crash or a lost CUDA context has ended, or for a family that
        still has much to do."""
        if job.timed_out:
            return None
        if job.returncode in (0, 1, 5):
            slow = [other for other in self.others if other.unclaimed() >= WORTH_A_WORKER]
            return slow[0]._worker() if slow else None
        self._restarts -= 1
        return self._worker() if self._restarts > 0 else None

    def unclaimed(self) -> int:
        """Tests that no worker has begun."""
        collected = self._folder / "collected"
        if not collected.is_file():
            return 0
        return int(collected.read_text()) - len(list(self._claims.iterdir()))

    def outcomes(self) -> list[dict[str, Any]]:
        """One entry per test; "crashed" for those never ended, "not run" for those never begun."""
        lines = [
            json.loads(line)
            for file in sorted(self._folder.glob("results-*.jsonl"))
            for line in file.read_text().splitlines()
        ]
        ended = {line["test"] for line in lines}
        claims = sorted(self._claims.iterdir())
        for claim in claims:
            test = claim.read_text()
            if test not in ended:
                lines.append(
                    {"test": test, "outcome": "crashed", "seconds": 0.0, "reason": "never ended"}
                )
        collected = self._folder / "collected"
        missing = int(collected.read_text()) - len(claims) if collected.is_file() else 1
        never = {"test": "", "outcome": "not run", "seconds": 0.0, "reason": "out of time"}
        return lines + [never] * missing

    def complaint(self) -> str | None:
        """The end of a log when no test was run at all."""
        if any(self._claims.iterdir()):
            return None
        return (self._folder / "worker-0.log").read_text(errors="replace")[-3000:]


def main() -> int:
    arguments = parse()
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="dmattn-gpu-suite-"))
    families = [Family(name, folder, arguments) for name in arguments.families]
    for family in families:
        family.others = [other for other in families if other is not family]
    pytest_jobs = [job for family in families for job in family.jobs()]
    findings: list[Finding] = []
    deadline = start + arguments.time_limit

    def sanitize() -> None:
        jobs = [] if arguments.no_sanitizer else planted_jobs(folder, 60.0)
        jobs = (
            kernel_jobs(folder, arguments.families, arguments.time_limit) + jobs if jobs else jobs
        )
        findings.extend(judge(job) for job in Pool(arguments.sanitizer_width, deadline).run(jobs))

    beside = threading.Thread(target=sanitize)
    beside.start()
    Pool(len(pytest_jobs), deadline).run(pytest_jobs)
    beside.join()
    found = report.compose(
        {family.name: family.outcomes() for family in families},
        sorted(findings, key=lambda finding: finding.name),
        complete=not (
            arguments.quick or arguments.no_sanitizer or arguments.pytest or arguments.every > 1
        ),
        seconds=time.monotonic() - start,
    )
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps(found, indent=1) + "\n")
    for family in families:
        if complaint := family.complaint():
            print(f"--- {family.name}: no test was run\n{complaint}")
    print(report.table(found))
    print(f"report: {arguments.report}; logs: {folder}")
    return 0 if found["ok"] else 1


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
    parser.add_argument("--workers", type=int, default=0, help="pytest processes per family")
    parser.add_argument("--families", nargs="+", default=list(WORKERS), choices=list(WORKERS))
    parser.add_argument("--no-sanitizer", action="store_true")
    parser.add_argument(
        "--sanitizer-width", type=int, default=max(2, min(8, (os.cpu_count() or 4) // 2))
    )
    parser.add_argument("pytest", nargs="*", help="further arguments for pytest, after --")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.every, arguments.no_sanitizer = max(arguments.every, 8), True
    return arguments


if __name__ == "__main__":
    sys.exit(main())
