"""Two processes train a layer whose linear layers are each sharded for themselves (FSDP2, gloo).

Run by `test_modules_adapters.py`. Prints "equal" once per process if output and gradients are those
of the plain layer. A script of its own, so that the processes are forked from one that has imported
everything and computed nothing.
"""

import copy
import multiprocessing
import os
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dmattn import DynamicMaskAttention

WORLD = 2


def train(rank: int, port: int) -> None:
    """One step, next to the same step of the plain layer."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    plain, x = DynamicMaskAttention(32, 4, 2, window_size=5), torch.randn(2, 12, 32)
    nn.init.normal_(plain.A)
    layer, mesh = copy.deepcopy(plain), init_device_mesh("cpu", (WORLD,))
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


def main() -> int:
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=train, args=(rank, port)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
