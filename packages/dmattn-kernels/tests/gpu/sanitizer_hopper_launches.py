"""All launches of kernels that only Hopper has, with the dtypes and head dimensions of each."""

from __future__ import annotations

from gpu.sanitizer_hopper import (
    HOPPER,
    HOPPER_BWD,
    HOPPER_BWD_KINDS,
    HOPPER_CHANGED,
    HOPPER_CHANGED_KINDS,
    HOPPER_CHANGED_SPLIT,
    HOPPER_KEY_BIAS,
    HOPPER_KINDS,
    HOPPER_SHAPE_KINDS,
    HOPPER_SHAPES,
    HOPPER_SPLIT_KINDS,
    HOPPER_WIDE_BWD,
    HOPPER_WIDE_KINDS,
)
from gpu.sanitizer_launch import Launch
from gpu.sanitizer_listed import (
    HOPPER_LIST_GRADIENTS,
    HOPPER_LIST_KINDS,
    HOPPER_LISTS,
    HOPPER_WIDE_LIST_GRADIENTS,
    WHOLE_GRADIENTS,
)
from gpu.sanitizer_odd_rows import HOPPER_ODD_ROWS, HOPPER_ODD_ROWS_BWD
from gpu.sanitizer_packed_launches import HOPPER_PACKED, HOPPER_PACKED_GRADIENTS
from gpu.sanitizer_windows import HOPPER_WIDE_WINDOWS, HOPPER_WINDOWS


def hopper_launches() -> list[tuple[tuple[str, int], Launch]]:
    """(dtype, head_dim) and the launch."""
    kinds_of = (
        (HOPPER, HOPPER_KINDS),
        (HOPPER_SHAPES, HOPPER_SHAPE_KINDS),
        (HOPPER_CHANGED, HOPPER_CHANGED_KINDS),
        (HOPPER_KEY_BIAS, HOPPER_KINDS),
        (HOPPER_CHANGED_SPLIT, HOPPER_SPLIT_KINDS),
        (HOPPER_BWD, HOPPER_BWD_KINDS),
        (HOPPER_ODD_ROWS, HOPPER_CHANGED_KINDS),
        (HOPPER_ODD_ROWS_BWD, HOPPER_BWD_KINDS),
        (HOPPER_PACKED, HOPPER_KINDS),
        (HOPPER_PACKED_GRADIENTS, HOPPER_BWD_KINDS + HOPPER_WIDE_KINDS),
        (HOPPER_WINDOWS, HOPPER_CHANGED_KINDS),
        (HOPPER_WIDE_BWD, HOPPER_WIDE_KINDS),
        (HOPPER_WIDE_WINDOWS, HOPPER_WIDE_KINDS),
        (HOPPER_LISTS, HOPPER_LIST_KINDS),
        (HOPPER_LIST_GRADIENTS, HOPPER_BWD_KINDS),
        (HOPPER_WIDE_LIST_GRADIENTS, HOPPER_WIDE_KINDS),
        ((WHOLE_GRADIENTS,), HOPPER_BWD_KINDS),
    )
    return [(kind, launch) for launches, kinds in kinds_of for launch in launches for kind in kinds]
