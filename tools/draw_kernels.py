"""Draw the pictures of the kernels that the documentation shows.

    python tools/draw_kernels.py [FOLDER]

They are a map of all kernels, two pictures of what runs at the same time in the kernels for Hopper,
and one of running top-w from the scores to the backward. Time axes are not to scale: their lengths
are chosen to be legible, none of them is measured. FOLDER is docs/assets unless given. Needs
matplotlib.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from torch import Tensor

import dmattn

ROOT = Path(__file__).parents[1]

# The colours of the pictures of masks (draw_pictures.py): blues, and orange for what moves.
DARK, MIDDLE, LIGHT = "#08519c", "#6baed6", "#c6dbef"
ABOVE_KEY = (0, 0.07, 1, 0.93)  # of a figure: left, bottom, width, height

GREY, EDGE, LINES, INK = "#e4e4e4", "#bbbbbb", "#777777", "#222222"
ORANGE, PALE_ORANGE = "#d94801", "#fdd0a2"


def ink_on(colour: str) -> str:
    return "white" if colour in (DARK, ORANGE) else INK


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)


def bare_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Axes without lines or ticks, in units of a tenth of an inch, with y growing downwards."""
    figure = plt.figure(figsize=(width, height))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, 10 * width), ylim=(10 * height, 0))
    ax.axis("off")
    return figure, ax


class Box(NamedTuple):
    """A box with words in it: the left upper corner, the extent, the words, the colour."""

    x: float
    y: float
    width: float
    height: float
    words: str
    colour: str

    @property
    def left(self) -> tuple[float, float]:
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> tuple[float, float]:
        return self.x + self.width, self.y + self.height / 2


def draw_box(ax: Axes, box: Box, fontsize: float = 10.5) -> None:
    """Draw a box. The first line of its words is a name, in bold; the others describe it."""
    shape = FancyBboxPatch(
        *((box.x, box.y), box.width, box.height),
        boxstyle="round,pad=0,rounding_size=0.8",
        facecolor=box.colour,
        edgecolor="none",
    )
    ax.add_patch(shape)
    name, _, rest = box.words.partition("\n")
    lines = rest.splitlines()
    step = fontsize / 72 * 10 * 1.32  # of a line
    y = box.y + box.height / 2 - step * len(lines) / 2
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": ink_on(box.colour)}
    middle = box.x + box.width / 2
    ax.text(middle, y, name, fontsize=fontsize, fontweight="bold", **style)
    for number, line in enumerate(lines, 1):
        ax.text(middle, y + step * number, line, fontsize=fontsize - 1, **style)


def draw_arrow(
    ax: Axes, start: tuple[float, float], stop: tuple[float, float], colour: str
) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "lw": 1.2, "shrinkA": 0, "shrinkB": 1}
    ax.annotate("", stop, start, arrowprops=style, zorder=0.5)  # behind the boxes that it passes


def add_key(figure: Figure, entries: Sequence[tuple[str, str]]) -> None:
    handles = [Patch(facecolor=c, edgecolor=EDGE, label=label) for c, label in entries]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False)


# --------------------------------------------------------------------------- the map

OPERATION_X, PLAN_X, BEFORE_X, KERNEL_X, AFTER_X = 2, 27, 51, 78, 112
OPERATION_WIDTH, PLAN_WIDTH, HELPER_WIDTH, KERNEL_WIDTH = 21, 19, 22, 29


def operation(y: float, name: str) -> Box:
    return Box(OPERATION_X, y, OPERATION_WIDTH, 5, name, PALE_ORANGE)


def plan(y: float, words: str) -> Box:
    return Box(PLAN_X, y, PLAN_WIDTH, 7, words, PALE_ORANGE)


def before(y: float, words: str, height: float = 5) -> Box:
    return Box(BEFORE_X, y, HELPER_WIDTH, height, words, GREY)


def after(y: float, words: str, height: float = 5) -> Box:
    return Box(AFTER_X, y, HELPER_WIDTH, height, words, GREY)


def kernel(y: float, words: str, colour: str, height: float = 7) -> Box:
    return Box(KERNEL_X, y, KERNEL_WIDTH, height, words, colour)


