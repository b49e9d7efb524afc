"""What the documentation says holds: examples run, named files, links and sessions exist."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted(ROOT.glob("docs/**/*.md"))
PAGES += sorted(ROOT.glob("packages/*/README.md"))
TROUBLES = ROOT / "docs/troubleshooting.md"
# Pages whose code blocks continue those before them.
TOGETHER = [ROOT / "docs/tutorial.md", ROOT / "docs/serving.md"]
SOURCES = ROOT / "packages/dmattn/src/dmattn"
# Where a path in the text may start.
PACKAGES = ROOT / "packages"
BASES = [
    ROOT,
    PACKAGES / "dmattn-kernels",
    PACKAGES / "dmattn-kernels/include",
    PACKAGES / "dmattn/src",
]
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|txt|yml|toml|h|hpp|cpp|cu|cuh))`")
MADE_BY_RUNNING = ("build/", "runs/", "dist/", "packages/dmattn-kernels/tests/gpu-report.json")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        if page == TROUBLES:
            continue  # its blocks go together: test_troubleshooting runs them
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        if page in TOGETHER:
            blocks = ["\n".join(blocks)]
        found += [(f"{name(page)}-{i}", b) for i, b in enumerate(blocks)]
    return [(label, block) for label, block in found if "dmattn_kernels" not in block]


@pytest.mark.parametrize("block", [pytest.param(b, id=label) for label, b in code_blocks()])
def test_example_runs(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    module = types.ModuleType("example")
    # torch.compile imports the module of a function that it compiles, by name.
    monkeypatch.setitem(sys.modules, "example", module)
    try:
        exec(compile(block, "example", "exec"), vars(module))
    finally:
        torch.set_num_threads(threads)


NOTEBOOK = ROOT / "docs/first_steps.ipynb"


def test_notebook_runs() -> None:
    """Its cells run one after the other in a separate Python, since a kernel would need Jupyter."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program = "import matplotlib; matplotlib.use('Agg')\n\n" + "\n\n".join(code)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore::UserWarning", "-c", program]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=500
    )
    assert result.returncode == 0, result.stderr
    assert "questions answered right" in result.stdout


def test_notebook_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


# As much of the CUDA runtime as the C and C++ examples use, to check them without a toolkit.
CUDA_STUB = """
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
typedef struct CUstream_st* cudaStream_t;
int cudaMalloc(void** data, size_t bytes);
int cudaFree(void* data);
int cudaMallocAsync(void** data, size_t bytes, cudaStream_t stream);
int cudaFreeAsync(void* data, cudaStream_t stream);
int cudaStreamSynchronize(cudaStream_t stream);
#ifdef __cplusplus
}
#endif
"""


@pytest.mark.parametrize(
    "page,language,compiler",
    [("docs/kernels.md", "c", ["cc", "-std=c11"]), ("docs/cpp.md", "cpp", ["c++", "-std=c++17"])],
)
def test_c_examples_compile(page: str, language: str, compiler: list[str], tmp_path: Path) -> None:
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no {compiler[0]}")
    (tmp_path / "cuda_runtime_api.h").write_text(CUDA_STUB)
    blocks = re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    assert blocks
    for block in blocks:
        source = tmp_path / f"example.{language}"
        source.write_text(block)
        folders = [f"-I{tmp_path}", f"-I{ROOT / 'packages/dmattn-kernels/include'}"]
        command = [*compiler, "-Wall", "-Werror", "-fsyntax-only", *folders, str(source)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def test_measured_times_are_recorded_ones() -> None:
    """The times that the page on masks quotes are those of the page made from the recorded runs."""
    recorded = set(re.findall(r"\d+\.\d+", (ROOT / "docs/benchmarks.md").read_text()))
    rows = re.findall(r"\| (\d+\.\d+) \| (\d+\.\d+) \|", (ROOT / "docs/masks.md").read_text())
    assert rows and not {time for row in rows for time in row} - recorded


def test_achieved_fractions_are_those_of_the_floors() -> None:
    """In the tables of floors the last column is the larger floor over the measured time."""
    time = r"\| (\d+\.\d+) ms[^|]*"
    rows = [
        row
        for page in sorted(ROOT.glob("docs/kernels/*.md"))
        for row in re.findall(rf"{3 * time}\| ([01]\.\d\d) \|$", page.read_text(), re.MULTILINE)
    ]
    assert len(rows) > 15
    for row in rows:
        products, moves, measured, achieved = map(float, row)
        assert abs(max(products, moves) / measured - achieved) < 0.011, row


def troubles() -> list[tuple[str, str]]:
    """The Python blocks of the page on errors, each with the message below it, if there is one."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", TROUBLES.read_text(), re.MULTILINE | re.DOTALL)
    followed = [*blocks[1:], ("", "")]
    return [
        (code, text.strip() if below == "pytb" else "")
        for (language, code), (below, text) in zip(blocks, followed, strict=True)
        if language == "python"
    ]


def test_troubleshooting() -> None:
    """Each quoted message is what the code above it raises, and the other code runs."""
    torch.manual_seed(0)
    scope: dict[str, object] = {"__name__": "example"}
    cases = troubles()
    assert sum(message != "" for _, message in cases) >= 20
    for code, message in cases:
        raised = ""
        try:
            exec(compile(code, "example", "exec"), scope)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        wanted = ".*".join(re.escape(part) for part in message.split("..."))
        assert re.fullmatch(wanted, raised, re.DOTALL), f"{code}\nraised {raised or 'nothing'}"


def test_messages_of_the_machine_exist() -> None:
    """Messages that cannot be provoked on every machine are at least in the sources, as quoted."""
    quoted = re.findall(r"^\| `(.*)` \|", TROUBLES.read_text(), re.MULTILINE)
    assert len(quoted) >= 4
    sources = "".join(path.read_text() for path in SOURCES.rglob("*.py"))
    for part in {part for message in quoted for part in re.split(r"'cuda'|: ", message)}:
        assert part in sources, part


def test_the_api_page_has_every_public_name() -> None:
    """Each is shown by itself, or as part of a module that is shown as a whole."""
    page = (ROOT / "docs/api.md").read_text()
    shown = set(re.findall(r"^::: dmattn\.([\w.]+)$", page, re.MULTILINE))
    names = {name.rpartition(".")[2] for name in shown}
    for module in ("", ".distributed", ".integrations.transformers", ".modules", ".plot", ".utils"):
        loaded = importlib.import_module(f"dmattn{module}")
        for name in set(loaded.__all__) - names:
            home = getattr(loaded, name).__module__.removeprefix("dmattn.")
            assert any(f"{home}.".startswith(f"{x}.") for x in shown), f"dmattn{module}.{name}"


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


def test_every_page_is_listed_once() -> None:
    """Each is listed by the README and by the first page of the site."""
    pages = sorted(path.name for path in ROOT.glob("docs/*.md") if path.name != "index.md")
    listing = (ROOT / "README.md").read_text().partition("## Documentation")[2]
    assert sorted(re.findall(r"\(docs/([\w-]+\.md)\)", listing)) == pages
    linked = re.findall(r"\(([\w-]+\.md)\)", (ROOT / "docs/index.md").read_text())
    assert sorted(linked) == pages


def test_pages_about_kernels_are_linked() -> None:
    """The page with the map of the kernels leads to those with their details."""
    linked = set(re.findall(r"\((kernels/[\w-]+\.md)", (ROOT / "docs/kernels.md").read_text()))
    there = {f"kernels/{path.name}" for path in ROOT.glob("docs/kernels/*.md")}
    assert linked == there and len(there) > 4


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
