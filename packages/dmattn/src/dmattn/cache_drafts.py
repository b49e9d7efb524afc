"""A draft behind the keys of a cache that evicts: they attend where they lie, nothing is copied.

The keys and values of a cache have a few spare rows behind their entries, which belong to nobody
until a draft is written there. Entries and draft are then the keys of one causal problem over a list
that names them all; which row sees which key is said by the ends of intervals alone. Only the t
lowest entries can make room for t tokens, so that the ends come from a selection among these and
the draft.

Query heads that share a key head and a token become rows of the problem, r for each token, so that
keys are read once for all of them. A row sees the keys up to its own place, so the tokens of the
draft stand r places apart.

Letters as in `dmattn.cache_state`; w entries, t tokens of the draft, H query heads.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn.cache_calls import append_tokens
from dmattn.cache_state import CacheTensors, CacheTokens
from dmattn.dispatch import attend, select
from dmattn.key_lists import Selection, whole_blocks
from dmattn.problem import Problem

# Rows of keys, and of values, behind the entries of each slot. A draft of 8 tokens takes all of
# them where 4 query heads share a key head; with more heads some are computed apart.
SPARE_ROWS = 32
_SIGN = torch.iinfo(torch.int32).min


def with_spare_rows(
    batch: int, entries: int, nheads_k: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Zeros (B, entries, HK, D), with spare rows behind those of each slot."""
    shape = (batch, entries + SPARE_ROWS, nheads_k, head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)[:, :entries]


def rows_per_token(cache: CacheTensors, nheads: int, tokens: int) -> int:
    """How many query heads of a token become rows, at least 1; 0 where the draft has no room.

    Tensors that `with_spare_rows` has not made, such as those of a file, have no spare rows.
    """
    _, entries, nheads_k, _ = cache.k.shape
    spare = min(_spare_rows(cache.k), _spare_rows(cache.v))
    if tokens > spare or tokens >= entries:
        return 0
    group = nheads // nheads_k
    return max(r for r in range(1, group + 1) if group % r == 0 and r * tokens <= spare)


def _spare_rows(t: Tensor) -> int:
    batch, entries = t.shape[:2]
    slot, row = t.stride()[:2]
    if t.numel() == 0 or row == 0 or t.is_meta:
        return 0
    spare = slot // row - entries
    behind = t.storage_offset() + (batch - 1) * slot + (entries + spare) * row
    fits = behind * t.element_size() <= t.untyped_storage().nbytes()
    return min(spare, SPARE_ROWS) if fits else 0


class Bench(NamedTuple):
    """What drafts of t tokens, r rows each, need beside the cache: made once, then only read.

    Apart from `place`, `ends`, `seen` and `rows`, whose contents every draft writes anew.
    """

    rows_per_token: int  # r
    # int64 (B, HK, w + t * r): for each key its column of `ends`. Behind the entries it stays.
    place: Tensor
    # int32 (B, HK, 1 + 2 * t): up to which row a key is kept that never leaves, then the t lowest
    # entries, then the tokens. The first stays.
    ends: Tensor
    lists: tuple[Tensor, Tensor, Tensor]  # idx, count and full of a list of all keys
    high: CacheTokens  # t tokens with a score that every entry gives way to
    rows: Tensor  # (B, w, HK, 1): stands for keys and values where these do not matter
    seen: Tensor  # int32 (B,)
    lowest: Tensor  # (), -inf
    first_row: Tensor  # int32 (), w - t * r
    zero: Tensor  # int64 (1,)

    @staticmethod
    @torch.inference_mode(False)  # it may be written to elsewhere
    def of(cache: CacheTensors, tokens: int, rows_per_token: int) -> "Bench":
        """For the draft of a cache."""
        batch, entries, nheads_k, _ = cache.k.shape
        heads, length = (batch, nheads_k), entries + tokens * rows_per_token
        position, score, k = cache.position, cache.score, cache.k
        place = position.new_zeros((*heads, length), dtype=torch.int64)
        token = torch.arange(tokens, device=place.device)
        place[..., entries:] = (tokens + 1 + token).repeat_interleave(rows_per_token)
        key = torch.arange(entries, device=place.device)
        idx = position.new_zeros((*heads, 1, whole_blocks(entries + tokens)))
        idx[..., : entries + tokens] = torch.cat((key, entries + token * rows_per_token))
        row = k.new_zeros((batch, tokens, nheads_k, 1))
        return Bench(
            rows_per_token,
            place,
            position.new_full((*heads, 1 + 2 * tokens), length),
            (
                idx,
                position.new_full((*heads, 1), entries + tokens),
                position.new_zeros((*heads, 1)),
            ),
            CacheTokens(row, row, score.new_full((*heads, tokens), math.inf), None),
            k.new_zeros((batch, entries, nheads_k, 1)),
            torch.zeros_like(cache.seen),
            score.new_full((), -math.inf),
            position.new_full((), entries - tokens * rows_per_token),
            place.new_zeros(1),
        )