def kernel_map(path: Path) -> None:
    """The operations of the C interface, what the host decides for each, and its kernels."""
    figure, ax = bare_axes(13.6, 12.6)
    titles = {
        OPERATION_X + OPERATION_WIDTH / 2: "C interface (src/api)",
        PLAN_X + PLAN_WIDTH / 2: "plan (src/host)",
        BEFORE_X + HELPER_WIDTH / 2: "helpers before",
        KERNEL_X + KERNEL_WIDTH / 2: "selection, attention",
        AFTER_X + HELPER_WIDTH / 2: "helpers after",
    }
    for x, title in titles.items():
        ax.text(x, 3, title, ha="center", va="center", fontsize=11, color=INK)
    for y in (25, 36.5, 69.5, 95, 107.5):
        ax.plot([1, 135], [y, y], color=EDGE, lw=0.8, ls=":", zorder=0)

    select = operation(14, "dmattn_select_keys")
    select_plan = plan(13, "plan_select\none block, the grid,\nsegments or blocks")
    one_launch = kernel(6, "one_launch.cu\na single list, all blocks at once", LIGHT, 5)
    order = before(16.5, "order.cu\nscores as integers")
    grid = kernel(12, "grid.cu\nbest keys of a long row", LIGHT, 4.5)
    sets = kernel(17, "blocks.cu\nsingle lists; sets of a scan", LIGHT, 4.5)
    lists = after(16.5, "segments.cu, blocks.cu\nthe list of each row block")

    build = operation(29.5, "dmattn_build_key_lists")
    build_plan = plan(28.5, "plan_build_key_lists\nreach, room for the\nends of 32 keys each")
    intervals = kernel(29.5, "intervals.cu\nlists from given intervals", LIGHT, 5)

    bwd = operation(50, "dmattn_bwd")
    bwd_plan = plan(49, "plan_bwd\nwalk, unit, level,\nchunks, rounds, splits")
    preprocess = before(39, "preprocess.cu\ndelta, log-sum-exp")
    chunks = before(45.5, "chunk_key_lists.cu\nlists of row blocks\nput together", 6.5)
    schedule = before(53.5, "schedule.cu\nsplits of a list's tiles")
    pack = before(64, "pack.cu\nbits of a dense mask")
    compact = before(71, "compact.cu\nlist of a key mask")
    bwd90 = kernel(
        40,
        "sm90/bwd_kernel.cuh\nmasks, biases, windows, lists;\nabove 128: bwd_wide_kernel.cuh",
        DARK,
    )
    bwd80 = kernel(56, "sm80/bwd_kernel.cuh\neverything else, tiled or gathered", MIDDLE, 6)
    short = kernel(64, "sm80/short_*_kernel.cuh\nfew keys: one launch each way", MIDDLE, 5)
    convert = after(39, "convert_dq.cu\ndq rounded, in order")
    reduce = after(47.5, "reduce_dkv.cu\ndk, dv summed, rounded")
    dbias = after(56, "reduce_dbias.cu\nbias gradient summed")

    fwd = operation(80, "dmattn_fwd")
    fwd_plan = plan(79, "plan_fwd\nwalk, unit, level,\nsplits")
    fwd90 = kernel(72, "sm90/fwd_kernel.cuh\nmasks, biases, windows, packed", DARK, 5)
    gather90 = kernel(78, "sm90/gather_kernel.cuh\nlists of kept keys, bias per key", DARK, 5)
    fwd80 = kernel(84, "sm80/fwd_kernel.cuh\neverything else, tiled or gathered", MIDDLE, 5)
    decode = kernel(92.5, "sm80/decode_kernel.cuh\none query row, with its splits", MIDDLE, 5)
    combine = after(84, "combine.cu\nsplits put together")

    cache = operation(99.5, "dmattn_cache_append,\n_draft and _commit")
    cache_plan = plan(98.5, "plan_cache_*\nsplits, where there\nare queries")
    append = kernel(101, "append.cu, draft.cu\ntokens put in, or looked at first", LIGHT, 5)

    keys = operation(111.5, "dmattn_join_keys\ndmattn_keep_keys")
    keys_plan = plan(110.5, "plan_join_keys\nplan_keep_keys\nwords, thread blocks")
    moved = kernel(111.5, "join.cu, keep.cu\nkeys behind a state; keys that stay", LIGHT, 5)

    boxes = [value for value in locals().values() if isinstance(value, Box)]
    for box in boxes:
        draw_box(ax, box)
    others = (
        *((select, select_plan), (select_plan, one_launch), (select_plan, order), (order, grid)),
        *((order, sets), (grid, lists), (sets, lists)),
        *((build, build_plan), (build_plan, intervals)),
        *((cache, cache_plan), (cache_plan, decode), (cache_plan, append)),
        *((keys, keys_plan), (keys_plan, moved)),
    )
    backward = (
        *((bwd, bwd_plan), (bwd_plan, preprocess), (bwd_plan, chunks), (bwd_plan, schedule)),
        *((bwd_plan, pack), (bwd_plan, compact), (preprocess, bwd90), (preprocess, bwd80)),
        *((chunks, bwd90), (schedule, bwd80), (pack, bwd90), (pack, bwd80), (compact, bwd80)),
        *((bwd90, convert), (bwd90, reduce), (bwd90, dbias)),
        *((bwd80, convert), (bwd80, reduce), (bwd80, dbias)),
        *((bwd_plan, short), (short, dbias)),
    )
    forward = (
        *((fwd, fwd_plan), (fwd_plan, pack), (fwd_plan, compact), (fwd_plan, fwd90)),
        *((fwd_plan, gather90), (fwd_plan, fwd80), (fwd_plan, decode), (pack, fwd80)),
        *((pack, fwd90), (pack, decode), (compact, gather90), (compact, fwd80), (compact, decode)),
        *((fwd80, combine), (fwd_plan, short)),
    )
    for colour, pairs in ((LINES, others), (ORANGE, backward), (DARK, forward)):
        for start, stop in pairs:
            draw_arrow(ax, start.right, stop.left, colour)
    add_key(
        figure,
        (
            (DARK, "attention for Hopper (sm90)"),
            (MIDDLE, "attention for 8.0 and newer (sm80)"),
            (LIGHT, "selection, cache, keys"),
            (GREY, "helpers"),
            (PALE_ORANGE, "on the host"),
        ),
    )
    save(figure, path)


