"""What all pictures share: matplotlib if it is there, axes to draw on, colours, saving."""

import importlib
from pathlib import Path
from typing import Any

from dmattn.validation import check_int, describe

# Blue on grey, with orange beside it: told apart with every common kind of colour blindness, and
# in black and white.
KEPT = "#08519c"
DROPPED = "#e4e4e4"
HIDDEN = "#ffffff"
MARKED = "#d95f0e"
TEXT = "#444444"

# More pixels than this in one direction cannot be seen in a figure of the usual size.
PIXELS = 512


def matplotlib_module(name: str) -> Any:
    """A module of matplotlib.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ImportError as error:
        raise ImportError(
            "dmattn.plot draws with matplotlib, which is not installed: pip install matplotlib, or "
            "dmattn with its extra [plot]"
        ) from error


def axes_or_new(ax: Any, width: float, height: float) -> Any:
    """The axes given, or those of a new figure of this size in inches.

    Raises:
        TypeError: ax is not a matplotlib Axes.
    """
    pyplot = matplotlib_module("pyplot")
    if ax is not None:
        if not isinstance(ax, matplotlib_module("axes").Axes):
            raise TypeError(f"ax: got {describe(ax)}, wanted the axes of matplotlib or None")
        return ax
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def save(ax: Any, path: str | Path | None) -> None:
    """Write the figure of the axes to a file, if there is a path."""
    if path is not None:
        # For axes in a part of a figure (a subfigure), the whole figure.
        ax.figure.figure.savefig(path, dpi=150, bbox_inches="tight")


def thousands(n: int) -> str:
    """A count as text: 4,096."""
    return f"{n:,}"


def keys(n: int) -> str:
    """A number of keys as text: "1 key", "64 keys"."""
    return f"{thousands(n)} key" + ("" if n == 1 else "s")


def check_not_empty(name: str, query_len: int, key_len: int) -> None:
    """Raise ValueError where there is nothing to draw."""
    if query_len == 0 or key_len == 0:
        got = f"{query_len} queries and {key_len} keys"
        raise ValueError(f"{name}: got {got}, wanted at least one of each")


def check_entry(name: str, index: int, size: int) -> int:
    """An index into a dimension of this size; a dimension of size 1 serves every index.

    Raises:
        TypeError: it is no integer.
        IndexError: there is no such entry.
    """
    index = check_int(name, index)
    if size == 1:
        return 0
    if not 0 <= index < size:
        raise IndexError(f"{name}: got {index}, wanted 0 to {size - 1}")
    return index
