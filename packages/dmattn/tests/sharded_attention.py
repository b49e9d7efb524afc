"""Attention on DTensors over two processes, split by batch or by heads, against plain tensors.

Prints "equal" for each way of splitting, with all keys and with a window. Run by
test_operators.py.
"""

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from dmattn import flash_dmattn_func

WORLD = 2


def work(rank: int, world: int, folder: Path) -> None:
    ranks.join(rank, world, folder)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    bias, mask, dout = torch.randn(1, 2, 1, 7), torch.rand(2, 1, 1, 7) < 0.8, torch.randn_like(q)
    sinks = torch.randn(4)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, bias, sinks)]

    def split(t: Tensor, dim: int) -> DTensor:
        return distribute_tensor(t, mesh, [Shard(dim) if t.shape[dim] > 1 else Replicate()])

    for window, dim in itertools.product((None, 3), (0, 2)):
        options: dict[str, Any] = {"is_causal": True, "window_size": window}
        out = flash_dmattn_func(*leaves[:3], mask, leaves[3], sinks=leaves[4], **options)
        whole = [out, *torch.autograd.grad(out, leaves, dout)]
        operand_dim = min(dim, 1)
        parts = [split(t, dim).requires_grad_() for t in (q, k, v)]
        bias_part = split(bias, operand_dim).requires_grad_()
        placed = [Shard(0) if dim == 2 else Replicate()]
        sink_part = distribute_tensor(sinks, mesh, placed).requires_grad_()
        own_mask = split(mask, operand_dim)
        out = flash_dmattn_func(*parts, own_mask, bias_part, sinks=sink_part, **options)
        grads = torch.autograd.grad(out, [*parts, bias_part, sink_part], split(dout, dim))
        for t in (out, *grads[:3]):
            assert isinstance(t, DTensor) and t.placements == (Shard(dim),), t.placements
        for found, wanted in zip((out, *grads), whole, strict=True):
            assert isinstance(found, DTensor)
            torch.testing.assert_close(found.full_tensor(), wanted)
        if rank == 0:
            print("equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        sys.exit(any(ranks.start(work, WORLD, Path(place))))
