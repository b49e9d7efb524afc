"""CUDA kernels for masked and biased attention, behind a C ABI.

Importing this package needs no GPU and no driver. `FwdParams`, `BwdParams`, `SelectParams`,
`BuildKeyListsParams`, `CacheAppendParams`, `CacheDraftParams`, `CacheCommitParams`,
`JoinKeysParams` and `KeepKeysParams` describe one call each; their `launch` enqueues it on a CUDA
stream. C and C++ programs use `cmake_dir()` with CMake, or `include_dir()` and `library_path()`;
`python -m dmattn_kernels` prints each of these paths.
"""

from __future__ import annotations

from pathlib import Path

from dmattn_kernels._core import (
    BFLOAT16,
    BOOL,
    FLOAT16,
    FLOAT32,
    HEADER_ABI_VERSION,
    INT32,
    INT64,
    BuildKeyListsParams,
    BwdParams,
    CacheAppendParams,
    CacheCommitParams,
    CacheDraftParams,
    FwdParams,
    JoinKeysParams,
    KeepKeysParams,
    SelectParams,
    abi_version,
    architectures,
    cuda_version,
    device_architecture,
    select_capacity,
    version,
)

if abi_version() != HEADER_ABI_VERSION:
    # If the process has loaded a library of the same name before, the loader takes that one.
    raise ImportError(
        f"dmattn_kernels: got a libdmattn.so of ABI version {abi_version()}, wanted "
        f"{HEADER_ABI_VERSION}; another copy of it was loaded into this process before"
    )

__version__ = version()

__all__ = [
    "BFLOAT16",
    "BOOL",
    "FLOAT16",
    "FLOAT32",
    "HEADER_ABI_VERSION",
    "INT32",
    "INT64",
    "BuildKeyListsParams",
    "BwdParams",
    "CacheAppendParams",
    "CacheCommitParams",
    "CacheDraftParams",
    "FwdParams",
    "JoinKeysParams",
    "KeepKeysParams",
    "SelectParams",
    "abi_version",
    "architectures",
    "cmake_dir",
    "cuda_version",
    "device_architecture",
    "include_dir",
    "library_path",
    "select_capacity",
    "version",
]


def cmake_dir() -> Path:
    """The folder with the CMake package: `cmake -Ddmattn_kernels_DIR=...`.

    `find_package(dmattn_kernels)` then gives the target `dmattn_kernels::dmattn`.
    """
    return Path(__file__).parent / "cmake"


def include_dir() -> Path:
    """The folder to pass to a compiler with -I; it holds dmattn/dmattn.h and dmattn/dmattn.hpp."""
    return Path(__file__).parent / "include"


def library_path() -> Path:
    """The shared library that implements dmattn/dmattn.h."""
    return Path(__file__).parent / "libdmattn.so"
