"""Computing in the dtype of the operands, whatever torch.autocast says."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device_type: str) -> AbstractContextManager[None]:
    """A context in which autocast is off. The meta device has no autocast to turn off."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    context: AbstractContextManager[None] = torch.autocast(device_type, enabled=False)
    return context
