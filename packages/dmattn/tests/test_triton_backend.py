"""The triton backend: where it can run, what it refuses, and that its kernels compile for GPUs.

Its results are tested by the attention suite, which runs it in triton's interpreter.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmattn import explain, flash_dmattn_func
from dmattn.backends import registry
from dmattn.backends import triton as backend
from dmattn.backends.base import Backend
from dmattn.backends.cuda import kernels as compiled
from dmattn.backends.triton.tiles import Tile, padded_head_dim, tiles_for
from dmattn.key_lists import Selection
from dmattn.problem import Needs, Problem, Results

TRITON = registry.named("triton")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def problem(dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(*(torch.zeros(1, 4, 2, 8, dtype=dtype) for _ in range(3)))


def test_importing_dmattn_imports_no_kernels() -> None:
    code = (
        # In older torch, the import of FlexAttention imports triton.
        "import sys, torch, torch.nn.attention.flex_attention; "
        "before = 'triton' in sys.modules; import dmattn; "
        "dmattn.get_available_backends(); assert ('triton' in sys.modules) == before; "
        "assert not any(name.startswith('dmattn.backends.triton.kernels') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert TRITON.unavailable() == "triton is not installed; pip install triton"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    reason = TRITON.unavailable()
    assert reason is not None and "torch sees no GPU, and TRITON_INTERPRET=1" in reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert TRITON.unavailable() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backend, "is_interpreted", lambda: True)
    assert TRITON.unavailable() is None


def test_on_the_cpu_only_in_the_interpreter_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem()
    with pytest.raises(ValueError, match="query: got device cpu, wanted a GPU, or TRITON_INTERPR"):
        flash_dmattn_func(*given[:3], backend="triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(backend, "is_interpreted", lambda: True)
    assert registry.choose(given).name == "cpu"
    assert registry.choose(given, "triton") is TRITON
    text = explain(*given[:3])
    assert text.startswith("backend: cpu\n")
    assert "not triton: serves cpu only when asked for by name" in text


def test_dtypes_that_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "is_interpreted", lambda: True)
    assert not TRITON.unsupported(problem(torch.bfloat16))
    with pytest.raises(TypeError, match=r"query: got dtype torch\.float64, wanted "):
        flash_dmattn_func(*problem(torch.float64)[:3], backend="triton")
    monkeypatch.setattr(backend, "is_old_nvidia", lambda device: True)
    assert not TRITON.unsupported(problem(torch.float16))
    (reason,) = TRITON.unsupported(problem(torch.bfloat16))
    assert isinstance(reason, TypeError)
    assert "query: got dtype torch.bfloat16, wanted torch.float16 or torch.float32" in str(reason)


def test_it_says_what_is_slow() -> None:
    bias = torch.zeros(1, 1, 4, 4, requires_grad=True)
    notes = TRITON.slow_paths(problem()._replace(bias=bias))
    assert ["float32" in notes[0], "attn_bias" in notes[1], len(notes)] == [True, True, 2]
    assert not TRITON.slow_paths(problem(torch.float16)._replace(bias=bias.detach()))
    lists = Selection(*[torch.zeros(1, 1, 1, 1, dtype=torch.int32)] * 4)
    listed = problem(torch.float16)._replace(key_lists=lists, is_causal=True, deterministic=True)
    assert "launch for every 128 rows" in TRITON.slow_paths(listed)[0]


def test_compiled_kernels_leave_other_vendors_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "MI210")
    monkeypatch.setattr(compiled, "checked_devices", set())
    reason = registry.named("cuda").unavailable_on(torch.device("cuda", 0))
    assert reason == "query: got a tensor on cuda:0 (MI210), wanted an NVIDIA GPU"


def test_a_row_that_cannot_run_on_the_device_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Absent(Backend):
        name = "absent"
        devices = ("cpu",)

        def unavailable(self) -> str | None:
            return "it is somewhere else"

        def unsupported(self, problem: Problem) -> list[Exception]:
            return []

        def forward(self, problem: Problem, for_backward: bool = True) -> Results:
            raise AssertionError("a backend that is not available was called")

        backward = forward

    monkeypatch.setattr(registry, "BACKENDS", [Absent(), registry.named("cpu")])
    assert registry.choose(problem()).name == "cpu"
    monkeypatch.setattr(registry, "BACKENDS", [Absent()])
    with pytest.raises(RuntimeError, match="it is somewhere else"):
        registry.choose(problem())


# A script: keys that a key mask or a selection leaves out are not visited, so they may be anything.
UNVISITED = """
import torch
from dmattn import flash_dmattn_func
torch.manual_seed(0)
q, k, v = (torch.randn(1, rows, 2, 16) for rows in (140, 200, 200))
score = torch.randn(1, 2, 1, 200)
kept = torch.rand(1, 2, 1, 200) < 0.3
low = score.where(kept, float("nan"))
for keys in (k, v):
    keys[~kept[:, :, 0].transpose(1, 2)] = float("nan")
