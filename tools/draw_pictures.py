"""Draw the pictures of masks and attention that the documentation shows.

    python tools/draw_pictures.py [FOLDER]

From made-up scores and the sources of this repository, with fixed random numbers. FOLDER is
docs/assets unless given. Needs matplotlib.
"""

import sys
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
    """Six kinds of mask beside each other."""
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


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mask_kinds(folder / "plot_kinds.png")
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
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/assets")
