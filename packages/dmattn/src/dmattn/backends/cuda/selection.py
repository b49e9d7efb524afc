"""Selection of keys, and lists from intervals, by the CUDA kernels."""

import torch
from torch import Tensor

from dmattn.backends.cuda.kernels import (
    BUILD_KEY_LISTS,
    SELECT,
    at_once,
    check_device,
    launch,
    parts,
)
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
    """The CUDA implementation of dmattn::select_keys: fills `selection`, which must not be empty.

    `cu_seqlens`: int32, contiguous, or None.

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


class PreparedSelection:
    """`select` for later scores of a known kind, with the allocation of the selection.

    For calls without documents, on a device that the kernels support. It holds no tensors, and
    several threads may use it.
    """

    def __init__(self, found: Selection, window: int, seqlen_q: int, is_causal: bool) -> None:
        """`found`: the selection of the first call, not empty."""
        self._device = found.end.get_device()
        self._enqueue = at_once(SELECT)
        # Allocated with explicit strides, which takes torch less time.
        self._end, self._idx, self._count, self._full = (
            (tuple(t.shape), t.stride()) for t in found
        )
        self._settings = (min(window, found.end.shape[2]), seqlen_q, is_causal)

    def __call__(self, scores: Tensor, key_mask: Tensor | None) -> Selection:
        end = scores.new_empty_strided(*self._end, dtype=torch.int32)
        idx = end.new_empty_strided(*self._idx)
        count, full = end.new_empty_strided(*self._count), end.new_empty_strided(*self._full)
        selection, device = Selection(end, idx, count, full), self._device
        given = (device, scores, key_mask, parts(selection), *self._settings, None)
        if self._enqueue(*given, torch._C._cuda_getCurrentRawStream(device)) != 0:
            launch(SELECT, scores, *given)
        return selection


def build_key_lists(end: Tensor, seqlen_q: int, reach: int, lists: KeyLists) -> None:
    """The CUDA implementation of dmattn::build_key_lists: fills `lists`, at least one.

    `end`: int32 ({B|1}, heads, Sk), contiguous. `reach`: 0 if it is unknown.

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    device = end.get_device()
    check_device(device)
    selection = Selection(end, lists.idx, lists.count, lists.full)
    launch(BUILD_KEY_LISTS, end, device, parts(selection), seqlen_q, reach, lists.needed)


def document_ends(cu_seqlens: Tensor, seqlen_k: int) -> Tensor:
    """The implementation of dmattn::document_ends for all GPUs, by operations of torch.

    The host does not wait for the values, and does not check them.
    """
    key = torch.arange(seqlen_k, dtype=torch.int32, device=cu_seqlens.device)
    bounds = torch.cat((cu_seqlens, cu_seqlens.new_full((1,), seqlen_k)))
    ends = bounds[torch.searchsorted(cu_seqlens, key, right=True)]
    # Even with wrong boundaries each key is seen by the row at its position, and ends within Sk.
    return ends.clamp(max=seqlen_k).maximum(key + 1)
