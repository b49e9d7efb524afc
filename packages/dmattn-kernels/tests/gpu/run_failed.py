"""Runs what failed in a GPU report again, tests and sanitizers, and writes the outcome into it.

    python packages/dmattn-kernels/tests/gpu/run_failed.py [--report PATH] [--sanitizer NAME ...]
        [--sanitizer-width N]

Use it if a test itself was wrong, or if something else ended a process. The rest of the report
still holds then, as long as the installed library is the one of the report; the program refuses any
other one. --sanitizer names further jobs of the sanitizers to run, such as those whose launches
have changed since. The report lists what was run again. It is written after the tests and after
each sanitizer's job: if the program is stopped, only what was running is lost.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
IMPORTED_FROM = [str(HERE.parent), str(ROOT / "tests")]
sys.path[:0] = [*IMPORTED_FROM, str(HERE.parents[1] / "cmake")]

from attention.targets import SHARE_VARIABLE, TARGET_VARIABLE, TARGETS  # noqa: E402
from check_report import REPORT  # noqa: E402
from gpu import report  # noqa: E402
from gpu.jobs import Job, Pool  # noqa: E402
from gpu.sanitize import judge, kernel_jobs, planted_jobs  # noqa: E402

FAMILIES = ("sm80", "sm89", "sm90")
JOB_SECONDS, PLANTED_SECONDS = 400.0, 60.0  # of a sanitizer's job, with and without our kernels
FAILED_WIDTH = 4  # of failed tests at a time, few enough to find memory


def outcome_of(target_name: str, test: str) -> str:
    """Run a test on a target, and return its outcome: passed, skipped or failed."""
    target = TARGETS[target_name]
    paths = [*IMPORTED_FROM, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        **os.environ,
        **target.env,
        **({"CUDA_DISABLE_PTX_JIT": "1"} if target.family else {}),
        TARGET_VARIABLE: target.name,
        SHARE_VARIABLE: str(target.share),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, "-m", "pytest", test, "-q", "--tb=short", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    print(done.stdout[-2000:])
    ended = [x for x in ("passed", "skipped") if f"1 {x}" in done.stdout]
    return ended[0] if done.returncode == 0 and ended else "failed"


def sanitize_again(
    found: dict[str, Any], names: set[str], folder: Path, pool: ThreadPoolExecutor
) -> list[Future[dict[str, Any]]]:
    """Start the sanitizers' failed jobs and those named; returns futures of what they find."""
    failed = names | {entry["name"] for entry in found["sanitizer"] if not entry["ok"]}
    families = sorted({name.split()[1] for name in failed} & set(FAMILIES))
    every = [*kernel_jobs(folder, families, JOB_SECONDS), *planted_jobs(folder, PLANTED_SECONDS)]
    jobs = [job for job in every if job.name in failed]
    gpus = Pool(1, time.monotonic() + len(jobs) * JOB_SECONDS)  # in turn, for all jobs together

    def finding_of(job: Job) -> dict[str, Any]:
        (ended,) = gpus.run([job])
        return dataclasses.asdict(judge(ended))

    return [pool.submit(finding_of, job) for job in jobs]


def put_finding(found: dict[str, Any], finding: dict[str, Any]) -> None:
    """Put what a sanitizer's job has found into the report, and list the job as run again."""
    name = finding["name"]
    found["sanitizer"] = [finding if x["name"] == name else x for x in found["sanitizer"]]
    found["run_again"].append({"sanitizer": name, "passed": finding["ok"]})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--sanitizer", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--sanitizer-width", type=int, default=4, help="jobs at a time")
    given = parser.parse_args()
    path, names = given.report, set(given.sanitizer)
    found: dict[str, Any] = json.loads(path.read_text())
    if unknown := names - {entry["name"] for entry in found["sanitizer"]}:
        parser.error(f"the report has no sanitizer's job named {', '.join(sorted(unknown))}")
    if not report.is_of_this_library(found):
        print("the report, the library and the tree differ: run the whole suite", file=sys.stderr)
        return 1
    again = found.setdefault("run_again", [])

    def write() -> None:
        found["ok"] = report.is_ok(found)
        path.write_text(json.dumps(found, indent=1) + "\n")

    width = given.sanitizer_width
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(width) as pool:
        sanitized = sanitize_again(found, names, Path(folder), pool)
        backends = {row.name: row.backend_name for row in TARGETS.values()}
        again += report.run_failed_tests(found, backends, outcome_of, FAILED_WIDTH)
        write()
        for ended in as_completed(sanitized):
            put_finding(found, ended.result())
            write()
    print(report.table(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