for options in ({"attn_mask": kept}, {"window_size": 20}):
    results = []
    for tensors in ((q, k, v, low), tuple(t.nan_to_num(-3.0) for t in (q, k, v))):
        leaves = [t.clone().requires_grad_() for t in (*tensors, low)[:4]]
        out = flash_dmattn_func(
            *leaves[:3], attn_bias=leaves[3], is_causal=True, backend="triton", **options
        )
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results)), options
    assert not any(t.isnan().any() for t in results[0])
"""


@needs_triton
def test_the_import_of_triton_decides_about_the_interpreter() -> None:
    code = (
        "import os, triton; from dmattn.backends.triton.tiles import is_interpreted; "
        "before = is_interpreted(); os.environ['TRITON_INTERPRET'] = {}; "
        "print(before, is_interpreted())"
    )
    for value in "01":
        done = subprocess.run(
            [sys.executable, "-c", code.format(repr("10"[int(value)]))],
            env={**os.environ, "TRITON_INTERPRET": value},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == [str(value == "1")] * 2


@needs_triton
def test_keys_that_no_row_keeps_are_not_visited() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", UNVISITED], check=True, env=environment)


# --- compiling, which needs no GPU ----------------------------------------------------------------

# Shared memory of a block: the least among the GPUs that are served.
SHARED_BYTES = 64 * 1024
HOPPER_BYTES = 227 * 1024
# A chip, the dtype of q, k and v, head_dim, a kernel, whether keys come from lists.
COMPILED = [
    (75, "fp16", 64, "forward", False),
    (75, "fp32", 64, "row_gradients", False),
    (80, "bf16", 64, "forward", True),
    (80, "bf16", 128, "key_gradients", True),
    (89, "fp16", 256, "row_gradients", False),
    (90, "bf16", 256, "key_gradients", False),
    (90, "fp16", 128, "bias_gradient", False),
    ("gfx90a", "fp16", 128, "forward", True),
    ("gfx90a", "bf16", 64, "key_gradients", False),
]
# The same, with the tiles for the shared memory of Hopper.
COMPILED_LARGE = [
    (90, "bf16", 128, "forward", False),
    (90, "bf16", 128, "key_gradients", True),
]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Launches:
    """Stands in for a kernel: each launch has to give all of its arguments, and no others."""

    def __init__(self, kernel: Any) -> None:
        self.arguments = set(kernel.arg_names)
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return self.launch

    def launch(self, **arguments: Any) -> None:
        assert set(arguments) - {"num_warps", "num_stages"} == self.arguments


@needs_triton
def test_launches_give_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter ignores arguments that a kernel does not have; on a GPU the launch fails."""
    from dmattn.backends.triton import attention
    from dmattn.backends.triton.kernels import backward, forward

    seen = {}
    for module, names in (
        (forward, ("forward",)),
        (backward, ("row_delta", "row_gradients", "key_gradients", "bias_gradient")),
    ):
        for name in names:
            seen[name] = Launches(getattr(module, name))
            monkeypatch.setattr(module, name, seen[name])
    lists = Selection(
        torch.zeros(1, 2, 300, dtype=torch.int32),
        torch.zeros(1, 2, 3, 128, dtype=torch.int32),
        *[torch.zeros(1, 2, 3, dtype=torch.int32)] * 2,
    )
    long = Problem(*(torch.zeros(1, 300, 2, 8) for _ in range(3)), is_causal=True)
    for given in (
        problem()._replace(bias=torch.zeros(1, 1, 4, 4), mask=torch.ones(1, 1, 1, 4).bool()),
        problem()._replace(bias=torch.zeros(1, 1, 4, 1)),
        long._replace(bias=torch.zeros(1, 1, 1, 300), key_lists=lists),
        long._replace(key_lists=lists, deterministic=True),
    ):
        results = attention.forward(given, True)
        needs = Needs(True, True, True, given.bias is not None)
        attention.backward(given, results, results.out, results.lse, needs)
    assert [len(kernel.grids) for kernel in seen.values()] == [4, 4, 4, 1 + 1 + 1 + 3, 1]


