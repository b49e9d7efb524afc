"""Runs the CUDA compiler and keeps what ptxas reports, next to the object, in <object>.ptxas.

CMake puts this in front of every CUDA compilation. All that is not such a report is passed on.
It fails where ptxas says that it runs the matrix instructions of a warpgroup one after the other,
or that it ignores how registers are shared out (C75xx): the compiler itself only remarks on what
makes such kernels slow.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SERIALIZED = re.compile(r"\(C75\d\d\)")
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
    serialized = [line for line in reports if SERIALIZED.search(line)]
    if serialized:
        print("\n".join(serialized), file=sys.stderr)
        if "-o" in command:
            Path(command[command.index("-o") + 1]).unlink(missing_ok=True)
    return result.returncode or bool(serialized)


if __name__ == "__main__":
    sys.exit(main())
