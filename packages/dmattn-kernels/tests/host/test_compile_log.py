"""What CMake puts in front of the CUDA compiler: cmake/compile_with_log.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WRAPPER = Path(__file__).parents[2] / "cmake" / "compile_with_log.py"
REPORT = "ptxas info    : Used 168 registers, used 16 barriers"
SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources in function 'kernel'"
)
WARNING = SERIALIZED.replace("ptxas info    ", "ptxas warning ")


@pytest.mark.parametrize("line, status", [(REPORT, 0), (SERIALIZED, 1), (WARNING, 1)])
def test_serialized_matrix_instructions_fail(tmp_path: Path, line: str, status: int) -> None:
    """The compiler itself only prints a message about them."""
    output = tmp_path / "unit.cu.o"
    program = "import pathlib, sys; print(sys.argv[1]); pathlib.Path(sys.argv[-1]).touch()"
    compiler = [sys.executable, "-c", program, line, "-o", str(output)]
    done = subprocess.run(
        [sys.executable, str(WRAPPER), *compiler], capture_output=True, text=True, check=False
    )
    assert done.returncode == status and output.exists() == (status == 0)
    kept = (tmp_path / "unit.cu.o.ptxas").read_text()
    assert kept == ("" if line == WARNING else line) + "\n"
    assert done.stderr.count(line) == status
