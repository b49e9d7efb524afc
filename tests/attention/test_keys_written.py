"""The event that comes once the gradients of keys are written, before those of queries are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dmattn
from dmattn.backends.cuda.keys_written import KeysWritten

pytestmark = pytest.mark.cuda

# Batch, rows, heads, heads of keys, head_dim; the letters of the bias; and settings.
CASES: dict[str, tuple[tuple[int, int, int, int, int], str, dict[str, Any]]] = {
    "window": ((1, 16384, 8, 2, 128), "bk1k", {"window_size": 1024, "is_causal": True}),
    "window, not causal": ((1, 8192, 8, 2, 64), "bk1k", {"window_size": 256}),
    "causal": ((2, 4096, 8, 8, 128), "bk1k", {"is_causal": True}),
    "wide": ((1, 4096, 4, 4, 256), "bk1k", {"is_causal": True}),
    "in a fixed order": ((1, 4096, 8, 2, 64), "bk1k", {"is_causal": True, "deterministic": True}),
    "few keys": ((64, 48, 4, 4, 64), "bk1k", {}),
    "few keys, bias with rows": ((64, 48, 4, 4, 64), "bhqk", {}),
    "bias with rows": ((1, 1024, 4, 4, 128), "bhqk", {}),
    "bias with rows, sums in float32": ((2, 1024, 4, 4, 64), "11qk", {}),
    "bias of rows": ((2, 1024, 4, 2, 64), "bhq1", {"is_causal": True}),
    "odd head_dim": ((2, 1024, 4, 2, 68), "bk1k", {"is_causal": True}),
}


class _Watch(torch.autograd.Function):
    """Copies the gradients that arrive here, on a stream that waits for nothing but the event."""

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
    (batch, rows, heads, heads_k, head_dim), letters, settings = CASES[name]
    torch.manual_seed(0)
    shapes = [(batch, rows, n, head_dim) for n in (heads, heads_k, heads_k, heads)]
    q, k, v, dout = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    sizes = {"b": batch, "h": heads, "k": heads_k, "1": 1}
    by_rows = [rows if letter in "qk" else 1 for letter in letters[2:]]
    bias = torch.randn(sizes[letters[0]], sizes[letters[1]], *by_rows, device="cuda")
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


@pytest.mark.parametrize("change", ["in place", "twice"])
def test_a_changed_gradient_is_waited_for_like_all_else(change: str) -> None:
    q, k = (torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found: list[Any] = []
    written = KeysWritten(q.device)
    k.requires_grad_()
    (seen,) = _Watch.apply(written, found, k)  # type: ignore[no-untyped-call]
    # With "twice", the last result may get the memory of the gradient that the kernels wrote.
    seen.register_hook((lambda g: g.mul_(2)) if change == "in place" else (lambda g: (g * 2) * 2))
    out = dmattn.flash_dmattn_func(q, seen, seen.detach(), is_causal=True)
    written.ask_before(out.grad_fn)
    (grad,) = torch.autograd.grad(out, k, torch.randn_like(out))
    ((covered, (copy,)),) = found
    assert not covered
    assert copy.equal(grad)
