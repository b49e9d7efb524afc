"""The operator dmattn::cache_append_and_attend: decoding from the best keys alone.

Letters: B batch, T new tokens, H query heads, HK key/value heads, W entries of the cache, D head
dimension. A cache entry without a key has score -inf and position -1.
"""

import math

import torch
from torch import Tensor

from dmattn.ops import cpu, cuda

_NAME = "dmattn::cache_append_and_attend"
_SCHEMA = (
    "(Tensor q, Tensor k_new, Tensor v_new, Tensor score_new, Tensor? active, Tensor(a!) k, "
    "Tensor(b!) v, Tensor(c!) score, Tensor(d!) position, Tensor(e!) seen, float softmax_scale, "
    "float softcap) -> Tensor"
)


def _cuda(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    score_new: Tensor,
    active: Tensor | None,
    k: Tensor,
    v: Tensor,
    score: Tensor,
    position: Tensor,
    seen: Tensor,
    softmax_scale: float,
    softcap: float,
) -> Tensor:
    position_new, total = count_tokens(seen, active, q.shape[1])
    outs = []
    for t in range(q.shape[1]):
        now = slice(t, t + 1)
        cuda.append_to_cache(
            k_new[:, now],
            v_new[:, now],
            score_new[:, :, now],
            position_new[:, now],
            k,
            v,
            score,
            position,
        )
        bias = score.unsqueeze(2)
        out, _ = cuda.forward(q[:, now], k, v, None, bias, softmax_scale, False, softcap)
        outs.append(out)
    seen.add_(total)
    return _joined(outs, q)


def _cpu(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    score_new: Tensor,
    active: Tensor | None,
    k: Tensor,
    v: Tensor,
    score: Tensor,
    position: Tensor,
    seen: Tensor,
    softmax_scale: float,
    softcap: float,
) -> Tensor:
    position_new, total = count_tokens(seen, active, q.shape[1])
    outs = []
    for t in range(q.shape[1]):
        _append_on_cpu(
            k_new[:, t], v_new[:, t], score_new[:, :, t], position_new[:, t], k, v, score, position
        )
        bias = score.unsqueeze(2)
        out, _ = cpu.forward(q[:, t : t + 1], k, v, None, bias, softmax_scale, False, softcap)
        outs.append(out)
    seen.add_(total)
    return _joined(outs, q)


def _fake(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    score_new: Tensor,
    active: Tensor | None,
    k: Tensor,
    v: Tensor,
    score: Tensor,
    position: Tensor,
    seen: Tensor,
    softmax_scale: float,
    softcap: float,
) -> Tensor:
    return q.new_empty(q.shape)


def count_tokens(seen: Tensor, active: Tensor | None, tokens: int) -> tuple[Tensor, Tensor | int]:
    """Positions int32 (B, T) of the new tokens, -1 where not active, and how many are."""
    if active is None:
        if tokens == 1:
            return seen[:, None], 1
        return seen[:, None] + torch.arange(tokens, dtype=torch.int32, device=seen.device), tokens
    running = active.cumsum(1, dtype=torch.int32)
    return (seen[:, None] + running - 1).masked_fill(~active, -1), running[:, -1]


def _append_on_cpu(
    k_new: Tensor,
    v_new: Tensor,
    score_new: Tensor,
    position_new: Tensor,
    k: Tensor,
    v: Tensor,
    score: Tensor,
    position: Tensor,
) -> None:
    """One token: k_new, v_new (B, HK, D), score_new (B, HK), position_new (B,)."""
    lowest = score.amin(-1, keepdim=True)
    age = position.masked_fill(score != lowest, torch.iinfo(torch.int32).max)
    slot = age.argmin(-1, keepdim=True)  # (B, HK, 1): of the lowest entries, the earliest key
    takes = (score_new > -math.inf) & (score_new >= lowest[..., 0]) & (position_new >= 0)[:, None]
    takes = takes[..., None]
    for entries, new in (
        (score, score_new),
        (position, position_new[:, None].expand(takes[..., 0].shape)),
    ):
        old = entries.gather(-1, slot)
        entries.scatter_(-1, slot, torch.where(takes, new[..., None].to(entries.dtype), old))
    for rows, new in ((k, k_new), (v, v_new)):
        at = slot.mT[..., None].expand(-1, 1, -1, rows.shape[3])  # (B, 1, HK, D)
        fresh = torch.where(takes[:, None], new[:, None], rows.gather(1, at))
        rows.scatter_(1, at, fresh)


def _joined(outs: list[Tensor], q: Tensor) -> Tensor:
    if not outs:
        return q.new_empty(q.shape)
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _register() -> None:
    torch.library.define(_NAME, _SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(_NAME, "cpu", _cpu)
    torch.library.impl(_NAME, "cuda", _cuda)
    torch.library.register_fake(_NAME, _fake)


_register()
