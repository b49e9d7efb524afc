"""Processes of one machine as the ranks of a gloo group, for scripts that tests run.

A script starts them by `start`, after it has imported everything and computed nothing: they are
forked from it. Such a process ends without finalizing its interpreter, unlike one that
`torch.multiprocessing.spawn` starts. That matters: a thread of gloo that releases a tensor while
the interpreter is finalized aborts the process (pytorch/pytorch issue 190489), although all went
well.
"""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


def join(rank: int, world: int, folder: Path) -> None:
    """Join the group through a file in `folder`, in which each group size has a file of its own."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)


def start(target: Callable[[int, int, Path], None], world: int, folder: Path) -> list[int | None]:
    """Run `target(rank, world, folder)` in `world` processes, and return their exit codes.

    The processes are waited for in turn, up to 300 s each, and then killed.
    """
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=target, args=(rank, world, folder)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in ranks]
