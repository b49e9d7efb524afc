"""The launches that compute-sanitizer watches run every kernel in the library."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gpu.device import FAMILY_VARIABLE
from gpu.sanitize import ONE_THREAD
from toolkit import find_tool

pytestmark = pytest.mark.slow

# Kernels that no operation of this ABI version launches.
NOT_REACHABLE = (
    "fill_zero_kernel",  # gradients with gaps: torch's are contiguous and cleared by a memset
)

# Among so many processes the launches of each family are shared out. In one process they took more
# than four minutes, and beside many other tests longer than a test may take.
PARTS = 4

PROGRAM = """
import json, sys
import torch
from torch.profiler import ProfilerActivity, profile
from gpu.raw_cuda import Gpu
from gpu.sanitizer_cases import all_launches, run_launch
torch.zeros(1, device="cuda")
part, parts = map(int, sys.argv[1:])
gpu, wrong = Gpu(), []
with profile(activities=[ProfilerActivity.CUDA]) as seen:
    for dtype, head_dim, launch in all_launches()[part::parts]:
        problems = run_launch(gpu, dtype, head_dim, launch, 0xFF)
        wrong += [f"{dtype} {head_dim} {launch.name}: {problem}" for problem in problems]
        gpu.release()
json.dump({"names": sorted({event.name for event in seen.events()}), "wrong": wrong}, sys.stdout)
"""


def _launched(family: str, part: int) -> set[str]:
    """Demangled names of the kernels that a part of the sanitizer's launches run."""
    env = {**os.environ, **ONE_THREAD, FAMILY_VARIABLE: family}
    folders = [str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(folders)
    command = [sys.executable, "-c", PROGRAM, str(part), str(PARTS)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert not found["wrong"], "\n".join(found["wrong"])
    return {_plain(name) for name in found["names"] if "dmattn::" in name}


def _plain(name: str) -> str:
    """A name without return type, parameters and spaces, which demanglers write differently."""
    without_parameters = re.sub(r"\([^()]*\)$", "", name.replace("(anonymous namespace)", "{anon}"))
    return re.sub(r"\s+", "", without_parameters.removeprefix("void "))


def _demangle(name: str) -> str:
    demangler = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangler.restype = ctypes.c_char_p
    status = ctypes.c_int()
    found = demangler(name.encode(), None, None, ctypes.byref(status))
    return name if found is None else str(found.decode())


def _held(library: Path) -> set[str]:
    """Demangled names of the kernels that the library holds for this chip."""
    cuobjdump = find_tool("cuobjdump")
    if cuobjdump is None:
        pytest.skip("needs cuobjdump")
    major, minor = torch.cuda.get_device_capability()
    command = [cuobjdump, "--dump-resource-usage", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    architecture, names = "", set()
    for line in (done.stdout + done.stderr).splitlines():
        if found := re.match(r"arch = (\S+)", line.strip()):
            architecture = found[1]
        elif architecture.removesuffix("a") == f"sm_{major}{minor}" and (
            found := re.search(r"Function (\S+):", line)
        ):
            names.add(_plain(_demangle(found[1])))
    return names


def test_every_kernel_is_launched() -> None:
    kernels = pytest.importorskip("dmattn_kernels")
    held = {name for name in _held(kernels.library_path()) if "dmattn::" in name}
    if not held:
        pytest.skip("the library holds no machine code for this chip")
    parts = list(itertools.product(("sm90", "sm80", "sm89"), range(PARTS)))
    with ThreadPoolExecutor(len(parts)) as pool:
        launched = set().union(*pool.map(_launched, *zip(*parts, strict=True)))
    assert launched, "the profiler saw no kernel"
    missing = {
        name for name in held - launched if not any(pattern in name for pattern in NOT_REACHABLE)
    }
    assert not missing, f"{len(missing)} of {len(held)} never ran:\n" + "\n".join(sorted(missing))
