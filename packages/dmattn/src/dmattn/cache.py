"""Decoding from the keys that are still kept.

Under running top-w selection a key that has left never returns, so a cache of `window_size` entries
per key/value head is exact, whatever the length of the context. Letters: B batch, T new tokens, S
tokens of the prompt, H query heads, HK key/value heads, D head dimension.
"""

import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dmattn.ops.cache  # noqa: F401 - registers the operators
from dmattn.backends.cpu import cache as cpu
from dmattn.backends.cuda import cache as cuda
from dmattn.cache_state import CacheTensors, CacheTokens
from dmattn.checks import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, check_last_stride
from dmattn.dispatch import is_plain_call
from dmattn.functional import flash_dmattn_func
from dmattn.selection import KeySelection, select_keys
from dmattn.validation import (
    check_bool,
    check_dtype,
    check_int,
    check_number,
    check_optional_tensor,
    check_same_device,
    check_shape,
    check_tensor,
    check_tensor_dtype,
    describe,
    is_one_or,
    one_of,
)

_HALF = (torch.float16, torch.bfloat16)
_DTYPES = {"cuda": _HALF, "cpu": (*_HALF, torch.float32, torch.float64)}
_DTYPES["meta"] = _DTYPES["cpu"]


class _Fill(NamedTuple):
    """What a prompt puts into the first entries of a cache."""

    k: Tensor  # (B, room, HK, D)
    v: Tensor  # as k
    score: Tensor  # (B, HK, room)
    position: Tensor  # (B, HK, room)


