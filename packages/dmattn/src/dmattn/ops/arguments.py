"""The names of the operators' arguments, and the dimensions that are their batch and heads."""

from dmattn.key_lists import Selection
from dmattn.problem import FLAT_NAMES, Results

FWD_NAMES = (*FLAT_NAMES, "backend")
BWD_NAMES = ("dout", "dlse", *Results._fields, "needs", *FWD_NAMES)

BATCH, HEADS = 0, 1

_ATTENTION: dict[str, tuple[int | None, int]] = {
    "q": (0, 2),
    "k": (0, 2),
    "v": (0, 2),
    "mask": (0, 1),
    "bias": (0, 1),
    "sinks": (None, 0),
    "dout": (0, 2),
    "out": (0, 2),
    "dlse": (0, 1),
    "lse": (0, 1),
    "lse_rest": (0, 1),
}
_LISTS = {f"sel_{name}": (0, 1) for name in Selection._fields}
_SCORES = {"scores": (0, 1)}  # (batch, heads, seqlen_k), with the mask of the same dimensions

# The indices of the batch and the heads dimension of each tensor; None: it has no such dimension.
# `lse_rest` and `sel_full` may have shape (0,), which stands for no tensor.
AXES: dict[str, tuple[int | None, int]] = {**_ATTENTION, **_LISTS, **_SCORES}
# Packed sequences have no batch, so that their heads come one dimension earlier.
PACKED_AXES: dict[str, tuple[int | None, int]] = {
    name: (None, heads if batch is None else heads - 1)
    for name, (batch, heads) in _ATTENTION.items()
}
