"""Launches of Hopper's dense kernels, forward and backward, for sanitizer_cases.py."""

from __future__ import annotations

from gpu.sanitizer_launch import Launch

# Hopper's dense forward has kernels for more head-dim tiles than the sm80 code, and one for calls
# with few rows.
HOPPER = (
    Launch("dense rows", 70, 133, wants=""),
    Launch("dense rows, long", 1100, 133, causal=True, wants=""),
    Launch("dense rows, more than thread blocks", 133, 133, batch=70, causal=True, wants=""),
    Launch("dense rows without keys", 250, 140, causal=True, wants=""),
    Launch("dense rows, split keys", 133, 700, causal=True, wants=""),
    # For wide heads: with so few keys their usual tiles would be empty in good part.
    Launch("dense rows, few keys of many rows", 250, 124, wants=""),
)
# Tile shapes of head_dim 64 that the others do not use: sm90_fwd_shape() in sm90_fwd_times.h.
HOPPER_SHAPES = (
    Launch("dense rows, tall", 192, 300, batch=33, nheads=4, nheads_k=2, wants=""),
    Launch("dense rows, tall, causal", 192, 300, 33, nheads=4, nheads_k=2, causal=True, wants=""),
    Launch("dense rows, short", 200, 250, causal=True, wants=""),
)
HOPPER_KINDS = [
    (dtype, head_dim) for dtype in ("bf16", "f16") for head_dim in (64, 96, 128, 192, 256)
]
# Scores that a bias, a mask or softcap change. Rows of the bias start on 16 bytes. The keys of most
# of these launches are not split, as they are few, or as there are more blocks of rows than SMs.
HOPPER_CHANGED = (
    Launch(
        "dense rows, mask, fp32 bias", 200, 264, mask="bhqk", bias="11qk", bias_f32=True, wants=""
    ),
    Launch(
        "dense rows, mask, softcap, bias", 133, 328, mask="1hqk", bias="bhqk", softcap=3.0, wants=""
    ),
    Launch(
        "dense rows, key bias, softcap", 150, 40, bias="bk1k", causal=True, softcap=3.0, wants=""
    ),
    Launch(
        "dense rows, key bias, more than thread blocks", 133, 261, batch=70, bias="bk1k", wants=""
    ),
    Launch("dense rows, mask, more than thread blocks", 133, 261, batch=70, mask="b1qk", wants=""),
    # At head_dim 64 this has three consumers.
    Launch("dense rows, bias, long", 1100, 264, bias="1hqk", causal=True, wants=""),
)
# A bias for each key and nothing else has a kernel for each head dimension.
HOPPER_KEY_BIAS = (
    Launch("dense rows, key bias, long", 1100, 261, bias="bk1k", causal=True, wants=""),
)
# The same with keys that are split, so that a thread block has a share of them. For split keys
# without a mask, a bias or softcap there is a launch in HOPPER.
HOPPER_CHANGED_SPLIT = (
    Launch("dense rows, split keys, mask", 133, 700, mask="bhqk", splits=3, wants=""),
    Launch(
        "dense rows, split keys, mask that leaves shares nothing",
        *(133, 700, 2),
        mask="b1qk",
        kept=0.0001,
        splits=5,
        wants="",
    ),
    Launch("dense rows, split keys, bias", 200, 520, bias="1hqk", causal=True, splits=3, wants=""),
    Launch("dense rows, split keys, odd bias", 133, 517, 2, bias="bhqk", splits=2, wants=""),
    Launch(
        "dense rows, split keys, fp32 bias, mask",
        *(133, 648),
        mask="11qk",
        bias="11qk",
        bias_f32=True,
        splits=4,
        wants="",
    ),
    Launch("dense rows, split keys, key bias", 150, 645, bias="bk1k", splits=3, wants=""),
    Launch(
        "dense rows, split keys, key bias, rows without keys",
        *(300, 200, 2),
        bias="bh1k",
        causal=True,
        splits=2,
        wants="",
    ),
    Launch(
        "dense rows, split keys, softcap", 133, 700, causal=True, softcap=3.0, splits=4, wants=""
    ),
    Launch(
        "dense rows, split keys, mask, softcap, bias",
        *(133, 584),
        mask="1hqk",
        bias="bhqk",
        softcap=3.0,
        splits=3,
        wants="",
    ),
    Launch(
        "dense rows, split keys, mask, more than thread blocks",
        *(133, 517, 40),
        mask="b1qk",
        splits=2,
        wants="",
    ),
)
HOPPER_BWD = (
    Launch("dense rows, gradients", 200, 133, nheads=4, nheads_k=2, causal=True),
    Launch("dense rows, deterministic gradients", 300, 261, causal=True, deterministic=True),
    Launch("dense rows, softcap", 200, 133, softcap=3.0),
    Launch("dense rows, gradients, more than thread blocks", 133, 133, batch=70, causal=True),
    # A single tile has all keys, so that its kernel writes dq itself. The tile's heads and rows may
    # fall into parts for several thread blocks, most of all in the long launch.
    Launch("dense rows, few keys", 200, 77, nheads=4, nheads_k=2),
    Launch("dense rows, few keys, causal", 100, 128, batch=70, causal=True),
    Launch("dense rows, few keys, long", 2100, 100, nheads=4, nheads_k=1),
    Launch("dense rows, few keys, mask", 200, 77, 2, 4, 2, mask="bkqk"),
    Launch("dense rows, few keys, key mask, causal", 100, 128, 3, 4, 2, mask="b11k", causal=True),
    Launch("dense rows, few keys, mask that keeps little", 133, 66, 2, mask="bhqk", kept=0.002),
    # Rows of the bias and of its gradient that start on 16 bytes.
    Launch("dense rows, bias", 200, 264, 2, 4, 2, bias="bhqk", causal=True),
    Launch("dense rows, shared bias", 133, 264, 2, 4, 2, bias="1kqk"),
    # At head_dim 64 two heads or batches that share a bias have one thread block, unless other
    # thread blocks would then have no work at the end.
    Launch("dense rows, bias of two batches", 133, 264, 2, 34, 34, bias="1hqk"),
    Launch("dense rows, bias of many heads", 70, 264, 2, 68, 34, bias="11qk"),
    Launch("dense rows, fp32 bias", 200, 264, 2, 4, 2, bias="bhqk", bias_f32=True, causal=True),
    Launch("dense rows, shared fp32 bias", 133, 264, 2, 4, 2, bias="1kqk", bias_f32=True),
    Launch("dense rows, key bias", 200, 261, 2, 4, 2, bias="bk1k", causal=True),
    Launch("dense rows, key bias of each head", 200, 261, 2, 6, 2, bias="bh1k", causal=True),
    Launch("dense rows, mask", 200, 261, 2, 4, 2, mask="bkqk", causal=True),
    Launch("dense rows, mask, bias", 200, 264, 2, 4, 2, mask="1hqk", bias="bhqk"),
    # Beside a bias with rows the keys of a mask are not listed.
    Launch("dense rows, key mask, bias", 200, 264, 2, 4, 2, mask="b11k", bias="1hqk"),
    Launch(
        "dense rows, key mask, fp32 bias",
        *(200, 390, 2, 4, 2),
        mask="bk1k",
        bias="bhqk",
        bias_f32=True,
        causal=True,
    ),
    Launch(
        "dense rows, key mask that keeps nothing, fp32 bias",
        *(70, 264, 2, 4, 2),
        mask="b11k",
        kept=0.0,
        bias="bhqk",
        bias_f32=True,
    ),
    # Blocks of keys take turns at dq; tiles that a mask leaves out are passed over.
    Launch(
        "dense rows, mask, deterministic",
        *(200, 645, 2, 4, 2),
        mask="bkqk",
        kept=0.0001,
        causal=True,
        deterministic=True,
    ),
    Launch(
        "dense rows, mask, bias, deterministic",
        *(200, 520, 2, 4, 2),
        mask="1hqk",
        kept=0.0001,
        bias="bhqk",
        deterministic=True,
    ),
    Launch(
        "dense rows, key mask, fp32 bias, deterministic",
        *(200, 392, 2, 4, 2),
        mask="bk1k",
        kept=0.01,
        bias="bhqk",
        bias_f32=True,
        deterministic=True,
    ),
    # They also take turns at the gradient of a bias that heads of a group and batches share.
    Launch(
        "dense rows, shared bias, deterministic",
        *(200, 264, 3, 4, 2),
        bias="11qk",
        mask="11qk",
        kept=0.0001,
        causal=True,
        deterministic=True,
    ),
    Launch(
        "dense rows, shared fp32 bias, deterministic",
        *(200, 264, 3, 4, 2),
        bias="1kqk",
        bias_f32=True,
        mask="111k",
        deterministic=True,
    ),
    Launch(
        "dense rows, key bias, deterministic",
        *(200, 261, 2, 4, 1),
        bias="bk1k",
        causal=True,
        deterministic=True,
    ),
    # The gradient of the bias is summed apart from it, as its rows have an odd number of keys and
    # four scores share each entry.
    Launch("dense rows, shared fp32 bias, odd", 70, 261, 2, 4, 2, bias="11qk", bias_f32=True),
    # More rows than stay in L2, and twice as many pairs of blocks of keys as an H200 has SMs.
    Launch("dense rows, groups, keys two by two", 256, 256, 132, 4, 2, causal=True),
)
# Above head_dim 128 two thread blocks share a tile of keys. The launches have rows without keys,
# keys for one thread block only, and many heads, among others.
HOPPER_WIDE_BWD = (
    Launch("wide heads, gradients", 200, 133, nheads=4, nheads_k=2, causal=True),
    Launch("wide heads, one block's keys", 70, 60, nheads=2, nheads_k=1),
    Launch("wide heads, rows without keys", 150, 40, causal=True),
    Launch("wide heads, keys without rows", 40, 300, causal=True),
    Launch("wide heads, more than thread blocks", 133, 133, batch=70, causal=True),
    Launch("wide heads, softcap", 200, 133, nheads=4, nheads_k=2, softcap=3.0),
    Launch("wide heads, deterministic", 300, 261, causal=True, deterministic=True),
    # A block of keys falls into parts, each of some heads.
    Launch(
        "wide heads, deterministic, few keys",
        *(200, 77),
        nheads=8,
        nheads_k=1,
        softcap=3.0,
        deterministic=True,
    ),
    Launch("wide heads, softcap, keys without rows", 40, 300, causal=True, softcap=3.0),
    Launch("wide heads, mask", 200, 261, 2, 4, 2, mask="bkqk", causal=True),
    Launch("wide heads, mask of few tiles", 200, 645, 2, 4, 2, mask="bhqk", kept=0.0001),
    Launch("wide heads, mask, bias", 200, 264, 2, 4, 2, mask="1hqk", bias="bhqk"),
    # Rows of the bias that TMA does not take, and sums of its gradient, whose rows TMA takes.
    Launch("wide heads, odd bias", 133, 261, 2, 4, 2, bias="bhqk", causal=True),
    Launch("wide heads, odd shared bias", 133, 261, 2, 4, 2, bias="1kqk"),
    Launch("wide heads, bias of two batches", 70, 264, 2, 4, 2, bias="1hqk"),
    Launch(
        "wide heads, key mask, fp32 bias",
        *(200, 391, 2, 4, 2),
        mask="bk1k",
        bias="bhqk",
        bias_f32=True,
        causal=True,
    ),
    Launch("wide heads, shared fp32 bias", 133, 264, 2, 4, 2, bias="11qk", bias_f32=True),
    Launch("wide heads, key bias", 200, 261, 2, 4, 2, bias="bk1k", causal=True),
    Launch("wide heads, key bias of each head", 200, 261, 2, 6, 2, bias="1h1k", causal=True),
    Launch("wide heads, key bias, mask", 133, 300, 2, 4, 2, bias="bk1k", mask="11qk", kept=0.01),
    Launch(
        "wide heads, mask, deterministic",
        *(200, 645, 2, 4, 2),
        mask="bhqk",
        kept=0.0001,
        causal=True,
        deterministic=True,
    ),
    Launch(
        "wide heads, mask, bias, deterministic",
        *(200, 520, 2, 4, 2),
        mask="1hqk",
        kept=0.0001,
        bias="bhqk",
        deterministic=True,
    ),
    Launch(
        "wide heads, key mask, shared fp32 bias, deterministic",
        *(133, 392, 2, 4, 4),
        mask="bk1k",
        kept=0.01,
        bias="11qk",
        bias_f32=True,
        deterministic=True,
    ),
    # The parts of a block of keys add to the gradient of its bias in turn.
    Launch(
        "wide heads, key bias, deterministic",
        *(200, 77, 2, 8, 1),
        bias="bk1k",
        deterministic=True,
    ),
)
HOPPER_SHAPE_KINDS = [kind for kind in HOPPER_KINDS if kind[1] == 64]
HOPPER_CHANGED_KINDS = [kind for kind in HOPPER_KINDS if kind[1] in (64, 128, 256)]
HOPPER_SPLIT_KINDS = [kind for kind in HOPPER_KINDS if kind[1] in (64, 128, 192, 256)]
HOPPER_BWD_KINDS = [kind for kind in HOPPER_KINDS if kind[1] in (64, 128)]
HOPPER_WIDE_KINDS = [kind for kind in HOPPER_KINDS if kind[1] > 128]
