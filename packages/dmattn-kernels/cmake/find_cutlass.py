"""Prints the folder that holds cute/ and cutlass/ of the CUTLASS release that the kernels use.

It comes from the PyPI package, installed or fetched. Fetched without its dependencies: they serve
the Python tools in the package, and are many and large.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

VERSION = "4.2.0.0"
HEADERS = "cutlass_library/source/include/"


def installed() -> Path | None:
    """The headers of the installed package, if it is installed in this very version."""
    try:
        distribution = metadata.distribution("nvidia-cutlass")
    except metadata.PackageNotFoundError:
        return None
    folder = Path(str(distribution.locate_file(HEADERS)))
    found = distribution.version == VERSION and (folder / "cute" / "tensor.hpp").is_file()
    return folder if found else None


def fetch(place: Path) -> Path:
    """Downloads the package and unpacks its headers below `place`; done once."""
    folder = place / VERSION / HEADERS
    if (folder / "cute" / "tensor.hpp").is_file():
        return folder
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"),
                *("--disable-pip-version-check", "--dest", temporary),
                f"nvidia-cutlass=={VERSION}",
            ],
            check=True,
            stdout=sys.stderr,
        )
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(HEADERS)]
            archive.extractall(place / VERSION, names)
    return folder


if __name__ == "__main__":
    print(installed() or fetch(Path(sys.argv[1])))
