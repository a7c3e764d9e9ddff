"""Worth of penalties per feature group: `python -m benchmarks penalties`.

Writes results/penalties.md, which says what the tasks are, if the census records are
there. Judged as in `utility`: NON-PRIVATE evaluation.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.bilevel.certificates.certified import Adapted
from dpbilevel.cli.config import read_config
from dpbilevel.cli.tables import read_csv

from . import pages
from .source_tasks import classified, encoded, parts
from .utility import TAIL, exact_search, judged, planned, table, widened

TRAINING, VALIDATION, TEST = 6000, 2000, 12_000
FEATURES, NOISE = 100, 2.7
EPSILON = 1.0
LOW, HIGH = -12.0, 2.0  # bounds of log-penalties; all methods start at the lower one


@dataclasses.dataclass
class Task:
    """Records, groups, and what only an oracle knows."""

    name: str
    data: dpb.Levels  # validation and training records
    test: dict
    groups: np.ndarray  # of each feature
    useful: np.ndarray  # 1 for features that are no noise
    problem: dpb.BilevelProblem  # one penalty per group
    w0: tuple  # least penalties and the model's start
    loss = staticmethod(dpb.logistic_loss)
    correct = staticmethod(classified)
    clip = float(np.hypot(1, NOISE))  # about the norm of a record
    records = None  # for `auto`: the model is linear

    @property
    def model(self):
        """The start of the model."""
        return self.w0[1]

    @property
    def sizes(self):
        """Nobody has records in both levels."""
        return self.problem.sizes_of(self.data, "disjoint")


def census_columns():
    features, label = encoded(read_csv(pages.ADULT))
    data = read_config(pages.ROOT / "configs/census.toml").data
    widths = [1 for block in data.numeric for _ in block.columns]
    widths += [len(column.values) for column in data.categorical] + [1]
    return features, label, np.repeat(np.arange(len(widths)), widths)


def generated_columns(seed=1):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(20_000, 60))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    column = np.repeat(np.arange(12), 5)
    truth = rng.normal(size=60) * (8.0 * 0.7**column) * (column < 8)
    margin = features @ truth + rng.logistic(size=len(features))
    return features.astype("f4"), np.sign(margin).astype("f4"), column


def noisy(name, columns, noise_groups, seed=0):
    features, label, column = columns
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(len(label), FEATURES)) * NOISE / np.sqrt(FEATURES)
    features = np.concatenate([features, noise], axis=1).astype("f4")
    count = column.max() + 1
    groups = np.append(column, count + np.arange(FEATURES) * noise_groups // FEATURES)
    groups = rng.permutation(count + noise_groups)[groups]
    order = rng.permutation(len(label))
    rows = np.split(order, np.cumsum([TRAINING, VALIDATION, TEST]))[:3]
    lower, upper, test = parts(features, label, rows)
    useful = (np.arange(len(groups)) < len(column)).astype("f4")
    problem = dpb.penalty_tuning(dpb.logistic_loss, groups, bounds=(LOW, HIGH))
    w0 = jnp.full(int(groups.max()) + 1, LOW), jnp.zeros(len(groups))
    return Task(name, dpb.Levels(upper, lower), test, groups, useful, problem, w0)


def descent(steps, size, clip=1.0):
    return dpb.NoisyGD(steps, clip, size, output=TAIL)


def two_level(*solvers):
    return lambda task: [(task.problem, solver, task.data) for solver in solvers]


def one_level(settings, reads="both"):
    kind = dpb.bilevel.OneLevel
    return [kind(descent(*values), reads=reads) for values in settings]


ALL = (1e-6, 1.0)  # of the budget for the fit
BOTH = ((50, 6, 2), (50, 12, 1), (50, 12, 2), (50, 24, 1), (100, 8, 1), (30, 12, 2))
LOWER = ((50, 4, 2), (50, 8, 1), (50, 8, 2), (50, 16, 1), (100, 6, 1), (30, 8, 2))
UPPER = ((50, 1, 2), (50, 1, 1), (50, 2, 2), (50, 2, 1), (30, 2, 2), (30, 1, 3))


def ridge(x):
    """Return the problem with one fixed log-penalty for all coefficients."""

    def loss(_, y, record):
        return dpb.logistic_loss(y, record)

    def public(_, y):
        return 0.5 * np.exp(x) * jnp.sum(y * y)

    return dpb.BilevelProblem(loss, loss, lower_public=public, x_in_records=False)


def default_penalty(task):
    problem = ridge(-np.log(len(task.data.lower["label"])))
    return [(problem, solver, task.data) for solver in one_level(BOTH)]


def one_penalty(task):
    (solver,) = one_level([(50, 12, 2)])
    return [(ridge(x), solver, task.data) for x in (-8, -7, -6, -5, -4, -3)]


def penalty(size, fit):
    inner, norms = dpb.NoisyGD(10, 2.0, 4.0), {"clip_norm": 2.0, "upper_clip_norm": 2.0}
    search = dpb.PenaltyBilevel(10, 5.0, inner, step_size=size, **norms)
    return dpb.bilevel.Refitted(search, descent(50, fit, 2.0), budget_split=(0.5, 0.5))


def scaled(size, clip):
    settings = {"margin": 2.0, "full_above": 0.1, "budget_split": (0.25, 0.75)}
    return dpb.applications.ScaledGroups(descent(50, size, clip), **settings)


class Known(dpb.applications.ScaledGroups):
    """The same fit with scales that no private method knows, at the whole budget."""

    known: tuple = eqx.field(static=True, kw_only=True)

    def scales(self, problem, found):
        """Return the scales that are known."""
        return jnp.asarray(self.known)


def oracle(task):
    no_noise = np.zeros(len(task.w0[0]))
    no_noise[task.groups[task.useful > 0]] = 1
    settings = ((50, 12), (50, 24), (100, 12))
    fits = [
        Known(descent(*s), known=tuple(map(float, scales)), budget_split=ALL)
        for scales in (found_scales(task), no_noise)
        for s in settings
    ]
    return [(task.problem, fit, task.data) for fit in fits]


def found_scales(task):
    x = exact_search(task, jnp.full_like(task.w0[0], -6.0), task.model, 40)
    # A penalty e^x of y is one of e^(least x) of u, where y = s u.
    scales = np.exp(0.5 * (np.min(x) - np.asarray(x)))
    print(f"  penalties of the oracle: {np.round(np.asarray(x), 1)}", flush=True)
    return np.minimum(1, scales / np.quantile(scales, 0.75))


METHODS = {
    "validation records only": two_level(*one_level(UPPER, "upper")),
    "training records only": two_level(*one_level(LOWER, "lower")),
    "all records": two_level(*one_level(BOTH)),
    "all records, default penalty": default_penalty,
    "all records, best single penalty": one_penalty,
    "`PenaltyBilevel`, refitted": two_level(
        *(penalty(a, b) for a in (5.0, 50.0, 500.0) for b in (4.0, 8.0))
    ),
    "`ScaledGroups`": two_level(
        *(scaled(b, c) for b in (12.0, 24.0, 48.0) for c in (0.5, 0.7))
    ),
    "`ScaledGroups`, one setting": two_level(scaled(24.0, 0.7)),
    # The plan is given the norm of the records.
    "`auto`": lambda task: two_level(*planned(task, EPSILON))(task),
}
BASELINES = tuple(METHODS)[:5]


def evaluate(task):
    methods = {"oracle": oracle} | METHODS
    methods = {name: functools.partial(made, task) for name, made in methods.items()}
    return table(judged(task, EPSILON, methods, BASELINES), worst_first=True)


def main():
    tasks = [("generated, 10 groups of noise", generated_columns, 10)]
    if pages.ADULT.is_file():
        tasks.append(("census, 10 groups of noise", census_columns, 10))
        tasks.append(("census, one group of noise", census_columns, 1))
    tables = []
    for name, columns, groups in reversed(tasks):
        tables.append(evaluate(noisy(name, columns(), groups)))
        print(tables[-1], flush=True)
    if pages.ADULT.is_file():
        pages.write(pages.RESULTS / "penalties.md", tables)


# --------------------------------------------------------------------- sensitivities


def contributions(problem, x, data, size):
    def lower(y):
        return dpb.debug.lower_objective(problem, x, y, data)

    newton = dpb.oracles.NewtonCG(tolerance=1e-11)
    y, _ = dpb.oracles.lower_solve(problem, x, data, y0=jnp.zeros(size), solver=newton)

    def slope(x):
        return jax.grad(lambda y: dpb.debug.lower_objective(problem, x, y, data))(y)

    moves = -jnp.linalg.solve(jax.hessian(lower)(y), jax.jacobian(slope)(x))
    gradients = jax.vmap(jax.grad(problem.upper, 1), (None, None, 0))
    return gradients(x, y, data.upper) @ moves


def implicit(count=11, upper=1000, lower=20_000):
    """Sensitivities of hypergradients on the census, declared and with clipped records.

    `python -m benchmarks implicit`: a NON-PRIVATE table of results/sensitivities.md.
    """
    if not pages.ADULT.is_file():
        return print(f"implicit: left out, there is no {pages.ADULT.name}")
    jax.config.update("jax_enable_x64", True)
    features, label = encoded(read_csv(pages.ADULT))
    order = np.random.default_rng(0).permutation(len(label))
    rows = order[:upper], order[upper : upper + lower]
    data = widened(dpb.Levels(*parts(features, label, rows)))
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
        short = Adapted(problem.constants, norm).bounds(sizes, x)
        sums = [float(b.upper + b.lower) for b in (plain, short)]
        # Noise of one release at epsilon 1 out of ten, with all coordinates.
        noise = 4.0 * (10 * count) ** 0.5 * sums[1]
        numbers = norm, value, short.upper, plain.upper, plain.lower
        numbers += sums[0] / sums[1], noise / value
        lines.append([f"{level}", *(f"{float(v):.2g}" for v in numbers)])
    head = "x", "C", "hypergradient", "2 C / n", "S_up", "S_low", "noise ratio"
    print(pages.table([*head, "noise / hypergradient"], lines))