# ----------------------------------------------------------------- what runs beside what


class Span(NamedTuple):
    """Something that runs on a lane from `start` to `stop`, in units of the time axis."""

    lane: int
    start: float
    stop: float
    words: str
    colour: str


def draw_spans(ax: Axes, lanes: Sequence[str], spans: Sequence[Span], end: float) -> None:
    """Lanes from top to bottom, time from left to right."""
    for number in range(len(lanes)):
        ax.axhline(number, color=EDGE, lw=0.6, zorder=0)
    for span in spans:
        box = Rectangle(
            (span.start + 0.03, span.lane - 0.36),
            span.stop - span.start - 0.06,
            0.72,
            facecolor=span.colour,
            edgecolor="none",
        )
        ax.add_patch(box)
        ax.text(
            *((span.start + span.stop) / 2, span.lane, span.words),
            ha="center",
            va="center",
            color=ink_on(span.colour),
            fontsize=9,
        )
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set(xlim=(0, end), ylim=(len(lanes) - 0.4, -0.6), xticks=[])
    ax.set_xlabel("time (lengths are not to scale)")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def forward_pipeline(path: Path) -> None:
    """Four key blocks of one row block, with two consumers that take turns at the tensor cores."""
    lanes = ("producer: TMA", "tensor cores", "softmax, consumer 1", "softmax, consumer 2")
    loads = {"Q": 0.0, "K3": 1.5, "K2": 3.0, "V3": 4.5, "K1": 6.0, "V2": 7.5, "K0": 9.0, "V1": 10.5}
    loads |= {"V0": 14.0, "next Q": 19.0, "next K": 20.5}
    spans = [Span(0, at, at + 1.5, word, LIGHT) for word, at in loads.items()]
    for consumer, colour in enumerate((DARK, MIDDLE)):
        lane, first = 2 + consumer, 3.0 + consumer
        spans.append(Span(1, first, first + 1, "S3", colour))
        spans.append(Span(lane, first + 1, first + 3, "softmax 3", PALE_ORANGE))
        for step in range(3):
            at = 6.0 + 4 * step + 2 * consumer
            spans.append(Span(1, at, at + 1, f"S{2 - step}", colour))
            spans.append(Span(1, at + 1, at + 2, f"P{3 - step} V{3 - step}", colour))
            spans.append(Span(lane, at + 1, at + 3, f"softmax {2 - step}", PALE_ORANGE))
        at = 18.0 + consumer
        spans.append(Span(1, at, at + 1, "P0 V0", colour))
        spans.append(Span(lane, at + 1, at + 2.5, "out", GREY))
    figure, ax = plt.subplots(figsize=(12.0, 4.0), layout=ConstrainedLayoutEngine(rect=ABOVE_KEY))
    draw_spans(ax, lanes, spans, 22.2)
    ax.set_title("forward on Hopper: a row block with four key blocks, last first", loc="left")
    add_key(figure, ((DARK, "products of consumer 1"), (MIDDLE, "products of consumer 2")))
    save(figure, path)


