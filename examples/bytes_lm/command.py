"""How the programs of the examples are run from a command line."""

import sys
from collections.abc import Callable


def run(main: Callable[[], object]) -> None:
    """Call `main`; Ctrl-C ends the program with one line instead of a traceback."""
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)  # 128 + the number of the signal, as shells report it
