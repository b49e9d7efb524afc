"""Registration of operators with torch: schema, implementations, fake, batching and tags."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

_COMPILES = torch.Tag.pt2_compliant_tag
# Older releases of torch know only the weaker promise to keep the order of the strides.
_KEEPS_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)


class Operator(NamedTuple):
    """What torch has to know of an operator."""

    name: str  # with its namespace
    schema: str
    on_cpu: Callable[..., Any]
    on_cuda: Callable[..., Any]
    fake: Callable[..., Any]
    # Whether a compiler has to hand over tensors with the strides that eager mode would have: where
    # these decide what is read in place and what is copied.
    exact_strides: bool = False
    # What torch.func.vmap makes of it: a rule of `dmattn.ops.batching`. None: torch makes a loop.
    batching: Callable[..., Any] | None = None


def register(operator: Operator) -> None:
    """Make an operator known to torch."""
    tags = (_COMPILES, _KEEPS_STRIDES) if operator.exact_strides else (_COMPILES,)
    torch.library.define(operator.name, operator.schema, tags=tags)
    torch.library.impl(operator.name, "cpu", operator.on_cpu)
    torch.library.impl(operator.name, "cuda", operator.on_cuda)
    torch.library.register_fake(operator.name, operator.fake)
    if operator.batching is not None:
        namespace, name = operator.name.split("::")
        call = getattr(getattr(torch.ops, namespace), name)
        torch.library.register_vmap(operator.name, partial(operator.batching, call))
