"""The CMake package inside the installed wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dmattn_kernels

CMAKE = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")


def configure(project: Path, lists: str, *options: str) -> subprocess.CompletedProcess[str]:
    assert CMAKE is not None, "no cmake, which the package is built with"
    (project / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.24)\n" + lists)
    return subprocess.run(
        [CMAKE, "-S", str(project), "-B", str(project / "build"), *options],
        capture_output=True,
        text=True,
        check=False,
    )


def printed(option: str) -> str:
    command = [sys.executable, "-m", "dmattn_kernels", option]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_module_prints_where_things_are() -> None:
    assert Path(printed("--cmake-dir")) == dmattn_kernels.cmake_dir()
    assert Path(printed("--include-dir")) == dmattn_kernels.include_dir()
    assert Path(printed("--library")) == dmattn_kernels.library_path()
    assert printed("--version") == dmattn_kernels.version()


def test_which_versions_are_found(tmp_path: Path) -> None:
    """find_package accepts requests for the series of this wheel that are not newer than it."""
    major, minor, patch = (int(part) for part in dmattn_kernels.version().split("."))
    series, version = f"{major}.{minor}", f"{major}.{minor}.{patch}"
    newer = f"{major}.{minor}.{patch + 1}"
    next_series = f"{major}.{minor + 1}"
    wanted = {
        "": True,
        series: True,
        version: True,
        f"{version} EXACT": True,
        newer: False,
        next_series: False,
        f"{major + 1}.{minor}": False,
        str(major): False,  # read as MAJOR.0, another series
        f"{series}...{version}": True,
        f"{series}...<{next_series}": True,
        f"{newer}...{next_series}": False,
    }
    calls = [
        f"unset(dmattn_kernels_DIR CACHE)\n"
        f"find_package(dmattn_kernels {request} QUIET CONFIG)\n"
        f'message(STATUS "<{request}> ${{dmattn_kernels_FOUND}} ${{dmattn_kernels_VERSION}}")\n'
        for request in wanted
    ]
    lists = "project(versions LANGUAGES C)\n" + "".join(calls)
    result = configure(tmp_path, lists, f"-DCMAKE_PREFIX_PATH={dmattn_kernels.cmake_dir()}")
    assert result.returncode == 0, result.stderr
    found = re.findall(r"^-- <(.*)> (\d) (\S*)$", result.stdout, re.MULTILINE)
    assert {request: answer == "1" for request, answer, _ in found} == wanted
    assert {words for _, answer, words in found if answer == "1"} == {version}


@pytest.mark.parametrize("prefix", ["folder of the package", "folder of all packages"])
def test_a_moved_package_is_found_by_prefix(prefix: str, tmp_path: Path) -> None:
    """It holds no path of where it was built, and programs linked with it find it at run time."""
    package = tmp_path / "elsewhere" / "dmattn_kernels"
    shutil.copytree(dmattn_kernels.library_path().parent, package)
    # Prints which file the loader took.
    (tmp_path / "which.c").write_text(
        "#define _GNU_SOURCE\n"
        "#include <dlfcn.h>\n"
        "#include <dmattn/dmattn.h>\n"
        "#include <stdio.h>\n"
        "int main(void) {\n"
        "  Dl_info info;\n"
        "  if (!dladdr((void*)dmattn_last_error, &info)) return 1;\n"
        "  puts(info.dli_fname);\n"
        "  return dmattn_abi_version() != DMATTN_ABI_VERSION;\n"
        "}\n"
    )
    lists = (
        "project(moved LANGUAGES C)\n"
        "find_package(dmattn_kernels REQUIRED)\n"
        "add_executable(which which.c)\n"
        "target_link_libraries(which PRIVATE dmattn_kernels::dmattn ${CMAKE_DL_LIBS})\n"
    )
    place = package if prefix == "folder of the package" else package.parent
    result = configure(tmp_path, lists, f"-DCMAKE_PREFIX_PATH={place}")
    assert result.returncode == 0, result.stderr
    assert CMAKE is not None
    subprocess.run([CMAKE, "--build", str(tmp_path / "build")], check=True)
    program = str(tmp_path / "build" / "which")
    result = subprocess.run([program], capture_output=True, text=True, check=True)
    assert Path(result.stdout.strip()) == package / "libdmattn.so"


def test_a_package_without_its_library_is_not_found(tmp_path: Path) -> None:
    package = tmp_path / "dmattn_kernels"
    shutil.copytree(dmattn_kernels.cmake_dir(), package / "cmake")
    lists = "project(broken LANGUAGES C)\nfind_package(dmattn_kernels REQUIRED)\n"
    result = configure(tmp_path, lists, f"-Ddmattn_kernels_DIR={package / 'cmake'}")
    assert result.returncode != 0
    words = " ".join(result.stderr.split())
    assert f"{package}/libdmattn.so is missing; install dmattn-kernels again" in words
