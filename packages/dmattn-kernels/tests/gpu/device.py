"""What the environment says about the kernels under test and the run that tests them."""

from __future__ import annotations

import os

FAMILY_VARIABLE = "DMATTN_ARCH"  # which kernels run
SHARE_VARIABLE = "DMATTN_TEST_SHARE"  # n, if a run takes every n-th case


def family() -> str:
    return os.environ.get(FAMILY_VARIABLE, "sm90")


def is_quick() -> bool:
    return int(os.environ.get(SHARE_VARIABLE, "1")) > 1
