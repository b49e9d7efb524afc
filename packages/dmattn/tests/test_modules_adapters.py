"""Hooks, adapters, quantization and sharding of DynamicMaskAttention's linear layers."""

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_releases import needs_2_9

from dmattn.modules import DynamicMaskAttention

HIDDEN, HEADS, KV_HEADS = 32, 4, 2
LINEAR = ["q_proj", "k_proj", "v_proj", "dt_proj", "o_proj"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def make_layer(**options: Any) -> DynamicMaskAttention:
    layer = DynamicMaskAttention(HIDDEN, HEADS, KV_HEADS, **{"window_size": 5, **options})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return layer


class LoRA(nn.Module):
    """base(x) + B A x, with the base frozen."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        dtype = base.weight.dtype
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def wrap(layer: DynamicMaskAttention, names: list[str]) -> list[LoRA]:
    wrapped = []
    for name in names:
        wrapped.append(LoRA(getattr(layer, name)))
        setattr(layer, name, wrapped[-1])
    return wrapped


@pytest.mark.parametrize("name", LINEAR)
def test_hooks_run_and_count(name: str) -> None:
    layer, x, seen = make_layer(), torch.randn(2, 12, HIDDEN), []
    before = layer(x)

    def double(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        seen.append(tuple(out.shape))
        return out * 2

    getattr(layer, name).register_forward_hook(double)
    assert not torch.equal(layer(x), before)
    assert len(seen) == 1 and seen[0][:2] == (2, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_rank_adapters_learn(dtype: torch.dtype) -> None:
    layer, x = make_layer(dtype=dtype), torch.randn(2, 12, HIDDEN, dtype=dtype)
    before = layer(x)
    adapters = wrap(layer, LINEAR)
    assert torch.equal(layer(x), before)
    layer(x).square().sum().backward()
    for name, adapter in zip(LINEAR, adapters, strict=True):
        assert adapter.up.weight.grad is not None and adapter.up.weight.grad.abs().amax() > 0, name
        assert adapter.base.weight.grad is None
        with torch.no_grad():
            adapter.up.weight.normal_(0.0, 0.5)
        assert not torch.equal(layer(x), before), name
        with torch.no_grad():
            adapter.up.weight.zero_()


def test_adapted_layers_run_under_autocast_and_decode() -> None:
    layer, x = make_layer(), torch.randn(2, 12, HIDDEN)
    for adapter in wrap(layer, LINEAR):
        nn.init.normal_(adapter.up.weight, std=0.3)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert layer.key_scores(x).dtype == torch.float32
        assert torch.isfinite(layer(x)).all()
    with torch.no_grad():
        cache = layer.make_cache(2)
        outs = [layer(x[:, t : t + 1], cache=cache) for t in range(12)]
        torch.testing.assert_close(torch.cat(outs, 1), layer(x), rtol=0, atol=1e-5)


def test_dt_proj_computes_in_float32() -> None:
    """The scores of a bfloat16 layer are those of its float32 twin, on the same values."""
    half = make_layer(dtype=torch.bfloat16)
    twin, value = copy.deepcopy(half).float(), torch.randn(2, 50, KV_HEADS * 8).bfloat16()
    assert torch.equal(half.dt_proj(value), twin.dt_proj(value.float()))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(twin.dt_proj(value), twin.dt_proj(value.float()))
    assert make_layer(dtype=torch.float64).dt_proj(value).dtype == torch.float64


def test_dynamic_quantization() -> None:
    layer, x = make_layer(), torch.randn(2, 12, HIDDEN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that the function will move
        quantized = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8)
    assert type(quantized.v_proj).__module__ != nn.Linear.__module__
    with torch.no_grad():
        out, cache = quantized(x), quantized.make_cache(2)
        want = layer(x)
        assert (out - want).norm() < 0.1 * want.norm()
        assert cache.k.dtype == torch.float32
        assert torch.isfinite(quantized(x, cache=cache)).all()


@needs_2_9("has no fully_shard for the CPU")
def test_sharded_by_linear_layer() -> None:
    """FSDP2 over two processes, each linear layer a unit of its own: see the script."""
    script = Path(__file__).with_name("sharded_layer.py")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Older releases of torch print lines of their own, and those of two ranks may be mixed up.
    assert done.stdout.count("equal") == 2
