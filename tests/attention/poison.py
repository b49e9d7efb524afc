"""Fresh buffers full of NaN between guard margins, which show missing writes and overruns.

While `poisoned()` is active every uninitialised allocation on the device under test (outputs and
workspaces alike) starts as bytes of 0xFF, which read as NaN in every floating dtype and as -1 in
int32, and lies between two margins of the same bytes. Leaving the context checks the margins.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attention.targets import synchronize, target, target_device

MARGIN = 1024  # bytes on either side; a multiple of 256, to keep the alignment


class Guard:
    """Makes poisoned allocations, and keeps them until their margins have been checked."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, int]] = []
        self.has_ended = False
        self.count = 0

    def empty(self, make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        # The margins of such a buffer would not be checked, and all buffers would live as long as
        # the factory that somebody holds on to.
        assert not self.has_ended, "a factory of torch was kept beyond the call that looked it up"
        plain = make(*args, **kwargs)
        if plain.device.type != target_device().type or plain.layout is not torch.strided:
            return plain
        extent = 0
        if plain.numel():
            spans = zip(plain.shape, plain.stride(), strict=True)
            extent = 1 + sum((size - 1) * stride for size, stride in spans)
        size = math.ceil(extent * plain.element_size() / 256) * 256
        raw = _empty(size + 2 * MARGIN, dtype=torch.uint8, device=plain.device).fill_(0xFF)
        self.count += 1
        self._buffers.append((raw, extent * plain.element_size()))
        result = _empty(0, dtype=plain.dtype, device=plain.device)
        result.set_(
            raw.untyped_storage(), MARGIN // plain.element_size(), plain.shape, plain.stride()
        )
        return result.requires_grad_(plain.requires_grad)

    def check(self) -> None:
        synchronize()
        for raw, extent in self._buffers:
            assert bool((raw[:MARGIN] == 0xFF).all()), "a buffer was written before its start"
            assert bool((raw[MARGIN + extent :] == 0xFF).all()), "a buffer was written past its end"
        self._buffers.clear()


_empty = torch.empty


@contextlib.contextmanager
def poisoned() -> Iterator[Guard]:
    """Replaces torch's factories of uninitialised tensors within, unless the target forbids it."""
    guard = Guard()
    if not target().poison:
        yield guard
        return
    places: list[tuple[Any, str]] = [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ]
    originals = [getattr(owner, name) for owner, name in places]

    def wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: guard.empty(original, *args, **kwargs)

    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, wrap(original))
    try:
        yield guard
    finally:
        guard.has_ended = True
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)
    guard.check()
