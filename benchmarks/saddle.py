"""How the strong gap of private saddle-point methods falls with the number of records.

Both methods, once over the records and many times, with the parameters that minimize
their bounds, on three families whose gap is known in closed form:

- constant: a fixed vector per record on a ball, whose mean is as long as sampling and
  privacy together hide, 1 / sqrt(n) + a / n: the instance of the lower bounds;
- bilinear: x'Ay + b'x - c'y on two balls, with random A, b and c per record;
- matrix game: two simplices, entries of every record's matrix -1 or 1.

Records are drawn afresh for every key and the gap is that of the distribution they come
from. The paper's schedule for many extragradient passes has n^2 steps of one record;
here the bound is minimized over any batch size and at most as many steps as there are
records, or as `MULTI` says.

Run by `python -m benchmarks saddle`; table and figure go to runs/saddle.
NON-PRIVATE evaluation: the gap is computed from the true distribution.
"""

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

FOLDER = pathlib.Path("runs/saddle")
SINGLE = (1_000, 3_000, 10_000, 30_000, 100_000)
# Many passes draw a subset a query, and their accounting is slow: sizes, and the most
# steps, in all but one family far fewer than the records that the theory asks for.
MANY = (500, 1_000, 2_000, 5_000, 10_000)
MULTI = {
    "constant": (MANY, 200),
    "bilinear": ((250, 350, 500, 1_000, 2_000), None),
    "matrix game": (MANY, 200),
}
KEYS = 10
SIDE = 5
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
# What d = 10 coordinates cost in privacy: sqrt(d log(1 / delta)) / epsilon.
PRIVACY = math.sqrt(2 * SIDE * math.log(1 / BUDGET.delta)) / BUDGET.epsilon
METHODS = {"NSEG": dpb.NoisyExtragradient, "NISPP": dpb.InexactProximalPoint}


@dataclasses.dataclass(frozen=True)
class Family:
    """Problems of one kind: records drawn from a law whose saddle point is known."""

    problem: dpb.SaddleProblem | dpb.VariationalInequality
    w0: tuple
    draw: Callable  # (key, n) -> records
    gap: Callable  # w -> the strong gap on the law of the records


def signs(key, mean, n):
    """Independent signs with this mean, one array like it per record."""
    uniform = jax.random.uniform(key, (n, *mean.shape))
    return jnp.where(uniform < (1 + mean[None]) / 2, 1.0, -1.0)


def constant(n):
    d = 2 * SIDE
    force = min(0.6, n**-0.5 + PRIVACY / n)
    mean = jnp.full(d, force)

    problem = dpb.VariationalInequality(
        lambda w, z: z, w_set=dpb.Ball(0.5), lipschitz=0.0, bound=1.0
    )
    law = dpb.saddle_zoo.constant_operator(mean[None] / d**0.5, radius=0.5)
    return Family(problem, law.w0, lambda key, n: signs(key, mean, n) / d**0.5, law.gap)


def bilinear(n):
    del n
    rng = np.random.default_rng(0)
    means = [
        jnp.asarray(rng.uniform(-0.6, 0.6, shape), jnp.result_type(float))
        for shape in ((SIDE, SIDE), (SIDE,), (SIDE,))
    ]
    # Entries are signs over these, so that |A| <= 1/2 and |b|, |c| <= 1/4.
    units = (1 / (2 * SIDE), 1 / (4 * SIDE**0.5), 1 / (4 * SIDE**0.5))
    a, b, c = (unit * mean for unit, mean in zip(units, means, strict=True))
    radius = 0.5

    def payoff(x, y, z):
        return x @ z["a"] @ y + z["b"] @ x - z["c"] @ y

    def draw(key, n):
        keys = jax.random.split(key, 3)
        found = zip("abc", keys, means, units, strict=True)
        return {name: unit * signs(k, mean, n) for name, k, mean, unit in found}

    ball = dpb.Ball(radius)
    problem = dpb.SaddleProblem(
        payoff, x_set=ball, y_set=ball, lipschitz=0.5, bound=math.sqrt(0.5)
    )
    law = dpb.saddle_zoo.bilinear_saddle(a[None], b[None], c[None], radius=radius)
    return Family(problem, law.w0, draw, law.gap)


