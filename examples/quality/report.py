"""The pictures and the tables of docs/quality.md, made from recorded results."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from quality.attentions import ATTENTIONS, FULL, SLIDING, TOP
from quality.plan import JOINED, JOINED_FAR, RECALL, TEXT

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BEGIN, END = "<!-- results: written by --render -->", "<!-- end of results -->"
COLORS = {FULL: "#4361ee", SLIDING: "#8d99ae", TOP: "#b5179e"}
TASKS = {
    RECALL: "Recall",
    JOINED: "Recall of joined pairs",
    JOINED_FAR: "Recall of joined pairs, trained on far questions alone",
    TEXT: "Text",
}
Results = dict[str, Any]


def render(results: Results, docs: Path) -> None:
    """Draw the pictures in docs/assets and put the tables into docs/quality.md."""
    assets = docs / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    plot_losses(assets / "quality_loss.png", results)
    plot_recall(assets / "quality_recall.png", results)
    if is_timed(results):
        plot_costs(assets / "quality_cost.png", results)
    page = docs / "quality.md"
    page.write_text(with_tables(page.read_text(), results))


def with_tables(page: str, results: Results) -> str:
    """The page with the text between its two markers made anew.

    Raises:
        ValueError: the page lacks a marker.
    """
    head, found, rest = page.partition(BEGIN)
    _, also_found, tail = rest.partition(END)
    if not (found and also_found):
        raise ValueError(f"page: got one without the markers {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n\n{tables(results)}\n\n{END}{tail}"


# ------------------------------------------------------------------------------------ numbers


def runs_of(results: Results, task: str, attention: str) -> list[Results]:
    """The runs of this task with this attention that were trained to their end."""
    return [
        run
        for run in results["runs"]
        if (run["task"], run["attention"]) == (task, attention) and run["complete"]
    ]


def tasks_of(results: Results) -> list[str]:
    """The tasks for which every attention has a finished run."""
    return [t for t in TASKS if all(runs_of(results, t, attention) for attention in ATTENTIONS)]


def spread(values: Sequence[float], digits: int) -> str:
    """The values as "mean (least to most)"."""
    mean = statistics.fmean(values)
    return f"{mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def timing_of(results: Results, task: str, attention: str) -> Results:
    (found,) = (
        timing
        for timing in results["timings"]
        if (timing["task"], timing["attention"]) == (task, attention)
    )
    return dict(found)


def recall_between(run: Results, first: int, last: int) -> float:
    """The share of right answers in the bins of distances that lie within first..last-1."""
    final = run["final"]
    width = final["bin_width"]
    bins = [
        (asked, share)
        for i, (asked, share) in enumerate(
            zip(final["asked"], final["recall_by_distance"], strict=True)
        )
        if first <= i * width and (i + 1) * width <= last
    ]
    return float(sum(n * share for n, share in bins) / max(1, sum(n for n, _ in bins)))


def is_timed(results: Results) -> bool:
    """Whether times mean something; on a CPU they depend on other programs and on few threads."""
    return not results["device"].startswith("CPU")


def tables(results: Results) -> str:
    """Setup and results, in Markdown."""
    parts = [
        f"Measured on: {results['device']}, torch {results['torch']}, {results['seeds']} seeds. "
        "Means, and in brackets the least and the most of the seeds."
    ]
    for task in tasks_of(results):
        config = results["setups"][task]["config"]
        lines = [f"### {TASKS[task]}", "", describe(results["setups"][task]), ""]
        recall = task != TEXT
        columns = ["held-out loss, bits"]
        if recall:
            reach = config["layers"] * (config["window"] - 1)
            bounds = bins_of(results, task, reach)
            columns += [f"recall, distance {a} to {b - 1}" for a, b in bounds]
        timed = ["step, ms"] if is_timed(results) else []
        columns += ["runs", *timed, "cache, KiB", "parameters"]
        lines += [f"| attention | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
        for attention in ATTENTIONS:
            runs = runs_of(results, task, attention)
            timing = timing_of(results, task, attention)
            cells = [spread([run["final"]["loss"] for run in runs], 3)]
            if recall:
                cells += [spread([recall_between(run, a, b) for run in runs], 2) for a, b in bounds]
            cells += [str(len(runs)), *([f"{timing['step_ms']:.1f}"] if timed else [])]
            cells += [f"{timing['cache_bytes'] / 1024:,.1f}", f"{runs[0]['parameters']:,}"]
            lines.append(f"| {attention} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def bins_of(results: Results, task: str, reach: int) -> list[tuple[int, int]]:
    """Distances in three groups: one window, what sliding windows reach, and beyond."""
    config = results["setups"][task]["config"]
    width = runs_of(results, task, FULL)[0]["final"]["bin_width"]
    edge = -(-reach // width) * width
    window = config["window"]
    middle = [(window, edge)] if edge > window else []
    return [(0, window), *middle, (max(edge, window), config["length"])]


def describe(setup: Results) -> str:
    config, recall = setup["config"], setup["recall"]
    layers = "1 layer" if config["layers"] == 1 else f"{config['layers']} layers"
    words = (
        f"{layers} of width {config['width']}, {config['heads']} heads over "
        f"{config['kv_heads']}, context {config['length']}, w = {config['window']}, "
        f"{config['steps']} steps of {config['batch']} sequences, learning rate {config['lr']:g}"
    )
    if recall is not None:
        words += (
            f"; {recall['fewest_pairs']} to {recall['pairs']} pairs in training and "
            f"{recall['pairs']} when tested, {recall['questions']} questions a sequence, "
            f"{recall['keys']} keys and {recall['values']} values to draw from"
        )
        if recall["nearest"]:
            words += (
                f"; in training no question nearer than {recall['nearest']} tokens behind the pairs"
            )
    return words + "."


# ----------------------------------------------------------------------------------- pictures


def band(ax: Axes, x: Sequence[float], curves: list[list[float]], label: str) -> None:
    """The mean of the seeds, and a band from their least to their most."""
    columns = list(zip(*curves, strict=True))
    ax.plot(x, [statistics.fmean(c) for c in columns], color=COLORS[label], label=label, lw=1.6)
    low, high = [min(c) for c in columns], [max(c) for c in columns]
    ax.fill_between(x, low, high, color=COLORS[label], alpha=0.2, lw=0)


def finish(ax: Axes) -> None:
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def two_columns(count: int) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels, two in a row: more in a row would be too small to read."""
    columns = min(count, 2)
    rows = -(-count // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(5 * columns, 3.6 * rows), layout="constrained", squeeze=False
    )
    panels = list(grid.flat)
    for spare in panels[count:]:
        spare.set_visible(False)
    return figure, panels[:count]


