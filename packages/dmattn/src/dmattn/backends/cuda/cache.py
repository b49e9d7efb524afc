"""Appending to a cache, and the attention of the new tokens, by the CUDA kernels."""

import torch
from torch import Tensor

from dmattn.backends.cuda.kernels import CACHE_APPEND, check_device, launch
from dmattn.cache_state import CacheTensors, CacheTokens


def append_to_cache(
    new: CacheTokens,
    cache: CacheTensors,
    evict: bool,
    q: Tensor | None = None,
    softmax_scale: float = 1.0,
    softcap: float = 0.0,
) -> Tensor | None:
    """Put tokens into a cache; with q (B, T, H, D), the attention of each to what is then held.

    Attention needs evict.

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
