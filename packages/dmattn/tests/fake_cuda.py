"""A GPU that does not exist: fake tensors on CUDA, for code that a compiler traces.

Fake tensors have a shape, a dtype and a device, but no values. Torch makes them on any device, also
on one that the machine lacks, and torch.compile traces code with them as with real tensors. So a
graph break that only tensors on CUDA lead to is found without a GPU, and so is a read of values by
the host, which fake tensors refuse.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from dmattn.backends.cuda import CudaBackend, kernels

HAS_GPU = torch.cuda.is_available()


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Within this context tensors are fake, and CUDA is a Hopper GPU that the kernels serve.

    What Dynamo would meet on a GPU is left as it is: a function of torch.cuda that it cannot trace
    is still one. So the functions that ask torch for the GPU are replaced by some at which it
    breaks the graph, as those would.
    """
    with pytest.MonkeyPatch.context() as patch, ExitStack() as contexts:
        patch.setattr(kernels, "unserved", _answer_none)
        patch.setattr(kernels, "checked_devices", set())
        patch.setattr(kernels, "has_kernels_of_hopper", lambda device: True)
        patch.setattr(CudaBackend, "unavailable", _answer_none)
        if not HAS_GPU:
            # A torch for CUDA has functions of its own in the place of the stub's.
            stub = cuda_stub() if torch.version.cuda is None and sys.platform == "linux" else None
            if stub is None:
                pytest.skip("wanted a torch without CUDA, on Linux, and a C++ compiler, or a GPU")
            stub.install()
            contexts.callback(stub.uninstall)
            # Otherwise a thread would serve each GPU, of which torch has counted none.
            contexts.enter_context(torch.autograd.set_multithreading_enabled(False))
            patch.setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)
            patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        contexts.enter_context(FakeTensorMode())
        yield


def _answer_none(_: Any) -> None:
    """`kernels.unserved` and `CudaBackend.unavailable` where kernels serve the GPU."""
    torch._dynamo.graph_break()


@functools.cache
def cuda_stub() -> ctypes.CDLL | None:
    """The library made of fake_cuda.cpp; None without a C++ compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return None
    torch_path, source = Path(torch.__file__).parent, Path(__file__).with_suffix(".cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fake_cuda.so"
        command = [compiler, "-std=c++20", "-shared", "-fPIC", "-w", source, "-o", library]
        command += [f"-I{torch_path}/include", f"-L{torch_path}/lib", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))


class Graphs:
    """A compiler for torch.compile that counts graphs and runs them as they are.

    It refuses tensors that are not on CUDA: with them, torch would make no CUDA graph of the code,
    and copy in every call.
    """

    def __init__(self) -> None:
        self.forward = 0
        self.backward = 0

    def compiler(self) -> Any:
        """The backend for torch.compile."""
        return aot_autograd(
            fw_compiler=lambda module, _: self._take(module, "forward"),
            bw_compiler=lambda module, _: self._take(module, "backward"),
        )

    def _take(self, module: torch.fx.GraphModule, name: str) -> Any:
        setattr(self, name, getattr(self, name) + 1)
        for node in module.graph.nodes:
            for t in pytree.tree_leaves(node.meta.get("val")):
                assert not isinstance(t, Tensor) or t.is_cuda, (
                    f"{node}: {node.target} on {t.device}"
                )
        return make_boxed_func(module.forward)


def check_graphs(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    backward: bool = False,
    most: int = 1,
) -> None:
    """Compiled, the function takes at most `most` graphs for these calls, and never a break.

    Sizes that differ between the first two calls are marked as dynamic, so that one graph has to
    serve all calls. Torch makes that graph by itself once it has seen both sizes.

    Args:
        function: what to compile; it returns at least one tensor.
        calls: the arguments of each call, fake tensors on CUDA.
        backward: whether to compute the gradients of all floating arguments as well.
        most: how many graphs there may be for all calls, and as many for their backward. If more
            than one, no sizes are marked.
    """
    if most == 1 and len(calls) > 1:
        for a, b in zip(*(pytree.tree_leaves(given) for given in calls[:2]), strict=True):
            if isinstance(a, Tensor):
                for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)):
                    if n != m:
                        torch._dynamo.mark_dynamic(a, i)
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(function, fullgraph=True, backend=graphs.compiler())
    for given in calls:
        leaves = [t for t in pytree.tree_leaves(given) if isinstance(t, Tensor)]
        leaves = [t for t in leaves if backward and t.is_floating_point()]
        for t in leaves:
            t.requires_grad_()
        found = [t for t in pytree.tree_leaves(compiled(*given)) if isinstance(t, Tensor)]
        assert found and all(t.is_cuda for t in found)
        if backward:
            loss = torch.stack([t.float().sum() for t in found if t.requires_grad]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            assert all(t.grad is not None and t.grad.is_cuda for t in leaves)
    assert 1 <= graphs.forward <= most
    assert not backward or 1 <= graphs.backward <= most