@needs_triton
@pytest.mark.parametrize("chip,dtype,head_dim,name,lists", COMPILED)
def test_kernels_compile(
    chip: int | str,
    dtype: str,
    head_dim: int,
    name: str,
    lists: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a mask or lists, and a bias whose gradient is wanted; their tiles fit every GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tile = getattr(tiles_for(DTYPES[dtype], head_dim, chip == 75), name)
    done = compiled_kernel(chip, dtype, head_dim, name, lists, tile)
    assert done.metadata.shared <= SHARED_BYTES


@needs_triton
@pytest.mark.parametrize("chip,dtype,head_dim,name,lists", COMPILED_LARGE)
def test_large_tiles(
    chip: int,
    dtype: str,
    head_dim: int,
    name: str,
    lists: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a mask, and with a bias by key beside lists: loads run ahead of the products."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    small = tiles_for(DTYPES[dtype], head_dim, False, HOPPER_BYTES, True)
    assert small == tiles_for(DTYPES[dtype], head_dim, False)
    tile = getattr(tiles_for(DTYPES[dtype], head_dim, False, HOPPER_BYTES, False), name)
    done = compiled_kernel(chip, dtype, head_dim, name, lists, tile, large=True)
    assert done.metadata.shared <= HOPPER_BYTES
    # A copy that runs ahead is waited for; a branch around the loads would prevent it.
    assert "async_wait" in done.asm["ttgir"] and "warp_group_dot" in done.asm["ttgir"]


def compiled_kernel(
    chip: int | str,
    dtype: str,
    head_dim: int,
    name: str,
    lists: bool,
    tile: Tile,
    large: bool = False,
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = "forward" if name == "forward" else "backward"
    kernel = getattr(importlib.import_module(f"dmattn.backends.triton.kernels.{module}"), name)
    is_amd = isinstance(chip, str)
    if is_amd:
        _skip_without_linker()
    names = kernel.arg_names
    signature, constants = _signature(names, dtype, head_dim, name, tile, lists, large)
    # Divisible by 16, as at a launch on aligned tensors. Otherwise no load is wide enough to run
    # ahead.
    even = [
        i
        for i, name in enumerate(names)
        if signature[name].startswith("*") or re.fullmatch(r"(q|k|v|dout)_[bmnh]", name)
    ]
    even = [i for i in even if large and names[i] not in constants]
    done = triton.compile(
        ASTSource(kernel, signature, constants, _divisible_by_16(even)),
        target=GPUTarget("hip" if is_amd else "cuda", chip, 64 if is_amd else 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    assert done.asm["hsaco" if is_amd else "cubin"]
    return done


def _skip_without_linker() -> None:
    """triton 3.2 links code for GPUs of AMD by a program of ROCm; newer triton needs none."""
    import triton
    from triton.backends.amd.compiler import HIPBackend

    if hasattr(HIPBackend, "path_to_rocm_lld"):
        try:
            HIPBackend.path_to_rocm_lld()
        except Exception as error:
            pytest.skip(f"triton {triton.__version__}: {error}")


def _divisible_by_16(arguments: list[int]) -> Any:
    """What triton's compiler takes to know that the arguments at these indices are."""
    from triton.backends import compiler

    if hasattr(compiler, "AttrsDescriptor"):  # triton 3.2, which belongs to torch 2.6
        return compiler.AttrsDescriptor.from_hints(dict.fromkeys(arguments, 16))
    return {(i,): [["tt.divisibility", 16]] for i in arguments}


def _signature(
    arguments: list[str],
    dtype: str,
    head_dim: int,
    kernel: str,
    tile: Tile,
    lists: bool,
    large: bool,
) -> tuple[dict[str, str], dict[str, Any]]:
    """Types of a kernel's arguments, and the values of those that are compiled in."""
    constants = {
        "D": head_dim,
        "CAUSAL": True,
        "SOFTCAP": not large,
        "BASE_2": large and not lists,
        "LISTS": 2 if lists else 0,
        "LIST_ROWS": 128,
        "BM": tile.rows,
        "BN": tile.keys,
        "BD": padded_head_dim(head_dim),
        "DBIAS_BY_HEAD": False,
        **dict.fromkeys(("q_d", "k_d", "v_d", "dout_d"), 1),
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k")),
        **dict.fromkeys(("keys", "rank", "full", "end") if not lists else ()),
        **dict.fromkeys(("mask", "mask_m", "bias_m") if lists or large else ()),
        **dict.fromkeys(("bias", "lse_rest", "dbias") if large and not lists else ()),
    }
    summed = "fp32" if lists else dtype
    types = {
        **dict.fromkeys(("q", "k", "v", "bias", "out", "dout", "dq"), f"*{dtype}"),
        **dict.fromkeys(("dk", "dv"), f"*{summed}"),
        **dict.fromkeys(("lse", "lse_rest", "delta"), "*fp32"),
        **dict.fromkeys(("keys", "rank", "full", "end"), "*i32"),
        "mask": "*i1",
        "dbias": f"*{dtype}" if kernel == "bias_gradient" else "*fp32",
        "scale": "fp32",
        "softcap": "fp32",
    }
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in arguments
    }
    return signature, {name: value for name, value in constants.items() if name in arguments}
