"""Appending to a cache, drafts, and the attention of the new tokens, by torch operations."""

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


def draft_tokens(
    q: Tensor, new: CacheTokens, cache: CacheTensors, softmax_scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """As the function of `dmattn.backends.cuda.cache`; what is needed of a draft is float64."""
    entries, tokens = cache.score.shape[2], new.k.shape[1]
    for rows, drafted in ((cache.k, new.k), (cache.v, new.v)):
        rows[:, entries : entries + tokens] = drafted
    score, position = cache.score.clone(), cache.position.clone()
    cleaned = _cleaned(new.score)
    # Keys: the entries, and the tokens behind them. Which one an entry holds, and which are held.
    holds = torch.arange(entries).expand(score.shape).contiguous()
    is_held = torch.zeros((*score.shape[:2], entries + tokens), dtype=torch.bool)
    is_held[..., :entries] = True
    end = torch.full(is_held.shape, tokens)
    drafts, seen_by = [], []
    for t in range(tokens):
        slot = _lowest(score, position)
        place = (cache.seen + t)[:, None].expand(slot.shape)
        takes = (cleaned[..., t] > -math.inf) & (cleaned[..., t] >= _at(score, slot))
        leaves = _at(holds, slot)
        _put(is_held, leaves, ~takes, takes)
        _put(end, leaves, torch.full_like(slot, t), takes)
        is_held[..., entries + t] = takes
        for state, fresh in ((score, cleaned[..., t]), (position, place)):
            _put(state, slot, fresh, takes)
        _put(holds, slot, torch.full_like(slot, entries + t), takes)
        seen_by.append(is_held.clone())
        drafts.append((slot.where(takes, -1), takes, cleaned[..., t], place))
    k, v = (rows[:, : entries + tokens] for rows in (cache.k, cache.v))
    bias, mask = torch.cat((cache.score, cleaned), 2), torch.stack(seen_by, 2)
    problem = Problem(
        *(q, k, v, mask, bias.unsqueeze(2)), softmax_scale=softmax_scale, softcap=softcap
    )
    found = [torch.stack([x.double() for x in column], -1) for column in zip(*drafts, strict=True)]
    found[1] = found[1] * end[..., entries:]
    return attention.forward(problem).out, torch.stack(found, -1)


def commit_draft(draft: Tensor, count: Tensor, cache: CacheTensors) -> None:
    """As the function of `dmattn.backends.cuda.cache`."""
    entries, tokens = cache.score.shape[2], draft.shape[2]
    slots, end, score, position = draft.unbind(-1)
    count = count.clamp(0, tokens)
    for t in range(tokens):
        # Of the tokens that take the place of one entry the last one stays.
        takes = (t < count)[:, None] & (end[..., t] >= count[:, None]) & (slots[..., t] >= 0)
        slot = slots[..., t].long().clamp(0, entries - 1)
        row = CacheTokens(cache.k[:, entries + t], cache.v[:, entries + t], score[..., t], None)
        _write(row, position[..., t], cache, slot, takes)
    cache.seen.add_(count.to(torch.int32))


def _replace_lowest(tokens: CacheTokens, t: int, cache: CacheTensors) -> None:
    """Token t in the place of the lowest entry, if its score is not lower."""
    active = _is_active(tokens, t, cache)
    slot = _lowest(cache.score, cache.position)
    score = tokens.score[:, :, t]
    takes = (score > -math.inf) & (score >= _at(cache.score, slot)) & active[:, None]
    _write(_row(tokens, t), cache.seen[:, None].expand(slot.shape), cache, slot, takes)
    cache.seen.add_(active.to(torch.int32))


def _lowest(score: Tensor, position: Tensor) -> Tensor:
    """int64 (B, HK), an entry: of the lowest ones the earliest key."""
    lowest = score.amin(-1, keepdim=True)
    age = position.masked_fill(score != lowest, torch.iinfo(torch.int32).max)
    return age.argmin(-1)


def _put_last(tokens: CacheTokens, t: int, cache: CacheTensors) -> None:
    """Token t in the entry of its position, if there is one."""
    capacity = cache.k.shape[1]
    fits = _is_active(tokens, t, cache) & (cache.seen < capacity)
    slot = cache.seen.clamp(0, capacity - 1).long()[:, None].expand(cache.score.shape[:2])
    place, takes = (x[:, None].expand(slot.shape) for x in (cache.seen, fits))
    _write(_row(tokens, t), place, cache, slot, takes)
    cache.seen.add_(fits.to(torch.int32))


def _row(tokens: CacheTokens, t: int) -> CacheTokens:
    """Token t of each sequence: k and v (B, HK, D), score (B, HK)."""
    return CacheTokens(tokens.k[:, t], tokens.v[:, t], tokens.score[:, :, t], None)


def _cleaned(score: Tensor) -> Tensor:
    return score.masked_fill(~(score > -math.inf), -math.inf)


def _at(entries: Tensor, slot: Tensor) -> Tensor:
    """(B, HK): of entries (B, HK, n), the one in slot (B, HK)."""
    return entries.gather(-1, slot[..., None])[..., 0]


def _put(entries: Tensor, slot: Tensor, new: Tensor, takes: Tensor) -> None:
    """new (B, HK) to slot (B, HK) of entries (B, HK, n), where takes (B, HK) says so."""
    fresh = torch.where(takes, new.to(entries.dtype), _at(entries, slot))
    entries.scatter_(-1, slot[..., None], fresh[..., None])


def _write(
    row: CacheTokens, place: Tensor, cache: CacheTensors, slot: Tensor, takes: Tensor
) -> None:
    """A `_row` to entry slot (B, HK) of the heads where takes (B, HK) says so.

    place (B, HK) is its position.
    """
    _put(cache.score, slot, _cleaned(row.score), takes)
    _put(cache.position, slot, place, takes)
    for rows, new in ((cache.k, row.k), (cache.v, row.v)):
        at = slot[:, None, :, None].expand(-1, 1, -1, rows.shape[3])  # (B, 1, HK, D)
        fresh = torch.where(takes[:, None, :, None], new[:, None], rows.gather(1, at))
        rows.scatter_(1, at, fresh)
