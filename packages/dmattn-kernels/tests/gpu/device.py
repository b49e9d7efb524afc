"""Where the suite runs. The CPU stands in for the GPU when the tests themselves are tested."""

from __future__ import annotations

import os

import torch

DEVICE_VARIABLE = "DMATTN_GPU_TEST_DEVICE"
FAMILY_VARIABLE = "DMATTN_ARCH"


def device() -> torch.device | None:
    """The device to test, None when there is none: CUDA unless the environment asks for `cpu`."""
    wanted = os.environ.get(DEVICE_VARIABLE, "cuda")
    if wanted == "cpu":
        return torch.device("cpu")
    return torch.device(wanted) if torch.cuda.is_available() else None


def on_cuda() -> bool:
    found = device()
    return found is not None and found.type == "cuda"


def require_device() -> torch.device:
    found = device()
    if found is None:
        raise RuntimeError("no CUDA device")
    return found


def synchronize() -> None:
    if on_cuda():
        torch.cuda.synchronize()
