"""How the hypergradient at the answer falls with the number of records.

The quadratic problem of the zoo, whose hypergradient is known in closed form and whose
constants are exact, at the same budget for every number of records. Steps grow like its
square root for all methods, and the penalty like its cube root, as the theory asks.

Then all bilevel solvers on the instance of the lower bound (`benchmarks.lower_bound`).

Run by `python -m benchmarks rates`; tables and the first figure go to runs/rates, that
of the lower bound to benchmarks/results/lower_bound.svg.
NON-PRIVATE evaluation: the hypergradient at the answer is computed from the records.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

from . import lower_bound

FOLDER = pathlib.Path("runs/rates")
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
KEYS = 10
START = 1.1  # the norm at the start
DIMENSION = 10
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)


def example(n):
    """Two levels of `n` records each, within the unit ball around different means."""
    rng = np.random.default_rng(0)
    mean = np.full(DIMENSION, 0.5 / DIMENSION**0.5)
    targets, centers = (
        sign * mean + 0.5 * rng.normal(size=(n, DIMENSION)) / DIMENSION**0.5
        for sign in (1, -1)
    )
    return dpb.bilevel.zoo.quadratic_bilevel(
        jnp.asarray(targets), jnp.asarray(centers), radius=1.0
    )


def solvers(n):
    """Every method with steps and penalty that grow with the number of records."""
    growth = n / SIZES[0]
    steps = round(20 * growth**0.5)
    inner = dpb.NoisyGD(5, clip_norm=2.0, step_size=0.5)
    penalty = 2.0 * growth ** (1 / 3)
    return {
        "penalty": dpb.PenaltyBilevel(
            steps,
            penalty,
            inner,
            step_size=0.2,
            clip_norm=4.0,
            upper_clip_norm=2.0,
        ),
        "implicit": dpb.ImplicitBilevel(
            steps, step_size=0.2, output=dpb.outputs.Last()
        ),
        "single loop": dpb.SingleLoopBilevel(
            steps,
            step_size=0.2,
            lower_step_size=0.5,
            linear_step_size=0.5,
            clip_norm=2.0,
            hessian_clip_norm=2.0,
            cross_clip_norm=4.0,
            upper_clip_norm=2.0,
        ),
    }


def measure(n):
    """Norms of the hypergradient at the answers of every method, one per key."""
    problem, data, start = (found := example(n)).problem, found.data, found.w0
    sizes = problem.sizes_of(data, "disjoint")
    run = jax.jit(dpb.solve)
    norms = {}
    for name, solver in solvers(n).items():
        solver = dpb.calibrate(problem, solver, BUDGET, sizes=sizes).solver
        answers = [
            run(problem, solver, data, start, key=key).x
            for key in jax.random.split(jax.random.key(0), KEYS)
        ]
        norms[name] = [float(jnp.linalg.norm(found.hypergradient(x))) for x in answers]
        low, middle, high = np.quantile(norms[name], [0.25, 0.5, 0.75])
        print(f"n = {n}, {name}: {middle:.2e} [{low:.2e}, {high:.2e}]", flush=True)
    at_start = float(jnp.linalg.norm(found.hypergradient(start[0])))
    print(f"n = {n}, at the start: {at_start:.2e}")
    return norms


def main():
    with jax.enable_x64(True):
        hardest = lower_bound.measured()
        found = {n: measure(n) for n in SIZES}
    names = list(solvers(SIZES[0]))
    medians = {name: [np.median(found[n][name]) for n in SIZES] for name in names}
    slopes = {
        name: lower_bound.slope(SIZES, values, START)
        for name, values in medians.items()
    }
    lines = [
        f"| n | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
        *(
            f"| {n} | {' | '.join(f'{medians[name][i]:.2e}' for name in names)} |"
            for i, n in enumerate(SIZES)
        ),
        f"| slope | {' | '.join(f'{slopes[name]:.2f}' for name in names)} |",
    ]
    lines += ["", *lower_bound.tables(hardest)]
    print("\n".join(lines))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "table.md").write_text("\n".join(lines) + "\n")
    draw(found, slopes)
    lower_bound.draw(hardest)
    print(f"figures: {FOLDER / 'figure.png'}, {lower_bound.FIGURE}")


def draw(found, slopes):
    """Medians and quartiles over keys, on logarithmic axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for (name, slope), color, marker in zip(
        slopes.items(), ("#0072B2", "#E69F00", "#009E73"), "osD", strict=True
    ):
        values = np.asarray([found[n][name] for n in SIZES])
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], axis=1)
        bars = (middle - low, high - middle)
        axes.errorbar(
            SIZES,
            middle,
            bars,
            color=color,
            marker=marker,
            capsize=3,
            label=f"{name}, slope {slope:.2f}",
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="records per level",
        ylabel="norm of the hypergradient at the answer",
        title=f"epsilon = {BUDGET.epsilon:g}, delta = {BUDGET.delta:g}, {KEYS} keys",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(FOLDER / "figure.png")
