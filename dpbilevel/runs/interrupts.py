"""Ctrl-C and SIGTERM, at which a command ends at once, and a bar of the steps.

Python's `KeyboardInterrupt` is not enough. It has to wait while compiled code runs, and
raised in an import, a callback or a destructor it is lost or leaves something half
done. So in the process of a command all threads block the signals but one, which waits
for them. When one arrives, this thread waits for files that are being written
(`uninterruptible`), writes one line to stderr and ends the process without a teardown.

Elsewhere, and on Windows, an interrupt is Python's `KeyboardInterrupt`.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

_writing: AbstractContextManager[object] = contextlib.nullcontext()
_message: list[Callable[[], str]] = [lambda: "dpbilevel: interrupted"]


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


def say(message: Callable[[], str]) -> None:
    """Set the message that is written when a signal ends the process."""
    _message[0] = message


def _wait(numbers: list[signal.Signals]) -> None:
    """End the process at the first signal."""
    number = signal.sigwait(numbers)
    with _writing:
        try:
            # Past the buffer of `sys.stderr`, which another thread may have locked.
            os.write(2, f"\n{_message[0]()}\n".encode())
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
