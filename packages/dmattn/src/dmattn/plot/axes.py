"""What all pictures share: matplotlib if it is there, axes to draw on, colours, saving."""

import importlib
from pathlib import Path
from typing import Any

from torch import Tensor

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
    return f"{thousands(n)} {'key' if n == 1 else 'keys'}"


def queries(n: int) -> str:
    """A number of queries as text: "1 query", "64 queries"."""
    return f"{thousands(n)} {'query' if n == 1 else 'queries'}"


def blocks(of_keys: Tensor, of_queries: Tensor | None = None) -> str:
    """What a pixel stands for: "2 queries x 4 keys", or "up to 4 keys" where blocks differ in size.

    The arguments: the edges of the blocks, as `dmattn.plot.pixels.edges` returns them.
    """
    sizes = [of_keys.diff()] if of_queries is None else [of_queries.diff(), of_keys.diff()]
    words = (keys,) if of_queries is None else (queries, keys)
    most = " x ".join(say(int(size.max())) for say, size in zip(words, sizes, strict=True))
    is_even = all(bool((size == size[0]).all()) for size in sizes)
    return most if is_even else f"up to {most}"


def check_not_empty(name: str, query_len: int, key_len: int) -> None:
    """Raise ValueError where there is nothing to draw."""
    if query_len == 0 or key_len == 0:
        got = f"{query_len} queries and {key_len} keys"
        raise ValueError(f"{name}: got {got}, wanted at least one of each")


def check_entry(name: str, index: int, size: int) -> int:
    """An index into a dimension of this size.

    Raises:
        TypeError: it is no integer.
        IndexError: there is no such entry.
    """
    index = check_int(name, index)
    if not 0 <= index < size:
        wanted = "0" if size == 1 else f"0 to {size - 1}"
        raise IndexError(f"{name}: got {index}, wanted {wanted}")
    return index


def check_shared_entry(name: str, index: int, size: int) -> int:
    """As `check_entry`, for a dimension that serves every index if its size is 1."""
    if size == 1:
        check_int(name, index)
        return 0
    return check_entry(name, index, size)
