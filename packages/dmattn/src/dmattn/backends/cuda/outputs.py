"""Which outputs of the caller's the kernels write in place, and which they would write slowly.

They take any strides with a contiguous head_dim, but store whole vectors, or tiles by the copy
engine of Hopper, only where all rows start on 16 bytes. Elsewhere kernels of older chips would
serve the whole call, which loses more than a copy of the output takes.
"""

import torch
from torch import Tensor

from dmattn.backends.cuda.bias_rows import starts_rows_on_16_bytes


def is_written_in_place(out: Tensor, is_decoded: bool) -> bool:
    """Whether the kernels write straight into an output of the shape of the query.

    Args:
        out: the output, in the dtype of the query.
        is_decoded: whether there is a single row, for the kernels that decode. They store few
            numbers, one by one if need be, in less time than a copy takes to start.
    """
    if is_decoded:
        return True
    if out.data_ptr() % 16 != 0:
        return False
    steps = 0
    for stride in out.stride()[:-1]:
        steps |= stride
    # Those of dimensions of a single entry do not matter: the slower look knows them.
    return steps * out.element_size() % 16 == 0 or starts_rows_on_16_bytes(out)


def finished(out: Tensor, found: Tensor) -> Tensor:
    """`out`, which holds what the kernels wrote to `found`: the same tensor, or one to copy.

    Autograd learns of the change, as it does of one by torch itself: a backward that wanted the
    values before it then raises.
    """
    if found is not out:
        return out.copy_(found)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out
