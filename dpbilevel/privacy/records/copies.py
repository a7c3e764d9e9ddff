"""Files that have the same bytes."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

_END = 2**16  # bytes at either end of files that are compared first


def copies(files: Iterable[Path]) -> list[list[Path]]:
    """Return a list of groups of two or more files that have the same bytes.

    A file is read to its end only if another one has the same size and the same bytes
    at both ends.

    Raises:
        OSError: A file cannot be read.

    Privacy:
        Reads the records, so an error that tells of a copy is not protected.
    """
    groups = [[file for file in files if file.is_file()]]  # pipes are left out
    for read in (os.path.getsize, _ends, _digest):
        groups = [some for group in groups for some in _grouped(group, read)]
    return groups


def _grouped(files: list[Path], read: Callable[[Path], object]) -> list[list[Path]]:
    """Return a list of groups of files for which `read` returns the same."""
    found = defaultdict(list)
    for file in files:
        found[read(file)].append(file)
    return [group for group in found.values() if len(group) > 1]


def _ends(file: Path) -> bytes:
    with file.open("rb") as opened:
        first = opened.read(_END)
        opened.seek(-min(_END, os.fstat(opened.fileno()).st_size), os.SEEK_END)
        return hashlib.sha256(first + opened.read(_END)).digest()


def _digest(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()
