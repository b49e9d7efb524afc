"""Runs the CUDA compiler and keeps what ptxas reports, next to the object, in <object>.ptxas.

CMake puts this in front of every CUDA compilation. All that is not such a report is passed on.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPORT = re.compile(r"^ptxas info|^\s+\d+ bytes stack frame|^\s*(Function properties|Used \d+)")


def main() -> int:
    command = sys.argv[1:]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    reports: list[str] = []
    rest: list[str] = []
    for line in result.stdout.splitlines():
        (reports if REPORT.match(line) else rest).append(line)
    if rest:
        print("\n".join(rest), file=sys.stderr)
    if "-o" in command and "-c" in command:
        output = Path(command[command.index("-o") + 1])
        output.with_name(output.name + ".ptxas").write_text("\n".join(reports) + "\n")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
