"""What the rows of a causal sequence need to know of all tokens before them, as a value.

Under running top-w that is the `window_size` best keys of each key/value head. The best keys of two
neighbouring stretches together are among the best keys of either, so states can be merged, and the
grouping makes no difference. Letters: B batch, S tokens of a stretch, H query heads, HK key/value
heads, N heads of a state, w window size, D and Dv head dimension of keys and of values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils import _pytree as pytree

from dmattn.arguments import check_window_size
from dmattn.checks import check_head_dim
from dmattn.dispatch import is_plain_call, nobody_intercepts, select, way_without_graph
from dmattn.key_lists import capacity_for, first_fall, rows_at
from dmattn.ops.keys import join_keys, keep_keys
from dmattn.ops.selection import build_key_lists, select_keys
from dmattn.ops.sharding import refuse_dtensors
from dmattn.selection import (
    SCORE_PER_KEY,
    check_boundary_tensor,
    key_only_mask,
    listed_boundaries,
)
from dmattn.validation import (
    DTYPES,
    can_be_read,
    check_can_move,
    check_floating,
    check_same_device,
    check_shape,
    check_tensor,
    check_tensor_dtype,
    describe,
    is_one_or,
    read_integers,
)

# How many tensors `counting` keeps before it drops all of them.
_MOST_COUNTED = 64
_FIELDS = ("k", "v", "score", "position", "seen", "has_start")


@dataclass(frozen=True, eq=False, repr=False)
class KeyState:
    """The keys of the tokens so far that rows of later tokens may still attend to.

    Made by `KeyState.of` or by `flash_dmattn_func(..., return_state=True)`, and given to the call
    for the next stretch as `state=`. All of its tensors stay on the device. Gradients flow through
    k, v and score to the keys of the stretch. A state can be passed in and out of compiled and
    checkpointed functions, pickled, and read by torch.load with weights_only=True. Collectives work
    on its tensors, whose shapes do not depend on the number of tokens.

    Attributes:
        k: (B, w, N, D), the kept keys in order of position. If fewer than w keys are kept, the
            first entries hold no key: zeros, with a score of -inf.
        v: (B, w, N, Dv), the values of the kept keys, in the same order.
        score: float32, or float64 for a float64 bias, (B, N, w): the bias of each kept key.
        position: int32 (B, N, w), counted from the first token seen; -1 in entries without a key.
        seen: int32 (B,), number of tokens so far, masked ones included.
        has_start: bool (B,), whether a document begins among these tokens, so that later tokens see
            nothing of what lies before these tokens.
    """

    k: Tensor
    v: Tensor
    score: Tensor
    position: Tensor
    seen: Tensor
    has_start: Tensor

    @property
    def window_size(self) -> int:
        """w, the largest number of keys that are kept per head."""
        return self.k.shape[1]

    @staticmethod
    def of(
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor,
        window_size: int,
        attn_mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
    ) -> "KeyState":
        """The state of one stretch of tokens.

        Args:
            key, value: (B, S, HK, D) and (B, S, HK, Dv), both float16, bfloat16, float32 or
                float64; D and Dv at most 256.
            attn_bias: floating ({B|1}, {H|HK|1}, 1, S) or ({B|1}, {H|HK|1}, S), the scores. If it
                has H heads, a multiple of HK, the query heads keep different keys, and the state
                holds keys and values once for each query head.
            window_size: w, at least 1.
            attn_mask: True where a key may be kept: bool or integer (B, S), or bool
                ({B|1}, {H|HK|1}, 1, S). Masked tokens are counted in `seen` all the same.
            cu_seqlens: boundaries of packed documents, in non-decreasing order: an int32 or int64
                tensor of one dimension on any device, or a sequence of ints. They count from the
                first token of the stretch and hold for every batch entry. Only keys of the last
                document are kept. Values outside 0 .. S - 1 have no effect, so the boundaries of a
                longer sequence can be given, less the position of the stretch in it.

        Raises:
            TypeError: an argument has the wrong type or dtype, or is a DTensor.
            ValueError: a shape, device or number does not fit, or cu_seqlens on the CPU decrease.
        """
        window_size = check_window_size(window_size, may_be_left_out=False)
        refuse_dtensors(
            " for a state", key=key, value=value, attn_bias=attn_bias, attn_mask=attn_mask
        )
        _check_key_value(key, value)
        scores, mask = _check_scores(attn_bias, key), None
        if attn_mask is not None:
            mask = _check_key_mask(attn_mask, key, scores)
        keys = keys_of(key, value, scores, mask)
        starts = None
        if cu_seqlens is not None:
            starts = check_starts(cu_seqlens, key.device)
        return best_of(keys, window_size, starts)

    def merge(self, later: "KeyState") -> "KeyState":
        """The state of two stretches together: of this one, and of `later`, which follows it.

        Merging is associative: however several states are grouped, the same keys are kept.

        Raises:
            TypeError: later is no KeyState, or its dtypes differ from those of this state.
            ValueError: its window size, batch, heads, head dimension or device differs.
        """
        batch, window_size, heads, head_dim = self.k.shape
        check_state(
            "later",
            later,
            Wanted(
                batch,
                window_size,
                heads,
                (head_dim, self.v.shape[3]),
                self.k.dtype,
                self.score.dtype,
                self.k.device,
            ),
        )
        earlier_score = self.score.masked_fill(later.has_start[:, None, None], -math.inf)
        moved = later.position + self.seen[:, None, None]
        earlier = Keys(self.k, self.v, earlier_score, self.position)
        way = way_without_graph(*tensors_of(self), *tensors_of(later))
        both = joined(earlier, (later.k, later.v, later.score, None), window_size, way)
        position = torch.cat((self.position, moved.where(later.position >= 0, -1)), 2)
        seen, has_start = self.seen + later.seen, self.has_start | later.has_start
        # Not _replace(), which torch 2.6 does not compile.
        best = _best(Keys(both.k, both.v, both.score, position), window_size, way)
        return KeyState(*best, seen, has_start)

    def detach(self) -> "KeyState":
        """The same state, detached from the autograd graph."""
        return KeyState(*[t.detach() for t in tensors_of(self)])

    def to(self, device: torch.device | str | int) -> "KeyState":
        """The same state on another device, or this object if it is there. Differentiable."""
        moved = [t.to(device) for t in tensors_of(self)]
        if all(a is b for a, b in zip(moved, tensors_of(self), strict=True)):
            return self
        return KeyState(*moved)

    def cpu(self) -> "KeyState":
        """The same state on the CPU."""
        return self.to("cpu")

    def cuda(self, device: torch.device | str | int = "cuda") -> "KeyState":
        """The same state on a GPU, the current one by default."""
        return self.to(device)

    def __repr__(self) -> str:
        tensors, _ = _flatten(self)
        # A tree_map may have put other values here, and torch.vmap adds a dimension.
        if not all(isinstance(t, Tensor) for t in tensors) or self.k.dim() != 4:
            return f"KeyState({', '.join(map(describe, tensors))})"
        batch, window_size, heads, head_dim = self.k.shape
        return (
            f"KeyState(batch={batch}, window_size={window_size}, heads={heads}, "
            f"head_dim={head_dim}, dtype={self.k.dtype}, device={str(self.k.device)!r})"
        )


class Keys(NamedTuple):
    """Keys in order of position, with their values, scores and positions."""

    k: Tensor  # (B, L, N, D)
    v: Tensor  # (B, L, N, Dv)
    score: Tensor  # (B, N, L), -inf or NaN for a key that is never kept
    position: Tensor | None  # int32 (B, N, L); None: the index of each key among these keys


class Places(NamedTuple):
    """The indices of the w kept keys of a state among a longer row of keys."""

    at: Tensor  # int64 (B, N, w), ascending; 0 for entries without a key, which come first
    # bool (B, N, w), True for entries without a key. None: nothing has to be emptied, since key 0,
    # which such entries refer to, is itself an entry without a key.
    empty: Tensor | None


# Keys (B, S, HK, D), values (B, S, HK, Dv), scores ({B|1}, {H|HK|1}, S) and a mask, as the
# arguments of `keys_of`.
NewKeys = tuple[Tensor, Tensor, Tensor, Tensor | None]


def keys_of(key: Tensor, value: Tensor, score: Tensor, mask: Tensor | None) -> Keys:
    """The keys of a stretch, with a score for each key and head, which is -inf for masked keys.

    Args:
        key, value: (B, S, HK, D) and (B, S, HK, Dv).
        score: ({B|1}, {H|HK|1}, S).
        mask: bool ({B|1}, {H|HK|1}, S) or None.
    """
    batch, _, nheads_k, _ = key.shape
    heads = max(nheads_k, score.shape[1], 1 if mask is None else mask.shape[1])
    # In half precision the gradient of a score that several heads share would be rounded once for
    # each head, so scores are made at least float32.
    score = score.to(torch.promote_types(score.dtype, torch.float32))
    score = _with_heads(score, batch, heads)
    if mask is not None:
        score = score.masked_fill(~_with_heads(mask, batch, heads), -math.inf)
    if nheads_k != heads:
        key, value = (t.repeat_interleave(heads // nheads_k, 2) for t in (key, value))
    return Keys(key, value, score, None)


def best_of(keys: Keys, window_size: int, starts: Tensor | None) -> KeyState:
    """The state of a stretch of keys whose positions are their indices.

    `starts`: the boundaries of documents, as `check_starts` returns them, or None.
    """
    if starts is not None:
        seqlen = keys.k.shape[1]
        last = starts.masked_fill((starts < 0) | (starts >= seqlen), 0).amax()
        before = torch.arange(seqlen, device=keys.k.device) < last
        keys = Keys(keys.k, keys.v, keys.score.masked_fill(before, -math.inf), keys.position)
    best = _best(keys, window_size, way_without_graph(*keys))
    return KeyState(*best, *counted(keys.k, starts))


def joined(
    first: Keys, new: NewKeys, front: int, way: bool | None, place: Tensor | None = None
) -> Keys:
    """The keys of a state or a cache followed by those of a stretch; without positions.

    Args:
        first: the F keys of the state or the cache. They become the last of the `front` entries;
            the entries before them hold no key.
        new: the keys of the stretch, as `keys_of` takes them.
        front: how many entries are in front of the stretch, at least F.
        way: the `way_without_graph` of all these tensors.
        place: int32 (B, N, F): entry i of the result is entry place[i] of `first`. None for the
            order in which they lie. Only if `way` is not None.
    """
    if way is not None:
        k, v, score, mask = new
        rows = (first.k, first.v, first.score)
        return Keys(*join_keys(rows, (k, v, score), mask, front, way, place), None)
    behind, spare = keys_of(*new), front - first.k.shape[1]
    ks, vs = [first.k, behind.k], [first.v, behind.v]
    scores = [first.score, behind.score.to(first.score.dtype)]
    if spare > 0:
        ks.insert(0, first.k.new_zeros((len(first.k), spare, *first.k.shape[2:])))
        vs.insert(0, first.v.new_zeros((len(first.v), spare, *first.v.shape[2:])))
        scores.insert(0, first.score.new_full((*first.score.shape[:2], spare), -math.inf))
    return Keys(torch.cat(ks, 1), torch.cat(vs, 1), torch.cat(scores, 2), None)


def counted(
    key: Tensor, starts: Tensor | None, before: KeyState | None = None
) -> tuple[Tensor, Tensor]:
    """The fields `seen` and `has_start` of the state after a stretch.

    Args:
        key: the keys of the stretch, (B, S, HK, D).
        starts: as `check_starts` returns them, or None.
        before: the state before the stretch, or None.
    """
    batch, seqlen = key.shape[:2]
    if before is None:
        seen = torch.full((batch,), seqlen, dtype=torch.int32, device=key.device)
    else:
        seen = before.seen + seqlen
    return seen, started(key, starts, before)


def started(key: Tensor, starts: Tensor | None, before: KeyState | None) -> Tensor:
    """The field `has_start` of the state after a stretch; arguments as for `counted`."""
    batch, seqlen = key.shape[:2]
    if before is None:
        has_start = torch.zeros((batch,), dtype=torch.bool, device=key.device)
    else:
        has_start = before.has_start
    if starts is not None:
        has_start = has_start | ((starts >= 0) & (starts < seqlen)).any()
    return has_start


def _best(keys: Keys, window_size: int, way: bool | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k, v, score and position of the state of the best of some keys.

    `way`: the `way_without_graph` of the keys.
    """
    if way is None or keys.score.shape[2] == 0:
        return gathered(keys, _best_places(keys.score, window_size))
    end = select_keys(keys.score, None, window_size, 1, False, direct=way).end
    # Field by field, since older torch cannot compile slices of named tuples.
    row, rows = keys.k.shape[1] - 1, (keys.k, keys.v, keys.score)
    kept = keep_keys(row, end, None, rows, keys.position, None, window_size, way)
    return kept.k, kept.v, kept.score, kept.position


