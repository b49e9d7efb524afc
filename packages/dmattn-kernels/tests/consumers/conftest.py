"""Whether there is a GPU, as the installed wheel finds it."""

from __future__ import annotations

import pytest

import dmattn_kernels


@pytest.fixture(scope="session")
def without_gpu() -> str | None:
    """Why the kernels cannot run here, in the library's words; None where they can."""
    try:
        dmattn_kernels.device_architecture(0)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.fixture
def need_gpu(without_gpu: str | None) -> None:
    if without_gpu is not None:
        pytest.skip(without_gpu)
