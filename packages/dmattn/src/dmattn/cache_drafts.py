"""A draft behind the keys of a cache that evicts: its tokens attend without a copy of the cache.

The keys and values of such a cache have some spare rows behind the entries of each slot, to which a
draft is written. t tokens can only evict the t lowest entries, or one another. So it can be worked
out beforehand which token sees which key, and also what the cache will hold once the first tokens
of the draft are put in.

Letters as in `dmattn.cache_state`; w entries.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn.cache_calls import commit_draft, draft_tokens
from dmattn.cache_state import CacheTensors, CacheTokens
from dmattn.dispatch import nobody_intercepts
from dmattn.validation import check_int

# The largest number of spare rows behind the entries of each slot, and so of tokens of a draft.
SPARE_ROWS = 32


def check_spare_rows(spare_rows: Any, evict: bool) -> int:
    """The argument `spare_rows` of a cache, as an int; by default SPARE_ROWS with `evict`, else 0.

    Raises:
        TypeError: it is neither an int nor None.
        ValueError: it is below 0 or above SPARE_ROWS, or not 0 in a cache that does not evict.
    """
    if spare_rows is None:
        return SPARE_ROWS if evict else 0
    count = check_int("spare_rows", spare_rows, 0)
    if count > SPARE_ROWS:
        raise ValueError(f"spare_rows: got {count}, wanted at most {SPARE_ROWS}")
    if count > 0 and not evict:
        raise ValueError(
            f"spare_rows: got {count}, wanted None or 0 with evict=False: drafts attend to a copy "
            "of such a cache"
        )
    return count


def with_spare_rows(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, spare: int
) -> Tensor:
    """Zeros of a shape (B, entries, HK, D): a view that leaves out `spare` more rows per slot."""
    batch, entries, *row = shape
    rows = torch.zeros((batch, entries + spare, *row), dtype=dtype, device=device)
    return rows[:, :entries]


class Rows(NamedTuple):
    """The keys and values of a cache with their spare rows."""

    of: tuple[Tensor, Tensor]  # the cache's k and v, which k and v here extend
    k: Tensor  # (B, w + spare, HK, D)
    v: Tensor  # as k
    spare: int  # number of spare rows per slot; 0 if `with_spare_rows` did not make the tensors

    @staticmethod
    def find(cache: CacheTensors, known: "Rows | None") -> "Rows":
        """The rows of a cache. `known`: those found last, which are returned if still valid."""
        if known is not None and known.of[0] is cache.k and known.of[1] is cache.v:
            return known
        spare = min(_spare_rows(cache.k), _spare_rows(cache.v))
        size = cache.k.shape[1] + spare
        k, v = (
            t.as_strided((t.shape[0], size, *t.shape[2:]), t.stride()) for t in (cache.k, cache.v)
        )
        return Rows((cache.k, cache.v), k, v, spare)

    @property
    def can_be_kept(self) -> bool:
        """Whether later calls may use them; not under modes, which may substitute tensors."""
        return self.k.is_cuda and nobody_intercepts()

    def behind(self, cache: CacheTensors) -> CacheTensors:
        """The tensors of the cache, with k and v including their spare rows."""
        return cache._replace(k=self.k, v=self.v)


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


class Draft(NamedTuple):
    """Tokens in the spare rows of a cache, and what becomes of each if they are put in."""

    rows: Rows
    tokens: int  # T
    fates: Tensor  # the second result of dmattn::cache_draft, which dmattn::cache_commit takes

    @staticmethod
    def attend(
        query: Tensor,
        new: CacheTokens,
        cache: CacheTensors,
        rows: Rows,
        softmax_scale: float,
        softcap: float,
    ) -> "tuple[Tensor, Draft]":
        """The attention of new tokens, all of them active, (B, T, H, D), and their draft.

        The tokens are written to the spare rows; the entries of the cache stay unchanged.
        """
        out, fates = draft_tokens(query, new, rows.behind(cache), softmax_scale, softcap)
        return out, Draft(rows, new.k.shape[1], fates)

    def commit(self, n: Tensor, cache: CacheTensors) -> None:
        """Put the first n (B,) tokens of each sequence into the cache, unchanged since `attend`."""
        commit_draft(self.fates, n, self.rows.behind(cache))
