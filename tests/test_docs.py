"""What the documentation says holds: examples run, named files, links and sessions exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES += sorted(ROOT.glob("packages/*/README.md"))
# Where a path in the text may start.
BASES = [ROOT, ROOT / "packages/dmattn-kernels", ROOT / "packages/dmattn/src"]
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|txt|yml|toml|h|hpp|cpp|cu|cuh))`")
MADE_BY_RUNNING = ("build/", "runs/", "dist/", "packages/dmattn-kernels/tests/gpu-report.json")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        found += [(f"{name(page)}-{i}", b) for i, b in enumerate(blocks)]
    return [(label, block) for label, block in found if "dmattn_kernels" not in block]


@pytest.mark.parametrize("block", [pytest.param(b, id=label) for label, b in code_blocks()])
def test_example_runs(block: str) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    try:
        exec(compile(block, "example", "exec"), {"__name__": "example"})
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_exist(page: Path) -> None:
    named = {n for n in PATH.findall(page.read_text()) if not n.startswith(MADE_BY_RUNNING)}
    files = {n for n in named if "." in n or n.endswith("/")}
    missing = [n for n in sorted(files) if not any(found(base, n) for base in BASES)]
    assert not missing, f"{name(page)} names files that are not there: {missing}"


def found(base: Path, path: str) -> bool:
    return (base / path).exists() or ("/" not in path and any(base.rglob(path)))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)", page.read_text())
    missing = [link for link in links if link and not (page.parent / link).exists()]
    assert not missing, f"{name(page)} links to files that are not there: {missing}"


@pytest.fixture(scope="module")
def sessions() -> set[str]:
    pytest.importorskip("nox")
    command = [sys.executable, "-m", "nox", "--list", "--noxfile", str(ROOT / "noxfile.py")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # With an interpreter of its own, a session is listed as name-/path/of/the/interpreter.
    return set(re.findall(r"^[-*] (\S+?)(?:-/\S+)?(?:\s|$)", listing, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_sessions_exist(page: Path, sessions: set[str]) -> None:
    calls = re.findall(r"\./dev ((?:[a-z][\w.-]* ?)+)", page.read_text())
    missing = {word for call in calls for word in call.split()} - sessions
    assert not missing, f"{name(page)} names sessions that noxfile.py does not have: {missing}"
