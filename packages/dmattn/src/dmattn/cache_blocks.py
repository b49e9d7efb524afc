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
from dmattn.key_state import Keys, Places, counting, gathered, kept_places
from dmattn.problem import Problem


class Block(NamedTuple):
    """New tokens behind the keys that a cache holds, with the keys that each of them keeps."""

    # (B, L + T, N, D) and so on: those of the cache as they lie there, the new ones. Positions are
    # those of the cache alone.
    keys: Keys
    # int64 (B, N, L + T): where the keys lie, in order of position; None: they are in order.
    place: Tensor | None
    lists: Selection  # of T rows over the keys in order of position
    tokens: int  # T
    before: Tensor  # int32 (B,): tokens seen before it
    active: Tensor | None  # bool (B, T)

    @staticmethod
    def of(cache: CacheTensors, new: CacheTokens, window_size: int, in_order: bool) -> "Block":
        """`in_order`: whether the keys of the cache lie in order of position.

        With eviction, entries without a key then come before those that have one.
        """
        tokens = new.k.shape[1]
        score = new.score.detach()
        if new.active is not None:
            score = score.masked_fill(~new.active[:, None], -math.inf)
        keys = Keys(
            torch.cat((cache.k, new.k.detach()), 1),
            torch.cat((cache.v, new.v.detach()), 1),
            torch.cat((cache.score, score), 2),
            cache.position,
        )
        place, ordered = None, keys.score
        if not in_order:
            order = cache.position.argsort(2)  # entries without a key come first
            last = torch.arange(order.shape[2], keys.k.shape[1], device=order.device)
            place = torch.cat((order, last.expand(*order.shape[:2], -1)), 2)
            ordered = keys.score.gather(2, place)
        lists = select(ordered, None, window_size, tokens, True)
        return Block(keys, place, lists, tokens, cache.seen, new.active)

    def attend(self, query: Tensor, softmax_scale: float, softcap: float) -> Tensor:
        """(B, T, H, D): of query (B, T, H, D)."""
        lists = self.lists
        if self.place is not None:  # the same lists for the keys where they lie
            end, idx, count, full = lists
            # Behind the end of a list stands some key instead of key 0; nobody attends to it.
            where = self.place.gather(2, idx.flatten(2).long()).to(torch.int32).view(idx.shape)
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

    def kept(self, window_size: int, into: CacheTensors | None = None) -> CacheTensors:
        """What a cache of w keys holds behind these tokens, in order of position.

        Entries without a key come first, as `Block.of` wants them where keys lie in order.

        Args:
            window_size: w.
            into: where to write it, such as the cache that the tokens are behind; None for new
                tensors.
        """
        at = kept_places(self.lists.end, window_size, first_may_be_empty=True).at
        if self.place is not None:
            at = self.place.gather(2, at)
        if self.active is None:
            new = self.before[:, None] + counting(self.tokens, at.device)
            seen, more = self.before, self.tokens
        else:
            new = self.before[:, None] + (self.active.cumsum(1, dtype=torch.int32) - 1)
            seen, more = new[:, -1], 1
        held = self.keys.position
        assert held is not None
        position = torch.cat((held, new[:, None].expand(-1, held.shape[1], -1)), 2)
        keys = self.keys._replace(position=position)
        if into is None:
            return CacheTensors(*gathered(keys, Places(at, None)), seen + more)
        rows = at.mT[..., None].expand(-1, -1, -1, keys.k.shape[3])
        torch.gather(keys.k, 1, rows, out=into.k)
        torch.gather(keys.v, 1, rows, out=into.v)
        torch.gather(keys.score, 2, at, out=into.score)
        torch.gather(position, 2, at, out=into.position)
        torch.add(seen, more, out=into.seen)
        return into
