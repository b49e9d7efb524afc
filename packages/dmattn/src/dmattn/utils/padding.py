"""From padded batches to packed sequences and back, by functions named as in other libraries.

Letters: B batch, S padded length, N number of tokens that are no padding. Tokens are in order of
batch entry, then position.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn.validation import (
    can_be_read,
    check_int,
    check_same_device,
    check_tensor,
    check_tensor_dtype,
    describe,
    is_integer,
)


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Select rows of the first dimension; differentiable with respect to `input`.

    Args:
        input: (M, ...).
        indices: int32 or int64 (N,), values in 0 .. M - 1.

    Returns:
        (N, ...), a copy.

    Raises:
        TypeError: indices are no int32 or int64 tensor.
        ValueError: indices are not one-dimensional, or (on the CPU) out of range; or input has no
            dimension.
    """
    check_tensor("input", input)
    _check_indices(indices, input, "input")
    if indices.dim() != 1 or input.dim() < 1:
        raise ValueError(
            f"indices: got shape {tuple(indices.shape)} for input of shape {tuple(input.shape)}, "
            "wanted (n,) for (m, ...)"
        )
    _check_range(indices, input.shape[0])
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Put rows at their indices in the first dimension, with zeros elsewhere; differentiable.

    Args:
        values: (N, ...).
        indices: int32 or int64 (N,), values in 0 .. M - 1, no two the same, which is not checked.
        first_axis_dim: M.

    Returns:
        (M, ...).

    Raises:
        TypeError: indices are no int32 or int64 tensor, or first_axis_dim is no int.
        ValueError: there is not one index for each row of values, or (on the CPU) one is out of
            range.
    """
    check_tensor("values", values)
    first_axis_dim = check_int("first_axis_dim", first_axis_dim, 0)
    _check_indices(indices, values, "values")
    if values.dim() < 1 or indices.shape != values.shape[:1]:
        raise ValueError(
            f"indices: got shape {tuple(indices.shape)}, wanted {tuple(values.shape[:1])} as "
            "values has rows"
        )
    _check_range(indices, first_axis_dim)
    zeros = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return zeros.index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Remove padding. The host waits for the number of tokens.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: bool or integer (B, S): True or 1 for tokens, False or 0 for padding, at any
            place.
        unused_mask: bool or integer (B, S), nonzero for further tokens that are taken along, but do
            not count in seqused; or None.

    Returns:
        hidden_states (N, ...), where N counts the tokens of both masks;
        indices int64 (N,), the index of each token in the flattened batch (B * S);
        cu_seqlens int32 (B + 1,), the boundaries of the batch entries among the N tokens;
        max_seqlen, an int, the largest number of tokens of a batch entry;
        seqused int32 (B,), the number of tokens of each batch entry by attention_mask alone.

    Raises:
        TypeError: hidden_states is no tensor, or a mask is neither bool nor integer.
        ValueError: shapes or devices do not fit together.
    """
    check_tensor("hidden_states", hidden_states)
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


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Remove padding from batch entries that each hold several sequences one after the other.

    The host waits for the number of tokens.

    Args:
        hidden_states: (B, S, ...); the sequences of a batch entry start at its first position,
            without gaps, and padding follows the last of them.
        attention_mask_in_length: integer (B, S): the lengths of the sequences of each batch entry,
            in order, then zeros: [3, 2, 0, 0, 0, 0] for two sequences and one token of padding.

    Returns:
        hidden_states (N, ...);
        indices int64 (N,), the index of each token in the flattened batch (B * S);
        cu_seqlens int32 (sequences + 1,), the boundaries of the sequences among the N tokens;
        max_seqlen, an int, the length of the longest sequence.

    Raises:
        TypeError: hidden_states is no tensor, or attention_mask_in_length is not integer.
        ValueError: shapes or devices do not fit together; or (on the CPU) a length is negative, or
            the sequences of a batch entry are together longer than S.
    """
    check_tensor("hidden_states", hidden_states)
    lengths = check_tensor("attention_mask_in_length", attention_mask_in_length)
    if not is_integer(lengths.dtype):
        raise TypeError(
            f"attention_mask_in_length: got dtype {lengths.dtype}, wanted an integer dtype"
        )
    _check_mask("attention_mask_in_length", lengths, hidden_states)
    tokens = lengths.sum(-1, keepdim=True)
    _check_lengths(lengths, tokens)
    position = torch.arange(lengths.shape[1], device=lengths.device)
    indices, _, _ = get_unpad_data(position < tokens)
    flat = lengths.flatten()
    of_sequences = flat[flat != 0]
    ends = of_sequences.cumsum(0, dtype=torch.int32)
    longest = int(of_sequences.max()) if of_sequences.numel() else 0
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        torch.nn.functional.pad(ends, (1, 0)),
        longest,
    )


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put tokens back where `unpad_input` took them from, with zeros in between.

    Args:
        hidden_states: (N, ...).
        indices: int32 or int64 (N,), from `unpad_input` or `get_unpad_data`.
        batch, seqlen: B and S.

    Returns:
        (B, S, ...), differentiable with respect to hidden_states.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: there is not one index for each token, or (on the CPU) one is out of range.
    """
    check_tensor("hidden_states", hidden_states)
    batch, seqlen = check_int("batch", batch, 0), check_int("seqlen", seqlen, 0)
    _check_indices(indices, hidden_states, "hidden_states")
    if hidden_states.dim() < 1 or indices.shape != hidden_states.shape[:1]:
        raise ValueError(
            f"indices: got shape {tuple(indices.shape)}, wanted {tuple(hidden_states.shape[:1])} "
            "as hidden_states has tokens"
        )
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return torch.unflatten(padded, 0, (batch, seqlen))


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """The places of the tokens of a padded batch. The host waits for their number.

    Args:
        attention_mask: bool or integer (B, S): True or 1 for tokens, False or 0 for padding.

    Returns:
        indices int64 (N,), the index of each token in the flattened batch (B * S);
        cu_seqlens int32 (B + 1,), the boundaries of the batch entries among the N tokens;
        max_seqlen, an int, the largest number of tokens of a batch entry.

    Raises:
        TypeError: the mask is neither bool nor integer.
        ValueError: it does not have two dimensions.
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
        attention_mask: bool or integer (B, Sk): True or 1 for tokens among the keys, False or 0 for
            padding.
        query_length: Sq. Queries stand at the last Sq positions of the keys. If Sq = Sk, or
            1 < Sq < Sk, queries at positions that attention_mask marks as padding are removed. If
            Sq = 1 < Sk, each batch entry keeps its query, padding or not.
        unpad_input_func: the function that removes the padding of queries if 1 < Sq < Sk;
            `unpad_input` when None.

    Returns:
        query (Nq, H, D); key and value (Nk, HK, D); indices_q int64 (Nq,), for `pad_input`;
        (cu_seqlens_q, cu_seqlens_k), int32 (B + 1,), one and the same tensor if Sq = Sk;
        (max_seqlen_q, max_seqlen_k), ints.

    Raises:
        TypeError: attention_mask is neither bool nor integer, or unpad_input_func no callable.
        ValueError: shapes or devices do not fit together.
    """
    for name, t in (
        ("query_layer", query_layer),
        ("key_layer", key_layer),
        ("value_layer", value_layer),
    ):
        check_tensor(name, t)
        check_same_device(name, t, query_layer.device, "query_layer")
    query_length = check_int("query_length", query_length, 0)
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
    if not callable(unpad):
        raise TypeError(f"unpad_input_func: got {describe(unpad)}, wanted a callable or None")
    last = attention_mask[:, key_length - query_length :]
    query, indices_q, cu_seqlens_q, longest_q = unpad(query_layer, last)[:4]
    bounds, longest = (cu_seqlens_q, cu_seqlens_k), (longest_q, longest_k)
    return query, key, value, indices_q, bounds, longest


