"""Makes the page and the plots of docs/ from recorded results.

python benchmarks/render.py [benchmarks/results/h200.json] [--markdown docs/benchmarks.md] [--plots
docs/assets] [--readme README.md]

What transformers_models.py has recorded is taken from the file beside it, here
benchmarks/results/h200-models.json, if there is one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import models_table, summary  # noqa: E402
from benchmarks.cases import (  # noqa: E402
    CASES,
    NOTES,
    OVER_HEAD_DIM,
    OVER_LENGTH,
    OVER_WINDOW,
    SWEEPS,
    TOP,
)
from benchmarks.targets import (  # noqa: E402
    HOST_TIME_TARGET_US,
    PEAK_MEMORY_TARGETS,
    TARGETS,
    Target,
)

Row = dict[str, Any]
PHASES = ("forward", "backward")
OURS = ("#b5179e", "#f06bc8", "#7209b7", "#b388eb", "#f7b5e2", "#5a189a", "#d4a5ff", "#8d4b7e")
HATCH = "//////"  # of bars of dmattn with the kernels of another architecture
MARK = " †"  # of rows that are not of the main run
READING = (
    "* Shapes: B batch, S sequence length (Sq queries, Sk keys), H query heads (H16/4: 16 over 4 "
    "key/value heads), HK key/value heads, D head_dim, w keys that each query keeps.",
    "* TF: TFLOP/s of unmasked work, the backward counted as 2.5 times the forward.",
    "* Ratio: the time over that of the shape's first row in bold type. Above 1, dmattn is faster.",
    '* Bold type: dmattn. With "sm80 code" it runs the kernels for GPUs older than Hopper, on the '
    'same GPU. "No dbias": the bias gets no gradient there; "no bias": it is left out.',
)
COLORS = ("#4361ee", "#4cc9f0", "#8d99ae", "#2b9348", "#f4a261", "#7f5539", "#d62828")


def lines_of(rows: list[Row]) -> str:
    """A few short lines for the terminal while the run goes on."""

    def measured(row: Row) -> str:
        if "ms" in row:
            return f"{row['ms']:9.3f} ms {row['tflops']:7.1f} TF"
        return f"  {row['ratio']:.2f} x ({row['over']})" if "ratio" in row else row["error"][:80]

    return "\n".join(
        f"{row['group']}: {row['case']:34} {row['label']:44} {row['phase']:9}{measured(row)}"
        for row in rows
    )


# --- targets --------------------------------------------------------------------------------------


def _milliseconds(results: Row, group: str, case: str, contender: str, phase: str) -> float | None:
    for row in results["rows"]:
        found = (row["group"], row["case"], row["contender"], row["phase"])
        if found == (group, case, contender, phase) and "ms" in row:
            return float(row["ms"])
    return None


def judge(results: Row, target: Target) -> float | None:
    """The measured ratio (or milliseconds) of a target; None where it was not timed."""
    ours = _milliseconds(results, *target.case, target.contender, target.phase)
    if isinstance(target.against, float):
        return ours
    other = _milliseconds(results, *target.against, target.phase)
    return None if ours is None or other is None else ours / other


def targets(results: Row) -> list[tuple[str, str, float, float]]:
    """(what, phase, got, at most) for every target that was timed."""
    old = _old_cases(results)
    found = [
        (t.name + MARK * (t.case in old), t.phase, judge(results, t), t.wanted) for t in TARGETS
    ]
    for row in results["rows"]:
        if (row["contender"], row["group"], row["phase"]) == ("dmattn", "host time", "forward"):
            found.append(
                ("host time of a small call, us", "forward", row["us"], HOST_TIME_TARGET_US)
            )
        if row["contender"].startswith("dmattn") and "ratio" in row:
            mark = MARK * ((row["group"], row["case"]) in old)
            which = row["label"].removeprefix("dmattn").replace(", ", ": ", 1)
            words = f"peak memory over {row['over']}, {row['case']}{which}{mark}"
            found.append((words, row["phase"], row["ratio"], PEAK_MEMORY_TARGETS[row["over"]]))
    return [(what, phase, got, limit) for what, phase, got, limit in found if got is not None]


def targets_text(results: Row) -> str:
    rows = targets(results)
    wide = max((len(what) for what, *_ in rows), default=0) + 2
    lines = [f"{'target':{wide}}{'phase':20}{'got':>8}{'at most':>9}"]
    for what, phase, got, limit in rows:
        verdict = "" if got <= limit else "  MISSED"
        lines.append(f"{what:{wide}}{phase:20}{got:8.3f}{limit:9.3f}{verdict}")
    return "\n".join(lines)


# --- the page -------------------------------------------------------------------------------------


def markdown(results: Row, plots: str | None, models: Row | None = None) -> str:
    """The whole page.

    `plots` is the folder of the pictures, seen from the page, None for none; `models` what
    transformers_models.py has recorded.
    """
    parts = [
        *_introduction(results),
        "",
        "## Targets",
        "",
        "What the project set itself as a limit, and what it got.",
        "",
        "| what | phase | got | at most | |",
        "|---|---|---:|---:|---|",
    ]
    for what, phase, got, limit in targets(results):
        verdict = "met" if got <= limit else "**missed**"
        parts.append(f"| {what} | {phase} | {got:.3g} | {limit:.3g} | {verdict} |")
    groups = list(dict.fromkeys(case.group for case in CASES))
    for group in groups:
        rows = [row for row in results["rows"] if row["group"] == group and "ratio" not in row]
        if rows:
            parts += ["", f"## {group[0].upper()}{group[1:]}", ""]
            parts += [NOTES[group], ""] if group in NOTES else []
            picture = "" if group == OVER_WINDOW else plot_name(group)  # shares OVER_LENGTH's
            if picture and plots is not None and any("ms" in row for row in rows):
                parts += [f"![{group}]({plots}/{picture})", ""]
            parts += _table(rows, _old_cases(results))
    parts += ["", *_host_and_memory(results)]
    for run in results.get("further_runs", []):
        if "note" not in run:  # rows of runs with a note are marked in the tables
            which = f"on {run['date']}, with the kernels of the {run['family']} family"
            what = "; ".join(run["groups"])
            parts += ["", f"From a run of their own, {which}: {what}."]
    if results["not_run"]:
        parts += ["", "Left out for want of time: " + "; ".join(results["not_run"]) + "."]
    if models is not None:
        parts += ["", *models_table.section(models)]
    return "\n".join([*parts, ""])


def _introduction(results: Row) -> list[str]:
    """Where it was measured, and how to read it."""
    ceilings = results["ceilings"]
    where, which = f"one {results['gpu']}", "The same chip"
    if results.get("gpus", 1) > 1:
        where = f"{results['gpus']} {results['gpu']}s of one machine"
        which = "Each group of rows is from one of the chips, the slower of which"
    return [
        "# Performance",
        "",
        "<!-- Written by benchmarks/render.py from recorded results: change those instead. -->",
        "",
        f"Measured on {where} on {results['date']}: torch {results['torch']}, cuDNN "
        f"{results['cudnn']}, dmattn {results['dmattn']} (kernels of the {results['family']} "
        f"family), {results['dtype']}. Medians of CUDA-event timings from a cold L2 cache, "
        "contenders in turn in one run, whole jobs: whatever mask a contender needs is made inside "
        f"its timing, unless its name says otherwise. {which} "
        f"copies {ceilings['copy_tb_s']:.2f} TB/s and multiplies 8192 x 8192 bf16 matrices at "
        f"{ceilings['matmul_tflops']:.0f} TF.",
        "",
        *READING,
        *_old_cases_words(results),
        "",
        f"Reproduce: `{_command(results)}`.",
    ]


def _command(results: Row) -> str:
    """What makes such results on a machine like theirs."""
    others = (row["contender"].partition("@")[2] for row in results["rows"])
    beside = [f"--beside {name}" for name in dict.fromkeys(others) if name]
    gpus = results.get("gpus", 1)
    options = [*beside, *([f"--gpus {gpus}"] if gpus > 1 else [])]
    return " ".join(["./dev bench", *(["--", *options] if options else [])])


def _host_and_memory(results: Row) -> list[str]:
    old = _old_cases(results)
    lines = [
        "## Host time and memory",
        "",
        "| what | contender | measured |",
        "|---|---|---:|",
    ]
    for row in results["rows"]:
        if "us" in row:
            words = f"host time of one call, {row['case']}, {row['phase']}"
            lines.append(f"| {words} | {row['label']} | {row['us']:.1f} us |")
        if "ratio" in row:
            beside = "inputs, outputs and gradients" if "back" in row["phase"] else "inputs and out"
            mark = MARK * ((row["group"], row["case"]) in old)
            words = f"peak memory of {row['phase']} beside {beside}, {row['case']}{mark}"
            lines.append(f"| {words} | {row['label']} | {row['ratio']:.2f} x ({row['over']}) |")
    return lines


def _old_cases(results: Row) -> set[tuple[str, str]]:
    """(group, case) of the rows from further runs that have a note."""
    return {
        (group, case)
        for run in results.get("further_runs", [])
        if "note" in run
        for group, _, case in (name.partition(": ") for name in run["groups"])
    }


def _old_cases_words(results: Row) -> list[str]:
    runs = [run for run in results.get("further_runs", []) if "note" in run]
    return [f"*{MARK}: from a run of {run['date']}, {run['note']}." for run in runs]


def _table(rows: list[Row], old: set[tuple[str, str]]) -> list[str]:
    """One line per shape and contender, forward and backward side by side."""
    timed_backward = any(row["phase"] == "backward" for row in rows)
    head = "| shape | contender | forward ms | TF | ratio |" + (
        " backward ms | TF | ratio |" if timed_backward else ""
    )
    lines = [head, "|---|---|" + "---:|" * (head.count("|") - 3)]
    pairs = list(dict.fromkeys((row["case"], row["contender"]) for row in rows))
    pairs.sort(key=lambda pair: [row["case"] for row in rows].index(pair[0]))
    ours = {
        case: contender for case, contender in reversed(pairs) if contender.startswith("dmattn")
    }
    for case, contender in pairs:
        found = {
            row["phase"]: row
            for row in rows
            if (row["case"], row["contender"]) == (case, contender)
        }
        label = next(iter(found.values()))["label"]
        shape = case + MARK * ((rows[0]["group"], case) in old)
        cells = [shape, f"**{label}**" if contender.startswith("dmattn") else label]
        for phase in PHASES[: 2 if timed_backward else 1]:
            base = next(
                (
                    r["ms"]
                    for r in rows
                    if (r["case"], r["contender"], r["phase"]) == (case, ours.get(case), phase)
                    and "ms" in r
                ),
                None,
            )
            cells += _cells(found.get(phase), base, contender == ours.get(case))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cells(row: Row | None, base: float | None, is_base: bool) -> list[str]:
    if row is None:
        return ["", "", ""]
    if "ms" not in row:
        return ["cannot run", "", ""]
    ratio = "" if base is None or is_base else f"{row['ms'] / base:.2f}"
    return [f"{row['ms']:.3f}", f"{row['tflops']:.0f}" if row["tflops"] else "", ratio]


def write_markdown(results: Row, path: Path, plots: Path | None, models: Row | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = None if plots is None else Path(os.path.relpath(plots, path.parent)).as_posix()
    path.write_text(markdown(results, folder, models))


# --- plots ----------------------------------------------------------------------------------------


def plot_name(group: str) -> str:
    if group == OVER_HEAD_DIM:
        return "bench_head_dim_sweep.png"
    if group in (OVER_LENGTH, OVER_WINDOW):
        return "bench_topw_sweep.png"
    return "bench_" + "".join(c if c.isalnum() else "_" for c in group) + ".png"


def write_plots(results: Row, folder: Path) -> None:
    """One picture per group: bars for forward and backward, dmattn first; curves for sweeps."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    for group in dict.fromkeys(row["group"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["group"] == group and "ms" in row]
        if rows and group == OVER_HEAD_DIM:
            _plot_head_dims(rows, str(results["gpu"]), folder / plot_name(group))
        elif rows and group not in SWEEPS:
            _plot_group(rows, group, str(results["gpu"]), folder / plot_name(group))
    sweeps = [row for row in results["rows"] if row["group"] in (OVER_LENGTH, OVER_WINDOW)]
    if any("ms" in row for row in sweeps):
        _plot_sweeps(sweeps, str(results["gpu"]), folder / plot_name(OVER_LENGTH))


