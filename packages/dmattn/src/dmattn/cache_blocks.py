"""Many new tokens that attend at once to the keys of a cache and to themselves.

The keys that a cache holds followed by the new ones are a short causal sequence, in which the new
rows choose the same keys as in the whole sequence, as explained in `dmattn.stretches`. Nothing here
changes the cache, except `Block.keeping` when its result is called. Letters as in
`dmattn.cache_state`; L keys held, N heads of the cache, H query heads, w the window size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.cache_state import CacheTensors, CacheTokens
from dmattn.dispatch import attend, select, way_without_graph
from dmattn.key_lists import KeptKeys, Selection
from dmattn.key_state import Keys, Places, counting, gathered, joined, kept_places
from dmattn.ops.keys import keep_keys
from dmattn.problem import Problem


class Block(NamedTuple):
    """New tokens behind the keys that a cache holds, with the keys that each of them keeps."""

    # (B, L + T, N, D) and so on: the keys of the cache, then the new keys. Without `place` those of
    # the cache are in order of position, with it as they lie in the cache. Positions are given for
    # the keys of the cache only.
    keys: Keys
    # int64 (B, N, L + T): the key that is i-th in order of position is entry place[i] of `keys`.
    # None: `keys` are in order.
    place: Tensor | None
    lists: Selection  # of T rows over the keys in order of position
    tokens: int  # T
    before: Tensor  # int32 (B,): tokens seen before these
    active: Tensor | None  # bool (B, T)
    way: bool | None  # the `way_without_graph` of the tensors of the cache and of the tokens

    @staticmethod
    def of(cache: CacheTensors, new: CacheTokens, window_size: int, in_order: bool) -> "Block":
        """The block of the tokens `new` behind the keys of `cache`.

        `in_order`: whether the keys of the cache lie in order of position. With eviction, that
        includes that entries without a key come first.
        """
        tokens, held = new.k.shape[1], cache.k.shape[1]
        mask = None if new.active is None else new.active[:, None]
        tensors = new.k.detach(), new.v.detach(), new.score.detach(), mask
        way = way_without_graph(*cache, *tensors)
        before = Keys(cache.k, cache.v, cache.score, cache.position)
        position, order, place_held = cache.position, None, None
        if not in_order:
            order = position.argsort(2)  # entries without a key come first
            if way is not None:  # `joined` then copies the keys in order
                position, place_held = position.gather(2, order), order.to(torch.int32)
        k, v, score, _ = joined(before, tensors, held, way, place_held)
        keys = Keys(k, v, score, position)  # not _replace(), which torch 2.6 does not compile
        place, ordered = None, keys.score
        if order is not None and place_held is None:
            last = torch.arange(order.shape[2], keys.k.shape[1], device=order.device)
            place = torch.cat((order, last.expand(*order.shape[:2], -1)), 2)
            ordered = keys.score.gather(2, place)
        lists = select(ordered, None, window_size, tokens, True)
        return Block(keys, place, lists, tokens, cache.seen, new.active, way)

    def attend(self, query: Tensor, softmax_scale: float, softcap: float) -> Tensor:
        """The attention of query (B, T, H, D) to the keys that it keeps: (B, T, H, D)."""
        lists = self.lists
        if self.place is not None:  # rewrite the lists for the order in which the keys lie
            end, idx, count, full = lists
            # Entries past the end of a list become other keys than key 0, which are never read.
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

    def kept(self, window_size: int) -> CacheTensors:
        """The content of a cache of w keys after these tokens, in order of position.

        Entries without a key come first, as `Block.of` expects it with `in_order`.
        """
        if self.way is not None:
            keep = self._prepared(window_size, None, self.way)
            return keep(beside_attention=False)
        at, position, seen, more = self._gathering(window_size)
        keys = Keys(self.keys.k, self.keys.v, self.keys.score, position)
        return CacheTensors(*gathered(keys, Places(at, None)), seen + more)

    def keeping(self, window_size: int, into: CacheTensors) -> Callable[[], None]:
        """A function that writes `kept` into the cache `into`, whose keys this block started from.

        What it reads of the cache is copied now. The function has to be called right after
        `attend`, and on the GPU it may run at the same time as that attention. Nothing of the cache
        is changed before it is called.
        """
        if self.way:
            prepared = self._prepared(window_size, into, True)

            def keep() -> None:
                prepared(beside_attention=True)
        else:

            def keep() -> None:
                self._gather_into(window_size, into)

        return keep

    def _gathering(self, window_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor | int]:
        """Indices of the kept keys, positions of all keys, and two parts of the new `seen`.

        `seen` becomes the sum of the last two values.
        """
        at = kept_places(self.lists.end, window_size, first_may_be_empty=True).at
        if self.place is not None:
            at = self.place.gather(2, at)
        if self.active is None:
            new = self.before[:, None] + counting(self.tokens, at.device)
            return at, self._positions(new), self.before, self.tokens
        new = self._new_positions(self.active)
        return at, self._positions(new), new[:, -1], 1

    def _gather_into(self, window_size: int, into: CacheTensors) -> None:
        """Write `kept` into a cache, by operations of torch."""
        at, position, seen, more = self._gathering(window_size)
        keys = self.keys
        rows = at.mT[..., None].expand(-1, -1, -1, keys.k.shape[3])
        torch.gather(keys.k, 1, rows, out=into.k)
        torch.gather(keys.v, 1, rows, out=into.v)
        torch.gather(keys.score, 2, at, out=into.score)
        torch.gather(position, 2, at, out=into.position)
        torch.add(seen, more, out=into.seen)

    def _prepared(
        self, window_size: int, into: CacheTensors | None, way: bool
    ) -> Callable[..., CacheTensors]:
        """A function that computes `kept` by the operator `keep_keys`; to be called once.

        `into`: the cache to write to, only if the operator is called directly; or None.
        """
        keys, position, seen = self.keys, self.keys.position, self.before
        assert position is not None
        after: Tensor | None = None
        if self.active is not None:
            new = self._new_positions(self.active)
            position, after = self._positions(new), new[:, -1] + 1
        elif into is not None:  # these belong to `into`, which is written while they are read
            position, seen = position.clone(), seen.clone()
        room = None if into is None else KeptKeys(*into)
        if room is not None and after is not None:
            room = room._replace(seen=torch.empty_like(seen))
        row, end = keys.k.shape[1] - 1, self.lists.end
        parts = (keys.k, keys.v, keys.score)  # older torch cannot compile a slice of a named tuple
        moved = (row, end, None, parts, position, seen, window_size, way, room)

        def keep(beside_attention: bool) -> CacheTensors:
            found = CacheTensors(*keep_keys(*moved, beside_attention))
            if after is None:
                return found
            if into is None:  # not _replace(), which torch 2.6 does not compile
                return CacheTensors(found.k, found.v, found.score, found.position, after)
            into.seen.copy_(after)
            return into

        return keep

    def _new_positions(self, active: Tensor) -> Tensor:
        """int32 (B, T): positions of the new tokens, without counting inactive ones."""
        return self.before[:, None] + (active.cumsum(1, dtype=torch.int32) - 1)

    def _positions(self, new: Tensor) -> Tensor:
        """int32 (B, N, L + T): positions of all keys, from those of the new tokens (B, T)."""
        held = self.keys.position
        assert held is not None
        return torch.cat((held, new[:, None].expand(-1, held.shape[1], -1)), 2)
