"""The operators of DynamicMaskCache.

    dmattn::cache_append              put tokens into a cache
    dmattn::cache_append_and_attend   the same, and let each attend to what is then held

Letters: B batch, T new tokens, H query heads, HK key/value heads, D head dimension. A cache entry
without a key has score -inf and position -1.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn.backends.cpu import attention as cpu
from dmattn.backends.cuda import cache as cuda
from dmattn.backends.cuda.cache import CacheTensors, CacheTokens
from dmattn.problem import Problem

_APPEND = "dmattn::cache_append"
_ATTEND = "dmattn::cache_append_and_attend"
_STATE = "Tensor(a!) k, Tensor(b!) v, Tensor(c!) score, Tensor(d!) position, Tensor(e!) seen"
_TOKENS = "Tensor k_new, Tensor v_new, Tensor score_new, Tensor? active"
_APPEND_SCHEMA = f"({_TOKENS}, {_STATE}, bool evict) -> ()"
_ATTEND_SCHEMA = f"(Tensor q, {_TOKENS}, {_STATE}, float softmax_scale, float softcap) -> Tensor"


class AppendCall(NamedTuple):
    """The arguments of dmattn::cache_append, named and ordered as in its schema."""

    k_new: Tensor
    v_new: Tensor
    score_new: Tensor
    active: Tensor | None
    k: Tensor
    v: Tensor
    score: Tensor
    position: Tensor
    seen: Tensor
    evict: bool

    @property
    def tokens(self) -> CacheTokens:
        return CacheTokens(*self[:4])

    @property
    def cache(self) -> CacheTensors:
        return CacheTensors(*self[4:9])


class AttendCall(NamedTuple):
    """The arguments of dmattn::cache_append_and_attend, named and ordered as in its schema."""

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    score_new: Tensor
    active: Tensor | None
    k: Tensor
    v: Tensor
    score: Tensor
    position: Tensor
    seen: Tensor
    softmax_scale: float
    softcap: float

    @property
    def tokens(self) -> CacheTokens:
        return CacheTokens(*self[1:5])

    @property
    def cache(self) -> CacheTensors:
        return CacheTensors(*self[5:10])


def _append_cuda(*given: Any, **named: Any) -> None:
    call = AppendCall(*given, **named)
    cuda.append_to_cache(call.tokens, call.cache, call.evict)


def _append_cpu(*given: Any, **named: Any) -> None:
    call = AppendCall(*given, **named)
    put = _replace_lowest if call.evict else _put_last
    for t in range(call.k_new.shape[1]):
        put(call.tokens, t, call.cache)


def _append_fake(*given: Any, **named: Any) -> None:
    return


def _attend_cuda(*given: Any, **named: Any) -> Tensor:
    call = AttendCall(*given, **named)
    numbers = (call.softmax_scale, call.softcap)
    out = cuda.append_to_cache(call.tokens, call.cache, True, call.q, *numbers)
    assert out is not None  # as q was given
    return out


def _attend_cpu(*given: Any, **named: Any) -> Tensor:
    call = AttendCall(*given, **named)
    cache, out = call.cache, call.q.new_empty(call.q.shape)
    for t in range(call.q.shape[1]):
        _replace_lowest(call.tokens, t, cache)
        now, bias = slice(t, t + 1), cache.score.unsqueeze(2)
        operands = (call.q[:, now], cache.k, cache.v, None, bias)
        problem = Problem(*operands, call.softmax_scale, False, call.softcap)
        out[:, now] = cpu.forward(problem).out
    return out


def _attend_fake(*given: Any, **named: Any) -> Tensor:
    q: Tensor = AttendCall(*given, **named).q
    return q.new_empty(q.shape)


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
    slot = cache.seen.clamp(max=capacity - 1).long()[:, None].expand(cache.score.shape[:2])
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


def _register() -> None:
    operators = (
        (_APPEND, _APPEND_SCHEMA, _append_cpu, _append_cuda, _append_fake),
        (_ATTEND, _ATTEND_SCHEMA, _attend_cpu, _attend_cuda, _attend_fake),
    )
    for name, schema, on_cpu, on_cuda, fake in operators:
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(name, "cpu", on_cpu)
        torch.library.impl(name, "cuda", on_cuda)
        torch.library.register_fake(name, fake)


_register()
