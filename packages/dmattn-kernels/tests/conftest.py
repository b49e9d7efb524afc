"""The installed wheel, and the planning code compiled on its own."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import abi

PACKAGE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PACKAGE / "cmake"))  # source_hash

# The source distribution comes without the GPU suite, which needs more of the repository.
if not (PACKAGE / "tests" / "gpu").is_dir():
    collect_ignore = ["host/test_suite_jobs.py", "wheel/test_sanitizer_launches.py"]


def compiler() -> str:
    """A C++ compiler; the package cannot have been built without one."""
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert found is not None, "no C++ compiler"
    return found


@pytest.fixture(scope="session")
def library_path() -> Path:
    import dmattn_kernels

    path: Path = dmattn_kernels.library_path()
    return path


@pytest.fixture(scope="session")
def library(library_path: Path) -> ctypes.CDLL:
    return abi.declare(ctypes.CDLL(str(library_path)))


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """host/*_probe.cpp, compiled without CUDA: functions that tell what a call would do.

    They use src/host and those headers of the kernels that hold nothing but arithmetic.
    """
    output = tmp_path_factory.mktemp("probe") / "libplan_probe.so"
    folder = PACKAGE / "tests" / "host"
    sources = [folder / f"{name}_probe.cpp" for name in ("plan", "terms", "numbering", "tail")]
    sources += sorted((PACKAGE / "src" / "host").rglob("*.cpp"))
    includes = [PACKAGE / "include", PACKAGE / "src", folder / "stubs"]
    subprocess.run(
        [compiler(), "-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
        + [f"-I{each}" for each in includes]
        + [str(source) for source in sources]
        + ["-o", str(output)],
        check=True,
    )
    return ctypes.CDLL(str(output))
