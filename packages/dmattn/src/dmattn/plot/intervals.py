"""A picture of how long each key stays in the window."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmattn.plot import axes
from dmattn.plot.pixels import row_intervals
from dmattn.selection import KeySelection
from dmattn.validation import describe

# More points than this cover each other: their density is drawn instead.
_MOST_POINTS = 4000


def lifetimes(
    selection: KeySelection,
    *,
    head: int = 0,
    batch: int = 0,
    path: str | Path | None = None,
    ax: Any = None,
) -> Any:
    """Draw for each key how many queries keep it.

    In running top-w a key enters at its own position and stays until `window_size` better ones have
    come. Keys that the last query still keeps are marked: how long they would have stayed is not
    known. Long selections are drawn as densities.

    Args:
        selection: a causal KeySelection.
        head, batch: which head and batch entry; any number where that dimension is 1.
        path: where to save the picture, by the suffix of its name; None to save nothing.
        ax: the matplotlib axes to draw on; those of a new figure when None.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: selection is no KeySelection, or ax no axes.
        ValueError: selection is not causal, so that no key leaves, or has no queries or no keys.
        IndexError: there is no such head or batch entry.
    """
    if not isinstance(selection, KeySelection):
        raise TypeError(f"selection: got {describe(selection)}, wanted a dmattn.KeySelection")
    if not selection.is_causal:
        raise ValueError(
            "selection: got one with is_causal=False, wanted a causal one; without causality every "
            "query keeps the same keys"
        )
    batch = axes.check_shared_entry("batch", batch, selection.end.shape[0])
    head = axes.check_shared_entry("head", head, selection.end.shape[1])
    axes.check_not_empty("selection", selection.query_len, selection.end.shape[2])
    start, stop = row_intervals(selection, batch, head)
    life, stays = stop - start, stop == selection.query_len
    ax = axes.axes_or_new(ax, 7.2, 4.6)
    key = torch.arange(len(life), device="cpu")
    seen = life > 0
    if int(seen.sum()) <= _MOST_POINTS:
        _draw_points(ax, key, life, seen & ~stays, seen & stays)
    else:
        _draw_density(ax, key[seen], life[seen])
    longest = (selection.query_len - start).clamp(min=1)
    ax.plot(
        key.tolist(), longest.tolist(), color=axes.TEXT, lw=1, ls="--", label="to the last query"
    )
    ax.set(xlabel="key", ylabel="queries that keep it", yscale="log", ylim=(0.8, None))
    ax.set_title(
        _title(selection, life[seen & ~stays], int((seen & stays).sum())),
        loc="left",
        fontsize="medium",
    )
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.14), ncols=3, frameon=False)
    axes.save(ax, path)
    return ax


def _title(selection: KeySelection, gone: Tensor, stay: int) -> str:
    window = selection.window_size
    first = "How long keys are kept" + (
        "" if window is None else f", window of {axes.keys(window)}"
    )
    if len(gone) + stay == 0:
        return f"{first}\nno key is kept"
    if len(gone) == 0:
        all_keys = "the only key stays" if stay == 1 else f"all {axes.keys(stay)} stay"
        return f"{first}\n{all_keys} to the last query"
    within = axes.queries(int(gone.median()))
    leave = f"of the {axes.keys(len(gone))} that leave, half do so within {within}"
    if len(gone) == 1:
        leave = f"1 key leaves, within {within}"
    return f"{first}\n{leave}; {axes.thousands(stay)} {'is' if stay == 1 else 'are'} still kept"


def _draw_points(ax: Any, key: Tensor, life: Tensor, gone: Tensor, stay: Tensor) -> None:
    size = 14 if len(key) <= 1000 else 8
    for which, colour, marker, label in (
        (gone, axes.KEPT, "o", "has left"),
        (stay, axes.MARKED, "^", "still kept by the last query"),
    ):
        places, values = key[which].tolist(), life[which].tolist()
        ax.scatter(places, values, s=size, c=colour, marker=marker, lw=0, alpha=0.8, label=label)


def _draw_density(ax: Any, key: Tensor, life: Tensor) -> None:
    colors = axes.matplotlib_module("colors")
    high = float(life.max()) * 1.3
    exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    bins = (
        torch.linspace(0, float(key.max()) + 1, 161, **exact).tolist(),
        torch.logspace(-0.1, math.log10(high), 61, **exact).tolist(),
    )
    _, _, _, image = ax.hist2d(
        key.tolist(), life.tolist(), bins=bins, norm=colors.LogNorm(), cmap="cividis_r"
    )
    ax.figure.colorbar(image, ax=ax, label="keys in each cell")
