"""Prints how long each kernel unit took to compile, as a table for docs/kernels.md.

    python packages/dmattn-kernels/cmake/compile_times.py BUILD_FOLDER

From the log that ninja leaves in the build folder: seconds from the start of a compiler to its end,
beside the others that ran at the same time. A unit that was compiled again counts with its last
time, and what a compiler cache answered with the time of the answer.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

UNIT = re.compile(
    r"units/(?P<direction>\w+?)_(?P<arch>sm\d+)_(?P<dtype>\w+?)_d(?P<head_dim>\d+)_"
    r"(?P<walk>tiled|gathered)\.cu\.o$"
)
DTYPES = ("bf16", "f16")


def read_seconds(log: str) -> dict[str, tuple[float, float]]:
    """When the making of each file began and ended."""
    found = {}
    for line in log.splitlines():
        if line.startswith("#"):
            continue
        begin, end, _, output, *_ = line.split("\t")
        found[output] = int(begin) / 1000, int(end) / 1000
    return found


def table(seconds: dict[str, tuple[float, float]]) -> str:
    """A row for each direction, architecture and walk, a column for each head-dim tile."""
    units: dict[tuple[str, str, str], dict[int, dict[str, float]]] = {}
    others, spans = 0.0, []
    for output, (begin, end) in seconds.items():
        if not output.endswith(".o"):
            continue
        spans.append((begin, end))
        if (unit := UNIT.search(output)) is None:
            others += end - begin
            continue
        row = units.setdefault((unit["direction"], unit["arch"], unit["walk"]), {})
        row.setdefault(int(unit["head_dim"]), {})[unit["dtype"]] = end - begin
    columns = sorted({head_dim for row in units.values() for head_dim in row})
    lines = ["| unit | " + " | ".join(f"up to {x}" for x in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for (direction, arch, walk), row in sorted(units.items()):
        cells = []
        for head_dim in columns:
            times = [row.get(head_dim, {}).get(dtype) for dtype in DTYPES]
            cells.append(", ".join(f"{x:.0f}" for x in times if x is not None))
        lines.append(f"| {direction}, {arch}, {walk} | " + " | ".join(cells) + " |")
    compiling = sum(end - begin for begin, end in spans)
    from_first_to_last = max(end for _, end in spans) - min(begin for begin, _ in spans)
    lines.append(
        f"\nAll other files: {others:.0f} s. In all {compiling:.0f} s of compilers, "
        f"{from_first_to_last:.0f} s from the first to the last."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("build", type=Path, help="the folder in which ninja ran")
    log: Path = parser.parse_args().build / ".ninja_log"
    if not log.is_file():
        parser.error(f"{log} does not exist: ninja writes it where it runs")
    print(table(read_seconds(log.read_text())))


if __name__ == "__main__":
    main()
