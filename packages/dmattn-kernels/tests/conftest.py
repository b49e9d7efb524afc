"""The installed wheel, and the planning code compiled on its own."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import abi

PACKAGE = Path(__file__).resolve().parents[1]


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
    """tests/plan_probe.cpp: what a call would do, without a GPU and without CUDA."""
    output = tmp_path_factory.mktemp("probe") / "libplan_probe.so"
    api = PACKAGE / "src" / "api"
    sources = [
        api / f"{name}.cpp"
        for name in (
            "error",
            "checks",
            "validate",
            "operands",
            "plan_fwd",
            "plan_bwd",
            "plan_bwd_sums",
            "bwd_launches",
            "plan_decode",
        )
    ]
    includes = [PACKAGE / "include", PACKAGE / "src", PACKAGE / "tests" / "seams"]
    subprocess.run(
        [compiler(), "-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-Wall", "-Wextra"]
        + [f"-I{folder}" for folder in includes]
        + [str(source) for source in [PACKAGE / "tests" / "plan_probe.cpp", *sources]]
        + ["-o", str(output)],
        check=True,
    )
    return ctypes.CDLL(str(output))
