"""The tensors of a cache and what is put into it: what every stage down to the backends hands on.

Letters: B batch, T new tokens, HK key/value heads, D head dimension.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor


class CacheTensors(NamedTuple):
    """The state of a cache; contiguous, but for k and v, whose slots may lie apart."""

    k: Tensor  # (B, entries, HK, D)
    v: Tensor  # as k
    score: Tensor  # (B, HK, entries), -inf where there is no key
    position: Tensor  # int32 (B, HK, entries), -1 where there is no key
    seen: Tensor  # int32 (B,): tokens so far


class CacheTokens(NamedTuple):
    """What is put into a cache."""

    k: Tensor  # (B, T, HK, D)
    v: Tensor  # as k
    score: Tensor  # (B, HK, T)
    active: Tensor | None  # bool (B, T), False for a token to skip


def outside_of(cache: CacheTensors, *tensors: Tensor) -> list[Tensor]:
    """The tensors, with copies in place of those that lie in the memory of a cache.

    Of several tokens that go into it, the first ones may take the place that the others lie in.
    """
    own = {t.untyped_storage().data_ptr() for t in cache}
    return [t.clone() if t.untyped_storage().data_ptr() in own else t for t in tensors]


def outside_of_inference_mode() -> AbstractContextManager[None]:
    """Where the tensors of a cache are made: it is used inside of that mode and outside.

    Torch refuses to write to tensors outside of the mode in which they were made.
    """
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    context: AbstractContextManager[None] = torch.inference_mode(False)
    return context