def _best_places(score: Tensor, window_size: int) -> Places:
    """The indices of the highest scores of score (B, N, L), `window_size` or fewer per head."""
    if score.shape[2] == 0:
        at = score.new_zeros((*score.shape[:2], window_size), dtype=torch.int64)
        return Places(at, torch.ones_like(at, dtype=torch.bool))
    lists = select(score.detach(), None, window_size, 1, False)
    return _placed(lists.idx, lists.count, window_size)


def kept_places(end: Tensor, window_size: int, first_may_be_empty: bool = False) -> Places:
    """The indices of the keys that the last row of a causal selection keeps.

    Args:
        end: int32 (B, N, L), the interval ends of the selection, L at least 1, in which a row keeps
            `window_size` keys or fewer.
        window_size: w.
        first_may_be_empty: L is at least w, and wherever the last row keeps fewer than w keys, key
            0 is an entry without a key. Unused entries can then refer to key 0, and none has to be
            emptied afterwards.
    """
    capacity = capacity_for(window_size, end.shape[2])
    lists = build_key_lists(end, 1, capacity, None, is_plain_call(end))
    return _placed(lists.idx, lists.count, window_size, first_may_be_empty)


def _placed(
    idx: Tensor, count: Tensor, window_size: int, first_may_be_empty: bool = False
) -> Places:
    """The first of the lists (B, N, lists, capacity), as the last of w entries."""
    # By narrow instead of an index: for an index of 0 torch would trace a separate graph.
    idx, count = idx.narrow(2, 0, 1).squeeze(2), count.narrow(2, 0, 1)
    # Older torch can only gather by int64.
    entry = (count + counting(window_size, idx.device, -window_size)).long()
    if first_may_be_empty:
        # Negative entries wrap around to the unused end of the list, which holds zeros: key 0.
        return Places(idx.gather(2, entry.remainder(idx.shape[2])).long(), None)
    empty = entry < 0
    at = idx.gather(2, entry.clamp(min=0)).long()
    return Places(at.masked_fill(empty, 0), empty)


