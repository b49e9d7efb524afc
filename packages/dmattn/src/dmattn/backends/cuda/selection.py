"""Selection of keys, and lists from intervals, by the CUDA kernels."""

import torch
from torch import Tensor

from dmattn.backends.cuda.kernels import BUILD_KEY_LISTS, SELECT, check_device, launch, parts
from dmattn.key_lists import KeyLists, Selection


def select(
    scores: Tensor,
    key_mask: Tensor | None,
    window: int,
    seqlen_q: int,
    is_causal: bool,
    selection: Selection,
    cu_seqlens: Tensor | None = None,
) -> None:
    """The CUDA implementation of dmattn::select_keys: fills `selection`, which has keys and rows.

    `cu_seqlens`: int32, contiguous.

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    device = scores.get_device()
    check_device(device)
    window = min(window, scores.shape[2])
    lists = parts(selection)
    launch(
        SELECT,
        scores,
        *(device, scores, key_mask, lists, window, seqlen_q, is_causal, cu_seqlens),
    )


def build_key_lists(end: Tensor, seqlen_q: int, reach: int, lists: KeyLists) -> None:
    """The CUDA implementation of dmattn::build_key_lists: fills `lists`, of which there are some.

    `end`: int32 ({B|1}, heads, Sk), contiguous. `reach`: 0 where it is unknown.

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    device = end.get_device()
    check_device(device)
    selection = Selection(end, lists.idx, lists.count, lists.full)
    launch(BUILD_KEY_LISTS, end, device, parts(selection), seqlen_q, reach, lists.needed)


def document_ends(cu_seqlens: Tensor, seqlen_k: int) -> Tensor:
    """The CUDA implementation of dmattn::document_ends; the host does not wait for the values."""
    key = torch.arange(seqlen_k, dtype=torch.int32, device=cu_seqlens.device)
    bounds = torch.cat((cu_seqlens, cu_seqlens.new_full((1,), seqlen_k)))
    ends = bounds[torch.searchsorted(cu_seqlens, key, right=True)]
    # Whatever the boundaries are, a key is seen by its own row, and by none that is not there.
    return ends.clamp(max=seqlen_k).maximum(key + 1)
