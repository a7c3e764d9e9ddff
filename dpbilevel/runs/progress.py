"""A bar of the steps of a run, on stderr."""

import contextlib
from collections.abc import Callable, Iterator

from .interrupts import uninterruptible


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
