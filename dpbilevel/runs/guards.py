"""Guards of a run: signals, the lock of its folder, and a bar of the steps.

A command ends at once at Ctrl-C and SIGTERM. Python's `KeyboardInterrupt` is not
enough. It has to wait while compiled code runs, and raised in an import, a callback or
a destructor it is lost or leaves something half done. So in the process of a command
all threads block the signals but one, which waits for them. When one arrives, this
thread waits for files that are being written (`uninterruptible`), writes one line to
stderr and ends the process without a teardown.

Elsewhere, and on Windows, an interrupt is Python's `KeyboardInterrupt`.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

LOCK = "dpbilevel.lock"  # a file in the folder of a run
_writing: AbstractContextManager[object] = contextlib.nullcontext()
# The line that is written when a signal ends the process; a command sets its own.
message: Callable[[], str] = lambda: "dpbilevel: interrupted"  # noqa: E731


def watch() -> None:
    """End this process at SIGINT and SIGTERM from now on, with codes 130 and 143.

    Call it once, in the main thread, before anything is imported that starts threads.
    A signal that the process was started to ignore stays ignored.
    """
    if os.name != "posix":
        return
    global _writing
    _writing = threading.RLock()
    both = signal.SIGINT, signal.SIGTERM
    numbers = [n for n in both if signal.getsignal(n) is not signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    threading.Thread(target=_wait, args=(numbers,), daemon=True).start()


def uninterruptible() -> AbstractContextManager[object]:
    """Return a context in which no signal ends the process.

    It is for writing files; nothing in it may take long.
    """
    return _writing


def _wait(numbers: list[signal.Signals]) -> None:
    """End the process at the first signal."""
    number = signal.sigwait(numbers)
    with _writing:
        try:
            # Past the buffer of `sys.stderr`, which another thread may have locked.
            os.write(2, f"\n{message()}\n".encode())
        finally:
            os._exit(128 + number)


@contextlib.contextmanager
def step_bar(
    num_steps: int, what: str, *, shown: bool = True
) -> Iterator[Callable[..., None]]:
    """Yield a function that sets a progress bar; a shown bar needs tqdm.

    The bar appears when it is first set, with the label `what`. If the number of steps
    is not known yet, give 0. The function `at(done, total=None, **numbers)` sets the
    steps done, the number of all steps, and numbers to show beside the bar.
    """
    if not shown:
        yield lambda done, total=None, **numbers: None
        return
    from tqdm import tqdm

    with contextlib.ExitStack() as end:
        bars: list[tqdm] = []

        def at(done: int, total: int | None = None, **numbers: int) -> None:
            with uninterruptible():  # nothing is drawn after the line of an interrupt
                if not bars:
                    bar = tqdm(None, what, num_steps, initial=done, unit="step")
                    bars.append(end.enter_context(bar))
                if total is not None:
                    bars[0].total = total
                if numbers:
                    bars[0].set_postfix(numbers)
                bars[0].update(done - bars[0].n)

        yield at


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Callable[[], None]]:
    """Lock a folder, made if missing; yield a function that checks the lock.

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
    import filelock  # not before signals are watched for

    file, locked = folder / LOCK, []
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
    if not (folder / LOCK).exists():
        return False
    import filelock

    try:
        with filelock.FileLock(folder / LOCK, timeout=0):
            return False
    except OSError as error:
        return isinstance(error, filelock.Timeout)
