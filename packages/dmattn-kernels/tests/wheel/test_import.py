"""The Python package on a machine without a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dmattn_kernels
from calls import module_params
from conftest import PACKAGE, compiler


def run_without_gpu(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that sees no GPU, even on a machine that has one."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_touches_neither_driver_nor_torch() -> None:
    code = (
        "import sys, dmattn_kernels\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libcuda' not in maps and 'libcudart' not in maps\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = run_without_gpu(code)
    assert result.returncode == 0, result.stderr


def test_clear_error_without_gpu() -> None:
    code = "import dmattn_kernels\ndmattn_kernels.device_architecture(0)"
    result = run_without_gpu(code)
    assert "RuntimeError: device is 0, but no NVIDIA GPU can be used here: " in result.stderr


@pytest.mark.parametrize("method", ["workspace_size()", "enqueue(0)", "launch(0, 0, 0)"])
def test_clear_error_for_a_call_without_gpu(method: str) -> None:
    folder = Path(__file__).parent
    code = (
        f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder.parent)!r}]\n"
        f"from calls import module_params\nmodule_params().{method}"
    )
    result = run_without_gpu(code)
    assert "no NVIDIA GPU can be used here" in result.stderr
    assert "RuntimeError" in result.stderr


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="device is 63"):
        module_params(device=63).workspace_size()


def test_versions_agree() -> None:
    assert dmattn_kernels.version() == dmattn_kernels.__version__
    assert dmattn_kernels.abi_version() == dmattn_kernels.HEADER_ABI_VERSION
    try:
        installed = importlib.metadata.version("dmattn-kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("dmattn-kernels is not installed as a package")
    assert dmattn_kernels.version() == installed


def test_another_library_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """If the process has already loaded one, the loader takes it, since it goes by the name."""
    names = (PACKAGE / "cmake" / "exported_symbols.txt").read_text().split()
    others = [name for name in names if name != "dmattn_abi_version"]
    (tmp_path / "other.c").write_text(
        "int dmattn_abi_version(void) { return 99; }\n"
        + "".join(f'const char* {name}(void) {{ return "other"; }}\n' for name in others)
    )
    other = tmp_path / "libdmattn.so"
    command = [compiler(), "-x", "c", "-shared", "-fPIC", str(tmp_path / "other.c")]
    subprocess.run([*command, "-Wl,-soname,libdmattn.so", "-o", str(other)], check=True)
    result = run_without_gpu("import dmattn_kernels", LD_PRELOAD=str(other))
    wanted = dmattn_kernels.HEADER_ABI_VERSION
    assert f"got a libdmattn.so of ABI version 99, wanted {wanted}; another copy" in result.stderr


def test_paths_exist() -> None:
    assert (dmattn_kernels.include_dir() / "dmattn" / "dmattn.h").is_file()
    assert (dmattn_kernels.include_dir() / "dmattn" / "dmattn.hpp").is_file()
    assert dmattn_kernels.library_path().is_file()


def test_everything_public_is_typed() -> None:
    folder = dmattn_kernels.library_path().parent
    assert (folder / "py.typed").is_file()
    stub = (folder / "_core.pyi").read_text()
    public = [name for name in dir(dmattn_kernels._core) if not name.startswith("__")]
    assert [name for name in public if name not in stub] == []


def test_dtype_codes_equal_the_header() -> None:
    text = (dmattn_kernels.include_dir() / "dmattn" / "dmattn.h").read_text()
    for name in ("FLOAT16", "BFLOAT16", "FLOAT32", "BOOL"):
        assert f"DMATTN_{name} = {getattr(dmattn_kernels, name)}" in text
