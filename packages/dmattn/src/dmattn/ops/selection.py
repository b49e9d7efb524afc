"""The operator dmattn::select_keys: which keys each query row keeps, by a score per key."""

import math

import torch
from torch import Tensor

from dmattn.backends.cpu import selection as cpu
from dmattn.backends.cuda import selection as cuda
from dmattn.key_lists import BLOCK_ROWS, Selection, capacity_for, num_blocks

_NAME = "dmattn::select_keys"
_SCHEMA = (
    "(Tensor scores, Tensor? key_mask, int window, int seqlen_q, bool is_causal, "
    "Tensor? cu_seqlens=None) "
    "-> (Tensor end, Tensor idx, Tensor count, Tensor full)"
)
_CUDA_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _empty_selection(
    scores: Tensor,
    key_mask: Tensor | None,
    window: int,
    seqlen_q: int,
    is_causal: bool,
    cu_seqlens: Tensor | None = None,
) -> Selection:
    """Results to be filled, idx with zeros; raises for inputs that do not fit together."""
    if scores.dim() != 3:
        raise ValueError(
            f"scores: got shape {tuple(scores.shape)}, wanted (batch|1, heads|1, seqlen_k)"
        )
    if not scores.is_floating_point():
        raise TypeError(f"scores: got dtype {scores.dtype}, wanted a floating dtype")
    if scores.is_cuda and scores.dtype not in _CUDA_DTYPES:
        raise TypeError(f"scores: got dtype {scores.dtype}, wanted float16, bfloat16 or float32")
    if window < 1:
        raise ValueError(f"window: got {window}, wanted at least 1")
    batch, heads, seqlen_k = scores.shape
    if seqlen_q < 0 or (is_causal and seqlen_q > seqlen_k):
        raise ValueError(f"seqlen_q: got {seqlen_q}, wanted 0 to {seqlen_k}, the number of keys")
    if cu_seqlens is not None:
        _check_documents(cu_seqlens, scores, seqlen_q, is_causal)
    if key_mask is not None:
        if key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask: got dtype {key_mask.dtype}, wanted torch.bool")
        if key_mask.device != scores.device:
            raise ValueError(f"key_mask: got device {key_mask.device}, wanted {scores.device}")
        fits = key_mask.dim() == 3 and key_mask.shape[2] == seqlen_k
        if not fits or not all(
            1 in (n, m) or n == m for n, m in zip(key_mask.shape[:2], (batch, heads), strict=True)
        ):
            raise ValueError(
                f"key_mask: got shape {tuple(key_mask.shape)}, wanted one that broadcasts with "
                f"scores of shape {tuple(scores.shape)}"
            )
        batch = key_mask.shape[0] if batch == 1 else batch
        heads = key_mask.shape[1] if heads == 1 else heads
    blocks = num_blocks(seqlen_q, is_causal)
    capacity = capacity_for(window + (BLOCK_ROWS if is_causal else 0), seqlen_k)

    def empty(*shape: int) -> Tensor:
        return scores.new_empty(shape, dtype=torch.int32)

    return Selection(
        empty(batch, heads, seqlen_k),
        scores.new_zeros((batch, heads, blocks, capacity), dtype=torch.int32),
        empty(batch, heads, blocks),
        empty(batch, heads, blocks) if is_causal else empty(0),
    )


def _check_documents(cu_seqlens: Tensor, scores: Tensor, seqlen_q: int, is_causal: bool) -> None:
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens: got dtype {cu_seqlens.dtype}, wanted torch.int32")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}, wanted (documents + 1)")
    if cu_seqlens.device != scores.device:
        raise ValueError(f"cu_seqlens: got device {cu_seqlens.device}, wanted {scores.device}")
    if not is_causal:
        raise ValueError("cu_seqlens: got boundaries with is_causal=False, wanted is_causal=True")
    if seqlen_q != scores.shape[2]:
        raise ValueError(f"seqlen_q: got {seqlen_q}, wanted {scores.shape[2]} with cu_seqlens")


def _select_cpu(
    scores: Tensor,
    key_mask: Tensor | None,
    window: int,
    seqlen_q: int,
    is_causal: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shaped = _empty_selection(scores, key_mask, window, seqlen_q, is_causal, cu_seqlens)
    if key_mask is not None:
        scores = torch.where(key_mask, scores, -math.inf)
    capacity = shaped.idx.shape[3]
    return cpu.select(scores, window, seqlen_q, is_causal, capacity, cu_seqlens)


def _select_cuda(
    scores: Tensor,
    key_mask: Tensor | None,
    window: int,
    seqlen_q: int,
    is_causal: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    selection = _empty_selection(scores, key_mask, window, seqlen_q, is_causal, cu_seqlens)
    if selection.end.numel() == 0 or selection.idx.numel() == 0:
        for t in selection:
            t.zero_()
    else:
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.contiguous()
        cuda.select(scores, key_mask, window, seqlen_q, is_causal, selection, cu_seqlens)
    return selection


def select_keys(
    scores: Tensor,
    key_mask: Tensor | None,
    window: int,
    seqlen_q: int,
    is_causal: bool,
    cu_seqlens: Tensor | None = None,
) -> Selection:
    """Call the operator.

    Args:
        scores: floating ({B|1}, {heads|1}, Sk), any strides; on CUDA not float64. No gradient.
        key_mask: bool ({B|1}, {heads|1}, Sk), True where a key may be kept, or None.
        window: keys to keep, at least 1.
        seqlen_q: Sq, at most Sk when causal; row i stands at position i + Sk - Sq.
        is_causal: each row keeps the best of the keys up to its position, or all rows the best of
            all keys.
        cu_seqlens: int32 (documents + 1,), rising from 0 to Sk: boundaries of documents packed one
            behind the other. Keys compete, and are seen, within their document. Causal, Sq = Sk.
            The values are trusted; wrong ones give another selection, not an invalid one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, device or number does not fit.
    """
    arguments = (scores.detach(), key_mask, window, seqlen_q, is_causal, cu_seqlens)
    return Selection(*torch.ops.dmattn.select_keys(*arguments))


def _register() -> None:
    torch.library.define(_NAME, _SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(_NAME, "cpu", _select_cpu)
    torch.library.impl(_NAME, "cuda", _select_cuda)
    torch.library.register_fake(_NAME, _empty_selection)


_register()
