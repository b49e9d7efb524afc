"""Calls of the operators of a cache, past the dispatcher of torch where that has no part."""

import torch

import dmattn.ops.cache  # noqa: F401 - registers the operators
from dmattn.backends.cpu import cache as cpu
from dmattn.backends.cuda import cache as cuda
from dmattn.cache_state import CacheTensors, CacheTokens
from dmattn.dispatch import is_plain_call


def append_tokens(new: CacheTokens, cache: CacheTensors, evict: bool) -> None:
    """dmattn::cache_append: tokens into all slots, without attention."""
    if is_plain_call(*new):
        append = cuda.append_to_cache if new.k.is_cuda else cpu.append_to_cache
        append(new, cache, evict)
    else:
        torch.ops.dmattn.cache_append(*new, *cache, evict)
