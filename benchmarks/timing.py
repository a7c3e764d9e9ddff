"""Interleaved timing: the machine's noise hits every candidate alike."""

import math
import time

import jax
import numpy as np


def ratios(candidates, *arguments, reference, builds=1, **settings):
    """Return (seconds, ratio to the reference, seconds to compile) by name, medians.

    Candidates are jitted here, and compiled `builds` times with nothing traced before.
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
    """Return median time and ratio to the reference of the same round, by name.

    Every round times each function once, but not one that ran for `seconds` and three
    times. The clock `time.process_time` leaves out other jobs and counts all cores.
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
