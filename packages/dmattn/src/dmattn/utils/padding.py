"""From padded batches to packed sequences and back, by the names that the field knows.

Letters: B batch, S padded length, N tokens that are no padding, in order of batch and position.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of the first dimension, differentiable.

    Args:
        input: (M, ...).
        indices: int32 or int64 (N,), values in 0 .. M - 1.

    Returns:
        (N, ...), a copy.

    Raises:
        TypeError: indices are no int32 or int64 tensor.
        ValueError: indices are not one-dimensional, or input has no dimension.
    """
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices: got dtype {indices.dtype}, wanted torch.int32 or torch.int64")
    if indices.dim() != 1 or input.dim() < 1:
        raise ValueError(
            f"indices: got shape {tuple(indices.shape)} for input of shape {tuple(input.shape)}, "
            "wanted (n,) for (m, ...)"
        )
    return input.index_select(0, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Leave padding out. The host waits for the number of tokens.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: bool or integer (B, S): True or 1 for tokens, False or 0 for padding,
            anywhere in a row.
        unused_mask: as attention_mask, for tokens that get room without counting as used.

    Returns:
        hidden_states (N, ...), N counting the tokens of either mask;
        indices int64 (N,), where they come from in (B * S);
        cu_seqlens int32 (B + 1,), how many of them lie in front of each row;
        the largest number of them in a row, an int;
        seqused int32 (B,), how many tokens of each row attention_mask has.

    Raises:
        TypeError: a mask is neither bool nor integer.
        ValueError: shapes do not fit together.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    every = attention_mask != 0
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        every = every | (unused_mask != 0)
    indices, cu_seqlens, longest = get_unpad_data(every)
    used = (attention_mask != 0).sum(-1, dtype=torch.int32)
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        cu_seqlens,
        longest,
        used,
    )


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put tokens back where `unpad_input` took them from, with zeros in between.

    Args:
        hidden_states: (N, ...).
        indices: int64 (N,), from `unpad_input` or `get_unpad_data`.
        batch, seqlen: B and S.

    Returns:
        (B, S, ...). Differentiable.

    Raises:
        ValueError: there is not one index for each token.
    """
    if indices.shape != hidden_states.shape[:1]:
        raise ValueError(
            f"indices: got shape {tuple(indices.shape)}, wanted {tuple(hidden_states.shape[:1])} "
            "as hidden_states has tokens"
        )
    empty = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    padded = empty.index_copy(0, indices.long(), hidden_states)
    return torch.unflatten(padded, 0, (batch, seqlen))


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Where the tokens of a padded batch are. The host waits for their number.

    Args:
        attention_mask: bool or integer (B, S): True or 1 for tokens, False or 0 for padding.

    Returns:
        indices int64 (N,) into (B * S); cu_seqlens int32 (B + 1,); the largest number of tokens in
        a row, an int.

    Raises:
        TypeError: the mask is neither bool nor integer.
        ValueError: it has not two dimensions.
    """
    _check_mask("attention_mask", attention_mask, None)
    is_token = attention_mask != 0
    lengths = is_token.sum(-1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return is_token.flatten().nonzero().flatten(), cu_seqlens, longest


def upad_input(
    query_layer: Tensor,
    key_layer: Tensor,
    value_layer: Tensor,
    attention_mask: Tensor,
    query_length: int,
    unpad_input_func: Callable[..., tuple[Any, ...]] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor], tuple[int, int]]:
    """Query, key and value of a padded batch as `flash_dmattn_varlen_func` takes them.

    Args:
        query_layer: (B, Sq, H, D).
        key_layer, value_layer: (B, Sk, HK, D).
        attention_mask: bool or integer (B, Sk), tokens among the keys.
        query_length: Sq. Queries are the last positions of the keys: all of them when Sq = Sk; one
            token in each row, padding or not, when Sq = 1; else those of the last Sq columns of
            attention_mask.
        unpad_input_func: what takes the queries apart in that last case; `unpad_input` when None.

    Returns:
        query (Nq, H, D); key and value (Nk, HK, D); indices_q (Nq,), for `pad_input`;
        (cu_seqlens_q, cu_seqlens_k), one and the same tensor when Sq = Sk;
        (max_seqlen_q, max_seqlen_k), ints.

    Raises:
        TypeError: attention_mask is neither bool nor integer.
        ValueError: shapes do not fit together.
    """
    _check_mask("attention_mask", attention_mask, key_layer)
    if value_layer.shape[:2] != key_layer.shape[:2]:
        got, wanted = tuple(value_layer.shape), tuple(key_layer.shape[:2])
        raise ValueError(f"value_layer: got shape {got}, wanted {wanted} in front, as key_layer")
    batch, key_length = key_layer.shape[:2]
    if query_layer.shape[:2] != (batch, query_length) or query_length > max(key_length, 1):
        raise ValueError(
            f"query_layer: got shape {tuple(query_layer.shape)} with query_length {query_length}, "
            f"wanted ({batch}, query_length, ...) and at most {key_length} queries"
        )
    indices_k, cu_seqlens_k, longest_k = get_unpad_data(attention_mask)
    key = index_first_axis(key_layer.flatten(0, 1), indices_k)
    value = index_first_axis(value_layer.flatten(0, 1), indices_k)
    if query_length == key_length:
        query = index_first_axis(query_layer.flatten(0, 1), indices_k)
        bounds, longest = (cu_seqlens_k, cu_seqlens_k), (longest_k, longest_k)
        return query, key, value, indices_k, bounds, longest
    if query_length == 1:
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=query_layer.device)
        indices_q = cu_seqlens_q[:-1].long()
        bounds, longest = (cu_seqlens_q, cu_seqlens_k), (1, longest_k)
        return query_layer.squeeze(1), key, value, indices_q, bounds, longest
    unpad = unpad_input if unpad_input_func is None else unpad_input_func
    last = attention_mask[:, key_length - query_length :]
    query, indices_q, cu_seqlens_q, longest_q = unpad(query_layer, last)[:4]
    bounds, longest = (cu_seqlens_q, cu_seqlens_k), (longest_q, longest_k)
    return query, key, value, indices_q, bounds, longest


def _check_mask(name: str, mask: Tensor, tokens: Tensor | None) -> None:
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"{name}: got dtype {mask.dtype}, wanted bool or an integer dtype")
    if tokens is None:
        if mask.dim() != 2:
            raise ValueError(f"{name}: got shape {tuple(mask.shape)}, wanted (batch, seqlen)")
    elif mask.dim() != 2 or mask.shape != tokens.shape[:2]:
        raise ValueError(
            f"{name}: got shape {tuple(mask.shape)}, wanted {tuple(tokens.shape[:2])} as the "
            "tokens that it speaks of"
        )
