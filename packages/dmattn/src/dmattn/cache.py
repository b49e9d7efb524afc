"""Decoding with a cache of the keys that are still kept.

Under running top-w selection a key that has left never returns, so a cache of `window_size` entries
per key/value head is exact, whatever the length of the context. Letters: B batch, T new tokens, S
tokens of the prompt, H query heads, HK key/value heads, D head dimension.
"""

import math
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dmattn.autocast import without_autocast
from dmattn.backends.cpu import cache as cpu
from dmattn.backends.cuda import cache as cuda
from dmattn.backends.cuda.kernels import serves
from dmattn.cache_blocks import Block
from dmattn.cache_calls import append_tokens, change_cache
from dmattn.cache_checks import (
    check_cache_device,
    check_cache_head_dim,
    check_cache_input,
    check_entry_dtype,
    check_no_gradients,
    check_places,
    check_prompt_room,
    check_prompt_selection,
    check_room,
    check_slots,
    check_step,
    real_tokens,
    size_of,
)
from dmattn.cache_drafts import Draft, Rows, check_spare_rows, with_spare_rows
from dmattn.cache_fill import all_keys, fill_of, last_row_keys
from dmattn.cache_state import (
    CacheTensors,
    CacheTokens,
    outside_of,
    outside_of_inference_mode,
)
from dmattn.dispatch import is_plain_call
from dmattn.functional import flash_dmattn_func
from dmattn.key_state import counting
from dmattn.selection import KeySelection, select_keys
from dmattn.validation import (
    can_be_read,
    check_bool,
    check_dtype,
    check_int,
    check_tensor,
    check_tensor_dtype,
    describe,
    one_of,
)

# Up to this many tokens go through the decode kernel one after the other, in 0.023 ms each for 8
# sequences over 2048 keys on an H200. More tokens attend at once, for which the cache is copied.
# The cases "append of 4", "8" and "16" of the benchmark time both ways.
FEW_TOKENS = 8


