"""`python -m dmattn_kernels --cmake-dir` and similar, for build scripts of C and C++ programs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import dmattn_kernels


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what the option asks for; without one, or with several, print the usage and fail."""
    parser = argparse.ArgumentParser(prog="python -m dmattn_kernels", allow_abbrev=False)
    choice = parser.add_mutually_exclusive_group(required=True)
    for option, value, words in (
        ("--cmake-dir", dmattn_kernels.cmake_dir(), "folder for cmake -Ddmattn_kernels_DIR=..."),
        ("--include-dir", dmattn_kernels.include_dir(), "folder for the compiler's -I"),
        ("--library", dmattn_kernels.library_path(), "the shared library"),
        ("--version", dmattn_kernels.version(), "version of the library"),
    ):
        choice.add_argument(
            option, dest="answer", action="store_const", const=str(value), help=words
        )
    print(parser.parse_args(arguments).answer)


if __name__ == "__main__":
    main()
