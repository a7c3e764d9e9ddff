"""Private search in more and more dimensions, all methods with as many evaluations.

Loss of length-scales of a Gaussian process over that at the true ones. In part 1
descent starts in the middle of the box, and at a uniform point. In part 2 boxes have a
plateau in the middle, and descent draws its start from the portfolio. `python -m
benchmarks dimensions`, with `--part=2`; prints tables of results/private_search.md.
"""

import dataclasses
import math

import jax
import numpy as np

import dpbilevel as dpb

from . import pages
from .black_box import follow, length_scales, rule

VALIDATION, NOISE, CLIP_RANGE, MOST = 1_000, 0.05, 3.0, 300
BUDGET = dpb.PrivacyBudget(4.377, 1e-5)  # which follows from mu = 1


def gradients(**settings):
    settings = {"portfolio": None, "output": dpb.outputs.TailMean(0.2)} | settings
    return dpb.search.GradientInformativeBO(
        25, 3.0, step_size=rule(0.3), evaluation_noise=NOISE, **settings
    )


def others(evaluations, most=math.inf):
    search = dpb.search.RandomSearch(evaluations, CLIP_RANGE)
    # The Poisson law wastes the fewest evaluations.
    mean = max(1.1, evaluations / 2 - 15)
    repeated = dpb.search.RepeatAndSelect(evaluations, CLIP_RANGE, mean, math.inf)
    few, settings = min(evaluations, most), {"variance": 0.09, "num_candidates": 300}
    noisy = dpb.search.NoisyUCB(few, CLIP_RANGE, **settings)
    return {"random search": search, "repeat and select": repeated, "noisy UCB": noisy}


def from_the_middle(dimension, seed):
    """Return the excess loss of every method, and the number of evaluations."""
    task = length_scales(dimension, 300, VALIDATION, seed)
    start = np.full(dimension, (task.w_set.lower + task.w_set.upper) / 2)
    best, first = task.objective([task.optimum, start])
    found = {"start": first - best}
    box = task.black_box(NOISE, seed)
    solver = dpb.calibrate(box, gradients(), BUDGET, sizes=task.size).solver
    loss, count = follow(task, solver, box, start, seed)
    found["gradient informative"] = loss - best
    anywhere = task.start(np.random.default_rng((seed, 1)))
    loss, _ = follow(task, solver, box, anywhere, seed)
    found["the same, random start"] = loss - best
    for number, (name, solver) in enumerate(others(count).items()):
        key = jax.random.fold_in(jax.random.key(seed), number)
        result = dpb.search.minimize(box, solver, start, budget=BUDGET, key=key)
        found[name] = task.objective([result.value])[0] - best
    rng = np.random.default_rng((seed, 2))
    points = rng.uniform(task.w_set.lower, task.w_set.upper, (count, dimension))
    found["random search, not private"] = task.objective(points).min() - best
    return found, count


def from_the_portfolio(dimension, seed):
    """Return the same in boxes that are not centred near the answer."""
    task, box = length_scales(dimension, 150, VALIDATION, seed), (-4.0, 2.5)
    task = dataclasses.replace(task, w_set=dpb.sets.Box(*box))
    middle = np.full(dimension, np.mean(box))
    start = np.random.default_rng((seed, 1)).uniform(*box, dimension)
    best, *ends = task.objective([task.optimum, middle, start])
    found = {"middle": ends[0] - best, "random start": ends[1] - best}
    losses, points = task.black_box(NOISE, seed), []

    def counted(point):
        points.append(point)
        return losses.losses(point)

    def run(name, solver, number):
        key = jax.random.key(seed)
        key = jax.random.fold_in(key, number) if number else key
        records = dataclasses.replace(losses, losses=counted)
        given = {"budget": BUDGET, "key": key, "trajectory": True}
        result = dpb.search.minimize(records, solver, start, **given)
        found[name] = task.objective([result.value])[0] - best
        return task.objective(result.trajectory[:1])[0] - best

    settings = {"polish": 0, "keep": 128}
    portfolio = gradients(**settings, portfolio=dpb.search.Portfolio())
    found["its draw"] = run("with the portfolio", portfolio, 0)
    count = len(points)
    run("without", gradients(**settings), 1)
    for number, (name, solver) in enumerate(others(count, MOST).items(), 2):
        run(name, solver, number)
    return found, count


PARTS = {
    "1": (from_the_middle, (2, 5, 10, 15, 20, 30), 4, (0.25, 0.75)),
    "2": (from_the_portfolio, (10, 15, 20, 30), 5, (0, 1)),
}


def main():
    for part in pages.options().get("part", "12"):
        replication, dimensions, count, ends = PARTS[part]
        rows = []
        for dimension in dimensions:
            runs = [replication(dimension, seed) for seed in range(count)]
            names = list(runs[0][0])
            excess = ([found[name] for found, _ in runs] for name in names)
            cells = [pages.spread(values, ".3f", ends) for values in excess]
            asked = np.median([asked for _, asked in runs])
            rows.append([str(dimension), f"{asked:.0f}", *cells])
            print(*rows[-1], flush=True)
        print(pages.table(["d", "evaluations", *names], rows))
