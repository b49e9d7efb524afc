"""Going on with the gradients of keys before those of queries are there.

The kernels' backward writes the gradients of keys, values and biases before it rounds those of
queries. Context parallel attention, which sends the former to other ranks, asks for an event
between the two.
"""

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor


class KeysWritten:
    """An event behind the gradients of keys, values and biases of one call's backward.

    That is the next one on the thread on which the node of `ask_before` was about to run.
    """

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(torch.cuda.current_stream(device))  # it is made at its first record
        self._written: dict[int, tuple[Tensor, int]] = {}  # by address, with their versions

    def ask_before(self, node: Any) -> None:
        """Ask whenever this node of autograd is about to run, which has the backward in it."""
        node.register_prehook(self._ask)

    def _ask(self, _: Any) -> None:
        self._written = {}
        _asked[get_ident()] = self

    def written(self, *grads: Tensor | None) -> None:
        """The event was enqueued, behind what writes these."""
        # Kept until `covers`, so that no other tensor gets their memory meanwhile.
        self._written = {t.data_ptr(): (t, t._version) for t in grads if t is not None}

    def covers(self, grads: Sequence[Tensor]) -> bool:
        """Whether these are what was written, unchanged: then the event is all to wait for."""
        _asked.pop(get_ident(), None)  # a backward by other kernels has not taken it
        written, self._written = self._written, {}
        found = [written.get(t.data_ptr()) for t in grads]
        return all(
            known is not None and known[1] == t._version
            for known, t in zip(found, grads, strict=True)
        )


# By thread: autograd runs the backward on threads of its own.
_asked: dict[int, KeysWritten] = {}


def take_asked() -> KeysWritten | None:
    """Who has asked for the event of this thread's next backward, if anybody."""
    return _asked.pop(get_ident(), None) if _asked else None
