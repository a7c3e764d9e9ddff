"""Threads that make dry runs, until a time limit or an interrupt."""

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from .. import _checks

Item = TypeVar("Item")
Result = TypeVar("Result")

# Runs of small models keep one core busy, and so does a compilation.
_MOST_THREADS = 4


class Stopped(Exception):
    """The time limit has passed."""


class Workers:
    """Threads for dry runs. Python waits for their compilers and runs only.

    Args:
        time_limit: Seconds until no further run begins, or `None`. It holds as soon as
            one run is finished.
    """

    def __init__(self, time_limit: float | None = None):
        self._end = None
        if time_limit is not None:
            _checks.positive("auto", time_limit=time_limit)
            self._end = time.monotonic() + time_limit
        self.finished = False
        self.stopped = ""

    def check(self) -> None:
        """Check that time is left.

        Raises:
            Stopped: The time limit has passed, or there was an interrupt.
        """
        if self.finished and self._end is not None and time.monotonic() > self._end:
            self.stopped = self.stopped or "Stopped by the time limit"
        if self.stopped:
            raise Stopped

    def each(
        self, fun: Callable[[Item], Result], items: Sequence[Item]
    ) -> Iterator[Result]:
        """Yield `fun` of each item, in the order of the items.

        Raises:
            Stopped: The time limit has passed.
            KeyboardInterrupt: There was an interrupt; no further run begins.
        """
        settings = _settings()

        def call(item):
            self.check()
            with contextlib.ExitStack() as stack:
                for context, value in settings:
                    stack.enter_context(context(value))
                return fun(item)

        count = min(_MOST_THREADS, os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(call, item) for item in items]
            try:
                for future in futures:
                    yield future.result()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    self.stopped = "Stopped by an interrupt"
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _settings() -> list[tuple[Any, Any]]:
    """Return the settings of JAX that a `with` statement sets for one thread alone."""
    config: Any = jax.config
    return [
        (jax.enable_x64, config.jax_enable_x64),
        (jax.default_device, config.jax_default_device),
        (jax.default_matmul_precision, config.jax_default_matmul_precision),
        (jax.numpy_dtype_promotion, config.jax_numpy_dtype_promotion),
    ]
