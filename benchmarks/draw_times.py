"""How long one draw takes, and how near the minimum draws and noisy descent end.

1. Linear models on the unit ball: the seconds of one draw of a regularized exponential
   mechanism, with a number of tries that is fixed before a record is read and with
   one that depends on the records, and of compiling it, in processor time of all
   cores. Fixed numbers that planning refuses are said to be refused; those that take
   more than ten minutes are not run, and their time follows from that of one
   evaluation.
2. Absolute losses, labels with Laplace noise: the mean excess of one draw, of the
   rounds of `LocalizedDraws.tuned` and of noisy descent with the best of four step
   sizes, a choice that is not private.

Run by `python -m benchmarks draw_times`; prints the tables of docs/draws.md.
NON-PRIVATE evaluation: excess risks are computed from the records.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
SHAPES = (
    ("absolute", 500, 2),
    ("absolute", 2_000, 20),
    ("absolute", 20_000, 20),
    ("logistic", 100_000, 50),
)
DRAWS, ENOUGH, KEYS, STEPS = 5, 120.0, 64, 256
TOO_LONG = 600.0


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


def one_draw(d, running_time="unprotected"):
    """Return a regularized draw in d dimensions."""
    sampler = dpb.draws.AlternatingSampler(
        dpb.draws.ConvexEnvelope(), 1e-9, running_time=running_time
    )
    return dpb.draws.RegularizedExponentialMechanism(sampler, convex=True, dimension=d)


def compiled(problem, solver, records, d):
    """Return a function of a key that runs a solver, and the seconds to compile it."""
    start = time.process_time()
    run = jax.jit(
        lambda data, key: dpb.solve(problem, solver, data, jnp.zeros(d), key=key).value
    )
    run = run.lower(records, jax.random.key(0)).compile()
    return lambda key: run(records, key), time.process_time() - start


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
        if sum(found) > ENOUGH:
            break
        start = time.process_time()
        jax.block_until_ready(run(jax.random.key(index)))
        found.append(time.process_time() - start)
    return (
        f"{statistics.median(found):.3g} s ({min(found):.3g} to {max(found):.3g}), "
        f"compiled in {building:.0f} s"
    )


def evaluation(problem, records, d, times=20):
    """Processor seconds of the mean loss and its gradient, one after the other."""

    def mean_loss(w, data):
        return jnp.mean(jax.vmap(problem.loss, (None, 0))(w, data))

    @jax.jit
    def run(w, data):
        def step(w, _):
            return w - 1e-3 * jax.grad(mean_loss)(w, data), mean_loss(w, data)

        return jax.lax.scan(step, w, length=times)

    jax.block_until_ready(run(jnp.zeros(d), records))
    start = time.process_time()
    jax.block_until_ready(run(jnp.zeros(d), records))
    return (time.process_time() - start) / times


def excesses(n, d):
    """Return the mean excess of three methods on one set of records."""
    records, target = records_of("absolute", n, d)
    problem = dpb.onelevel.linear_risk("absolute", radius=1.0)
    losses = jax.jit(lambda w: jnp.mean(jax.vmap(problem.loss, (None, 0))(w, records)))

    def mean_loss(solver):
        solver = dpb.calibrate(problem, solver, BUDGET, sizes=n).solver
        run, _ = compiled(problem, solver, records, d)
        return np.mean([float(losses(run(jax.random.key(i)))) for i in range(KEYS)])

    def descent(size):
        return dpb.NoisyGD(STEPS, 1.0, size, output=dpb.outputs.TailMean())

    tuned = dpb.draws.LocalizedDraws.tuned(one_draw(d), problem, BUDGET, n)
    found = {
        "one draw": mean_loss(one_draw(d)),
        "`LocalizedDraws.tuned`": mean_loss(tuned),
        "noisy descent": min(
            mean_loss(descent(size)) for size in (0.05, 0.1, 0.2, 0.3)
        ),
    }
    # The minimizer, by long descent without noise from the model of the labels.
    best = least(losses, jnp.asarray(target))
    return {name: value - best for name, value in found.items()}


def least(losses, start, steps=4_000):
    """Return the least loss along subgradient descent with steps that shrink."""

    def step(w, index):
        w = w - 0.1 / jnp.sqrt(index + 1.0) * jax.grad(losses)(w)
        return w / jnp.maximum(1.0, jnp.linalg.norm(w)), losses(w)

    return float(jnp.min(jax.lax.scan(step, start, jnp.arange(steps))[1]))


def main():
    with jax.enable_x64(True):
        print(
            "| loss, records x features | fixed counts | unprotected |\n|---|---|---|"
        )
        for loss, n, d in SHAPES:
            cells = [seconds(loss, n, d, v) for v in ("fixed", "unprotected")]
            print(f"| {loss}, {n} x {d} | {' | '.join(cells)} |", flush=True)
        for n, d in ((1_000, 2), (500, 5), (2_000, 5), (2_000, 20)):
            cells = [f"{name} {v:.2g}" for name, v in excesses(n, d).items()]
            print(f"{n} x {d}: {', '.join(cells)}", flush=True)
