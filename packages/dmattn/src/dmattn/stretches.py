"""Attention of a stretch of a causal sequence to itself and to the state of the tokens before it.

The keys of the state, in order of position, followed by the keys of the stretch are a short
sequence. In it the rows of the stretch choose the same keys as in the whole sequence: no row of the
stretch would choose a key that the state has dropped, and of two equal scores the later key still
stands behind the earlier one. So a stretch is an ordinary problem over key lists. Letters as in
`dmattn.key_state`.
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
    """A checked stretch of a sequence.

    Attributes:
        own: the problem of the stretch alone, with a score for each key.
        state: the state of the tokens before the stretch; None if there are none.
        window_size: w.
        starts: int64 (documents + 1,), boundaries of documents, counted from the first token of the
            stretch; or None.
        way: the `way_without_graph` of its operands and of the tensors of the state.
    """

    own: Problem
    state: KeyState | None
    window_size: int
    starts: Tensor | None
    way: bool | None

    # Methods and no properties, which dynamo of torch 2.9 and older does not see in a named tuple.
    def needs_keys(self) -> bool:
        """Whether its rows may keep other keys than `keep_window` finds for `own` alone."""
        return self.state is not None or self.starts is not None

    def with_keys(self) -> Problem:
        """The problem with the keys of the state in front of those of the stretch, and key lists.

        Without rows it is `own`, unchanged.
        """
        problem, state = self.own, self.state
        if problem.q.shape[1] == 0:
            return problem  # no rows, no lists
        front = self._front()
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
        listed: tuple[Any, ...] = (*problem.with_lists(lists),)  # as in `Problem.with_lists`
        fields = (problem.q, keys.k, keys.v, None, bias, *listed[_BEHIND_BIAS:])
        return Problem(*fields)

    def _front(self) -> int:
        """How many entries `with_keys` puts in front of the stretch; the state's keys are the last.

        With documents, lists are made for as many rows as there are keys. The number of entries is
        then rounded up to whole blocks of rows, so that the lists of the stretch can be cut out.
        """
        if self.state is None:
            return 0
        return self.window_size if self.starts is None else whole_blocks(self.window_size)

    def room_for_state(self, problem: Problem) -> KeptKeys | None:
        """Memory that `state_behind` can fill while the attention still runs.

        It has to be allocated before the attention is enqueued. None if `state_behind` has to run
        after the attention. `problem`: as for `state_behind`.
        """
        lists, bias = problem.key_lists, problem.bias
        if not self.way or lists is None or self.own.q.shape[1] == 0:
            return None
        if self._front() > self.window_size:
            return None  # `_kept` has to shift the interval ends first
        assert bias is not None
        keys, dtype = (problem.k, problem.v, bias.squeeze(2)), bias.dtype
        dtype = torch.promote_types(dtype, torch.float32)
        return empty_kept(lists.end, keys, self.window_size, dtype)

    def state_behind(self, problem: Problem, room: KeptKeys | None = None) -> KeyState:
        """The state of all tokens up to the end of the stretch.

        Args:
            problem: the problem that the attention computed, with its keys chosen.
            room: what `room_for_state` returned, if the attention of this problem was the last
                thing enqueued; otherwise None.
        """
        state, rows = self.state, self.own.q.shape[1]
        if problem.key_lists is None or rows == 0:
            found = best_of(_own_keys(self.own), self.window_size, self.starts)
            return found if state is None else state.merge(found)
        bias = problem.bias
        assert bias is not None
        if self.way is not None:
            return self._kept(problem, bias.squeeze(2), problem.key_lists.end, self.way, room)
        # Without documents all keys of the state remain visible, so that entry 0 holds no key
        # wherever a row keeps fewer than w keys.
        all_in_sight = state is not None and self.starts is None
        places = kept_places(problem.key_lists.end, self.window_size, all_in_sight)
        numbers = counted(self.own.k, self.starts, state)
        if not self.needs_keys():
            keys = _own_keys(self.own)
            heads = keys.score.shape[:2]
            at, empty = places
            places = Places(
                at.expand(*heads, -1), None if empty is None else empty.expand(*heads, -1)
            )
            return KeyState(*gathered(keys, places), *numbers)
        k, v = problem.k, problem.v
        position = None if state is None else self._positions(state, k.shape[1])
        keys = Keys(k, v, bias[:, :, 0], position)
        return KeyState(*gathered(keys, places), *numbers)

    def _kept(
        self, problem: Problem, score: Tensor, end: Tensor, way: bool, room: KeptKeys | None
    ) -> KeyState:
        """`state_behind` by the operator `keep_keys`, for calls that need no gradient."""
        state, k, v, position, seen = self.state, problem.k, problem.v, None, None
        if state is not None:
            position, seen = state.position, state.seen
            spare = self._front() - self.window_size
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
        """int32 (B, N, L): positions, in the whole sequence, of the keys of `with_keys`."""
        seqlen = self.own.k.shape[1]
        place = state.seen[:, None] + counting(seqlen, state.seen.device)
        place = place[:, None].expand(-1, state.score.shape[1], -1)
        before, spare = state.position, key_len - seqlen - self.window_size
        if self.starts is not None:
            before = torch.nn.functional.pad(before, (spare, 0), value=-1)
        return torch.cat((before, place), 2)


def checked_stretch(problem: Problem, state: Any, window_size: int, cu_seqlens: Any) -> Stretch:
    """The stretch of a problem and the state before it.

    Args:
        problem: checked, with a bias.
        state: what the caller gave for `state`, or None.
        window_size: w.
        cu_seqlens: what the caller gave for `cu_seqlens`, or None.

    Raises:
        TypeError: an operand is a DTensor; state is no KeyState, or of another dtype; cu_seqlens
            are no integers.
        ValueError: the problem is not causal, has more rows than keys (with cu_seqlens: another
            number of them), or a mask or bias that differs between rows; the state does not fit; or
            cu_seqlens decrease.
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
    # Boundaries before the stretch become negative; which negative number makes no difference.
    starts = starts.clamp(min=-1) - state.seen[:1].sum()
    return Stretch(problem, state, window_size, starts, way)


