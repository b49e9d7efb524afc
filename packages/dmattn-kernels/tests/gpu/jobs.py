"""Child processes with logs and time limits, a few at a time."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

# Tests wait for the GPU most of the time, and for compilers.
MOST_PER_CORE = 2


@dataclasses.dataclass
class Job:
    """One command. `again(job)` may return a job to run in its place once it has ended."""

    name: str
    command: list[str]
    log: Path
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    limit: float = 300.0  # seconds
    again: Callable[[Job], Job | None] = lambda job: None
    returncode: int | None = None
    timed_out: bool = False
    seconds: float = 0.0

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def visible_gpus() -> list[str]:
    """The GPUs that a process started now would see, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:  # there is no such program
        return []
    found = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(i) for i in range(len(found))]


def workers_of_each(asked: int, shares: list[int], usual: int, cores: int) -> list[int]:
    """How many pytest processes each target gets; `shares`: for each process of another target.

    `asked` is for a target with a share of 1; 0: about as many as make `usual` for all targets.

    Raises:
        ValueError: so many were asked for that they would hold one another up.
    """
    each = asked or max(2, usual // len(shares))
    counts = [each * share for share in shares]
    most = max(1, max(MOST_PER_CORE * cores, usual) // sum(shares))
    if asked > most:
        raise ValueError(
            f"--workers: got {asked} for each of {len(shares)} targets, {sum(counts)} processes on "
            f"{cores} cores; wanted at most {most}"
        )
    return counts


def stop_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set from now on, instead of ending this process alone.

    Its jobs have sessions of their own, and would go on without it.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


class Pool:
    """Starts jobs in the order given, at most `width` at once, and ends those that take too long.

    When the time is up for all, those that are running are killed before any is waited for, since
    a process with a GPU may take a second to go. Those that have not begun count as timed out.

    With several GPUs the jobs get different ones as their first GPU, which is the one that tests
    use: many processes that share one GPU spend much of its time on switching between them.
    """

    def __init__(self, width: int, deadline: float, stop: threading.Event | None = None) -> None:
        self._width, self._deadline = width, deadline
        self._stop = stop or threading.Event()  # when it is set, the time is up, too
        self._gpus, self._turns = visible_gpus(), itertools.count()

    def run(self, jobs: list[Job]) -> list[Job]:
        waiting, ended = list(jobs), list[Job]()
        running: list[tuple[Job, subprocess.Popen[bytes], float]] = []
        while waiting or running:
            if self._is_over():
                for job in waiting:
                    job.timed_out = True
                ended += waiting
                waiting.clear()
            while waiting and len(running) < self._width:
                job = waiting.pop(0)
                running.append((job, self._start(job), time.monotonic()))
            time.sleep(0.1)
            is_over = self._is_over()
            for job, process, start in running:
                job.seconds = time.monotonic() - start
                if process.poll() is None and (job.seconds >= job.limit or is_over):
                    job.timed_out = True
                    os.killpg(process.pid, signal.SIGKILL)  # its own session: with its children
            still = []
            for job, process, start in running:
                job.returncode = process.wait() if job.timed_out else process.poll()
                if job.returncode is None:
                    still.append((job, process, start))
                    continue
                ended.append(job)
                follower = None if self._is_over() else job.again(job)
                if follower is not None:
                    waiting.insert(0, follower)
            running = still
        return ended

    def _is_over(self) -> bool:
        return self._stop.is_set() or time.monotonic() >= self._deadline

    def _next_gpus(self) -> dict[str, str]:
        if len(self._gpus) < 2:
            return {}
        first = next(self._turns) % len(self._gpus)
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus[first:] + self._gpus[:first])}

    def _start(self, job: Job) -> subprocess.Popen[bytes]:
        with job.log.open("ab") as stream:
            return subprocess.Popen(
                job.command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._next_gpus(), **job.env},
                start_new_session=True,
            )
