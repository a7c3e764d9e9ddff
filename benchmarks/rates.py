"""How the hypergradient at the answer falls with records and coordinates of y.

1. The problem of the zoo, with exact constants, for more records.
2. A problem in which no record meets x, so that noise has d_y coordinates.
3. All bilevel solvers on the instance of the lower bound (`benchmarks.lower_bound`).

Tables also go to runs/rates, the figure to results/lower_bound.svg. NON-PRIVATE.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from tests.zoo import two_levels

from . import lower_bound
from .pages import spread, table

FILE = pathlib.Path("runs/rates/table.md")
KEYS = 10
START = 1.1  # the norm of the hypergradient at the start
DIMENSION = 10
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
# Pairs of n and d_y: more records, and then more coordinates.
PLACES = [(n, 16) for n in (1_000, 4_000, 16_000)]
PLACES += [(4_000, d) for d in (4, 64, 256)]
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
INNER = dpb.NoisyGD(5, clip_norm=2.0, step_size=0.5)


def records(n, dimension, unit):
    """Return records of two levels around different means, 1/2 and -1/2 long.

    Their distances from the means are 1/2, of all if `unit` and in the mean otherwise.
    """
    rng = np.random.default_rng(0)
    mean = np.full(dimension, 0.5 / dimension**0.5)
    for sign in (1, -1):
        rows = rng.normal(size=(n, dimension))
        lengths = np.linalg.norm(rows, axis=1)[:, None] if unit else dimension**0.5
        yield sign * mean + 0.5 * rows / lengths


def of_zoo(n):
    levels = map(jnp.asarray, records(n, DIMENSION, unit=False))
    found = two_levels.quadratic_bilevel(*levels, radius=1.0)
    return found.problem, found.data, found.w0, found.hypergradient


def solvers_of_zoo(n):
    growth = n / SIZES[0]
    steps, penalty = round(20 * growth**0.5), 2.0 * growth ** (1 / 3)
    sizes = {"lower_step_size": 0.5, "linear_step_size": 0.5}
    norms = {"clip_norm": 2.0, "hessian_clip_norm": 2.0, "cross_clip_norm": 4.0}
    common = {"step_size": 0.2, "upper_clip_norm": 2.0}
    return {
        "PenaltyBilevel": dpb.PenaltyBilevel(
            steps, penalty, INNER, clip_norm=4.0, **common
        ),
        "ImplicitBilevel": dpb.ImplicitBilevel(
            steps, step_size=0.2, output=dpb.outputs.Last()
        ),
        "SingleLoopBilevel": dpb.SingleLoopBilevel(steps, **sizes, **norms, **common),
    }


def in_y(n, dimension):
    r"""$f = \frac12 \|y - a\|^2$, $g = \frac12 \|y - b\|^2 + \frac14 \|y\|^2 - 2 x y$.

    Returns the problem, its records, start and hypergradient.
    """
    a, b = (jnp.asarray(v, jnp.float32) for v in records(n, dimension, unit=True))

    def loss(_, y, record):
        return 0.5 * jnp.sum((y - record) ** 2)

    def lower_public(x, y):
        return 0.25 * jnp.sum(y**2) - 2 * jnp.sum(x * y)

    settings = {"x_set": dpb.sets.Ball(1.0), "x_in_records": False}
    problem = dpb.BilevelProblem(loss, loss, lower_public=lower_public, **settings)
    a_bar, b_bar = jnp.mean(a, 0), jnp.mean(b, 0)
    start = jnp.zeros(dimension), jnp.zeros(dimension)
    data = dpb.Levels(a, b)
    return problem, data, start, lambda x: 4 / 3 * ((2 * x + b_bar) / 1.5 - a_bar)


def solvers_in_y(n, dimension):
    growth = n / dimension**0.5 / 250  # 1 at the first of `PLACES`
    steps, penalty = round(20 * growth**0.5), 2.0 * growth ** (1 / 3)
    common = {"step_size": 0.2, "clip_norm": 2.0, "upper_clip_norm": 2.0}
    single = common | {"lower_step_size": 0.5}
    return {
        "PenaltyBilevel": dpb.PenaltyBilevel(steps, penalty, INNER, **common),
        "F2SA": dpb.bilevel.F2SA(steps, penalty, **single),
        "FiniteDifferenceBilevel": dpb.bilevel.FiniteDifferenceBilevel(
            steps, penalty=1000.0, difference_clip_norm=2.0, **single
        ),
        "SingleLoopBilevel": dpb.SingleLoopBilevel(
            steps, linear_step_size=0.5, hessian_clip_norm=2.0, **single
        ),
    }


def measure(example, solvers, place):
    problem, data, start, hypergradient = example(*place)
    sizes = problem.sizes_of(data, "disjoint")
    run, medians = jax.jit(dpb.solve), {}
    for name, solver in solvers(*place).items():
        solver = dpb.calibrate(problem, solver, BUDGET, sizes=sizes).solver
        norms = [
            jnp.linalg.norm(hypergradient(run(problem, solver, data, start, key=k).x))
            for k in jax.random.split(jax.random.key(0), KEYS)
        ]
        medians[name] = np.median(norms)
        print(f"{place}, {name}: {spread(norms, '.2e')}", flush=True)
    return medians


def measured(example, solvers, places, head, fits):
    """Return the table of a problem: medians at every place, and fitted powers.

    A fit has the cells of its row, which places it takes, and the value of a place.
    """
    found = {place: measure(example, solvers, place) for place in places}
    names = list(found[places[0]])
    rows = [
        [*map(str, place), *(f"{row[name]:.2e}" for name in names)]
        for place, row in found.items()
    ]
    for cells, taken, value in fits:
        used = [place for place in places if taken(place)]
        values = [value(place) for place in used]
        powers = [
            lower_bound.slope(values, [found[p][name] for p in used], START)
            for name in names
        ]
        rows.append([*cells, *("-" if p is None else f"{p:.2f}" for p in powers)])
    return table([*head, *(f"`{name}`" for name in names)], rows)


def main():
    with jax.enable_x64(True):
        hardest = lower_bound.measured()
        fit = ["fitted power"], lambda place: True, lambda place: place[0]
        places = [(n,) for n in SIZES]
        parts = [measured(of_zoo, solvers_of_zoo, places, ["records"], [fit])]

    def noise(place):
        return place[1] ** 0.5 / place[0]

    (n, d), fits = (PLACES[-1][0], PLACES[0][1]), []
    fits.append((["power", "in n"], lambda place: place[1] == d, noise))
    fits.append((["power", "in d_y"], lambda place: place[0] == n, noise))
    parts.append(measured(in_y, solvers_in_y, PLACES, ["n", "d_y"], fits))
    with jax.enable_x64(True):
        parts += lower_bound.tables(hardest)
    print(*parts, sep="\n\n")
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text("\n\n".join(parts) + "\n")
    lower_bound.draw(hardest)
