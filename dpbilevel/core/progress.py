"""A bar of the steps of a run, on stderr."""

import contextlib
from collections.abc import Callable, Iterator

from .interrupts import whole


@contextlib.contextmanager
def step_bar(num_steps: int) -> Iterator[Callable[..., None]]:
    """A bar that appears when it is first set; needs tqdm.

    Yields:
        `at(done, total=None, **numbers)`: sets the steps done, their number where it
        was not known, and numbers to show beside them.
    """
    from tqdm import tqdm

    with contextlib.ExitStack() as end:
        bars: list[tqdm] = []

        def at(done: int, total: int | None = None, **numbers: int) -> None:
            with whole():  # nothing is drawn after the line of an interrupt
                if not bars:
                    bar = tqdm(total=num_steps, initial=done, unit="step")
                    bars.append(end.enter_context(bar))
                if total is not None:
                    bars[0].total = total
                if numbers:
                    bars[0].set_postfix(numbers)
                bars[0].update(done - bars[0].n)

        yield at
