"""One compiled graph serves every length: functions, layer, selections, masks, on each device."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import dmattn
from attention.targets import target_device
from dmattn.utils import index_first_axis, pad_input, unpad_input

pytestmark = pytest.mark.default_backend

LENGTHS = (100, 30, 36, 52, 64, 127, 128, 129, 160, 200, 257, 290)  # 12, all above the window
KINDS = ("plain", "mask and bias", "window", "window and mask")
WINDOW, HIDDEN = 24, 64
# torch 2.9 and later can trace the minimum or maximum of two symbolic lengths. Older torch compiles
# for the length that happens to be the smaller while it traces, so other lengths need other graphs.
GRAPHS = 1 if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9) else 4


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


# On the CPU a share of these cases is enough: `test_operators` of the package covers all kinds.
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
        # Sizes are unknown while compiling: the two calls may run different kernels. Each of them
        # rounds probabilities and its output to 8 bits: half a unit of the values' mean size for
        # either.
        torch.testing.assert_close(found, attend(q, k, v, bounds), rtol=1.6e-2, atol=2**-8)
        (dk,) = torch.autograd.grad(found.square().sum(), k)
        assert bool(dk.isfinite().all())
        graphs = graphs or counter.frame_count  # those of the first length, including restarts
    assert counter.frame_count < graphs + GRAPHS


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
    assert counter.frame_count < graphs + GRAPHS


@pytest.mark.skipif(GRAPHS > 1, reason="this torch exports one range of lengths")
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


def scores_of(length: int) -> Tensor:
    return torch.randn(2, 2, 1, length, device=target_device())


def mask_of(length: int) -> Tensor:
    return torch.rand(2, length, device=target_device()) < 0.8


def bounds_of(length: int) -> Tensor:
    return torch.tensor([0, 3, 7, length], dtype=torch.int32, device=target_device())


def long_bounds_of(length: int) -> Tensor:
    return bounds_of(length).long()


def ends_of(length: int) -> Tensor:
    reach = torch.randint(0, 99, (2, 1, length), device=target_device())
    return torch.arange(length, device=target_device()) + reach


def ids_of(length: int) -> Tensor:
    return (torch.rand(2, length, device=target_device()) < 0.1).long().cumsum(1)


def tokens_of(length: int) -> Tensor:
    return torch.randn(2, length, 3, device=target_device())


def without_padding(tokens: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    found, indices, cu_seqlens, _, used = unpad_input(tokens, mask)
    again = index_first_axis(tokens.flatten(0, 1), indices)
    return found, cu_seqlens, used, again, pad_input(found, indices, *mask.shape)


Makers = tuple[Callable[[int], Tensor], ...]
# Also lengths below the windows and below a row block.
ALL_LENGTHS = (300, 20, 9, 40, 64, 127, 128, 129, 200, 256, 257, 411)
CHOICES: dict[str, tuple[Callable[..., Any], Makers]] = {
    "select_keys of all": (lambda b: dmattn.select_keys(b, 40, is_causal=False), (scores_of,)),
    "select_keys, mask": (
        lambda b, m: dmattn.select_keys(b, 40, attn_mask=m),
        (scores_of, mask_of),
    ),
    "select_keys, long boundaries": (
        lambda b, c: dmattn.select_keys(b, 40, cu_seqlens=c),
        (scores_of, long_bounds_of),
    ),
    "sliding_window, mask": (
        lambda m: dmattn.sliding_window(m.shape[-1], 40, attn_mask=m),
        (mask_of,),
    ),
    "from_intervals": (lambda e: dmattn.KeySelection.from_intervals(e, reach=60), (ends_of,)),
    "packed_documents": (
        # The longest document is said, so that the host need not read the boundaries of a GPU.
        lambda m, c: dmattn.packed_documents(
            c, key_len=m.shape[1], attn_mask=m, max_seqlen=m.shape[1]
        ),
        (mask_of, bounds_of),
    ),
    "packed_documents, ids": (
        lambda i: dmattn.packed_documents(document_ids=i, window_size=50, max_seqlen=70),
        (ids_of,),
    ),
    "create_mask": (
        lambda b, m: dmattn.create_mask(b, m, 2, b.shape[-1], b.shape[-1], 8, block_size=4),
        (scores_of, mask_of),
    ),
    "maybe_create_mask": (
        lambda b, m: dmattn.maybe_create_mask(b, m, 2, b.shape[-1], b.shape[-1], 8),
        (scores_of, mask_of),
    ),
    "dynamic_mask": (
        lambda b, m: dmattn.dynamic_mask(b, m[:, None, None], 8),
        (scores_of, mask_of),
    ),
    "top_window_mask": (
        lambda b, m: dmattn.top_window_mask(
            b, 8, attention_mask=m[:, None, :, None] | m[:, None, None]
        ),
        (scores_of, mask_of),
    ),
    "unpad_input, pad_input": (without_padding, (tokens_of, mask_of)),
}


def tensors_of(made: Any) -> tuple[Tensor, ...]:
    """The tensors to be compared; compiled selections may have one more list, which is empty."""
    if not isinstance(made, dmattn.KeySelection):
        return made if isinstance(made, tuple) else (made,)
    kept = made.to_mask()
    blocks = -(-made.query_len // 128) if made.is_causal else 1
    assert not made.count[:, :, blocks:].any()
    return (kept, made.end, made.idx[:, :, :blocks], made.count[:, :, :blocks])


@pytest.mark.every_case
@pytest.mark.parametrize("name", CHOICES)
def test_selections_and_masks(name: str) -> None:
    function, makers = CHOICES[name]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=counter)
    for length in ALL_LENGTHS:
        arguments = [maker(length) for maker in makers]
        # Lets a graph continue after a number for which the host waits, such as the number of
        # tokens.
        with torch._dynamo.config.patch(
            capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
        ):
            found = compiled(*arguments)
        wanted = function(*arguments)
        for a, b in zip(tensors_of(found), tensors_of(wanted), strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count <= GRAPHS
