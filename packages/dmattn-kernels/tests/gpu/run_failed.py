"""Runs what failed in a GPU report again, tests and sanitizers, and tests that time had left, and
writes the outcome into it.

    python packages/dmattn-kernels/tests/gpu/run_failed.py [--report PATH] [--sanitizer NAME ...]

For a failure in a test itself, or a process that something else ended: the rest of the report
still holds as long as the library is the one that the report speaks of, and this refuses any other.
Of the sanitizers' jobs also those that are named, whose launches have changed since. The report
lists what was run again.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
IMPORTED_FROM = [str(HERE.parent), str(ROOT / "tests")]
sys.path[:0] = [*IMPORTED_FROM, str(HERE.parents[1] / "cmake")]

from attention.targets import SHARE_VARIABLE, TARGET_VARIABLE, TARGETS  # noqa: E402
from check_report import REPORT  # noqa: E402
from gpu import report  # noqa: E402
from gpu.jobs import Pool  # noqa: E402
from gpu.sanitize import judge, kernel_jobs  # noqa: E402

FAMILIES = ("sm80", "sm89", "sm90")
JOB_SECONDS = 400.0  # of a sanitizer's job, four of which run at a time
WIDTH = 4
LEFT_WIDTH = 10  # tests at a time of those that time had left


def outcome_of(target_name: str, test: str) -> str:
    """Of a test now, on a target: passed, skipped or failed."""
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


def sanitize_again(found: dict[str, Any], names: set[str], folder: Path) -> list[dict[str, Any]]:
    """Runs the sanitizers' failed jobs and those named, puts what they find into the report, and
    lists them."""
    failed = names | {entry["name"] for entry in found["sanitizer"] if not entry["ok"]}
    families = sorted({name.split()[1] for name in failed} & set(FAMILIES))
    jobs = [job for job in kernel_jobs(folder, families, JOB_SECONDS) if job.name in failed]
    ended = Pool(WIDTH, time.monotonic() + len(jobs) * JOB_SECONDS).run(jobs)
    findings = {job.name: dataclasses.asdict(judge(job)) for job in ended}
    found["sanitizer"] = [findings.get(entry["name"], entry) for entry in found["sanitizer"]]
    return [{"sanitizer": name, "passed": finding["ok"]} for name, finding in findings.items()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--sanitizer", nargs="+", default=[], metavar="NAME")
    given = parser.parse_args()
    path, names = given.report, set(given.sanitizer)
    found: dict[str, Any] = json.loads(path.read_text())
    if unknown := names - {entry["name"] for entry in found["sanitizer"]}:
        parser.error(f"the report has no sanitizer's job named {', '.join(sorted(unknown))}")
    if not report.is_of_this_library(found):
        print("the report, the library and the tree differ: run the whole suite", file=sys.stderr)
        return 1
    again = found.setdefault("run_again", [])
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as beside:
        sanitized = beside.submit(sanitize_again, found, names, Path(folder))
        backends = {row.name: row.backend_name for row in TARGETS.values()}
        again += report.run_failed_tests(found, backends, outcome_of)
        again += report.run_left_tests(found, backends, outcome_of, LEFT_WIDTH)
        again += sanitized.result()
    found["ok"] = report.is_ok(found)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(report.table(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
