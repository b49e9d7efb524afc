"""Pictures of what was learned: losses, and a mask on real text."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

from bytes_lm.config import Config
from bytes_lm.device import half_precision
from bytes_lm.model import BytesLM
from bytes_lm.serving import Answer
from bytes_lm.training import History, differences
from dmattn.utils.mask import top_window_mask

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle


def running_mean(values: Sequence[float], share: float = 0.015) -> list[float]:
    """Mean of each value and its neighbours, up to a share of all values on either side."""
    reach = max(1, round(share * len(values)))
    reaches = (min(reach, i, len(values) - 1 - i) for i in range(len(values)))  # fewer at the ends
    parts = (values[i - near : i + near + 1] for i, near in enumerate(reaches))
    return [sum(part) / len(part) for part in parts]


def plot_loss(path: Path, history: History, config: Config, entropy: float, title: str) -> None:
    """Training and held-out loss over the steps, with the unigram entropy as a line."""
    figure, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, len(history.train) + 1)
    ax.plot(steps, history.train, color="#c6dbef", lw=0.8, label="training, each step")
    ax.plot(steps, running_mean(history.train), color="#6baed6", label="training, running mean")
    checked, heldout = zip(*history.heldout, strict=True)
    ax.plot(checked, heldout, color="#08306b", marker="o", ms=4, lw=1.2, label="held-out files")
    ax.axhline(entropy, color="#d94801", ls="--", lw=1.2)
    ax.annotate(
        f"unigram entropy {entropy:.2f}",
        (1, entropy),
        xycoords=("axes fraction", "data"),
        xytext=(-6, 4),
        textcoords="offset points",
        ha="right",
        color="#d94801",
    )
    final = history.heldout[-1]
    ax.annotate(
        f"{final[1]:.2f}",
        final,
        xytext=(0, -14),
        textcoords="offset points",
        ha="center",
        color="#08306b",
        weight="bold",
    )
    ax.set(xlabel="training step", ylabel="loss, bits per byte", title=title)
    ax.set_ylim(0, 8.5)
    ax.set_xlim(0, max(1, config.steps) * 1.02)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="upper right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_paths(path: Path, histories: Mapping[str, History], title: str) -> None:
    """The losses of the same training along several mask paths, and how far they are apart."""
    reference, *others = histories
    labels = {
        "window": "keys selected inside the attention",
        "dense": "dense boolean mask",
        "nudged": "selected inside, initial weights moved by one last bit",
    }
    styles = {
        "window": {"color": "#9ecae1", "lw": 3.0},
        "dense": {"color": "#08306b", "lw": 1.0},
        "nudged": {"color": "#d94801", "lw": 1.0, "ls": ":"},
    }
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6.5), layout="constrained", sharex=True, height_ratios=(3, 2)
    )
    for name, history in histories.items():
        label = f"{labels[name]}: held-out {history.heldout[-1][1]:.3f} at the end"
        top.plot(range(1, len(history.train) + 1), history.train, label=label, **styles[name])
    apart = {name: differences(histories[name], histories[reference]) for name in others}
    for name, gaps in apart.items():
        # A difference of 0 cannot be drawn on a logarithmic axis.
        drawn = [gap if gap > 0 else float("nan") for gap in gaps]
        style = styles[name] | {"ls": "none", "marker": ".", "ms": 3}
        bottom.plot(range(1, len(gaps) + 1), drawn, label=labels[name], **style)
    top.set(ylabel="training loss, bits per byte", title=title)
    top.set_ylim(0, 8.5)
    bottom.set(xlabel="training step", ylabel="difference, bits per byte")
    if any(gap > 0 for gaps in apart.values() for gap in gaps):  # else there is no scale to choose
        bottom.set_yscale("log")
    bottom.set_title(f"distance from the run with {labels[reference]}", fontsize="medium")
    for ax in (top, bottom):
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    top.legend(frameon=False, loc="upper right")
    bottom.legend(frameon=False, loc="lower right", markerscale=3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def kept_keys(scores: Tensor, window: int) -> Tensor:
    """(S,) scores -> (S, S) bool: keys that each query keeps, as the attention selects them."""
    return top_window_mask(scores[None, None, None], window, len(scores), is_causal=True)[0, 0]


@torch.no_grad()
def choose_head(model: BytesLM, tokens: Tensor) -> tuple[int, int, Tensor]:
    """The layer and score head whose kept keys lie furthest back, and its scores (S,).

    tokens: (S,).
    """
    seen: list[Tensor] = []
    hooks = []
    layers = model.attention_layers()
    for attention in layers:
        hooks.append(
            attention.register_forward_pre_hook(
                lambda module, args: seen.append(module.key_scores(args[0])[0])
            )
        )
    with half_precision(tokens.device):
        model(tokens[None])
    for hook in hooks:
        hook.remove()
    age = torch.arange(len(tokens), device=tokens.device)
    age = age[:, None] - age
    best: tuple[float, int, int, Tensor] | None = None
    for layer, scores in enumerate(seen):
        for head, row in enumerate(scores):
            keep = kept_keys(row, layers[layer].window_size or len(row))
            reach = float((age * keep).sum() / keep.sum())
            if best is None or reach > best[0]:
                best = (reach, layer, head, row)
    assert best is not None
    return best[1:]


def draw_mask(ax: Axes, keep: Tensor, window: int) -> None:
    """The whole mask: one row for each query, one column for each key."""
    size = len(keep)
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    colours = ListedColormap(["#ffffff", "#e4e4e4", "#08519c"])
    ax.imshow((visible.int() + (keep & visible).int()).numpy(), cmap=colours, vmin=0, vmax=2)
    ax.set(xlabel="key position", ylabel="query position")
    ax.set_title(f"each query keeps {window} of up to {size} keys")
    ax.legend(
        handles=[
            Patch(facecolor="#08519c", label="kept"),
            Patch(facecolor="#e4e4e4", label="seen, dropped"),
        ],
        frameon=False,
        loc="upper right",
    )


def draw_text(ax: Axes, passage: bytes, kept: Tensor, columns: int = 72, rows: int = 20) -> None:
    """The end of the passage as text, the kept characters white on dark ground."""
    cells, row, column = [], 0, 0
    for char, is_kept in zip(passage.decode("latin-1"), kept.tolist(), strict=True):
        if column == columns:
            row, column = row + 1, 0
        cells.append((row, column, char, is_kept))
        row, column = (row + 1, 0) if char == "\n" else (row, column + 1)
    first = max(0, cells[-1][0] + 1 - rows)
    signs = {"\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", " ": "\N{MIDDLE DOT}"}
    for row, column, char, is_kept in cells:
        if row < first:
            continue
        top = row - first
        if is_kept:
            ax.add_patch(Rectangle((column, top + 0.04), 1, 0.92, color="#08519c", lw=0))
        ax.text(
            column + 0.5,
            top + 0.54,
            signs.get(char, char),
            family="monospace",
            fontsize=9,
            ha="center",
            va="center",
            color="white" if is_kept else "#c8c8c8" if char in signs else "#666666",
        )
    ax.set(xlim=(0, columns), ylim=(min(rows, cells[-1][0] + 1), 0), aspect=2, anchor="NW")
    ax.axis("off")


def plot_mask(path: Path, model: BytesLM, passage: Tensor, config: Config) -> None:
    """One learned mask on real text: as a matrix, and as the characters that it keeps."""
    layer, head, scores = choose_head(model, passage.long())
    keep = kept_keys(scores, config.window).cpu()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 5.2), layout="constrained", width_ratios=(1, 1.5)
    )
    draw_mask(left, keep, min(config.window, len(keep)))
    draw_text(right, bytes(passage.tolist()), keep[-1])
    shown = "" if len(keep) <= 20 * 72 else " (the end of the context)"
    right.set_title(f"the characters that the last query keeps{shown}", loc="left")
    figure.suptitle(
        f"A learned mask: layer {layer + 1} of {config.layers}, "
        f"key/value head {head + 1} of {config.kv_heads}"
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def plot_serving(path: Path, answers: Sequence[Answer]) -> None:
    """Each request as a line from its arrival on, and the times as cumulative curves."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for row, answer in enumerate(answers):
        first, last = answer.times[0], answer.times[-1]
        left.plot([answer.request.arrival, first], [row, row], color="#c6dbef", lw=2)
        left.plot([first, last], [row, row], color="#08306b", lw=2)
    left.plot([], [], color="#c6dbef", lw=2, label="waits, prompt is read")
    left.plot([], [], color="#08306b", lw=2, label="is answered")
    left.set(xlabel="seconds", ylabel="request", title="requests in a running batch")
    left.legend(loc="upper left")
    waits = [answer.times[0] - answer.request.arrival for answer in answers]
    gaps = [b - a for answer in answers for a, b in pairwise(answer.times)]
    for values, label in ((waits, "to the first byte"), (gaps, "per byte")):
        ordered = [1000 * x for x in sorted(values)]
        shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
        right.plot(ordered, shares, label=label)
    right.set(xlabel="milliseconds", ylabel="percent take at most", title="time")
    right.set_xscale("log")
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
