"""Appending to a cache, drafts, and the attention of new tokens, by the CUDA kernels."""

import torch
from torch import Tensor

from dmattn.backends.cuda.kernels import (
    CACHE_APPEND,
    CACHE_COMMIT,
    CACHE_DRAFT,
    check_device,
    launch,
)
from dmattn.cache_state import CacheTensors, CacheTokens


def append_to_cache(
    new: CacheTokens,
    cache: CacheTensors,
    evict: bool,
    q: Tensor | None = None,
    softmax_scale: float = 1.0,
    softcap: float = 0.0,
) -> Tensor | None:
    """Put tokens into a cache, one after the other.

    With q (B, T, H, D), which needs `evict`, each token also attends to the keys that the cache
    holds once it is in; returns the output (B, T, H, D). Without q returns None.

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    device = cache.k.get_device()
    check_device(device)
    out = None if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    if new.k.shape[0] == 0 or new.k.shape[1] == 0:
        return out
    launch(
        CACHE_APPEND,
        cache.k,
        *(device, new.k, new.v, new.score, new.active, *cache),
        *(evict, q, out, softmax_scale, softcap),
    )
    return out


def draft_tokens(
    q: Tensor, new: CacheTokens, cache: CacheTensors, softmax_scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """The attention of tokens that are not put in, and what `commit_draft` needs of them.

    Args:
        q: (B, T, H, D), T at most 32.
        new: the tokens, all of them active.
        cache: its k and v (B, w + T or more, HK, D) include the spare rows behind the w entries,
            to which the tokens are written; the rest stays unchanged.

    Returns:
        out (B, T, H, D), and the draft, int32 (B, HK, T, 4).

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    device = cache.k.get_device()
    check_device(device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    batch, tokens, nheads_k = new.k.shape[:3]
    draft = new.k.new_empty((batch, nheads_k, tokens, 4), dtype=torch.int32)
    if batch > 0 and tokens > 0:
        given = (device, q, new.k, new.v, new.score, *cache, draft, out, softmax_scale, softcap)
        launch(CACHE_DRAFT, cache.k, *given)
    return out, draft


def commit_draft(draft: Tensor, count: Tensor, cache: CacheTensors) -> None:
    """Put the first count (B,) tokens of each sequence of the last draft into the cache.

    Args:
        draft: the second result of `draft_tokens`.
        count: int32 or int64 (B,).
        cache: as for `draft_tokens`, with the tokens in the spare rows.

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    device = cache.k.get_device()
    check_device(device)
    if draft.shape[0] > 0 and draft.shape[2] > 0:
        launch(CACHE_COMMIT, cache.k, device, draft, count, *cache)
