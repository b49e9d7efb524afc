"""Attention of a stretch of a causal sequence to itself and to the state of what lies before it.

The kept keys in order of position and the stretch behind them are a short sequence in which the
rows of the stretch choose what they would in the whole one: a key that is gone would not be chosen,
and of equal scores the later key still stands later. So a stretch is an ordinary problem over key
lists. Letters as in `dmattn.key_state`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn.dispatch import any_requires_grad, select, way_without_graph
from dmattn.key_lists import KeptKeys, behind_rows, whole_blocks
from dmattn.key_state import (
    Keys,
    KeyState,
    NewKeys,
    Places,
    Wanted,
    best_of,
    check_starts,
    check_state,
    counted,
    counting,
    gathered,
    joined,
    kept_places,
    keys_of,
    started,
    tensors_of,
)
from dmattn.ops.keys import empty_kept, keep_keys
from dmattn.ops.selection import select_keys
from dmattn.ops.sharding import refuse_dtensors
from dmattn.problem import Problem
from dmattn.selection import key_only_mask
from dmattn.validation import can_be_read

_BEHIND_BIAS = Problem._fields.index("bias") + 1


class Stretch(NamedTuple):
    """A stretch of a sequence, checked.

    Attributes:
        own: its problem, with a score for each key, without the keys of the state.
        state: what lies before it, None for nothing.
        window_size: w.
        starts: int64 (documents + 1,), where documents begin, counted from the first token of the
            stretch; or None.
        way: the `way_without_graph` of its keys and those of the state.
    """

    own: Problem
    state: KeyState | None
    window_size: int
    starts: Tensor | None
    way: bool | None

    @property
    def needs_keys(self) -> bool:
        """Whether its rows keep other keys than those of a whole sequence would."""
        return self.state is not None or self.starts is not None

    def with_keys(self) -> Problem:
        """The problem with the keys of the state in front of its own, and key lists."""
        problem, state = self.own, self.state
        if problem.q.shape[1] == 0:
            return problem  # no rows, no lists
        front = self._front
        if state is None:
            keys = _own_keys(problem)
        else:
            before = Keys(state.k, state.v, state.score, None)
            keys = joined(before, _own_parts(problem), front, self.way)
        if self.starts is None:
            wanted = self.window_size, problem.q.shape[1], True
            if self.way:
                lists = select_keys(keys.score, None, *wanted, direct=True, cleared=False)
            else:
                lists = select(keys.score.detach(), None, *wanted, cleared=False)
        else:
            key_len = keys.k.shape[1]
            bounds = _bounds(self.starts, front, key_len)
            lists = select(keys.score.detach(), None, self.window_size, key_len, True, bounds)
            lists = behind_rows(lists, front)
        bias = keys.score[:, :, None]
        others = problem.with_lists(lists)[_BEHIND_BIAS:]
        fields: tuple[Any, ...] = (problem.q, keys.k, keys.v, None, bias, *others)
        return Problem(*fields)

    @property
    def _front(self) -> int:
        """Entries in front of the stretch in `with_keys`, of which the last ones are the state's.

        With documents, lists are made for all keys as rows. Those of the stretch can be cut out of
        them where the rows before it fill whole blocks.
        """
        if self.state is None:
            return 0
        return self.window_size if self.starts is None else whole_blocks(self.window_size)

    def room_for_state(self, problem: Problem) -> KeptKeys | None:
        """What `state_behind` fills beside attention, to be made before that; None where it cannot.

        `problem`: as for `state_behind`.
        """
        lists, bias = problem.key_lists, problem.bias
        if not self.way or lists is None or self.own.q.shape[1] == 0:
            return None
        if self._front > self.window_size:
            return None  # ends are still to be counted from the first key of the state
        assert bias is not None
        keys, dtype = (problem.k, problem.v, bias.squeeze(2)), bias.dtype
        dtype = torch.promote_types(dtype, torch.float32)
        return empty_kept(lists.end, keys, self.window_size, dtype)

    def state_behind(self, problem: Problem, room: KeptKeys | None = None) -> KeyState:
        """The state behind it.

        Args:
            problem: `own` with the keys chosen, as attention has it.
            room: of `room_for_state`, where attention of this problem was enqueued right before.
        """
        state, rows = self.state, self.own.q.shape[1]
        if problem.key_lists is None or rows == 0:
            found = best_of(_own_keys(self.own), self.window_size, self.starts)
            return found if state is None else state.merge(found)
        bias = problem.bias
        assert bias is not None
        if self.way is not None:
            return self._kept(problem, bias.squeeze(2), problem.key_lists.end, self.way, room)
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
        keys = Keys(problem.k, problem.v, bias[:, :, 0], None)
        if state is not None:
            keys = keys._replace(position=self._positions(state, keys.k.shape[1]))
        return KeyState(*gathered(keys, places), *numbers)

    def _kept(
        self, problem: Problem, score: Tensor, end: Tensor, way: bool, room: KeptKeys | None
    ) -> KeyState:
        """`state_behind` where nothing requires a gradient."""
        state, k, v, position, seen = self.state, problem.k, problem.v, None, None
        if state is not None:
            position, seen = state.position, state.seen
            spare = self._front - self.window_size
            if spare > 0:
                k, v = k[:, spare:], v[:, spare:]
                score, end = score[:, :, spare:], end[:, :, spare:] - spare
        row, keys, beside = k.shape[1] - 1, (k, v, score), room is not None
        kept = keep_keys(row, end, None, keys, position, seen, self.window_size, way, room, beside)
        its_score = kept.score
        if its_score.dtype != torch.float32:
            its_score = its_score.to(torch.promote_types(its_score.dtype, torch.float32))
        has_start = started(self.own.k, self.starts, state)
        return KeyState(kept.k, kept.v, its_score, kept.position, kept.seen, has_start)

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
    refuse_dtensors(
        " with state, return_state or cu_seqlens",
        query=q,
        key=k,
        value=problem.v,
        attn_bias=bias,
        attn_mask=mask,
    )
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
    given = (k, problem.v, mask, bias)
    way = way_without_graph(*given, *(() if state is None else tensors_of(state)))
    if cu_seqlens is None:
        return Stretch(problem, state, window_size, None, way)
    starts = check_starts(cu_seqlens, k.device)
    if state is None:
        return Stretch(problem, None, window_size, starts, way)
    if can_be_read(state.seen) and bool((state.seen != state.seen[:1]).any()):
        raise ValueError("state: got sequences of unequal lengths, wanted equal with cu_seqlens")
    starts = starts.clamp(min=-1) - state.seen[:1].sum()  # where in the past makes no difference
    return Stretch(problem, state, window_size, starts, way)


def known_stretch(problem: Problem, state: KeyState | None, window_size: int) -> Stretch:
    """The same without documents, for a call whose kind is known: of ordinary tensors."""
    way = None if any_requires_grad(*problem[1:5], *_learned(state)) else True
    return Stretch(problem, state, window_size, None, way)


def _learned(state: KeyState | None) -> tuple[Tensor, ...]:
    """What of a state may require a gradient."""
    return () if state is None else (state.k, state.v, state.score)


def _own_keys(problem: Problem) -> Keys:
    """The keys of a problem that has a score for each."""
    return keys_of(*_own_parts(problem))


def _own_parts(problem: Problem) -> NewKeys:
    """The same as `keys_of` takes them."""
    bias, mask = problem.bias, problem.mask
    assert bias is not None
    key_mask = None if mask is None else key_only_mask(mask, problem.k.shape[1])
    return problem.k, problem.v, bias.squeeze(2), key_mask


def _bounds(starts: Tensor, front: int, key_len: int) -> Tensor:
    """Boundaries of documents among `key_len` keys, of which the first `front` are a state's.

    The first document reaches from there into the stretch, up to its first boundary.
    """
    places = (starts.clamp(max=key_len) + front).clamp(max=key_len).masked_fill(starts < 0, 0)
    # Not by padding: its value would tie a graph that torch traces to one length.
    ends = places.new_zeros(1), places, places.new_full((1,), key_len)
    return torch.cat(ends).to(torch.int32)