def gathered(keys: Keys, places: Places) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k, v, score and position of the state that holds the keys at these places."""
    at, empty = places
    if keys.k.shape[1] == 0:
        window_size = at.shape[2]
        k, v = (t.new_zeros(len(t), window_size, *t.shape[2:]) for t in (keys.k, keys.v))
        score = keys.score.new_full(at.shape, -math.inf)
        return k, v, score, torch.full_like(at, -1, dtype=torch.int32)
    k, v, score = rows_at(keys.k, at), rows_at(keys.v, at), keys.score.gather(2, at)
    position = at.to(torch.int32) if keys.position is None else keys.position.gather(2, at)
    if empty is None:
        return k, v, score, position
    no_row = empty.mT[..., None]
    return (
        k.masked_fill_(no_row, 0.0),
        v.masked_fill_(no_row, 0.0),
        score.masked_fill_(empty, -math.inf),
        position.masked_fill_(empty, -1),
    )


_counted: dict[tuple[int, int, torch.device, int], Tensor] = {}


def counting(size: int, device: torch.device, first: int = 0) -> Tensor:
    """int32 (size,): first, first + 1 and so on. The caller must not write to the tensor.

    On a GPU, calls of the same size on the same stream share one tensor. A new one is made each
    time where its creation has to be recorded: for a compiler, for a mode that intercepts calls,
    and during the capture of a CUDA graph, which has memory of its own.
    """
    if device.type != "cuda" or torch.compiler.is_compiling() or not nobody_intercepts():
        return torch.arange(first, first + size, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return torch.arange(first, first + size, dtype=torch.int32, device=device)
    key = (size, first, device, torch.cuda.current_stream(device).cuda_stream)
    found = _counted.get(key)
    if found is None:
        if len(_counted) >= _MOST_COUNTED:
            _counted.clear()
        with torch.inference_mode(False):
            found = torch.arange(first, first + size, dtype=torch.int32, device=device)
        _counted[key] = found
    return found


class Wanted(NamedTuple):
    """The sizes, dtypes and device that a state must have to be combined with some keys."""

    batch: int
    window_size: int
    heads: int
    head_dims: tuple[int, int]  # of keys and values
    dtype: torch.dtype
    score_dtype: torch.dtype
    device: torch.device


def check_state(name: str, state: Any, wanted: Wanted) -> KeyState:
    """The state, if it is a KeyState as wanted.

    Args:
        name: the argument's name, for error messages.
        state: what the caller gave.
        wanted: what it has to be.

    Raises:
        TypeError: it is no KeyState, or has a wrong dtype.
        ValueError: its window size, batch, heads, head dimension or device is wrong.
    """
    if not isinstance(state, KeyState):
        raise TypeError(f"{name}: got {describe(state)}, wanted a dmattn.KeyState")
    for field, t in zip(_FIELDS, tensors_of(state), strict=True):
        check_tensor(f"{name}.{field}", t)
    if state.k.dim() == 4 and state.window_size != wanted.window_size:
        raise ValueError(
            f"{name}: got a state of window_size {state.window_size}, wanted {wanted.window_size}"
        )
    if state.k.dim() == 4 and state.k.shape[2] != wanted.heads:
        raise ValueError(
            f"{name}: got a state of {state.k.shape[2]} heads, wanted {wanted.heads}, as many as "
            "key, attn_bias or attn_mask have, which must be the same for all stretches"
        )
    batch, window_size, heads = wanted.batch, wanted.window_size, wanted.heads
    rows, per_head = (batch, window_size, heads), (batch, heads, window_size)
    for field, dtype, shape in (
        ("k", wanted.dtype, (*rows, wanted.head_dims[0])),
        ("v", wanted.dtype, (*rows, wanted.head_dims[1])),
        ("score", wanted.score_dtype, per_head),
        ("position", torch.int32, per_head),
        ("seen", torch.int32, rows[:1]),
        ("has_start", torch.bool, rows[:1]),
    ):
        t = getattr(state, field)
        check_tensor_dtype(f"{name}.{field}", t, (dtype,))
        check_shape(f"{name}.{field}", t, shape)
        check_same_device(f"{name}.{field}", t, wanted.device, "the keys")
    return state


def check_starts(cu_seqlens: Any, device: torch.device) -> Tensor:
    """Boundaries of documents as an int64 tensor (documents + 1,) on a device.

    Raises:
        TypeError: they are no integers.
        ValueError: they are not one-dimensional, or they decrease. The latter is checked only if
            the host can read them without waiting.
    """
    if isinstance(cu_seqlens, Tensor):
        bounds = check_tensor("cu_seqlens", cu_seqlens)
        check_can_move("cu_seqlens", bounds, device)
    else:
        bounds = torch.tensor(listed_boundaries(cu_seqlens), dtype=torch.int64, device="cpu")
    check_boundary_tensor(bounds)
    if can_be_read(bounds) and bool((bounds[1:] < bounds[:-1]).any()):
        falls = first_fall(read_integers(bounds))
        raise ValueError(f"cu_seqlens: got {falls}, wanted boundaries that never fall")
    return bounds.to(device, torch.int64, non_blocking=True)


def _with_heads(t: Tensor, batch: int, heads: int) -> Tensor:
    """({B|1}, {HK|1}, S) or (B, H, S) as (batch, heads, S)."""
    if not is_one_or(t.shape[1], heads):
        t = t.repeat_interleave(heads // t.shape[1], 1)
    return t.expand(batch, heads, t.shape[2])


def _check_key_value(key: Any, value: Any) -> None:
    check_tensor("key", key)
    check_tensor("value", value)
    check_tensor_dtype("key", key, DTYPES)
    if key.dim() != 4:
        raise ValueError(
            f"key: got shape {tuple(key.shape)}, wanted (batch, seqlen, nheads_k, head_dim)"
        )
    check_tensor_dtype("value", value, (key.dtype,), " as key")
    if value.dim() != 4 or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value: got shape {tuple(value.shape)}, wanted "
            f"({', '.join(map(str, key.shape[:3]))}, head_dim) as key"
        )
    check_head_dim(key.shape[3], "key")
    check_head_dim(value.shape[3], "value")
    check_same_device("value", value, key.device, "key")


def _check_scores(attn_bias: Any, key: Tensor) -> Tensor:
    """attn_bias as ({B|1}, heads, S)."""
    scores = check_floating("attn_bias", attn_bias, SCORE_PER_KEY)
    check_same_device("attn_bias", scores, key.device, "key")
    batch, seqlen, nheads_k, _ = key.shape
    if scores.dim() == 4 and scores.shape[2] == 1:
        scores = scores.squeeze(2)
    fits = scores.dim() == 3 and is_one_or(scores.shape[0], batch) and scores.shape[2] == seqlen
    heads = scores.shape[1] if fits else 0
    if heads == 0 or not (heads == 1 or heads % nheads_k == 0):
        raise ValueError(
            f"attn_bias: got shape {tuple(attn_bias.shape)}, wanted (batch|1, nheads|nheads_k|1, "
            f"1, {seqlen}) or (batch|1, nheads|nheads_k|1, {seqlen})"
        )
    return scores


def _check_key_mask(attn_mask: Any, key: Tensor, scores: Tensor) -> Tensor:
    """attn_mask as bool ({B|1}, heads, S), with a number of heads that fits that of scores."""
    batch, seqlen, nheads_k, _ = key.shape
    mask = key_only_mask(attn_mask, seqlen)
    check_same_device("attn_mask", mask, key.device, "key")
    a, b = mask.shape[1], scores.shape[1]
    few, many = min(a, b), max(a, b)  # torch.compile cannot sort symbolic sizes
    fits = few == 1 or (few > 0 and many % few == 0)
    fits &= mask.shape[1] == 1 or mask.shape[1] % nheads_k == 0
    if not is_one_or(mask.shape[0], batch) or not fits:
        raise ValueError(
            f"attn_mask: got shape {tuple(attn_mask.shape)} for {batch} sequences, {nheads_k} "
            f"heads of key and {scores.shape[1]} of attn_bias, wanted (batch, {seqlen}) or "
            f"(batch|1, nheads|nheads_k|1, 1, {seqlen})"
        )
    return mask


def tensors_of(state: KeyState) -> tuple[Any, ...]:
    """The fields of a state, in their order."""
    return state.k, state.v, state.score, state.position, state.seen, state.has_start


def _flatten(state: KeyState) -> tuple[list[Any], None]:
    return [getattr(state, name) for name in _FIELDS], None


def _flatten_with_keys(state: KeyState) -> tuple[list[tuple[pytree.KeyEntry, Any]], None]:
    tensors, _ = _flatten(state)
    return list(zip([pytree.GetAttrKey(name) for name in _FIELDS], tensors, strict=True)), None


def _unflatten(tensors: Any, _: None) -> KeyState:
    return KeyState(*tensors)


def _flatten_as(state: KeyState, spec: pytree.TreeSpec) -> list[Any]:
    return _flatten(state)[0]


pytree.register_pytree_node(
    KeyState,
    _flatten,
    _unflatten,
    serialized_type_name="dmattn.KeyState",
    flatten_with_keys_fn=_flatten_with_keys,
)
register_pytree_flatten_spec(KeyState, _flatten_as)
torch.serialization.add_safe_globals([KeyState])
