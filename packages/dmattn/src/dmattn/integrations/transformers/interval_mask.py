"""A mask for the rows of one call that is described rather than stored.

transformers makes a mask once per forward and passes it to every layer, through code that expects a
tensor (B, 1, Sq, Sk). `IntervalMask` is such a tensor without storage. The attention function of
this package reads its description, a `VisibleKeys`; every other operation on it gets the dense
mask.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dmattn import KeySelection, packed_documents, sliding_window
from dmattn.integrations.documents import check_bounds_and_longest


class Documents(NamedTuple):
    """The documents of a batch whose sequences are laid one after the other.

    Attributes:
        cu_seqlens: int32 (documents + 1,), rising from 0 to B * Sk.
        max_seqlen: the length of the longest document.
    """

    cu_seqlens: Tensor
    max_seqlen: int


class VisibleKeys:
    """Which keys the rows of a causal call see: a description of O(Sk) numbers for all layers.

    Row i stands at position i + key_len - query_len among the first `key_len` keys; keys behind
    those are the unused end of a static cache. It sees the keys j up to its position that satisfy
    all of the limits that are given:

    * `padding` is True,
    * the key is among the last `window` positions up to that of the row,
    * (position - left_padding) // chunk is the same for key and row, where the position of key j is
      j + first_key,
    * key and row belong to the same document.

    Args:
        batch_size: B.
        query_len: Sq.
        key_len: how many of the keys lie within the sequence, at least Sq.
        padding: bool (B, key_len), False for padding; None for no padding.
        window: None for no limit.
        chunk: the size of a chunk; None for no limit.
        left_padding: integer (B,), only with chunk.
        document_ids: integer (B, key_len), rising from 0 along each sequence, by at most 1 from one
            key to the next; only with query_len = key_len and without chunk.
        documents: instead of document_ids; only without padding.
        first_key: position of the first key, for chunks.
        device: of the tensors.

    Attributes:
        texts: the batch as documents, three for each sequence: the padding before its text, the
            text, and the padding after it. Rows of padding, whose results are meaningless, then see
            other padding. None before `find_texts` is called, and if there is no padding, if a text
            has padding inside, or if there are more keys than rows.
    """

    def __init__(
        self,
        batch_size: int,
        query_len: int,
        key_len: int,
        *,
        padding: Tensor | None = None,
        window: int | None = None,
        chunk: int | None = None,
        left_padding: Tensor | None = None,
        document_ids: Tensor | None = None,
        documents: Documents | None = None,
        first_key: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.batch_size, self.query_len, self.key_len = batch_size, query_len, key_len
        self.padding, self.window, self.document_ids = padding, window, document_ids
        self.chunk, self.left_padding, self.first_key = chunk, left_padding, first_key
        self.device = torch.device(device)
        # These are made when first asked for. (Not by functools.cached_property: torch.compile
        # cannot trace its lock, and a prompt's mask may be made outside of a compiled forward.)
        self._copies: dict[torch.device, VisibleKeys] = {}
        self._within: tuple[Any, VisibleKeys] | None = None
        self._documents = documents
        self.texts: Documents | None = None
        self._selection: KeySelection | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is no limit other than causality."""
        return self.padding is None and not self.needs_selection

    @property
    def needs_selection(self) -> bool:
        """Whether causality and a mask per key are not enough to describe what rows see."""
        limits = (self.window, self.chunk, self.document_ids, self._documents)
        return any(limit is not None for limit in limits)

    @property
    def key_mask(self) -> Tensor | None:
        """bool (B, 1, 1, key_len), True for keys that are no padding; None for no padding."""
        return None if self.padding is None else self.padding[:, None, None]

    @property
    def documents(self) -> Documents | None:
        """The documents; None without any. At the first call the host waits for the device."""
        if self._documents is None and self.document_ids is not None:
            self._documents = _find_documents(self.document_ids)
        return self._documents

    def find_texts(self) -> None:
        """Set `texts`; the host waits for the device.

        That is not done when `texts` is read, since then a CUDA graph may be captured, or torch may
        be compiling.
        """
        if self.padding is not None and self.query_len == self.key_len:
            self.texts = _find_texts(self.padding)

    @property
    def selection(self) -> KeySelection | None:
        """The description as key lists; None if `key_mask` and causality are enough."""
        if self._selection is None and self.needs_selection:
            self._selection = self._select()
        return self._selection

    def within(self, cu_seq_lens: Any, max_length: Any) -> "VisibleKeys":
        """The description with the same window, but for rows that only see their own document.

        For the same boundaries the same object is returned again.

        Args:
            cu_seq_lens: integer (documents + 1,), rising from 0 to key_len.
            max_length: the length of the longest document; None to read it from the boundaries.

        Raises:
            TypeError, ValueError: an argument is wrong. The host checks the values of boundaries on
                the CPU, and others if it has to read the length.
        """
        if self._within is None or self._within[0] is not cu_seq_lens:
            cu_seqlens, longest = check_bounds_and_longest(
                "cu_seq_lens_q", cu_seq_lens, "max_length_q", max_length, self.key_len
            )
            packed = VisibleKeys(
                self.batch_size,
                self.query_len,
                self.key_len,
                window=self.window,
                documents=Documents(cu_seqlens.to(self.device), longest),
                device=self.device,
            )
            self._within = (cu_seq_lens, packed)
        return self._within[1]

    def _select(self) -> KeySelection:
        if self.document_ids is None and self._documents is not None:
            cu_seqlens, max_seqlen = self._documents
            return packed_documents(
                cu_seqlens, self.window, key_len=self.key_len, max_seqlen=max_seqlen
            )
        if self.document_ids is not None:
            # A window limits the length of lists; without one the longest document does.
            longest = None
            if self.window is None and self.documents is not None:
                longest = self.documents.max_seqlen
            return packed_documents(
                document_ids=self.document_ids,
                window_size=self.window,
                attn_mask=self.padding,
                max_seqlen=longest,
            )
        if self.chunk is not None:
            return self._chunks(self.chunk)
        assert self.window is not None
        return sliding_window(
            self.key_len, self.window, self.query_len, attn_mask=self.padding, device=self.device
        )

    def _chunks(self, chunk: int) -> KeySelection:
        key = torch.arange(self.key_len, device=self.device)
        position = key[None] + self.first_key
        if self.left_padding is not None:
            position = position - self.left_padding[:, None]
        end = key + chunk - position % chunk
        if self.window is not None:
            end = torch.minimum(end, key + self.window)
        if self.padding is not None:
            end = torch.where(self.padding, end, 0)
        reach = chunk if self.window is None else min(chunk, self.window)
        return KeySelection.from_intervals(end[:, None], self.query_len, reach=reach)

    def to(self, device: torch.device) -> "VisibleKeys":
        """The same description on another device; for each device one object is made."""
        if device == self.device:
            return self
        if device not in self._copies:

            def moved(t: Tensor | None) -> Tensor | None:
                return None if t is None else t.to(device)

            def moved_bounds(documents: Documents | None) -> Documents | None:
                if documents is None:
                    return None
                return documents._replace(cu_seqlens=documents.cu_seqlens.to(device))

            self._copies[device] = VisibleKeys(
                self.batch_size,
                self.query_len,
                self.key_len,
                padding=moved(self.padding),
                window=self.window,
                chunk=self.chunk,
                left_padding=moved(self.left_padding),
                document_ids=moved(self.document_ids),
                documents=moved_bounds(self._documents),
                first_key=self.first_key,
                device=device,
            )
            self._copies[device].texts = moved_bounds(self.texts)
        return self._copies[device]