def backward_pipeline(path: Path) -> None:
    """Two steps of one consumer."""
    lanes = ("producer", "tensor cores", "registers", "dS to shared memory", "dQ to memory")
    width = 7.0
    spans = []
    for step in range(2):
        at, this, last = width * step, step + 2, step + 1
        spans += [
            Span(0, at, at + 1.7, f"Q{this + 1}, lse", LIGHT),
            Span(0, at + 1.7, at + 3.4, f"dO{this + 1}, delta", LIGHT),
            Span(1, at, at + 1.0, f"S{this}", DARK),
            Span(1, at + 1.0, at + 2.4, f"dK += dS{last} Q{last}", MIDDLE),
            Span(1, at + 2.4, at + 3.4, f"dP{this}", DARK),
            Span(1, at + 3.4, at + 5.0, f"dV += P{this} dO{this}", MIDDLE),
            Span(1, at + 5.6, at + 7.0, f"dQ{this} = dS{this} K", DARK),
            Span(2, at, at + 1.0, f"add dQ{last}", GREY),
            Span(2, at + 1.0, at + 3.4, f"P{this} = exp2(S{this} - lse)", PALE_ORANGE),
            Span(2, at + 3.4, at + 4.9, f"dS{this}", PALE_ORANGE),
            Span(3, at + 4.9, at + 5.6, f"dS{this}", LIGHT),
            Span(4, at + 0.5, at + 2.4, f"dQ{last}", GREY),
        ]
    figure, ax = plt.subplots(figsize=(12.0, 4.3), layout=ConstrainedLayoutEngine(rect=ABOVE_KEY))
    draw_spans(ax, lanes, spans, 2 * width + 0.2)
    title = "backward on Hopper: two steps of one consumer, blocks of rows 2 and 3"
    ax.set_title(title, loc="left")
    add_key(
        figure,
        (
            (DARK, "products whose result is read in this step"),
            (MIDDLE, "products that go on adding to dK and dV"),
        ),
    )
    save(figure, path)


# --------------------------------------------------------------------------- running top-w


# Sizes as in the kernels, only smaller: rows and keys of the sequence, keys that a row keeps, rows
# of a list, rows of a step of the backward, keys of a tile.
LENGTH, WINDOW, LIST_ROWS, STEP_ROWS, TILE_KEYS = 64, 16, 8, 4, 8
CHUNK = slice(32, 64)  # the rows of a chunk: those of four lists


def draw_lists(ax: Axes, lists: Sequence[Sequence[tuple[int, str]]], names: Sequence[str]) -> None:
    """Draw one line for each list: its keys, each in its colour."""
    for line, entries in enumerate(lists):
        for place, (key, colour) in enumerate(entries):
            ax.add_patch(Rectangle((place, line + 0.1), 0.94, 0.8, facecolor=colour))
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
            ax.text(place + 0.47, line + 0.5, str(key), color=ink_on(colour), **style)
    ax.set(xlim=(0, max(map(len, lists))), ylim=(len(lists), 0), xticks=[])
    ax.set_yticks([line + 0.5 for line in range(len(lists))], names)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def list_of(keep: Tensor, rows: slice) -> list[tuple[int, str]]:
    """The keys that any of these rows keeps, with colours: those that all rows keep come first."""
    seen, by_all = keep[rows].any(0), keep[rows].all(0)
    full = [(int(key), DARK) for key in by_all.nonzero()]
    return full + [(int(key), MIDDLE) for key in (seen & ~by_all).nonzero()]


