"""Worth and cost of a draw: excess risks beside descent, and seconds.

1. Linear losses on a box of diameter 2: the expected excess of the exponential
   mechanism, in closed form, of the regularized one and of noisy descent.
2. Linear models on the unit ball: processor seconds of one draw, with a fixed number of
   tries and with one that depends on the records. What takes over ten minutes follows
   from the time of one evaluation.
3. Absolute losses: one draw, `LocalizedDraws.tuned`, and noisy descent with the best of
   four step sizes, a choice that is not private.

`python -m benchmarks draws`, `--part=2` for one of them; prints the tables of
results/draws.md. NON-PRIVATE evaluation.
"""

import dataclasses
import math
import statistics
import time

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
SHAPES = (
    ("absolute", 500, 2),
    ("absolute", 2_000, 20),
    ("absolute", 20_000, 20),
    ("logistic", 100_000, 50),
)
KINDS = ("fixed", "unprotected")
DRAWS, ENOUGH, TOO_LONG, STEPS = 5, 120.0, 600.0, 256


def one_draw(d, running_time="fixed"):
    """Return a regularized draw in d dimensions."""
    envelope = dpb.draws.ConvexEnvelope()
    sampler = dpb.draws.AlternatingSampler(envelope, 1e-9, running_time=running_time)
    return dpb.draws.RegularizedExponentialMechanism(sampler, convex=True, dimension=d)


def compiled(problem, solver, records, d):
    """Return a function of a key that runs a solver, and the seconds to compile it."""
    start = time.process_time()
    run = jax.jit(
        lambda data, key: dpb.solve(problem, solver, data, jnp.zeros(d), key=key).value
    )
    run = run.lower(records, jax.random.key(0)).compile()
    return lambda key: run(records, key), time.process_time() - start


# --------------------------------------------------------------------- linear losses


def instance(n, d):
    """Signs that lean to one side, so that the mean has a norm of about one half."""
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
    """Return descent whose steps are those of the textbook bound for its noise."""
    # The number of steps for which optimization and noise have the same error.
    steps = min(max(round((EPSILON * n) ** 2 / (8 * d * LOGS)), 64), 4096)
    noisy = dpb.NoisyGD(steps, 1.0, step_size=1.0, output=dpb.outputs.Mean())
    std = dpb.calibrate(problem, noisy, BUDGET, sizes=n).report.ledger[0].noise_std
    size = 2.0 / math.sqrt(steps * (1 + d * std**2))
    return dataclasses.replace(noisy, step_size=size)


def linear_excesses(n, d):
    """Return the mean excess of each mechanism, and bounds."""
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


def slope(values, xs):
    return np.polyfit(np.log(xs), np.log(values), 1)[0]


def linear():
    """Print excesses for more records and more dimensions, and the power of d."""
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
        power = slope([row[name] for row in by_d[3:]], DIMENSIONS[3:])
        print(f"{name}: fitted power of d, from 8 on, {power:.2f}")


# --------------------------------------------------------------------- linear models


def records_of(loss, n, d):
    """Generate unit rows, and labels around a linear model; signs if logistic."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(n, d))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    target = np.full(d, 0.3 if d <= 5 else 0.5 / d**0.5)
    labels = rows @ target + 0.3 * rng.laplace(size=n)
    if loss == "logistic":
        labels = np.sign(labels)
    return {"features": jnp.asarray(rows), "label": jnp.asarray(labels)}, target


def mean_loss(problem, w, records):
    return jnp.mean(jax.vmap(problem.loss, (None, 0))(w, records))


def seconds(loss, n, d, running_time):
    """Return the table's cell: the median and the range of up to five draws."""
    records, _ = records_of(loss, n, d)
    problem = dpb.onelevel.linear_risk(loss, radius=1.0)
    try:
        plan = dpb.calibrate(problem, one_draw(d, running_time), BUDGET, sizes=n)
    except ValueError as error:
        return f"refused ({str(error)[:60]}...)"
    if running_time == "fixed":
        sampler = plan.solver.sampler
        evaluations = sampler.tries * sampler.oracle.evaluations()[1]
        expected = evaluations * evaluation(problem, records, d)
        if expected > TOO_LONG:
            hours = f"some {expected / 3600:.1f} hours"
            return f"{evaluations:.2g} evaluations, {hours}: not run"
    run, building = compiled(problem, plan.solver, records, d)
    found = []
    for index in range(DRAWS):
        if sum(found) <= ENOUGH:
            start = time.process_time()
            jax.block_until_ready(run(jax.random.key(index)))
            found.append(time.process_time() - start)
    middle, ends = statistics.median(found), f"{min(found):.3g} to {max(found):.3g}"
    return f"{middle:.3g} s ({ends}), compiled in {building:.0f} s"


def evaluation(problem, records, d, times=20):
    """Processor seconds of the mean loss and its gradient, one after the other."""

    @jax.jit
    def run(w, data):
        def step(w, _):
            value, gradient = jax.value_and_grad(mean_loss, 1)(problem, w, data)
            return w - 1e-3 * gradient, value

        return jax.lax.scan(step, w, length=times)

    for _ in range(2):
        start = time.process_time()
        jax.block_until_ready(run(jnp.zeros(d), records))
    return (time.process_time() - start) / times


def excesses(n, d):
    """Return the mean excess of three methods on one set of records."""
    records, target = records_of("absolute", n, d)
    problem = dpb.onelevel.linear_risk("absolute", radius=1.0)
    losses = jax.jit(lambda w: mean_loss(problem, w, records))

    def mean(solver):
        solver = dpb.calibrate(problem, solver, BUDGET, sizes=n).solver
        run, _ = compiled(problem, solver, records, d)
        return np.mean([float(losses(run(jax.random.key(i)))) for i in range(KEYS)])

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


def times():
    """Print the seconds of one draw."""
    rows = [
        [f"{loss}, {n} x {d}", *(seconds(loss, n, d, kind) for kind in KINDS)]
        for loss, n, d in SHAPES
    ]
    head = ["loss, records x features", "fixed counts", "unprotected"]
    print(pages.table(head, rows))


def beside_descent():
    """Print the mean excess of draws and of noisy descent."""
    for n, d in ((1_000, 2), (500, 5), (2_000, 5), (2_000, 20)):
        cells = [f"{name} {v:.2g}" for name, v in excesses(n, d).items()]
        print(f"{n} x {d}: {', '.join(cells)}", flush=True)


PARTS = {"1": linear, "2": times, "3": beside_descent}


def main():
    chosen = pages.options().get("part", "123")
    with jax.enable_x64(True):
        for part in chosen:
            PARTS[part]()