def known_stretch(problem: Problem, state: KeyState | None, window_size: int) -> Stretch:
    """`checked_stretch` without documents, for a call of a known kind, which needs no checks."""
    way = None if any_requires_grad(*problem[1:5], *_learned(state)) else True
    return Stretch(problem, state, window_size, None, way)


def _learned(state: KeyState | None) -> tuple[Tensor, ...]:
    """The tensors of a state that may require a gradient."""
    return () if state is None else (state.k, state.v, state.score)


def _own_keys(problem: Problem) -> Keys:
    """The keys of a problem with a bias of one score per key."""
    return keys_of(*_own_parts(problem))


def _own_parts(problem: Problem) -> NewKeys:
    """The arguments of `keys_of` for such a problem: key, value, scores and mask."""
    bias, mask = problem.bias, problem.mask
    assert bias is not None
    key_mask = None if mask is None else key_only_mask(mask, problem.k.shape[1])
    return problem.k, problem.v, bias.squeeze(2), key_mask


def _bounds(starts: Tensor, front: int, key_len: int) -> Tensor:
    """Boundaries of documents among `key_len` keys, of which the first `front` are a state's.

    int32, rising from 0 to key_len. The first document holds the keys of the state and those of the
    stretch up to the first boundary in it.
    """
    places = (starts.clamp(max=key_len) + front).clamp(max=key_len).masked_fill(starts < 0, 0)
    # By cat instead of pad: the padding value key_len would tie a traced graph to one length.
    ends = places.new_zeros(1), places, places.new_full((1,), key_len)
    return torch.cat(ends).to(torch.int32)
