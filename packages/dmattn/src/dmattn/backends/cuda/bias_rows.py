"""A dense bias as the kernels read it at full speed: copied where they would lose more without.

Tiles of a bias are copied to shared memory if the keys of a row lie side by side and rows start on
16 bytes. Of other biases single numbers are read, again for each batch and head that shares them.
"""

import math

from torch import Tensor

from dmattn.backends.cuda.few_keys import has_few_keys, reads_any_strides
from dmattn.backends.cuda.kernels import has_kernels_of_hopper
from dmattn.problem import Problem, has_rows

_ROW_BYTES = 16
# A copy takes as long as to read the bias twice. From so many readers of each number on that is
# less than what rows that start anywhere cost them.
_READERS_FORWARD, _READERS_BACKWARD = 8, 4
# Up to this head_dim Hopper has kernels that add up in a fixed order beside rows that start on 16
# bytes, of the bias and of its gradient. The sm80 code, which takes others, takes up to four times
# as long, and by itself gains nothing by such rows.
_ORDERED_HEAD_DIM = 128
# Alone of causal rows, of which half of a copy is never read, a 16-bit bias that nobody shares
# gains by it only while it is small: at head_dims up to 64, with so many numbers of each head.
_SMALL_HEAD_DIM, _CAUSAL_NUMBERS = 64, 1 << 20
# Sums of so many, and no more, are made where the gradient is, in its dtype, by its bytes.
_MOST_SUMMED_IN_PLACE = {2: 2, 4: 3}


def copies(problem: Problem, backward: bool) -> bool:
    """Whether the bias is copied first. Depends on nothing but settings, shapes, strides, dtypes
    and the kind of GPU.

    Keys that lie apart, as in T5, where the numbers of all heads lie side by side: always. On an
    H200 64 texts of 512 tokens, 8 heads of 64 channels, took seven times as long forward, and five
    times backward, before they were copied. Rows that start anywhere: if batches or heads share
    them, or sums are made in a fixed order. Packed sequences, few keys and a bias that is the same
    for all keys, or all rows: never.
    """
    bias = _of_rows_and_keys(problem, backward)
    if bias is None:
        return False
    if bias.stride(-1) > 1:
        return True
    if starts_rows_on_16_bytes(bias):
        return False
    if backward and _orders_sums(problem, bias):
        return True
    return _readers(problem, bias) >= (_READERS_BACKWARD if backward else _READERS_FORWARD)


def pads_gradient(problem: Problem) -> bool:
    """Whether rows of the gradient get room, so that all start on 16 bytes; they are copied then.

    That is where sums are made in a fixed order, and made in place: others, in float32, lie apart,
    and start there by themselves.
    """
    bias = _of_rows_and_keys(problem, backward=True)
    if bias is None or bias.shape[-1] * bias.element_size() % _ROW_BYTES == 0:
        return False
    batch, _, heads, _ = problem.q.shape
    summed = batch * heads // math.prod(bias.shape[:2])
    return summed <= _MOST_SUMMED_IN_PLACE[bias.element_size()] and _orders_sums(problem, bias)


def _of_rows_and_keys(problem: Problem, backward: bool) -> Tensor | None:
    """The bias, if it has a number for each row and key, and its kernels want rows on 16 bytes.

    One that is expanded over rows or keys has not.
    """
    bias = problem.bias
    if bias is None or bias.dim() != 4 or bias.numel() == 0 or not has_rows(bias):
        return None
    if bias.shape[-1] == 1 or 0 in bias.stride()[2:] or reads_any_strides(problem, backward):
        return None
    return bias


def _orders_sums(problem: Problem, bias: Tensor) -> bool:
    """Whether sums are made in a fixed order, in less time beside rows that start on 16 bytes.

    Not where the sm80 code makes them anyway, or a kernel for few keys, which reads any rows.
    """
    rows, head_dim = problem.q.shape[1], problem.q.shape[-1]
    if not problem.deterministic or head_dim > _ORDERED_HEAD_DIM or not _is_on_hopper(problem):
        return False
    if problem.key_lists is not None and problem.sliding == 0:
        return False  # of listed keys single numbers are read, wherever rows start
    mask = problem.mask
    if problem.softcap > 0 or (bias.element_size() > 2 and mask is not None and has_rows(mask)):
        return False
    if has_few_keys(problem) and _readers(problem, bias) == 1:
        return False
    if _readers(problem, bias) > 1 or bias.element_size() > 2 or not problem.is_causal:
        return True
    return head_dim > _SMALL_HEAD_DIM or rows * bias.shape[-1] <= _CAUSAL_NUMBERS


def empty_gradient(bias: Tensor) -> Tensor:
    """An uninitialised gradient of the shape of the bias, whose rows start on 16 bytes."""
    keys, step = bias.shape[-1], _ROW_BYTES // bias.element_size()
    return bias.new_empty((*bias.shape[:-1], -(-keys // step) * step))[..., :keys]


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


def _is_on_hopper(problem: Problem) -> bool:
    return problem.q.is_cuda and has_kernels_of_hopper(problem.q.get_device())
