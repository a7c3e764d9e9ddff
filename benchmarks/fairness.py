"""Worst-group loss on the census records: a private game against average-loss training.

Logistic regression at epsilon = 1, twice: on all columns with groups by sex, and on the
columns about work alone, without sex, race, family or country, with groups by sex and
race. For each: private training on the average loss, the private game by both methods,
and both problems solved without noise as references. Average-loss
training gets every pair of steps and step size in `AVERAGE`, last iterate and tail
average, and counts with the best of these; the games have one setting each, with tail
averages, chosen by reasoning about units and by trials on these records, as the
average's grid was. Ten keys each.

At the end the time of a game of 1e5 generated records over many passes.

Run by `python -m benchmarks fairness`; table and figure go to runs/fairness. The Adult
CSV is read from $ADULT or ../shared/data/adult.csv; without it only the time is taken.
NON-PRIVATE evaluation: all losses are computed from the records, those of training and
those of testing; both are told.
"""

import dataclasses
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.cli.columns import positions
from dpbilevel.cli.config import read_config
from dpbilevel.cli.files import read_csv

from .census import ADULT, ROOT, quartiles

FOLDER = pathlib.Path("runs/fairness")
TRAINING = 26_000
KEYS = 10
RADIUS = 10.0
BUDGET = dpb.PrivacyBudget(1.0, 1e-5)
SEXES = ("Female", "Male")
# Declared shares of the groups, rounded figures as of a sampling plan.
BY_SEX = {"women": 0.33, "men": 0.67}
BY_BOTH = {
    "white women": 0.27,
    "other women": 0.06,
    "white men": 0.59,
    "other men": 0.08,
}
WORK = ("workclass", "education", "occupation")
SETTINGS = {
    "all columns, by sex": (None, BY_SEX),
    "work alone, by sex and race": (WORK, BY_BOTH),
}
# Steps and step sizes of private average-loss training; the best of them counts.
AVERAGE = ((100, 16.0), (200, 8.0), (200, 12.0))


def load(columns, groups):
    """Training and test records with their groups."""
    table = read_csv(ADULT)
    data = read_config(ROOT / "configs/census.toml").data
    if columns is not None:
        kept = tuple(c for c in data.categorical if c.column in columns)
        data = dataclasses.replace(data, categorical=kept)
    records = data.encode(table)
    group = positions(table.column("sex"), SEXES)
    if len(groups) == 4:
        white = positions(table.column("race"), ("White",)) == 0
        group = np.where(group < 0, -1, 2 * group + ~white).astype(np.int32)
    tree = records.tree() | {"group": group}
    order = np.random.default_rng(0).permutation(len(group))
    return [
        jax.tree.map(lambda v, rows=rows: v[rows], tree)
        for rows in (order[:TRAINING], order[TRAINING:])
    ]


def games(shares, size):
    """The game in the two methods.

    One step of Picard's iteration makes half of the extragradient's releases, which
    pays for a clip norm that cuts hardly any record of a group with more weight than
    its share. It is enforced by clipping, too, and needs float64 on full batches.
    """
    problem = dpb.games.group_fair(dpb.Logistic(), shares, radius=RADIUS, scale=6.0)
    extragradient = dpb.games.NoisyExtragradient(100, 1.0, 16.0)
    yield "game, extragradient", problem, extragradient, jnp.float32
    proximal = dpb.games.InexactProximalPoint(
        100, 1.5, 1 / 16, 1, dimension=size + len(shares)
    )
    yield "game, proximal point", problem, proximal, jnp.float64


def cast(tree, dtype):
    return jax.tree.map(
        lambda v: jnp.asarray(
            v, dtype if np.issubdtype(v.dtype, np.floating) else None
        ),
        tree,
    )


def average(steps, step_size):
    problem = dpb.FiniteSum(dpb.logistic_loss, w_set=dpb.sets.Ball(RADIUS))
    return problem, dpb.NoisyGD(steps, 1.0, step_size=step_size)


