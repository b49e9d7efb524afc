"""Times dmattn and PyTorch's own attention backends on this machine's GPU, in one run.

    python benchmarks/run.py [--quick] [--cases WORD ...] [--skip WORD ...] [--json OUT]
        [--append] [--gpus N] [--compile-ahead N] [--markdown OUT] [--plots DIR]

`--cases "running top-w"` times the selection of keys and what comes with it, `--skip "running
top-w"` all the rest. Without --json the results go to benchmarks/results/<gpu>.json; with --append
the groups that are timed replace those in that file, and its other groups stay. `render.py` makes
the table and the plots from such a file later, on any machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import faulthandler
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import dmattn
from benchmarks import parts, render
from benchmarks.cases import CASES, SWEEPS, Case
from benchmarks.compare import Version
from benchmarks.peers import CONTENDERS, Data, calls, make_data, sdpa_here
from benchmarks.timing import Call, Clock, graphed, host_race, peak_bytes_beside

Row = dict[str, Any]

STUCK_S = 90  # a case that takes so long prints where it is


def time_case(case: Case, clock: Clock, device: torch.device, budget_s: float) -> list[Row]:
    """One row per contender and phase; for one that cannot run the case it says why."""
    if case.budget_s is not None:
        budget_s = min(budget_s, case.budget_s)
    data = make_data(case, device)
    phases: dict[str, dict[str, Call]] = {"forward": {}, "backward": {}}
    rows: list[Row] = []
    for name in case.contenders:
        try:
            for phase, call in calls(name, data).items():
                call()
                phases[phase][name] = graphed(call) if case.graphed else call
            torch.cuda.synchronize()
        except (RuntimeError, ValueError, TypeError) as error:
            for group in phases.values():
                group.pop(name, None)
            words = str(error).strip().splitlines()
            rows.append(
                _row(case, name, "forward") | {"error": (words or [type(error).__name__])[0][:200]}
            )
    torch.cuda.empty_cache()  # after contenders that ran out of memory
    for phase, contenders in phases.items():
        if not contenders:
            continue
        for name, timing in clock.race(contenders, budget_s / 2, fewest=3, most=60).items():
            flops = case.flops * (2.5 if phase == "backward" else 1.0)
            rows.append(
                _row(case, name, phase)
                | {"ms": timing.median, "low_ms": timing.low, "high_ms": timing.high}
                | {"count": timing.count, "tflops": flops / timing.median / 1e9}
            )
    if case.memory:
        rows += forward_memory(case, data)
    return rows


def forward_memory(case: Case, data: Data) -> list[Row]:
    """Memory of a forward beside inputs and output, over the size of k + v; one row a contender."""
    rows = []
    for name in case.contenders:
        beside = peak_bytes_beside(functools.partial(_forward, CONTENDERS[name][1], data))
        size = sum(x.numel() * x.element_size() for x in (data.k, data.v))
        ratio = {"ratio": beside / size, "bytes": beside, "over": "k + v"}
        rows.append(_row(case, name, "forward") | ratio)
    return rows


def _row(case: Case, name: str, phase: str) -> Row:
    label = CONTENDERS[name][0]
    return {
        "group": case.group,
        "case": case.name,
        "contender": name,
        "label": label,
        "phase": phase,
    }


OTHER_CALLS = 4  # requests for a few calls each


def time_beside(case: Case, version: Version) -> list[Row]:
    """dmattn's contenders of a case, in a process that runs kernels of another architecture."""
    try:
        known = version.ask(do="load", case=CASES.index(case))
    except RuntimeError as error:
        print(f"{case.group}: {case.name}: {version.label}: {error}", flush=True)
        return []
    rows = []
    for what in known:
        name, phase = what.split(" ")
        times = [x for _ in range(OTHER_CALLS) for x in version.ask(do="time", what=what)]
        row = _row(case, name, phase) | {"ms": statistics.median(times), "count": len(times)}
        row |= {"low_ms": min(times), "high_ms": max(times)}
        flops = case.flops * (2.5 if phase == "backward" else 1.0)
        row |= {"tflops": flops / row["ms"] / 1e9, "contender": f"{name}@{version.label}"}
        rows.append(row | {"label": f"{row['label']}, {version.label} code"})
    version.ask(do="unload")
    return rows


