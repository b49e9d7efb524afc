"""Checks that torch.compile has made CUDA graphs, and that they are launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config


@contextmanager
def only_cuda_graphs() -> Iterator[None]:
    """Fails on a graph break, on a recompilation, and if a CUDA graph could not be made."""
    torch.compiler.reset()
    counters.clear()
    with ExitStack() as settings:
        settings.enter_context(torch._dynamo.config.patch(error_on_recompile=True))
        if hasattr(inductor_config.triton, "cudagraph_or_error"):
            settings.enter_context(inductor_config.patch({"triton.cudagraph_or_error": True}))
        yield
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert not counters["inductor"]["cudagraph_skips"]


def graph_launches(call: Callable[[], Any]) -> int:
    """How many CUDA graphs a call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(e.count for e in seen.key_averages() if "cudaGraphLaunch" in e.key)
