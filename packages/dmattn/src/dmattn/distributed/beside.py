"""A second stream of a GPU, for work that goes on beside that of the current one."""

from functools import cache
from typing import Any

import torch


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all calls: streams cannot be told apart by what they are for, and are few."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Beside:
    """Within `with`, work goes to the second stream, which waits for what came before.

    Tensors of the current stream that are used within have to live until `join`, and for tensors
    that are made within and used outside, `hand_over` has to be called. On the CPU there is one
    stream, and all of this does nothing.
    """

    def __init__(self, device: torch.device, after: torch.cuda.Event | None = None) -> None:
        """`after`: wait for this event instead of all that the current stream was given so far."""
        self._stream = _second_stream(device) if device.type == "cuda" else None
        self._entered: Any = None
        if after is None:
            self.follow()
        elif self._stream is not None:
            self._stream.wait_event(after)

    def follow(self) -> None:
        """Let the second stream wait for all that the current stream was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def join(self) -> None:
        """Let the current stream wait for the second one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def hand_over(self, *made: torch.Tensor) -> None:
        """Let the current stream use tensors that were made within, once it has waited for them.

        Their memory may be given to other work of the second stream as soon as nobody refers to
        them, and then waits for the current one, too.
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
