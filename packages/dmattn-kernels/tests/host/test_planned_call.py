"""A call that asks for its workspace and is then launched is checked and planned once."""

from __future__ import annotations

import ctypes
import threading

import pytest

import abi
from abi import bwd_params, fwd_params, tensor
from probe import WORKSPACE

SIZE, LAUNCH = 0, 1


def planned(probe: ctypes.CDLL, params: abi.FwdParams, kind: int) -> tuple[int, str, int]:
    """Status, bytes or message, and how many plans were made up to now."""
    text, plans = ctypes.create_string_buffer(1 << 10), ctypes.c_int()
    status = probe.probe_planned_call(
        ctypes.byref(params), kind, ctypes.byref(plans), text, ctypes.c_size_t(len(text))
    )
    return status, text.value.decode(), plans.value


def test_a_launch_uses_the_plan_of_the_question(probe: ctypes.CDLL) -> None:
    params = fwd_params(batch=3, seqlen_k=4096)
    status, size, plans = planned(probe, params, SIZE)
    assert status == abi.OK and int(size) > 0
    for kind in (LAUNCH, SIZE, LAUNCH):
        assert planned(probe, params, kind) == (abi.OK, size, plans)
    # A copy elsewhere with the same bytes is the same call.
    assert planned(probe, type(params).from_buffer_copy(params), LAUNCH)[2] == plans


@pytest.mark.parametrize(
    "change", [{"softmax_scale": 0.5}, {"is_causal": 1}, {"num_splits": 2}, {"softcap": 2.0}]
)
def test_other_parameters_are_planned_again(
    probe: ctypes.CDLL, change: dict[str, float | int]
) -> None:
    _, _, plans = planned(probe, fwd_params(seqlen_k=512), SIZE)
    assert planned(probe, fwd_params(seqlen_k=512, **change), LAUNCH)[2] == plans + 1


def test_pointers_that_come_later_are_checked(probe: ctypes.CDLL) -> None:
    without = fwd_params(q=tensor((2, 128, 4, 64), data=None))
    status, _, plans = planned(probe, without, SIZE)
    assert status == abi.OK
    status, message, _ = planned(probe, without, LAUNCH)
    assert (status, "q has a null data pointer" in message) == (abi.INVALID_VALUE, True)
    # A call that failed is not remembered.
    assert planned(probe, without, SIZE)[::2] == (abi.OK, plans + 1)


def test_wrong_calls_are_refused_every_time(probe: ctypes.CDLL) -> None:
    wrong = fwd_params(num_splits=129)
    for _ in range(2):
        assert planned(probe, wrong, LAUNCH)[0] == abi.INVALID_VALUE


def test_threads_plan_for_themselves(probe: ctypes.CDLL) -> None:
    params = fwd_params(seqlen_k=1000)
    _, size, plans = planned(probe, params, SIZE)
    found: list[tuple[int, str, int]] = []
    thread = threading.Thread(target=lambda: found.append(planned(probe, params, LAUNCH)))
    thread.start()
    thread.join()
    assert found == [(abi.OK, size, plans + 1)]
    assert planned(probe, params, LAUNCH)[2] == plans + 1


def test_a_remembered_plan_is_cheap(probe: ctypes.CDLL) -> None:
    """The bound only catches accidents: it has to hold on any machine, with little optimisation."""
    measure = probe.probe_planned_nanoseconds
    measure.restype = ctypes.c_double
    params = bwd_params(batch=2, seqlen_q=2048, seqlen_k=2048)
    best = min(measure(ctypes.byref(params), ctypes.c_void_p(WORKSPACE), 1000) for _ in range(5))
    assert best < 2000
