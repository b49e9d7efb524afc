"""Calls of the operators of a cache, which bypass torch's dispatcher where that is possible."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dmattn.ops.cache  # noqa: F401 - registers the operators
from dmattn.backends.cpu import cache as cpu
from dmattn.backends.cuda import cache as cuda
from dmattn.backends.cuda.kernels import serves
from dmattn.cache_state import CacheTensors, CacheTokens, outside_of
from dmattn.dispatch import is_plain_call


def change_cache(
    operator: Callable[..., Any], tokens: tuple[Any, ...], cache: CacheTensors, *rest: Any
) -> Any:
    """Call an operator that changes the tensors of a cache: operator(*tokens, *cache, *rest).

    Inductor (seen with torch 2.13) may compute what follows from `seen`, such as a rotation by
    positions, only where it is used. That may be after the operator, which has changed `seen`. So
    in compiled code the operator changes a copy, and torch copies it back, which a compiler does at
    the end. The copy is made by an operator, since inductor leaves out one by `Tensor.clone()`.
    """
    if not torch.compiler.is_compiling():
        return operator(*tokens, *cache, *rest)
    seen = torch.ops.dmattn.cache_seen(cache.seen)
    found = operator(*tokens, cache.k, cache.v, cache.score, cache.position, seen, *rest)
    cache.seen.copy_(seen)
    return found


def append_tokens(new: CacheTokens, cache: CacheTensors, evict: bool) -> None:
    """dmattn::cache_append: put tokens into all slots, without attention."""
    if is_plain_call(*new):
        if new.k.shape[1] > 1:
            k, v, score = outside_of(cache, *new[:3])
            new = CacheTokens(k, v, score, new.active)
        append = cuda.append_to_cache if serves(new.k) else cpu.append_to_cache
        append(new, cache, evict)
    else:
        change_cache(torch.ops.dmattn.cache_append, new, cache, evict)


def draft_tokens(
    q: Tensor, new: CacheTokens, cache: CacheTensors, softmax_scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """dmattn::cache_draft: attend with drafted tokens that are not put in.

    Returns out, shaped as q, and the draft, a tensor that `commit_draft` takes.
    """
    if is_plain_call(q, new.k, new.v, new.score):
        draft = cuda.draft_tokens if serves(q) else cpu.draft_tokens
        return draft(q, new, cache, softmax_scale, softcap)
    found: tuple[Tensor, Tensor] = torch.ops.dmattn.cache_draft(
        q, *new[:3], *cache, softmax_scale, softcap
    )
    return found


def commit_draft(draft: Tensor, count: Tensor, cache: CacheTensors) -> None:
    """dmattn::cache_commit: put the first count (B,) tokens of a draft into all slots."""
    if is_plain_call(draft, count):
        commit = cuda.commit_draft if serves(draft) else cpu.commit_draft
        commit(draft, count, cache)
    else:
        change_cache(torch.ops.dmattn.cache_commit, (draft, count), cache)
