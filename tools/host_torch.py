"""Finds the torch for CUDA that a machine already has, so that no session downloads another one.

On a GPU machine torch may belong to the Python that nox runs on, or to an environment that is
active beside it (venv, virtualenv, uv, conda). The sessions that use a GPU run in environments of
their own. This module looks for that torch and makes it visible in those environments. It changes
nothing in the environment in which it finds torch, and does not depend on nox.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

OLDEST_PYTHON = (3, 11)  # of dmattn, as its pyproject.toml says
OLDEST_TORCH = (2, 6)
PTH = "dmattn_host_torch.pth"

# A program for each interpreter that is looked at, of any version of Python. It does not import
# torch, which would take seconds: torch/version.py says for which CUDA torch was made.
PROBE = """
import importlib.util, json, os, runpy, sys
sys.path = [path for path in sys.path if path]
spec = importlib.util.find_spec("torch")
facts = {"python": sys.executable, "version": list(sys.version_info[:2])}
facts.update(prefix=sys.prefix, base_prefix=sys.base_prefix, torch="", cuda="", folder="")
if spec is not None and spec.origin:
    facts["folder"] = os.path.dirname(spec.origin)
    built = runpy.run_path(os.path.join(facts["folder"], "version.py"))
    facts.update(torch=str(built["__version__"]), cuda=str(built.get("cuda") or ""))
names = ("site-packages", "dist-packages")
facts["packages"] = [path for path in sys.path if os.path.basename(path) in names]
print(json.dumps(facts))
"""


class Environment(NamedTuple):
    """What a Python interpreter says of itself and of the torch that it sees."""

    python: str  # path of the interpreter
    version: tuple[int, int]
    prefix: str
    base_prefix: str  # of the installation that a virtual environment was made from
    packages: tuple[str, ...]  # its site-packages folders, the first one first
    torch: str  # version, empty without torch
    cuda: str  # CUDA release that torch was made for, empty without CUDA
    folder: str  # of the torch package


class Found(NamedTuple):
    """An environment with a torch for CUDA, and how it came to be looked at."""

    environment: Environment
    origin: str


def examine(python: str) -> Environment | None:
    """What this interpreter says of itself; None where it cannot be run."""
    try:
        result = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60
        )
        facts = json.loads(result.stdout)
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
        return None
    facts["version"] = tuple(facts["version"])
    facts["packages"] = tuple(facts["packages"])
    return Environment(**facts)


def candidates(
    environ: Mapping[str, str], base_python: str, which: Callable[[str], str | None] = shutil.which
) -> list[tuple[str, str]]:
    """(origin, interpreter) of every place to look at, in order of preference, each place once.

    An environment that the user named or activated comes before the Python that nox runs on, and
    that Python comes before what is on the PATH.
    """
    named: list[tuple[str, str | None]] = [("PYTHON", environ.get("PYTHON"))]
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        root = environ.get(variable)
        named.append((variable, os.path.join(root, "bin", "python") if root else None))
    named.append(("the Python that nox runs on", base_python))
    named += [("the PATH", which(name)) for name in ("python3", "python")]
    found: list[tuple[str, str]] = []
    seen = set()
    for origin, name in named:
        python = name if name is None or os.path.isabs(name) else which(name)
        # Interpreters of virtual environments are links to one and the same file, so the folder
        # that holds the link is what tells them apart.
        place = None if python is None else os.path.realpath(os.path.dirname(python))
        if python is not None and place not in seen and os.path.exists(python):
            seen.add(place)
            found.append((origin, python))
    return found


def why_not(environment: Environment | None) -> str | None:
    """Why this environment's torch cannot serve, None if it can."""
    if environment is None:
        return "it cannot be run"
    if not environment.torch:
        return "no torch"
    if not environment.cuda:
        return f"torch {environment.torch} is made without CUDA"
    if release(environment.torch) < OLDEST_TORCH:
        return f"torch {environment.torch} is older than {dotted(OLDEST_TORCH)}"
    if environment.version < OLDEST_PYTHON:
        version = dotted(environment.version)
        return f"Python {version} is older than {dotted(OLDEST_PYTHON)}"
    return None


def find_torch(
    places: Sequence[tuple[str, str]],
    examine: Callable[[str], Environment | None] = examine,
) -> tuple[Found | None, list[str]]:
    """The first of `places` whose torch is made for CUDA, and why those before it cannot serve."""
    passed_over: list[str] = []
    for origin, python in places:
        environment = examine(python)
        reason = why_not(environment)
        if environment is not None and reason is None:
            return Found(environment, origin), passed_over
        passed_over.append(f"{python} ({origin}): {reason}")
    return None, passed_over


def interpreter_for(found: Found | None, base_prefix: str) -> str | None:
    """The interpreter to make sessions with so that they can use this torch; None for nox's own.

    Compiled packages work with the Python installation that they were made for only. So if the
    environment was made from another installation than the one that nox runs on, sessions have to
    be made from that other one too.
    """
    if found is None or os.path.realpath(found.environment.base_prefix) == os.path.realpath(
        base_prefix
    ):
        return None
    return found.environment.python


def show_packages(found: Found | None, site_packages: Path) -> None:
    """Make the packages of the environment that was found importable in a session, by a .pth file.

    They come after the session's own packages in sys.path. The file is written anew in each run,
    since another environment may be active than in the run before.
    """
    pth = site_packages / PTH
    if found is None or found.environment.prefix == found.environment.base_prefix:
        # An installation's own packages are visible already, by --system-site-packages.
        pth.unlink(missing_ok=True)
        return
    # addsitedir also processes the .pth files there, which editable installations depend on.
    lines = [f"import site; site.addsitedir({path!r})" for path in found.environment.packages]
    pth.write_text("\n".join(lines) + "\n")


def release(version: str) -> tuple[int, ...]:
    """(2, 9) for "2.9.1+cu128"."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
