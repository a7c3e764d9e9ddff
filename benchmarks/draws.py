"""Excess risks of draws beside descent: `python -m benchmarks draws`.

1. Linear losses on a box of diameter 2: the expected excess of the exponential
   mechanism, in closed form, of the regularized one and of noisy descent.
2. Absolute losses: one draw, `LocalizedDraws.tuned`, and noisy descent with the best of
   four step sizes, a choice that is not private.

`--part=2` prints one of the tables of results/draws.md. NON-PRIVATE evaluation.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

from . import pages

BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
EPSILON, LOGS = BUDGET.epsilon, math.log(1 / BUDGET.delta)
KEYS = 64
RECORDS = (300, 1_000, 3_000, 10_000, 30_000)
DIMENSIONS = (1, 2, 4, 8, 16, 32, 64)
STEPS = 256


def one_draw(d, running_time="fixed"):
    envelope = dpb.draws.ConvexEnvelope()
    sampler = dpb.draws.AlternatingSampler(envelope, 1e-9, running_time=running_time)
    return dpb.draws.RegularizedExponentialMechanism(sampler, convex=True, dimension=d)


def instance(n, d):
    rng = np.random.default_rng(0)
    records = np.where(rng.uniform(size=(n, d)) < 0.75, 1.0, -1.0) / d**0.5
    side = jnp.full(d, d**-0.5)
    facts = {"w_set": dpb.sets.Box(-side, side), "lipschitz": 1.0, "smoothness": 0.0}
    return dpb.FiniteSum(lambda w, z: -(w @ z), **facts), jnp.asarray(records)


def pure_excess(rate, mean):
    """Return the mean excess under the density exp(k <x, mean>) on the box."""
    half, slopes = len(mean) ** -0.5, np.abs(mean)
    turn = rate * slopes * half
    return float(np.sum(slopes * half * (1 - 1 / np.tanh(turn) + 1 / turn)))


def averaged_descent(problem, n, d):
    # The number of steps for which optimization and noise have the same error.
    steps = min(max(round((EPSILON * n) ** 2 / (8 * d * LOGS)), 64), 4096)
    noisy = dpb.NoisyGD(steps, 1.0, step_size=1.0, output=dpb.outputs.Mean())
    std = dpb.calibrate(problem, noisy, BUDGET, sizes=n).report.ledger[0].noise_std
    size = 2.0 / math.sqrt(steps * (1 + d * std**2))
    return dataclasses.replace(noisy, step_size=size)


def linear_excesses(n, d):
    problem, records = instance(n, d)
    mean = np.asarray(records.mean(0))
    rows = {"exponential": pure_excess(EPSILON * n / 4, mean)}
    solvers = {"regularized": one_draw(d)}
    solvers["noisy descent"] = averaged_descent(problem, n, d)
    for name, solver in solvers.items():
        solver = dpb.calibrate(problem, solver, BUDGET, sizes=n).solver

        def one(key, solver=solver):
            return dpb.solve(problem, solver, records, jnp.zeros(d), key=key).value

        found = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), KEYS))
        best = float(np.abs(mean).sum()) * d**-0.5
        rows[name] = best - float(np.mean(np.asarray(found) @ mean))
    rows["4 d / (epsilon n)"] = 4 * d / (EPSILON * n)
    bound = 4 * math.sqrt(d * LOGS) / (EPSILON * n)
    return rows | {"4 sqrt(d log(1 / delta)) / (epsilon n)": bound}


def linear():
    by_n = [linear_excesses(n, 8) for n in RECORDS]
    by_d = [linear_excesses(1_000, d) for d in DIMENSIONS]
    for head, values, found in (
        ("n, at d = 8", RECORDS, by_n),
        ("d, at n = 1 000", DIMENSIONS, by_d),
    ):
        rows = [
            [str(value), *(f"{v:.3g}" for v in row.values())]
            for value, row in zip(values, found, strict=True)
        ]
        print(pages.table([head, *found[0]], rows), flush=True)
    for name in list(by_d[0])[:3]:
        values = [row[name] for row in by_d[3:]]
        power = np.polyfit(np.log(DIMENSIONS[3:]), np.log(values), 1)[0]
        print(f"{name}: fitted power of d, from 8 on, {power:.2f}")


def records_of(n, d):
    """Generate unit rows, and labels around a linear model."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(n, d))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    target = np.full(d, 0.3 if d <= 5 else 0.5 / d**0.5)
    labels = rows @ target + 0.3 * rng.laplace(size=n)
    return {"features": jnp.asarray(rows), "label": jnp.asarray(labels)}, target


def excesses(n, d):
    records, target = records_of(n, d)
    problem = dpb.onelevel.linear_risk("absolute", radius=1.0)
    losses = jax.jit(lambda w: jnp.mean(jax.vmap(problem.loss, (None, 0))(w, records)))

    def mean(solver):
        solver = dpb.calibrate(problem, solver, BUDGET, sizes=n).solver
        run, w0 = jax.jit(dpb.solve), jnp.zeros(d)
        keys = map(jax.random.key, range(KEYS))
        found = [run(problem, solver, records, w0, key=key).value for key in keys]
        return np.mean([float(losses(w)) for w in found])

    def descent(size):
        return dpb.NoisyGD(STEPS, 1.0, size, output=dpb.outputs.TailMean())

    draw = one_draw(d, "unprotected")
    tuned = dpb.draws.LocalizedDraws.tuned(draw, problem, BUDGET, n)
    found = {"one draw": mean(draw), "`LocalizedDraws.tuned`": mean(tuned)}
    sizes = (0.05, 0.1, 0.2, 0.3)
    found["noisy descent"] = min(mean(descent(size)) for size in sizes)
    # The minimizer, by long descent without noise from the model of the labels.
    best = least(losses, jnp.asarray(target))
    return {name: value - best for name, value in found.items()}


def least(losses, start, steps=4_000):
    """Return the least loss along subgradient descent with steps that shrink."""

    def step(w, index):
        w = w - 0.1 / jnp.sqrt(index + 1.0) * jax.grad(losses)(w)
        return w / jnp.maximum(1.0, jnp.linalg.norm(w)), losses(w)

    return float(jnp.min(jax.lax.scan(step, start, jnp.arange(steps))[1]))


def beside_descent():
    for n, d in ((1_000, 2), (500, 5), (2_000, 5), (2_000, 20)):
        cells = [f"{name} {v:.2g}" for name, v in excesses(n, d).items()]
        print(f"{n} x {d}: {', '.join(cells)}", flush=True)


def main():
    with jax.enable_x64(True):
        for part in pages.options().get("part", "12"):
            {"1": linear, "2": beside_descent}[part]()
