"""Using the gradients of keys before those of queries are finished.

The kernels' backward writes the gradients of keys, values and biases before it rounds those of
queries. Context parallel attention sends the former to other ranks, so it asks the backward to
record a CUDA event between the two.
"""

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor


class KeysWritten:
    """An event that a backward records once the gradients of keys, values and biases are written.

    It is recorded by the next backward on the thread on which the node given to `ask_before` runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(torch.cuda.current_stream(device))  # CUDA creates it at the first record
        self._written: dict[int, tuple[Tensor, int]] = {}  # address: gradient and its version

    def ask_before(self, node: Any) -> None:
        """Ask for the event whenever this autograd node, which runs the backward, is to run."""
        node.register_prehook(self._ask)

    def _ask(self, _: Any) -> None:
        self._written = {}
        _asked[get_ident()] = self

    def written(self, *grads: Tensor | None) -> None:
        """Called by the backward: the event is recorded behind the kernel that writes `grads`."""
        # Referenced until `covers` is called, so that no other tensor gets their memory meanwhile.
        self._written = {t.data_ptr(): (t, t._version) for t in grads if t is not None}

    def covers(self, grads: Sequence[Tensor]) -> bool:
        """Whether `grads` are the gradients that were written, unchanged.

        If so, waiting for the event is enough to use them.
        """
        _asked.pop(get_ident(), None)  # in case a backward by other kernels did not take it
        written, self._written = self._written, {}
        found = [written.get(t.data_ptr()) for t in grads]
        return all(
            known is not None and known[1] == t._version
            for known, t in zip(found, grads, strict=True)
        )


# By thread: autograd runs the backward on threads of its own.
_asked: dict[int, KeysWritten] = {}


def take_asked() -> KeysWritten | None:
    """The pending request for an event of this thread's next backward, or None; removes it."""
    return _asked.pop(get_ident(), None) if _asked else None
