"""Boolean masks that keep the keys with the highest bias.

`create_mask` and its relatives choose among all keys, alike for every query row. `top_window_mask`
also knows the causal rule, under which each row chooses among the keys up to its own position.
"""

import math
from typing import Any

import torch
from torch import Tensor

# Elements of the comparison table that a step of the running selection holds at once.
_TABLE_ELEMENTS = 1 << 24


def create_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    batch_size: int,
    query_len: int,
    key_len: int,
    window_size: int,
    min_dtype: float | None = None,
    block_size: int | None = None,
    type: str = "topk",
) -> Tensor:
    """Choose keys by their bias.

    Args:
        attention_bias: floating ({B|1}, {H|HK|1}, {Sq|1}, Sk), or (B, H|HK, Sk). Not changed, and
            no gradient flows through the choice.
        attention_mask: bool, True where a key may be chosen, or None for all of them. Either of a
            shape that broadcasts to the bias's, or (B, Sk), or (B, Sq), which speaks of the last
            Sq keys and allows those before them. Beside a bias without query rows, a mask with
            query rows allows a key that any row allows; the result cannot say more, so such a mask
            has to be applied to the attention as well.
        batch_size, query_len, key_len: B, Sq and Sk.
        window_size: how many keys "topk" keeps for each row of the bias; all when Sk is smaller.
            "relu" does not read it.
        min_dtype: a bias at or below this value counts as masked. None: only -inf does, which no
            conversion to a narrower dtype can produce from a finite bias.
        block_size: after choosing, decide each run of this many keys as a whole, by its majority:
            kept if more than half of its keys were chosen, dropped otherwise (the last run may be
            shorter). A masked key stays dropped. None or 1: no such step.
        type: "topk" keeps the `window_size` highest biases (which of two equal ones is not
            specified), "relu" the biases above zero.

    Returns:
        A new bool tensor of the bias's own shape, True where a key is kept.

    Raises:
        TypeError: the bias is not floating, the mask is not bool, or window_size is not an int.
        ValueError: a shape does not fit, window_size or block_size is below 1, or type is unknown.
    """
    if type not in ("topk", "relu"):
        raise ValueError(f"type: got {type!r}, wanted 'topk' or 'relu'")
    _check_bias(attention_bias, key_len)
    allowed = _normalize_mask(attention_mask, attention_bias, batch_size, query_len, key_len)
    if type == "topk":
        return dynamic_mask(attention_bias, allowed, window_size, min_dtype, block_size)
    keep = attention_bias.detach() > max(0.0, _floor(min_dtype))
    if allowed is not None:
        keep &= allowed
    return _decide_blocks(keep, allowed, block_size)


def maybe_create_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    batch_size: int,
    query_len: int,
    key_len: int,
    window_size: int | None,
    min_dtype: float | None = None,
) -> Tensor | None:
    """`create_mask` by "topk" where there is something to choose.

    Args:
        attention_bias, attention_mask, batch_size, query_len, key_len, min_dtype: as `create_mask`.
        window_size: how many keys to keep for each row of the bias, or None for all.

    Returns:
        `attention_mask` itself when `window_size` is None or at least `key_len`; otherwise a new
        bool tensor of the bias's own shape.

    Raises:
        TypeError, ValueError: as `create_mask`.
    """
    if window_size is None:
        return attention_mask
    check_window_size(window_size)
    _check_floating(attention_bias)
    if key_len <= window_size:
        return attention_mask
    return create_mask(
        attention_bias, attention_mask, batch_size, query_len, key_len, window_size, min_dtype
    )


def dynamic_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    window_size: int,
    min_dtype: float | None = None,
    block_size: int | None = None,
) -> Tensor:
    """Keep the `window_size` highest biases of each row among the keys that the mask allows.

    Args:
        attention_bias: floating (..., Sk). Not changed, and no gradient flows through the choice.
        attention_mask: bool of a shape that broadcasts to the bias's, or None.
        window_size, min_dtype, block_size: as `create_mask`.

    Returns:
        A new bool tensor of the bias's own shape, True where a key is kept.

    Raises:
        TypeError: the bias is not floating, the mask is not bool, or window_size is not an int.
        ValueError: the mask does not broadcast to the bias; window_size or block_size is below 1.
    """
    check_window_size(window_size)
    _check_floating(attention_bias)
    bias = attention_bias.detach()
    if attention_mask is not None:
        _check_mask_dtype(attention_mask)
        _check_broadcast(attention_mask, bias)
        bias = bias.masked_fill(~attention_mask, -math.inf)
    values, indices = bias.topk(min(window_size, bias.shape[-1]), dim=-1, sorted=False)
    keep = torch.zeros(bias.shape, dtype=torch.bool, device=bias.device)
    keep.scatter_(-1, indices, values > _floor(min_dtype))
    return _decide_blocks(keep, attention_mask, block_size)