def keys_of_chunk(keep: Tensor) -> list[int]:
    """The keys of the chunk as they are found: those of its first list, then of the later rows."""
    listed = [key for key, _ in list_of(keep, slice(CHUNK.start, CHUNK.start + LIST_ROWS))]
    new = range(CHUNK.start + LIST_ROWS, CHUNK.stop)
    return listed + [key for key in new if keep[key, key]]


def in_order(keep: Tensor, keys: Sequence[int]) -> list[int]:
    """These keys in the order in which the backward takes them.

    They are sorted by the quarter of the chunk that first sees a key, then by the last block of
    rows that sees it, then by the first one.
    """
    seen = keep[CHUNK].view(-1, STEP_ROWS, LENGTH).any(1)
    blocks = {key: seen[:, key].nonzero().flatten().tolist() for key in keys}
    quarter = len(seen) // 4
    return sorted(
        keys, key=lambda key: (blocks[key][0] // quarter, blocks[key][-1], blocks[key][0])
    )


def draw_chunk(ax: Axes, keep: Tensor, keys: Sequence[int]) -> None:
    """Draw which of these keys the chunk's rows keep, with a frame around each tile of keys.

    A frame reaches from the first to the last block of rows that keeps any key of the tile.
    """
    rows = keep[CHUNK][:, list(keys)]
    options: dict[str, Any] = {"cmap": "Blues", "vmin": 0, "vmax": 1.3, "aspect": "auto"}
    extent = (0, len(keys), CHUNK.stop, CHUNK.start)
    ax.imshow(rows, extent=extent, interpolation="nearest", **options)
    for first in range(0, len(keys), TILE_KEYS):
        tile = rows[:, first : first + TILE_KEYS]
        width = tile.shape[1]
        seen = tile.reshape(-1, STEP_ROWS, width).any(2).any(1).nonzero().flatten()
        top = CHUNK.start + STEP_ROWS * int(seen[0])
        height = STEP_ROWS * int(seen[-1] - seen[0] + 1)
        frame = ((first + 0.1, top + 0.2), width - 0.2, height - 0.4)
        ax.add_patch(Rectangle(*frame, fill=False, edgecolor=ORANGE, lw=2))
    ax.set_xticks([place + 0.5 for place in range(len(keys))], [str(key) for key in keys])
    ax.tick_params(axis="x", labelsize=6, length=0)
    ax.set_yticks(range(CHUNK.start, CHUNK.stop + 1, LIST_ROWS))
    ax.set(xlabel="key", ylabel="query row")


def top_w_stages(path: Path) -> None:
    """A small sequence on its way from scores to the backward: what each stage hands on."""
    scores = torch.randn(1, 1, LENGTH, generator=torch.Generator().manual_seed(3))
    scores = scores + 0.03 * torch.arange(LENGTH)  # so that later keys displace earlier ones
    keep = dmattn.select_keys(scores, WINDOW).to_mask()[0, 0]
    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12)
    figure, axes = plt.subplots(2, 2, figsize=(13.0, 9.4), layout=layout)
    (mask, lists), (chunk, items) = axes
    mask.imshow(keep, cmap="Blues", vmin=0, vmax=1.3, extent=(0, LENGTH, LENGTH, 0), aspect="auto")
    for row in range(LIST_ROWS, LENGTH, LIST_ROWS):
        mask.axhline(row, color=ORANGE, lw=0.8)
    mask.set(xlabel="key", ylabel="query row")
    mask.set_title(f"1  selection: each row keeps {WINDOW} keys at most", loc="left")
    blocks = [slice(start, start + LIST_ROWS) for start in range(0, LENGTH, LIST_ROWS)]
    names = [f"rows {block.start}-{block.stop - 1}" for block in blocks]
    draw_lists(lists, [list_of(keep, block) for block in blocks], names)
    lists.set_title("2  lists, as the forward reads them (dark: kept by all rows)", loc="left")
    found = keys_of_chunk(keep)
    draw_chunk(chunk, keep, found)
    chunk.set_title("3  chunk: the keys of four lists, put together", loc="left")
    draw_chunk(items, keep, in_order(keep, found))
    items.set_title("4  backward: sorted; each frame is an item", loc="left")
    save(figure, path)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kernel_map(folder / "kernels_map.png")
    forward_pipeline(folder / "kernels_forward.png")
    backward_pipeline(folder / "kernels_backward.png")
    top_w_stages(folder / "kernels_top_w.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs/assets")
    main(parser.parse_args().folder)
