"""The description of a launch of attention, for sanitizer_cases.py."""

from __future__ import annotations

import dataclasses

from gpu import sanitizer_packed
from gpu.sanitizer_selection import Selecting


@dataclasses.dataclass(frozen=True)
class Launch:
    """One forward, and one backward unless `wants` is empty.

    The shapes of mask and bias are written as in tests/attention/cases.py.
    """

    name: str
    seqlen_q: int = 70
    seqlen_k: int = 133
    batch: int = 1
    nheads: int = 2
    nheads_k: int = 1
    causal: bool = False
    softcap: float = 0.0
    mask: str = ""
    kept: float = 0.5
    bias: str = ""
    bias_f32: bool = False
    skip: int = 0  # elements by which every operand is shifted off its alignment
    splits: int = 0
    wants: str = "qkvb"
    deterministic: bool = False
    dlse: bool = False
    mask_by_rows: bool = False  # the mask's rows, not its keys, are adjacent in memory
    select: Selecting | None = None  # keeps keys by score, except those that the mask forbids
    attend: bool = True
    packed: sanitizer_packed.Lengths = ()  # lengths of packed sequences, in place of a batch
