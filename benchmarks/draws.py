"""Worth of a draw: its excess risk, and what a certified draw costs.

1. Linear losses, as in the instance behind the lower bounds, on a box of diameter 2:
   the expected excess of the exponential mechanism (its law has a closed form), that of
   the regularized one and of noisy gradient descent at the same epsilon, for more
   records and more dimensions.
2. The quadratic bilevel problem of the zoo in two dimensions, whose hyper-objective is
   known: draws from a grid and from the ball, and noisy implicit steps.
3. The single losses that stochastic rejection looks at for one draw, for more records
   and more dimensions: measured over a part of the certified steps where all of them
   would take too long, and scaled up.

Run by `python -m benchmarks draws`; tables and figure go to runs/draws.
NON-PRIVATE evaluation: excess risks and query counts are computed from the records.
"""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.draws.samplers.base import scaled_potential

FOLDER = pathlib.Path("runs/draws")
EPSILON, DELTA = 1.0, 1e-6
KEYS = 64
RECORDS = (300, 1_000, 3_000, 10_000, 30_000)
DIMENSIONS = (1, 2, 4, 8, 16, 32, 64)


def instance(n, d):
    """Signs that lean to one side, so that the mean has a norm of about one half."""
    rng = np.random.default_rng(0)
    records = np.where(rng.uniform(size=(n, d)) < 0.75, 1.0, -1.0) / d**0.5
    side = jnp.full(d, d**-0.5)
    problem = dpb.FiniteSum(
        lambda w, z: -(w @ z),
        w_set=dpb.sets.Box(-side, side),
        lipschitz=1.0,
        smoothness=0.0,
    )
    return problem, jnp.asarray(records)


def pure_excess(rate, mean):
    """Return the mean excess under the density exp(k <x, mean>) on the box."""
    half, slopes = len(mean) ** -0.5, np.abs(mean)
    turn = rate * slopes * half
    return float(np.sum(slopes * half * (1 - 1 / np.tanh(turn) + 1 / turn)))


def solvers(problem, n, d):
    sampler = dpb.draws.AlternatingSampler(dpb.draws.ConvexEnvelope(), 1e-9)
    yield (
        "regularized",
        dpb.draws.RegularizedExponentialMechanism(sampler, convex=True, dimension=d),
    )
    budget = dpb.PrivacyBudget(EPSILON, DELTA)
    # The number of steps for which optimization and noise have the same error.
    steps = round((EPSILON * n) ** 2 / (8 * d * math.log(1 / DELTA)))
    steps = min(max(steps, 64), 4096)
    noisy = dpb.NoisyGD(steps, 1.0, step_size=1.0, output=dpb.outputs.Mean())
    plan = dpb.calibrate(problem, noisy, budget, sizes=n)
    std = plan.report.ledger[0].noise_std
    # The step size of the textbook bound for averaged noisy subgradients.
    step_size = 2.0 / math.sqrt(steps * (1 + d * std**2))
    yield "noisy descent", dataclasses.replace(noisy, step_size=step_size)


def excesses(n, d):
    problem, records = instance(n, d)
    mean = np.asarray(records.mean(0))
    rows = {"exponential": pure_excess(EPSILON * n / 4, mean)}
    budget = dpb.PrivacyBudget(EPSILON, DELTA)
    for name, solver in solvers(problem, n, d):
        solver = dpb.calibrate(problem, solver, budget, sizes=n).solver
        run = jax.jit(
            jax.vmap(
                lambda key, solver=solver: (
                    dpb.solve(problem, solver, records, jnp.zeros(d), key=key).value
                )
            )
        )
        found = run(jax.random.split(jax.random.key(1), KEYS))
        best = float(np.abs(mean).sum()) * d**-0.5
        rows[name] = best - float(np.mean(np.asarray(found) @ mean))
    rows["bound, exponential"] = 4 * d / (EPSILON * n)
    rows["bound, regularized"] = 4 * math.sqrt(d * math.log(1 / DELTA)) / (EPSILON * n)
    rows["lower bound, pure, order"] = min(1.0, d / (EPSILON * n))
    text = ", ".join(f"{name} {value:.2e}" for name, value in rows.items())
    print(f"n = {n}, d = {d}: {text}", flush=True)
    return rows


def bilevel(n):
    """Median excess of the hyper-objective at the answers of three methods."""
    rng = np.random.default_rng(0)
    mean = np.full(2, 0.25)
    levels = (
        jnp.asarray(sign * mean + 0.2 * rng.normal(size=(n, 2))) for sign in (1, -1)
    )
    found = dpb.bilevel.zoo.quadratic_bilevel(*levels, radius=1.0)
    problem, data, w0 = found.problem, found.data, found.w0
    axis = jnp.linspace(-1.0, 1.0, 41)
    points = dpb.draws.Grid.product(axis, axis).candidates
    inside = points[jnp.linalg.norm(points, axis=1) <= 1.0]
    values = jax.vmap(found.hyper_objective)(inside)
    best = float(found.hyper_objective(descend(found, inside[jnp.argmin(values)])))
    sampler = dpb.draws.AlternatingSampler(dpb.draws.ConvexEnvelope(), 1e-9)
    sizes = problem.sizes_of(data, "disjoint")
    methods = {
        "grid": (
            dpb.draws.ExponentialMechanism(dpb.draws.Grid(inside)),
            dpb.PrivacyBudget(EPSILON, 0.0),
        ),
        "regularized": (
            dpb.draws.RegularizedExponentialMechanism(
                sampler, convex=True, dimension=2
            ),
            dpb.PrivacyBudget(EPSILON, DELTA),
        ),
        "implicit": (
            dpb.ImplicitBilevel(50, step_size=0.2, output=dpb.outputs.Last()),
            dpb.PrivacyBudget(EPSILON, DELTA),
        ),
    }
    rows = {}
    for name, (solver, budget) in methods.items():
        plan = dpb.calibrate(problem, solver, budget, sizes=sizes)
        run = jax.jit(dpb.solve)
        excess = [
            float(found.hyper_objective(answer.x)) - best
            for key in jax.random.split(jax.random.key(3), 10)
            for answer in [run(problem, plan.solver, data, w0, key=key)]
        ]
        rows[name] = np.mean(excess)
        if name != "implicit":
            rows[f"{name}, d / k"] = 2 * plan.report.ledger[0].temperature
    text = ", ".join(f"{name} {value:.2e}" for name, value in rows.items())
    print(f"n = {n}: {text}", flush=True)
    return rows


