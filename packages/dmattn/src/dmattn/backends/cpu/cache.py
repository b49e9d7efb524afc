"""Appending to a cache, and the attention of the new tokens, by torch operations."""

import math

import torch
from torch import Tensor

from dmattn.backends.cpu import attention
from dmattn.cache_state import CacheTensors, CacheTokens
from dmattn.problem import Problem


def append_to_cache(
    new: CacheTokens,
    cache: CacheTensors,
    evict: bool,
    q: Tensor | None = None,
    softmax_scale: float = 1.0,
    softcap: float = 0.0,
) -> Tensor | None:
    """Put tokens into a cache; with q (B, T, H, D), the attention of each to what is then held.

    Attention needs evict. Numbers in the cache that no cache holds (a negative `seen`, say) never
    lead outside its tensors.
    """
    put = _replace_lowest if evict else _put_last
    out = None if q is None else q.new_empty(q.shape)
    for t in range(new.k.shape[1]):
        put(new, t, cache)
        if q is not None and out is not None:
            now, bias = slice(t, t + 1), cache.score.unsqueeze(2)
            operands = (q[:, now], cache.k, cache.v, None, bias)
            problem = Problem(*operands, softmax_scale=softmax_scale, softcap=softcap)
            out[:, now] = attention.forward(problem).out
    return out


def _is_active(tokens: CacheTokens, t: int, cache: CacheTensors) -> Tensor:
    """bool (B,)."""
    if tokens.active is None:
        return torch.ones_like(cache.seen, dtype=torch.bool)
    return tokens.active[:, t]


def _replace_lowest(tokens: CacheTokens, t: int, cache: CacheTensors) -> None:
    """Token t in the place of the lowest entry, if its score is not lower."""
    active = _is_active(tokens, t, cache)
    lowest = cache.score.amin(-1, keepdim=True)
    age = cache.position.masked_fill(cache.score != lowest, torch.iinfo(torch.int32).max)
    slot = age.argmin(-1)  # (B, HK): of the lowest entries, the earliest key
    score = tokens.score[:, :, t]
    takes = (score > -math.inf) & (score >= lowest[..., 0]) & active[:, None]
    _write(tokens, t, cache, slot, takes)
    cache.seen.add_(active.to(torch.int32))


def _put_last(tokens: CacheTokens, t: int, cache: CacheTensors) -> None:
    """Token t in the entry of its position, if there is one."""
    capacity = cache.k.shape[1]
    fits = _is_active(tokens, t, cache) & (cache.seen < capacity)
    slot = cache.seen.clamp(0, capacity - 1).long()[:, None].expand(cache.score.shape[:2])
    _write(tokens, t, cache, slot, fits[:, None].expand(slot.shape))
    cache.seen.add_(fits.to(torch.int32))


def _write(tokens: CacheTokens, t: int, cache: CacheTensors, slot: Tensor, takes: Tensor) -> None:
    """Token t to entry slot (B, HK) of the heads where takes (B, HK) says so."""
    score = tokens.score[:, :, t]
    score = score.masked_fill(~(score > -math.inf), -math.inf)
    place = cache.seen[:, None].expand(slot.shape)
    for entries, new in ((cache.score, score), (cache.position, place)):
        old = entries.gather(-1, slot[..., None])
        fresh = torch.where(takes[..., None], new[..., None].to(entries.dtype), old)
        entries.scatter_(-1, slot[..., None], fresh)
    for rows, new in ((cache.k, tokens.k[:, t]), (cache.v, tokens.v[:, t])):
        at = slot[:, None, :, None].expand(-1, 1, -1, rows.shape[3])  # (B, 1, HK, D)
        fresh = torch.where(takes[:, None, :, None], new[:, None], rows.gather(1, at))
        rows.scatter_(1, at, fresh)