class DynamicMaskCache:
    """Keys, values and scores of one attention layer, from which it decodes.

    With `evict` the cache holds the `window_size` best keys of each key/value head, and decoding
    equals that over the full context. Without, it holds everything up to `capacity` and each step
    selects its `window_size` best keys anew. Of equal scores the later key is kept; a key of score
    NaN or -inf is not attended to. All state is on the device and changes in place, so that a CUDA
    graph can capture a step. Inference only: no gradients. Every layer needs a cache of its own.

    A cache can be copied (`clone`, copy.deepcopy) and saved with torch.save; torch.load takes it
    with weights_only=True, once dmattn is imported.

    Attributes:
        k, v: (B, entries, HK, D); entries = window_size, or capacity without evict.
        score: (B, HK, entries), -inf where there is no key.
        position: int32 (B, HK, entries), the key's place in its sequence, -1 where there is none.
        seen: int32 (B,), tokens so far.

    Args:
        batch, nheads_k, head_dim: B, HK and D; D at most 256, and on CUDA a multiple of 8.
        window_size: keys that a query attends to, at least 1.
        dtype: of keys and values: float16 or bfloat16, on the CPU also float32 or float64.
        device: of all tensors.
        score_dtype: float32 or `dtype`.
        evict: whether to drop the keys that are out of the window for good.
        capacity: without evict, the most tokens per sequence. Padding and inactive tokens take no
            room.

    Raises:
        TypeError: a number, flag or dtype is of the wrong kind.
        ValueError: a number is out of range, or capacity does not go with evict.
    """

    def __init__(
        self,
        batch: int,
        window_size: int,
        nheads_k: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        score_dtype: torch.dtype = torch.float32,
        evict: bool = True,
        capacity: int | None = None,
    ) -> None:
        self.window_size = check_int("window_size", window_size, 1)
        batch = check_int("batch", batch, 0)
        nheads_k = check_int("nheads_k", nheads_k, 1)
        device = _check_device(device)
        head_dim = _check_head_dim(head_dim, device)
        dtype = _check_entry_dtype(dtype, device)
        if check_dtype("score_dtype", score_dtype) not in (torch.float32, dtype):
            wanted = one_of(tuple(dict.fromkeys((torch.float32, dtype))))
            raise TypeError(f"score_dtype: got {score_dtype}, wanted {wanted}")
        self.evict = check_bool("evict", evict)
        if self.evict != (capacity is None):
            wanted = "None, as the window is all it holds" if evict else "an int, with evict=False"
            raise ValueError(f"capacity: got {describe(capacity)}, wanted {wanted}")
        entries = self.window_size if capacity is None else check_int("capacity", capacity, 1)
        self.k = torch.zeros(batch, entries, nheads_k, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        shape = (batch, nheads_k, entries)
        self.score = torch.full(shape, -math.inf, dtype=score_dtype, device=device)
        self.position = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.seen = torch.zeros(batch, dtype=torch.int32, device=device)
        self._is_empty = True
        # Without evict: no sequence has more tokens than this, as far as the host knows without
        # asking the device. Padding and inactive tokens may be counted in.
        self._most_seen = 0
        # A CUDA graph puts tokens in without the host: from then on it has to ask.
        self._captured = False
        self._layer: weakref.ref[Any] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been put in since it was made or reset. Does not ask the device."""
        return self._is_empty

    @property
    def capacity(self) -> int:
        """Entries per sequence and key/value head."""
        return self.k.shape[1]

    def prefill(
        self,
        key: Tensor,
        value: Tensor,
        score: Tensor,
        selection: KeySelection | None = None,
        lengths: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> None:
        """Put a prompt in, in place of whatever the cache held.

        On CUDA the host does not wait, but for one case: without eviction, a padded prompt that is
        longer than the capacity.

        Args:
            key, value: (B, S, HK, D) in the dtype of the cache.
            score: (B, HK, S) in the score dtype of the cache.
            selection: the one by which the prompt was attended to, to save making it again: of the
                same scores, window size, and padding.
            lengths: int (B,), 0 to S, where the prompts are shorter and padded at their end. On
                CUDA, where their values are not looked at, others count as 0 or S.
            attn_mask: bool (B, S), False at padding, wherever that is; instead of lengths.

        Raises:
            TypeError, ValueError: something does not fit the cache, which is then unchanged.
        """
        batch, _, nheads_k, head_dim = self.k.shape
        seqlen = _size(key, 1)
        self._check("key", key, (batch, seqlen, nheads_k, head_dim), self.k.dtype)
        self._check("value", value, (batch, seqlen, nheads_k, head_dim), self.k.dtype)
        self._check("score", score, (batch, nheads_k, seqlen), self.score.dtype)
        if selection is not None:
            self._check_selection(selection, seqlen)
        real = self._real_tokens(lengths, attn_mask, seqlen)
        most = self._check_prompt_room(seqlen, real)
        fill = self._chosen(key, value, score, real, self._prompt_keys(score, selection, real))

        self._clear()
        for entry, new in zip((self.k, self.v), fill[:2], strict=True):
            entry[:, : new.shape[1]] = new
        for entry, new in zip((self.score, self.position), fill[2:], strict=True):
            entry[..., : new.shape[2]] = new
        self.seen.copy_(torch.full_like(self.seen, seqlen) if real is None else real.sum(1))
        self._most_seen = most
        self._is_empty = seqlen == 0

    def append_and_attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score: Tensor,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        active: Tensor | None = None,
    ) -> Tensor:
        """Put a few tokens in, one after the other, and let each attend to what is then kept.

        The time grows with the number of tokens, as each is a step of its own: right for one or a
        few, slow for a long stretch of text, which `prefill` takes much faster.

        The host does not wait for the device, but for one case: without eviction, once the tokens
        offered so far, inactive ones included, exceed the capacity, it reads `seen`.

        Args:
            query: (B, T, H, D) in the dtype of the cache, with H a multiple of HK.
            key, value: (B, T, HK, D) in the dtype of the cache.
            score: (B, HK, T) in the score dtype of the cache.
            softmax_scale: D ** -0.5 when None.
            softcap: as in `flash_dmattn_func`; at least 0.
            active: bool (B,) or (B, T), False for tokens that are none, in batches of unequal
                progress. They are not put in, and their output is finite and meaningless.

        Returns:
            out (B, T, H, D).

        Raises:
            TypeError, ValueError: something does not fit the cache, which is then unchanged; among
                others, more tokens than a cache that evicts nothing has room for. In a CUDA graph,
                which cannot raise, those that do not fit are left out.
            RuntimeError: a gradient would be needed.
        """
        tokens = self._check_step(query, key, value, score, active)
        if active is not None and active.dim() == 1:
            active = active[:, None].expand(-1, tokens)
        softcap = check_number("softcap", softcap, 0)
        if softmax_scale is None:
            scale = self.k.shape[3] ** -0.5
        else:
            scale = check_number("softmax_scale", softmax_scale)
        if tokens == 0:
            return query.new_empty(query.shape)
        new = CacheTokens(key, value, score, active)
        if not self.evict:
            return self._step_over_all(query, new, scale, softcap)
        out: Tensor | None
        if is_plain_call(query, key, value, active, score):
            append = cuda.append_to_cache if query.is_cuda else cpu.append_to_cache
            out = append(new, self._tensors(), True, query, scale, softcap)
        else:
            operands = (query, *new, *self._tensors())
            out = torch.ops.dmattn.cache_append_and_attend(*operands, scale, softcap)
        assert out is not None  # as there is a query
        self._is_empty = False
        return out

    def reorder(self, beam_idx: Tensor) -> None:
        """Make entry i of the batch a copy of what entry beam_idx[i] was, in place.

        Args:
            beam_idx: int64 or int32 (B,), 0 to B - 1. On CUDA, where its values are not looked at,
                others are clamped to that. For another number of entries: `batch_select_indices`.

        Raises:
            TypeError, ValueError: it is none of that; the cache is then unchanged.
        """
        index = self._check_indices("beam_idx", beam_idx)
        if index.shape[0] != len(self.seen):
            raise ValueError(
                f"beam_idx: got shape {tuple(index.shape)}, wanted ({len(self.seen)},); "
                "batch_select_indices changes the number of sequences"
            )
        for t in self._tensors():
            t.copy_(t.index_select(0, index))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these entries of the batch, in this order; each may occur any number of times.

        The tensors of the cache are new ones then, which an earlier CUDA graph does not know.

        Args:
            indices: int64 or int32 (N,), 0 to B - 1, clamped on CUDA as in `reorder`.

        Raises:
            TypeError, ValueError: it is none of that; the cache is then unchanged.
        """
        index = self._check_indices("indices", indices)
        self._replace([t.index_select(0, index) for t in self._tensors()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make `repeats` neighbouring copies of each entry of the batch, as for beams.

        The tensors of the cache are new ones then, which an earlier CUDA graph does not know.

        Raises:
            TypeError, ValueError: repeats is no int of at least 1.
        """
        repeats = check_int("repeats", repeats, 1)
        self._replace([t.repeat_interleave(repeats, 0) for t in self._tensors()])

    def reset(self) -> None:
        """Forget everything."""
        self._clear()
        self._layer = None

    def clone(self) -> "DynamicMaskCache":
        """A cache of its own with the same content."""
        other = object.__new__(DynamicMaskCache)
        other.__dict__.update(self.__getstate__())
        other._replace([t.clone() for t in self._tensors()])
        return other

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_layer": None}  # a weak reference cannot be saved

    def __repr__(self) -> str:
        batch, entries, nheads_k, head_dim = self.k.shape
        return (
            f"DynamicMaskCache(batch={batch}, window_size={self.window_size}, entries={entries}, "
            f"nheads_k={nheads_k}, head_dim={head_dim}, dtype={self.k.dtype}, "
            f"device={self.k.device}, evict={self.evict})"
        )

    def check_layer(self, layer: object) -> None:
        """Note which layer uses the cache; two of them would mix their keys up.

        Raises:
            ValueError: another layer has put tokens in since it was made or reset.
        """
        other = None if self._layer is None or self._is_empty else self._layer()
        if other is not None and other is not layer:
            raise ValueError(
                "cache: got one that holds the keys of another layer, wanted one for each layer"
            )
        if other is None:
            self._layer = weakref.ref(layer)

    def _clear(self) -> None:
        self.k.zero_()
        self.v.zero_()
        self.score.fill_(-math.inf)
        self.position.fill_(-1)
        self.seen.zero_()
        self._most_seen = 0
        self._is_empty = True

    def _tensors(self) -> CacheTensors:
        return CacheTensors(self.k, self.v, self.score, self.position, self.seen)

    def _replace(self, tensors: list[Tensor]) -> None:
        self.k, self.v, self.score, self.position, self.seen = tensors

    def _chosen(
        self, key: Tensor, value: Tensor, score: Tensor, real: Tensor | None, kept: Tensor
    ) -> _Fill:
        """The kept keys of the prompt, bool (B, HK, S), behind one another."""
        batch, entries, nheads_k, _ = self.k.shape
        seqlen = score.shape[2]
        room = min(entries, seqlen)
        places = torch.arange(seqlen, dtype=torch.int32, device=score.device).expand(batch, -1)
        slot = (kept.cumsum(-1) - 1).masked_fill(~kept, room)
        index = slot.new_zeros((batch, nheads_k, room + 1))
        index.scatter_(-1, slot, places[:, None].expand(slot.shape).long())
        index = index[..., :room]
        if real is not None:
            places = real.cumsum(1, dtype=torch.int32) - 1
        empty = torch.arange(room, device=score.device) >= kept.sum(-1, keepdim=True)
        rows, no_row = index.mT[..., None], empty.mT[..., None]
        chosen = score.detach().gather(-1, index)
        where = places[:, None].expand(-1, nheads_k, -1).gather(-1, index)
        return _Fill(
            key.detach().take_along_dim(rows, 1).masked_fill(no_row, 0.0),
            value.detach().take_along_dim(rows, 1).masked_fill(no_row, 0.0),
            chosen.masked_fill(empty | ~(chosen > -math.inf), -math.inf),
            where.masked_fill(empty, -1),
        )

    def _prompt_keys(
        self, score: Tensor, selection: KeySelection | None, real: Tensor | None
    ) -> Tensor:
        """bool (B, HK, S): the keys of the prompt that the next token may need."""
        seqlen = score.shape[2]
        if not self.evict or seqlen == 0:
            everything = torch.ones_like(score, dtype=torch.bool)
            return everything if real is None else everything & real[:, None]
        if selection is None:
            selection = select_keys(score, self.window_size, False, attn_mask=real)
        return (selection.end >= seqlen).expand(score.shape)

    def _real_tokens(
        self, lengths: Tensor | None, attn_mask: Tensor | None, seqlen: int
    ) -> Tensor | None:
        """bool (B, S), or None when all are."""
        batch = len(self.seen)
        if attn_mask is not None:
            if lengths is not None:
                raise ValueError("lengths: got a value beside attn_mask, wanted one of them")
            self._check("attn_mask", attn_mask, (batch, seqlen), torch.bool)
            return attn_mask
        if lengths is None:
            return None
        check_tensor("lengths", lengths, "a torch.Tensor or None")
        check_tensor_dtype("lengths", lengths, (torch.int32, torch.int64))
        self._check("lengths", lengths, (batch,), lengths.dtype)
        if _can_be_read(lengths):
            wrong = lengths[(lengths < 0) | (lengths > seqlen)]
            if wrong.numel() > 0:
                raise ValueError(f"lengths: got {int(wrong[0])}, wanted 0 to {seqlen}")
        return torch.arange(seqlen, device=lengths.device) < lengths[:, None]

    def _step_over_all(
        self, query: Tensor, new: CacheTokens, scale: float, softcap: float
    ) -> Tensor:
        """Append to a cache that keeps everything; each token attends to its best keys."""
        capturing = query.is_cuda and torch.cuda.is_current_stream_capturing()
        self._captured |= capturing
        if not capturing:
            self._check_room(new)
        before, done, outs = (self._most_seen, self._is_empty), 0, []
        try:
            for t in range(query.shape[1]):
                self._put_last(new, t)
                done += 1
                self._is_empty = False
                outs.append(self._attend_to_best(query[:, t : t + 1], scale, softcap))
        except BaseException:
            self._take_back(new, done)
            self._most_seen, self._is_empty = before
            raise
        return torch.cat(outs, dim=1) if len(outs) > 1 else outs[0]

    def _put_last(self, new: CacheTokens, t: int) -> None:
        """Token t behind those that its sequence has."""
        now = slice(t, t + 1)
        active = None if new.active is None else new.active[:, now]
        token = CacheTokens(new.k[:, now], new.v[:, now], new.score[:, :, now].detach(), active)
        if is_plain_call(*token):
            append = cuda.append_to_cache if token.k.is_cuda else cpu.append_to_cache
            append(token, self._tensors(), False)
        else:
            torch.ops.dmattn.cache_append(*token, *self._tensors(), False)
        self._most_seen += 1

    def _attend_to_best(self, query: Tensor, scale: float, softcap: float) -> Tensor:
        """Attention of one token per sequence, (B, 1, H, D), to the best keys of all held ones."""
        length = self.capacity if self._captured else min(self.capacity, self._most_seen)
        k, v, score = self.k[:, :length], self.v[:, :length], self.score[:, :, :length]
        selection = None
        if length > self.window_size:
            selection = select_keys(score, self.window_size, False, query_len=1)
        out: Tensor = flash_dmattn_func(
            query,
            k,
            v,
            attn_bias=score[:, :, None],
            softmax_scale=scale,
            softcap=softcap,
            selection=selection,
        )
        return out

    def _take_back(self, new: CacheTokens, count: int) -> None:
        """Undo `_put_last` for the first `count` tokens."""
        if count == 0:
            return
        put = count if new.active is None else new.active[:, :count].sum(1, dtype=torch.int32)
        self.seen.sub_(put)
        gone = torch.arange(self.capacity, device=self.seen.device) >= self.seen[:, None]
        for rows in (self.k, self.v):
            rows.masked_fill_(gone[:, :, None, None], 0.0)
        self.score.masked_fill_(gone[:, None], -math.inf)
        self.position.masked_fill_(gone[:, None], -1)

    def _check_step(
        self, query: Tensor, key: Tensor, value: Tensor, score: Tensor, active: Tensor | None
    ) -> int:
        """The number of tokens; raises for tensors that do not fit."""
        batch, _, nheads_k, head_dim = self.k.shape
        tokens, nheads = _size(query, 1), _size(query, 2)
        self._check("query", query, (batch, tokens, nheads, head_dim), self.k.dtype)
        self._check("key", key, (batch, tokens, nheads_k, head_dim), self.k.dtype)
        self._check("value", value, (batch, tokens, nheads_k, head_dim), self.k.dtype)
        self._check("score", score, (batch, nheads_k, tokens), self.score.dtype)
        if query.is_cuda:
            check_last_stride(query, key, value)
        if nheads < 1 or nheads % nheads_k:
            raise ValueError(f"query: got {nheads} heads, wanted a multiple of {nheads_k}")
        active = check_optional_tensor("active", active)
        if active is not None:
            shape = (batch,) if active.dim() == 1 else (batch, tokens)
            self._check("active", active, shape, torch.bool)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, score)):
            raise RuntimeError(
                "DynamicMaskCache: got tensors that require gradients, wanted "
                "torch.no_grad(): decoding has none"
            )
        return tokens

    def _check_room(self, new: CacheTokens) -> None:
        """Raise if a sequence would have more tokens than a cache without eviction can hold."""
        tokens = new.k.shape[1]
        if not self._captured and self._most_seen + tokens <= self.capacity:
            return
        # The host counts padding and inactive tokens as well: the device knows better.
        more = torch.full_like(self.seen, tokens) if new.active is None else new.active.sum(1)
        counts = torch.stack([self.seen.to(more.dtype), more])
        held, coming = max(zip(*counts.tolist(), strict=True), key=sum, default=(0, 0))
        if held + coming > self.capacity:
            raise self._no_room(coming, held)
        self._most_seen = max(counts[0].tolist(), default=0)

    def _check_prompt_room(self, seqlen: int, real: Tensor | None) -> int:
        """At least the number of tokens of the longest prompt; raises if they do not fit."""
        if self.evict or seqlen <= self.capacity:
            return seqlen
        most = seqlen if real is None else max(real.sum(1).tolist(), default=0)
        if most > self.capacity:
            raise self._no_room(most, 0)
        return most

    def _no_room(self, tokens: int, held: int) -> ValueError:
        return ValueError(
            f"key: got {tokens} tokens after {held}, wanted at most the cache's capacity of "
            f"{self.capacity} in all"
        )

    def _check_selection(self, selection: Any, seqlen: int) -> None:
        if not isinstance(selection, KeySelection):
            raise TypeError(
                f"selection: got {describe(selection)}, wanted a dmattn.KeySelection or None"
            )
        batch, nheads_k, _ = self.score.shape
        shape = selection.end.shape
        fits = is_one_or(shape[0], batch) and is_one_or(shape[1], nheads_k) and shape[2] == seqlen
        if not fits or selection.window_size != self.window_size:
            raise ValueError(
                f"selection: got window_size {selection.window_size} and end of shape "
                f"{tuple(shape)}, wanted window_size {self.window_size} and "
                f"({batch}, {nheads_k}, {seqlen})"
            )
        check_same_device("selection", selection.end, self.k.device, "the cache")

    def _check_indices(self, name: str, given: Any) -> Tensor:
        """Places in the batch, int (N,), of which none leads outside."""
        index = check_tensor(name, given)
        check_tensor_dtype(name, index, (torch.int64, torch.int32))
        check_same_device(name, index, self.k.device, "the cache")
        batch = len(self.seen)
        if index.dim() != 1 or (batch == 0 and len(index) > 0):
            wanted = "(N,)" if batch > 0 else "(0,)"
            raise ValueError(f"{name}: got shape {tuple(index.shape)}, wanted {wanted}")
        if _can_be_read(index):
            wrong = index[(index < 0) | (index >= batch)]
            if wrong.numel() > 0:
                raise ValueError(f"{name}: got {int(wrong[0])}, wanted 0 to {batch - 1}")
            return index
        return index.clamp(0, max(0, batch - 1))

    def _check(self, name: str, t: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raise for a tensor that does not fit; quick for one that does, as each step calls it."""
        if (
            isinstance(t, Tensor)
            and t.layout is torch.strided
            and not t.is_nested
            and t.dtype == dtype
            and t.shape == shape
            and t.device == self.k.device
        ):
            return
        check_tensor(name, t)
        check_tensor_dtype(name, t, (dtype,), self._autocast_hint(t, dtype))
        check_shape(name, t, shape)
        check_same_device(name, t, self.k.device, "the cache")

    def _autocast_hint(self, t: Tensor, dtype: torch.dtype) -> str:
        """What may be behind keys of another dtype than the cache's."""
        if dtype != self.k.dtype or t.device.type not in ("cuda", "cpu"):
            return ""
        if torch.is_autocast_enabled(t.device.type):
            return ", the dtype of the cache; under torch.autocast, make the cache under it as well"
        if dtype in _HALF and t.dtype == torch.float32:
            return ", the dtype of the cache; one made under torch.autocast serves calls under it"
        return ", the dtype of the cache"


def _size(t: Any, dim: int) -> int:
    """Of a (B, tokens, heads, D) tensor; the checks to come name whatever else it is."""
    return t.shape[dim] if isinstance(t, Tensor) and not t.is_nested and t.dim() == 4 else 1


def _can_be_read(t: Tensor) -> bool:
    """Whether the host can look at the values without waiting for a device."""
    return t.is_cpu and not torch.compiler.is_compiling()


def _check_device(device: Any) -> torch.device:
    wanted = "a torch.device or its name, of cuda or the CPU"
    try:
        found = torch.device(device)
    except (TypeError, RuntimeError):
        raise TypeError(f"device: got {describe(device)}, wanted {wanted}") from None
    if found.type not in _DTYPES:
        raise ValueError(f"device: got {device}, wanted {wanted}")
    return found


def _check_head_dim(head_dim: Any, device: torch.device) -> int:
    head_dim = check_int("head_dim", head_dim, 1)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim: got {head_dim}, wanted 1 to {MAX_HEAD_DIM}")
    if device.type == "cuda" and head_dim % HEAD_DIM_MULTIPLE:
        raise ValueError(f"head_dim: got {head_dim}, wanted a multiple of 8 on CUDA")
    return int(head_dim)


def _check_entry_dtype(dtype: Any, device: torch.device) -> torch.dtype:
    if check_dtype("dtype", dtype) not in _DTYPES[device.type]:
        where = "CUDA" if device.type == "cuda" else "the CPU"
        raise TypeError(f"dtype: got {dtype}, wanted {one_of(_DTYPES[device.type])} on {where}")
    return dtype  # type: ignore[no-any-return]  # just checked


# The state of a cache is tensors and numbers: torch.load may take it with weights_only=True.
torch.serialization.add_safe_globals([DynamicMaskCache])
