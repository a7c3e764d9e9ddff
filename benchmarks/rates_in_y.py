"""How the hypergradient at the answer depends on sqrt(d_y) / n.

In this quadratic problem no record meets x, so that all noise is in the lower level and
has d_y coordinates. The number of steps grows like the square root of n / sqrt(d_y)
for all methods, and the penalty like its cube root where noise is multiplied by it.

Run by `python -m benchmarks rates_in_y`; the table goes to runs/rates_in_y.
NON-PRIVATE evaluation: the hypergradient at the answer is computed from the records.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

from . import lower_bound

FOLDER = pathlib.Path("runs/rates_in_y")
# Pairs of n and d_y: more records, and then more coordinates.
PLACES = [(n, 16) for n in (1_000, 4_000, 16_000)]
PLACES += [(4_000, d) for d in (4, 64, 256)]
KEYS = 10
START = 1.1  # the norm of the hypergradient at the start
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)


def example(n, dimension):
    r"""$f = \frac12 \|y - a\|^2$, $g = \frac12 \|y - b\|^2 + \frac14 \|y\|^2 - 2 x y$.

    Records are in the unit ball, their means at 1/2 and -1/2 of one direction for every
    dimension. Also returns the hypergradient.
    """
    rng = np.random.default_rng(0)
    mean = np.full(dimension, 0.5 / dimension**0.5)
    a, b = (
        jnp.asarray(
            sign * mean + 0.5 * rows / np.linalg.norm(rows, axis=1)[:, None],
            jnp.float32,
        )
        for sign, rows in ((s, rng.normal(size=(n, dimension))) for s in (1, -1))
    )

    def loss(_, y, record):
        return 0.5 * jnp.sum((y - record) ** 2)

    def lower_public(x, y):
        return 0.25 * jnp.sum(y**2) - 2 * jnp.sum(x * y)

    problem = dpb.BilevelProblem(
        loss,
        loss,
        lower_public=lower_public,
        x_set=dpb.sets.Ball(1.0),
        x_in_records=False,
    )
    a_bar, b_bar = jnp.mean(a, 0), jnp.mean(b, 0)
    start = jnp.zeros(dimension), jnp.zeros(dimension)
    data = dpb.Levels(a, b)
    return problem, data, start, lambda x: 4 / 3 * ((2 * x + b_bar) / 1.5 - a_bar)


def solvers(n, dimension):
    """Every method with steps and penalty that grow with n / sqrt(d_y)."""
    growth = n / dimension**0.5 / 250  # 1 at the first of `PLACES`
    steps, penalty = round(20 * growth**0.5), 2.0 * growth ** (1 / 3)
    common = {"step_size": 0.2, "clip_norm": 2.0, "upper_clip_norm": 2.0}
    single = common | {"lower_step_size": 0.5}
    inner = dpb.NoisyGD(5, clip_norm=2.0, step_size=0.5)
    return {
        "PenaltyBilevel": dpb.PenaltyBilevel(steps, penalty, inner, **common),
        "F2SA": dpb.bilevel.F2SA(steps, penalty, **single),
        "FiniteDifferenceBilevel": dpb.bilevel.FiniteDifferenceBilevel(
            steps, penalty=1000.0, difference_clip_norm=2.0, **single
        ),
        "SingleLoopBilevel": dpb.SingleLoopBilevel(
            steps, linear_step_size=0.5, hessian_clip_norm=2.0, **single
        ),
    }


def measure(n, dimension):
    """Return the median norm of the hypergradient at the answers of every method."""
    problem, data, start, hypergradient = example(n, dimension)
    sizes = problem.sizes_of(data, "disjoint")
    run = jax.jit(dpb.solve)
    medians = {}
    for name, solver in solvers(n, dimension).items():
        solver = dpb.calibrate(problem, solver, BUDGET, sizes=sizes).solver
        norms = [
            float(
                jnp.linalg.norm(
                    hypergradient(run(problem, solver, data, start, key=k).x)
                )
            )
            for k in jax.random.split(jax.random.key(0), KEYS)
        ]
        medians[name] = np.median(norms)
        low, high = np.quantile(norms, [0.25, 0.75])
        print(
            f"n = {n}, d_y = {dimension}, {name}: {medians[name]:.2e} "
            f"[{low:.2e}, {high:.2e}]",
            flush=True,
        )
    return medians


def power(places, values):
    """Fit the power of sqrt(d_y) / n; "-" if too few rows show progress."""
    noise = [d**0.5 / n for n, d in places]
    found = lower_bound.slope(noise, values, START)
    return "-" if found is None else f"{found:.2f}"


def main():
    found = {place: measure(*place) for place in PLACES}
    names = list(solvers(*PLACES[0]))
    lines = [
        f"| n | d_y | {' | '.join(f'`{name}`' for name in names)} |",
        f"|---|---|{'---|' * len(names)}",
        *(
            f"| {n} | {d} | {' | '.join(f'{row[name]:.2e}' for name in names)} |"
            for (n, d), row in found.items()
        ),
    ]
    d, n = PLACES[0][1], PLACES[-1][0]
    for label, keep in (
        ("in n", lambda place: place[1] == d),
        ("in d_y", lambda place: place[0] == n),
    ):
        places = [place for place in PLACES if keep(place)]
        powers = (power(places, [found[p][name] for p in places]) for name in names)
        lines.append(f"| power | {label} | {' | '.join(powers)} |")
    print("\n".join(lines))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
