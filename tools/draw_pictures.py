"""Draw the pictures of masks and attention that the documentation shows.

    python tools/draw_pictures.py [FOLDER]

Scores are made up, from fixed random numbers; the text in the pictures is taken from the sources of
this repository. FOLDER is docs/assets unless given. Needs matplotlib.
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot as plt
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from torch import Tensor

import dmattn
from dmattn import plot

ROOT = Path(__file__).parents[1]
LENGTH = 96


def scores(length: int, seed: int = 0) -> Tensor:
    """(1, 1, length): scores with some stretches that matter more than others."""
    generator = torch.Generator().manual_seed(seed)
    slow = torch.randn(1, 1, max(2, length // 12), generator=generator)
    slow = torch.nn.functional.interpolate(slow, length, mode="linear")
    return slow + 0.7 * torch.randn(1, 1, length, generator=generator)


def mask_kinds(path: Path) -> None:
    """Six kinds of mask side by side."""
    generator = torch.Generator().manual_seed(1)
    every = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    per_key = (scores(LENGTH, 3) > 0.6)[:, :, None]
    block = torch.rand(12, 12, generator=generator) < 0.35
    dense = block.repeat_interleave(8, 0).repeat_interleave(8, 1)
    drawn: tuple[tuple[str, dmattn.KeySelection | Tensor, bool], ...] = (
        ("is_causal=True", every, True),
        ("attn_mask per key", per_key.expand(1, 1, LENGTH, LENGTH), False),
        ("attn_mask with rows", dense, False),
        ("selection=sliding_window(96, 16)", dmattn.sliding_window(LENGTH, 16), True),
        ("selection=packed_documents(...)", dmattn.packed_documents([0, 20, 55, LENGTH]), True),
        ("window_size=16", dmattn.select_keys(scores(LENGTH, 12), 16), True),
    )
    layout = ConstrainedLayoutEngine(h_pad=0.12)  # room for the titles of the second row
    figure, axes = plt.subplots(2, 3, figsize=(10.5, 7.6), layout=layout)
    for ax, (name, keep, is_causal) in zip(axes.flat, drawn, strict=True):
        plot.mask(keep, is_causal=is_causal, ax=ax)
        ax.set_title(name, loc="left", family="monospace", fontsize=10)
        legend = ax.get_legend()
        if legend is not None:
            legend.remove()
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="#bbbbbb", label=label)
        for colour, label in (
            ("#08519c", "kept"),
            ("#e4e4e4", "dropped"),
            ("#ffffff", "hidden by causality"),
        )
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def state_scan(path: Path, ranks: int = 8) -> None:
    """The rounds in which ranks send their states to others, and whose keys each state covers."""
    figure, ax = plt.subplots(figsize=(9.0, 4.2), layout="constrained")
    rounds = (ranks - 1).bit_length()
    for number in range(rounds + 1):
        for rank in range(ranks):
            first = max(0, rank - 2**number + 1)
            knows = f"{first}" if first == rank else f"{first}-{rank}"
            if number == rounds:
                knows = "none" if rank == 0 else ("0" if rank == 1 else f"0-{rank - 1}")
            colour = "#08519c" if number == rounds else "#6baed6"
            ax.text(
                *(rank, -number, knows),
                ha="center",
                va="center",
                color="white",
                bbox={"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": "none"},
            )
            to = rank + 2**number
            if number < rounds and to < ranks:
                arrow = {"arrowstyle": "-|>", "color": "#d94801", "shrinkA": 11, "shrinkB": 11}
                ax.annotate("", (to, -number - 1), (rank, -number), arrowprops=arrow)
    names = ["own stretch", *(f"after round {number}" for number in range(1, rounds))]
    ax.set_yticks([-number for number in range(rounds + 1)], [*names, "start state"])
    ax.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.set(xlim=(-0.6, ranks - 0.4), ylim=(-rounds - 0.5, 0.5))
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_title("whose keys each state is the best of; arrows: states sent", loc="left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def stretches(path: Path, length: int = 96, cut: int = 48, window: int = 12) -> None:
    """A whole sequence, and beside it its last stretch behind the state of the keys before it."""
    drawn = torch.randn(1, 1, length, generator=torch.Generator().manual_seed(4))
    drawn = drawn + 0.02 * torch.arange(length)  # so that later keys displace earlier ones
    keep = dmattn.select_keys(drawn, window).to_mask()[0, 0]
    state = keep[cut - 1].nonzero().flatten()
    columns = torch.cat((state, torch.arange(cut, length)))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10.0, 4.6), layout="constrained", width_ratios=(length, len(columns))
    )
    options: dict[str, Any] = {"cmap": "Blues", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    left.imshow(keep, extent=(0, length, length, 0), **options)
    left.axhline(cut, color="#d94801")
    left.plot(state + 0.5, torch.full_like(state, cut), "v", color="#d94801", ms=6)
    left.set_title(f"a sequence: each query keeps {window} keys", loc="left")
    wide = (-len(state), length - cut, length, cut)
    right.imshow(keep[cut:, columns], extent=wide, **options)
    right.axvline(0, color="#d94801")
    right.set_title("its last stretch behind a state", loc="left")
    ticks = range(0, length - cut, 20)
    right.set_xticks([-len(state) / 2, *ticks], ["state", *(str(cut + tick) for tick in ticks)])
    for ax in (left, right):
        ax.set(xlabel="key", ylabel="query")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mask_kinds(folder / "plot_kinds.png")
    state_scan(folder / "plot_state_scan.png")
    stretches(folder / "plot_stretches.png")
    plot.mask(dmattn.select_keys(scores(200, 12), 32), path=folder / "plot_mask.png")

    long = dmattn.select_keys(scores(100_000, 2), 2048)
    plot.mask(long, path=folder / "plot_mask_long.png")
    plot.lifetimes(dmattn.select_keys(scores(600, 2), 64), path=folder / "plot_lifetimes.png")

    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(1, 150, heads, 32, generator=generator) for heads in (4, 2))
    window: dict[str, Any] = {"attn_bias": scores(150, 5), "window_size": 24, "is_causal": True}
    plot.attention(2 * q, k, head=1, path=folder / "plot_attention.png", **window)
    plot.attention(2 * q, k, head=1, row=140, path=folder / "plot_attention_row.png", **window)

    text = (ROOT / "packages/dmattn/src/dmattn/key_lists.py").read_text()[:640]
    value = scores(len(text), 6)
    kept = dmattn.select_keys(value, 64).end[0, 0] == len(text)
    plot.token_scores(list(text), value[0, 0], kept, path=folder / "plot_tokens.png")
    plt.close("all")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs/assets")
    main(parser.parse_args().folder)
