"""Attention of a stretch of a causal sequence to itself and to the state of what lies before it.

The kept keys in order of position and the stretch behind them are a short sequence in which the
rows of the stretch choose what they would in the whole one: a key that is gone would not be chosen,
and of equal scores the later key still stands later. So a stretch is an ordinary problem over key
lists. Letters as in `dmattn.key_state`.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn.dispatch import select
from dmattn.key_lists import behind_rows, whole_blocks
from dmattn.key_state import (
    Keys,
    KeyState,
    Places,
    Wanted,
    best_of,
    check_starts,
    check_state,
    counted,
    counting,
    gathered,
    kept_places,
    keys_of,
)
from dmattn.problem import Problem
from dmattn.selection import key_only_mask
from dmattn.validation import can_be_read


class Stretch(NamedTuple):
    """A stretch of a sequence, checked.

    Attributes:
        own: its problem, with a score for each key, without the keys of the state.
        state: what lies before it, None for nothing.
        window_size: w.
        starts: int64 (documents + 1,), where documents begin, counted from the first token of the
            stretch; or None.
    """

    own: Problem
    state: KeyState | None
    window_size: int
    starts: Tensor | None

    @property
    def needs_keys(self) -> bool:
        """Whether its rows keep other keys than those of a whole sequence would."""
        return self.state is not None or self.starts is not None

    def with_keys(self) -> Problem:
        """The problem with the keys of the state in front of its own, and key lists."""
        problem, state = self.own, self.state
        if problem.q.shape[1] == 0:
            return problem  # no rows, no lists
        keys, front = _own_keys(problem), 0
        if state is not None:
            # With documents, lists are made for all keys as rows. Those of the stretch can be cut
            # out of them where the rows before it fill whole blocks.
            front = self.window_size if self.starts is None else whole_blocks(self.window_size)
            keys = _joined(state, keys, front)
        if self.starts is None:
            lists = select(keys.score.detach(), None, self.window_size, problem.q.shape[1], True)
        else:
            key_len = keys.k.shape[1]
            bounds = _bounds(self.starts, front, key_len)
            lists = select(keys.score.detach(), None, self.window_size, key_len, True, bounds)
            lists = behind_rows(lists, front)
        bias = keys.score[:, :, None]
        return problem.replace(k=keys.k, v=keys.v, mask=None, bias=bias, key_lists=lists)

    def state_behind(self, problem: Problem) -> KeyState:
        """The state behind it; `problem`: `own` with the keys chosen, as attention has it."""
        state, rows = self.state, self.own.q.shape[1]
        if problem.key_lists is None or rows == 0:
            found = best_of(_own_keys(self.own), self.window_size, self.starts)
            return found if state is None else state.merge(found)
        # Of a state whose keys all remain in sight, the entries without a key are the first ones.
        all_in_sight = state is not None and self.starts is None
        places = kept_places(problem.key_lists.end, self.window_size, all_in_sight)
        numbers = counted(self.own.k, self.starts, state)
        if not self.needs_keys:
            keys = _own_keys(self.own)
            heads = keys.score.shape[:2]
            at, empty = places
            places = Places(
                at.expand(*heads, -1), None if empty is None else empty.expand(*heads, -1)
            )
            return KeyState(*gathered(keys, places), *numbers)
        assert problem.bias is not None
        keys = Keys(problem.k, problem.v, problem.bias[:, :, 0], None)
        if state is not None:
            keys = keys._replace(position=self._positions(state, keys.k.shape[1]))
        return KeyState(*gathered(keys, places), *numbers)

    def _positions(self, state: KeyState, key_len: int) -> Tensor:
        """int32 (B, N, L) of the keys that `with_keys` has joined."""
        seqlen = self.own.k.shape[1]
        place = state.seen[:, None] + counting(seqlen, state.seen.device)
        place = place[:, None].expand(-1, state.score.shape[1], -1)
        before, spare = state.position, key_len - seqlen - self.window_size
        if self.starts is not None:
            before = torch.nn.functional.pad(before, (spare, 0), value=-1)
        return torch.cat((before, place), 2)


def checked_stretch(problem: Problem, state: Any, window_size: int, cu_seqlens: Any) -> Stretch:
    """The stretch that a problem is behind a state.

    Args:
        problem: checked, with a bias.
        state: what the caller gave for it, or None.
        window_size: w.
        cu_seqlens: what the caller gave for them, or None.

    Raises:
        TypeError: state is no KeyState, or of another dtype; cu_seqlens are no integers.
        ValueError: the problem is not causal, has rows in front of its first key, or a mask or bias
            with rows; or the state does not fit it.
    """
    q, k, mask, bias = problem.q, problem.k, problem.mask, problem.bias
    assert bias is not None
    if not problem.is_causal:
        raise ValueError("is_causal: got False, wanted True with state, return_state or cu_seqlens")
    rows, seqlen = q.shape[1], k.shape[1]
    if rows > seqlen or (cu_seqlens is not None and rows != seqlen):
        wanted = f"{seqlen} with cu_seqlens" if rows <= seqlen else f"at most {seqlen}"
        raise ValueError(
            f"query: got {rows} rows for a stretch of {seqlen} keys, wanted {wanted}: a row in "
            "front of the stretch would have to see less than the state"
        )
    if bias.shape[2] != 1 or bias.shape[3] != seqlen:
        raise ValueError(
            f"attn_bias: got shape {tuple(bias.shape)}, wanted one score per key, (batch|1, "
            f"nheads|nheads_k|1, 1, {seqlen}), with state, return_state or cu_seqlens"
        )
    if mask is not None:
        key_only_mask(mask, seqlen)
    if state is not None:
        heads = max(k.shape[2], bias.shape[1], 1 if mask is None else mask.shape[1])
        dims = (k.shape[3], problem.v.shape[3])
        score_dtype = torch.promote_types(bias.dtype, torch.float32)
        wanted_state = Wanted(len(k), window_size, heads, dims, k.dtype, score_dtype, k.device)
        check_state("state", state, wanted_state)
    if cu_seqlens is None:
        return Stretch(problem, state, window_size, None)
    starts = check_starts(cu_seqlens, k.device)
    if state is None:
        return Stretch(problem, None, window_size, starts)
    if can_be_read(state.seen) and bool((state.seen != state.seen[:1]).any()):
        raise ValueError("state: got sequences of unequal lengths, wanted equal with cu_seqlens")
    return Stretch(problem, state, window_size, starts - state.seen[:1].sum())


def _own_keys(problem: Problem) -> Keys:
    """The keys of a problem that has a score for each."""
    bias, mask = problem.bias, problem.mask
    assert bias is not None
    key_mask = None if mask is None else key_only_mask(mask, problem.k.shape[1])
    return keys_of(problem.k, problem.v, bias[:, :, 0], key_mask)


def _joined(state: KeyState, keys: Keys, front: int) -> Keys:
    """The keys of a state as the last of `front` entries, those of a stretch behind them."""
    spare = front - state.window_size
    ks, vs, scores = [state.k, keys.k], [state.v, keys.v], [state.score, keys.score]
    if spare > 0:
        ks.insert(0, state.k.new_zeros((len(state.k), spare, *state.k.shape[2:])))
        vs.insert(0, state.v.new_zeros((len(state.v), spare, *state.v.shape[2:])))
        scores.insert(0, state.score.new_full((*state.score.shape[:2], spare), -math.inf))
    return Keys(torch.cat(ks, 1), torch.cat(vs, 1), torch.cat(scores, 2), None)


def _bounds(starts: Tensor, front: int, key_len: int) -> Tensor:
    """Boundaries of documents among `key_len` keys, of which the first `front` are a state's.

    The first document reaches from there into the stretch, up to its first boundary.
    """
    places = (starts + front).clamp(max=key_len).masked_fill(starts < 0, 0)
    # Not by padding: its value would tie a graph that torch traces to one length.
    ends = places.new_zeros(1), places, places.new_full((1,), key_len)
    return torch.cat(ends).to(torch.int32)
