"""How time is taken: CUDA events, contenders interleaved, medians of many, a cold L2 cache."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]

_FLUSH_BYTES = 256 << 20  # several times the L2 cache of any chip we know
_HEAD_START_CYCLES = 2_000_000  # about 1 ms in which the host enqueues the call


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one call on the device."""

    median: float
    low: float  # 10th percentile
    high: float  # 90th percentile
    count: int


class Clock:
    """Times calls on the current device."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def once(self, call: Call) -> float:
        """Milliseconds of one call from a cold cache. The device is kept busy until the host has
        enqueued the whole call, so that the time of the device is measured; the time of the host is
        measured separately."""
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self._flush.zero_()
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def race(
        self, calls: dict[str, Call], budget_s: float, fewest: int, most: int
    ) -> dict[str, Timing]:
        """All calls in turn, round after round, so that clocks and heat are the same for each.

        Stops after `most` rounds, or once `budget_s` is spent and `fewest` rounds are done.
        """
        for call in calls.values():
            call()
            call()
        torch.cuda.synchronize()
        times: dict[str, list[float]] = {name: [] for name in calls}
        start = time.perf_counter()
        for done in range(most):
            if done >= fewest and time.perf_counter() - start > budget_s:
                break
            for name, call in calls.items():
                times[name].append(self.once(call))
        return {name: _summary(values) for name, values in times.items()}


def _summary(values: list[float]) -> Timing:
    ranked = sorted(values)
    tenth = len(ranked) // 10
    return Timing(statistics.median(ranked), ranked[tenth], ranked[-1 - tenth], len(ranked))


def graphed(call: Call) -> Call:
    """A replay of the call, captured in a CUDA graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def host_race(calls: dict[str, Call], rounds: int = 30, count: int = 100) -> dict[str, float]:
    """The host's microseconds for each of these calls, made once: medians over rounds.

    The calls take turns, as the host's speed changes from second to second. The device is at most
    `count` calls behind.
    """
    for call in calls.values():
        for _ in range(50):
            call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            found[name].append((time.perf_counter() - start) / count * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in found.items()}


def host_microseconds(call: Call, rounds: int = 30) -> float:
    """As `host_race`, for one call alone."""
    return host_race({"": call}, rounds)[""]


def peak_bytes_beside(step: Callable[[], tuple[torch.Tensor, ...]]) -> int:
    """Peak bytes that a step takes beside what was allocated before and what it returns."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = step()
    torch.cuda.synchronize()
    kept = sum(x.numel() * x.element_size() for x in results)
    return torch.cuda.max_memory_allocated() - before - kept
