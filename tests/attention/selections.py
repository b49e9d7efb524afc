"""Scores to select keys by, and the selections expected of them, by brute force."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import dmattn
from attention.targets import target_device

KINDS = ("random", "constant", "rising", "falling", "tied", "minus_inf", "nan", "inf", "zeros")


def make_scores(kind: str, *shape: int) -> Tensor:
    generator = torch.Generator(target_device()).manual_seed(len(kind) + shape[-1])
    scores = torch.randn(shape, generator=generator, device=target_device())
    chance = torch.rand(shape, generator=generator, device=target_device())
    if kind == "constant":
        return torch.zeros_like(scores)
    if kind in ("rising", "falling"):
        return scores.sort(-1, descending=kind == "falling").values
    if kind == "tied":
        return torch.round(scores)
    if kind == "zeros":
        return torch.where(chance < 0.5, 0.0, -0.0)  # equal, so the later one wins
    fill = {"minus_inf": -math.inf, "nan": math.nan, "inf": math.inf}.get(kind)
    return scores if fill is None else scores.masked_fill(chance < 0.3, fill)


def brute_force(
    scores: Tensor, window: int, seqlen_q: int, causal: bool, key_mask: Tensor | None = None
) -> Tensor:
    """scores (B, heads, Sk) -> bool (B, heads, Sq, Sk): all keys, all rows.

    key_mask: bool ({B|1}, heads, Sk), either count of heads dividing the other.
    """
    if key_mask is not None:
        heads = max(scores.shape[1], key_mask.shape[1])
        scores = scores.repeat_interleave(heads // scores.shape[1], 1)
        key_mask = key_mask.repeat_interleave(heads // key_mask.shape[1], 1)
    seqlen_k = scores.shape[2]
    scores = scores.double()
    allowed = scores > -math.inf
    if key_mask is not None:
        allowed = allowed & key_mask
    key = torch.arange(seqlen_k, device=scores.device)
    other, own = scores[:, :, None, :], scores[:, :, :, None]
    better = (other > own) | ((other == own) & (key > key[:, None]))
    better = (better & allowed[:, :, None, :]).float()
    seen = torch.ones(seqlen_q, seqlen_k, device=scores.device)
    if causal:
        seen = seen.tril(seqlen_k - seqlen_q)
    rank = (better @ seen.T).mT
    return (rank < window) & allowed[:, :, None] & seen.bool()


def assert_lists(selection: dmattn.KeySelection, keep: Tensor) -> None:
    """Assert that a block's list has each key that any of its rows keeps once, full keys first."""
    blocks, capacity = selection.idx.shape[2:]
    slot = torch.arange(capacity, device=keep.device)
    for block in range(blocks):
        rows = keep[:, :, block * 128 : (block + 1) * 128] if selection.is_causal else keep
        idx = selection.idx[:, :, block].long()
        listed = slot < selection.count[:, :, block, None]
        times = torch.zeros(rows[:, :, 0].shape, dtype=torch.int32, device=keep.device)
        times.scatter_add_(2, idx, listed.int())
        assert torch.equal(times, rows.any(2).int())
        if selection.is_causal:
            leading = slot < selection.full[:, :, block, None]
            times.zero_().scatter_add_(2, idx, (listed & leading).int())
            assert torch.equal(times, rows.all(2).int())


def sorted_lists(selection: dmattn.KeySelection) -> Tensor:
    """The lists in a fixed order: full keys ascending; then, as large numbers, the others."""
    slot = torch.arange(selection.idx.shape[-1], device=selection.idx.device)
    partial = (slot >= selection.full[..., None]).long() << 40
    keys = selection.idx + partial
    return keys.masked_fill(slot >= selection.count[..., None], 1 << 50).sort(-1).values
