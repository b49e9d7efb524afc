"""Programs of examples/consumers, built and run against the installed wheel and nothing else."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import dmattn_kernels

EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "consumers"


def load(folder: str) -> ModuleType:
    """examples/consumers/<folder>/attention.py, imported from its file."""
    spec = importlib.util.spec_from_file_location(
        f"{folder}_attention", EXAMPLES / folder / "attention.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def cmake_build(folder: str, build: Path, *options: str) -> Path:
    """Configure and build examples/consumers/<folder>; returns the build folder."""
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    assert cmake is not None, "no cmake"
    package = f"-Ddmattn_kernels_DIR={dmattn_kernels.cmake_dir()}"
    subprocess.run(
        [cmake, "-S", str(EXAMPLES / folder), "-B", str(build), package, *options], check=True
    )
    subprocess.run([cmake, "--build", str(build)], check=True)
    return build


def run(*command: str | Path) -> str:
    """Run a program that must succeed, and return what it prints."""
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