def host_time(device: torch.device) -> list[Row]:
    """Host microseconds of small eager calls: forward, forward and backward, forward with a window.

    Contenders take turns. The forward with a window is compared with SDPA's without one.
    """
    small = Case("host time", "B1 S64 H4 D64", (), 1, 64, 64, 4, 4, 64)
    top = Case("host time", "B1 S256 H4 D64 w64", (), 1, 256, 256, 4, 4, 64, causal=True, kept=64)
    top = dataclasses.replace(top, bias="key", running=True)
    rows = []
    for case, names in ((small, ("dmattn", "sdpa_flash")), (top, ("dmattn_window", "sdpa_flash"))):
        data = make_data(case, device)
        computes = {n: sdpa_here if n == "sdpa_flash" else CONTENDERS[n][1] for n in names}
        calls: dict[str, Call] = {n: functools.partial(f, data) for n, f in computes.items()}
        both = {}
        # The backend is chosen once: in each call the choice would count as SDPA's own time.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            with torch.no_grad():
                forward = host_race(calls)
            if case is small:
                wanted = data.wanted()
                calls = {n: functools.partial(_step, f, data, wanted) for n, f in computes.items()}
                both = host_race(calls, rounds=15)
        for name in names:
            rows.append(_row(case, name, "forward") | {"us": forward[name]})
            if both:
                rows.append(_row(case, name, "forward + backward") | {"us": both[name]})
    return rows


def peak_memory(device: torch.device) -> list[Row]:
    """Memory of a step beside inputs, outputs and gradients, over the size of q + k + v."""
    rows = []
    for words, contender, nheads_k, kept in (
        ("H16/4 D128, key bias", "dmattn", 4, None),
        ("H16/1 D128, key bias", "dmattn", 1, None),
        ("H16/4 D128 w1024", "dmattn_window", 4, 1024),
    ):
        shape = Case(
            *("peak memory", f"B1 S16384 {words}", ()),
            nheads_k=nheads_k,
            bias="key",
            causal=True,
            kept=kept,
            running=kept is not None,
        )
        contenders = [contender] if kept else [contender, "sdpa_flash"]
        rows += [_step_memory(shape, name, device) for name in contenders]
    return rows


def _step_memory(shape: Case, name: str, device: torch.device) -> Row:
    data = make_data(shape, device)
    wanted = [data.q, data.k, data.v]
    if name != "sdpa_flash" and data.bias is not None:
        wanted.append(data.bias)
    beside = peak_bytes_beside(functools.partial(_step, CONTENDERS[name][1], data, wanted))
    qkv = sum(x.numel() * x.element_size() for x in (data.q, data.k, data.v))
    ratio = {"ratio": beside / qkv, "bytes": beside, "over": "q + k + v"}
    return _row(shape, name, "forward + backward") | ratio


def _forward(compute: Callable[[Data], torch.Tensor], data: Data) -> tuple[torch.Tensor, ...]:
    return (compute(data),)


def _step(
    compute: Callable[[Data], torch.Tensor], data: Data, wanted: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    out = compute(data)
    return (out, *torch.autograd.grad(out, wanted, data.dout))


def ceilings(clock: Clock, device: torch.device) -> Row:
    """What this particular chip reaches: copy bandwidth and bf16 matrix product."""
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    found = clock.race({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}, 1.0, 5, 20)
    return {
        "copy_tb_s": 2 * source.numel() / found["copy"].median / 1e9,
        "matmul_tflops": 2 * 8192**3 / found["matmul"].median / 1e9,
    }


def environment() -> Row:
    import dmattn_kernels

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "dmattn": dmattn.__version__,
        "architectures": dmattn_kernels.architectures(),
        "family": dmattn_kernels.device_architecture(0),
        "dtype": "bfloat16",
    }


def main() -> int:
    arguments = parse()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to time", file=sys.stderr)
        return 1
    chosen, place = choose(arguments), place_of(arguments)
    if arguments.compile_ahead:
        parts.compile_ahead(chosen, arguments.compile_ahead)
    earlier = json.loads(place.read_text()) if arguments.append and place.is_file() else None
    if arguments.gpus == 1:
        results = time_all(chosen, not arguments.cases, arguments, place, earlier)
    else:
        parts.on_gpus(parts.spread(chosen, arguments.gpus), time_part, arguments, place)
        found = [part_of(place, index) for index in range(arguments.gpus)]
        results = parts.join([json.loads(part.read_text()) for part in found])
        for part in found:
            part.unlink()
    show(write(results, earlier, place), arguments)
    print(f"results: {place}")
    print(render.targets_text(results))
    return 0


def time_part(index: int, cases: list[int], arguments: argparse.Namespace, place: Path) -> None:
    """In a process with a GPU of its own: time these of CASES."""
    parts.use_gpu(index)
    chosen = [CASES[i] for i in cases]
    time_all(chosen, index == 0 and not arguments.cases, arguments, part_of(place, index), None)


def part_of(place: Path, index: int) -> Path:
    return place.with_suffix(f".part{index}.json")


