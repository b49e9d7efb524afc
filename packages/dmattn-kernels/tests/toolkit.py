"""Programs of the CUDA toolkit."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


def find_tool(name: str) -> str | None:
    """Where a program is: on PATH, among the packages from PyPI, or where toolkits live."""
    roots = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    roots += [*Path(sysconfig.get_path("purelib")).glob("nvidia/cu*"), Path("/usr/local/cuda")]
    folders = [root / folder for root in roots for folder in ("bin", "compute-sanitizer")]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))
