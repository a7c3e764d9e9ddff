"""Interleaved timing: the machine's noise hits every candidate alike."""

import math
import time

import jax
import numpy as np


def ratios(
    candidates,
    *arguments,
    reference,
    repeats=50,
    seconds=math.inf,
    builds=1,
    clock=time.perf_counter,
):
    """Median time of each candidate and its median ratio to the reference.

    Args:
        candidates: Functions by name; they are jitted here.
        *arguments: What each is called with.
        reference: The name that ratios refer to.
        repeats: Rounds; every round times every candidate once.
        seconds: A candidate that ran this long, and three times, runs no more.
        builds: How often each is compiled, with nothing traced before; the median
            counts.
        clock: Tells the time in seconds; `time.process_time` leaves out what other
            jobs on the core take, and counts every core of this one.

    Returns:
        A dict from name to (seconds, ratio, seconds to compile).
    """
    compiled, built = {}, {name: [] for name in candidates}
    for _ in range(builds):
        for name, fun in candidates.items():
            jax.clear_caches()
            start = clock()
            compiled[name] = jax.jit(fun).lower(*arguments).compile()
            built[name].append(clock() - start)

    def timed(run):
        return lambda: jax.block_until_ready(run(*arguments))

    runs = {name: timed(run) for name, run in compiled.items()}
    times = interleaved(runs, reference, repeats, seconds, clock)
    return {
        name: (*measured, np.median(built[name])) for name, measured in times.items()
    }


def interleaved(runs, reference, repeats=50, seconds=math.inf, clock=time.perf_counter):
    """Median time and ratio by name, of functions without arguments.

    The reference runs in every round: a ratio is to the same round.
    """
    for run in runs.values():
        run()
    times = {name: [] for name in runs}
    order = np.random.default_rng(0)
    for _ in range(repeats):
        fresh = [n for n, t in times.items() if len(t) < 3 or sum(t) < seconds]
        if not fresh:
            break
        # Each finds in the caches what its predecessor left there.
        for name in order.permutation(sorted({*fresh, reference})):
            start = clock()
            runs[name]()
            times[name].append(clock() - start)
    base = np.asarray(times[reference])
    return {
        name: (np.median(t), np.median(np.asarray(t) / base[: len(t)]))
        for name, t in times.items()
    }


def show(rows):
    """Print the result of `ratios` as a table."""
    print(f"{'':34s}{'ms':>10s}{'ratio':>8s}{'compile s':>11s}")
    for name, (seconds, ratio, build) in rows.items():
        print(f"{name:34s}{1e3 * seconds:10.2f}{ratio:8.2f}{build:11.2f}")
