"""One hash over all that the library is compiled from: what a GPU report vouches for."""

from __future__ import annotations

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SUFFIXES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".in", ".cmake", ".map", ".txt"}
PLACES = ("src", "include", "cmake", "CMakeLists.txt")


def library_sources(package: Path = PACKAGE) -> list[Path]:
    """Every file that the library is compiled from, sorted; the bindings are no part of it."""
    found = []
    for place in PLACES:
        path = package / place
        files = path.rglob("*") if path.is_dir() else [path]
        found += [file for file in files if file.is_file() and file.suffix in SUFFIXES]
    bindings = package / "src" / "bindings"
    return sorted(file for file in found if bindings not in file.parents)


def source_hash(package: Path = PACKAGE) -> str:
    """sha256 over names and contents, line endings normalised."""
    digest = hashlib.sha256()
    for file in library_sources(package):
        content = file.read_bytes().replace(b"\r\n", b"\n")
        name = file.relative_to(package).as_posix().encode()
        digest.update(name + b"\0" + str(len(content)).encode() + b"\0" + content)
    return digest.hexdigest()


if __name__ == "__main__":
    print(source_hash())
