"""What the suite runs on: a row for each combination of backend, device and kernel family.

One process tests one target, since the kernels read their family from the environment once. The
environment variable DMATTN_TEST_TARGET names the target; without it, the first row that can run on
this machine is taken. To put another backend through the suite, add a row.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch

TARGET_VARIABLE = "DMATTN_TEST_TARGET"
SHARE_VARIABLE = "DMATTN_TEST_SHARE"
SEED_VARIABLE = "DMATTN_TEST_SEED"
HALF = ("f16", "bf16")


@dataclasses.dataclass(frozen=True)
class Target:
    """One row.

    Attributes:
        name: what DMATTN_TEST_TARGET and the report call it.
        backend: given as `backend=` to the public functions; None leaves the choice to them.
        device: the torch device that holds the tensors, "cpu" or "cuda".
        family: which of the kernels' tile shapes run, for a report; None where there are none.
        env: variables that must be set before the process starts.
        dtypes: the dtypes of query, key and value that it takes.
        share: one case in so many runs, unless DMATTN_TEST_SHARE says otherwise.
        repeats: whether an earlier row runs the same backend. Then only what the tests mark as
            `each_family` runs again.
        plugin: a module to import first, which registers the backend; None for those of dmattn.
        most_tiles: problems of more tiles of 128 rows x 128 keys, over all heads, are left out;
            None for a target that is fast enough for all.
        most_scores: likewise, problems of more pairs of a row and a key, over all heads.
        any_strides: whether head_dim of query, key and value may lie in any direction. The compiled
            kernels refuse all but the innermost one.
        poison: whether fresh buffers are filled with NaN and given margins, see poison.py. False if
            torch itself computes, since it asserts that its buffers start where their memory does.
        seconds: what a test may take in the GPU suite, beside all others, before it counts as hung.
        workers: how many processes it has in the GPU suite for each process of another target.
    """

    name: str
    backend: str | None
    device: str
    family: str | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dtypes: tuple[str, ...] = HALF
    share: int = 1
    repeats: bool = False
    plugin: str | None = None
    most_tiles: int | None = None
    most_scores: int | None = None
    any_strides: bool = True
    poison: bool = True
    seconds: int = 60
    workers: int = 1

    @property
    def backend_name(self) -> str:
        """The backend that computes: for rows without one, the device's own."""
        return self.device if self.backend is None else self.backend

    def options(self) -> dict[str, Any]:
        """Arguments that lead a call of the public functions to this target."""
        return {} if self.backend is None else {"backend": self.backend}

    def why_not(self) -> str | None:
        """Why this machine or this process cannot test it; None when it can."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return "torch sees no CUDA device"
        wrong = {name: value for name, value in self.env.items() if os.environ.get(name) != value}
        return f"the environment lacks {wrong}" if wrong else None


def _cuda(family: str, share: int = 1, repeats: bool = False) -> Target:
    """A set of the compiled kernels, which the variable DMATTN_ARCH chooses."""
    return Target(
        *(f"cuda-{family}", None, "cuda", family, {"DMATTN_ARCH": family}),
        share=share,
        repeats=repeats,
        any_strides=False,
    )


# The limit of backends that form all scores at once: larger problems would only take more time.
_MOST_FORMED = 10_000_000

TARGETS = {
    row.name: row
    for row in (
        _cuda("sm90"),
        # On Hopper the row above runs these kernels, too, for what its own do not serve.
        _cuda("sm80", share=4, repeats=True),
        _cuda("sm89", repeats=True),
        Target("cpu", None, "cpu", dtypes=(*HALF, "f32", "f64"), share=20),
        Target(
            name="plain",
            backend="plain",
            device="cpu",
            dtypes=(*HALF, "f32", "f64"),
            share=240,
            plugin="attention.plain_backend",
            most_scores=_MOST_FORMED,
        ),
        Target(
            name="triton-cpu",
            backend="triton",
            device="cpu",
            env={"TRITON_INTERPRET": "1"},
            dtypes=(*HALF, "f32"),
            share=240,
            most_tiles=32,  # about 50 ms each, in each of five kernels
        ),
        # Each case compiles kernels of its own, for seconds, and for up to a minute beside others.
        Target("triton-cuda", "triton", "cuda", dtypes=(*HALF, "f32"), share=60, seconds=240),
        Target(
            name="flex-cpu",
            backend="flex",
            device="cpu",
            dtypes=(*HALF, "f32", "f64"),
            share=240,
            most_scores=_MOST_FORMED,
            poison=False,
        ),
        Target(
            name="flex-cuda",
            backend="flex",
            device="cuda",
            dtypes=(*HALF, "f32"),
            share=240,
            poison=False,
            seconds=240,
            workers=2,  # most of its tests compile
        ),
    )
}


@functools.cache
def target() -> Target:
    """The target of this process.

    Raises:
        RuntimeError: DMATTN_TEST_TARGET names none, or one that cannot run here.
    """
    wanted = os.environ.get(TARGET_VARIABLE)
    if wanted is None:
        on_cuda = torch.cuda.is_available()
        row = TARGETS[f"cuda-{os.environ.get('DMATTN_ARCH', 'sm90')}" if on_cuda else "cpu"]
        return dataclasses.replace(row, env={})
    if wanted not in TARGETS:
        raise RuntimeError(f"{TARGET_VARIABLE}: got {wanted!r}, wanted one of {list(TARGETS)}")
    row = TARGETS[wanted]
    if reason := row.why_not():
        raise RuntimeError(f"{TARGET_VARIABLE}: got {wanted!r}, but {reason}")
    if row.plugin is not None:
        importlib.import_module(row.plugin)
    return row


def share() -> int:
    """One case in so many runs."""
    return int(os.environ.get(SHARE_VARIABLE, target().share))


def target_device() -> torch.device:
    return torch.device(target().device)


def on_cuda() -> bool:
    return target().device == "cuda"


def synchronize() -> None:
    if on_cuda():
        torch.cuda.synchronize()