def _check_indices(indices: Tensor, tokens: Tensor, owner: str) -> None:
    check_tensor_dtype("indices", check_tensor("indices", indices), (torch.int32, torch.int64))
    check_same_device("indices", indices, tokens.device, owner)


def _check_range(indices: Tensor, size: int) -> None:
    """Raise ValueError for an index outside 0 .. size - 1, if the host can read the indices."""
    if can_be_read(indices):
        wrong = indices[(indices < 0) | (indices >= size)]
        if wrong.numel() > 0:
            raise ValueError(f"indices: got {int(wrong[0])}, wanted at least 0 and below {size}")


def _check_lengths(lengths: Tensor, tokens: Tensor) -> None:
    """Raise ValueError for wrong lengths (B, S), if the host can read them.

    `tokens`: (B, 1), the sum of the lengths of each batch entry.
    """
    if not can_be_read(lengths):
        return
    negative, too_many = lengths[lengths < 0], tokens[tokens > lengths.shape[1]]
    if negative.numel() > 0:
        raise ValueError(f"attention_mask_in_length: got {int(negative[0])}, wanted at least 0")
    if too_many.numel() > 0:
        raise ValueError(
            f"attention_mask_in_length: got sequences of {int(too_many[0])} tokens in a row, "
            f"wanted at most {lengths.shape[1]}"
        )


def _check_mask(name: str, mask: Tensor, tokens: Tensor | None) -> None:
    check_tensor(name, mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"{name}: got dtype {mask.dtype}, wanted bool or an integer dtype")
    if tokens is None:
        if mask.dim() != 2:
            raise ValueError(f"{name}: got shape {tuple(mask.shape)}, wanted (batch, seqlen)")
        return
    if mask.dim() != 2 or mask.shape != tokens.shape[:2]:
        raise ValueError(
            f"{name}: got shape {tuple(mask.shape)}, wanted {tuple(tokens.shape[:2])} as the "
            "tokens that it speaks of"
        )
    check_same_device(name, mask, tokens.device, "the tokens")
