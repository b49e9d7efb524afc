"""Launches with rows of a bias, and of its gradient, that do not start on 16 bytes."""

from __future__ import annotations

from gpu.sanitizer_launch import Launch

# In Hopper's forward TMA copies such rows of a 16-bit bias, as eight classes of rows. Threads copy
# them if the bias is in fp32, if there is softcap, and in the backward.
HOPPER_ODD_ROWS = (
    Launch("dense rows, odd bias, long", 1100, 261, bias="1hqk", causal=True, wants=""),
    Launch("dense rows, odd bias, mask", 133, 327, 2, mask="1hqk", bias="bhqk", wants=""),
    Launch("dense rows, odd bias, few keys", 133, 3, 2, 4, 2, bias="1kqk", wants=""),
    Launch(
        "dense rows, odd, mask, softcap, bias",
        133,
        327,
        mask="1hqk",
        bias="bhqk",
        softcap=3.0,
        wants="",
    ),
    Launch(
        "dense rows, odd, mask, fp32 bias",
        200,
        261,
        mask="bhqk",
        bias="11qk",
        bias_f32=True,
        wants="",
    ),
)
HOPPER_ODD_ROWS_BWD = (
    Launch("dense rows, odd bias", 200, 261, 2, 4, 2, bias="bhqk", causal=True),
    Launch("dense rows, odd shared bias", 133, 261, 2, 4, 2, bias="1kqk"),
    Launch("dense rows, odd bias alone", 200, 261, 2, 4, 2, bias="bhqk", wants="qkv"),
    Launch("dense rows, odd fp32 bias", 200, 261, 2, 4, 2, bias="bhqk", bias_f32=True, causal=True),
    Launch("dense rows, odd shared fp32 bias", 133, 261, 2, 4, 2, bias="1kqk", bias_f32=True),
    Launch("dense rows, odd, mask, bias", 200, 262, 2, 4, 2, mask="1hqk", bias="bhqk"),
)
