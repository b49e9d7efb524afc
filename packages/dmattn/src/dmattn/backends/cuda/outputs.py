"""Which `out` tensors the kernels write directly, and which are filled by a copy instead.

The kernels can write any strides with a contiguous head_dim. But they store whole vectors, or tiles
by Hopper's copy engine (TMA), only if all rows start at multiples of 16 bytes. For other outputs
the kernels written for older GPUs would serve the whole call, which costs more time than a copy of
the output.
"""

import torch
from torch import Tensor

from dmattn.backends.cuda.bias_rows import starts_rows_on_16_bytes


def is_written_in_place(out: Tensor, is_decoded: bool) -> bool:
    """Whether the kernels write straight into an output of the shape of the query.

    Args:
        out: the output, in the dtype of the query.
        is_decoded: whether there is a single row, which the kernels for decoding compute. They
            store few numbers, if necessary one by one, in less time than a copy takes to start.
    """
    if is_decoded:
        return True
    if out.data_ptr() % 16 != 0:
        return False
    steps = 0
    for stride in out.stride()[:-1]:
        steps |= stride
    # Strides of dimensions of size 1 do not matter; only the slower check leaves them out.
    return steps * out.element_size() % 16 == 0 or starts_rows_on_16_bytes(out)


def finished(out: Tensor, found: Tensor) -> Tensor:
    """`out` with the output in it, after the kernels have written it to `found`.

    `found` is either `out` itself or another tensor, which is copied. The version counter of `out`
    is increased, as by an in-place operation of torch: a backward that needs its former values then
    raises an error.
    """
    if found is not out:
        return out.copy_(found)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out