class Draft(NamedTuple):
    """Tokens behind the entries of a cache, in its spare rows."""

    keys: Tensor  # (B, w + t * r, HK, D): entries and draft, r rows for each token
    values: Tensor  # as keys
    score: Tensor  # (B, HK, w + t * r)
    lists: Selection  # of t * r rows
    tokens: CacheTokens  # the draft itself, as `append_tokens` takes it
    rows_per_token: int  # r

    @staticmethod
    def of(cache: CacheTensors, new: CacheTokens, bench: Bench) -> "Draft":
        """Writes tokens, all of them active, to the spare rows, and finds who keeps what."""
        count, entries, r = new.k.shape[1], cache.k.shape[1], bench.rows_per_token
        length = bench.place.shape[2]
        behind = slice(entries, length, r)
        keys, values = (
            t.as_strided((t.shape[0], length, *t.shape[2:]), t.stride()) for t in (cache.k, cache.v)
        )
        tokens = CacheTokens(keys[:, behind], values[:, behind], new.score, None)
        tokens.k.copy_(new.k)
        tokens.v.copy_(new.v)
        # Of one entry that may stay for certain, of the lowest entries, and of the draft.
        few = cache.score.new_empty((*cache.score.shape[:2], 1 + 2 * count))
        tokens = tokens._replace(score=few[..., 1 + count :])
        torch.fmax(new.score, bench.lowest, out=tokens.score)  # -inf for NaN
        _find_lowest(cache, bench)
        place = bench.place[..., :entries]
        few[..., : 1 + count].scatter_(2, place, cache.score)
        # In order of score and then of position, the draft last: so of equal scores the later key
        # stands later, which is all that a selection asks.
        end = select(few[..., 1:], None, count, count, True).end
        torch.add(bench.first_row, end, alpha=r, out=bench.ends[..., 1:])
        score = cache.score.new_empty((*few.shape[:2], length))
        score[..., :entries].copy_(cache.score)
        score[..., entries:].unflatten(2, (count, r)).copy_(tokens.score[..., None])
        lists = Selection(bench.ends.gather(2, bench.place), *bench.lists)
        return Draft(keys, values, score, lists, tokens, r)

    def attend(self, query: Tensor, softmax_scale: float, softcap: float) -> Tensor:
        """(B, t, H, D): of query (B, t, H, D)."""
        r = self.rows_per_token
        rows = query.unflatten(2, (-1, r)).transpose(2, 3).flatten(1, 2)
        problem = Problem(
            rows,
            self.keys,
            self.values,
            bias=self.score[:, :, None],
            softmax_scale=softmax_scale,
            is_causal=True,
            softcap=softcap,
            key_lists=self.lists,
        )
        out = attend(problem)[0]
        return out.unflatten(1, (-1, r)).transpose(2, 3).flatten(2, 3)


def _find_lowest(cache: CacheTensors, bench: Bench) -> None:
    """Writes for each entry 0, or n for the n-th lowest of the first t, to the bench's place.

    Lower is a lower score, of equal scores an earlier position. Tokens that every entry gives way
    to are put into a copy of the scores and positions: they replace the lowest entries in this
    order, and the positions that they get there say which.
    """
    entries = cache.k.shape[1]
    position = cache.position | _SIGN  # below 0, whatever they are; in the same order
    copies = CacheTensors(bench.rows, bench.rows, cache.score.clone(), position, bench.seen)
    bench.seen.fill_(1)
    append_tokens(bench.high, copies, True)
    torch.maximum(position, bench.zero, out=bench.place[..., :entries])