def _plot_sweeps(rows: list[Row], gpu: str, path: Path) -> None:
    """Time against S on the left and against w on the right, beside lines of linear growth."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4))
    for axis, group in zip(axes, (OVER_LENGTH, OVER_WINDOW), strict=True):
        _plot_curves(axis, [row for row in rows if row["group"] == group and "ms" in row])
    axes[0].set_xlabel("sequence length S, at w = 1024", fontsize=9)
    axes[1].set_xlabel("keys kept w, at S = 32768", fontsize=9)
    figure.suptitle(f"{TOP}, selection included, B1 H2/1 D64, {gpu}, bf16", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def _plot_head_dims(rows: list[Row], gpu: str, path: Path) -> None:
    """Time against D, forward on the left and backward on the right, a curve per contender."""
    import matplotlib.pyplot as plt

    extents = {case.name: case.head_dim for case in CASES if case.group == OVER_HEAD_DIM}
    colors = itertools.chain(OURS[:1], COLORS)
    color_of = dict(zip(dict.fromkeys(row["label"] for row in rows), colors, strict=False))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4))
    for axis, phase in zip(axes, PHASES, strict=True):
        for label, color in color_of.items():
            points = sorted(
                (extents[row["case"]], row["ms"])
                for row in rows
                if (row["label"], row["phase"]) == (label, phase)
            )
            style = "o-" if label.startswith("dmattn") else "s--"
            where, times = [x for x, _ in points], [ms for _, ms in points]
            axis.plot(where, times, style, color=color, ms=4, label=label)
        axis.set_title(phase, fontsize=10)
        axis.set_xticks(sorted(set(extents.values())))
        axis.tick_params(axis="x", labelsize=7)
        axis.set_xlabel("head_dim D", fontsize=9)
        axis.set_ylabel("ms", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False)
    figure.suptitle(f"{OVER_HEAD_DIM}, B1 S8192 H16, {gpu}, bf16", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def _plot_curves(axis: Any, rows: list[Row]) -> None:
    """One curve for each contender and phase of one sweep."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    extents = {
        (case.group, case.name): case.seqlen_k if case.group == OVER_LENGTH else case.kept
        for case in CASES
    }
    for label, phase in dict.fromkeys((row["label"], row["phase"]) for row in rows):
        points = {
            extents[row["group"], row["case"]] or 0: row["ms"]
            for row in rows
            if (row["label"], row["phase"]) == (label, phase)
        }
        where, times = sorted(points), [points[x] for x in sorted(points)]
        mine = label.startswith("dmattn")
        color = (OURS if mine else COLORS)[phase == "backward"]
        axis.plot(
            where, times, "o-" if mine else "s--", color=color, ms=4, label=f"{label}, {phase}"
        )
        if mine:  # a line of slope one through the last point
            axis.set_xticks(where)
            line = [times[-1] * x / where[-1] for x in where]
            axis.plot(where, line, ":", color="#999999", lw=1)
    axis.plot([], [], ":", color="#999999", lw=1, label="linear growth")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _short(int(x))))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.set_ylabel("ms", fontsize=9)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_ylim(top=8 * axis.get_ylim()[1])  # room for the legend above the curves
    axis.legend(fontsize=8, frameon=False, loc="upper left")


