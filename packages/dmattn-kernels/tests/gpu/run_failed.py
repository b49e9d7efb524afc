"""Runs the tests again that failed in a GPU report, and writes what came out into it.

    python packages/dmattn-kernels/tests/gpu/run_failed.py [--report PATH]

For a failure in a test itself: the rest of the report still holds as long as the library is the
one that the report speaks of, and this refuses any other. The report lists what was run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
IMPORTED_FROM = [str(HERE.parent), str(ROOT / "tests")]
sys.path[:0] = [*IMPORTED_FROM, str(HERE.parents[1] / "cmake")]

from attention.targets import SHARE_VARIABLE, TARGET_VARIABLE, TARGETS  # noqa: E402
from check_report import REPORT  # noqa: E402
from gpu import report  # noqa: E402
from source_hash import source_hash  # noqa: E402


def passes(target_name: str, test: str) -> bool:
    """Whether a test passes now, on the target that it failed on."""
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
    return done.returncode == 0 and "1 passed" in done.stdout


def update(found: dict[str, Any], line: dict[str, Any]) -> None:
    """Count a failed test as passed."""
    target = TARGETS[line["target"]]
    for counts in (found["tests"][target.name], found["backends"][target.backend_name]):
        counts[line["outcome"]] -= 1
        counts["passed"] += 1
    found["failed_tests"].remove(line)


def is_ok(found: dict[str, Any]) -> bool:
    return (
        found["complete"]
        and not found["failed_tests"]
        and all(
            counts["passed"] > 0 and not counts["not run"] for counts in found["tests"].values()
        )
        and bool(found["sanitizer"])
        and all(finding["ok"] for finding in found["sanitizer"])
        and "note" not in found
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--report", type=Path, default=REPORT)
    path = parser.parse_args().report
    found: dict[str, Any] = json.loads(path.read_text())
    library = report.environment().get("source_hash")
    if not found["source_hash"] == library == source_hash():
        print("the report, the library and the tree differ: run the whole suite", file=sys.stderr)
        return 1
    again = found.setdefault("run_again", [])
    for line in list(found["failed_tests"]):
        passed = passes(line["target"], line["test"])
        again.append({"target": line["target"], "test": line["test"], "passed": passed})
        if passed:
            update(found, line)
    found["ok"] = is_ok(found)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(report.table(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
