"""Scores to select keys by, and the selections expected of them, by brute force."""

import math

import torch
from torch import Tensor

from dmattn import KeySelection
from dmattn.key_lists import BLOCK_ROWS

KINDS = ("random", "constant", "rising", "falling", "tied", "minus_inf", "nan", "inf")


def make_scores(kind: str, batch: int, heads: int, key_len: int) -> Tensor:
    scores = torch.randn(batch, heads, key_len)
    match kind:
        case "constant":
            return torch.zeros_like(scores)
        case "rising":
            return scores.sort(-1).values
        case "falling":
            return scores.sort(-1, descending=True).values
        case "tied":
            return torch.round(scores)
        case "minus_inf":
            return scores.masked_fill(torch.rand(scores.shape) < 0.4, -math.inf)
        case "nan":
            return scores.masked_fill(torch.rand(scores.shape) < 0.4, math.nan)
        case "inf":
            return scores.masked_fill(torch.rand(scores.shape) < 0.1, math.inf)
    return scores


def brute_force(
    scores: Tensor, window: int, query_len: int, is_causal: bool, key_mask: Tensor | None = None
) -> Tensor:
    """scores (B, H, Sk) -> bool (B, H, Sq, Sk), by counting the better keys of each key."""
    key_len = scores.shape[2]
    allowed = scores > -math.inf
    if key_mask is not None:
        allowed = allowed & key_mask
    key = torch.arange(key_len)
    other, own = scores[:, :, None, :], scores[:, :, :, None]  # [j, i]
    better = (other > own) | ((other == own) & (key > key[:, None]))
    better = (better & allowed[:, :, None, :]).float()
    seen = torch.ones(query_len, key_len)
    if is_causal:
        seen = seen.tril(key_len - query_len)
    rank = (better @ seen.T).transpose(-1, -2)  # [row, j]: better keys that the row sees
    return (rank < window) & allowed[:, :, None] & seen.bool()


def check_lists(selection: KeySelection, keep: Tensor) -> None:
    """Check the list of each block: the keys that any row keeps, full keys first; zeros behind."""
    assert selection.idx.shape[3] % BLOCK_ROWS == 0
    for b in range(keep.shape[0]):
        for h in range(keep.shape[1]):
            for block in range(selection.idx.shape[2]):
                rows = keep[b, h]
                if selection.is_causal:
                    rows = rows[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS]
                count = int(selection.count[b, h, block])
                listed = selection.idx[b, h, block, :count].tolist()
                assert sorted(listed) == rows.any(0).nonzero().flatten().tolist()
                assert not selection.idx[b, h, block, count:].any()
                if selection.is_causal:
                    full = listed[: int(selection.full[b, h, block])]
                    assert full == rows.all(0).nonzero().flatten().tolist()
