"""Descent from a start that a private draw finds, in boxes that are off the answer.

The task of `benchmarks.dimensions` in boxes of log length-scales from -4 to 2.5, whose
middle is on a plateau, as uniform points are. `GradientInformativeBO` makes 25 steps
from a uniform start: the first draws from the portfolio, or all descend; the others
have as many evaluations as it made with the portfolio in the same replication, but
`NoisyUCB` at most 300. All are private at the (epsilon, delta) of mu = 1. Seeds 0 to 4:
of the data, the start and the noise.

Run by `python -m benchmarks starts [--dimensions=10,15]`; the table goes to
runs/starts.
"""

import dataclasses
import pathlib
import sys
import time

import jax
import numpy as np

import dpbilevel as dpb

from .dimensions import BUDGET, NOISE, VALIDATION, gradients, others
from .tuning_tasks import length_scales

FOLDER = pathlib.Path("runs/starts")
DIMENSIONS = (10, 15, 20, 30)
REPLICATIONS = 5
TRAINING = 150
MOST = 300  # evaluations of the Gaussian process method, whose time is their cube
LOWER, UPPER = -4.0, 2.5


def replication(dimension, seed):
    """Return the excess loss of every method, and the number of evaluations."""
    task = length_scales(dimension, TRAINING, VALIDATION, seed)
    task = dataclasses.replace(task, w_set=dpb.sets.Box(LOWER, UPPER))
    middle = np.full(dimension, (LOWER + UPPER) / 2)
    start = np.random.default_rng((seed, 1)).uniform(LOWER, UPPER, dimension)
    found, points = {}, []
    box = task.black_box(NOISE, seed)

    def counted(point):
        points.append(point)
        return box.losses(point)

    def excess(name, solver, budget, key):
        result = dpb.search.minimize(
            dataclasses.replace(box, losses=counted),
            solver,
            start,
            budget=budget,
            key=key,
            trajectory=True,
        )
        best, value = task.objective([task.optimum, result.value])
        found[name] = value - best
        return task.objective(result.trajectory[:1])[0] - best

    best, *ends = task.objective([task.optimum, middle, start])
    found["middle"], found["random start"] = (value - best for value in ends)
    key = jax.random.key(seed)
    alone = dataclasses.replace(gradients(), polish=0, keep=128)
    solver = dataclasses.replace(alone, portfolio=dpb.search.Portfolio())
    drawn = excess("with the portfolio", solver, BUDGET, key)
    found["its draw"], count = drawn, len(points)
    excess("without", alone, BUDGET, jax.random.fold_in(key, 1))
    few = [method for method in others(min(count, MOST)) if method[0] == "noisy UCB"]
    many = [m for m in others(count) if m[0] in ("random search", "repeat and select")]
    for number, (name, solver, budget) in enumerate([*many, *few]):
        excess(name, solver, budget, jax.random.fold_in(key, 2 + number))
    return found, count


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    chosen = [v.split("=")[1] for v in sys.argv if v.startswith("--dimensions=")]
    dimensions = [int(d) for d in chosen[0].split(",")] if chosen else DIMENSIONS
    table = None
    for dimension in dimensions:
        began = time.perf_counter()
        runs = []
        for seed in range(REPLICATIONS):
            runs.append(replication(dimension, seed))
            print(dimension, seed, runs[-1], flush=True)
        counts = [count for _, count in runs]
        excess = {n: [found[n] for found, _ in runs] for n in runs[0][0]}
        if table is None:
            names = " | ".join(excess)
            table = [f"| d | evaluations | {names} |", "|---" * (2 + len(excess)) + "|"]
        quarters = [np.quantile(v, [0.5, 0.0, 1.0]) for v in excess.values()]
        cells = " | ".join(f"{m:.3f} ({a:.3f}, {b:.3f})" for m, a, b in quarters)
        table.append(f"| {dimension} | {np.median(counts):.0f} | {cells} |")
        print(table[-1], f"  {time.perf_counter() - began:.0f} s", flush=True)
        (FOLDER / "table.md").write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
