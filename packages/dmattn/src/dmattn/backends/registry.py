"""The list of backends, and the one place that chooses among them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dmattn.backends.base import Backend
from dmattn.backends.cpu import CpuBackend
from dmattn.backends.cuda import CudaBackend
from dmattn.backends.flex import FlexBackend
from dmattn.backends.triton import TritonBackend
from dmattn.checks import StrideError
from dmattn.problem import Problem
from dmattn.validation import describe, one_of

# In order of preference: the first backend that can compute a problem is chosen.
BACKENDS: list[Backend] = [CudaBackend(), TritonBackend(), CpuBackend(), FlexBackend()]


def get_available_backends() -> list[str]:
    """The names of the backends that can run on this machine, the preferred one first.

    "cuda" is listed when torch sees a GPU of sm_80 or later and the compiled kernels can be loaded;
    "triton" when triton is installed and torch sees a GPU, or TRITON_INTERPRET=1 is set; "cpu"
    always; "flex" when this release of torch has the parts of FlexAttention that are needed. "flex"
    is last: without `backend=` it only gets calls that the others refuse.
    """
    return [backend.name for backend in BACKENDS if why_unavailable(backend) is None]


def why_unavailable(backend: Backend) -> str | None:
    """`Backend.unavailable`, whose answer is a constant of compiled code."""
    if torch.compiler.is_compiling():
        from dmattn.backends import constants

        reason: str | None = constants.unavailable(backend.name)
        return reason
    return backend.unavailable()


def named(name: str) -> Backend:
    """The backend of this name.

    Raises:
        TypeError: name is no string.
        ValueError: there is no such backend.
    """
    if isinstance(name, str):
        for backend in BACKENDS:
            if backend.name == name:
                return backend
    names = ", ".join(repr(backend.name) for backend in BACKENDS)
    if not isinstance(name, str):
        raise TypeError(f"backend: got {describe(name)}, wanted one of {names}, or None")
    raise ValueError(f"backend: got {name!r}, wanted one of {names}, or None")


def why_not(backend: Backend, problem: Problem) -> list[Exception]:
    """Why a backend cannot compute a checked problem; empty when it can."""
    device = problem.q.device
    if device.type not in backend.devices:
        wanted = " or ".join(backend.devices)
        text = f"query: got device {device}, wanted {wanted} for backend {backend.name!r}"
        return [ValueError(text)]
    return backend.unsupported(problem)


def choose(problem: Problem, wanted: str | None = None) -> Backend:
    """The backend that computes a checked problem.

    Args:
        problem: what to compute.
        wanted: the name of a backend to insist on, or None for the first that can compute it.

    Raises:
        TypeError, ValueError: no backend supports such a problem; the backend named by `wanted`
            does not; or a backend would support it if an operand were contiguous, and no backend
            before it in the list does (see `wants_a_copy`).
        RuntimeError: the backend named by `wanted`, or every backend that supports such a problem,
            cannot run on this machine.
    """
    if wanted is not None:
        backend = named(wanted)
        reasons = why_not(backend, problem)
        if reasons:
            raise reasons[0]
        missing = backend.unavailable()
        if missing is not None:
            raise unusable(backend, missing)
        return backend
    device = problem.q.device
    refusals: list[Exception] = []
    for backend in BACKENDS:
        if _is_eligible(backend, device):
            reasons = backend.unsupported(problem)
            if not reasons:
                missing = backend.unavailable_on(device)
                if missing is None:
                    return backend
                reasons = [RuntimeError(missing)]
            elif wants_a_copy(reasons) and backend.unavailable_on(device) is None:
                raise reasons[0]
            refusals.append(reasons[0])
    if not refusals:
        check_device(device)
    raise _all_of(refusals)


def prefers_lists(device: torch.device, dtype: torch.dtype, wanted: str | None) -> bool:
    """`Backend.prefers_lists` of the backend named by `wanted`, or of the first for such a device.

    False if none can run there. Whether that backend supports the problem is not checked: with
    lists the problem is the same.
    """
    rows = [b for b in BACKENDS if _is_eligible(b, device)] if wanted is None else [named(wanted)]
    for backend in rows:
        if device.type not in backend.devices:
            continue
        if backend.unavailable_on(device) is None and backend.unavailable() is None:
            return backend.prefers_lists(device, dtype)
    return False


def _is_eligible(backend: Backend, device: torch.device) -> bool:
    """Whether a backend may be chosen for such a device if no call names it."""
    return device.type in backend.devices and device.type not in backend.by_name_only


def wants_a_copy(reasons: Sequence[Exception]) -> bool:
    """Whether a backend would support a problem if operands were contiguous.

    A copy costs less than a slower backend. So no other backend takes over; an error is raised,
    and the caller can make the copy.
    """
    return bool(reasons) and all(isinstance(reason, StrideError) for reason in reasons)


def _all_of(refusals: list[Exception]) -> Exception:
    """The first refusal, with the messages of the others, which may name a way out, appended."""
    first, *others = refusals
    if not others:
        return first
    return type(first)(f"{first}; no other backend takes it: {'; '.join(map(str, others))}")


def check_device(device: torch.device) -> None:
    """Raise ValueError unless some backend takes tensors on such a device."""
    served = dict.fromkeys(kind for backend in BACKENDS for kind in backend.devices)
    if device.type not in served:
        raise ValueError(f"query: got device {device}, wanted {one_of(tuple(served))}")


def unusable(backend: Backend, reason: str) -> RuntimeError:
    """The error for a backend that cannot run on this machine."""
    return RuntimeError(f"backend: got {backend.name!r}, which cannot run here: {reason}")


def explain(
    problem: Problem,
    wanted: str | None = None,
    slow: Sequence[str] = (),
    out: Tensor | None = None,
) -> str:
    """Which backend computes a checked problem, why not the others, and what slows it down.

    Args:
        problem: what is to be computed.
        wanted: the name of the backend that the caller insists on, or None.
        slow: notes on what makes it slow whichever backend computes it.
        out: the tensor that the caller gave for the output, or None.

    Returns:
        Lines of text: the name of the backend, then the reasons and notes.

    Raises:
        TypeError: wanted is no string.
        ValueError: there is no backend with the name `wanted`.
    """
    rows = BACKENDS if wanted is None else [named(wanted)]
    if problem.q.is_meta:
        return "backend: none\n  of tensors on the device 'meta' a call returns shapes and dtypes"
    chosen, lines = _look_through(rows, problem, wanted)
    if chosen is not None:
        copied = [] if out is None else chosen.slow_outputs(problem, out)
        lines += [f"  slow: {note}" for note in (*slow, *chosen.slow_paths(problem), *copied)]
    return "\n".join([f"backend: {'none' if chosen is None else chosen.name}", *lines])


def _look_through(
    rows: Sequence[Backend], problem: Problem, wanted: str | None
) -> tuple[Backend | None, list[str]]:
    """The first of these backends that computes a problem, and a line for each other: why not."""
    lines, chosen, waits_for = [], None, ""
    for backend in rows:
        refusals = why_not(backend, problem)
        reasons = [str(reason) for reason in refusals]
        missing = backend.unavailable()
        if wanted is None and _is_eligible(backend, problem.q.device):
            left_out = backend.unavailable_on(problem.q.device)
            missing = missing if left_out is None else left_out
            if left_out is None and chosen is None and not waits_for:
                if wants_a_copy(refusals):
                    waits_for = "it is slower than that copy"
                elif not refusals and missing is not None:  # `choose` takes it, and it will raise
                    waits_for = f"it does not stand in for what {backend.name} lacks"
        if missing is not None:
            reasons.append(f"cannot run here: {missing}")
        elif wanted is None and problem.q.device.type in backend.by_name_only:
            reasons.append(f"serves {problem.q.device.type} only when asked for by name")
        if reasons:
            lines.append(f"  not {backend.name}: {'; '.join(reasons)}")
        elif waits_for:
            lines.append(f"  not {backend.name}: {waits_for}; backend= takes it")
        elif chosen is None:
            chosen = backend
        else:
            lines.append(f"  not {backend.name}: {chosen.name} comes first")
    return chosen, lines
