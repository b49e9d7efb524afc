"""The event between the gradients of keys and those of queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dmattn
from dmattn.backends.cuda.keys_written import KeysWritten

pytestmark = pytest.mark.cuda

# Batch, rows, heads, heads of keys, head_dim, and settings: lists, a dense bias, a bias for each
# key, few keys, a mask of keys, sums of dq in float32 or not, several rounds.
CASES: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    "window": ((1, 16384, 8, 2, 128), {"window_size": 1024, "is_causal": True}),
    "window without bias's gradient": ((1, 8192, 8, 2, 64), {"window_size": 256}),
    "causal": ((2, 4096, 8, 8, 128), {"is_causal": True}),
    "wide": ((1, 4096, 4, 4, 256), {"is_causal": True}),
    "in a fixed order": ((1, 4096, 8, 2, 64), {"is_causal": True, "deterministic": True}),
    "few keys": ((64, 48, 4, 4, 64), {}),
    "odd head_dim": ((2, 1024, 4, 2, 68), {"is_causal": True}),
}


class _Watch(torch.autograd.Function):
    """Copies, when an event has come and beside all else, what arrives for each input."""

    @staticmethod
    def forward(ctx: Any, written: KeysWritten, found: list[Any], *given: Tensor) -> Any:
        ctx.written, ctx.found = written, found
        return tuple(t.view_as(t) for t in given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        covered = ctx.written.covers(grads)
        beside = torch.cuda.Stream()
        if covered:
            beside.wait_event(ctx.written.event)
        else:
            beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            copies = [t.clone() for t in grads]
        torch.cuda.current_stream().wait_stream(beside)
        ctx.found.append((covered, copies))
        return None, None, *grads


@pytest.mark.parametrize("name", CASES)
def test_all_but_the_gradients_of_queries_are_there(name: str) -> None:
    (batch, rows, heads, heads_k, head_dim), settings = CASES[name]
    torch.manual_seed(0)
    shapes = [(batch, rows, n, head_dim) for n in (heads, heads_k, heads_k, heads)]
    q, k, v, dout = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    bias = torch.randn(batch, heads_k, 1, rows, device="cuda")
    leaves = [t.requires_grad_() for t in (q, k, v, bias)]
    for _ in range(5):
        found: list[Any] = []
        written = KeysWritten(q.device)
        seen_k, seen_v, seen_bias = _Watch.apply(written, found, k, v, bias)  # type: ignore[no-untyped-call]
        out = dmattn.flash_dmattn_func(q, seen_k, seen_v, attn_bias=seen_bias, **settings)
        written.ask_before(out.grad_fn)
        _, *grads = torch.autograd.grad(out, leaves, dout)
        ((covered, copies),) = found
        assert covered == (head_dim % 8 == 0)  # else the gradients are copies of what was written
        for copy, grad in zip(copies, grads, strict=True):
            assert copy.equal(grad)


def test_a_changed_gradient_is_waited_for_like_all_else() -> None:
    q, k = (torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found: list[Any] = []
    written = KeysWritten(q.device)
    k.requires_grad_()
    (seen,) = _Watch.apply(written, found, k)  # type: ignore[no-untyped-call]
    seen.register_hook(lambda grad: grad.mul_(2))
    out = dmattn.flash_dmattn_func(q, seen, seen.detach(), is_causal=True)
    written.ask_before(out.grad_fn)
    (grad,) = torch.autograd.grad(out, k, torch.randn_like(out))
    ((covered, (copy,)),) = found
    assert not covered
    assert copy.equal(grad)
