"""The definition of dmattn attention, transcribed in plain PyTorch: the oracle of the tests.

It forms all tensors of size Sq x Sk, expands broadcast operands, and leaves gradients to autograd.
It shares no code with the operators. Letters: B batch, Sq/Sk query/key length, H query heads, HK
key/value heads, D head dimension; {B|1} is a dimension of size B or 1.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Reference(NamedTuple):
    """Results of `reference_attention`, all in its `compute_dtype`."""

    out: Tensor  # (B, Sq, H, head_dim of the values)
    lse: Tensor  # (B, H, Sq), natural logarithm
    probs: Tensor  # (B, H, Sq, Sk)


class ReferenceGradients(NamedTuple):
    """Results of `reference_gradients`; each gradient in the shape of its input."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsinks: Tensor | None = None


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    *,
    sinks: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> Reference:
    """Attention by its definition, with every step in `compute_dtype`. Differentiable.

    Args:
        query: (B, Sq, H, D), floating.
        key: (B, Sk, HK, D), floating.
        value: (B, Sk, HK, Dv), floating, with any head dimension Dv.
        attn_mask: bool ({B|1}, {H|HK|1}, {Sq|1}, {Sk|1}), True = attend, or None.
        attn_bias: floating, shapes as attn_mask, or None. -inf masks.
        softmax_scale: D ** -0.5 when None.
        is_causal: row i sees keys 0..i + Sk - Sq.
        softcap: c > 0 turns the scaled dot product x into c * tanh(x / c); 0 leaves it unchanged.
        sinks: floating (H,), for each head one more logit in the softmax of every row, without a
            value; or None.
        compute_dtype: float64 for the oracle. A lower precision gives the plain computation whose
            errors serve as the measure for the errors of the operators.

    Returns:
        out (B, Sq, H, Dv), lse (B, H, Sq) and probabilities (B, H, Sq, Sk). A row that keeps no key
        has out = 0, and lse = -inf or, with sinks, the sink.
    """
    with torch.autocast(query.device.type, enabled=False):
        return _attend(
            query,
            key,
            value,
            attn_mask,
            attn_bias,
            query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            is_causal,
            softcap,
            sinks,
            compute_dtype,
        )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    attn_bias: Tensor | None,
    scale: float,
    is_causal: bool,
    softcap: float,
    sinks: Tensor | None,
    compute_dtype: torch.dtype,
) -> Reference:
    batch, seqlen_q, nheads, _ = query.shape
    seqlen_k = key.shape[1]
    full = (batch, nheads, seqlen_q, seqlen_k)

    q, k, v = (t.to(compute_dtype).transpose(1, 2) for t in (query, key, value))
    k, v = _per_query_head(k, nheads), _per_query_head(v, nheads)
    logits = scale * (q @ k.transpose(2, 3))
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    keep = torch.ones(full, dtype=torch.bool, device=query.device)
    if attn_bias is not None:
        bias = _per_query_head(attn_bias, nheads).to(compute_dtype).expand(full)
        logits = logits + bias
        keep = keep & (bias != -math.inf)
    if attn_mask is not None:
        keep = keep & _per_query_head(attn_mask, nheads)
    if is_causal:
        keep = keep.tril(seqlen_k - seqlen_q)

    logits = logits.masked_fill(~keep, -math.inf)
    if sinks is not None:  # a further column of logits, as if there were one more key
        column = sinks.to(compute_dtype)[:, None, None].expand(batch, nheads, seqlen_q, 1)
        logits = torch.cat((logits, column), -1)
    # The softmax of a row of -inf is not defined: set its logits to 0 and erase the result.
    empty = (logits == -math.inf).all(-1, keepdim=True)
    probs = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)[..., :seqlen_k]
    lse = logits.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty[..., 0], -math.inf)
    out = (probs @ v).transpose(1, 2)
    return Reference(out, lse, probs)


def reference_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    *,
    sinks: Tensor | None = None,
    dout: Tensor,
    dlse: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> ReferenceGradients:
    """`reference_attention` and the gradients of (out * dout).sum() + (lse * dlse).sum().

    Arguments that are not listed here are those of `reference_attention`.

    Args:
        dout: (B, Sq, H, Dv), the gradient of out.
        dlse: (B, H, Sq), the gradient of lse, or None for zero; ignored in rows that keep no key
            (lse = -inf).
    """
    leaves = [t.detach().to(compute_dtype).requires_grad_() for t in (query, key, value)]
    bias, sink = (
        None if t is None else t.detach().to(compute_dtype).requires_grad_()
        for t in (attn_bias, sinks)
    )
    leaves += [t for t in (bias, sink) if t is not None]
    with torch.enable_grad():
        out, lse, _ = reference_attention(
            leaves[0],
            leaves[1],
            leaves[2],
            attn_mask,
            bias,
            softmax_scale,
            is_causal,
            softcap,
            sinks=sink,
            compute_dtype=compute_dtype,
        )
        objective = (out * dout.to(compute_dtype)).sum()
        if dlse is not None:
            weighted = lse * dlse.to(compute_dtype)
            objective = objective + weighted.masked_fill(lse == -math.inf, 0.0).sum()
        grads = torch.autograd.grad(objective, leaves, materialize_grads=True)
    dq, dk, dv = grads[:3]
    dbias = None if bias is None else grads[3]
    dsinks = None if sink is None else grads[-1]
    return ReferenceGradients(out.detach(), lse.detach(), dq, dk, dv, dbias, dsinks)


def _per_query_head(t: Tensor, nheads: int) -> Tensor:
    """Repeat dimension 1 from HK to H heads, each key head once per query head; 1 stays 1."""
    return t if t.shape[1] in (1, nheads) else t.repeat_interleave(nheads // t.shape[1], dim=1)
