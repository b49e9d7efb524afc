"""Which implementations can run here."""

import torch

from dmattn.backends.cuda import kernels

BACKENDS = ("cuda", "cpu")


def get_available_backends() -> list[str]:
    """The backends that can run on this machine, the preferred one first.

    "cuda" is listed when torch sees a GPU of sm_80 or later and the compiled kernels can be loaded;
    "cpu" always.
    """
    return [name for name in BACKENDS if why_unavailable(name) is None]


def why_unavailable(backend: str) -> str | None:
    """None when `backend` can run here, else the reason.

    Raises:
        ValueError: there is no such backend.
    """
    if backend not in BACKENDS:
        wanted = ", ".join(repr(name) for name in BACKENDS)
        raise ValueError(f"backend: got {backend!r}, wanted one of {wanted}, or None")
    if backend == "cpu":
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    reason = "torch sees no CUDA device"
    for device in range(torch.cuda.device_count()):
        try:
            kernels.check_device(device)
        except RuntimeError as error:
            reason = str(error)
        else:
            return None
    return reason
