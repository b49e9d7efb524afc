"""Processes of one machine as the ranks of a gloo group, for scripts that tests run.

A script starts them by `start`, after it has imported everything and computed nothing: they are
forked from it. Such a process ends without taking its interpreter apart, unlike one that
`torch.multiprocessing.spawn` starts. That matters: a thread of gloo that drops a tensor while the
interpreter is taken apart aborts the process (pytorch/pytorch issue 190489), after all went well.
"""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


def join(rank: int, world: int, folder: Path) -> None:
    """Meet the other ranks through a file in `folder`, which holds one for each size of a group."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)


def start(target: Callable[[int, int, Path], None], world: int, folder: Path) -> list[int | None]:
    """`target(rank, world, folder)` in `world` processes; their exit codes, at most 300 s later."""
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
