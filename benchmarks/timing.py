"""Interleaved timing: the machine's noise hits every candidate alike."""

import math
import time

import jax
import numpy as np


def ratios(candidates, *arguments, reference, builds=1, **settings):
    """Median time of each candidate and its median ratio to the reference.

    Args:
        candidates: Functions by name; they are jitted here.
        *arguments: What each is called with.
        reference: The name that ratios refer to.
        builds: How often each is compiled, with nothing traced before; the median
            counts.
        **settings: See `interleaved`.

    Returns:
        A dict from name to (seconds, ratio, seconds to compile).
    """
    clock = settings.get("clock", time.perf_counter)
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
    times = interleaved(runs, reference, **settings)
    return {
        name: (*measured, np.median(built[name])) for name, measured in times.items()
    }


def interleaved(runs, reference, repeats=50, seconds=math.inf, clock=time.perf_counter):
    """Median time and ratio by name, of functions without arguments.

    Args:
        runs: The functions, by name.
        reference: The name that ratios refer to. It runs in every round, and a ratio is
            to the same round.
        repeats: Rounds; every round times every function once.
        seconds: A function that ran this long, and three times, runs no more.
        clock: Tells the time in seconds; `time.process_time` leaves out what other
            jobs on the core take, and counts every core of this one.
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
