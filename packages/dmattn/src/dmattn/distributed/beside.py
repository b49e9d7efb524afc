"""A second CUDA stream, for work that runs at the same time as that of the current stream."""

from functools import cache
from typing import Any

import torch


@cache
def _stream(device: torch.device, is_urgent: bool) -> torch.cuda.Stream:
    """One stream of each kind, for all calls: the number of streams is limited."""
    return torch.cuda.Stream(device, priority=-1 if is_urgent else 0)  # type: ignore[no-untyped-call]


class Beside:
    """Within `with`, work goes to a second stream, which waits for what was enqueued before.

    There are two such streams. Thread blocks of the urgent one start before those of other streams
    that have not started yet: it is for work of few thread blocks that other ranks wait for, beside
    a kernel of many thread blocks.

    Tensors of the current stream that are used within `with` have to live until `join`. For tensors
    that are made within and used outside, `hand_over` has to be called. On the CPU there is one
    stream, and all of this does nothing.
    """

    def __init__(
        self, device: torch.device, *, urgent: bool = False, after: torch.cuda.Event | None = None
    ) -> None:
        """`after`: wait for this event instead of all that the current stream was given so far."""
        self._stream = _stream(device, urgent) if device.type == "cuda" else None
        self._entered: Any = None
        if after is None:
            self.follow()
        elif self._stream is not None:
            self._stream.wait_event(after)

    def follow(self) -> None:
        """Let the second stream wait for all that the current stream was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def event(self) -> torch.cuda.Event | None:
        """An event behind all that the second stream was given so far; None on the CPU."""
        return None if self._stream is None else self._stream.record_event()

    def join(self) -> None:
        """Let the current stream wait for the second one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def hand_over(self, *made: torch.Tensor) -> None:
        """Let the current stream use tensors that were made within, once it has waited for them.

        Once nobody refers to them, their memory may be given to other work of the second stream,
        which then waits for the current stream, too.
        """
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            for t in made:
                t.record_stream(current)

    def __enter__(self) -> None:
        if self._stream is not None:
            self._entered = torch.cuda.stream(self._stream)
            self._entered.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._entered is not None:
            self._entered.__exit__(*error)
            self._entered = None
