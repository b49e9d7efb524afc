"""What was made for one call and serves the next ones like it.

Tables of blocks, and the intervals of packed sequences, take dozens of small kernels. They depend
on lengths, and on tensors of the caller's: boundaries, or the intervals of a selection. A later
call with the same tensors, unchanged, gets what was made for the first one. The host does not read
them: they are the same when they are the same objects and torch has counted no change to them.
"""

import collections
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sources(NamedTuple):
    """The tensors of the caller's that something is made of.

    Attributes:
        tensors: none, where it depends on lengths alone.
        can_be_told: whether torch counts the changes to them. It does not within an operator: the
            code that torch.compile writes around it puts new values into old tensors.
    """

    tensors: tuple[Tensor, ...] = ()
    can_be_told: bool = True


class Kept:
    """The things made last, each for a place and some sources."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: collections.OrderedDict[Any, tuple[Any, list[Any]]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(
        self, place: Any, sources: Sources, device: torch.device, make: Callable[[], Any]
    ) -> Any:
        """What was made for this place and these sources; made now if it was not, or is not kept.

        Args:
            place: hashable, all else that it depends on.
            sources: the tensors that it is made of.
            device: where it is used, on the current stream.
            make: makes it, without a gradient.
        """
        if not _can_be_kept(sources, device):
            return outside_of_autograd(make)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (place, device, stream, *map(_state, sources.tensors))
        with self._lock:
            found = self._made.pop(key, None)
            if found is None or _is_gone(found):  # another tensor may come to where one was
                for old in [k for k, made in self._made.items() if _is_gone(made)]:
                    del self._made[old]
                owners = [weakref.ref(_owner(t)) for t in sources.tensors]
                found = outside_of_autograd(make), owners
            self._made[key] = found
            while len(self._made) > self._most:
                self._made.popitem(last=False)
        return found[0]

    def __len__(self) -> int:
        return len(self._made)


def outside_of_autograd(make: Callable[[], Any]) -> Any:
    """What this makes, without a graph, and outside of inference mode.

    Autograd could not use afterwards what was made in that mode.
    """
    with torch.inference_mode(False), torch.no_grad():
        return make()


def _can_be_kept(sources: Sources, device: torch.device) -> bool:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False  # it has values only later, when the CUDA graph is replayed
    # Tensors of inference mode count no changes.
    told = sources.can_be_told and not any(t.is_inference() for t in sources.tensors)
    return told or not sources.tensors


def _is_gone(made: tuple[Any, list[Any]]) -> bool:
    """Whether a tensor that something was made of is no more."""
    return any(owner() is None for owner in made[1])


def _owner(t: Tensor) -> Tensor:
    """The tensor whose memory a tensor views."""
    return t if t._base is None else t._base


def _state(t: Tensor) -> tuple[Any, ...]:
    """Differs between tensors of one owner whose values differ."""
    return id(_owner(t)), t.data_ptr(), t.shape, t.stride(), t._version
