"""One compiled graph serves every length: the functions and the layer, on each target's device."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import dmattn
from attention.targets import target_device

pytestmark = pytest.mark.default_backend

LENGTHS = (100, 30, 36, 52, 64, 127, 128, 129, 160, 200, 257, 290)  # 12, above the window
KINDS = ("plain", "mask and bias", "window", "window and mask")
WINDOW, HIDDEN = 24, 64


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=target_device(), dtype=torch.bfloat16)


class Attention(nn.Module):
    """The public functions, with mask and bias in buffers for the longest call."""

    mask: Tensor
    bias: Tensor

    def __init__(self, kind: str, packed: bool) -> None:
        super().__init__()
        self.kind, self.packed = kind, packed
        device = target_device()
        self.register_buffer("mask", torch.rand(2, 1, 1, 300, device=device) < 0.8)
        self.register_buffer("bias", normal(1, 2, 1, 300))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        n = k.shape[-3]
        mask = self.mask[..., :n] if "mask" in self.kind else None
        bias = None if self.kind == "plain" else self.bias[..., :n]
        window = WINDOW if "window" in self.kind else None
        if not self.packed:
            return dmattn.flash_dmattn_func(q, k, v, mask, bias, None, True, window_size=window)
        per_key = [None if x is None else x[0, :, 0].t() for x in (mask, bias)]
        return dmattn.flash_dmattn_varlen_func(
            *(q, k, v, cu_seqlens, None, n, n, *per_key), is_causal=True, window_size=window
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_functions(packed: bool, kind: str) -> None:
    torch._dynamo.reset()
    attend, counter = Attention(kind, packed), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    graphs = 0
    for n in LENGTHS:
        shape = (n,) if packed else (2, n)
        q, k, v = (normal(*shape, heads, 64).requires_grad_() for heads in (4, 2, 2))
        bounds = torch.tensor([0, n // 3, n], dtype=torch.int32, device=target_device())
        found = compiled(q, k, v, bounds)
        torch.testing.assert_close(found, attend(q, k, v, bounds))
        (dk,) = torch.autograd.grad(found.square().sum(), k)
        assert bool(dk.isfinite().all())
        graphs = graphs or counter.frame_count  # of the first length, with its restarts
    assert counter.frame_count == graphs


class Layer(nn.Module):
    """A layer with a window, whose padding and positions lie in buffers for the longest text."""

    mask: Tensor
    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        device = target_device()
        self.layer = dmattn.DynamicMaskAttention(HIDDEN, 4, 2, window_size=WINDOW)
        self.layer.to(device, torch.bfloat16)
        self.register_buffer("mask", torch.rand(2, 300, device=device) < 0.8)
        self.register_buffer("positions", torch.arange(300, device=device))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        out: Tensor = self.layer(x, self.positions[:n], self.mask[:, :n])
        return out


def test_layer() -> None:
    torch._dynamo.reset()
    layer, counter = Layer(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    graphs = 0
    with torch.no_grad():
        for n in LENGTHS:
            x = normal(2, n, HIDDEN)
            torch.testing.assert_close(compiled(x), layer(x), rtol=2e-2, atol=2e-2)
            graphs = graphs or counter.frame_count
    assert counter.frame_count == graphs


def test_exported_layer() -> None:
    layer, file = Layer(), io.BytesIO()
    length: Any = torch.export.Dim("length", min=WINDOW + 1, max=299)
    with torch.no_grad():
        program = torch.export.export(
            layer, (normal(2, 100, HIDDEN),), dynamic_shapes={"x": {1: length}}
        )
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for n in (30, 129, 290):
            x = normal(2, n, HIDDEN)
            torch.testing.assert_close(loaded(x), layer(x), rtol=2e-2, atol=2e-2)
