"""A dense bias as the kernels read it at full speed: copied where they would lose more without.

Tiles of a bias are copied to shared memory if the keys of a row lie side by side and rows start on
16 bytes. Of other biases single numbers are read, again for each batch and head that shares them.
"""

import math

from torch import Tensor

from dmattn.backends.cuda.few_keys import reads_any_strides
from dmattn.problem import Problem, has_rows

_ROW_BYTES = 16
# A copy takes as long as to read the bias twice. From so many readers of each number on that is
# less than what rows that start anywhere cost them.
_READERS_FORWARD, _READERS_BACKWARD = 8, 4


def copies(problem: Problem, backward: bool) -> bool:
    """Whether the bias is copied first. Depends on nothing but shapes, strides and dtypes.

    Keys that lie apart, as in T5, where the numbers of all heads lie side by side: always. On an
    H200 64 texts of 512 tokens, 8 heads of 64 channels, took seven times as long forward, and five
    times backward, before they were copied. Rows that start anywhere: if batches or heads share
    them. Packed sequences, few keys and a bias that is the same for all keys, or all rows: never.
    """
    bias = problem.bias
    if bias is None or bias.dim() != 4 or bias.numel() == 0 or not has_rows(bias):
        return False
    if bias.shape[-1] == 1 or bias.stride(2) == 0 or reads_any_strides(problem, backward):
        return False
    if bias.stride(-1) > 1:
        return True
    if bias.stride(-1) == 0 or starts_rows_on_16_bytes(bias):
        return False
    return _readers(problem, bias) >= (_READERS_BACKWARD if backward else _READERS_FORWARD)


def with_aligned_rows(bias: Tensor) -> Tensor:
    """A copy whose keys lie side by side, and whose rows start on 16 bytes.

    What is expanded is copied once.
    """
    own = bias
    for dim, stride in enumerate(bias.stride()):
        if stride == 0:
            own = own.narrow(dim, 0, 1)
    keys, step = own.shape[-1], _ROW_BYTES // own.element_size()
    room = own.new_empty((*own.shape[:-1], -(-keys // step) * step))
    return room[..., :keys].copy_(own).expand_as(bias)


def starts_rows_on_16_bytes(bias: Tensor) -> bool:
    """By its strides: where its first row starts is not looked at."""
    sizes = zip(bias.shape[:-1], bias.stride(), strict=False)
    return all(stride * bias.element_size() % _ROW_BYTES == 0 for size, stride in sizes if size > 1)


def _readers(problem: Problem, bias: Tensor) -> int:
    """Heads of all batches that share each row of the bias."""
    batch, _, heads, _ = problem.q.shape
    own = (size for size, stride in zip(bias.shape[:2], bias.stride(), strict=False) if stride)
    return batch * heads // math.prod(own)
