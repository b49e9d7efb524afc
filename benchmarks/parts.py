"""What makes a whole benchmark shorter: kernels compiled ahead, and groups spread over GPUs."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.cases import CASES, Case

Row = dict[str, Any]

# About how long a case takes beside one without FlexAttention, whose kernels have to be loaded.
FLEX_TIMES = 3.0


def uses_flex(name: str) -> bool:
    """Whether a contender is FlexAttention, whose kernels torch.compile makes."""
    return name.startswith("flex")


def use_gpu(index: int) -> None:
    """Let this process see one of the GPUs that it would see; called before CUDA is in use."""
    seen = [x for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x]
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[index] if seen else str(index)


def compile_ahead(cases: Sequence[Case], processes: int) -> None:
    """Call every FlexAttention of these cases once, several at a time.

    The kernels are then in the caches of torch and triton on disk. Nothing is timed meanwhile.
    """
    tasks = [
        (CASES.index(case), name) for case in cases for name in filter(uses_flex, case.contenders)
    ]
    if not tasks:
        return
    # In each of the processes, and in this one, which finds the kernels in the caches.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with multiprocessing.get_context("spawn").Pool(
        min(processes, len(tasks)), maxtasksperchild=1
    ) as pool:
        for number, words in enumerate(pool.imap_unordered(_compile, tasks, chunksize=1), start=1):
            print(f"compiled {number} of {len(tasks)}: {words}", flush=True)


def _compile(task: tuple[int, str]) -> str:
    import torch

    from benchmarks.peers import calls, make_data

    case, name = CASES[task[0]], task[1]
    words = f"{case.group}: {case.name}"
    try:
        for call in calls(name, make_data(case, torch.device("cuda"))).values():
            call()
        torch.cuda.synchronize()
    except (RuntimeError, ValueError, TypeError) as error:  # will be reported when it is timed
        return f"{words}: {type(error).__name__}"
    return words


def spread(cases: Sequence[Case], parts: int) -> list[list[Case]]:
    """The cases in parts that take about as long; those of a group stay together, in order."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    found: list[list[Case]] = [[] for _ in range(parts)]
    for group in sorted(groups.values(), key=_work, reverse=True):
        min(found, key=_work).extend(group)
    return [sorted(part, key=CASES.index) for part in found]


def _work(cases: Sequence[Case]) -> float:
    return sum(FLEX_TIMES if any(map(uses_flex, case.contenders)) else 1.0 for case in cases)


def on_gpus(parts: list[list[Case]], run: Callable[..., None], *rest: Any) -> None:
    """run(index, the indices of its cases in CASES, *rest) for each part, on a GPU of its own."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=run, args=(index, [CASES.index(x) for x in part], *rest))
        for index, part in enumerate(parts)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def join(parts: Sequence[Row]) -> Row:
    """The results of runs at the same time on GPUs of one machine, each of other groups."""
    order = {group: place for place, group in enumerate(dict.fromkeys(x.group for x in CASES))}
    rows = [row for part in parts for row in part["rows"]]
    rows.sort(key=lambda row: order.get(row["group"], -1))  # stable; those of no case come first
    return {
        **parts[0],
        "gpus": len(parts),
        "ceilings": {
            name: min(part["ceilings"][name] for part in parts) for name in parts[0]["ceilings"]
        },
        "rows": rows,
        "not_run": [name for part in parts for name in part["not_run"]],
        "seconds": max(part["seconds"] for part in parts),
    }
