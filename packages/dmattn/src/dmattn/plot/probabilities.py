"""A picture of where the attention of one head goes among the keys that it keeps."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn.functional import problem_with_keys_chosen
from dmattn.plot import axes
from dmattn.plot.pixels import edges, sums
from dmattn.problem import Problem
from dmattn.reference import reference_attention
from dmattn.selection import KeySelection
from dmattn.validation import check_int

_COLOURS = ("#fee8a8", "#fe9929", "#cc4c02", "#662506", "#2b0f03")
# Entries of Sq x Sk that are in memory at once, in float64.
_ENTRIES_AT_ONCE = 2**21


class _Rows(NamedTuple):
    """Some rows of one head, and what each pixel (a block of keys) shows of them."""

    heavy: Tensor  # int64 (rows,): how few keys get half of the attention
    held: Tensor  # int64 (rows,): keys kept
    mass: Tensor  # float64 (rows, keys): the probabilities of a pixel's keys, added up
    kept: Tensor  # bool (rows, keys): any key of the pixel is kept
    visible: Tensor  # bool (rows, keys): causality allows any


@torch.no_grad()
def attention(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    window_size: int | None = None,
    *,
    selection: KeySelection | None = None,
    sinks: Tensor | None = None,
    head: int = 0,
    batch: int = 0,
    row: int | None = None,
    path: str | Path | None = None,
    ax: Any = None,
    pixels: int = axes.PIXELS,
) -> Any:
    """Draw the attention probabilities of one head, with the keys that it keeps marked.

    The arguments up to `sinks` are those of `flash_dmattn_func`. The probabilities are computed
    for the drawn rows of the one head only, in float64 on the CPU, a few rows at a time.

    Without `row` the picture has a row for each query (for one in several, evenly chosen, where
    there are more queries than pixels) and a column for each key, or for each block of keys, whose
    probabilities are added up. Keys hidden by causality are white, dropped keys grey, and the
    colour of kept keys says how much attention they get. With `row` it shows the probabilities of
    that one query, with a mark below each key that it keeps.

    Args:
        query: (B, Sq, H, D), as flash_dmattn_func takes it.
        key: (B, Sk, HK, D).
        attn_mask, attn_bias, softmax_scale, is_causal, softcap, window_size, selection,
            sinks: as flash_dmattn_func takes them.
        head: the query head, 0 to H - 1.
        batch: the batch entry.
        row: the query to draw by itself, 0 to Sq - 1; None to draw all.
        path: where to save the picture, by the suffix of its name; None to save nothing.
        ax: the matplotlib axes to draw on; those of a new figure when None.
        pixels: the most pixels in either direction.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.
        IndexError: there is no such head, batch entry or row.
        TypeError, ValueError: as flash_dmattn_func; ValueError also without queries or keys.
    """
    most = check_int("pixels", pixels, 1)
    # The value takes no part in the probabilities; the key stands in for it.
    problem = problem_with_keys_chosen(
        query,
        key,
        key,
        attn_mask,
        attn_bias,
        window_size,
        selection,
        softmax_scale=softmax_scale,
        is_causal=is_causal,
        softcap=softcap,
        deterministic=False,
        sinks=sinks,
    )
    batch_size, query_len, nheads, _ = problem.q.shape
    axes.check_not_empty("query", query_len, problem.k.shape[1])
    batch = axes.check_entry("batch", batch, batch_size)
    head = axes.check_entry("head", head, nheads)
    keys = edges(problem.k.shape[1], most)
    if row is not None:
        row = axes.check_entry("row", row, query_len)
        drawn = _rows_of_head(problem, batch, head, torch.tensor([row], device="cpu"), keys)
        ax = axes.axes_or_new(ax, 7.2, 3.8)
        _draw_row(ax, drawn, keys)
        first = f"Attention of query {row}, head {head}"
    else:
        rows = edges(query_len, most)[:-1]
        drawn = _rows_of_head(problem, batch, head, rows, keys)
        ax = axes.axes_or_new(ax, 6.8, 5.6)
        _draw_matrix(ax, drawn, keys, query_len)
        first = f"Attention, head {head}"
        if len(rows) < query_len:
            first += f", {axes.thousands(len(rows))} of {axes.queries(query_len)}"
    ax.set_title(f"{first}\n{_summary(drawn)}", loc="left", fontsize="medium")
    axes.save(ax, path)
    return ax


def _rows_of_head(problem: Problem, batch: int, head: int, rows: Tensor, keys: Tensor) -> _Rows:
    key_len = problem.k.shape[1]
    at_once = max(1, _ENTRIES_AT_ONCE // max(1, key_len))
    parts = [
        _probabilities(problem, batch, head, part, keys) for part in torch.split(rows, at_once)
    ]
    return _Rows(*[torch.cat(tensors) for tensors in zip(*parts, strict=True)])


def _probabilities(problem: Problem, batch: int, head: int, rows: Tensor, keys: Tensor) -> _Rows:
    """The probabilities of these rows of one head by the definition of attention."""
    key_len = problem.k.shape[1]
    key_head = head * problem.k.shape[2] // problem.q.shape[2]
    batch_rows = problem.q[batch, rows.to(problem.q.device), head].cpu()
    keep, visible = _kept(problem, batch, head, rows)
    bias = problem.bias
    if bias is not None:
        bias = _of_rows(_of_head(bias, batch, head, problem), rows)
        keep, bias = keep & (bias != -torch.inf), bias[None, None]
    exact = reference_attention(
        batch_rows[None, :, None],
        problem.k[batch, :, key_head].cpu()[None, :, None],
        problem.k[batch, :, key_head].cpu()[None, :, None],
        keep[None, None],
        bias,
        problem.softmax_scale,
        False,
        problem.softcap,
        sinks=None if problem.sinks is None else problem.sinks[head : head + 1].cpu(),
    )
    shape = (len(rows), key_len)
    probs = exact.probs.expand(1, 1, *shape)[0, 0]
    most = probs.sort(dim=-1, descending=True).values.cumsum(-1)
    return _Rows(
        (most < most[:, -1:] / 2).sum(-1) + 1,  # with sinks the sum is below 1
        keep.expand(shape).sum(-1),
        sums(probs, keys),
        sums(keep.expand(shape).long(), keys) > 0,
        sums(visible.expand(shape).long(), keys) > 0,
    )


def _kept(problem: Problem, batch: int, head: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """bool (rows, Sk) twice: the keys that these rows keep, and those that causality allows."""
    query_len, key_len = problem.q.shape[1], problem.k.shape[1]
    key, position = torch.arange(key_len, device="cpu"), (rows + key_len - query_len)[:, None]
    visible = torch.ones_like(key, dtype=torch.bool)[None]
    if problem.is_causal:
        visible = key <= position
    keep = visible
    if problem.key_lists is not None:
        end = _of_head(problem.key_lists.end, batch, head, problem)
        keep = keep & (position < end if problem.is_causal else end > 0)
    if problem.mask is not None:
        keep = keep & _of_rows(_of_head(problem.mask, batch, head, problem), rows)
    return keep, visible


def _of_head(t: Tensor, batch: int, head: int, problem: Problem) -> Tensor:
    """The part of a ({B|1}, {H|HK|1}, ...) that a query head reads."""
    return t[batch if t.shape[0] > 1 else 0, head * t.shape[1] // problem.q.shape[2]]


def _of_rows(t: Tensor, rows: Tensor) -> Tensor:
    """These rows of a ({Sq|1}, {Sk|1}), on the CPU."""
    return (t[rows.to(t.device)] if t.shape[0] > 1 else t).cpu()


def _summary(drawn: _Rows) -> str:
    """How many keys are kept, and how few get half of the attention; or that there is NaN."""
    some = drawn.held > 0
    if not bool(some.any()):
        return "no key is kept"
    wrong = int((drawn.mass.isnan() & drawn.kept).any(-1).sum())
    if wrong > 0 and len(drawn.held) == 1:
        return "its probabilities are NaN"
    if wrong > 0:
        return f"NaN in {wrong} of the {len(drawn.held)} queries drawn (blue)"
    kept = float(drawn.held[some].double().mean())
    heavy = float(drawn.heavy[some].double().mean())
    if len(drawn.held) == 1:
        return f"{axes.keys(round(kept))} kept; half of the attention goes to {heavy:.0f} of them"
    noun = "key" if kept == 1 else "keys"
    return f"{kept:.4g} {noun} kept on average; half of the attention goes to {heavy:.3g} of them"


def _draw_matrix(ax: Any, drawn: _Rows, keys: Tensor, query_len: int) -> None:
    colors = axes.matplotlib_module("colors")
    ground = drawn.mass.new_ones(*drawn.mass.shape, 3)
    ground[drawn.visible] = ground.new_tensor(colors.to_rgb(axes.DROPPED))
    # NaN has no place in the colour scale.
    ground[drawn.kept & drawn.mass.isnan()] = ground.new_tensor(colors.to_rgb(axes.KEPT))
    key_len = int(keys[-1])
    how = {
        "extent": (-0.5, key_len - 0.5, query_len - 0.5, -0.5),
        "aspect": "equal" if query_len == key_len else "auto",
    }
    ax.imshow(ground.tolist(), **how)
    highest = float(drawn.mass.nan_to_num(0.0).max()) if drawn.mass.numel() else 1.0
    scale = colors.LogNorm(max(highest, 1e-30) * 1e-3, max(highest, 1e-30), clip=True)
    mass = torch.where(drawn.kept, drawn.mass, float("nan"))
    # From light yellow to dark brown: neither is taken for the grey of what is dropped.
    colours = colors.LinearSegmentedColormap.from_list("probability", _COLOURS)
    image = ax.imshow(mass.tolist(), cmap=colours, norm=scale, **how)
    block = axes.blocks(keys)
    of_what = "of a kept key" if block == "1 key" else f"of {block} together"
    ax.figure.colorbar(image, ax=ax, label=f"probability {of_what}", shrink=0.85, extend="min")
    ax.set(xlabel="key (white: hidden by causality, grey: dropped)", ylabel="query")


def _draw_row(ax: Any, drawn: _Rows, keys: Tensor) -> None:
    centre = ((keys[:-1] + keys[1:] - 1).double() / 2).tolist()
    mass, kept = drawn.mass[0].tolist(), drawn.kept[0].tolist()
    block = axes.blocks(keys)
    shown = [(x, p) for x, p, is_kept in zip(centre, mass, kept, strict=True) if is_kept]
    places, heights = [x for x, _ in shown], [p for _, p in shown]
    ax.vlines(places, 0, heights, color=axes.KEPT, lw=1.6, label="probability")
    highest = max((p for p in heights if not math.isnan(p)), default=1.0) or 1.0
    ax.plot(
        places,
        [-0.05 * highest] * len(places),
        ls="none",
        marker="|",
        ms=7,
        color=axes.MARKED,
        label="kept",
    )
    ax.axhline(0, color=axes.TEXT, lw=0.8)
    of_what = "probability" if block == "1 key" else f"probability of {block} together"
    ax.set(xlabel="key", ylabel=of_what, xlim=(-0.5, int(keys[-1]) - 0.5))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.18), ncols=2)
