"""What an implementation of attention has to offer to be listed in the registry."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from dmattn.key_lists import Selection
from dmattn.problem import Gradients, Needs, Problem, Results


class Graph(ABC):
    """The graph of autograd behind a forward that is done."""

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
        """As `Backend.backward`; releases what the graph holds unless it is to be retained."""


# Query, key, value, mask, bias and key lists, as in a `Problem`.
Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Selection | None]


class Prepared(ABC):
    """What a backend has worked out for all calls of a kind, so that a small one takes little time.

    Without sinks and packing. It holds no tensors, and several threads may use it.

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
        name: what `backend=` and `get_available_backends` call it.
        devices: the types of the devices whose tensors it takes, such as "cuda".
        by_name_only: those of the devices on which it is never chosen, unless a call names it.
        goes_by_kind: whether the choice of it holds for later calls too: `unsupported` looks at
            nothing but settings, and shapes, strides, dtypes and devices of operands, and no
            backend before it in the list will take such a problem later. Then small calls are
            faster.
        keeps_graphs: whether `forward_with_graph` may return something.
    """

    name: str
    devices: tuple[str, ...]
    by_name_only: tuple[str, ...] = ()
    goes_by_kind: bool = False
    keeps_graphs: bool = False

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why it cannot run on this machine, in words for a user; None when it can."""

    def unavailable_on(self, device: torch.device) -> str | None:
        """Why it leaves this one of its devices to other backends; None when it does not.

        Asked at every call. What a user can put right, such as a package that is missing, is no
        such reason: the forward raises it, so that nobody is served by a slower backend unasked.
        """
        return self.unavailable()

    @abstractmethod
    def unsupported(self, problem: Problem) -> list[Exception]:
        """Why it cannot compute a checked problem on one of its devices; empty when it can.

        Each reason is the error that a user gets who asks for this backend: a TypeError for a
        dtype, a ValueError for all else, naming the argument, what it got and what is wanted.
        """

    def slow_paths(self, problem: Problem) -> list[str]:
        """What makes this problem slower than one like it, each in a sentence for a user."""
        return []

    def prefers_lists(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether, on this device, causal packed sequences with a mask or a bias for each key take
        longer than the same over lists of the keys of each sequence.
        """
        return False

    @abstractmethod
    def forward(self, problem: Problem, for_backward: bool = True) -> Results:
        """Compute a checked problem that this backend supports.

        Args:
            problem: what to compute; without sinks, as `dmattn.backends.sinks` adds them.
            for_backward: whether the results are for a backward; if not, lse_rest is None.

        Raises:
            RuntimeError: it cannot run on this machine, or on the device of the problem.
        """

    def forward_into(self, problem: Problem, out: Tensor, for_backward: bool = True) -> Results:
        """`forward`, with its output in `out`, which the results then hold.

        A backend that can write there does so in a method of its own; this one copies.

        Args:
            problem, for_backward: as for `forward`.
            out: as `dmattn.outputs.check_out` wants it: of any strides with a contiguous head_dim.
        """
        results = self.forward(problem, for_backward)
        return results._replace(out=out.copy_(results.out))

    def slow_outputs(self, problem: Problem, out: Tensor) -> list[str]:
        """What keeps it from writing straight into `out`, each in a sentence for a user."""
        return [f"out is filled by a copy: backend {self.name!r} has an output of its own first"]

    def prepare(self, problem: Problem) -> Prepared | None:
        """For further calls of the kind of this problem, which has been computed; None: nothing.

        Asked of backends that `goes_by_kind` only.
        """
        return None

    def forward_with_graph(self, problem: Problem) -> tuple[Results, Graph] | None:
        """`forward`, and a graph whose backward costs less than that from the results alone.

        None: there is none for such a problem, and nothing was computed. Asked for eager calls that
        require gradients, also with sinks.
        """
        return None

    @abstractmethod
    def backward(
        self, problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        """The gradients of a problem from what its forward returned.

        Args:
            problem: as given to `forward`, but with the sinks if there are any.
            results: as `forward` returned them; with sinks, they are in out and lse. So nothing is
                to be done about them where the probabilities are exp(logits - lse). A backend that
                sums its rows again has to count them.
            dout: the gradient of out, in its shape and dtype, any strides.
            dlse: the gradient of lse, or None where it is zero.
            needs: the gradients to compute; the others are returned with shape (0,), and that of
                the sinks as None.
        """
