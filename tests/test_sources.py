"""What linters do not check about the sources of the kernels."""

from pathlib import Path

KERNELS = Path(__file__).parents[1] / "packages/dmattn-kernels"
SUFFIXES = {".h", ".hpp", ".cuh", ".cu", ".cpp"}
WIDTH = 120


def test_no_line_is_wider_than_the_code_style_allows() -> None:
    """clang-format leaves comments as they are."""
    sources = [path for path in KERNELS.rglob("*") if path.suffix in SUFFIXES]
    assert len(sources) > 50
    wide = [
        f"{path.relative_to(KERNELS)}:{number}: {len(line)} columns"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > WIDTH
    ]
    assert not wide, "\n".join(wide)