def descend(found, x):
    """Return the minimizer in the ball, by projected descent from a point near it."""

    def step(_, x):
        return found.problem.x_set.project(x - 0.2 * found.hypergradient(x))

    return jax.lax.fori_loop(0, 500, step, x)


def slope(values, xs):
    return np.polyfit(np.log(xs), np.log(values), 1)[0]


def queries(n, d, epsilon=0.1, most=200_000):
    """Single losses per draw: measured per step, times the certified steps."""
    rng = np.random.default_rng(1)
    features = rng.normal(size=(n, d))
    data = {
        "features": jnp.asarray(features / np.linalg.norm(features, axis=1)[:, None]),
        "label": jnp.asarray(np.sign(rng.normal(size=n))),
    }
    problem = dpb.onelevel.linear_risk("hinge", radius=1.0)
    sampler = dpb.draws.AlternatingSampler(
        dpb.draws.StochasticRejection(), 1e-9, max_queries=10**12
    )
    solver = dpb.draws.RegularizedExponentialMechanism(
        sampler, convex=True, dimension=d
    )
    budget = dpb.PrivacyBudget(epsilon, DELTA)
    solver = dpb.calibrate(problem, solver, budget, sizes=n).solver
    plan, sampler = solver.plan(problem, n), solver.sampler
    part = dataclasses.replace(sampler, tries=min(sampler.tries, most))
    potential = scaled_potential(
        plan.score.potential(data, jnp.zeros(d)),
        jnp.asarray(plan.rate),
        plan.potential.quadratic / plan.rate,
    )
    count = jax.jit(
        lambda key: part.run(potential, problem.w_set, jnp.zeros(d), key=key).queries
    )(jax.random.key(2))
    # Half of the tries of this oracle are accepted, whatever the records.
    per_step = float(count) / min(sampler.num_steps, part.tries / 2)
    total = per_step * sampler.num_steps
    theory = (epsilon * n) ** 2 / math.log(1 / DELTA)
    print(
        f"n = {n}, d = {d}: {sampler.num_steps} steps, {per_step:.2f} losses a step, "
        f"{total:.2e} a draw, {total / theory:.0f} (epsilon n)^2 / log(1 / delta)",
        flush=True,
    )
    return total


def main():
    jax.config.update("jax_enable_x64", True)
    print("excess risk for more records, d = 8")
    by_n = [excesses(n, 8) for n in RECORDS]
    print("excess risk for more dimensions, n = 1000")
    by_d = [excesses(1_000, d) for d in DIMENSIONS]
    print("slopes: in n, and in d from 8 on")
    for name in ("exponential", "regularized", "noisy descent"):
        in_n = slope([row[name] for row in by_n], RECORDS)
        in_d = slope([row[name] for row in by_d[3:]], DIMENSIONS[3:])
        print(f"{name}: {in_n:.2f}, {in_d:.2f}")
    print("bilevel quadratic, d = 2: mean excess of the hyper-objective, 10 keys")
    for n in RECORDS[:2]:  # every try of a draw solves the lower level
        bilevel(n)
    print("losses that stochastic rejection looks at, epsilon = 0.1")
    sizes = (100, 300, 1_000, 3_000, 10_000)
    counts = [queries(n, 4) for n in sizes]
    print(f"slope in n: {slope(counts, sizes):.2f}")
    dimensions = (2, 8, 32, 128)
    counts = [queries(1_000, d) for d in dimensions]
    print(f"slope in d: {slope(counts, dimensions):.2f}")
    draw(by_n, by_d)


def draw(by_n, by_d):
    """Excess risks and bounds, on logarithmic axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    panels = figure.subplots(1, 2)
    styles = {
        "exponential": ("#0072B2", "o-"),
        "regularized": ("#E69F00", "s-"),
        "noisy descent": ("#009E73", "D-"),
        "bound, exponential": ("#0072B2", ":"),
        "bound, regularized": ("#E69F00", ":"),
        "lower bound, pure, order": ("#555555", "--"),
    }
    for axes, rows, xs, label in zip(
        panels,
        (by_n, by_d),
        (RECORDS, DIMENSIONS),
        ("records, d = 8", "dimension, n = 1000"),
        strict=True,
    ):
        for name, (color, style) in styles.items():
            axes.plot(xs, [row[name] for row in rows], style, color=color, label=name)
        axes.set(xscale="log", yscale="log", xlabel=label)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("expected excess risk")
    panels[0].legend(frameon=False, fontsize="small")
    figure.suptitle(f"epsilon = {EPSILON:g}; delta = {DELTA:g} but for the exponential")
    FOLDER.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(FOLDER / "figure.png")
    print(f"figure: {FOLDER / 'figure.png'}")
