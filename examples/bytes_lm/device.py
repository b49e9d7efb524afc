"""The device to train on: which one, its arithmetic, its clock."""

import time

import torch

from dmattn import get_available_backends


def choose_device(wanted: str) -> torch.device:
    """The device to train on; prints a line if there is a GPU that cannot be used."""
    usable = torch.cuda.is_available() and "cuda" in get_available_backends()
    if wanted == "cuda" and not usable:
        raise SystemExit("--device cuda: no GPU that dmattn has kernels for; see the README")
    if wanted == "auto" and torch.cuda.is_available() and not usable:
        print("There is a GPU, but dmattn has no kernels for it here: training on the CPU.")
    return torch.device("cuda" if usable and wanted != "cpu" else "cpu")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def half_precision(device: torch.device) -> torch.autocast:
    """On a GPU the arithmetic is bfloat16 by autocast; weights and their updates stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def clock(device: torch.device) -> float:
    """The time in seconds, read after the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