def _short(extent: int) -> str:
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if extent >= unit:
            return f"{extent / unit:g}{letter}"
    return str(extent)


def _slots(rows: list[Row]) -> int:
    """How many bars one phase has, plus the gaps between its shapes."""
    bars = {(row["case"], row["label"]) for row in rows}
    return len(bars) + len({case for case, _ in bars}) + 1


def _styles(rows: list[Row]) -> dict[str, Row]:
    """How the bars of each label are drawn: in colours, hatched for dmattn with other kernels."""

    def is_mine(row: Row) -> bool:
        return bool(row["label"].startswith("dmattn"))

    def name_of(row: Row) -> str:
        # A peer called in several ways, such as with a mask and with a bias, has one colour.
        return str(row["contender"].partition("@")[0] if is_mine(row) else row["label"])

    def colors(mine: bool, palette: tuple[str, ...]) -> dict[str, str]:
        names = dict.fromkeys(name_of(row) for row in rows if is_mine(row) == mine)
        return dict(zip(names, itertools.cycle(palette), strict=False))

    color_of = colors(True, OURS) | colors(False, COLORS)
    styles: dict[str, Row] = {}
    for row in rows:
        architecture = row["contender"].partition("@")[2]
        color = color_of[name_of(row)]
        style = {"facecolor": "white", "edgecolor": color, "hatch": HATCH}
        styles[row["label"]] = style if architecture else {"color": color}
    return styles


