"""A draft behind the keys of a cache that evicts: its tokens attend without the keys being copied.

The keys and values of such a cache have some spare rows behind the entries of each slot. A draft is
written there, and entries and draft together are the keys of one causal problem. Its key lists name
all of them; the ends of intervals alone say which row sees which key. As t tokens can only push the
t lowest entries out, a selection among these entries and the tokens finds the ends.

Query heads that share a key head become rows of the problem, r for each token, so that their keys
are read once. Row i sees the keys up to place w + i, so the tokens stand r places apart: token d at
w + d * r. No list names the places between them.

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

# Rows of keys, and of values, behind the entries of each slot: enough for 8 tokens with r = 4. With
# more query heads or tokens r is smaller, and keys are read more often.
SPARE_ROWS = 32
_SIGN = torch.iinfo(torch.int32).min


def with_spare_rows(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of a shape (B, entries, HK, D), with spare rows behind the entries of each slot."""
    batch, entries, *row = shape
    rows = torch.zeros((batch, entries + SPARE_ROWS, *row), dtype=dtype, device=device)
    return rows[:, :entries]


def rows_per_token(cache: CacheTensors, nheads: int, tokens: int) -> int:
    """r, how many query heads of a token become rows; 0 where the draft has no room.

    Tensors that `with_spare_rows` has not made have no spare rows.
    """
    _, entries, nheads_k, _ = cache.k.shape
    spare = min(_spare_rows(cache.k), _spare_rows(cache.v))
    if tokens > spare or tokens >= entries:
        return 0
    group = nheads // nheads_k
    return max(r for r in range(1, group + 1) if group % r == 0 and r * tokens <= spare)


def _spare_rows(t: Tensor) -> int:
    """How many rows lie between the entries of a slot and the next slot."""
    batch, entries = t.shape[:2]
    slot, row = t.stride()[:2]
    if t.numel() == 0 or row == 0 or t.is_meta:
        return 0
    whole = slot // row
    stop = t.storage_offset() + (batch - 1) * slot + whole * row
    fits = stop * t.element_size() <= t.untyped_storage().nbytes()
    return min(whole - entries, SPARE_ROWS) if fits else 0


class Workspace(NamedTuple):
    """What all drafts of t tokens with r rows each share, in memory of their own.

    Every draft writes `place`, `ends`, `rows` and `seen` anew, but for the parts that stay.
    """

    rows_per_token: int  # r
    # int64 (B, HK, w + t * r): the column of `ends` that a key has. Behind the entries it stays.
    place: Tensor
    # int32 (B, HK, 1 + 2 * t): the end of the keys that never leave, which stays; of the t lowest
    # entries; of the tokens.
    ends: Tensor
    lists: tuple[Tensor, Tensor, Tensor]  # idx, count and full, of all keys
    highest: CacheTokens  # t tokens of a score that every entry gives way to
    rows: Tensor  # (B, w, HK, 1): keys and values of a cache in which they do not matter
    seen: Tensor  # int32 (B,)
    lowest: Tensor  # (r,), -inf
    first_end: Tensor  # int32 (2 * t,): ends of keys that no row keeps
    first_row: Tensor  # int32 (), w - t * r
    zero: Tensor  # int64 (1,)

    @staticmethod
    @torch.inference_mode(False)  # it may be written to outside of that mode later
    def of(cache: CacheTensors, tokens: int, rows_per_token: int) -> "Workspace":
        """For drafts behind such a cache."""
        batch, entries, nheads_k, _ = cache.k.shape
        heads, length = (batch, nheads_k), entries + tokens * rows_per_token
        position, score, k = cache.position, cache.score, cache.k
        place = position.new_zeros((*heads, length), dtype=torch.int64)
        token = torch.arange(tokens, device=place.device)
        place[..., entries:] = (tokens + 1 + token).repeat_interleave(rows_per_token)
        key = torch.cat(
            (torch.arange(entries, device=place.device), entries + token * rows_per_token)
        )
        idx = position.new_zeros((*heads, 1, whole_blocks(entries + tokens)))
        idx[..., : entries + tokens] = key
        count = position.new_full((*heads, 1), entries + tokens)
        row = k.new_zeros((batch, tokens, nheads_k, 1))
        return Workspace(
            rows_per_token,
            place,
            position.new_full((*heads, 1 + 2 * tokens), length),
            (idx, count, torch.zeros_like(count)),
            CacheTokens(row, row, score.new_full((*heads, tokens), math.inf), None),
            k.new_zeros((batch, entries, nheads_k, 1)),
            torch.zeros_like(cache.seen),
            score.new_full((rows_per_token,), -math.inf),
            torch.cat((torch.zeros_like(token), token)).to(torch.int32) + tokens,
            position.new_full((), entries - tokens * rows_per_token),
            place.new_zeros(1),
        )


