"""Registration of operators with torch: schema, implementation, fake, vmap rule and tags."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from dmattn.backends.cuda.kernels import serves

# The types of the devices for which operators are registered.
_DEVICES = ("cpu", "cuda", "xpu")
_COMPILES = torch.Tag.pt2_compliant_tag
# Older releases of torch only have the weaker tag, by which the order of the strides is kept.
_KEEPS_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)


class Operator(NamedTuple):
    """What torch has to know of an operator."""

    name: str  # including the namespace, such as "dmattn::fwd"
    schema: str
    function: Callable[..., Any]  # for all devices
    fake: Callable[..., Any]
    # Whether compiled code has to pass tensors with the strides that they have in eager mode. For
    # operators whose implementation depends on strides, to read in place or copy.
    exact_strides: bool = False
    # The rule for torch.func.vmap, from `dmattn.ops.batching`. None: torch calls it in a loop.
    batching: Callable[..., Any] | None = None


def register(operator: Operator) -> None:
    """Make an operator known to torch."""
    tags = (_COMPILES, _KEEPS_STRIDES) if operator.exact_strides else (_COMPILES,)
    torch.library.define(operator.name, operator.schema, tags=tags)
    for device in _DEVICES:
        torch.library.impl(operator.name, device, operator.function)
    torch.library.register_fake(operator.name, operator.fake)
    if operator.batching is not None:
        namespace, name = operator.name.split("::")
        call = getattr(getattr(torch.ops, namespace), name)
        torch.library.register_vmap(operator.name, partial(operator.batching, call))


def by_device(
    function: Callable[..., Any], otherwise: ModuleType, kernels: ModuleType
) -> Callable[..., Any]:
    """An implementation for all devices, which hands a module to `function` as first argument.

    The module is `kernels` if the compiled kernels serve the device of the first tensor among the
    operator's arguments, and `otherwise` if they do not.
    """

    def on_any_device(*given: Any, **named: Any) -> Any:
        first = next(x for x in given if isinstance(x, torch.Tensor))
        return function(kernels if serves(first) else otherwise, *given, **named)

    return on_any_device