def _plot_group(rows: list[Row], group: str, gpu: str, path: Path) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    phases = [phase for phase in PHASES if any(row["phase"] == phase for row in rows)]
    labels = list(dict.fromkeys(row["label"] for row in rows))
    styles = _styles(rows)
    figure, axes = plt.subplots(
        1,
        len(phases),
        figsize=(6.2 * len(phases), 0.9 + 0.24 * _slots(rows)),
        squeeze=False,
    )
    # Both phases have the same kind of scale: otherwise their bars could not be compared.
    times = {phase: [row["ms"] for row in rows if row["phase"] == phase] for phase in phases}
    is_wide = any(max(found) > 60 * min(found) for found in times.values())
    for axis, phase in zip(axes[0], phases, strict=True):
        cases = list(dict.fromkeys(row["case"] for row in rows if row["phase"] == phase))
        ticks, position = [], 0.0
        for case in cases:
            start = position
            for label in labels:
                found = [
                    r for r in rows if (r["case"], r["phase"], r["label"]) == (case, phase, label)
                ]
                if found:
                    axis.barh(position, found[0]["ms"], 0.85, **styles[label])
                    axis.annotate(
                        f" {found[0]['ms']:.3g}",
                        (found[0]["ms"], position),
                        va="center",
                        fontsize=7,
                    )
                    position += 1
            ticks.append((start + position - 1) / 2)
            position += 0.8
        axis.set_yticks(ticks, cases, fontsize=8)
        axis.invert_yaxis()
        if is_wide:
            axis.set_xscale("log")
        axis.set_xlabel(f"ms ({axis.get_xscale()} scale), less is better", fontsize=8)
        axis.set_title(phase, fontsize=9)
        axis.margins(x=0.14)
        axis.spines[["top", "right"]].set_visible(False)
    named = [label for label in labels if "hatch" not in styles[label]]
    handles = [Patch(**styles[label]) for label in named]
    for words in dict.fromkeys(label.rpartition(", ")[2] for label in labels if label not in named):
        handles.append(Patch(facecolor="white", edgecolor="#444444", hatch=HATCH))
        named.append(f"the same, {words}")
    figure.suptitle(f"{group}, {gpu}, bf16", fontsize=10)
    figure.tight_layout()
    figure.legend(
        handles,
        named,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = ROOT / "benchmarks" / "results" / "h200.json"
    parser.add_argument("results", type=Path, nargs="?", default=default)
    parser.add_argument("--markdown", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--plots", type=Path, default=ROOT / "docs" / "assets")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    arguments = parser.parse_args()
    if not arguments.results.is_file():
        parser.error(f"results: got {arguments.results}, wanted a file that run.py has written")
    results: Row = json.loads(arguments.results.read_text())
    beside = arguments.results.with_name(f"{arguments.results.stem}-models.json")
    models: Row | None = json.loads(beside.read_text()) if beside.is_file() else None
    write_markdown(results, arguments.markdown, arguments.plots, models)
    summary.write(results, arguments.readme)
    write_plots(results, arguments.plots)
    print(targets_text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
