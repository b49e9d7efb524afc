"""Says whether the committed GPU report vouches for the sources in this tree.

    python packages/dmattn-kernels/tests/check_report.py

Exit codes: 0 fresh and everything passed, 1 stale or with failures, 2 no report.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cmake"))

from source_hash import PACKAGE, source_hash

REPORT = PACKAGE / "tests" / "gpu-report.json"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`state` is "fresh", "stale", "failed" or "missing"; `words` say it to a person."""

    state: str
    words: str

    @property
    def code(self) -> int:
        return {"fresh": 0, "stale": 1, "failed": 1, "missing": 2}[self.state]


def verdict(report_path: Path = REPORT, package: Path = PACKAGE) -> Verdict:
    if not report_path.is_file():
        return Verdict(
            "missing", f"no GPU report at {report_path}: run `./dev gpu` on a machine with a GPU"
        )
    report: dict[str, Any] = json.loads(report_path.read_text())
    about = f"GPU report of {report.get('date')} on {report.get('gpu')}"
    found, wanted = str(report.get("source_hash")), source_hash(package)
    if found != wanted:
        return Verdict(
            "stale",
            f"STALE {about}: it vouches for sources {found[:12]}, the tree holds {wanted[:12]}. "
            "Run `./dev gpu` on a machine with a GPU and commit the report.",
        )
    if not report.get("ok"):
        return Verdict("failed", f"{about} is fresh, but not everything in it passed")
    return Verdict("fresh", f"{about} is fresh: sources {wanted[:12]}, everything passed")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--report", type=Path, default=REPORT)
    found = verdict(parser.parse_args().report)
    print(found.words)
    return found.code


if __name__ == "__main__":
    sys.exit(main())
