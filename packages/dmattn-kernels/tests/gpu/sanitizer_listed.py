"""Launches of Hopper's kernels over lists of keys, for sanitizer_cases.py.

Forward: last tiles of 32, 64 and more keys, lists without keys, and more row blocks than thread
blocks. Backward: with and without a bias, deterministic or not, and with several row blocks in a
chunk.
"""

from __future__ import annotations

from gpu.sanitizer_launch import Launch
from gpu.sanitizer_selection import Selecting

# More row blocks than thread blocks, which then pass from one list to the next.
MANY_LISTS = Launch(
    "listed rows, more than thread blocks",
    *(260, 260, 16, 4, 2),
    bias="bk1k",
    causal=True,
    wants="",
    select=Selecting(110),
)
HOPPER_LISTS = (
    Launch(
        "listed rows, running top-w",
        *(300, 300, 2, 4, 2),
        bias="bk1k",
        causal=True,
        wants="",
        select=Selecting(100),
    ),
    Launch("listed rows, no bias", *(300, 300), causal=True, wants="", select=Selecting(150)),
    MANY_LISTS,
    Launch(
        "listed rows, key mask, more than thread blocks",
        *(133, 300, 35, 4, 2),
        mask="bk1k",
        causal=True,
        wants="",
    ),
    # Lists too long for two thread blocks on an SM at head_dim 64, and too many rows for the decode
    # kernel.
    Launch("listed rows, long lists", *(40, 2100, 27, 4, 2), mask="bk1k", splits=1, wants=""),
    Launch(
        "listed rows, long lists, bias",
        *(40, 2100, 27, 4, 2),
        mask="bk1k",
        bias="bk1k",
        splits=1,
        wants="",
    ),
    # Lists that are split, so that each thread block has a share of one.
    Launch(
        "listed rows, split lists",
        *(133, 900, 2, 4, 2),
        mask="bk1k",
        causal=True,
        splits=3,
        wants="",
    ),
    Launch(
        "listed rows, split lists, bias",
        *(200, 700, 1, 4, 2),
        bias="bk1k",
        causal=True,
        splits=2,
        wants="",
        select=Selecting(300),
    ),
    Launch(
        "listed rows, split lists, shares without keys",
        *(130, 500, 2, 4, 2),
        mask="b11k",
        kept=0.1,
        bias="bk1k",
        splits=4,
        wants="",
    ),
    Launch(
        "listed rows, split lists, more than thread blocks",
        *(133, 700, 20, 4, 2),
        mask="bk1k",
        splits=2,
        wants="",
    ),
    Launch("listed rows without keys", 130, 200, mask="b11k", kept=0.0, bias="bk1k", wants=""),
    Launch(
        "listed rows, top-w of all keys, fp32 bias",
        *(90, 300, 2, 4, 2),
        bias="1h1k",
        bias_f32=True,
        wants="",
        select=Selecting(230, "bh"),
    ),
)


def _in_any_order_and_in_a_fixed_one(
    name: str, lengths: tuple[int, int] = (300, 320), window: int = 100
) -> tuple[Launch, ...]:
    """Three launches with sums in any order, and the same three with sums in a fixed order.

    The first one has no bias, the second a bias of each kv head, the third one of each query head.
    """
    return tuple(
        Launch(
            f"{name}{', deterministic' * turns}{_BIAS_IN_WORDS[bias]}",
            *(*lengths, 2, 4, 2),
            bias=bias,
            causal=True,
            deterministic=turns,
            select=Selecting(window, fill="odd"),
        )
        for turns in (False, True)
        for bias in ("", "bk1k", "bh1k")
    )


_BIAS_IN_WORDS = {"": "", "bk1k": ", bias", "bh1k": ", bias of each head"}

HOPPER_LIST_GRADIENTS = (
    *_in_any_order_and_in_a_fixed_one("listed rows, gradients"),
    # All rows are in one row block. Without a bias of each query head its tiles write dk and dv
    # themselves, and the gradients of keys that no row sees are cleared.
    *_in_any_order_and_in_a_fixed_one("listed rows, gradients of one block", (100, 140), 30),
    Launch("listed rows, gradients, key mask", *(300, 320, 2, 4, 2), mask="bk1k", causal=True),
    Launch("listed rows, gradients, masks of heads", *(300, 320, 2, 4, 2), mask="bh1k"),
    # In a fixed order over the mask's list, by chunks of it; the two above go tile by tile.
    Launch(
        "listed rows, gradients, key mask, deterministic",
        *(300, 320, 2, 4, 2),
        mask="bk1k",
        causal=True,
        deterministic=True,
    ),
)
# Above head_dim 128 two thread blocks share a tile of a list. The second one may have no keys.
HOPPER_WIDE_LIST_GRADIENTS = (
    *_in_any_order_and_in_a_fixed_one("listed rows, wide heads"),
    Launch(
        "listed rows, wide heads, one block's keys",
        *(200, 200, 1, 4, 1),
        bias="1k1k",
        bias_f32=True,
        causal=True,
        select=Selecting(20),
    ),
    Launch("listed rows, wide heads, key mask", 133, 300, 2, 4, 2, mask="bk1k", bias="bk1k"),
    # Row blocks that add to dk and dv in turn.
    Launch(
        "listed rows, wide heads, key mask, deterministic",
        *(133, 300, 2, 4, 2),
        mask="bk1k",
        bias="bk1k",
        deterministic=True,
    ),
    Launch(
        "listed rows, wide heads, row blocks together",
        *(300, 300, 35, 8, 4),
        bias="1k1k",
        causal=True,
        select=Selecting(140),
    ),
)
# So many tiles that two row blocks make a chunk, and that a thread block has several items.
MANY_GRADIENTS = Launch(
    "listed rows, gradients, two row blocks together",
    *(300, 300, 35, 8, 4),
    bias="1k1k",
    causal=True,
    deterministic=True,
    select=Selecting(140),
)
# So many tiles of a mask's lists that each of them has all rows, and writes dk and dv itself.
WHOLE_GRADIENTS = Launch(
    "listed rows, gradients, tiles with all rows",
    *(70, 133, 50, 32, 16),
    mask="bk1k",
    causal=True,
)
HOPPER_LIST_KINDS = (
    *(("bf16", 64), ("f16", 128), ("f16", 40), ("bf16", 72)),
    *(("bf16", 192), ("f16", 136), ("bf16", 256), ("f16", 200)),
)
