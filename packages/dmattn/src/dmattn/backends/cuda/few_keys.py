"""Which calls the kernels for few keys take, as src/host/plan/short.cpp of dmattn-kernels says.

They read masks and biases of any strides as they are (docs/kernels/short.md).
"""

from dmattn.problem import Problem

HEAD_DIMS = (32, 64)  # others cost as much as the next one
_KEYS, _BLOCK_ROWS = 64, 64


def has_few_keys(problem: Problem) -> bool:
    """Whether the forward is for them. The backward may be for them with twice the keys."""
    if problem.packing is not None or problem.key_lists is not None or problem.softcap > 0:
        return False
    _, rows, _, head_dim = problem.q.shape
    if rows == 1:  # for the kernels that decode
        return False
    return problem.k.shape[1] <= _KEYS and head_dim <= HEAD_DIMS[-1]


def reads_any_strides(problem: Problem, backward: bool) -> bool:
    """Whether such a kernel reads the bias: in the backward, if there is one block of rows."""
    if not has_few_keys(problem):
        return False
    return not backward or (problem.q.shape[1] <= _BLOCK_ROWS and not problem.deterministic)
