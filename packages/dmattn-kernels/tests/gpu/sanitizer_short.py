"""Launches over few keys, for sanitizer_cases.py.

All chips run the same kernels for few keys, so they are launched for one family only. There is a
forward kernel for each of two dtypes, for head_dims up to 32 and up to 64, and for each of three
levels: plain, with a bias or a mask, and with a bias that batches share, where a thread block takes
several batches. The backward has kernels of all levels for one head, one tile of rows and up to 64
keys. For more heads or rows it has those of the first two levels, for up to 64 and up to 128 keys.
"""

from __future__ import annotations

from gpu.sanitizer_launch import Launch

SHORT = (
    # name, rows, keys, batch, heads, kv heads
    Launch("few keys", 49, 49, 3, 4, 2, dlse=True),
    Launch("few keys, rows without keys", 120, 40, 1, 2, 1, causal=True),
    Launch("few keys, one of them", 2, 1, 3, 2, 1, bias="bhqk", wants="qkv"),
    Launch("few keys, long", 1100, 61, 1, 3, 1, causal=True, wants=""),
    Launch("few keys, long, bias", 300, 61, 1, 3, 1, bias="bhqk", mask="b1qk", wants=""),
    Launch("few keys, bias", 49, 49, 3, 4, 2, bias="bhqk"),
    Launch("few keys, most rows", 256, 64, 1, 2, 2, bias="bhqk", mask="1hqk", deterministic=True),
    Launch("few keys, fp32 bias", 120, 60, 2, 2, 1, bias="bhqk", bias_f32=True, causal=True),
    Launch("few keys, bias of kv heads", 64, 64, 2, 4, 2, bias="bkqk", mask="b1qk"),
    Launch("few keys, bias of all", 64, 64, 2, 4, 2, bias="11qk", bias_f32=True, causal=True),
    Launch("few keys, key bias", 100, 60, 2, 4, 2, bias="bk1k", wants="qkv", dlse=True),
    Launch("few keys, row bias", 60, 60, 2, 4, 2, bias="bhq1", wants="qkv"),
    Launch("few keys, mask of kv heads", 70, 60, 2, 4, 2, mask="bkqk"),
    Launch("few keys, key mask", 70, 60, 2, 4, 2, mask="bk1k"),
    Launch("few keys, row mask", 70, 64, 2, 4, 2, mask="bhq1", causal=True),
    Launch("few keys, mask by rows", 49, 49, 2, 4, 2, mask="bhqk", mask_by_rows=True),
    Launch("few keys, none of them kept", 49, 60, 2, 2, 1, mask="b1qk", kept=0.0, bias="bhqk"),
    Launch("few keys, only dk", 70, 60, 2, 4, 2, wants="k", mask="bhqk"),
    Launch("few keys, only dv", 70, 60, 2, 4, 2, wants="v", causal=True),
    Launch("few keys, only dbias", 49, 49, 2, 4, 2, wants="b", bias="bhqk"),
    Launch("few keys, only a shared dbias", 49, 60, 2, 4, 2, wants="b", bias="1hqk"),
    # One query head for each kv head, and one tile of rows.
    Launch("few keys, one tile", 64, 64, 2, 3, 3, causal=True),
    Launch("few keys, one tile, part of it", 30, 50, 2, 3, 3, dlse=True),
    Launch("few keys, one tile, rows without keys", 64, 40, 2, 2, 2, causal=True),
    Launch("few keys, one tile, bias", 49, 49, 3, 2, 2, bias="bhqk", dlse=True),
    Launch("few keys, one tile, mask, bias", 64, 64, 2, 2, 2, mask="bhqk", bias="1hqk"),
    Launch("few keys, one tile, only dq", 49, 49, 2, 2, 2, wants="q"),
    # Thread blocks that share a bias take several batches each, some of them more than others.
    Launch("few keys, bias of batches", 17, 33, 499, 3, 3, bias="1hqk"),
    Launch("few keys, bias of batches, mask", 49, 64, 499, 3, 3, bias="11qk", mask="b1qk"),
    Launch("few keys, bias of batches, causal", 64, 60, 499, 3, 3, bias="1hqk", causal=True),
    Launch("few keys, fp32 bias of batches", 33, 16, 499, 3, 3, bias="1kqk", bias_f32=True),
    Launch("few keys, key bias of batches", 33, 33, 499, 3, 3, bias="1h1k", wants="qkv", dlse=True),
    Launch("few keys, bias of batches and groups", 70, 50, 499, 2, 1, bias="1hqk", wants="qkv"),
    # More keys, which only the backward kernels take.
    Launch("few keys, 128 of them", 128, 128, 2, 2, 2),
    Launch("few keys, 65 of them", 70, 65, 2, 4, 2, causal=True, dlse=True),
    Launch("few keys, 128 of them, rows without keys", 256, 100, 1, 2, 2, causal=True),
    Launch("few keys, 128 of them, deterministic", 128, 128, 1, 4, 2, deterministic=True),
    Launch("few keys, 128 of them, key mask", 128, 128, 1, 4, 2, mask="b11k", deterministic=True),
    Launch("few keys, 128 of them, only dq", 70, 100, 2, 4, 2, wants="q"),
)
SHORT_KINDS = (("bf16", 64), ("bf16", 24))
# With head_dims up to 32 there are registers for a bias and any mask beside more than 64 keys.
NARROW_SHORT = (
    Launch("few keys, 128 of them, bias", 120, 100, 2, 4, 2, bias="bhqk", causal=True),
    Launch("few keys, 128 of them, mask, bias", 256, 128, 1, 2, 2, bias="bhqk", mask="1hqk"),
    Launch("few keys, 128 of them, shared bias", 64, 101, 2, 4, 2, bias="1kqk", bias_f32=True),
)
NARROW_SHORT_KINDS = (("bf16", 32), ("bf16", 24))
# Enough to run every kernel of the other dtype.
OTHER_SHORT_LAUNCHES = (
    "few keys",
    "few keys, bias",
    "few keys, one tile",
    "few keys, one tile, mask, bias",
    "few keys, bias of batches",
    "few keys, 128 of them",
    "few keys, 128 of them, only dq",
)
OTHER_SHORT_KINDS = (("f16", 64), ("f16", 32))


def short_launches() -> list[tuple[tuple[str, int], Launch]]:
    found = [(kind, launch) for launch in SHORT for kind in SHORT_KINDS]
    found += [(kind, launch) for launch in NARROW_SHORT for kind in NARROW_SHORT_KINDS]
    few = [launch for launch in SHORT if launch.name in OTHER_SHORT_LAUNCHES]
    return found + [(kind, launch) for launch in few for kind in OTHER_SHORT_KINDS]
