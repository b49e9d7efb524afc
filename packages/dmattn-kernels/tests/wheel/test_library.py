"""What the built library is made of: names, dependencies, GPU code, registers."""

from __future__ import annotations

import ctypes
import fnmatch
import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import source_hash
from conftest import PACKAGE, compiler
from elf import DT_RUNPATH, Library

MEGABYTE = 1 << 20


def exported_symbols() -> set[str]:
    return set((PACKAGE / "cmake" / "exported_symbols.txt").read_text().split())


def header() -> str:
    return (PACKAGE / "include" / "dmattn" / "dmattn.h").read_text()


@pytest.fixture(scope="module")
def elf(library_path: Path) -> Library:
    return Library(library_path)


@pytest.fixture(scope="module")
def architectures(library: ctypes.CDLL) -> list[str]:
    return str(library.dmattn_architectures().decode()).split(",")


def test_exports_equal_the_committed_list(elf: Library) -> None:
    assert elf.exported() == exported_symbols()


def test_exports_equal_the_header() -> None:
    assert set(re.findall(r"^DMATTN_API .*?(dmattn_\w+)\(", header(), re.MULTILINE)) == (
        exported_symbols()
    )


def test_needs_neither_torch_nor_cuda(library_path: Path) -> None:
    system = re.compile(r"^(lib(c|m|dl|rt|pthread)\.so\.\d+|ld-linux-[\w-]+\.so\.\d)$")
    for path in [library_path, *library_path.parent.glob("_core*.so")]:
        others = [name for name in Library(path).needed() if not system.match(name)]
        assert others == ([] if path == library_path else ["libdmattn.so"]), path.name


def test_module_finds_the_library_next_to_it(library_path: Path) -> None:
    (module,) = library_path.parent.glob("_core*.so")
    assert Library(module).dynamic(DT_RUNPATH) == ["$ORIGIN"]


def test_every_declared_architecture_is_present(elf: Library, architectures: list[str]) -> None:
    code = elf.cuda_code()
    assert {name for name, _ in code} == set(architectures)
    # Each source file contributes one piece of code for each architecture, except for code that
    # runs on one architecture only (sm_90a): that comes from the units of this architecture alone.
    general = [name for name in architectures if not name.endswith("a")]
    counts = {name: sum(found == name for found, _ in code) for name in general}
    assert len(set(counts.values())) == 1, counts


def test_release_architectures(architectures: list[str]) -> None:
    """Native code for 8.0, 8.6, 8.9 and Hopper, and PTX for newer chips, in what is released."""
    if "DMATTN_WHEEL" not in os.environ:
        pytest.skip("DMATTN_WHEEL does not name a wheel")
    assert architectures == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "compute_89"]


def test_wheel_stays_under_60_megabytes() -> None:
    wheel = os.environ.get("DMATTN_WHEEL")
    if wheel is None:
        pytest.skip("DMATTN_WHEEL does not name a wheel")
    assert Path(wheel).stat().st_size < 60 * MEGABYTE


def test_library_is_built_from_these_sources(library_path: Path) -> None:
    marker = b"dmattn-source-hash:"
    content = library_path.read_bytes()
    start = content.index(marker) + len(marker)
    assert content[start : start + 64].decode() == source_hash.source_hash(PACKAGE)


def test_versions(library: ctypes.CDLL) -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    assert library.dmattn_version().decode() == project["version"]
    (abi_version,) = re.findall(r"^#define DMATTN_ABI_VERSION (\d+)$", header(), re.MULTILINE)
    assert library.dmattn_abi_version() == int(abi_version)
    assert 12000 <= library.dmattn_cuda_version() < 20000


def kernel_resources(library_path: Path) -> list[dict[str, str | int]]:
    found = json.loads((library_path.parent / "kernel_resources.json").read_text())
    assert isinstance(found, list)
    return found


def test_every_unit_reports_its_registers(library_path: Path, architectures: list[str]) -> None:
    kernels = kernel_resources(library_path)
    native = {name for name in architectures if name.startswith("sm_")}
    assert {kernel["arch"] for kernel in kernels} == native
    for prefix in ("fwd_sm80", "bwd_sm80", "short_fwd_sm80", "short_bwd_sm80"):
        assert any(str(kernel["unit"]).startswith(prefix) for kernel in kernels), prefix
    if "sm_90a" in native:
        hopper = {str(kernel["unit"]) for kernel in kernels if kernel["arch"] == "sm_90a"}
        assert {name.split("_")[0] for name in hopper} == {"fwd", "bwd"}


def test_no_spills_but_the_allowed(library_path: Path) -> None:
    """tests/allowed_spills.toml names the kernels that may spill, and why."""
    allowed = tomllib.loads((PACKAGE / "tests" / "allowed_spills.toml").read_text())["allowed"]
    assert all(entry["reason"] for entry in allowed)
    offenders = []
    for kernel in kernel_resources(library_path):
        spilled = max(int(kernel["spill_store_bytes"]), int(kernel["spill_load_bytes"]))
        limits = [
            int(entry["max_bytes"])
            for entry in allowed
            if fnmatch.fnmatch(str(kernel["unit"]), entry["unit"])
            and fnmatch.fnmatch(str(kernel["arch"]), entry["arch"])
            and all(re.search(part, str(kernel["kernel"])) for part in entry["kernel"])
        ]
        if spilled > max(limits, default=0):
            offenders.append(
                f"{kernel['unit']} {kernel['arch']} {spilled} bytes: {kernel['kernel']}"
            )
    assert not offenders, "\n".join(offenders)


@pytest.mark.parametrize(
    "source, language",
    [
        ('#include "dmattn/dmattn.h"\nint main(void) { return dmattn_abi_version() != 1; }\n', "c"),
        (
            '#include "dmattn/dmattn.hpp"\n'
            "int main() {\n"
            "  auto params = dmattn::make_params<dmattn_fwd_params>();\n"
            "  params.q = dmattn::make_tensor(nullptr, DMATTN_FLOAT32, {1, 2, 3, 64});\n"
            "  try {\n"
            "    dmattn::workspace_size(params);\n"
            "  } catch (const dmattn::Error& error) {\n"
            "    return error.status() != DMATTN_ERROR_INVALID_VALUE;\n"
            "  }\n"
            "  return 1;\n"
            "}\n",
            "c++",
        ),
    ],
    ids=["c", "c++"],
)
def test_programs_use_the_headers(
    source: str, language: str, library_path: Path, tmp_path: Path
) -> None:
    import dmattn_kernels

    (tmp_path / "main").write_text(source)
    standard = "c99" if language == "c" else "c++17"
    subprocess.run(
        [
            *(compiler(), "-x", language, f"-std={standard}", "-Wall", "-Wextra", "-Werror"),
            *("-pedantic", f"-I{dmattn_kernels.include_dir()}", str(tmp_path / "main")),
            *("-x", "none", str(library_path), f"-Wl,-rpath,{library_path.parent}"),
            *("-o", str(tmp_path / "program")),
        ],
        check=True,
    )
    subprocess.run([str(tmp_path / "program")], check=True)
