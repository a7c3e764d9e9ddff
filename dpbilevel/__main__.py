"""`dpbilevel` and `python -m dpbilevel`: the command line in a process of its own."""

import sys

from .runs.guards import watch


def main() -> int:
    """Run the command line of this process; return its exit code."""
    watch()
    # Imported here: it takes seconds, in which an interrupt may arrive.
    from .cli.main import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
