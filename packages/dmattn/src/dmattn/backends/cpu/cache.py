"""Appending to a cache, drafts, and the attention of new tokens, by operations of torch.

For the CPU, and for GPUs that the compiled kernels do not serve. There the host waits for each
token that attends.
"""

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
    """Put tokens into a cache, one after the other.

    With q (B, T, H, D), which needs `evict`, each token also attends to the keys that the cache
    holds once it is in; returns the output (B, T, H, D). Without q returns None. Invalid numbers in
    the tensors of a cache, such as a negative `seen`, lead to no access outside of them.
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
    """Whether token t of each sequence is active: bool (B,)."""
    if tokens.active is None:
        return torch.ones_like(cache.seen, dtype=torch.bool)
    return tokens.active[:, t]


def draft_tokens(
    q: Tensor, new: CacheTokens, cache: CacheTensors, softmax_scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """As `draft_tokens` in `dmattn.backends.cuda.cache`, but the draft is a float64 tensor."""
    entries, tokens = cache.score.shape[2], new.k.shape[1]
    for rows, drafted in ((cache.k, new.k), (cache.v, new.v)):
        rows[:, entries : entries + tokens] = drafted
    score, position = cache.score.clone(), cache.position.clone()
    cleaned = _cleaned(new.score)
    # Keys are numbered: first the entries as they are now, then the tokens. `holds`: which key an
    # entry holds after the tokens so far. `is_held`: whether a key is held then. `end`: the index
    # of the token that evicts a key, T if there is none.
    holds = torch.arange(entries, device=score.device).expand(score.shape).contiguous()
    is_held = score.new_zeros((*score.shape[:2], entries + tokens), dtype=torch.bool)
    is_held[..., :entries] = True
    end = torch.full(is_held.shape, tokens, device=score.device)
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
    """As `commit_draft` in `dmattn.backends.cuda.cache`, for a draft of this module."""
    entries, tokens = cache.score.shape[2], draft.shape[2]
    slots, end, score, position = draft.unbind(-1)
    count = count.clamp(0, tokens)
    for t in range(tokens):
        # Several tokens may take the place of one entry; only the last of them is written.
        takes = (t < count)[:, None] & (end[..., t] >= count[:, None]) & (slots[..., t] >= 0)
        slot = slots[..., t].long().clamp(0, entries - 1)
        row = CacheTokens(cache.k[:, entries + t], cache.v[:, entries + t], score[..., t], None)
        _write(row, position[..., t], cache, slot, takes)
    cache.seen.add_(count.to(torch.int32))


def _replace_lowest(tokens: CacheTokens, t: int, cache: CacheTensors) -> None:
    """Write token t to the lowest entry, if its score is not lower than that of the entry."""
    active = _is_active(tokens, t, cache)
    slot = _lowest(cache.score, cache.position)
    score = tokens.score[:, :, t]
    takes = (score > -math.inf) & (score >= _at(cache.score, slot)) & active[:, None]
    _write(_row(tokens, t), cache.seen[:, None].expand(slot.shape), cache, slot, takes)
    cache.seen.add_(active.to(torch.int32))


def _lowest(score: Tensor, position: Tensor) -> Tensor:
    """int64 (B, HK): the entry with the lowest score, of equal ones that with the earliest key."""
    lowest = score.amin(-1, keepdim=True)
    age = position.masked_fill(score != lowest, torch.iinfo(torch.int32).max)
    return age.argmin(-1)


def _put_last(tokens: CacheTokens, t: int, cache: CacheTensors) -> None:
    """Write token t to the entry number `seen`, its position, if there is room."""
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
    """entries (B, HK, n) at the indices slot (B, HK): (B, HK)."""
    return entries.gather(-1, slot[..., None])[..., 0]


def _put(entries: Tensor, slot: Tensor, new: Tensor, takes: Tensor) -> None:
    """Write new (B, HK) to entries (B, HK, n) at the indices slot (B, HK), where takes is True."""
    fresh = torch.where(takes, new.to(entries.dtype), _at(entries, slot))
    entries.scatter_(-1, slot[..., None], fresh[..., None])


def _write(
    row: CacheTokens, place: Tensor, cache: CacheTensors, slot: Tensor, takes: Tensor
) -> None:
    """Write a `_row` with position place (B, HK) to entries slot (B, HK), where takes is True."""
    _put(cache.score, slot, _cleaned(row.score), takes)
    _put(cache.position, slot, place, takes)
    for rows, new in ((cache.k, row.k), (cache.v, row.v)):
        at = slot[:, None, :, None].expand(-1, 1, -1, rows.shape[3])  # (B, 1, HK, D)
        fresh = torch.where(takes[:, None, :, None], new[:, None], rows.gather(1, at))
        rows.scatter_(1, at, fresh)
