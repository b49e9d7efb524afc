"""Functions whose results torch.compile takes as constants, since it cannot trace them.

The decorator for that imports the compiler, so this module is only imported while torch compiles.
"""

import torch

from dmattn.backends import registry


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def prefers_lists(device: torch.device, dtype: torch.dtype, wanted: str | None) -> bool:
    """`registry.prefers_lists`, as a constant of compiled code."""
    return registry.prefers_lists(device, dtype, wanted)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def unavailable(name: str) -> str | None:
    """`Backend.unavailable` of the backend of this name, as a constant of compiled code."""
    return registry.named(name).unavailable()
