"""When a dense bias is copied first, since the kernels would read it too slowly as it is.

Kernels copy whole tiles of a bias to shared memory if the keys of a row lie side by side and rows
start at multiples of 16 bytes. Other biases are read number by number, again for each batch entry
and head that shares them.
"""

import math

from torch import Tensor

from dmattn.backends.cuda.few_keys import has_few_keys, reads_any_strides
from dmattn.backends.cuda.kernels import has_kernels_of_hopper
from dmattn.problem import Problem, has_rows

_ROW_BYTES = 16
# A copy costs as much time as reading the bias twice. If at least this many heads of all batch
# entries read each number, that is less than what unaligned rows cost them.
_READERS_FORWARD, _READERS_BACKWARD = 8, 4
# Up to this head_dim Hopper has kernels for deterministic sums, which need that the rows of the
# bias and of its gradient start at multiples of 16 bytes. Other biases go to the sm80 code, which
# takes up to four times as long, and which gains nothing by such rows.
_ORDERED_HEAD_DIM = 128
# Under causality half of a copied bias is never read. So at head_dims up to _SMALL_HEAD_DIM an
# unshared 16-bit bias gains by a copy only if it has at most _CAUSAL_NUMBERS numbers per head.
_SMALL_HEAD_DIM, _CAUSAL_NUMBERS = 64, 1 << 20
# The gradient of the bias is summed in place, in its own dtype, if at most this many terms are
# added to each number. By the size of the dtype in bytes.
_MOST_SUMMED_IN_PLACE = {2: 2, 4: 3}


def copies(problem: Problem, backward: bool) -> bool:
    """Whether the bias is copied first, in the forward or in the backward.

    This depends on nothing but settings, shapes, strides, dtypes and the kind of GPU:

    * If the keys of a row do not lie side by side, always. In T5 the numbers of all heads do
      instead; on an H200, 64 texts of 512 tokens, 8 heads of 64 channels, took seven times as long
      forward, and five times backward, before such biases were copied.
    * If rows do not start at multiples of 16 bytes, it is copied in two cases: many heads, of all
      batch entries, share each row, or (in the backward) sums are made in a fixed order.
    * For packed sequences, few keys, and a bias that is the same for all keys or for all rows,
      never.
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
    """Whether the rows of the bias gradient are padded to start at multiples of 16 bytes.

    The gradient is then copied to a contiguous tensor afterwards. That is done if sums are made in
    a fixed order and in place. Sums that are not made in place are float32 in separate memory,
    where rows start at such multiples anyway.
    """
    bias = _of_rows_and_keys(problem, backward=True)
    if bias is None or bias.shape[-1] * bias.element_size() % _ROW_BYTES == 0:
        return False
    batch, _, heads, _ = problem.q.shape
    summed = batch * heads // math.prod(bias.shape[:2])
    return summed <= _MOST_SUMMED_IN_PLACE[bias.element_size()] and _orders_sums(problem, bias)


def _of_rows_and_keys(problem: Problem, backward: bool) -> Tensor | None:
    """The bias, if it has a number for each row and key and its kernels want aligned rows.

    None otherwise, as for a bias that is expanded over rows or keys.
    """
    bias = problem.bias
    if bias is None or bias.dim() != 4 or bias.numel() == 0 or not has_rows(bias):
        return None
    if bias.shape[-1] == 1 or 0 in bias.stride()[2:] or reads_any_strides(problem, backward):
        return None
    return bias


def _orders_sums(problem: Problem, bias: Tensor) -> bool:
    """Whether sums are made in a fixed order by kernels that are faster with aligned rows.

    False where the sm80 code makes the sums in any case, and for the kernels for few keys, which
    read rows at any address.
    """
    rows, head_dim = problem.q.shape[1], problem.q.shape[-1]
    if not problem.deterministic or head_dim > _ORDERED_HEAD_DIM or not _is_on_hopper(problem):
        return False
    if problem.key_lists is not None and problem.sliding == 0:
        return False  # for listed keys the bias is read number by number, at any address
    mask = problem.mask
    if problem.softcap > 0 or (bias.element_size() > 2 and mask is not None and has_rows(mask)):
        return False
    if has_few_keys(problem) and _readers(problem, bias) == 1:
        return False
    if _readers(problem, bias) > 1 or bias.element_size() > 2 or not problem.is_causal:
        return True
    return head_dim > _SMALL_HEAD_DIM or rows * bias.shape[-1] <= _CAUSAL_NUMBERS


def empty_gradient(bias: Tensor) -> Tensor:
    """An uninitialised gradient of the shape of the bias, with rows padded to 16 bytes."""
    keys, step = bias.shape[-1], _ROW_BYTES // bias.element_size()
    return bias.new_empty((*bias.shape[:-1], -(-keys // step) * step))[..., :keys]


def with_aligned_rows(bias: Tensor) -> Tensor:
    """A copy whose keys lie side by side, and whose rows start at multiples of 16 bytes.

    Expanded dimensions are copied once and expanded again.
    """
    own = bias
    for dim, stride in enumerate(bias.stride()):
        if stride == 0:
            own = own.narrow(dim, 0, 1)
    keys, step = own.shape[-1], _ROW_BYTES // own.element_size()
    room = own.new_empty((*own.shape[:-1], -(-keys // step) * step))
    return room[..., :keys].copy_(own).expand_as(bias)


def starts_rows_on_16_bytes(bias: Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes from the first row, by the strides alone."""
    sizes = zip(bias.shape[:-1], bias.stride(), strict=False)
    return all(stride * bias.element_size() % _ROW_BYTES == 0 for size, stride in sizes if size > 1)


def _readers(problem: Problem, bias: Tensor) -> int:
    """The number of query heads, over all batch entries, that share each row of the bias."""
    batch, _, heads, _ = problem.q.shape
    own = (size for size, stride in zip(bias.shape[:2], bias.stride(), strict=False) if stride)
    return batch * heads // math.prod(own)


def _is_on_hopper(problem: Problem) -> bool:
    return problem.q.is_cuda and has_kernels_of_hopper(problem.q.get_device())
