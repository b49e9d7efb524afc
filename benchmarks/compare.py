"""Times two versions of dmattn on this machine's GPU in alternation, case by case.

    python benchmarks/compare.py BEFORE AFTER [--cases WORD ...] [--skip WORD ...] [--rounds N]
        [--json OUT]

BEFORE and AFTER are what to put on PYTHONPATH for each version, with ":" between folders: the one
that holds `dmattn` and the one that holds `dmattn_kernels`. Each version runs in a process of its
own. For every case the two take turns, a few calls at a time, so that heat, clocks and neighbours
are the same for both. Printed are the medians and their ratio, after over before; the exit status
is 1 when some case takes more than 1.02 times as long.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.cases import CASES, Case

CALLS = 3  # calls that a version makes before the other one has its turn
LIMIT = 1.02
SMALL_MS = 0.05  # below this a single step of the clock is a few percent of the time
SERVE = "--serve"  # what the process of one version is started with

Row = dict[str, Any]


def contenders(case: Case) -> list[str]:
    """The contenders of a case that run dmattn."""
    return [name for name in case.contenders if name.startswith("dmattn")]


# ------------------------------------------------------------------------- one version


def serve() -> None:
    """Answers requests, a line of JSON each, until its input ends."""
    from benchmarks.peers import CONTENDERS, calls, make_data
    from benchmarks.timing import Clock, graphed, host_microseconds

    device = torch.device("cuda")
    clock = Clock(device)
    ready: dict[str, Any] = {}
    data: Any = None
    call: Any = None
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = None
        try:
            if request["do"] == "load":
                ready.clear()
                torch.cuda.empty_cache()
                case = CASES[request["case"]]
                data = make_data(case, device)
                for name in contenders(case):
                    for phase, call in calls(name, data).items():
                        call()
                        ready[f"{name} {phase}"] = graphed(call) if case.graphed else call
                        ready[f"{name} {phase}"]()
                torch.cuda.synchronize()
                answer = sorted(ready)
            elif request["do"] == "unload":
                ready.clear()
                data = call = None
                torch.cuda.empty_cache()
            elif request["do"] == "time":
                answer = [clock.once(ready[request["what"]]) for _ in range(CALLS)]
            elif request["do"] == "host":
                small = Case("host time", "small", (), 1, 64, 64, 4, 4, 64, backward=False)
                data = make_data(small, device)
                with torch.no_grad():
                    call = functools.partial(CONTENDERS["dmattn"][1], data)
                    answer = [host_microseconds(call, rounds=5) for _ in range(CALLS)]
        except Exception as error:  # reported to the process that compares
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Version:
    """A process that runs one version."""

    def __init__(self, path: str | None = None, label: str = "", **variables: str) -> None:
        """`path`: for PYTHONPATH; None: as it is. `variables`: more environment variables."""
        self.label = label
        environment = os.environ | variables
        if path is not None:
            environment |= {"PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, __file__, SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if isinstance(answer, dict):
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# ------------------------------------------------------------------------- both of them


def compare(versions: list[Version], index: int, rounds: int) -> list[Row]:
    """One row for each contender and phase of a case."""
    case = CASES[index]
    known = [version.ask(do="load", case=index) for version in versions]
    rows = []
    for what in (name for name in known[0] if name in known[1]):
        times: list[list[float]] = [[], []]
        for done in range(rounds):
            turns = (0, 1) if done % 2 == 0 else (1, 0)
            for turn in turns:
                times[turn] += versions[turn].ask(do="time", what=what)
        before, after = (statistics.median(found) for found in times)
        rows.append(
            {"group": case.group, "case": case.name, "what": what}
            | {"before_ms": before, "after_ms": after, "ratio": after / before}
        )
    return rows


def host_row(versions: list[Version], rounds: int) -> Row:
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for samples, version in zip(times, versions, strict=True):
            samples.extend(version.ask(do="host"))
    before, after = (statistics.median(samples) / 1000 for samples in times)
    row = {"group": "host time", "case": "small forward", "what": "dmattn forward"}
    return row | {"before_ms": before, "after_ms": after, "ratio": after / before}


def text(row: Row) -> str:
    slow = row["ratio"] > LIMIT and row["before_ms"] > SMALL_MS
    mark = " <--" if slow else "    "
    return (
        f"{row['before_ms']:10.4f} {row['after_ms']:10.4f} {row['ratio']:7.3f}{mark}"
        f" {row['group']}: {row['case']}: {row['what']}"
    )


def main() -> int:
    if sys.argv[1:] == [SERVE]:
        serve()
        return 0
    arguments = parse()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to time", file=sys.stderr)
        return 1
    versions = [Version(arguments.before), Version(arguments.after)]
    rows: list[Row] = []
    for index, case in enumerate(CASES):
        words = f"{case.group}: {case.name}"
        if arguments.cases and not any(word in words for word in arguments.cases):
            continue
        if any(word in words for word in arguments.skip) or not contenders(case):
            continue
        try:
            found = compare(versions, index, arguments.rounds)
        except RuntimeError as error:
            print(f"{words}: {error}", flush=True)
            continue
        rows += found
        print("\n".join(map(text, found)), flush=True)
    rows.append(host_row(versions, arguments.rounds))
    print(text(rows[-1]))
    for version in versions:
        version.close()
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    slower = [row for row in rows if row["ratio"] > LIMIT and row["before_ms"] > SMALL_MS]
    print(f"\n{len(rows)} timings, {len(slower)} more than {LIMIT} times as long:")
    for row in sorted(slower, key=lambda row: -row["ratio"]):
        print(text(row))
    return 1 if slower else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", help="PYTHONPATH of the earlier version")
    parser.add_argument("after", help="PYTHONPATH of the later version")
    parser.add_argument("--cases", nargs="+", help="only cases that contain one of these words")
    parser.add_argument("--skip", nargs="+", default=[], help="no case that contains one of these")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each version")
    parser.add_argument("--json", type=Path, help="where the rows go")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
