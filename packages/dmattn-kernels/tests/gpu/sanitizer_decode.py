"""Launches with one query row for each head or a few, for sanitizer_cases.py.

The decode kernel computes most of them.
"""

from __future__ import annotations

from gpu.sanitizer_launch import Launch

DECODING = (
    Launch("one query", 1, 700, 1, 4, 2, wants="", bias="bk1k"),
    Launch("one query in parts", 1, 700, 1, 4, 2, wants="", splits=4, mask="bk1k"),
    Launch("one query, element loads", 1, 700, 1, 4, 2, skip=1, wants="", splits=3, bias="bk1k"),
    Launch("one query, listed, element loads", 1, 700, 1, 4, 2, skip=1, wants="", mask="bk1k"),
    Launch("one query in many parts", 1, 5000, 1, 4, 2, wants="", splits=70, bias="bk1k"),
    Launch("few queries", 5, 700, 2, 4, 2, causal=True, wants=""),
    Launch("few queries in parts", 5, 700, 1, 4, 2, causal=True, wants="", splits=3, bias="bk1k"),
    Launch("few queries in many parts", 16, 5000, causal=True, wants="", splits=70),
    Launch("few queries, element loads", 3, 700, 2, 2, 1, causal=True, skip=1, wants="", splits=2),
    Launch("few queries, listed", 5, 700, 2, 4, 2, causal=True, wants="", splits=4, mask="bk1k"),
    Launch("few queries, listed, element loads", 3, 700, 2, 4, 2, skip=1, wants="", mask="b11k"),
    Launch("few queries with lists of their own", 7, 700, 1, 4, 2, causal=True, mask="bh1k"),
    Launch("more queries than keys", 9, 5, 1, 4, 2, causal=True, bias="bk1k"),
    # So many keys that the forward kernel takes the rows of a group together: kWorthGroupRows in
    # src/host/plan/fwd.cpp.
    Launch("queries of a group", 17, 6500, 1, 16, 1, causal=True, wants=""),
    Launch("queries of a group in parts", 20, 8000, 1, 16, 1, causal=True, wants="", splits=3),
)


def counts_blocks(launch: Launch) -> bool:
    """Whether the launch may be one of the decode kernel, which counts blocks in the workspace.

    That kernel takes few rows that see the same keys and have the same bias; see
    choose_decode_rows() in src/host/plan/fwd.cpp.
    """
    has_rows = any(letters[2:3] == "q" for letters in (launch.mask, launch.bias))
    is_few = launch.seqlen_q == 1 or (launch.seqlen_q <= 16 and not has_rows)
    return is_few and not launch.packed
