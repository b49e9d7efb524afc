"""Two processes train a layer whose linear layers are each sharded separately (FSDP2, gloo).

Run by `test_modules_adapters.py`. Prints "equal" once per process if output and gradients are those
of the plain layer.
"""

import copy
import sys
import tempfile
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dmattn import DynamicMaskAttention

WORLD = 2


def train(rank: int, world: int, folder: Path) -> None:
    """One training step, compared with the same step of the plain layer."""
    ranks.join(rank, world, folder)
    torch.manual_seed(0)
    plain, x = DynamicMaskAttention(32, 4, 2, window_size=5), torch.randn(2, 12, 32)
    nn.init.normal_(plain.A)
    layer, mesh = copy.deepcopy(plain), init_device_mesh("cpu", (world,))
    for module in list(layer.modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    fully_shard(layer, mesh=mesh)
    out, want = layer(x), plain(x)
    out.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(out, want)
    for (name, got), expected in zip(layer.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(got.grad, DTensor), name
        torch.testing.assert_close(got.grad.full_tensor(), expected.grad)
    # One write: the processes share a pipe, and their lines must not mix.
    sys.stdout.write("equal\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        sys.exit(any(ranks.start(train, WORLD, Path(place))))
