"""What an implementation of attention has to offer to be listed in the registry."""

from abc import ABC, abstractmethod

from torch import Tensor

from dmattn.problem import Gradients, Needs, Problem, Results


class Backend(ABC):
    """One implementation of attention, forward and backward.

    Attributes:
        name: what `backend=` and `get_available_backends` call it.
    """

    name: str

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why it cannot run on this machine, in words for a user; None when it can."""

    @abstractmethod
    def unsupported(self, problem: Problem) -> list[str]:
        """Why it cannot compute this problem, each reason naming an argument; empty when it can."""

    @abstractmethod
    def forward(self, problem: Problem) -> Results:
        """Compute a checked problem that this backend supports."""

    @abstractmethod
    def backward(
        self, problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        """The gradients of a problem from what its forward returned.

        Args:
            problem: as given to `forward`.
            results: as `forward` returned them.
            dout: the gradient of out, in its shape and dtype, any strides.
            dlse: the gradient of lse, or None where it is zero.
            needs: the gradients to compute; the others are returned with shape (0,).
        """