class DynamicMaskCache:
    """Keys, values and scores of one attention layer, for decoding.

    With `evict` the cache holds the `window_size` best keys of each key/value head, and decoding
    gives the same as over the full context. Without `evict` it holds all keys, up to `capacity`,
    and each step selects the `window_size` best of them anew. Of equal scores the later key is
    kept; keys with a score of NaN or -inf are not attended to. All state is on the device and
    changes in place, so a CUDA graph can capture a step. (Not on GPUs that the compiled kernels do
    not serve: there the host waits in each step of a cache with `evict`.) Inference only: there are
    no gradients. Calls inside and outside of torch.inference_mode may alternate. Every layer needs
    its own cache.

    The entries of the batch are slots, each with a sequence of its own. Methods that take `slots`,
    int32 or int64 (n,) on the device of the cache, work on these slots and leave the others
    unchanged; the batch of their other arguments is then n. No slot may be named twice. On CUDA the
    values are not checked: out of range they are clamped, and a slot named twice ends up with one
    of the results.

    A cache can be copied (`clone`, copy.deepcopy) and saved with torch.save; torch.load takes it
    with weights_only=True, once dmattn is imported. Only a clone still refuses other layers.

    Attributes:
        k, v: (B, entries, HK, D); entries = window_size, or capacity without evict. With evict they
            are views of larger tensors, which have `spare_rows` more entries per slot, for drafts.
        score: (B, HK, entries), -inf where there is no key.
        position: int32 (B, HK, entries), the key's place in its sequence, -1 where there is none.
        seen: int32 (B,), number of tokens so far.

    Args:
        batch, nheads_k, head_dim: B, HK and D; D at most 256, and on CUDA a multiple of 8.
        window_size: number of keys that a query attends to, at least 1.
        dtype: of keys and values: float16 or bfloat16, on the CPU also float32 or float64.
        device: of all tensors.
        score_dtype: of the scores, float32 or `dtype`.
        evict: whether to drop keys that have left the window, which never return to it.
        capacity: without evict, the most tokens per sequence; padding and inactive tokens take no
            room. With evict None.
        spare_rows: with evict, the most tokens of a draft (see `peek`) for which there is room
            behind the entries of a slot, 0 to 32; 32 when None. 0 saves the memory of these rows; a
            draft that is longer attends to a copy of the cache. Without evict there are none.

    Raises:
        TypeError: a number, flag or dtype is of the wrong kind.
        ValueError: a number or device is not supported, or capacity or spare_rows does not go with
            evict.
    """

    _rows: Rows | None = None  # k and v with their spare rows, once a draft has used them

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
        *,
        spare_rows: int | None = None,
    ) -> None:
        self.window_size = check_int("window_size", window_size, 1)
        batch = check_int("batch", batch, 0)
        nheads_k = check_int("nheads_k", nheads_k, 1)
        device = check_cache_device(device)
        head_dim = check_cache_head_dim(head_dim, device)
        dtype = check_entry_dtype(dtype, device)
        if check_dtype("score_dtype", score_dtype) not in (torch.float32, dtype):
            wanted = one_of(tuple(dict.fromkeys((torch.float32, dtype))))
            raise TypeError(f"score_dtype: got {score_dtype}, wanted {wanted}")
        self.evict = check_bool("evict", evict)
        if self.evict != (capacity is None):
            wanted = "None, as the window is all it holds" if evict else "an int, with evict=False"
            raise ValueError(f"capacity: got {describe(capacity)}, wanted {wanted}")
        entries = self.window_size if capacity is None else check_int("capacity", capacity, 1)
        self._spare_rows = check_spare_rows(spare_rows, self.evict)
        rows = torch.Size((batch, entries, nheads_k, head_dim))
        shape = (batch, nheads_k, entries)
        with outside_of_inference_mode():
            if self.evict:
                self.k, self.v = (
                    with_spare_rows(rows, dtype, device, self._spare_rows) for _ in range(2)
                )
            else:
                self.k, self.v = (torch.zeros(rows, dtype=dtype, device=device) for _ in range(2))
            self.score = torch.full(shape, -math.inf, dtype=score_dtype, device=device)
            self.position = torch.full(shape, -1, dtype=torch.int32, device=device)
            self.seen = torch.zeros(batch, dtype=torch.int32, device=device)
        self._is_empty = True
        # Without evict: an upper bound of the tokens of any sequence, known without waiting for the
        # device. Padding and inactive tokens may be included.
        self._most_seen = 0
        # Whether a CUDA graph was captured. Replays put tokens in without the host, so that from
        # then on it has to ask the device.
        self._captured = False
        # Whether the host knows that keys lie in order of position, behind entries without a key.
        # Replays of a CUDA graph may put them anywhere.
        self._in_order = True
        self._layer: weakref.ref[Any] | None = None
        self._draft: Draft | CacheTokens | None = None  # the draft of the last call of `peek`

    @property
    def is_empty(self) -> bool:
        """Whether nothing was put in since it was made or reset; known without the device."""
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
        slots: Tensor | None = None,
    ) -> None:
        """Put a prompt in, replacing the content of the cache.

        On CUDA the host does not wait, except in one case: without eviction, a padded prompt that
        is longer than the capacity.

        Args:
            key, value: (B, S, HK, D) in the dtype of the cache.
            score: (B, HK, S) in the score dtype of the cache.
            selection: the selection by which the prompt was attended to, to save making it again:
                by the same scores, window size and padding.
            lengths: int32 or int64 (B,), 0 to S, the lengths of prompts that are padded at their
                end. On CUDA values are not checked; those out of range are clamped.
            attn_mask: bool (B, S), False at padding, at any place; instead of lengths.
            slots: which entries of the batch the prompts are for; all, in order, when None.

        Raises:
            TypeError, ValueError: something does not fit the cache, which is then unchanged.
            RuntimeError: a gradient would be needed.
        """
        _, entries, nheads_k, head_dim = self.k.shape
        rows = self._check_slots(slots)
        batch, seqlen = len(self.seen if rows is None else rows), size_of(key, 1)
        self._check("key", key, (batch, seqlen, nheads_k, head_dim), self.k.dtype)
        self._check("value", value, (batch, seqlen, nheads_k, head_dim), self.k.dtype)
        self._check("score", score, (batch, nheads_k, seqlen), self.score.dtype)
        check_no_gradients(key, value, score)
        if selection is not None:
            shape = (batch, nheads_k, seqlen)
            check_prompt_selection(selection, self.window_size, shape, self.k.device)
        real = real_tokens(lengths, attn_mask, (batch, seqlen), self.k)
        if batch == 0:
            return  # no slot is named: all stay unchanged
        most = seqlen if self.evict else check_prompt_room(seqlen, real, entries)
        if self.evict:
            kept = last_row_keys(score, self.window_size, selection, real)
        else:
            kept = all_keys(score, real)
        fill = fill_of(key, value, score, real, kept, entries, self.evict)
        spare = entries - fill.k.shape[1]
        free = (spare, 0) if self.evict else (0, spare)
        seen = self.seen.new_full((batch,), seqlen) if real is None else real.sum(1)
        content = CacheTensors(
            pad(fill.k, (0, 0, 0, 0, *free)),
            pad(fill.v, (0, 0, 0, 0, *free)),
            pad(fill.score, free, value=-math.inf),
            pad(fill.position, free, value=-1),
            seen.to(torch.int32),
        )
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:  # a compiled prompt changes what the host knows in every call
            self._note_capture(key)
        self._write(content, rows)
        if rows is None:
            self._most_seen, self._in_order = most, True
        elif is_compiling:  # the bound before would be a constant of the graph
            self._most_seen = self.capacity
        else:
            self._most_seen = max(self._most_seen, most)
        self._is_empty = seqlen == 0 and (rows is None or self._is_empty)

    def append_and_attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score: Tensor,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        active: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Put the next tokens of each sequence in; each attends to the keys kept up to itself.

        Up to 8 tokens go in one after the other, by the kernel for decoding. More tokens attend at
        once: each keeps its best keys among those held and the new ones up to itself, in time and
        memory that grow with entries + T. So a prompt of any length may be put in by chunks.

        The host does not wait for the device, except without eviction: once the tokens offered so
        far, inactive ones included, exceed the capacity, or a captured or compiled call has put
        tokens in, it reads `seen`.

        Args:
            query: (B, T, H, D) in the dtype of the cache, with H a multiple of HK.
            key, value: (B, T, HK, D) in the dtype of the cache.
            score: (B, HK, T) in the score dtype of the cache.
            softmax_scale: D ** -0.5 when None.
            softcap: as in `flash_dmattn_func`; at least 0.
            active: bool (B,) or (B, T), False for tokens to be skipped, in batches of unequal
                progress. They are not put in, and their output is meaningless, and finite if their
                query is.
            slots: which entries of the batch the tokens are for; all, in order, when None. Up to 8
                tokens for some slots take as long as for all slots.

        Returns:
            out (B, T, H, D), in the dtype of query.

        Raises:
            TypeError, ValueError: something does not fit the cache, which is then unchanged; one
                case is more tokens than there is room for without eviction. In a CUDA graph and in
                compiled code, which cannot raise, tokens that do not fit are left out.
            RuntimeError: a gradient would be needed.
        """
        rows = self._check_slots(slots)
        batch = len(self.seen if rows is None else rows)
        given = (query, key, value, score, softmax_scale, softcap, active)
        new, scale, softcap = check_step(self.k, self.score.dtype, batch, *given)
        if query.shape[0] == 0 or query.shape[1] == 0:
            return query.new_empty(query.shape)
        if query.shape[1] > FEW_TOKENS:
            out = self._attend_at_once(query, new, scale, softcap, rows)
        elif rows is None:
            out = self._attend_in_turn(query, new, scale, softcap)
        else:
            new = new.for_all_slots(len(self.seen), rows)
            spread = query.new_zeros((len(self.seen), *query.shape[1:])).index_copy_(0, rows, query)
            out = self._attend_in_turn(spread, new, scale, softcap).index_select(0, rows)
        self._draft = None
        return out

    def peek(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score: Tensor,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """What `append_and_attend` would return, without putting the tokens in: they are a draft.

        `commit` can put the first of them in, until the cache is changed in another way or `peek`
        is called again. The cache keeps a copy of the draft. A CUDA graph that captures a commit
        has to capture the call of `peek` as well.

        Args, Raises: as `append_and_attend`, but a lack of room is only raised by `commit`.

        Returns:
            out (B, T, H, D), in the dtype of query.
        """
        given = (query, key, value, score, softmax_scale, softcap, None)
        new, scale, softcap = check_step(self.k, self.score.dtype, len(self.seen), *given)
        new = CacheTokens(key.detach(), value.detach(), score.detach(), None)
        self._draft = None
        self._note_capture(query)
        rows = self._room_for(query)
        if rows is not None:
            cache = self._tensors()
            out, self._draft = Draft.attend(query, new, cache, rows, scale, softcap)
            return out
        new = CacheTokens(new.k.clone(), new.v.clone(), new.score.clone(), None)
        if query.shape[0] == 0 or query.shape[1] == 0:
            out = query.new_empty(query.shape)
        else:
            out = self._block(new, None).attend(query, scale, softcap)
        self._draft = new
        return out

    def commit(self, n: Tensor) -> None:
        """Put the first tokens of the draft of the last `peek` in, and forget the others.

        Args:
            n: int32 or int64 (B,), on the device of the cache: how many tokens of each sequence, 0
                to T. On CUDA values are not checked; those out of range are clamped.

        Raises:
            TypeError, ValueError: n is wrong, there is no draft, or, without eviction, there is no
                room for so many tokens; the cache is then unchanged.
        """
        check_tensor_dtype("n", check_tensor("n", n), (torch.int32, torch.int64))
        self._check("n", n, (len(self.seen),), n.dtype)
        draft = self._draft
        if draft is None:
            raise ValueError("n: got a commit without a draft, wanted one after peek")
        tokens = draft.tokens if isinstance(draft, Draft) else draft.k.shape[1]
        if can_be_read(n):
            wrong = n[(n < 0) | (n > tokens)]
            if wrong.numel() > 0:
                raise ValueError(f"n: got {int(wrong[0])}, wanted 0 to {tokens}, the drafted ones")
        capturing = self._note_capture(n)
        if isinstance(draft, Draft):
            draft.commit(n, self._tensors())
        else:
            active = counting(tokens, n.device) < n[:, None]
            if not self.evict and not capturing:
                self._check_room(tokens, active, None)
            new = CacheTokens(draft.k, draft.v, draft.score, active)
            append_tokens(new, self._tensors(), self.evict)
        self._in_order = False
        self._count(tokens)
        if tokens > 0:  # not asked whether it was empty, on which a compiled graph would depend
            self._is_empty = False
        self._draft = None

    def reorder(self, beam_idx: Tensor, slots: Tensor | None = None) -> None:
        """Replace entry i of the batch by a copy of the former entry beam_idx[i], in place.

        Args:
            beam_idx: int64 or int32 (B,), 0 to B - 1. On CUDA values are not checked; those out of
                range are clamped. `batch_select_indices` changes the number of entries.
            slots: replace only these entries, slots[i] by the former entry beam_idx[i]; beam_idx is
                then (n,).

        Raises:
            TypeError, ValueError: an argument is wrong; the cache is then unchanged.
        """
        rows, batch = self._check_slots(slots), len(self.seen)
        index = check_places("beam_idx", beam_idx, batch, self.k.device)
        wanted = batch if rows is None else len(rows)
        if index.shape[0] != wanted:
            raise ValueError(
                f"beam_idx: got shape {tuple(index.shape)}, wanted ({wanted},); "
                "batch_select_indices changes the number of sequences"
            )
        self._write(self._content(index), rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these entries of the batch, in this order; each may occur any number of times.

        The cache then has new tensors, which CUDA graphs captured before do not use.

        Args:
            indices: int64 or int32 (N,), 0 to B - 1, clamped on CUDA as in `reorder`.

        Raises:
            TypeError, ValueError: indices are wrong; the cache is then unchanged.
        """
        index = check_places("indices", indices, len(self.seen), self.k.device)
        self._replace(self._content(index))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each entry of the batch `repeats` times, copies side by side, as for beams.

        The cache then has new tensors, which CUDA graphs captured before do not use.

        Raises:
            TypeError, ValueError: repeats is no int of at least 1.
        """
        repeats = check_int("repeats", repeats, 1)
        self._replace(CacheTensors(*[t.repeat_interleave(repeats, 0) for t in self._tensors()]))

    def reset(self, slots: Tensor | None = None) -> None:
        """Empty the cache, or only these slots.

        Raises:
            TypeError, ValueError: slots are wrong; the cache is then unchanged.
        """
        rows = self._check_slots(slots)
        if rows is not None and len(rows) < len(self.seen):
            for t, empty in zip(self._tensors(), (0.0, 0.0, -math.inf, -1, 0), strict=True):
                t.index_fill_(0, rows, empty)
            self._draft = None
            return
        self.k.zero_()
        self.v.zero_()
        self.score.fill_(-math.inf)
        self.position.fill_(-1)
        self.seen.zero_()
        self._most_seen = 0
        self._is_empty = self._in_order = True
        self._layer = self._draft = None

    def clone(self) -> "DynamicMaskCache":
        """An independent copy of the cache, for the same layer, without its draft."""
        other = object.__new__(DynamicMaskCache)
        other.__dict__.update(self.__getstate__())
        other._layer = self._layer
        other._replace(self._tensors(), copy=True)
        return other

    def __getstate__(self) -> dict[str, Any]:
        # A weak reference cannot be saved, and copy.deepcopy may copy the layer as well. A draft
        # stays with the cache that it was made for.
        return self.__dict__ | {"_layer": None, "_draft": None, "_rows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if torch.is_inference_mode_enabled():
            self._replace(self._tensors(), copy=True)

    def __repr__(self) -> str:
        batch, entries, nheads_k, head_dim = self.k.shape
        return (
            f"DynamicMaskCache(batch={batch}, window_size={self.window_size}, entries={entries}, "
            f"nheads_k={nheads_k}, head_dim={head_dim}, dtype={self.k.dtype}, "
            f"device={self.k.device}, evict={self.evict})"
        )

    def check_layer(self, layer: object) -> None:
        """Raise unless a layer may use the cache: keys of two layers must not be mixed.

        Raises:
            ValueError: another layer has put tokens in since the cache was made or reset.
        """
        other = None if self._layer is None or self._is_empty else self._layer()
        if other is not None and other is not layer:
            raise ValueError(
                "cache: got one that holds the keys of another layer, wanted one for each layer"
            )

    def note_layer(self, layer: object) -> None:
        """Remember for `check_layer` which layer has put tokens in."""
        if self._layer is None or self._layer() is not layer:
            self._layer = weakref.ref(layer)

    def _tensors(self) -> CacheTensors:
        return CacheTensors(self.k, self.v, self.score, self.position, self.seen)

    def _content(self, rows: Tensor) -> CacheTensors:
        """A copy of the content of these entries of the batch."""
        return CacheTensors(*[t.index_select(0, rows) for t in self._tensors()])

    def _replace(self, tensors: CacheTensors, copy: bool = False) -> None:
        """Use other tensors; `copy`: copy them first, since something else uses them."""
        k, v, *others = tensors
        with outside_of_inference_mode():
            copy |= not torch.compiler.is_compiling() and tensors.seen.is_inference()
            if self.evict:
                self.k, self.v = (
                    with_spare_rows(t.shape, t.dtype, t.device, self._spare_rows).copy_(t)
                    for t in (k, v)
                )
            else:
                self.k, self.v = (t.clone() if copy else t for t in (k, v))
            self.score, self.position, self.seen = (t.clone() if copy else t for t in others)
        self._draft = self._rows = None

    def _write(self, content: CacheTensors, rows: Tensor | None) -> None:
        """Write new content to all slots, or to those in rows (n,)."""
        for t, new in zip(self._tensors(), content, strict=True):
            if rows is None:
                t.copy_(new)
            else:
                t.index_copy_(0, rows, new)
        self._draft = None

    def _attend_at_once(
        self, query: Tensor, new: CacheTokens, scale: float, softcap: float, rows: Tensor | None
    ) -> Tensor:
        """Append and attend with many tokens, for all slots or for those in rows (n,)."""
        tokens = query.shape[1]
        capturing = self._note_capture(query)
        if not self.evict:
            if not capturing:
                self._check_room(tokens, new.active, rows)
            if self._captured:
                new = self._within_capacity(new, rows)
        block, keep = self._block(new, rows), None
        if self.evict and rows is None and not torch.compiler.is_compiling():
            keep = block.keeping(self.window_size, self._tensors())
        out = block.attend(query, scale, softcap)
        if not self.evict:
            new = new if rows is None else new.for_all_slots(len(self.seen), rows)
            append_tokens(new, self._tensors(), False)
        elif keep is not None:
            keep()
            self._in_order = True
        else:
            self._write(block.kept(self.window_size), rows)
            if rows is None:
                self._in_order = True
        self._count(tokens)
        self._is_empty = False
        return out

    def _block(self, new: CacheTokens, rows: Tensor | None) -> Block:
        """The new tokens behind the keys that all slots hold, or those in rows (n,)."""
        length = self._held_length()
        held = CacheTensors(
            self.k[:, :length],
            self.v[:, :length],
            self.score[:, :, :length],
            self.position[:, :, :length],
            self.seen,
        )
        if rows is not None:
            held = CacheTensors(*[t.index_select(0, rows) for t in held])
        in_order = not self.evict or (
            # A compiler would make a graph for each of the two cases.
            not torch.compiler.is_compiling() and self._in_order and not self._captured
        )
        return Block.of(held, new, self.window_size, in_order)

    def _room_for(self, query: Tensor) -> Rows | None:
        """The rows of k and v with room for a draft behind the entries.

        None if the draft has to attend as a block, which copies the cache: without eviction, under
        a compiler, and with more tokens than `k` and `v` have spare rows.
        """
        if not self.evict or query.numel() == 0 or torch.compiler.is_compiling():
            return None
        rows = Rows.find(self._tensors(), self._rows)
        self._rows = rows if rows.can_be_kept else None
        return rows if query.shape[1] <= rows.spare else None

    def _within_capacity(self, new: CacheTokens, rows: Tensor | None) -> CacheTokens:
        """The tokens, with those marked inactive for which there is no room."""
        active = new.active
        if active is None:
            active = torch.ones(new.k.shape[:2], dtype=torch.bool, device=new.k.device)
        seen = self.seen if rows is None else self.seen.index_select(0, rows)
        has_room = seen[:, None] + active.cumsum(1) <= self.capacity
        return CacheTokens(new.k, new.v, new.score, active & has_room)

    def _attend_in_turn(
        self, query: Tensor, new: CacheTokens, scale: float, softcap: float
    ) -> Tensor:
        """Append and attend with a few tokens for all slots, one after the other."""
        if not self.evict:
            return self._step_over_all(query, new, scale, softcap)
        self._note_capture(query)
        self._in_order = False
        out: Tensor | None
        if is_plain_call(query, new.k, new.v, new.active, new.score):
            cache = self._tensors()
            if query.shape[1] > 1:
                query, k, v, score = outside_of(cache, query, *new[:3])
                new = CacheTokens(k, v, score, new.active)
            else:  # a single token is read before it is written, but the query is read afterwards
                (query,) = outside_of(cache, query)
            append = cuda.append_to_cache if serves(query) else cpu.append_to_cache
            out = append(new, cache, True, query, scale, softcap)
        else:
            attend = torch.ops.dmattn.cache_append_and_attend
            out = change_cache(attend, (query, *new), self._tensors(), scale, softcap)
        assert out is not None  # as there is a query
        self._is_empty = False
        return out

    def _step_over_all(
        self, query: Tensor, new: CacheTokens, scale: float, softcap: float
    ) -> Tensor:
        """Append to a cache without eviction, each token attending to its best keys."""
        if not self._note_capture(query):
            self._check_room(query.shape[1], new.active, None)
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

    def _note_capture(self, t: Tensor) -> bool:
        """Whether a CUDA graph captures this call; the cache remembers it if so.

        Compiled calls without eviction count as captured: with the host's numbers of tokens in
        their shapes and checks, there would be a graph for each number. With eviction they need not
        know: they assume no order of the entries.
        """
        if torch.compiler.is_compiling():
            capturing = not self.evict
        else:
            capturing = t.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing:
            self._captured = True
        return capturing

    def _count(self, tokens: int) -> None:
        """Note that so many tokens were offered to each sequence, if that will be asked for."""
        if not (self.evict or self._captured):
            self._most_seen += tokens

    def _held_length(self) -> int:
        """How many of the entries may hold keys, as far as the host knows."""
        return (
            self.capacity if self.evict or self._captured else min(self.capacity, self._most_seen)
        )

    def _put_last(self, new: CacheTokens, t: int) -> None:
        """Append token t to its sequence."""
        now = slice(t, t + 1)
        active = None if new.active is None else new.active[:, now]
        token = CacheTokens(new.k[:, now], new.v[:, now], new.score[:, :, now].detach(), active)
        append_tokens(token, self._tensors(), False)
        self._count(1)

    def _attend_to_best(self, query: Tensor, scale: float, softcap: float) -> Tensor:
        """Attention of one token per sequence, (B, 1, H, D), to the best of all keys held."""
        length = self._held_length()
        k, v, score = self.k[:, :length], self.v[:, :length], self.score[:, :, :length]
        selection = None
        if length > self.window_size:
            selection = select_keys(score, self.window_size, False, query_len=1)
        # Autocast would cast the whole cache, and give another dtype than the other paths return.
        with without_autocast(query.device.type):
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

    def _check_room(self, tokens: int, active: Tensor | None, rows: Tensor | None) -> None:
        """Raise if a sequence would have more tokens than a cache without eviction can hold."""
        if not self._captured and self._most_seen + tokens <= self.capacity:
            return
        # The host's bound includes padding and inactive tokens: read the exact numbers.
        self._most_seen = check_room(self.seen, self.capacity, tokens, active, rows)

    def _check_slots(self, slots: Any) -> Tensor | None:
        """slots, checked, as int64 (n,); None for all slots."""
        return None if slots is None else check_slots(slots, len(self.seen), self.k.device)

    def _check(self, name: str, t: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        check_cache_input(name, t, shape, dtype, self.k)


# The state of a cache is tensors and numbers: torch.load may take it with weights_only=True.
torch.serialization.add_safe_globals([DynamicMaskCache])
