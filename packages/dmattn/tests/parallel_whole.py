"""Context parallel attention of a rank's tokens, compared with one call of the whole sequence."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn import flash_dmattn_func, select_keys
from dmattn.distributed import context_parallel, context_parallel_attention


def operands(
    lengths: list[int], heads: tuple[int, int, int] = (4, 2, 2), batch: int = 2, seed: int = 0
) -> list[Tensor]:
    """q, k, v and scores of the whole sequence, float64; heads of q, of k and of the scores."""
    torch.manual_seed(seed)
    seqlen, (nheads, nheads_k, nheads_s) = sum(lengths), heads
    shapes = [(batch, seqlen, n, d) for n, d in ((nheads, 16), (nheads_k, 16), (nheads_k, 8))]
    found = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [*found, torch.randn(batch, nheads_s, seqlen, dtype=torch.float64)]


def part(t: Tensor, lengths: list[int], rank: int) -> Tensor:
    """A rank's tokens of (B, S, heads, D), or of (B, heads, S), or of (B, S)."""
    dim = 2 if t.dim() == 3 else 1
    return t.narrow(dim, sum(lengths[:rank]), lengths[rank])


def check(
    rank: int,
    lengths: list[int],
    whole: list[Tensor],
    window: int,
    mask: Tensor | None = None,
    documents: list[int] | None = None,
    learned: tuple[bool, ...] = (True, True, True, True),
    group: Any = None,
    **settings: Any,
) -> None:
    """Output, lse and gradients of this rank's tokens are those of the whole sequence."""
    leaves = [t.clone().requires_grad_(on) for t, on in zip(whole, learned, strict=True)]
    chosen = select_keys(leaves[3], window, attn_mask=mask, cu_seqlens=documents)
    results = flash_dmattn_func(
        *leaves[:3],
        attn_bias=leaves[3],
        selection=chosen,
        is_causal=True,
        return_lse=True,
        **settings,
    )
    mine = [part(t, lengths, rank).clone().requires_grad_(t.requires_grad) for t in leaves]
    own_mask = None if mask is None else part(mask, lengths, rank)
    found = context_parallel_attention(
        *mine,
        window_size=window,
        group=group,
        attn_mask=own_mask,
        cu_seqlens=documents,
        return_lse=True,
        **settings,
    )
    out, lse = (part(t, lengths, rank) for t in results)
    torch.testing.assert_close(found[0], out)
    torch.testing.assert_close(found[1], lse)
    if not any(learned):
        return
    torch.manual_seed(1)
    douts = [torch.randn_like(t) for t in results]
    douts[1] = douts[1].where(results[1] > -torch.inf, 0.0)
    inputs = [t for t in leaves if t.requires_grad]
    want = torch.autograd.grad(results, inputs, douts)
    own_douts = [part(t, lengths, rank) for t in douts]
    got = torch.autograd.grad(found, [t for t in mine if t.requires_grad], own_douts)
    for grad, expected in zip(got, want, strict=True):
        torch.testing.assert_close(grad, part(expected, lengths, rank))


def both_ways(run: Callable[[], None]) -> None:
    """Run with both ways to exchange states: gathering them, and a scan over the ranks."""
    usual = context_parallel.GATHER_BYTES
    try:
        for limit in (usual, 0):
            context_parallel.GATHER_BYTES = limit
            run()
    finally:
        context_parallel.GATHER_BYTES = usual