def check_window_size(window_size: Any) -> None:
    """Raise TypeError unless `window_size` is an int, and ValueError unless it is at least 1."""
    if not isinstance(window_size, (int, torch.SymInt)) or isinstance(window_size, bool):
        kind = window_size.__class__.__name__
        raise TypeError(f"window_size: got {window_size!r} ({kind}), wanted an int or None")
    if window_size < 1:
        raise ValueError(f"window_size: got {window_size}, wanted at least 1, or None")


def top_window_mask(
    scores: Tensor,
    window_size: int,
    query_len: int,
    is_causal: bool,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """The keys that each query row keeps under `window_size`, as a dense mask.

    Row i chooses the `window_size` highest-scored among the keys that it may see: those that the
    mask allows and, when causal, those up to position i + Sk - Sq. Of equal scores the later key is
    kept, so a constant score gives a sliding window. A score of NaN or -inf is never chosen.

    Args:
        scores: floating ({B|1}, heads, 1, Sk). Not changed, and no gradient flows.
        window_size: at least 1.
        query_len: Sq.
        is_causal: choose row by row among the past, rather than once among all keys.
        attention_mask: bool ({B|1}, {heads|1}, {Sq|1}, {Sk|1}) or None.

    Returns:
        bool ({B|1}, heads, {Sq|1}, Sk), True where a key is kept, causality included. It has one
        row when not causal and the mask has one row.
    """
    scores = scores.detach()
    rank = _rank(scores).where(scores > -math.inf, -1)  # NaN is not above anything either
    key_only = attention_mask is None or attention_mask.shape[2] == 1
    if attention_mask is not None:
        rank = rank.where(attention_mask, -1)
    if not is_causal:
        return _top_of_rows(rank, window_size)
    if key_only:
        return _running_top(rank.squeeze(2), window_size, query_len)
    seen = _causal_rows(query_len, scores.shape[-1], scores.device)
    return _top_of_rows(rank.where(seen, -1), window_size)


def _rank(scores: Tensor) -> Tensor:
    """int32 in 0..Sk-1, higher for a higher score; of equal scores the later key ranks higher."""
    order = scores.argsort(dim=-1, stable=True)
    index = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    rank = torch.empty(scores.shape, dtype=torch.int32, device=scores.device)
    return rank.scatter_(-1, order, index.expand(scores.shape))


def _top_of_rows(rank: Tensor, window_size: int) -> Tensor:
    """True at the highest `window_size` ranks of each row; a rank of -1 is never kept."""
    lowest = rank.topk(min(window_size, rank.shape[-1]), dim=-1, sorted=False).values
    return (rank >= lowest.amin(-1, keepdim=True)) & (rank >= 0)


def _running_top(rank: Tensor, window_size: int, query_len: int) -> Tensor:
    """rank (B, heads, Sk), -1 = never -> bool (B, heads, Sq, Sk).

    A key enters at its own position and leaves for good once `window_size` higher-ranked keys have
    come, so it is visible to one interval of positions: from its own up to `end`, exclusive.
    """
    key_len = rank.shape[-1]
    step = max(1, _TABLE_ELEMENTS // max(1, rank.numel()))
    ends = []
    for start in range(0, key_len, step):
        # [..., j, p]: how many higher-ranked keys there are up to position p.
        higher = rank[..., None, :] > rank[..., start : start + step, None]
        ends.append((higher.cumsum(-1, dtype=torch.int32) < window_size).sum(-1))
    end = torch.cat(ends, dim=-1)
    position = torch.arange(key_len - query_len, key_len, device=rank.device)[:, None]
    entered = _causal_rows(query_len, key_len, rank.device)
    return entered & (position < end[..., None, :]) & (rank >= 0)[..., None, :]


def _causal_rows(query_len: int, key_len: int, device: torch.device) -> Tensor:
    """bool (Sq, Sk): the keys at or before each row's position, aligned to the bottom right."""
    position = torch.arange(key_len - query_len, key_len, device=device)[:, None]
    return torch.arange(key_len, device=device) <= position


def _normalize_mask(
    mask: Tensor | None, bias: Tensor, batch_size: int, query_len: int, key_len: int
) -> Tensor | None:
    """The mask in a shape that broadcasts to the bias's."""
    if mask is None:
        return None
    _check_mask_dtype(mask)
    given = tuple(mask.shape)
    if mask.dim() == 2:
        if mask.shape[0] != batch_size or mask.shape[1] not in (key_len, query_len):
            raise ValueError(
                f"attention_mask: got shape {given}, wanted ({batch_size}, {key_len}) or "
                f"({batch_size}, {query_len})"
            )
        if mask.shape[1] != key_len:
            if query_len > key_len:
                raise ValueError(
                    f"attention_mask: got shape {given}, wanted ({batch_size}, {key_len}) as there "
                    "are fewer keys than queries"
                )
            mask = torch.nn.functional.pad(mask, (key_len - query_len, 0), value=True)
        mask = mask[:, None, None, :]
    if mask.dim() != 4 and mask.dim() != bias.dim():
        raise ValueError(
            f"attention_mask: got shape {given}, wanted 2 or 4 dimensions, or those of "
            f"attention_bias, of shape {tuple(bias.shape)}"
        )
    if mask.dim() == 4 and bias.dim() == 3:
        mask = mask.any(2)
    elif mask.dim() == 4 and bias.shape[2] == 1 and mask.shape[2] != 1:
        mask = mask.any(2, keepdim=True)
    heads, mask_heads = bias.shape[1], mask.shape[1]
    if mask_heads not in (1, heads) and heads % mask_heads == 0:
        mask = mask.repeat_interleave(heads // mask_heads, dim=1)
    return mask


def _decide_blocks(keep: Tensor, allowed: Tensor | None, block_size: int | None) -> Tensor:
    """Make every run of `block_size` keys what the majority of its keys are."""
    if block_size is None:
        return keep
    if block_size < 1:
        raise ValueError(f"block_size: got {block_size}, wanted at least 1, or None")
    if block_size == 1:
        return keep
    key_len = keep.shape[-1]
    whole = key_len - key_len % block_size
    blocks = torch.unflatten(keep[..., :whole], -1, (whole // block_size, block_size))
    majority = blocks.sum(-1, keepdim=True) * 2 > block_size
    parts = [majority.expand(blocks.shape).flatten(-2)]
    if whole < key_len:
        tail = keep[..., whole:]
        parts.append((tail.sum(-1, keepdim=True) * 2 > key_len - whole).expand(tail.shape))
    decided = torch.cat(parts, dim=-1)
    if allowed is not None:
        decided &= allowed
    return decided


def _floor(min_dtype: float | None) -> float:
    return -math.inf if min_dtype is None else min_dtype


def _check_bias(bias: Tensor, key_len: int) -> None:
    _check_floating(bias)
    if bias.dim() not in (3, 4) or bias.shape[-1] != key_len:
        raise ValueError(
            f"attention_bias: got shape {tuple(bias.shape)}, wanted "
            f"(batch|1, heads|1, query_len|1, {key_len}) or (batch, heads, {key_len})"
        )


def _check_floating(bias: Tensor) -> None:
    if not bias.is_floating_point():
        raise TypeError(
            f"attention_bias: got dtype {bias.dtype}, wanted a floating dtype to select by"
        )


def _check_mask_dtype(mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask: got dtype {mask.dtype}, wanted torch.bool (True = attend)"
        )


def _check_broadcast(mask: Tensor, bias: Tensor) -> None:
    missing = bias.dim() - mask.dim()
    fits = missing >= 0 and all(
        n in (1, size) for n, size in zip(mask.shape, bias.shape[missing:], strict=True)
    )
    if not fits:
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}, wanted one that broadcasts to the "
            f"shape {tuple(bias.shape)} of attention_bias; expand the bias where the mask is larger"
        )
