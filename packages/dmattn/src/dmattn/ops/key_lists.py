"""The operator dmattn::build_key_lists: lists of kept keys from the interval of each key."""

import torch
from torch import Tensor

from dmattn.backends.cuda import selection as cuda
from dmattn.key_lists import BLOCK_ROWS, KeyLists, interval_lists, num_blocks

_NAME = "dmattn::build_key_lists"
_SCHEMA = (
    "(Tensor end, int seqlen_q, int capacity, int reach) "
    "-> (Tensor idx, Tensor count, Tensor full, Tensor needed)"
)


def _empty_lists(end: Tensor, seqlen_q: int, capacity: int, reach: int) -> KeyLists:
    """Results to be filled, idx with zeros; raises for inputs that do not fit together."""
    if end.dim() != 3:
        raise ValueError(f"end: got shape {tuple(end.shape)}, wanted (batch|1, heads|1, seqlen_k)")
    if end.dtype != torch.int32:
        raise TypeError(f"end: got dtype {end.dtype}, wanted torch.int32")
    batch, heads, seqlen_k = end.shape
    if seqlen_q < 0 or seqlen_q > seqlen_k:
        raise ValueError(f"seqlen_q: got {seqlen_q}, wanted 0 to {seqlen_k}, the number of keys")
    if capacity < 0 or capacity % BLOCK_ROWS:
        raise ValueError(f"capacity: got {capacity}, wanted a multiple of {BLOCK_ROWS}")
    if reach < 0:
        raise ValueError(f"reach: got {reach}, wanted at least 1, or 0 where it is unknown")
    lists = (batch, heads, num_blocks(seqlen_q, True))
    return KeyLists(
        end.new_zeros((*lists, capacity)),
        end.new_empty(lists),
        end.new_empty(lists),
        end.new_empty(lists),
    )


def _build_cpu(
    end: Tensor, seqlen_q: int, capacity: int, reach: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _empty_lists(end, seqlen_q, capacity, reach)
    return interval_lists(end.contiguous(), seqlen_q, capacity, reach or None)


def _build_cuda(
    end: Tensor, seqlen_q: int, capacity: int, reach: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lists = _empty_lists(end, seqlen_q, capacity, reach)
    if lists.counts.numel() > 0:
        cuda.build_key_lists(end.contiguous(), seqlen_q, reach, lists)
    return lists


def build_key_lists(end: Tensor, seqlen_q: int, capacity: int, reach: int | None) -> KeyLists:
    """Call the operator.

    Args:
        end: int32 ({B|1}, heads, Sk): the rows at positions j <= r < end[j] keep key j.
        seqlen_q: Sq <= Sk; row i stands at position i + Sk - Sq.
        capacity: room of each list, a multiple of 128. A list that does not fit is left empty;
            `needed` has its length. 0 asks for the lengths alone.
        reach: keys further than that before the first row of a block are not looked for; the
            largest end[j] - j, or None where that is unknown.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape or number does not fit.
    """
    return KeyLists(*torch.ops.dmattn.build_key_lists(end, seqlen_q, capacity, reach or 0))


def _register() -> None:
    torch.library.define(_NAME, _SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(_NAME, "cpu", _build_cpu)
    torch.library.impl(_NAME, "cuda", _build_cuda)
    torch.library.register_fake(_NAME, _empty_lists)


_register()
