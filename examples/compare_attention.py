"""Train the example's model with three attentions, and record what each costs and achieves.

    python examples/compare_attention.py                  # all of it: on a GPU
    python examples/compare_attention.py --small          # recall alone, for CPUs: minutes
    python examples/compare_attention.py --quick          # tiny, in seconds, to see that it runs
    python examples/compare_attention.py --render FILE    # pictures and tables from results

Full causal attention, a sliding window of w keys, and running top-w with the same w are trained
from the same initial weights on the same batches, with several seeds, on two things: the text that
train_bytes_lm.py uses, and multi-query associative recall (Arora et al., arXiv 2312.04927) with
questions far behind what they ask for. docs/quality.md says what came out.

With --jobs several runs share the GPU, each in a process of its own. The time of a training step is
measured before the runs, with nothing else on the device. Results are written each time a run ends.
"""

import argparse
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in train_bytes_lm.py

import torch
from tqdm import tqdm

from bytes_lm.command import run
from bytes_lm.device import choose_device, device_name
from quality.plan import FULL_SIZE, QUICK, SMALL, Setup, plan
from quality.runs import Run, time_steps, train

ROOT = Path(__file__).resolve().parents[1]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="small models on recall alone")
    size.add_argument("--quick", action="store_true", help="tiny models, a few steps")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind; default 3")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a process each")
    parser.add_argument(
        "--steps-scale", type=float, default=1.0, help="train so many times the usual steps"
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help="all unless given: " + ", ".join(map(repr, FULL_SIZE)),
    )
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="stop runs that are not done by then"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/compare_attention/results.json"),
        help="the results, in place of any that are there; default %(default)s",
    )
    parser.add_argument("--render", type=Path, metavar="FILE", help="train nothing, draw these")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where --render writes")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    arguments = parser.parse_args(argv)
    for name in ("seeds", "jobs"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: got {getattr(arguments, name)}, wanted at least 1")
    for name in ("steps_scale", "limit"):
        got = getattr(arguments, name)
        if got is not None and not 0 < got < float("inf"):
            option = name.replace("_", "-")
            parser.error(f"--{option}: got {got}, wanted a positive number")
    setups = setups_of(arguments)
    for task in arguments.tasks or ():
        if task not in setups:
            tasks = ", ".join(map(repr, setups))
            beside = " with --small" if arguments.small else ""
            parser.error(f"--tasks: got {task!r}{beside}, wanted some of {tasks}")
    for option, path in (("output", arguments.output), ("render", arguments.render)):
        if path is not None and path.is_dir():
            parser.error(f"--{option}: got the folder {path}, wanted a file")
    if arguments.render is not None and not arguments.render.is_file():
        parser.error(f"--render: got {arguments.render}, wanted a file of results")
    return arguments


def setups_of(arguments: argparse.Namespace) -> Mapping[str, Setup]:
    """The tasks of the size that was asked for."""
    return QUICK if arguments.quick else SMALL if arguments.small else FULL_SIZE


def chosen_runs(arguments: argparse.Namespace) -> list[Run]:
    setups = setups_of(arguments)
    if arguments.tasks is not None:
        setups = {task: setup for task, setup in setups.items() if task in arguments.tasks}
    return plan(setups, arguments.seeds, arguments.steps_scale)


def prepare_process() -> None:
    """Let a process compute on one core, as others run beside it, and let Ctrl-C end it at once."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def trained(
    runs: Sequence[Run], device: torch.device, deadline: float | None, jobs: int, progress: bool
) -> Iterator[dict[str, Any]]:
    """The results of the runs, as they end; errors are raised when all other runs have ended."""
    if jobs == 1:
        for run in runs:
            yield train(run, device.type, deadline, progress)
        return
    context = multiprocessing.get_context("spawn")  # CUDA cannot be forked
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare_process) as pool:
        futures = [pool.submit(train, run, device.type, deadline, False) for run in runs]
        errors = []
        for future in tqdm(as_completed(futures), "runs", len(runs), disable=not progress):
            error = future.exception()
            if isinstance(error, Exception):
                errors.append(error)
            else:
                yield future.result()
    if errors:
        raise ExceptionGroup("some runs failed", errors)


def make_parent(output: Path) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--output: got {output}, wanted a file in a folder: {error}") from error


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the results as a whole: a reader finds either the version before or the new one."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(results) + "\n")
    draft.replace(path)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, write the results, and return them; with --render, draw them."""
    start = time.time()
    arguments = parse_arguments(argv)
    if arguments.render is not None:
        from quality.report import render, tasks_of  # needs matplotlib

        recorded: dict[str, Any] = json.loads(arguments.render.read_text())
        if "runs" not in recorded or not tasks_of(recorded):
            raise SystemExit(f"--render: {arguments.render} has no task of which all runs ended")
        if not (arguments.docs / "quality.md").is_file():
            raise SystemExit(
                f"--docs: got {arguments.docs}, wanted a folder with the page quality.md"
            )
        render(recorded, arguments.docs)
        return recorded
    device = choose_device(arguments.device)
    deadline = None if arguments.limit is None else start + arguments.limit
    runs = chosen_runs(arguments)
    make_parent(arguments.output)
    progress = not arguments.no_progress

    timed = [run for run in runs if run.config.seed == 0]
    timings = [
        time_steps(run, device.type)
        for run in tqdm(timed, "timing", unit="run", disable=not progress)
    ]
    results: dict[str, Any] = {
        "device": device_name(device),
        "torch": torch.__version__,
        "seeds": arguments.seeds,
        "jobs": arguments.jobs,
        "setups": {run.task: asdict(run) for run in timed},
        "timings": timings,
        "runs": [],
    }
    write(arguments.output, results)
    for result in trained(runs, device, deadline, arguments.jobs, progress):
        results["runs"].append(result)
        write(arguments.output, results)
        print(summary(result))
    results["seconds"] = time.time() - start
    write(arguments.output, results)
    return results


def summary(result: dict[str, Any]) -> str:
    final = result["final"]
    recall = f", recall {final['recall']:.3f}" if "recall" in final else ""
    cut = "" if result["complete"] else f" (stopped at step {result['steps']})"
    return (
        f"{result['task']:20} {result['attention']:15} seed {result['seed']}: "
        f"{final['loss']:.3f} bits{recall}, {result['seconds']:.0f} s{cut}"
    )


if __name__ == "__main__":
    run(main)
