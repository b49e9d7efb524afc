"""Turns the ptxas reports beside the objects into one JSON file: registers and spills by kernel."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from pathlib import Path

ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def read_log(log: Path) -> list[dict[str, str | int]]:
    unit = log.name.split(".")[0]
    return [
        {
            "unit": unit,
            "arch": match["arch"],
            "kernel": match["name"],
            "registers": int(match["registers"]),
            "stack_bytes": int(match["stack"]),
            "spill_store_bytes": int(match["stores"]),
            "spill_load_bytes": int(match["loads"]),
        }
        for match in ENTRY.finditer(log.read_text())
    ]


def demangle(kernels: list[dict[str, str | int]]) -> None:
    """Readable names where binutils has the tool for it."""
    tool = shutil.which("c++filt")
    if tool is None or not kernels:
        return
    names = "\n".join(str(kernel["kernel"]) for kernel in kernels)
    lines = subprocess.run([tool], input=names, capture_output=True, text=True, check=True).stdout
    for kernel, name in zip(kernels, lines.splitlines(), strict=True):
        kernel["kernel"] = name


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("objects", type=Path, help="folder that holds the *.ptxas files")
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    # A log whose object is gone belongs to a unit that this build no longer has.
    logs = [p for p in sorted(arguments.objects.rglob("*.ptxas")) if p.with_suffix("").exists()]
    kernels = [kernel for log in logs for kernel in read_log(log)]
    demangle(kernels)
    arguments.output.write_text(json.dumps(kernels, indent=0) + "\n")


if __name__ == "__main__":
    main()
