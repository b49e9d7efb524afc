"""The folder of the results."""

import importlib.util
from pathlib import Path


def make_folder(output: Path) -> None:
    """Make the folder of the results, unless matplotlib for their pictures is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("the pictures at the end need matplotlib: pip install matplotlib")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--output-dir: got {output}, wanted a folder: {error}") from error
