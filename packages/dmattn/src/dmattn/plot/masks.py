"""A picture of which keys each query keeps."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmattn.plot import axes
from dmattn.plot.pixels import Pixels, of_selection, of_tensor
from dmattn.selection import KeySelection
from dmattn.validation import check_bool, check_int, check_tensor, describe


def mask(
    keep: KeySelection | Tensor,
    *,
    head: int = 0,
    batch: int = 0,
    is_causal: bool = False,
    path: str | Path | None = None,
    ax: Any = None,
    pixels: int = axes.PIXELS,
) -> Any:
    """Draw which keys each query keeps, one row for each query and one column for each key.

    Where there are more queries or keys than pixels, a pixel stands for a block of them and shows
    which share of it is kept; time and memory then follow the number of keys and of pixels, so a
    selection of a million keys takes seconds.

    Args:
        keep: a KeySelection, or a bool mask, True = attend: (Sq, Sk), or
            ({B|1}, {H|HK|1}, {Sq|1}, Sk). A mask that is the same for all queries (Sq dimension 1)
            is drawn as one row or, when is_causal, as Sk rows.
        head, batch: which head and batch entry; any number where that dimension is 1.
        is_causal: for a bool mask: hide the keys that causality hides, aligned to the bottom right
            corner. A selection itself says whether it is causal.
        path: where to save the picture, by the suffix of its name; None to save nothing.
        ax: the matplotlib axes to draw on; those of a new figure when None.
        pixels: the most pixels in either direction.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: keep is neither a KeySelection nor a bool tensor, or ax no axes.
        ValueError: keep has none of the shapes above, or has no queries or no keys.
        IndexError: there is no such head or batch entry.
    """
    most = check_int("pixels", pixels, 1)
    if isinstance(keep, KeySelection):
        drawn = _of_selection(keep, batch, head, most)
        causal, first_row = keep.is_causal, keep.first_row if keep.is_causal else 0
        what, alike = _name(keep), not causal
    else:
        causal, first_row = check_bool("is_causal", is_causal), 0
        drawn = _of_tensor(keep, batch, head, causal, most)
        what, alike = "Mask", not causal and _rows_are_alike(drawn)
    ax = axes.axes_or_new(ax, 6.4, 5.6)
    _draw(ax, drawn, first_row)
    ax.set(xlabel="key", ylabel="query position" if first_row else "query")
    ax.set_title(f"{what}\n{_summary(drawn, causal, alike)}", fontsize="medium", loc="left")
    axes.save(ax, path)
    return ax


def _of_selection(keep: KeySelection, batch: int, head: int, most: int) -> Pixels:
    axes.check_not_empty("keep", keep.query_len, keep.end.shape[2])
    batch = axes.check_shared_entry("batch", batch, keep.end.shape[0])
    head = axes.check_shared_entry("head", head, keep.end.shape[1])
    return of_selection(keep, batch, head, most)


def _of_tensor(keep: Tensor, batch: int, head: int, is_causal: bool, most: int) -> Pixels:
    wanted = "a dmattn.KeySelection or a bool tensor"
    if not isinstance(keep, Tensor):
        raise TypeError(f"keep: got {describe(keep)}, wanted {wanted}")
    if check_tensor("keep", keep).dtype != torch.bool:
        raise TypeError(f"keep: got dtype {keep.dtype}, wanted torch.bool (True = attend)")
    if keep.dim() == 4:
        batch = axes.check_shared_entry("batch", batch, keep.shape[0])
        head = axes.check_shared_entry("head", head, keep.shape[1])
        keep = keep[batch, head]
    if keep.dim() != 2:
        raise ValueError(
            f"keep: got shape {tuple(keep.shape)}, wanted (seqlen_q, seqlen_k) or "
            "(batch|1, heads|1, seqlen_q|1, seqlen_k)"
        )
    axes.check_not_empty("keep", *keep.shape)
    if keep.shape[0] == 1 and is_causal:
        keep = keep.expand(keep.shape[1], -1)
    return of_tensor(keep, is_causal, most)


def _name(keep: KeySelection) -> str:
    key_len = axes.keys(keep.end.shape[2])
    if not keep.is_causal:
        return f"Selection from {key_len}, without causality"
    if keep.window_size is None:
        return f"Selection from {key_len}, given by intervals"
    return f"Selection from {key_len}: at most {axes.thousands(keep.window_size)} for each query"


def _rows_are_alike(drawn: Pixels) -> bool:
    """Whether every query is known to keep the same keys.

    Where a pixel is a block of queries, equal shares do not tell that.
    """
    one_query = int(drawn.rows[-1]) == 1
    return one_query or (drawn.is_exact and bool((drawn.kept == drawn.kept[:1]).all()))


def _summary(drawn: Pixels, is_causal: bool, alike: bool) -> str:
    """`alike`: that every query keeps the same keys."""
    area = drawn.rows.diff()[:, None] * drawn.keys.diff()
    kept, visible = float((drawn.kept * area).sum()), float((drawn.visible * area).sum())
    rows = drawn.kept.gt(0)
    if alike:
        first = round(float((drawn.kept * drawn.keys.diff())[0].sum()))
        return f"every query keeps the same {axes.keys(first)}"
    share = kept / visible if visible else 0.0
    of_what = "of what causality allows" if is_causal else "of all entries"
    empty = int((~rows.any(1)).sum())
    words = ""
    if empty and drawn.is_exact:
        words = f"; {axes.queries(empty)} {'keeps' if empty == 1 else 'keep'} none"
    return f"kept: {100 * share:.3g}% {of_what}{words}"


def _draw(ax: Any, drawn: Pixels, first_row: int) -> None:
    query_len, key_len = int(drawn.rows[-1]), int(drawn.keys[-1])
    extent = (-0.5, key_len - 0.5, first_row + query_len - 0.5, first_row - 0.5)
    how = {"extent": extent, "aspect": "auto" if query_len != key_len else "equal"}
    if drawn.is_exact:
        _draw_entries(ax, drawn, how)
    else:
        _draw_shares(ax, drawn, how)


def _draw_entries(ax: Any, drawn: Pixels, how: dict[str, Any]) -> None:
    colors, patches = axes.matplotlib_module("colors"), axes.matplotlib_module("patches")
    state = (drawn.visible > 0).int() + (drawn.kept > 0).int()
    colours = colors.ListedColormap([axes.HIDDEN, axes.DROPPED, axes.KEPT])
    # Colours are averaged, not states: a mean of 0 and 2 would look like "dropped".
    how = how | {"interpolation_stage": "rgba"}
    ax.imshow(state.tolist(), cmap=colours, vmin=0, vmax=2, **how)
    labels = {axes.KEPT: "kept", axes.DROPPED: "dropped"}
    if bool((state == 0).any()):
        labels[axes.HIDDEN] = "hidden by causality"
    handles = [
        patches.Patch(facecolor=colour, label=label, edgecolor="#bbbbbb")
        for colour, label in labels.items()
    ]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)


def _draw_shares(ax: Any, drawn: Pixels, how: dict[str, Any]) -> None:
    colors = axes.matplotlib_module("colors")
    shares = drawn.kept / drawn.visible.clamp(min=1e-300)
    shares[drawn.visible == 0] = float("nan")  # drawn as background
    highest = float(shares.nan_to_num(0).max())
    colours = colors.LinearSegmentedColormap.from_list(
        "kept", [axes.DROPPED, "#9ecae1", "#3182bd", axes.KEPT, "#08306b"]
    )
    # Few keys of many are kept: on a linear scale most pixels would look empty.
    scale = colors.PowerNorm(0.5, vmin=0, vmax=highest or 1)
    image = ax.imshow(shares.tolist(), cmap=colours, norm=scale, **how)
    label = f"share that is kept of {axes.blocks(drawn.keys, drawn.rows)}"
    ax.figure.colorbar(image, ax=ax, label=label, shrink=0.85)
