"""Calls of the built library, through C and through the Python module."""

from __future__ import annotations

import ctypes

import abi
import dmattn_kernels
from abi import FLOAT32, SOME_ADDRESS, tensor

Q = (2, 128, 4, 64)
K = (2, 128, 2, 64)
LSE = (2, 4, 128)


def call(library: ctypes.CDLL, params: abi.Params) -> tuple[int, str]:
    """Status and message of a launch with more workspace than any call here needs."""
    _, name = abi.CALLS[type(params)]
    status = getattr(library, name)(ctypes.byref(params), SOME_ADDRESS, 1 << 50, None)
    return status, library.dmattn_last_error().decode()


def size(library: ctypes.CDLL, params: abi.Params) -> tuple[int, str]:
    name, _ = abi.CALLS[type(params)]
    bytes_needed = ctypes.c_size_t()
    status = getattr(library, name)(ctypes.byref(params), ctypes.byref(bytes_needed))
    return status, library.dmattn_last_error().decode()


def view(value: abi.Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    n = value.ndim
    return value.data or 0, value.dtype, tuple(value.shape[:n]), tuple(value.stride[:n])


def module_params(**replaced: object) -> dmattn_kernels.FwdParams:
    values: dict[str, object] = {
        "device": 0,
        "q": view(tensor(Q)),
        "k": view(tensor(K)),
        "v": view(tensor(K)),
        "mask": None,
        "bias": None,
        "out": view(tensor(Q)),
        "lse": view(tensor(LSE, FLOAT32)),
        "softmax_scale": 0.125,
        "softcap": 0.0,
        "is_causal": False,
    }
    return dmattn_kernels.FwdParams(**(values | replaced))  # type: ignore[arg-type]
