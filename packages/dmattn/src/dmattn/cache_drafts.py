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
from dmattn.dispatch import attend, nobody_intercepts, select
from dmattn.key_lists import Selection, whole_blocks
from dmattn.key_state import counting
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


class Lists(NamedTuple):
    """What is alike for all drafts of t tokens with r rows each."""

    idx: Tensor  # of a `Selection`, as the next two: a list of all keys
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    full: Tensor
    unkept: Tensor  # int32 (2 * t,): the ends that `Draft.of` selects, of keys that no row keeps
    first_row: Tensor  # int32 (), w - t * r

    @staticmethod
    def of(cache: CacheTensors, tokens: int, r: int) -> "Lists":
        """For drafts behind such a cache."""
        batch, entries, nheads_k, _ = cache.k.shape
        heads, size = (batch, nheads_k, 1), entries + tokens
        token = counting(tokens, cache.k.device)
        idx = cache.position.new_zeros((*heads, whole_blocks(size)))
        idx[..., :entries] = counting(entries, idx.device)
        idx[..., entries:size] = token * r + entries
        count = idx.new_full(heads, size)
        unkept = torch.cat((torch.zeros_like(token), token)) + tokens
        return Lists(
            idx, count, torch.zeros_like(count), unkept, idx.new_full((), entries - tokens * r)
        )


class Workspace(NamedTuple):
    """What all drafts with r rows for each token share, T = SPARE_ROWS // r tokens at most.

    Every draft writes `place`, `ends`, `rows` and `seen` anew, but for the parts that stay.
    """

    rows_per_token: int  # r
    # int64 (B, HK, w + T * r): the column of `ends` that a key has. Behind the entries it stays.
    place: Tensor
    # int32 (B, HK, 1 + 2 * T): in the middle the ends of the t lowest entries and then of the t
    # tokens, which begin at column T + 1. First, which stays, the end of keys that never leave.
    ends: Tensor
    highest: CacheTokens  # T tokens of a score that every entry gives way to
    rows: Tensor  # (B, w, HK, 1): keys and values of a cache in which they do not matter
    seen: Tensor  # int32 (B,)
    lowest: Tensor  # (r,), -inf
    zero: Tensor  # int64 (1,)
    lists: dict[int, Lists]  # by t

    @staticmethod
    def of(cache: CacheTensors, r: int) -> "Workspace":
        """For drafts behind such a cache."""
        batch, entries, nheads_k, _ = cache.k.shape
        heads, most = (batch, nheads_k), SPARE_ROWS // r
        length = entries + most * r
        place = cache.position.new_zeros((*heads, length), dtype=torch.int64)
        place[..., entries:] = counting(most, place.device, most + 1).repeat_interleave(r)
        row = cache.k.new_zeros((batch, most, nheads_k, 1))
        return Workspace(
            r,
            place,
            cache.position.new_full((*heads, 1 + 2 * most), length),
            CacheTokens(row, row, cache.score.new_full((*heads, most), math.inf), None),
            cache.k.new_zeros((batch, entries, nheads_k, 1)),
            torch.zeros_like(cache.seen),
            cache.score.new_full((r,), -math.inf),
            place.new_zeros(1),
            {},
        )


@torch.inference_mode(False)  # another call may write to it outside of that mode
def workspace_for(
    cache: CacheTensors, tokens: int, r: int, kept: dict[int, Workspace]
) -> tuple[Workspace, Lists]:
    """What a draft needs beside the cache, from `kept`, by r, or to be kept there.

    What a CUDA graph makes is there when it runs, and only then; and a mode that looks on may have
    tensors of its own. So neither is kept.
    """
    workspace = kept.get(r)
    found = None if workspace is None else workspace.lists.get(tokens)
    if workspace is not None and found is not None:
        return workspace, found
    capturing = cache.k.is_cuda and torch.cuda.is_current_stream_capturing()
    to_keep = nobody_intercepts() and not capturing
    if workspace is None:
        workspace = Workspace.of(cache, r)
        if to_keep:
            kept[r] = workspace
    found = Lists.of(cache, tokens, r)
    if to_keep:
        workspace.lists[tokens] = found
    return workspace, found


class Draft(NamedTuple):
    """Tokens in the spare rows of a cache, and what each of them keeps."""

    k: Tensor  # (B, w + t * r, HK, D): entries and draft
    v: Tensor  # as k
    score: Tensor  # (B, HK, w + t * r)
    lists: Selection  # of t * r rows
    tokens: CacheTokens  # the draft, as `append_tokens` takes it
    rows_per_token: int  # r

    @staticmethod
    def of(cache: CacheTensors, new: CacheTokens, workspace: Workspace, lists: Lists) -> "Draft":
        """Writes tokens, all of them active, to the spare rows; the entries stay as they are."""
        count, entries, r = new.k.shape[1], cache.k.shape[1], workspace.rows_per_token
        length, most = entries + count * r, SPARE_ROWS // r
        k, v = (
            t.as_strided((t.shape[0], length, *t.shape[2:]), t.stride()) for t in (cache.k, cache.v)
        )
        k_draft, v_draft = k[:, entries::r], v[:, entries::r]
        k_draft.copy_(new.k)
        v_draft.copy_(new.v)
        # Scores, r times each, in the columns of `ends`: what entries that stay write to the first
        # one means nothing.
        few = cache.score.new_empty((*cache.score.shape[:2], 1 + most + count, r))
        drafted = few[:, :, 1 + most :]
        torch.fmax(new.score[..., None], workspace.lowest, out=drafted)  # -inf for NaN
        _find_lowest(cache, workspace, count)
        few[..., 0].scatter_(2, workspace.place[..., :entries], cache.score)
        # The lowest entries stand in order of score and then of position, the draft behind them. So
        # of equal scores the later key stands later, as a selection wants it.
        chosen = slice(1 + most - count, 1 + most + count)
        end = select(few[:, :, chosen, 0], None, count, count, True).end
        # A selection lists no keys that no row keeps, and says little of their ends. These are
        # listed: an end before the key itself would be none.
        end = torch.maximum(end, lists.unkept)
        torch.add(lists.first_row, end, alpha=r, out=workspace.ends[..., chosen])
        return Draft(
            k,
            v,
            torch.cat((cache.score, drafted.flatten(2)), 2),
            Selection(workspace.ends.gather(2, workspace.place[..., :length]), *lists[:3]),
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


def _find_lowest(cache: CacheTensors, workspace: Workspace, count: int) -> None:
    """Writes `workspace.place` of the entries: the columns of the `count` lowest, 0 for others.

    Lower is a lower score, of equal scores an earlier position. Tokens that every entry gives way
    to are put into a copy of the scores and positions. They push the lowest entries out in this
    order, and the positions that they get there are the columns.
    """
    position = cache.position | _SIGN  # all below 0, in the same order
    workspace.seen.fill_(1 + SPARE_ROWS // workspace.rows_per_token - count)
    rows = workspace.rows
    copy = CacheTensors(rows, rows, cache.score.clone(), position, workspace.seen)
    k, v, score, _ = workspace.highest
    append_tokens(CacheTokens(k[:, :count], v[:, :count], score[..., :count], None), copy, True)
    entries = cache.k.shape[1]
    torch.maximum(position, workspace.zero, out=workspace.place[..., :entries])
