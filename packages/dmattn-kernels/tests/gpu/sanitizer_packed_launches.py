"""Launches over packed sequences, for sanitizer_cases.py."""

from __future__ import annotations

from gpu.sanitizer_launch import Launch

# Sequences packed one behind the other: tile edges, no rows, no keys, nothing at all.
LENGTHS = ((70, 133), (0, 5), (129, 64), (1, 1), (0, 0), (3, 0), (40, 130))
PACKED = (
    Launch("packed", nheads=4, nheads_k=2, causal=True, dlse=True, packed=LENGTHS),
    Launch(
        "packed, key bias, deterministic",
        nheads=4,
        nheads_k=2,
        bias="1k1k",
        causal=True,
        deterministic=True,
        packed=LENGTHS,
    ),
    Launch("packed, dense mask and bias", mask="1hqk", bias="1hqk", packed=LENGTHS),
    Launch("packed, key mask", nheads=4, nheads_k=2, mask="1k1k", bias="1k1k", packed=LENGTHS),
    Launch(
        "packed, key mask of query heads, dense bias, deterministic",
        nheads=4,
        nheads_k=2,
        mask="1h1k",
        bias="11qk",
        causal=True,
        deterministic=True,
        packed=LENGTHS,
    ),
    Launch(
        "packed, element loads", skip=1, bias="11qk", bias_f32=True, softcap=3.0, packed=LENGTHS
    ),
    Launch("packed, no keys", bias="1h1k", packed=((20, 0), (5, 0))),
)

# Launches that Hopper's own kernels compute: enough rows for tall tiles, and more items than thread
# blocks, some of which have no rows.
HOPPER_PACKED = (
    Launch("dense rows, packed", nheads=4, nheads_k=2, causal=True, packed=LENGTHS, wants=""),
    Launch("dense rows, packed, long", causal=True, packed=((1100, 133), (3, 70)), wants=""),
    Launch("dense rows, packed, more than thread blocks", packed=((133, 133),) * 40, wants=""),
    Launch("dense rows, packed, softcap", causal=True, softcap=3.0, packed=LENGTHS, wants=""),
)
HOPPER_PACKED_GRADIENTS = (
    Launch(
        "dense rows, packed, gradients",
        nheads=4,
        nheads_k=2,
        causal=True,
        dlse=True,
        packed=LENGTHS,
    ),
    Launch("dense rows, packed, gradients, more than thread blocks", packed=((133, 133),) * 70),
    Launch("dense rows, packed, deterministic", causal=True, deterministic=True, packed=LENGTHS),
    Launch("dense rows, packed, softcap, gradients", softcap=3.0, packed=LENGTHS),
    Launch(
        "dense rows, packed, softcap, deterministic",
        nheads=4,
        nheads_k=2,
        softcap=3.0,
        deterministic=True,
        packed=LENGTHS,
    ),
)
