"""How the programs of the examples are run from a command line."""

import sys
from collections.abc import Callable


def run(main: Callable[[], object]) -> None:
    """Call it; Ctrl-C ends the program with a line, not with where it happened to be."""
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)  # 128 and the number of the signal, as shells have it