def answers(problem, solver, data, w0, dtype=jnp.float32):
    """What one private run per key releases, and the seconds of the last one."""
    with jax.enable_x64(dtype == jnp.float64):
        data, w0 = cast(data, dtype), cast(w0, dtype)
        plan = dpb.calibrate(problem, solver, BUDGET, sizes=TRAINING, w0=w0)
        assert plan.report.status is dpb.privacy.Status.ENFORCED
        run = jax.jit(dpb.solve, static_argnames="trajectory")
        found = []
        for key in jax.random.split(jax.random.key(0), KEYS):
            start = time.perf_counter()
            solution = run(problem, plan.solver, data, w0, key=key, trajectory=True)
            found.append(jax.tree.map(np.asarray, solution))
            seconds = time.perf_counter() - start
    return found, seconds


def tail(path):
    """The average of the second half of a released path: post-processing."""
    return np.mean(path[len(path) // 2 :], 0)


def reference(problem, solver, data, w0):
    """The same without noise or clipping, for many steps."""
    key = jax.random.key(0)
    run = jax.jit(dpb.solve, static_argnames="trajectory")
    return run(problem, solver.with_noise(0.0), data, w0, key=key, trajectory=True)


def evaluate(name):
    """Losses of every method: an array of keys, training or test, and groups."""
    columns, groups = SETTINGS[name]
    shares, levels = tuple(groups.values()), load(columns, groups)
    zeros = np.zeros(levels[0]["features"].shape[1], np.float32)
    loss = dpb.logistic_loss

    @jax.jit
    def at(x, data):
        return dpb.debug.group_losses(loss, x, data, len(shares))

    def losses(models):
        models = [jnp.asarray(x, jnp.float32) for x in models]
        return np.asarray([[at(x, data) for data in levels] for x in models])

    trials = []
    for steps, step_size in AVERAGE:
        found, seconds = answers(*average(steps, step_size), levels[0], zeros)
        for models in ([s.value for s in found], [tail(s.trajectory) for s in found]):
            trials.append(losses(models))
            print(
                f"  average loss, {steps} steps of {step_size:g}: {shown(trials[-1])}"
            )
    rows = {"average loss": min(trials, key=lambda v: np.median(v[:, 0].max(-1)))}
    for label, problem, solver, dtype in games(shares, len(zeros)):
        start = dpb.games.group_start(problem, zeros, shares)
        found, seconds = answers(problem, solver, levels[0], start, dtype)
        rows[label] = losses([tail(s.trajectory[0]) for s in found])
        whole = shown(losses([s.value[0] for s in found]))
        last = [dpb.games.group_weights(problem, s.value[1]) for s in found]
        weights = np.round(np.median(last, axis=0), 2)
        print(f"  {label}, whole average: {whole}, {seconds:.1f} s, weights {weights}")
    calm = dpb.NoisyGD(2_000, 1e6, step_size=12.0)
    found = reference(average(1, 1.0)[0], calm, levels[0], zeros)
    rows["average loss, not private"] = losses([found.value])
    start = dpb.games.group_start(problem, zeros, shares)
    calm = dpb.games.NoisyExtragradient(2_000, 1e6, 8.0)
    found = reference(problem, calm, levels[0], start)
    rows["game, not private"] = losses([tail(found.trajectory[0])])
    return rows


def shown(losses):
    train, test = (losses[:, i].max(-1) for i in range(2))
    return f"training {quartiles(train)}, test {quartiles(test)}"


def report(name, rows):
    """Prints medians; returns the lines of a table."""
    groups = list(SETTINGS[name][1])
    print(f"{name}: worst-group loss, median and quartiles over {KEYS} keys")
    lines = []
    for label, losses in rows.items():
        print(f"  {label}: {shown(losses)}", flush=True)
        worst = np.median(losses.max(-1), axis=0)
        each = np.median(losses[:, 1], axis=0)
        told = ", ".join(f"{g} {v:.3f}" for g, v in zip(groups, each, strict=True))
        lines.append(f"| {name} | {label} | {worst[0]:.4f} | {worst[1]:.4f} | {told} |")
    return lines


def timing(n=100_000, size=50):
    """A game of generated records: planned, compiled and run."""
    rng = np.random.default_rng(0)
    group = rng.choice(4, n, p=list(BY_BOTH.values()))
    features = rng.normal(size=(n, size)).astype(np.float32) / size**0.5
    truth = rng.normal(size=(4, size))
    label = np.sign(np.sum(features * truth[group], 1)).astype(np.float32)
    data = {"features": features, "label": label, "group": group.astype(np.int32)}
    data = jax.tree.map(jnp.asarray, data)
    shares = tuple(BY_BOTH.values())
    problem = dpb.games.group_fair(dpb.Logistic(), shares, radius=RADIUS, scale=6.0)
    w0 = dpb.games.group_start(problem, jnp.zeros(size), shares)
    for label, steps, sampling in (
        ("all records in each", 100, dpb.FullBatch()),
        ("batches of 1000", 150, dpb.FixedSize(1_000)),
    ):
        solver = dpb.games.NoisyExtragradient(steps, 1.5, 4.0, sampling)
        start = time.perf_counter()
        plan = dpb.calibrate(problem, solver, BUDGET, sizes=n, w0=w0)
        planned = time.perf_counter()
        run = jax.jit(dpb.solve)
        jax.block_until_ready(run(problem, plan.solver, data, w0, key=dpb.root_key()))
        done = time.perf_counter()
        print(
            f"{n} records of {size} features, {steps} extragradient steps, {label}: "
            f"plan {planned - start:.1f} s, compile and run {done - planned:.1f} s"
        )


def main():
    timing()
    if not ADULT.is_file():
        print(f"no census records at {ADULT}: name them in $ADULT")
        return
    results = {name: evaluate(name) for name in SETTINGS}
    lines = [
        "| records | method | training | test | test, each group |",
        "|---|---|---|---|---|",
    ]
    for name, rows in results.items():
        lines += report(name, rows)
    print("\n".join(lines))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "table.md").write_text("\n".join(lines) + "\n")
    draw(results)


def draw(results):
    """Worst-group test loss per key, with what is possible without privacy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.4), layout="constrained")
    colors = {"average loss": "#0072B2"}
    for panels, part, label in zip(
        figure.subplots(2, len(results)), (0, 1), ("training", "test"), strict=True
    ):
        for axes, (name, rows) in zip(panels, results.items(), strict=True):
            private = [row for row in rows if "not private" not in row]
            for i, row in enumerate(private):
                worst = np.sort(rows[row][:, part].max(-1))
                color = colors.get(row, "#D55E00")
                axes.plot(worst, np.full(len(worst), i), "o", color=color, alpha=0.35)
                axes.plot(np.median(worst), i, "|", color=color, ms=22, mew=2.5)
            for row, style in (("average loss", ":"), ("game", "--")):
                value = rows[f"{row}, not private"][0, part].max()
                axes.axvline(value, color="0.4", ls=style, label=f"{row}, not private")
            axes.set_yticks(range(len(private)), private)
            axes.xaxis.get_major_locator().set_params(nbins=5)
            axes.set_ylim(len(private) - 0.5, -0.5)
            axes.set_xlabel(f"worst-group loss, {label} records")
            axes.set_title(name, fontsize=10, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=2)
    figure.suptitle(
        f"epsilon = {BUDGET.epsilon:g}, delta = {BUDGET.delta:g}, {KEYS} keys and "
        "their median; NON-PRIVATE evaluation"
    )
    FigureCanvasAgg(figure).print_png(FOLDER / "figure.png")
    print(f"figure: {FOLDER / 'figure.png'}")