def matrix(n):
    del n
    rng = np.random.default_rng(1)
    mean = jnp.asarray(rng.uniform(-0.6, 0.6, (SIDE, SIDE)), float)
    law = dpb.saddle_zoo.matrix_game(mean[None])
    problem = dpb.matrix_game(SIDE, SIDE)
    return Family(problem, law.w0, lambda key, n: signs(key, mean, n), law.gap)


FAMILIES = {"constant": constant, "bilinear": bilinear, "matrix game": matrix}


def gaps(name, method, passes, n):
    """The gap per key, the promised bound, and the parameters."""
    family = FAMILIES[name](n)
    # Noise across a simplex is projected away, but a proximal point rounds there, too.
    dimension = (
        family.problem.w_set.dimension(family.w0) if method == "NSEG" else 2 * SIDE
    )
    most = {"most_steps": MULTI[name][1]} if passes == "multi" else {}
    solver = METHODS[method].tuned(
        family.problem, BUDGET, n, dimension=dimension, passes=passes, **most
    )
    solver = dpb.calibrate(family.problem, solver, BUDGET, sizes=n, w0=family.w0).solver

    @jax.jit
    def one(solver, key):
        key_data, key_noise = jax.random.split(key)
        records = family.draw(key_data, n)
        answer = dpb.solve(family.problem, solver, records, family.w0, key=key_noise)
        return family.gap(answer.value)

    found = [float(one(solver, k)) for k in jax.random.split(jax.random.key(0), KEYS)]
    promised = solver.bound(family.problem, dimension=dimension)
    return found, promised, f"T = {solver.num_steps}, B = {solver.sampling.size}"


def slope(sizes, values):
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def measure(name):
    """Rows by variant: gaps per size and key, and bounds per size."""
    print(name, flush=True)
    rows = {}
    for passes in ("single", "multi"):
        sizes = SINGLE if passes == "single" else MULTI[name][0]
        for method in METHODS:
            found, bounds = [], []
            for n in sizes:
                clock = time.perf_counter()
                # In float32, rounding of a proximal point in large batches is refused.
                with jax.enable_x64(method == "NISPP"):
                    values, bound, chosen = gaps(name, method, passes, n)
                found.append(values)
                bounds.append(bound)
                print(
                    f"  {method}, {passes} pass, n = {n}: median "
                    f"{np.median(values):.2e}, bound {bound:.2e}, {chosen}, "
                    f"{time.perf_counter() - clock:.1f} s",
                    flush=True,
                )
            rows[f"{method}, {passes} pass"] = (
                sizes,
                np.asarray(found),
                bounds,
            )
    return rows


def table(results):
    """Medians over keys and fitted slopes, as Markdown."""
    lines = [
        "| family | method | from n | gap | to n | gap | slope | slope of the bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family, rows in results.items():
        for name, (sizes, found, bounds) in rows.items():
            medians = np.median(found, axis=1)
            lines.append(
                f"| {family} | {name} | {sizes[0]} | {medians[0]:.4f} | {sizes[-1]} | "
                f"{medians[-1]:.4f} | {slope(sizes, medians):.2f} | "
                f"{slope(sizes, bounds):.2f} |"
            )
    return "\n".join(lines)


def main():
    results = {name: measure(name) for name in FAMILIES}
    text = table(results)
    print(text)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "table.md").write_text(text + "\n")
    draw(results)


def draw(results):
    """Medians and quartiles over keys, on logarithmic axes, one panel per family."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), layout="constrained")
    panels = figure.subplots(1, len(results))
    styles = (
        ("#0072B2", "o-"),
        ("#E69F00", "s-"),
        ("#56B4E9", "o--"),
        ("#D55E00", "s--"),
    )
    for axes, (family, rows) in zip(panels, results.items(), strict=True):
        for (name, (sizes, found, _)), (color, style) in zip(
            rows.items(), styles, strict=True
        ):
            low, middle, high = np.quantile(found, [0.25, 0.5, 0.75], axis=1)
            axes.errorbar(
                sizes,
                middle,
                (middle - low, high - middle),
                fmt=style,
                color=color,
                capsize=3,
                label=f"{name}, slope {slope(sizes, middle):.2f}",
            )
        axes.set(xscale="log", yscale="log", xlabel="records", title=family)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    panels[0].set_ylabel("strong gap on the population")
    figure.suptitle(
        f"epsilon = {BUDGET.epsilon:g}, delta = {BUDGET.delta:g}, {KEYS} keys"
    )
    FigureCanvasAgg(figure).print_png(FOLDER / "figure.png")
    print(f"figure: {FOLDER / 'figure.png'}")