def time_all(
    chosen: list[Case],
    others: bool,
    arguments: argparse.Namespace,
    place: Path,
    earlier: Row | None,
) -> Row:
    """Time the cases, and host time and memory if `others`; write what there is after each."""
    start, device = time.monotonic(), torch.device("cuda")
    clock = Clock(device)
    results: Row = {**environment(), "ceilings": ceilings(clock, device), "rows": [], "not_run": []}
    if others:
        results["rows"] += host_time(device) + peak_memory(device)
    beside = None
    if arguments.beside is not None:
        beside = Version(label=arguments.beside, DMATTN_ARCH=arguments.beside)
    for done, case in enumerate(chosen, start=1):
        left = arguments.time_limit - (time.monotonic() - start)
        if left < 5:
            results["not_run"].append(name_of(case))
            continue
        faulthandler.dump_traceback_later(STUCK_S)
        rows = time_case(case, clock, device, arguments.budget)
        if beside is not None and case.group not in SWEEPS:
            gc.collect()
            torch.cuda.empty_cache()
            rows += time_beside(case, beside)
        faulthandler.cancel_dump_traceback_later()
        results["rows"] += rows
        gc.collect()
        torch.cuda.empty_cache()
        results["seconds"] = round(time.monotonic() - start)
        print(
            f"{render.lines_of(rows)}\n{done} of {len(chosen)}, {results['seconds']} s", flush=True
        )
        # If this process is ended later, no case that has been timed is lost.
        rest = [name_of(other) for other in chosen[done:]]
        write(results | {"not_run": results["not_run"] + rest}, earlier, place)
    if beside is not None:
        beside.close()
    results["seconds"] = round(time.monotonic() - start)
    write(results, earlier, place)
    return results


def name_of(case: Case) -> str:
    return f"{case.group}: {case.name}"


def choose(arguments: argparse.Namespace) -> list[Case]:
    def named(case: Case, words: list[str]) -> bool:
        return any(word in name_of(case) for word in words)

    chosen = [case for case in CASES if case.quick or not arguments.quick]
    if arguments.cases:
        chosen = [case for case in chosen if named(case, arguments.cases)]
    chosen = [case for case in chosen if not named(case, arguments.skip)]
    if not chosen:
        raise SystemExit("--cases, --skip: they leave no case, so nothing was timed or written")
    return chosen


def place_of(arguments: argparse.Namespace) -> Path:
    name = torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "-")
    return arguments.json or Path(__file__).parent / "results" / f"{name}.json"


def write(results: Row, earlier: Row | None, place: Path) -> Row:
    """Write the file, and return what it then has: `results`, and the other groups of `earlier`."""
    known = results if earlier is None else append(earlier, results)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(known, indent=1) + "\n")
    return known


def show(results: Row, arguments: argparse.Namespace) -> None:
    if arguments.markdown is not None:
        render.write_markdown(results, arguments.markdown, arguments.plots)
    if arguments.plots is not None:
        render.write_plots(results, arguments.plots)


def append(earlier: Row, results: Row) -> Row:
    """`earlier`, in which the groups of `results` replace its own.

    Contenders are only ever compared within a group. The page names the groups of further runs, or
    marks their cases (written as "group: case") where a run has a note.
    """
    groups = {row["group"] for row in results["rows"]}
    kept = [row for row in earlier["rows"] if row["group"] not in groups]
    missing = [x for x in earlier["not_run"] if x.partition(":")[0] not in groups]
    # If a group was not timed at all, the rows of the earlier run stay.
    missing += [x for x in results["not_run"] if x.partition(":")[0] in groups]
    further = []
    for run in earlier.get("further_runs", []):
        names = [x for x in run["groups"] if x.partition(":")[0] not in groups]
        further += [run | {"groups": names}] if names else []
    run = {name: results[name] for name in ("date", "family")}
    return earlier | {
        "rows": kept + results["rows"],
        "not_run": missing,
        "further_runs": [*further, {**run, "groups": sorted(groups)}],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", help="only cases whose 'group: name' contains one of these"
    )
    parser.add_argument(
        "--skip", nargs="+", default=[], help="no case whose 'group: name' contains one of these"
    )
    parser.add_argument("--quick", action="store_true", help="the few cases that say the most")
    parser.add_argument("--budget", type=float, default=1.2, help="seconds of timing for one case")
    parser.add_argument(
        "--time-limit", type=float, default=240.0, help="no further case after so many seconds"
    )
    parser.add_argument(
        "--beside",
        metavar="ARCHITECTURE",
        help="also time the kernels of this one, such as sm80, in a process of its own",
    )
    parser.add_argument(
        "--compile-ahead",
        type=int,
        default=0,
        metavar="PROCESSES",
        help="first compile FlexAttention's kernels in so many processes",
    )
    parser.add_argument(
        "--gpus", type=int, default=1, help="spread groups of cases over so many GPUs of one kind"
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument(
        "--append", action="store_true", help="keep the results there for groups not timed now"
    )
    parser.add_argument("--markdown", type=Path, help="also write the table as Markdown")
    parser.add_argument(
        "--plots", type=Path, help="also write plots into this folder (needs matplotlib)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
