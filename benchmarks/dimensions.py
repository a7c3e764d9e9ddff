"""Private search in more and more dimensions, all methods with as many evaluations.

Length-scales of a Gaussian process, 1000 validation records, noise of 0.05 in every
loss: the loss at the answer over that at the true length-scales.
`GradientInformativeBO` makes 25 steps; the others get as many evaluations as it made in
the same replication. All are private at the (epsilon, delta) of mu = 1; random search
also at the pure epsilon that implies mu = 1, and without privacy, by true losses, as a
reference. Descent starts in the middle of the box, then once more at a uniform point;
the others have no start. Seeds 0 to 3: of the generated data, the start and the noise.

Run by `python -m benchmarks dimensions`; table and figure go to runs/dimensions.
"""

import math
import pathlib
import time

import jax
import numpy as np

import dpbilevel as dpb

from .black_box import follow, made
from .tuning_tasks import length_scales

FOLDER = pathlib.Path("runs/dimensions")
DIMENSIONS = (2, 5, 10, 15, 20, 30)
REPLICATIONS = 4
TRAINING, VALIDATION, NOISE = 300, 1_000, 0.05
# mu = 1 is this at delta = 1e-5, and follows from a pure epsilon of 0.807.
BUDGET, PURE = dpb.PrivacyBudget(4.377, 1e-5), dpb.PrivacyBudget(0.807, 0.0)
CLIP_RANGE = 3.0


def gradients():
    return dpb.search.GradientInformativeBO(
        25,
        3.0,
        step_size=made(0.3, None),
        evaluation_noise=NOISE,
        output=dpb.outputs.TailMean(0.2),
        portfolio=None,  # `benchmarks.starts` has it
    )


def others(evaluations):
    """Return the other methods with this number of evaluations, and their budgets."""
    yield "random search", dpb.search.RandomSearch(evaluations, CLIP_RANGE), BUDGET
    yield "random search, pure", dpb.search.RandomSearch(evaluations, CLIP_RANGE), PURE
    # The Poisson law wastes the fewest evaluations.
    mean = max(1.1, evaluations / 2 - 15)
    repeated = dpb.search.RepeatAndSelect(evaluations, CLIP_RANGE, mean, math.inf)
    yield "repeat and select", repeated, BUDGET
    surrogate = dpb.search.NoisyUCB(
        evaluations, CLIP_RANGE, variance=0.09, num_candidates=300
    )
    yield "noisy UCB", surrogate, BUDGET


def replication(dimension, seed):
    """Return the excess loss of every method, and the number of evaluations."""
    task = length_scales(dimension, TRAINING, VALIDATION, seed)
    start = np.full(dimension, (task.w_set.lower + task.w_set.upper) / 2)
    best, first = task.objective([task.optimum, start])
    found = {"start": first - best}
    box = task.black_box(NOISE, seed)
    solver = dpb.calibrate(box, gradients(), BUDGET, sizes=task.size).solver
    path = follow(task, solver, box, start, seed)
    found["gradient informative"] = path.losses[-1] - best
    count = int(path.evaluations[-1])
    anywhere = task.start(np.random.default_rng((seed, 1)))
    path = follow(task, solver, box, anywhere, seed)
    found["the same, random start"] = path.losses[-1] - best
    for number, (name, solver, budget) in enumerate(others(count)):
        key = jax.random.fold_in(jax.random.key(seed), number)
        result = dpb.search.minimize(box, solver, start, budget=budget, key=key)
        found[name] = task.objective([result.value])[0] - best
    rng = np.random.default_rng((seed, 2))
    points = rng.uniform(task.w_set.lower, task.w_set.upper, (count, dimension))
    found["random search, not private"] = task.objective(points).min() - best
    return found, count


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows, table = [], None
    for dimension in DIMENSIONS:
        began = time.perf_counter()
        runs = [replication(dimension, seed) for seed in range(REPLICATIONS)]
        counts = [count for _, count in runs]
        excess = {n: np.asarray([found[n] for found, _ in runs]) for n in runs[0][0]}
        rows.append((dimension, excess))
        if table is None:
            names = " | ".join(excess)
            table = [f"| d | evaluations | {names} |", "|---" * (2 + len(excess)) + "|"]
            print("\n".join(table))
        quarters = [np.quantile(v, [0.5, 0.25, 0.75]) for v in excess.values()]
        cells = " | ".join(f"{m:.3f} ({a:.3f}, {b:.3f})" for m, a, b in quarters)
        table.append(f"| {dimension} | {np.median(counts):.0f} | {cells} |")
        print(table[-1], f"  {time.perf_counter() - began:.0f} s", flush=True)
        (FOLDER / "table.md").write_text("\n".join(table) + "\n")
        draw(rows)
    print(f"figure: {FOLDER / 'figure.png'}")


def draw(rows):
    """Median and quartiles of the excess loss against the dimension."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    dimensions = [dimension for dimension, _ in rows]
    for number, name in enumerate(rows[0][1]):
        low, middle, high = np.transpose(
            [np.quantile(excess[name], [0.25, 0.5, 0.75]) for _, excess in rows]
        )
        style, color = {
            "start": (":", "0.6"),
            "the same, random start": ("--", "C1"),
            "random search, not private": (":", "k"),
        }.get(name, ("-", f"C{number}"))
        axes.plot(dimensions, middle, "o" + style, color=color, label=name, ms=4)
        axes.fill_between(dimensions, low, high, color=color, alpha=0.12, lw=0)
    axes.set_xlabel("dimension")
    axes.set_ylabel("loss over that of the true length-scales")
    axes.axhline(0, color="0.8", lw=0.8, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(
        f"Private search at epsilon = {BUDGET.epsilon:g}, delta = {BUDGET.delta:g}: "
        f"medians and quartiles of {REPLICATIONS} runs",
        fontsize=11,
    )
    FigureCanvasAgg(figure).print_png(FOLDER / "figure.png")


if __name__ == "__main__":
    main()
