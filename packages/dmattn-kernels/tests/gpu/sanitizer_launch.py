"""What a launch of attention is for sanitizer_cases.py."""

from __future__ import annotations

import dataclasses

from gpu import sanitizer_packed
from gpu.sanitizer_selection import Selecting


@dataclasses.dataclass(frozen=True)
class Launch:
    """One forward, and one backward unless `wants` is empty. Operand shapes as in cases.py."""

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
    mask_by_rows: bool = (
        False  # the rows of the mask are next to each other in memory, not the keys
    )
    select: Selecting | None = None  # keys by score, instead of the mask, which forbids keys to it
    attend: bool = True
    packed: sanitizer_packed.Lengths = ()  # of sequences, in place of the batch and its lengths
