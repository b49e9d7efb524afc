"""Many tokens behind those that a cache holds: all of them attend at once.

The keys that a cache holds and the new ones behind them are a short causal sequence in which the
new rows choose what they would in the whole one, as in `dmattn.stretches`. Nothing here changes the
cache. Letters as in `dmattn.cache_state`; L keys held, N heads of the cache, H query heads, w the
window size.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.cache_state import CacheTensors, CacheTokens
from dmattn.dispatch import attend, select
from dmattn.key_lists import Selection
from dmattn.key_state import Keys, gathered, last_kept
from dmattn.problem import Problem


class Block(NamedTuple):
    """New tokens behind the keys that a cache holds, with the keys that each of them keeps."""

    keys: Keys  # (B, L + T, N, D) and so on: those of the cache as they lie there, the new ones
    # int64 (B, N, L + T): where the keys lie, in order of position; None: they are in order.
    place: Tensor | None
    lists: Selection  # of T rows over the keys in order of position
    tokens: int  # T
    seen: Tensor  # int32 (B,): tokens behind it

    @staticmethod
    def of(cache: CacheTensors, new: CacheTokens, window_size: int, in_order: bool) -> "Block":
        """`in_order`: whether the keys of the cache lie in order of position."""
        batch, tokens = new.k.shape[:2]
        score = new.score.detach()
        if new.active is None:
            count = torch.arange(1, tokens + 1, dtype=torch.int32, device=score.device)
            count = count.expand(batch, -1)
        else:
            score = score.masked_fill(~new.active[:, None], -math.inf)
            count = new.active.cumsum(1, dtype=torch.int32)
        position = (cache.seen[:, None] + (count - 1))[:, None].expand(score.shape)
        keys = Keys(
            torch.cat((cache.k, new.k.detach()), 1),
            torch.cat((cache.v, new.v.detach()), 1),
            torch.cat((cache.score, score), 2),
            torch.cat((cache.position, position), 2),
        )
        place, ordered = None, keys.score
        if not in_order:
            order = cache.position.argsort(2)  # entries without a key come first
            last = torch.arange(order.shape[2], keys.k.shape[1], device=order.device)
            place = torch.cat((order, last.expand(*order.shape[:2], -1)), 2)
            ordered = keys.score.gather(2, place)
        lists = select(ordered, None, window_size, tokens, True)
        return Block(keys, place, lists, tokens, cache.seen + count[:, -1])

    def attend(self, query: Tensor, softmax_scale: float, softcap: float) -> Tensor:
        """(B, T, H, D): of query (B, T, H, D)."""
        lists = self.lists
        if self.place is not None:  # the same lists for the keys where they lie
            end, idx, count, full = lists
            where = self.place.gather(2, idx.flatten(2).long()).to(torch.int32).view(idx.shape)
            listed = torch.arange(idx.shape[3], device=idx.device) < count[..., None]
            where = where.masked_fill(~listed, 0)  # as lists are
            lists = Selection(
                torch.empty_like(end).scatter_(2, self.place, end), where, count, full
            )
        score = self.keys.score
        problem = Problem(
            query,
            self.keys.k,
            self.keys.v,
            bias=score[:, :, None],
            softmax_scale=softmax_scale,
            is_causal=True,
            softcap=softcap,
            key_lists=lists,
        )
        return attend(problem)[0]

    def kept(self, window_size: int) -> CacheTensors:
        """What a cache of w keys holds behind these tokens, in order of position."""
        chosen = last_kept(self.lists, self.tokens, window_size, True)
        if self.place is not None:
            chosen = self.place.gather(2, chosen.clamp(min=0)).masked_fill(chosen < 0, -1)
        return CacheTensors(*gathered(self.keys, chosen), self.seen)
