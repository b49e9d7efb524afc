"""Which calls the kernels for few keys serve: a copy of the rules of the compiled library.

Those are in src/host/plan/short.cpp of dmattn-kernels. These kernels read masks and biases of any
strides (docs/kernels/short.md).
"""

from dmattn.problem import Problem

HEAD_DIMS = (32, 64)  # the sizes they are compiled for; others cost as much as the next larger one
_KEYS, _BLOCK_ROWS = 64, 64


def has_few_keys(problem: Problem) -> bool:
    """Whether these kernels serve the forward. They may serve a backward of twice as many keys."""
    if problem.packing is not None or problem.key_lists is not None or problem.softcap > 0:
        return False
    _, rows, _, head_dim = problem.q.shape
    if rows == 1:  # served by the kernels for decoding
        return False
    return problem.k.shape[1] <= _KEYS and head_dim <= HEAD_DIMS[-1]


def reads_any_strides(problem: Problem, backward: bool) -> bool:
    """Whether a kernel for few keys reads the bias, which may then have any strides.

    In the backward that needs a single block of rows, and sums in no fixed order.
    """
    if not has_few_keys(problem):
        return False
    return not backward or (problem.q.shape[1] <= _BLOCK_ROWS and not problem.deterministic)
