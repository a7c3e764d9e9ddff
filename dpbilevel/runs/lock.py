"""One run at a time in a folder: a lock that the operating system lets go of."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from .interrupts import on_exit, uninterruptible
from .process_zero import on_process_zero

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NAME = "dpbilevel.lock"
_ATTEMPTS = 100  # each fails only if another run ends at that moment


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Callable[[], None]]:
    """Keep every other run out of a folder, which is created if need be.

    Yields a function that raises `ValueError` if the lock file was deleted or replaced
    since, because another run may hold a new one. Call it, in process 0, before a run
    writes a release to disk.

    A killed process leaves its file behind but no lock; the next run takes it over.
    If there are no file locks, a warning says so and nothing is locked. A folder that
    was created here and is empty at the end is removed. A process that is forked inside
    leaves the lock as it is.

    In a program of several processes (`jax.distributed`) all call this together, and
    process 0 holds the lock.

    Raises:
        ValueError: Another run is in progress there.
        OSError: The folder cannot be made or written to.
    """
    made: list[Path] = []
    taken: list[int] = []
    process = os.getpid()

    def take() -> None:
        made.extend(path for path in (folder, *folder.parents) if not path.exists())
        taken.extend(_take(folder))

    def leave() -> None:
        forked = os.getpid() != process  # the lock is still that of the other process
        for descriptor in taken:
            with contextlib.suppress(OSError):  # the lock itself goes last
                if not forked and _is_at(descriptor, folder / NAME):
                    (folder / NAME).unlink()
            os.close(descriptor)
        for path in made if not forked else ():
            with contextlib.suppress(OSError):
                path.rmdir()

    def check() -> None:
        if not all(_is_at(descriptor, folder / NAME) for descriptor in taken):
            raise ValueError(
                f"{folder / NAME} was deleted or replaced while this run held it, so "
                "another run may be in progress in the folder. This run stops without "
                f"its last release; if no other process uses {folder}, start again as "
                "after an interruption."
            )

    with on_exit(leave):
        with uninterruptible():
            on_process_zero(take)
        yield check


def in_use(folder: Path) -> bool:
    """Whether a run is in progress in a folder, as far as locks can tell."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _take(folder: Path) -> list[int]:
    """Return the descriptor of the locked file; none if there are no locks."""
    for _ in range(_ATTEMPTS):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"cannot create the folder {folder}: {error.strerror}"
            ) from error
        if fcntl is None:
            _warn(folder)
            return []
        try:
            descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # another run, at its end, removed the empty folder
        except OSError as error:
            raise OSError(
                f"cannot write to the folder {folder}: {error.strerror}"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode(errors="replace").strip()
            os.close(descriptor)
            raise ValueError(_busy(folder, holder)) from None
        except OSError:
            os.close(descriptor)
            (folder / NAME).unlink(missing_ok=True)
            _warn(folder)
            return []
        if _is_at(descriptor, folder / NAME):
            _sign(descriptor)
            return [descriptor]
        os.close(descriptor)  # its last holder removed the file in the meantime
    raise OSError(
        f"cannot lock the folder {folder}: its disk does not tell whether "
        f"{NAME} is the file that was opened. Give a folder on a local disk."
    )


def _busy(folder: Path, holder: str) -> str:
    process = f" (process {holder})" if holder else ""
    return (
        f"--out {folder} is in use by another run{process}. Wait until that run ends, "
        "or give a new folder; this command has spent nothing."
    )


def _warn(folder: Path) -> None:
    """Says that nothing is locked."""
    warnings.warn(
        f"no file locks on this system or disk: start no other run in {folder} while "
        "this one is in progress, or their results and spending records mix.",
        RuntimeWarning,
        stacklevel=3,
    )


def _sign(descriptor: int) -> None:
    """Writes the number of this process, for the message to another."""
    with contextlib.suppress(OSError):  # the disk may be full; the lock holds
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