class Draft(NamedTuple):
    """Tokens in the spare rows of a cache, and what each of them keeps."""

    k: Tensor  # (B, w + t * r, HK, D): entries and draft
    v: Tensor  # as k
    score: Tensor  # (B, HK, w + t * r)
    lists: Selection  # of t * r rows
    tokens: CacheTokens  # the draft, as `append_tokens` takes it
    rows_per_token: int  # r

    @staticmethod
    def of(cache: CacheTensors, new: CacheTokens, workspace: Workspace) -> "Draft":
        """Writes tokens, all of them active, to the spare rows; the entries stay as they are."""
        count, entries, r = new.k.shape[1], cache.k.shape[1], workspace.rows_per_token
        length = workspace.place.shape[2]
        k, v = (
            t.as_strided((t.shape[0], length, *t.shape[2:]), t.stride()) for t in (cache.k, cache.v)
        )
        k_draft, v_draft = k[:, entries::r], v[:, entries::r]
        k_draft.copy_(new.k)
        v_draft.copy_(new.v)
        # Scores, r times each: of some entry that stays, of the lowest entries, and of the draft.
        few = cache.score.new_empty((*cache.score.shape[:2], 1 + 2 * count, r))
        drafted = few[:, :, 1 + count :]
        torch.fmax(new.score[..., None], workspace.lowest, out=drafted)  # -inf for NaN
        _find_lowest(cache, workspace)
        few[..., 0].scatter_(2, workspace.place[..., :entries], cache.score)
        # The lowest entries stand in order of score and then of position, the draft behind them. So
        # of equal scores the later key stands later, as a selection wants it.
        end = select(few[:, :, 1:, 0], None, count, count, True).end
        # A selection lists no keys that no row keeps, and says little of their ends. These are
        # listed: an end before the key itself would be none.
        end = torch.maximum(end, workspace.first_end)
        torch.add(workspace.first_row, end, alpha=r, out=workspace.ends[..., 1:])
        return Draft(
            k,
            v,
            torch.cat((cache.score, drafted.flatten(2)), 2),
            Selection(workspace.ends.gather(2, workspace.place), *workspace.lists),
            CacheTokens(k_draft, v_draft, drafted[..., 0], None),
            r,
        )

    def attend(self, query: Tensor, softmax_scale: float, softcap: float) -> Tensor:
        """(B, t, H, D): of query (B, t, H, D)."""
        r = self.rows_per_token
        rows = torch.unflatten(query, 2, (-1, r)).transpose(2, 3).flatten(1, 2)
        problem = Problem(
            rows,
            self.k,
            self.v,
            bias=self.score[:, :, None],
            softmax_scale=softmax_scale,
            is_causal=True,
            softcap=softcap,
            key_lists=self.lists,
        )
        out = attend(problem)[0]
        return torch.unflatten(out, 1, (-1, r)).transpose(2, 3).flatten(2, 3)


def _find_lowest(cache: CacheTensors, workspace: Workspace) -> None:
    """Writes `workspace.place` of the entries: 1 to t for the lowest ones in order, 0 for others.

    Lower is a lower score, of equal scores an earlier position. Tokens that every entry gives way
    to are put into a copy of the scores and positions. They push the lowest entries out in this
    order, and their positions there, 1 to t, say which.
    """
    position = cache.position | _SIGN  # all below 0, in the same order
    workspace.seen.fill_(1)
    rows = workspace.rows
    copy = CacheTensors(rows, rows, cache.score.clone(), position, workspace.seen)
    append_tokens(workspace.highest, copy, True)
    entries = cache.k.shape[1]
    torch.maximum(position, workspace.zero, out=workspace.place[..., :entries])
