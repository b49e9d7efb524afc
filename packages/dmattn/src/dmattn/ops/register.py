"""Registration of operators with torch: schema, implementations, fake and tags."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# Strides decide what is read in place, so a compiler may not choose others. Older releases of torch
# know only the weaker promise to keep the order of the strides.
TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)


class Operator(NamedTuple):
    """A function and what it needs as a registered operator."""

    name: str  # with its namespace
    schema: str
    implementation: Callable[..., Any]
    fake: Callable[..., Any]
    devices: tuple[str, ...] = ("cpu", "cuda")  # whose tensors the implementation takes


def register(operator: Operator) -> None:
    """Make an operator known to torch."""
    torch.library.define(operator.name, operator.schema, tags=TAGS)
    for device in operator.devices:
        torch.library.impl(operator.name, device, operator.implementation)
    torch.library.register_fake(operator.name, operator.fake)
