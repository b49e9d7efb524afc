"""What a compiler takes for a constant, as it cannot trace the question.

To say so imports the compiler, so this is imported only where one is at work.
"""

import torch

from dmattn.backends import registry


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def prefers_lists(device: torch.device, dtype: torch.dtype, wanted: str | None) -> bool:
    """As `registry.prefers_lists`."""
    return registry.prefers_lists(device, dtype, wanted)
