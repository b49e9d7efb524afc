"""A C++ program that finds the wheel by find_package."""

from __future__ import annotations

from pathlib import Path

import pytest

import dmattn_kernels
from elf import Library
from programs import cmake_build, run


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cmake_build("cpp", tmp_path_factory.mktemp("cpp")) / "attend"


@pytest.fixture(scope="module")
def said(program: Path) -> str:
    """What the program prints; run() checks by its exit status that all was as it expects."""
    return run(program)


def test_versions(said: str) -> None:
    version, abi = dmattn_kernels.version(), dmattn_kernels.abi_version()
    assert f"dmattn {version}, ABI version {abi}, architectures sm_" in said


def test_wrong_calls_are_refused_by_name(said: str) -> None:
    assert "refused: v has shape (1, 129, 2, 64); wanted (1, 130, 2, 64), the shape of k" in said
    assert "refused: k has dtype float16 (1); wanted bfloat16" in said


def test_without_a_gpu_it_says_so(said: str, without_gpu: str | None) -> None:
    assert ("no GPU, no forward: " in said) == (without_gpu is not None)
    assert without_gpu is None or without_gpu in said


@pytest.mark.usefixtures("need_gpu")
def test_forward_agrees_with_a_loop(said: str) -> None:
    assert "largest difference from the loop: out " in said


def test_needs_the_library_and_the_system_alone(program: Path) -> None:
    needed = Library(program).needed()
    assert "libdmattn.so" in needed
    assert not [name for name in needed if "cuda" in name or "torch" in name or "python" in name]
