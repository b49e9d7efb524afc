"""The tensors of a cache and the tokens put into it, as all stages down to the backends take them.

Letters: B batch, T new tokens, HK key/value heads, D head dimension.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor


class CacheTensors(NamedTuple):
    """The state of a cache. Contiguous, except that there may be gaps between slots in k and v."""

    k: Tensor  # (B, entries, HK, D)
    v: Tensor  # as k
    score: Tensor  # (B, HK, entries), -inf where there is no key
    position: Tensor  # int32 (B, HK, entries), -1 where there is no key
    seen: Tensor  # int32 (B,): tokens so far


class CacheTokens(NamedTuple):
    """Tokens to be put into a cache."""

    k: Tensor  # (B, T, HK, D)
    v: Tensor  # as k
    score: Tensor  # (B, HK, T)
    active: Tensor | None  # bool (B, T), False for a token to skip

    def for_all_slots(self, batch: int, rows: Tensor) -> "CacheTokens":
        """These tokens as those of the slots in rows (B,), and inactive ones for other slots.

        `batch`: the number of all slots.
        """
        active = self.active
        if active is None:
            active = torch.ones(self.k.shape[:2], dtype=torch.bool, device=self.k.device)
        given = (self.k, self.v, self.score.detach(), active)
        return CacheTokens(
            *[t.new_zeros((batch, *t.shape[1:])).index_copy_(0, rows, t) for t in given]
        )


def outside_of(cache: CacheTensors, *tensors: Tensor) -> list[Tensor]:
    """The tensors, with copies of those that are views of the memory of a cache.

    If several tokens are put in one after the other, the first could overwrite memory from which
    the later ones are still to be read, and any token memory from which its query is.
    """
    own = {t.untyped_storage().data_ptr() for t in cache}
    return [t.clone() if t.untyped_storage().data_ptr() in own else t for t in tensors]


def outside_of_inference_mode() -> AbstractContextManager[None]:
    """A context, outside of torch.inference_mode, in which the tensors of a cache are made.

    Torch refuses to write to tensors made in inference mode once outside of it, and a cache may be
    used in both.
    """
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    context: AbstractContextManager[None] = torch.inference_mode(False)
    return context
