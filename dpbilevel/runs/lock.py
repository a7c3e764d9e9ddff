"""One run at a time in a folder."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from .interrupts import uninterruptible

NAME = "dpbilevel.lock"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Callable[[], None]]:
    """Keep every other run out of a folder, which is created if need be.

    Yields a function that raises `ValueError` unless this process still holds the lock
    file of the folder. If the file was deleted or replaced, another run may hold a new
    one. Call the function before a run writes a release to disk.

    A killed or interrupted process leaves its file behind but no lock; the next run
    takes it over. A process that is forked inside neither holds nor ends the lock. A
    folder that was created here and is empty at the end is removed.

    Raises:
        ValueError: Another run is in progress there.
        OSError: The folder cannot be made or written to, or its disk has no file locks.
    """
    file, locked = folder / NAME, []
    made = [path for path in (folder, *folder.parents) if not path.exists()]

    def sign(descriptor: int) -> None:
        locked.append(os.fstat(descriptor))
        with contextlib.suppress(OSError):  # the disk may be full; the lock holds
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())

    lock = filelock.FileLock(
        file, timeout=0, mode=0o600, thread_local=False, on_acquired=sign
    )

    def is_held() -> bool:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return lock.is_locked and os.path.samestat(locked[0], file.stat())
        return False

    def check() -> None:
        if not is_held():
            raise ValueError(
                f"{file} was deleted or replaced while this run held it: another run "
                "may be in progress in the folder. If none is, resume this one."
            )

    try:
        with uninterruptible():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock.acquire()
            except filelock.Timeout:
                holder = ""
                with contextlib.suppress(OSError):
                    found = file.read_text(errors="replace").strip()
                    holder = f" (process {found})"
                raise ValueError(
                    f"{folder} is in use by another run{holder}. Wait until that run "
                    "ends, or give a new folder. Nothing was spent."
                ) from None
            except OSError as error:
                raise OSError(
                    f"cannot lock the folder {folder}: {error.strerror or error}. Give "
                    "a folder on a local disk that you can write to."
                ) from error
        yield check
    finally:
        with uninterruptible():
            if lock.is_locked:  # not in a forked process
                with contextlib.suppress(OSError):
                    if is_held():
                        file.unlink()
                lock.release()
                for path in made:
                    with contextlib.suppress(OSError):  # not empty
                        path.rmdir()


def in_use(folder: Path) -> bool:
    """Return whether a run is in progress in a folder, as far as locks can tell."""
    if not (folder / NAME).exists():
        return False
    try:
        with filelock.FileLock(folder / NAME, timeout=0):
            return False
    except OSError as error:
        return isinstance(error, filelock.Timeout)
