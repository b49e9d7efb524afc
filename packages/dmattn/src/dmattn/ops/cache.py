"""The operators of DynamicMaskCache.

    dmattn::cache_append              put tokens into a cache
    dmattn::cache_append_and_attend   put tokens in; each attends to the keys that are then held
    dmattn::cache_draft               what cache_append_and_attend would return, without changing
                                      the entries: a draft
    dmattn::cache_commit              put the first tokens of a draft in
    dmattn::cache_seen                a copy of `seen` that a compiler cannot leave out

Letters: B batch, T new tokens, H query heads, HK key/value heads, D head dimension. A cache entry
without a key has score -inf and position -1.
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn.backends.cpu import cache as cpu
from dmattn.backends.cuda import cache as cuda
from dmattn.backends.cuda.kernels import serves
from dmattn.cache_state import CacheTensors, CacheTokens
from dmattn.ops.register import Operator, by_device, register

_STATE = "Tensor(a!) k, Tensor(b!) v, Tensor(c!) score, Tensor(d!) position, Tensor(e!) seen"
_TOKENS = "Tensor k_new, Tensor v_new, Tensor score_new, Tensor? active"
_APPEND_SCHEMA = f"({_TOKENS}, {_STATE}, bool evict) -> ()"
_ATTEND_SCHEMA = f"(Tensor q, {_TOKENS}, {_STATE}, float softmax_scale, float softcap) -> Tensor"


# Here k and v include the spare rows behind the entries, to which the draft is written.
_DRAFT_SCHEMA = (
    "(Tensor q, Tensor k_new, Tensor v_new, Tensor score_new, Tensor(a!) k, Tensor(b!) v, "
    "Tensor score, Tensor position, Tensor seen, float softmax_scale, float softcap) "
    "-> (Tensor, Tensor)"
)
_COMMIT_SCHEMA = f"(Tensor draft, Tensor n, {_STATE}) -> ()"
_SEEN_SCHEMA = "(Tensor seen) -> Tensor"


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

    @property
    def numbers(self) -> tuple[float, float]:
        return self.softmax_scale, self.softcap


class DraftCall(NamedTuple):
    """The arguments of dmattn::cache_draft, named and ordered as in its schema."""

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    score_new: Tensor
    k: Tensor
    v: Tensor
    score: Tensor
    position: Tensor
    seen: Tensor
    softmax_scale: float
    softcap: float

    @property
    def tokens(self) -> CacheTokens:
        return CacheTokens(*self[1:4], None)

    @property
    def cache(self) -> CacheTensors:
        return CacheTensors(*self[4:9])

    @property
    def numbers(self) -> tuple[float, float]:
        return self.softmax_scale, self.softcap


class CommitCall(NamedTuple):
    """The arguments of dmattn::cache_commit, named and ordered as in its schema."""

    draft: Tensor
    n: Tensor
    k: Tensor
    v: Tensor
    score: Tensor
    position: Tensor
    seen: Tensor

    @property
    def cache(self) -> CacheTensors:
        return CacheTensors(*self[2:7])


def _append(device: ModuleType, *given: Any, **named: Any) -> None:
    """dmattn::cache_append by the implementation for a device."""
    call = AppendCall(*given, **named)
    device.append_to_cache(call.tokens, call.cache, call.evict)


def _append_fake(*given: Any, **named: Any) -> None:
    return


def _attend(device: ModuleType, *given: Any, **named: Any) -> Tensor:
    """dmattn::cache_append_and_attend by the implementation for a device."""
    call = AttendCall(*given, **named)
    out: Tensor = device.append_to_cache(call.tokens, call.cache, True, call.q, *call.numbers)
    return out


def _attend_fake(*given: Any, **named: Any) -> Tensor:
    q: Tensor = AttendCall(*given, **named).q
    return q.new_empty(q.shape)


def _draft(device: ModuleType, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """dmattn::cache_draft by the implementation for a device."""
    call = DraftCall(*given, **named)
    found: tuple[Tensor, Tensor] = device.draft_tokens(
        call.q, call.tokens, call.cache, *call.numbers
    )
    return found


def _draft_fake(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    call = DraftCall(*given, **named)
    batch, tokens, nheads_k = call.k_new.shape[:3]
    dtype = torch.int32 if _drafts_by_kernels(call.q) else torch.float64
    draft = call.q.new_empty((batch, nheads_k, tokens, 4), dtype=dtype)
    return call.q.new_empty(call.q.shape), draft


def _drafts_by_kernels(q: Tensor) -> bool:
    """Whether dmattn::cache_draft runs by the compiled kernels for q, which may be a fake tensor.

    A fake of a GPU that this machine does not have counts as one that the kernels serve.
    """
    if q.is_cuda and torch.cuda.is_available():
        return serves(q)
    return not q.is_cpu


def _commit(device: ModuleType, *given: Any, **named: Any) -> None:
    """dmattn::cache_commit by the implementation for a device."""
    call = CommitCall(*given, **named)
    device.commit_draft(call.draft, call.n, call.cache)


def _commit_fake(*given: Any, **named: Any) -> None:
    return


def _seen(seen: Tensor) -> Tensor:
    """dmattn::cache_seen for all devices."""
    return seen.clone()


for _name, _schema, _function, _fake in (
    ("dmattn::cache_append", _APPEND_SCHEMA, _append, _append_fake),
    ("dmattn::cache_append_and_attend", _ATTEND_SCHEMA, _attend, _attend_fake),
    ("dmattn::cache_draft", _DRAFT_SCHEMA, _draft, _draft_fake),
    ("dmattn::cache_commit", _COMMIT_SCHEMA, _commit, _commit_fake),
):
    register(Operator(_name, _schema, by_device(_function, cpu, cuda), _fake))
register(Operator("dmattn::cache_seen", _SEEN_SCHEMA, _seen, torch.empty_like))
