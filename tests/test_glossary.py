"""Names in the glossary are names in the code."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".h", ".hpp", ".cpp", ".cu", ".cuh"}
ROW = re.compile(r"^\| (?P<word>[^|]+) \| [^|]+ \|(?P<names>[^|]*)\|$", re.MULTILINE)


@cache
def sources() -> str:
    """All sources of the packages and of the attention suite, and the paths below packages."""
    files = [p for p in (ROOT / "packages").glob("*/src/**/*") if p.suffix in SUFFIXES]
    files += (ROOT / "tests" / "attention").glob("*.py")
    files += (ROOT / "packages").glob("*/include/**/*.h*")
    paths = [p.as_posix() for p in (ROOT / "packages").rglob("*") if "__pycache__" not in str(p)]
    return "\n".join([p.read_text() for p in files] + paths)


def rows() -> list[tuple[str, list[str]]]:
    found = ROW.findall((ROOT / "docs" / "glossary.md").read_text())
    return [(word, re.findall(r"`([^`]+)`", names)) for word, names in found if word != "word"]


@pytest.mark.parametrize("word,names", [pytest.param(*row, id=row[0]) for row in rows()])
def test_names_are_in_the_code(word: str, names: list[str]) -> None:
    missing = [name for name in names if not re.search(rf"\b{name.split('.')[-1]}\b", sources())]
    assert not missing, f"{word}: no source has {missing}"


def test_each_word_once() -> None:
    words = [part for word, _ in rows() for part in word.split(", ")]
    assert len(words) == len(set(words)) > 30
