"""The table in docs/testing.md that says which test shows what: its quotes and its tests exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- contract table: begin -->", "<!-- contract table: end -->"
ROW = re.compile(r'^\| "(?P<quote>.+)" \| (?P<tests>.+) \|$', re.MULTILINE)


def plain(text: str) -> str:
    """Text without the marks of Markdown, and with single spaces."""
    return " ".join(re.sub(r"[`*|]", "", text).split())


def table() -> list[tuple[str, list[str]]]:
    """(quote, ids of tests) of every row."""
    part = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    found = [(row["quote"], re.findall(r"`([^`]+)`", row["tests"])) for row in ROW.finditer(part)]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    heads = [line for line in lines if line.startswith(("| the page says", "|---"))]
    assert len(lines) == len(found) + len(heads), 'each row is | "quote" | `file::test`, .. |'
    return found


@cache
def pages() -> str:
    """All text of the documentation but the table itself."""
    texts = [page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")) if page != PAGE]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return plain(
        "\n".join([*texts, before, rest.partition(END)[2], (ROOT / "README.md").read_text()])
    )


@cache
def names_by_file() -> dict[str, set[str]]:
    """The names of the tests in each file of tests, by its path from the root."""
    files = [*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tests/**/test_*.py")]
    return {path.relative_to(ROOT).as_posix(): names_in(path) for path in files}


def names_in(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {n.name for n in nodes if isinstance(n, functions) and n.name.startswith("test")}


def missing(identity: str) -> str | None:
    """Why there is no such test; None if there is exactly one."""
    tail, _, name = identity.partition("::")
    files = [file for file in names_by_file() if f"/{file}".endswith(f"/{tail}")]
    if len(files) > 1:
        return f"{identity}: more than one file is called so: {sorted(files)}"
    if files and name in names_by_file()[files[0]]:
        return None
    others = sorted(file for file, names in names_by_file().items() if name in names)
    return f"{identity}: not there; a test of that name is in {others or 'no file'}"


@pytest.mark.parametrize("quote,tests", [pytest.param(*row, id=row[0][:50]) for row in table()])
def test_row(quote: str, tests: list[str]) -> None:
    assert plain(quote) in pages(), f"no page says: {quote}"
    assert tests, f"no test for: {quote}"
    wrong = [reason for reason in map(missing, tests) if reason is not None]
    assert not wrong, "\n".join(wrong)


def test_every_point_of_what_is_computed_has_a_row() -> None:
    concepts = (ROOT / "docs" / "concepts.md").read_text()
    section = concepts.partition("## What is computed")[2].partition("\n## ")[0]
    points = [plain(point) for point in re.split(r"^\* ", section, flags=re.MULTILINE)[1:]]
    assert len(points) > 5
    quotes = [plain(quote) for quote, _ in table()]
    bare = [point for point in points if not any(quote in point for quote in quotes)]
    assert not bare, f"no test is named for: {bare}"


def test_a_wrong_row_is_noticed() -> None:
    assert missing("attention/test_random.py::test_random") is None
    assert "more than one file" in str(missing("test_errors.py::test_bad_input"))
    assert "no file" in str(missing("test_lengths.py::test_of_nothing"))
    assert "test_row" not in str(missing("test_contract_table.py::test_row"))
    moved = str(missing("test_docs.py::test_row"))
    assert "tests/test_contract_table.py" in moved
