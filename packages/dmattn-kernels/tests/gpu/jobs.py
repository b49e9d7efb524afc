"""Child processes with logs and time limits, a few at a time."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


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


class Pool:
    """Starts jobs in the order given, at most `width` at once, and ends those that take too long.

    With several GPUs the jobs get different ones as their first GPU, which is the one that tests
    use: many processes that share one GPU spend much of its time on switching between them.
    """

    def __init__(self, width: int, deadline: float) -> None:
        self._width, self._deadline = width, deadline
        self._gpus, self._turns = visible_gpus(), itertools.count()

    def run(self, jobs: list[Job]) -> list[Job]:
        waiting, ended = list(jobs), list[Job]()
        running: list[tuple[Job, subprocess.Popen[bytes], float]] = []
        while waiting or running:
            while waiting and len(running) < self._width:
                job = waiting.pop(0)
                running.append((job, self._start(job), time.monotonic()))
            time.sleep(0.1)
            still = []
            for job, process, start in running:
                if not self._ended(job, process, start):
                    still.append((job, process, start))
                    continue
                ended.append(job)
                follower = None if time.monotonic() > self._deadline else job.again(job)
                if follower is not None:
                    waiting.insert(0, follower)
            running = still
        return ended

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

    def _ended(self, job: Job, process: subprocess.Popen[bytes], start: float) -> bool:
        job.seconds = time.monotonic() - start
        job.returncode = process.poll()
        if job.returncode is not None:
            return True
        if job.seconds < job.limit and time.monotonic() < self._deadline:
            return False
        job.timed_out = True
        os.killpg(process.pid, signal.SIGKILL)  # the job's own session: itself and its children
        job.returncode = process.wait()
        return True
