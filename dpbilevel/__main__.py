"""`dpbilevel` and `python -m dpbilevel`: the command line in a process of its own."""

import sys

from .interrupts import watched


def main() -> int:
    """Runs the command line of this process.

    Returns:
        The exit code of `dpbilevel.cli.main`.
    """
    with watched():
        # Imported here: it takes seconds, in which an interrupt may come as well.
        from .cli import main as command

        return command()


if __name__ == "__main__":
    sys.exit(main())
