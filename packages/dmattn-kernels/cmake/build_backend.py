"""Build backend: scikit-build-core, with the CUDA compiler from PyPI where the machine has none."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from scikit_build_core import build as backend
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

CUDA_FROM_PYPI = "cuda-toolkit[nvcc,cccl]==13.0.*"
MACHINE_NVCC = "/usr/local/cuda/bin/nvcc"

Settings = dict[str, str | list[str]] | None


def machine_has_nvcc() -> bool:
    return (
        "CUDACXX" in os.environ or shutil.which("nvcc") is not None or Path(MACHINE_NVCC).is_file()
    )


def builds_cuda(settings: Settings) -> bool:
    """Not so when the module is put over a library that is there already."""
    return not any("DMATTN_LIBRARY" in key for key in settings or {})


def use_nvcc_from_pypi() -> None:
    folders = [Path(folder) for folder in [sysconfig.get_paths()["purelib"], *sys.path]]
    roots = [folder / "nvidia" / "cu13" for folder in folders]
    root = next((root for root in roots if (root / "bin" / "nvcc").is_file()), None)
    if root is None:
        return  # CMake says what is missing
    os.environ["CUDACXX"] = str(root / "bin" / "nvcc")
    # Its nvcc.profile names lib64, the packages put the libraries in lib.
    paths = [str(root / "lib"), os.environ.get("LIBRARY_PATH", "")]
    os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    requires = list(backend.get_requires_for_build_wheel(config_settings))
    if builds_cuda(config_settings) and not machine_has_nvcc():
        requires.append(CUDA_FROM_PYPI)
    return requires


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    if builds_cuda(config_settings) and not machine_has_nvcc():
        use_nvcc_from_pypi()
    return str(backend.build_wheel(wheel_directory, config_settings, metadata_directory))