def plot_losses(path: Path, results: Results) -> None:
    """Held-out loss over the steps, one panel for each task."""
    tasks = tasks_of(results)
    figure, panels = two_columns(len(tasks))
    for ax, task in zip(panels, tasks, strict=True):
        for attention in ATTENTIONS:
            # The loss of the untrained model on text would take most of the panel.
            first = 1 if task == TEXT else 0
            curves = [run["curve"][first:] for run in runs_of(results, task, attention)]
            steps = [point["step"] for point in curves[0]]
            band(ax, steps, [[point["loss"] for point in curve] for curve in curves], attention)
        unit = "byte" if task == TEXT else "answer"
        ax.set(xlabel="training step", ylabel=f"held-out loss, bits per {unit}")
        ax.set_title(TASKS[task], fontsize="medium")
        if task != TEXT:
            ax.set_ylim(bottom=0)
        finish(ax)
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_recall(path: Path, results: Results) -> None:
    """Share of right answers against the distance to the value, one panel for each task."""
    tasks = [task for task in tasks_of(results) if task != TEXT]
    figure, panels = two_columns(max(1, len(tasks)))
    for ax, task in zip(panels, tasks, strict=False):
        config = results["setups"][task]["config"]
        for attention in ATTENTIONS:
            finals = [run["final"] for run in runs_of(results, task, attention)]
            width = finals[0]["bin_width"]
            used = [i for i, asked in enumerate(finals[0]["asked"]) if asked >= 20]
            shares = [[final["recall_by_distance"][i] for i in used] for final in finals]
            band(ax, [(i + 0.5) * width for i in used], shares, attention)
        reach = config["layers"] * (config["window"] - 1)
        lines = {config["window"]: "w"}
        if config["layers"] > 1:  # with one layer the reach is w - 1, too close to w to draw
            lines[reach] = f"{config['layers']}(w-1)"
        for at, words in lines.items():
            ax.axvline(at, color="#555555", ls=":", lw=1)
            ax.annotate(f" {words}", (at, 1.03), color="#555555", fontsize="small")
        ax.set(xlabel="distance to the value, tokens", ylim=(-0.02, 1.25))
        ax.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
        ax.set_title(TASKS[task])
        finish(ax)
    panels[0].set_ylabel("share of right answers")
    panels[0].legend(frameon=False, loc="upper right", ncols=3, fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_costs(path: Path, results: Results) -> None:
    """Time of a training step, and what a sequence's cache holds."""
    tasks = [task for task in (JOINED, TEXT) if task in tasks_of(results)]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    quantities = (
        ("step_ms", 1.0, "training step, ms", "{:.1f}"),
        ("cache_bytes", 1024.0, "cache of a sequence, KiB", "{:,.0f}"),
    )
    for ax, (name, unit, words, form) in zip(panels, quantities, strict=True):
        for place, attention in enumerate(ATTENTIONS):
            values = [timing_of(results, task, attention)[name] / unit for task in tasks]
            at = [i + 0.27 * (place - 1) for i in range(len(tasks))]
            bars = ax.bar(at, values, 0.25, color=COLORS[attention], label=attention)
            ax.bar_label(bars, [form.format(v) for v in values], fontsize="small", padding=1)
        names = [f"{TASKS[t]},\ncontext {results['setups'][t]['config']['length']}" for t in tasks]
        ax.set_xticks(range(len(tasks)), names)
        ax.set(ylabel=words)
        ax.margins(y=0.15)
        finish(ax)
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
