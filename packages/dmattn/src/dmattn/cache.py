"""Decoding from the keys that are still kept.

Under running top-w selection a key that has left never returns, so a cache of `window_size` entries
per key/value head is exact, whatever the length of the context. Letters: B batch, T new tokens, S
tokens of the prompt, H query heads, HK key/value heads, D head dimension.
"""

import math
from typing import Any

import torch
from torch import Tensor

import dmattn.ops.cache  # noqa: F401 - registers the operator
from dmattn.ops.selection import select_keys
from dmattn.checks import HEAD_DIM_MULTIPLE, check_last_stride
from dmattn.selection import KeySelection
from dmattn.utils.mask import check_window_size


class DynamicMaskCache:
    """Keys, values and scores of one attention layer, from which it decodes.

    With `evict` the cache holds the `window_size` best keys of each key/value head, and decoding
    equals that over the full context. Without, it holds everything up to `capacity` and each step
    selects its `window_size` best keys anew. Of equal scores the later key is kept; a key of score
    NaN or -inf is not attended to. All state is on the device and changes in place, so that a CUDA
    graph can capture a step. Inference only: no gradients.

    Attributes:
        k, v: (B, entries, HK, D); entries = window_size, or capacity without evict.
        score: (B, HK, entries), -inf where there is no key.
        position: int32 (B, HK, entries), the key's place in its sequence, -1 where there is none.
        seen: int32 (B,), tokens so far.

    Args:
        batch, nheads_k, head_dim: B, HK and D; on CUDA D must be a multiple of 8.
        window_size: keys that a query attends to, at least 1.
        dtype: of keys and values.
        device: of all tensors.
        score_dtype: float32 or `dtype`.
        evict: whether to drop the keys that are out of the window for good.
        capacity: without evict, the most tokens per sequence.

    Raises:
        TypeError: a number or dtype is of the wrong kind.
        ValueError: a number is too small, or capacity does not go with evict.
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
        check_window_size(window_size)
        sizes: tuple[tuple[str, Any, int], ...]
        sizes = (("batch", batch, 0), ("nheads_k", nheads_k, 1), ("head_dim", head_dim, 1))
        for name, value, least in sizes:
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: got {value!r}, wanted an int of at least {least}")
        if evict != (capacity is None):
            wanted = "None, as the window is all it holds" if evict else "an int, with evict=False"
            raise ValueError(f"capacity: got {capacity}, wanted {wanted}")
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity: got {capacity}, wanted at least 1")
        if not dtype.is_floating_point:
            raise TypeError(f"dtype: got {dtype}, wanted a floating dtype")
        if score_dtype not in (torch.float32, dtype):
            raise TypeError(f"score_dtype: got {score_dtype}, wanted torch.float32 or {dtype}")
        if torch.device(device).type == "cuda" and head_dim % HEAD_DIM_MULTIPLE:
            raise ValueError(f"head_dim: got {head_dim}, wanted a multiple of 8 on CUDA")
        self.window_size = window_size
        self.evict = evict
        entries = window_size if capacity is None else capacity
        self.k = torch.zeros(batch, entries, nheads_k, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        shape = (batch, nheads_k, entries)
        self.score = torch.full(shape, -math.inf, dtype=score_dtype, device=device)
        self.position = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.seen = torch.zeros(batch, dtype=torch.int32, device=device)
        self._host_count = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been put in since it was made or reset. Does not ask the device."""
        return self._host_count == 0

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
        """Put a prompt in, in place of whatever the cache held. The host does not wait.

        Args:
            key, value: (B, S, HK, D) in the dtype of the cache.
            score: (B, HK, S) in the score dtype of the cache.
            selection: the one by which the prompt was attended to, to save making it again: of the
                same scores, window size, and padding.
            lengths: int (B,), where the prompts are shorter and padded at their end.
            attn_mask: bool (B, S), False at padding, wherever that is; instead of lengths.

        Raises:
            TypeError, ValueError: something does not fit the cache, which is then unchanged.
        """
        batch, entries, nheads_k, head_dim = self.k.shape
        seqlen = _size(key, 1)
        self._check("key", key, (batch, seqlen, nheads_k, head_dim), self.k.dtype)
        self._check("value", value, (batch, seqlen, nheads_k, head_dim), self.k.dtype)
        self._check("score", score, (batch, nheads_k, seqlen), self.score.dtype)
        self._check_room(seqlen, 0)
        keep = self._real_tokens(lengths, attn_mask, seqlen)
        if keep is None:
            places = torch.arange(seqlen, dtype=torch.int32, device=key.device).expand(batch, -1)
        else:
            places = keep.cumsum(1, dtype=torch.int32) - 1
        kept = self._prompt_keys(score.detach(), selection, keep)

        room = min(entries, seqlen)
        slot = (kept.cumsum(-1) - 1).masked_fill(~kept, room)
        index = slot.new_zeros((batch, nheads_k, room + 1))
        index.scatter_(-1, slot, torch.arange(seqlen, device=key.device).expand(slot.shape))
        index = index[..., :room]
        used = torch.arange(room, device=key.device) < kept.sum(-1, keepdim=True)
        self.reset()
        if room > 0:
            for entry, given in ((self.k, key), (self.v, value)):
                rows = given.detach().take_along_dim(index.mT[..., None], 1)
                entry[:, :room] = rows.masked_fill(~used.mT[..., None], 0.0)
            chosen = score.detach().gather(-1, index)
            self.score[..., :room] = chosen.masked_fill(~(used & (chosen > -math.inf)), -math.inf)
            where = places[:, None].expand(-1, nheads_k, -1).gather(-1, index)
            self.position[..., :room] = where.masked_fill(~used, -1)
        self.seen.copy_(keep.sum(1) if keep is not None else torch.full_like(self.seen, seqlen))
        self._host_count = seqlen

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
        """Put one or a few tokens in, one after the other, and let each attend to what is kept.

        Args:
            query: (B, T, H, D) in the dtype of the cache, with H a multiple of HK.
            key, value: (B, T, HK, D) in the dtype of the cache.
            score: (B, HK, T) in the score dtype of the cache.
            softmax_scale: D ** -0.5 when None.
            softcap: as in `flash_dmattn_func`.
            active: bool (B,) or (B, T), False for tokens that are none, in batches of unequal
                progress. They are not put in, and their output is finite and meaningless.

        Returns:
            out (B, T, H, D).

        Raises:
            TypeError, ValueError: something does not fit the cache, which is then unchanged; among
                others, more tokens than a cache that evicts nothing has room for.
            RuntimeError: a gradient would be needed.
        """
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
        if active is not None:
            if active.dim() == 1:
                active = active[:, None].expand(-1, tokens)
            self._check("active", active, (batch, tokens), torch.bool)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, score)):
            raise RuntimeError(
                "DynamicMaskCache: got tensors that require gradients, wanted "
                "torch.no_grad(): decoding has none"
            )
        self._check_room(tokens, self._host_count)
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        if not self.evict:
            return self._step_over_all(query, key, value, score, scale, softcap, active)
        self._host_count += tokens
        out: Tensor = torch.ops.dmattn.cache_append_and_attend(
            query,
            key,
            value,
            score,
            active,
            *self._tensors(),
            scale,
            softcap,
        )
        return out

    def reorder(self, beam_idx: Tensor) -> None:
        """Make entry i of the batch a copy of what entry beam_idx[i] was, int64 or int32 (B,)."""
        if beam_idx.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"beam_idx: got dtype {beam_idx.dtype}, wanted torch.int64 or int32")
        self._check("beam_idx", beam_idx, (len(self.seen),), beam_idx.dtype)
        for t in self._tensors():
            t.copy_(t.index_select(0, beam_idx))

    def reset(self) -> None:
        """Forget everything."""
        self.k.zero_()
        self.v.zero_()
        self.score.fill_(-math.inf)
        self.position.fill_(-1)
        self.seen.zero_()
        self._host_count = 0

    def clone(self) -> "DynamicMaskCache":
        """A cache of its own with the same content."""
        other = object.__new__(DynamicMaskCache)
        other.window_size, other.evict = self.window_size, self.evict
        other._host_count = self._host_count
        other.k, other.v, other.score, other.position, other.seen = (
            t.clone() for t in self._tensors()
        )
        return other

    def __repr__(self) -> str:
        batch, entries, nheads_k, head_dim = self.k.shape
        return (
            f"DynamicMaskCache(batch={batch}, window_size={self.window_size}, entries={entries}, "
            f"nheads_k={nheads_k}, head_dim={head_dim}, dtype={self.k.dtype}, "
            f"device={self.k.device}, evict={self.evict})"
        )

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.k, self.v, self.score, self.position, self.seen

    def _prompt_keys(
        self, score: Tensor, selection: KeySelection | None, real: Tensor | None
    ) -> Tensor:
        """bool (B, HK, S): the keys of the prompt that the next token may need."""
        batch, nheads_k, seqlen = score.shape
        if not self.evict or seqlen == 0:
            everything = torch.ones_like(score, dtype=torch.bool)
            return everything if real is None else everything & real[:, None]
        if selection is None:
            key_mask = None if real is None else real[:, None]
            end = select_keys(score, key_mask, self.window_size, 1, False).end
        else:
            end = selection.end
            fits = end.shape[0] in (1, batch) and end.shape[1] in (1, nheads_k)
            if not fits or end.shape[2] != seqlen or selection.window_size != self.window_size:
                raise ValueError(
                    f"selection: got window_size {selection.window_size} and end of shape "
                    f"{tuple(end.shape)}, wanted window_size {self.window_size} and "
                    f"({batch}, {nheads_k}, {seqlen})"
                )
            if end.device != score.device:
                raise ValueError(f"selection: got device {end.device}, wanted {score.device}")
        return (end >= seqlen).expand(batch, nheads_k, seqlen)

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
        if lengths.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"lengths: got dtype {lengths.dtype}, wanted torch.int32 or int64")
        self._check("lengths", lengths, (batch,), lengths.dtype)
        return torch.arange(seqlen, device=lengths.device) < lengths[:, None]

    def _step_over_all(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score: Tensor,
        scale: float,
        softcap: float,
        active: Tensor | None,
    ) -> Tensor:
        """Append to a cache that keeps everything; each token attends to its best keys."""
        outs = []
        for t in range(query.shape[1]):
            now = slice(t, t + 1)
            torch.ops.dmattn.cache_append(
                key[:, now],
                value[:, now],
                score[:, :, now].detach(),
                None if active is None else active[:, now],
                *self._tensors(),
                False,
            )
            self._host_count += 1
            k, v, scores = self._held()
            lists: tuple[Any, ...] = ()
            if scores.shape[2] > self.window_size:
                lists = tuple(select_keys(scores, None, self.window_size, 1, False))
            out, *_ = torch.ops.dmattn.fwd(
                query[:, now],
                k,
                v,
                None,
                scores[:, :, None],
                scale,
                False,
                softcap,
                False,
                *lists,
            )
            outs.append(out)
        return torch.cat(outs, dim=1) if len(outs) != 1 else outs[0]

    def _held(self) -> tuple[Tensor, Tensor, Tensor]:
        """k, v and score up to the longest sequence; all of them in a CUDA graph."""
        length = self.capacity
        if not (self.k.is_cuda and torch.cuda.is_current_stream_capturing()):
            length = min(length, self._host_count)
        return self.k[:, :length], self.v[:, :length], self.score[:, :, :length]

    def _check_room(self, tokens: int, held: int) -> None:
        if not self.evict and held + tokens > self.capacity:
            raise ValueError(
                f"key: got {tokens} tokens after {held}, wanted at most the cache's capacity of "
                f"{self.capacity} in all"
            )

    def _check(self, name: str, t: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}, wanted a torch.Tensor")
        if t.dtype != dtype:
            raise TypeError(f"{name}: got dtype {t.dtype}, wanted {dtype}")
        if tuple(t.shape) != shape:
            raise ValueError(f"{name}: got shape {tuple(t.shape)}, wanted {shape}")
        if t.device != self.k.device:
            raise ValueError(f"{name}: got device {t.device}, wanted {self.k.device}")


def _size(t: Any, dim: int) -> int:
    """Of a (B, tokens, heads, D) tensor; the checks to come name whatever else it is."""
    return t.shape[dim] if isinstance(t, Tensor) and t.dim() == 4 else 1
