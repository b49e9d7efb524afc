"""The ranks that train together, each on a stretch of every context."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    """A process group whose ranks hold equal stretches of each sequence, in order."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def own(self, tokens: Tensor) -> Tensor:
        """This rank's stretch of (B, S) tokens."""
        return tokens.chunk(self.size, 1)[self.rank]

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor over the ranks."""
        value = value.clone()
        dist.all_reduce(value, group=self.group)
        return value / self.size

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its mean over the ranks, all of which hold all weights."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        means = self.mean(torch.cat([grad.flatten() for grad in grads]))
        parts = torch.split(means, [grad.numel() for grad in grads])
        for grad, mean in zip(grads, parts, strict=True):
            grad.copy_(mean.view_as(grad))


def join_ranks(on_gpu: bool) -> Ranks:
    """Form a group with the other processes that torchrun has started."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(
            "--context-parallel: wanted to be started by torchrun, such as\n"
            "    torchrun --nproc-per-node 2 examples/train_bytes_lm.py --context-parallel"
        )
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    group = dist.group.WORLD
    assert group is not None
    return Ranks(group)
