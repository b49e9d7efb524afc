"""The interface of an implementation of attention, through which the registry uses it."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from dmattn.key_lists import Selection
from dmattn.problem import Gradients, Needs, Problem, Results


class Graph(ABC):
    """The autograd graph of a forward that has been computed."""

    @abstractmethod
    def backward(
        self,
        problem: Problem,
        results: Results,
        dout: Tensor,
        dlse: Tensor | None,
        needs: Needs,
        retain: bool,
    ) -> Gradients:
        """As `Backend.backward`; releases what the graph holds unless `retain` is True."""


# Query, key, value, mask, bias and key lists, as in a `Problem`.
Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Selection | None]


class Prepared(ABC):
    """What a backend has worked out once for all calls of a kind, so that small calls are fast.

    For calls without sinks and packing. It holds no tensors, and several threads may use it.

    Attributes:
        backend: the name of the backend.
    """

    def __init__(self, backend: str, problem: Problem) -> None:
        self.backend = backend
        self._settings: tuple[Any, ...] = problem.settings

    def problem(self, operands: Operands) -> Problem:
        """The problem of a call of the kind."""
        q, k, v, mask, bias, lists = operands
        return Problem._make((q, k, v, mask, bias, None, *self._settings, None, lists))

    @abstractmethod
    def forward(
        self, operands: Operands, for_backward: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `Backend.forward`, or as `Backend.forward_into` where `out` is given."""

    @abstractmethod
    def backward(
        self,
        operands: Operands,
        results: tuple[Tensor, Tensor, Tensor | None],
        dout: Tensor,
        dlse: Tensor | None,
        needs: tuple[bool, bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """As `Backend.backward`, but None where a gradient is not needed."""


class Backend(ABC):
    """One implementation of attention, forward and backward.

    Attributes:
        name: the name of the backend for `backend=` and in `get_available_backends`.
        devices: the types of the devices whose tensors it takes, such as "cuda".
        by_name_only: the device types, out of `devices`, on which it is only chosen if a call names
            it.
        goes_by_kind: whether later calls of the same kind may use this backend without asking
            again, which makes small calls faster. That needs that `unsupported` depends on nothing
            but the settings and on shapes, strides, dtypes and devices of operands, and that no
            backend before it in the list will support such a problem later.
        keeps_graphs: whether `forward_with_graph` may return something other than None.
    """

    name: str
    devices: tuple[str, ...]
    by_name_only: tuple[str, ...] = ()
    goes_by_kind: bool = False
    keeps_graphs: bool = False

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why the backend cannot run on this machine, in words for a user; None if it can."""

    def unavailable_on(self, device: torch.device) -> str | None:
        """Why other backends should serve this device, of a type in `devices`; None if none should.

        Called whenever a backend is chosen. Something that a user can fix, such as a missing
        package, is not to be returned here but raised by the forward, so that a slower backend does
        not take over unnoticed.
        """
        return self.unavailable()

    @abstractmethod
    def unsupported(self, problem: Problem) -> list[Exception]:
        """Why the backend cannot compute a checked problem on one of its devices; empty if it can.

        Each reason is the error that a call raises which names this backend: a TypeError for a
        dtype, a ValueError for anything else. It names the argument, what it got and what is
        wanted.
        """

    def slow_paths(self, problem: Problem) -> list[str]:
        """What makes this problem slower than similar ones, each in a sentence for a user."""
        return []

    def prefers_lists(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether packed sequences are better rewritten as key lists on this device.

        The question is about causal packed sequences with a mask or a bias for each key: whether
        they take longer than the same problem over lists of the keys of each sequence.
        """
        return False

    @abstractmethod
    def forward(self, problem: Problem, for_backward: bool = True) -> Results:
        """Compute a checked problem that this backend supports.

        Args:
            problem: what to compute; without sinks, which `dmattn.backends.sinks` adds.
            for_backward: whether a backward may follow; if not, lse_rest may be None.

        Raises:
            RuntimeError: it cannot run on this machine, or on the device of the problem.
        """

    def forward_into(self, problem: Problem, out: Tensor, for_backward: bool = True) -> Results:
        """`forward` with its output written to `out`, which is then the `out` of the results.

        This method copies; a backend that can write to `out` itself overrides it.

        Args:
            problem, for_backward: as for `forward`.
            out: a tensor that `dmattn.outputs.check_out` accepts, of any strides with a contiguous
                head_dim.
        """
        results = self.forward(problem, for_backward)
        return results._replace(out=out.copy_(results.out))

    def slow_outputs(self, problem: Problem, out: Tensor) -> list[str]:
        """Why the backend cannot write to `out` directly, each in a sentence for a user."""
        return [f"out is filled by a copy: backend {self.name!r} has an output of its own first"]

    def prepare(self, problem: Problem) -> Prepared | None:
        """A `Prepared` for later calls of the kind of this problem, or None.

        Called after the problem has been computed, and only if `goes_by_kind` is True.
        """
        return None

    def forward_with_graph(self, problem: Problem) -> tuple[Results, Graph] | None:
        """`forward`, and a graph whose backward costs less than `backward`, or None.

        None if there is no such graph for the problem; then nothing was computed. Called in eager
        calls that require gradients, also for problems with sinks.
        """
        return None

    @abstractmethod
    def backward(
        self, problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        """The gradients of a problem from what its forward returned.

        Args:
            problem: as given to `forward`, but including the sinks if there are any.
            results: as `forward` returned them, but out and lse include the sinks. So a backend
                that computes probabilities as exp(logits - lse) need not do anything about sinks;
                one that sums the exponentials of its rows again has to add those of the sinks.
            dout: the gradient of out, in its shape and dtype, any strides.
            dlse: the gradient of lse, or None if it is zero.
            needs: the gradients to compute; the others are returned with shape (0,), and that of
                the sinks as None.
        """
