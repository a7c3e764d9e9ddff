"""Ctrl-C and SIGTERM, at which the process ends at once, and a bar of the steps.

Python's `KeyboardInterrupt` is not enough. Raised in an import, a callback or a
destructor it is lost or leaves something half done. While compiled code runs it has to
wait. After it the interpreter is torn down under threads that still compile or compute,
which crashes. Here a separate thread waits for the signals. When one arrives, the
thread waits for files that are being written (`uninterruptible`), calls the actions of
`on_exit`, writes one line to stderr and ends the process without a teardown. A second
signal a second later ends the process wherever it hangs. A command that has `ended`
leaves without a teardown too, so that a signal is never late.

Only the process of a command is watched. Elsewhere, and on Windows, an interrupt is
Python's `KeyboardInterrupt`.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 1.0  # seconds; programs that forward a signal often send it twice

_writing: AbstractContextManager[object] = contextlib.nullcontext()
_code: list[int] = []
_actions: list[Callable[[], None]] = []
_message: list[Callable[[], str]] = [lambda: "dpbilevel: interrupted"]


def watch() -> None:
    """End this process at SIGINT and SIGTERM from now on, with codes 130 and 143.

    Call it once, in the main thread, before anything that takes long is imported.
    A signal that the process was started to ignore stays ignored.
    """
    if os.name != "posix":
        return
    global _writing
    _writing = threading.RLock()
    numbers = [n for n in _SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    arrived, arrives = os.pipe()
    os.set_blocking(arrives, False)
    signal.set_wakeup_fd(arrives)  # also while the main thread is busy
    for number in numbers:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    threading.Thread(target=_wait, args=(arrived,), daemon=True).start()
    atexit.register(_leave, numbers)  # first registered, last called


def ended(code: int) -> None:
    """Declare that the command of this process has ended."""
    _code.append(code)


def uninterruptible() -> AbstractContextManager[object]:
    """Return a context in which no signal ends the process.

    It is for writing files; nothing in it may take long.
    """
    return _writing


@contextlib.contextmanager
def on_exit(action: Callable[[], None]) -> Iterator[None]:
    """Call a short `action` at the end of a block, also if a signal ends it."""
    _actions.append(action)
    try:
        yield
    finally:
        with uninterruptible():
            _actions.remove(action)
            action()


def say(message: Callable[[], str]) -> None:
    """Set the message that is written when a signal ends the process."""
    _message[0] = message


def _wait(arrived: int) -> None:
    """End the process at the first signal."""
    code = 128 + os.read(arrived, 1)[0]
    with contextlib.suppress(RuntimeError):  # no thread can be started
        threading.Thread(target=_insist, args=(arrived, code), daemon=True).start()
    with _writing:
        try:
            for action in reversed(_actions):
                action()
            # Past the buffer of `sys.stderr`, which another thread may have locked.
            os.write(2, f"\n{_message[0]()}\n".encode())
        finally:
            os._exit(code)


def _insist(arrived: int, code: int) -> None:
    """End the process at the second signal."""
    time.sleep(_PATIENCE)
    os.read(arrived, 1)
    os._exit(code)


def _leave(numbers: list[signal.Signals]) -> None:
    """Skip the teardown after a command; let signals kill it after an error."""
    if _code:
        with contextlib.suppress(OSError):  # which the teardown reports
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_code[0])
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def step_bar(
    num_steps: int, what: str, *, shown: bool = True
) -> Iterator[Callable[..., None]]:
    """Yield a function that sets a progress bar; a shown bar needs tqdm.

    The bar appears when it is first set.

    Args:
        num_steps: Number of steps, or 0 if it is not known yet.
        what: Label of the bar.
        shown: Whether to show it.

    Yields:
        A function `at(done, total=None, **numbers)` that sets the steps done, the
        number of all steps if it was not known, and numbers to show beside the bar.
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
