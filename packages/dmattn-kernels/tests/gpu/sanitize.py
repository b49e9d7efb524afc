"""Jobs of compute-sanitizer on our kernels, and on planted faults that its tools must find."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from pathlib import Path

from gpu.device import FAMILY_VARIABLE
from gpu.jobs import Job
from toolkit import find_tool

HERE = Path(__file__).parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# For each tool, among how many processes its launches are shared out; racecheck is the slow one.
SHARDS = {"memcheck": 1, "racecheck": 5, "initcheck": 1, "synccheck": 1}
FOUND = 66  # the sanitizer's exit code for errors, which differs from those of the program itself
# The tools that watch a family's own kernels, and parts of the names of the launches that reach
# them. Hopper has kernels of its own for dense attention and for lists of keys; all else runs the
# sm80 code. Hopper's kernels hand shared memory over by mbarriers, which racecheck does not know
# and reports as races, and write it by TMA, which initcheck does not see.
OWN_TOOLS = {"sm90": ("memcheck", "synccheck")}
OWN_LAUNCHES = {"sm90": "dense rows,listed rows,wide heads"}
# As SHARDS, for each tool: many of these launches have more row blocks than thread blocks.
OWN_SHARDS = {"sm90": 2}
# Parts of the names of launches with wrong numbers (sanitizer_garbage.py) that reach a family's own
# kernels: those over the caller's lists, and over packed sequences.
OWN_GARBAGE = {"sm90": "top-w,listed rows,window,dense rows"}
OPTIONS = {
    # Padding between allocations, so that small overruns do not land in a neighbour.
    "memcheck": ["--padding", "4096"],
    "racecheck": ["--racecheck-report", "all"],
    "initcheck": [],
    "synccheck": [],
}
# The references are matrix products. With a thread for every core in each of many processes, the
# threads would mostly wait for one another.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def kernel_jobs(folder: Path, families: list[str], limit: float) -> list[Job]:
    """A job for each tool, family and shard, and one for each family with wrong numbers.

    Buffers are poisoned, except for initcheck, which watches for reads of what was not written.
    Launches with wrong numbers are watched by memcheck.
    """
    sanitizer = find_tool("compute-sanitizer")
    if sanitizer is None:
        return []

    def job(name: str, tool: str, family: str, program: list[str]) -> Job:
        command = [
            sanitizer,
            "--tool",
            tool,
            "--error-exitcode",
            str(FOUND),
            *OPTIONS[tool],
            sys.executable,
            *program,
        ]
        log = folder / f"{name.replace(' ', '-').replace('/', '-of-')}.log"
        return Job(name, command, log, {FAMILY_VARIABLE: family, **ONE_THREAD}, limit)

    jobs = []
    # The longest first: those of families with launches of their own, then racecheck.
    for tool, family in sorted(
        itertools.product(TOOLS, families),
        key=lambda pair: (pair[1] not in OWN_SHARDS, -SHARDS[pair[0]]),
    ):
        if tool not in OWN_TOOLS.get(family, TOOLS):
            continue
        shards = OWN_SHARDS.get(family, SHARDS[tool])
        for shard in range(shards):
            program = [str(HERE / "sanitizer_cases.py"), "--shard", f"{shard}/{shards}"]
            program += ["--only", OWN_LAUNCHES.get(family, "")]
            if tool != "initcheck":
                program.append("--poison")
            jobs.append(job(f"{tool} {family} {shard + 1}/{shards}", tool, family, program))
    # Launches with wrong numbers may read memory that was not written, but none that is not theirs.
    for family in families:
        program = [str(HERE / "sanitizer_garbage.py"), "--only", OWN_GARBAGE.get(family, "")]
        jobs.append(job(f"memcheck {family} garbage", "memcheck", family, program))
    return jobs


def planted_jobs(folder: Path, limit: float) -> list[Job]:
    """Compile the planted faults; two jobs for each tool, with its own fault and without any."""
    sanitizer, nvcc = find_tool("compute-sanitizer"), find_tool("nvcc")
    if sanitizer is None or nvcc is None:
        return []
    program = folder / "planted_faults"
    source = str(HERE / "planted_faults.cu")
    subprocess.run([nvcc, "-arch=native", "-lineinfo", "-o", str(program), source], check=True)
    jobs = []
    for tool in TOOLS:
        for fault in (tool, "none"):
            name = f"{tool} planted {fault}"
            command = [
                sanitizer,
                "--tool",
                tool,
                "--error-exitcode",
                str(FOUND),
                str(program),
                fault,
            ]
            jobs.append(Job(name, command, folder / f"{name.replace(' ', '-')}.log", {}, limit))
    return jobs


@dataclasses.dataclass(frozen=True)
class Finding:
    """The verdict on one job. `ok`: it found no errors, or found the fault that was planted."""

    name: str
    ok: bool
    errors: int | None
    launches: int | None
    seconds: float
    words: str


_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed)")


def judge(job: Job) -> Finding:
    output = job.output
    counts = [int(a or b) for a, b in _SUMMARY.findall(output)]
    errors = sum(counts) if counts else None
    finished = re.search(r"finished (\d+) launches, (\d+) wrong", output)
    launches = int(finished[1]) if finished else None
    planted = " planted " in job.name
    if job.timed_out:
        ok, words = False, "ran past its time limit"
    elif planted and not job.name.endswith("none"):
        ok = job.returncode == FOUND and bool(errors)
        words = "found the planted fault" if ok else "missed the planted fault"
    elif planted:
        ok = job.returncode == 0 and errors == 0
        words = "clean without a fault" if ok else "complained about a program without a fault"
    else:
        ok = job.returncode == 0 and errors == 0 and finished is not None and finished[2] == "0"
        words = "no errors" if ok else _first_complaint(output, job.returncode)
    return Finding(job.name, ok, errors, launches, round(job.seconds, 1), words)


# The driver's message, and what compute-sanitizer returns if the system has killed its program.
_NO_MEMORY, _KILLED = re.compile(r"out of memory|CUDA error 2\b", re.IGNORECASE), (9, -9)


def lacked_memory(job: Job) -> bool:
    """Whether a job failed because others had taken the memory of the GPU or of the machine."""
    if job.timed_out or judge(job).ok:
        return False
    return job.returncode in _KILLED or _NO_MEMORY.search(job.output) is not None


def once_more(jobs: list[Job]) -> list[Job]:
    """The same jobs, to be run once more with new logs."""
    return [
        Job(job.name, job.command, job.log.with_suffix(".again.log"), job.env, job.limit)
        for job in jobs
    ]


def _first_complaint(output: str, returncode: int | None) -> str:
    kinds = "Invalid|Error|Warning|Uninitialized|Barrier|Program hit|Race"
    pattern = rf"={{9}} ((?:{kinds}).*)|^(.*(?:error|Error):.*)$"
    lines = [next(filter(None, found)) for found in re.findall(pattern, output, re.MULTILINE)]
    wrong = [
        line
        for line in output.splitlines()
        if re.search(r": (out|lse|d\w+): error|: differs|: list \d+: ", line)
    ]
    return f"exit code {returncode}: " + ("; ".join((lines + wrong)[:3]) or output[-300:].strip())
