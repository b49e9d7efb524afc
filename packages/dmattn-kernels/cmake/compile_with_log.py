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
    lines = result.stdout.splitlines()
    reports = [line for line in lines if REPORT.match(line)]
    is_serialized = any(SERIALIZED.search(line) for line in lines)
    passed_on = [line for line in lines if not REPORT.match(line) or SERIALIZED.search(line)]
    if passed_on:
        print("\n".join(passed_on), file=sys.stderr)
    output = Path(command[command.index("-o") + 1]) if "-o" in command else None
    if output is not None and "-c" in command:
        output.with_name(output.name + ".ptxas").write_text("\n".join(reports) + "\n")
    if output is not None and is_serialized:
        output.unlink(missing_ok=True)
    return result.returncode or int(is_serialized)


if __name__ == "__main__":
    sys.exit(main())