def _find_documents(document_ids: Tensor) -> Documents:
    batch_size, seqlen = document_ids.shape
    # Made different between sequences, so that documents end with their sequence.
    row = torch.arange(batch_size, device=document_ids.device)[:, None]
    ids = document_ids + row * (seqlen + 1)
    lengths = torch.unique_consecutive(ids, return_counts=True)[1]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return Documents(cu_seqlens, int(lengths.max()))


def _find_texts(padding: Tensor) -> Documents | None:
    batch_size, seqlen = padding.shape
    first, length = padding.int().argmax(1), padding.sum(1)
    place = torch.arange(seqlen, device=padding.device)
    is_text = (place >= first[:, None]) & (place < (first + length)[:, None])
    if not torch.equal(is_text, padding):
        return None
    row = torch.arange(batch_size, device=padding.device) * seqlen
    bounds = torch.stack([row, row + first, row + first + length], 1).flatten()
    end = bounds.new_tensor([batch_size * seqlen])
    return Documents(torch.cat([bounds, end]).to(torch.int32), seqlen)


class IntervalMask(Tensor):
    """A bool tensor (B, 1, Sq, Sk), True = attend, that has a description instead of storage.

    Views of the whole tensor (`detach`) and copies to another device keep the description. For
    every other operation the dense mask is made, and made again for the next one.

    Attributes:
        visible: the description.
        make_dense: a function that makes the dense mask, bool (B, 1, Sq, Sk).
    """

    visible: VisibleKeys
    make_dense: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls: type["IntervalMask"],
        visible: VisibleKeys,
        kv_length: int,
        make_dense: Callable[[], Tensor],
    ) -> "IntervalMask":
        shape = (visible.batch_size, 1, visible.query_len, kv_length)
        mask: IntervalMask = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=visible.device
        )
        mask.visible, mask.make_dense = visible, make_dense
        return mask

    def to_dense_mask(self) -> Tensor:
        """The mask as an ordinary tensor."""
        return self.make_dense().to(self.device)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"IntervalMask(shape={tuple(self.shape)}, device={str(self.device)!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WHOLE:
            return args[0]._described(args[0].device)
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
            return args[0]._described(kwargs.get("device") or args[0].device)
        _refuse_change(func, args, kwargs)
        args, kwargs = tree_map_only(cls, cls.to_dense_mask, (args, kwargs))
        if func in _VIEWS_BY_STRIDES:
            args = (args[0].contiguous(), *args[1:])  # as an IntervalMask claims to be
        return func(*args, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _no_storage("an assignment")  # it would be made in a dense copy, and be lost

    def tolist(self) -> Any:
        return self.to_dense_mask().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.to_dense_mask().numpy(force=force)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.to_dense_mask().__dlpack__(*args, **kwargs)  # which needs a memory address

    def share_memory_(self) -> "IntervalMask":
        raise _no_storage("share_memory_")

    def __reduce_ex__(self, protocol: Any) -> Any:
        sent: Any = self.to_dense_mask()  # mask functions cannot be pickled
        return sent.__reduce_ex__(protocol)

    def __copy__(self) -> "IntervalMask":
        return self._described(self.device)  # descriptions do not change

    def __deepcopy__(self, memo: dict[int, Any]) -> "IntervalMask":
        return self._described(self.device)

    def _described(self, device: torch.device) -> "IntervalMask":
        visible = self.visible.to(torch.device(device))
        return IntervalMask(visible, self.shape[3], self.make_dense)


_WHOLE = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
# Operations that make views by strides. An IntervalMask claims to be contiguous, but the dense mask
# may be expanded.
_VIEWS_BY_STRIDES = (
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._reshape_alias.default,
)


def _refuse_change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError if the operation writes into a mask: it has no storage to write to."""
    named = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and isinstance(named.get(argument.name), IntervalMask):
            raise _no_storage(func)


def _no_storage(got: Any) -> RuntimeError:
    return RuntimeError(
        f"attention_mask: got {got} on a mask of dmattn, which has no storage, wanted an operation "
        "that makes a new tensor; mask.clone() is an ordinary mask"
    )
