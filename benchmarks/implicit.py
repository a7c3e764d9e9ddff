"""Implicit steps: two basins (rates.md), and sensitivities (sensitivities.md).

`python -m benchmarks implicit`. Lowy and Liu's Algorithm 1 stays in the basin of its
start; Algorithm 2 draws its start first, with Theorems 4.2 and 4.3. Sensitivities of
hypergradients are of 1000 validation and 20 000 training records of the census,
declared and with clipped records. NON-PRIVATE evaluation.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.bilevel.certificates.certified import ClippedUpper
from dpbilevel.cli.tables import read_csv

from .pages import ADULT, table
from .source_tasks import encoded

N, KEYS, REACH = 20_000, 30, 1.1
BUDGET = dpb.PrivacyBudget(0.5, 1e-6)
TILT = 0.0385
SHIFT = 0.05  # the longest lower record


def upper(_x, y, record):
    """Two wells; a record of 1 makes the one at y = -1 the better one."""
    return jnp.sum((y**2 - 1) ** 2 / 4 + TILT * jnp.clip(record, -1, 1) * y)


def lower(x, y, record):
    """Y is x, and the mean of records."""
    return 0.5 * jnp.sum((y - x - jnp.clip(record, -SHIFT, SHIFT)) ** 2)


def two_basins():
    """Return the problem with its constants."""
    radius = REACH + SHIFT
    zeros = ["upper_x", "upper_xx", "upper_xy", "lower_xy_spread", "lower_yy_spread"]
    zeros += [f"lower_{h}_in_{v}" for h in ("xy", "yy") for v in ("x", "y")]
    none: Any = dict.fromkeys(zeros, 0.0)
    constants = dpb.bilevel.SecondOrderConstants(
        strong_convexity=1.0,
        solution_radius=radius,
        upper_y=radius**3 - radius + TILT,
        upper_yy=3 * radius**2 - 1,
        lower_y=2 * radius,
        lower_y_spread=SHIFT,
        lower_xy=1.0,
        lower_yy=1.0,
        **none,
    )
    x_set = dpb.sets.Box(-jnp.full(1, REACH), jnp.full(1, REACH))
    return dpb.BilevelProblem(upper, lower, x_set=x_set, constants=constants)


def excesses(problem, solver, data, w0):
    """Return the excess of a solver's answers over the best x, by key."""
    mean = float(jnp.mean(data.lower)), float(jnp.mean(data.upper))

    def objective(x):
        y = x + mean[0]
        return (y**2 - 1) ** 2 / 4 + TILT * mean[1] * y

    sizes = problem.sizes_of(data, "disjoint")
    plan = dpb.calibrate(problem, solver, BUDGET, sizes=sizes)
    keys = jax.random.split(jax.random.key(0), KEYS)
    run = jax.jit(lambda key: dpb.solve(problem, plan.solver, data, w0, key=key).x)
    found = np.asarray([run(key)[0] for key in keys])
    return objective(found) - objective(np.linspace(-REACH, REACH, 100_001)).min()


def compare():
    """Print one line per algorithm: the excess over keys, and the steps."""
    problem, rng = two_basins(), np.random.default_rng(0)
    lower_records = jnp.asarray(rng.uniform(-SHIFT, SHIFT, (N, 1)))
    data = dpb.Levels(jnp.ones((N, 1)), lower_records)
    sizes, w0 = problem.sizes_of(data, "disjoint"), (jnp.ones(1), jnp.ones(1))
    given = problem, BUDGET, sizes
    gap = 2 * TILT  # the start is at the bottom of the worse basin
    grid = dpb.draws.Grid.product(jnp.linspace(-REACH, REACH, 201))
    draw = dpb.draws.ExponentialMechanism(grid)
    solvers = {
        "Algorithm 1": dpb.ImplicitBilevel.from_theorem(
            *given, dimension_x=1, initial_gap=gap
        ),
        "Algorithm 2, warm started": dpb.applications.WarmStarted.from_theorem(
            *given, first=draw, dimension_x=1
        ),
    }
    for name, solver in solvers.items():
        found = excesses(problem, solver, data, w0)
        print(
            f"{name}: excess {found.mean():.4f} ({found.min():.4f} to "
            f"{found.max():.4f} of {KEYS} keys), {solver.num_steps} steps"
        )


# -------------------------------------------------------------------- sensitivities


def contributions(problem, x, data, size):
    """Return each upper record's part of the hypergradient, by dense solves."""

    def lower(y):
        return dpb.debug.lower_objective(problem, x, y, data)

    def newton(y, _):
        step = jnp.linalg.solve(jax.hessian(lower)(y), jax.grad(lower)(y))
        return y - step, None

    y, _ = jax.lax.scan(newton, jnp.zeros(size), length=12)

    def slope(x):
        return jax.grad(lambda y: dpb.debug.lower_objective(problem, x, y, data))(y)

    moves = -jnp.linalg.solve(jax.hessian(lower)(y), jax.jacobian(slope)(x))
    gradients = jax.vmap(jax.grad(problem.upper, 1), (None, None, 0))
    return gradients(x, y, data.upper) @ moves


def clipped(count=11, upper=1000, lower=20_000):
    """Return the sensitivities of both levels, declared and clipped, by penalty."""
    features, label = encoded(read_csv(ADULT))
    records = {"features": features, "label": label}
    order = np.random.default_rng(0).permutation(len(label))
    rows = order[:upper], order[upper : upper + lower]
    data = dpb.Levels(
        *({k: jnp.asarray(v[i], jnp.float64) for k, v in records.items()} for i in rows)
    )
    size = data.lower["features"].shape[1]
    groups = np.arange(size) * count // size
    problem = dpb.linear_tuning(dpb.Logistic(), groups, bounds=(-6.0, 1.0))
    sizes = problem.sizes_of(data, "overlapping")
    measured = jax.jit(lambda x, data: contributions(problem, x, data, size))
    lines = []
    for level in range(-6, 2):
        x = jnp.full(count, float(level))
        own = measured(x, data)
        norm = float(jnp.max(jnp.linalg.norm(own, axis=1)))
        value = float(jnp.linalg.norm(jnp.mean(own, axis=0)))
        plain = problem.constants.bounds(sizes, x)
        short = ClippedUpper(problem.constants, norm).bounds(sizes, x)
        sums = [float(b.upper + b.lower) for b in (plain, short)]
        # Noise of one release at epsilon 1 out of ten, with all coordinates.
        noise = 4.0 * (10 * count) ** 0.5 * sums[1]
        numbers = norm, value, short.upper, plain.upper, plain.lower
        numbers += sums[0] / sums[1], noise / value
        lines.append([f"{level}", *(f"{float(v):.2g}" for v in numbers)])
    head = "x", "C", "hypergradient", "2 C / n", "S_up", "S_low", "noise ratio"
    return table([*head, "noise / hypergradient"], lines)


def main():
    with jax.enable_x64(True):
        compare()
        if not ADULT.is_file():
            print(f"sensitivities: left out, there is no {ADULT.name}")
            return
        print(clipped())
