"""The library's PTX, compiled by the driver for a chip that the library has no machine code for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.device import FAMILY_VARIABLE

pytestmark = pytest.mark.slow

# Names the folder of another build: a dmattn_kernels package with PTX and without machine code for
# this chip.
LIBRARY_VARIABLE = "DMATTN_PTX_LIBRARY"

PROGRAM = """
import sys
import torch
import dmattn_kernels
from attention.cases import Case
from attention.driver import check
major, minor = torch.cuda.get_device_capability()
held = dmattn_kernels.architectures()
if f"sm_{major}{minor}" in held or "compute_89" not in held:
    print("this library holds", *held)
    sys.exit(5)
print(dmattn_kernels.library_path(), *held)
assert dmattn_kernels.device_architecture(0) == sys.argv[1]
check(Case(130, 150, causal=True, bias="bk1k"))
check(Case(130, 150, head_dim=128, mask="bk1k", bias="bk1k", wants=""))
"""


@pytest.mark.parametrize("tiles", ["sm80", "sm89"])
def test_ptx_path(tiles: str) -> None:
    """The PTX has both the tiles for chips with much shared memory and those for other chips."""
    env = os.environ | {FAMILY_VARIABLE: tiles}
    # The driver must be allowed to compile PTX.
    for name in ("DMATTN_TEST_TARGET", "CUDA_DISABLE_PTX_JIT"):
        env.pop(name, None)
    folders = [str(Path(__file__).parents[4] / "tests")]
    if LIBRARY_VARIABLE in env:
        folders.insert(0, env[LIBRARY_VARIABLE])
    env["PYTHONPATH"] = os.pathsep.join([*folders, env.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", PROGRAM, tiles]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    if done.returncode == 5:
        pytest.skip(f"{done.stdout.strip()}; set {LIBRARY_VARIABLE} to a build with PTX only")
    assert done.returncode == 0, done.stdout + done.stderr
