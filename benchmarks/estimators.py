"""Estimators beside diffprivlib and settings of other kinds: results/estimators.md.

Tasks of diffprivlib's notebooks and docstrings and larger ones of scikit-learn: medians
and quartiles of 10 splits into training and test records, each with a key of its own,
test accuracy or R^2, at equal epsilon. Where bounds are needed all methods get the same
public ones. diffprivlib runs in a process of its own, by the Python of $DIFFPRIVLIB, in
whose environment it is installed. Prints tables, and with everything there puts each
into the page in place of the one of the same title. `python -m benchmarks estimators`;
`--task=iris` runs the tasks whose names begin so, `--task=Seconds` and `--task=Further`
those two tables.
"""

import functools
import math
import os
import re
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import dpbilevel as dpb
from dpbilevel.sklearn import DPLogisticRegression, DPMLPClassifier, DPRidge
from dpbilevel.sklearn.declared import frame
from dpbilevel.sklearn.linear import with_constant

from . import pages
from .pages import ADULT, MNIST
from .source_tasks import mnist
from .table_tasks import DELTA, EPSILONS, declared, in_other_process

PAGE = pages.RESULTS / "estimators.md"
KEYS = 10
MIDDLE = (1.0, 3.0)  # epsilons of further tasks
TIMES, FURTHER = "Seconds of one fit", "Further tasks"
COMPARED = ("census, 5 numbers (its notebook)", "breast cancer")  # settings, too
# Bounds of log-penalties. Rows have length 1, so that useful penalties are far below
# the default bounds, which are for features of unit variance.
PENALTIES = (-16.0, -6.0)


def census(categories):
    """Features, incomes and public bounds; the numbers of the notebook, or all."""
    names, *rows = (line.strip().split(",") for line in ADULT.open())
    columns = dict(zip(names, np.asarray(rows).T, strict=True))
    table = declared()["census"]
    parts = [columns[name].astype(float)[:, None] for name in table.numbers]
    if categories:
        parts += [columns[n][:, None] == v for n, v in table.categories.items()]
    X = np.concatenate(parts, axis=1).astype(float)
    bits = np.tile((0.0, 1.0), (X.shape[1] - len(table.numbers), 1))
    bounds = np.concatenate([[*table.numbers.values()], bits]).T
    return X, (columns[table.target] == table.positive).astype(int), bounds


def rounded(X):
    """Bounds a little wider than the range: what a person who knows the field says."""
    low, high = X.min(axis=0), X.max(axis=0)
    margin = 0.05 * (high - low) + 1e-9
    return np.asarray([low - margin, high + margin])


def tasks():
    """For each task its records, bounds and the norm that diffprivlib is given."""
    found = {}
    if ADULT.is_file():
        found["census, 5 numbers (its notebook)"] = (*census(False), 2.0)
        found["census, all columns"] = (*census(True), 3.0)
    X, y = datasets.load_iris(return_X_y=True)
    found["iris (its docstring)"] = X, y, np.asarray([[4, 2, 1, 0], [8, 5, 7, 3]]), 12.0
    X, y = datasets.load_breast_cancer(return_X_y=True)
    found["breast cancer"] = X, y, rounded(X), 3.0
    X, y = datasets.load_digits(return_X_y=True)
    found["digits"] = X, y, np.asarray([[0.0] * 64, [16.0] * 64]), 4.0
    if MNIST.is_file():
        X, y = mnist(MNIST)
        found["MNIST, 14 x 14 (held out)"] = X, y, np.asarray([[0.0], [1.0]]), 10.0
    return found


def further():
    """Tasks of classification on which no setting was chosen, as in `tasks`.

    Bounds were fixed before the first run, by what the generator documents. The norm
    that diffprivlib is given is that of a row whose features are uniform in [0, 1], or
    in [-1, 1].
    """
    X, y = datasets.load_digits(return_X_y=True)
    found = {"digits, even or odd": (X, y % 2, (0.0, 16.0))}
    for size, width, informative, classes in (
        (500, 10, 4, 2),
        (5000, 20, 5, 2),
        (3000, 30, 10, 4),
    ):
        X, y = datasets.make_classification(
            size, width, n_informative=informative, n_classes=classes, random_state=size
        )
        name = f"`make_classification`, {size} x {width}, {classes} classes"
        found[name] = X, y, (-6.0, 6.0)
    X, y = datasets.make_gaussian_quantiles(
        n_samples=5000, n_features=5, n_classes=3, random_state=0
    )
    found["`make_gaussian_quantiles`, 5000 x 5, 3 classes"] = X, y, (-4.0, 4.0)
    return {
        name: (X, y, each_feature(bounds, X), math.sqrt(X.shape[1] / 3))
        for name, (X, y, bounds) in found.items()
    }


def regressions():
    """For each task its records and the bounds of features and target."""
    X, y = datasets.load_diabetes(return_X_y=True)
    return {"diabetes (its notebook)": (X, y, (-0.2, 0.2), (25.0, 346.0))}


def further_regressions():
    """Return tasks on which no setting was chosen; bounds are of the generators."""
    # The range of the features of Friedman's second and third, by their definition.
    ends = np.asarray([[0, 40 * np.pi, 0, 1], [100, 560 * np.pi, 1, 11]])
    X, y = datasets.make_friedman1(5000, noise=1.0, random_state=0)
    found = {"Friedman's first, 5000 x 10": (X, y, (0.0, 1.0), (0.0, 30.0))}
    X, y = datasets.make_friedman2(2000, noise=100.0, random_state=0)
    found["Friedman's second, 2000 x 4"] = X, y, ends, (0.0, 1800.0)
    X, y = datasets.make_friedman3(2000, noise=0.1, random_state=0)
    found["Friedman's third, 2000 x 4"] = X, y, ends, (-np.pi / 2, np.pi / 2)
    return found


def each_feature(bounds, X):
    """Return a lower and an upper bound for each feature."""
    return np.broadcast_to(np.reshape(bounds, (2, -1)), (2, X.shape[1])).astype(float)


def splits(y, keys):
    """Return the rows of each key: training and test."""
    rows = np.arange(len(y))
    return [train_test_split(rows, test_size=0.25, random_state=k) for k in range(keys)]


def scores(make, X, y, epsilons=EPSILONS, keys=KEYS):
    """For each epsilon the test scores of an estimator, one a key, and its seconds."""
    found, seconds = {}, []
    jax.clear_caches()
    for epsilon in epsilons:
        model = make(epsilon)
        found[epsilon] = []
        for seed, (fit, test) in enumerate(splits(y, keys)):
            key = jax.random.key(seed, impl="threefry4x32")
            X_fit, y_fit, start = X[fit], y[fit], time.perf_counter()
            model.fit(X_fit, y_fit, key=key)
            seconds.append(time.perf_counter() - start)
            found[epsilon].append(model.score(X[test], y[test]))
    return found, seconds


def without_privacy(model, X, y, keys=KEYS):
    """NON-PRIVATE scores, the same for every epsilon, and seconds."""
    values, seconds = [], []
    for fit, test in splits(y, keys):
        X_fit, start = X[fit], time.perf_counter()
        scale = StandardScaler().fit(X_fit)
        model.fit(scale.transform(X_fit), y[fit])
        seconds.append(time.perf_counter() - start)
        values.append(model.score(scale.transform(X[test]), y[test]))
    return dict.fromkeys(EPSILONS, values), seconds


def by_peer(kind, X, y, epsilons=EPSILONS, keys=KEYS, **options):
    """Return `scores` of diffprivlib, in its own process; `None` without it."""
    if not os.environ.get("DIFFPRIVLIB"):
        return None
    pairs = splits(y, keys)
    options |= {"orders": [np.concatenate(pair) for pair in pairs]}
    options |= {"cut": len(pairs[0][0]), "epsilons": epsilons}
    found = in_other_process(kind, "DIFFPRIVLIB", X=X, y=y, **options)
    values = dict(zip(epsilons, found["scores"].tolist(), strict=True))
    return values, found["seconds"].ravel().tolist()


class Planned:
    """A logistic model of the same rows by another solver, with `fit` and `score`."""

    def __init__(self, epsilon, bounds, planned):
        self.budget, self.bounds = dpb.PrivacyBudget(epsilon, DELTA), bounds
        self.planned = planned

    def records(self, X, y):
        """In the units of the estimators."""
        units = frame("benchmark", X.shape[1], tuple(self.bounds), None)
        rows = with_constant(units.rows(X), np.ones(len(X), bool), True)
        return {"features": jnp.asarray(rows), "label": jnp.asarray(2.0 * y - 1)}

    def fit(self, X, y, key):
        """Plans and runs."""
        self.model = self.planned(self.records(X, y), self.budget, key)
        return self

    def score(self, X, y):
        """Return the accuracy."""
        margin = self.records(X, y)["features"] @ self.model
        return float(jnp.mean((margin > 0) == y))


@functools.lru_cache
def plan_of_auto(budget, size, width):
    problem = dpb.FiniteSum(dpb.logistic_loss)
    return problem, dpb.auto(problem, budget, sizes=size, w0=jnp.zeros(width)).solver


def by_auto(records, budget, key):
    """Step size and length by dry runs on synthetic records."""
    size, width = records["features"].shape
    problem, solver = plan_of_auto(budget, size, width)
    return run(problem, solver, records, jnp.zeros(width), key=key).value


def tuned(records, budget, key):
    """One ridge for each coefficient, tuned privately on a quarter of the records."""
    size, width = records["features"].shape
    cut = size // 4
    parts = (slice(None, cut), slice(cut, None))
    upper, lower = (jax.tree.map(lambda v, p=part: v[p], records) for part in parts)
    problem = penalties(width)
    descent = dpb.NoisyGD(200, 0.25, 24.0, output=dpb.outputs.TailMean())
    solver = dpb.applications.ScaledGroups(descent, margin=2.0, full_above=0.1)
    sizes = dpb.Sizes(cut, size - cut, "disjoint")
    start = jnp.full(width, sum(PENALTIES) / 2), jnp.zeros(width)
    plan = dpb.calibrate(problem, solver, budget, sizes=sizes)
    return run(problem, plan.solver, dpb.Levels(upper, lower), start, key=key).y


@functools.lru_cache
def penalties(width):
    groups = jnp.arange(width)
    return dpb.penalty_tuning(dpb.logistic_loss, groups, bounds=PENALTIES)


run = jax.jit(dpb.solve)


def of_classes(name, X, y, bounds, norm, epsilons=EPSILONS, keys=KEYS):
    """Return the scores and seconds of each method for one task of classification."""
    facts = {"classes": np.unique(y), "bounds": tuple(bounds)}
    amount = {"epsilons": epsilons, "keys": keys}
    found = {}

    def add(method, kind, *given, **more):
        found[method] = scores(lambda e: kind(e, *given, **more), X, y, **amount)

    # diffprivlib has one norm for all features: they are scaled to [0, 1] first.
    unit = (X - bounds[0]) / (bounds[1] - bounds[0])
    own = X if name.startswith("iris") else unit
    found["diffprivlib"] = by_peer("logistic", own, y, norm=norm, **amount)
    if own is X:
        scaled = by_peer("logistic", unit, y, norm=2.0, **amount)
        found["diffprivlib, features scaled to [0, 1]"] = scaled
    if epsilons == MIDDLE:  # rows around 0, as the estimators here make them
        around = by_peer("logistic", 2 * unit - 1, y, norm=norm, **amount)
        found["diffprivlib, features scaled to [-1, 1]"] = around
    add("`DPLogisticRegression`", DPLogisticRegression, **facts)
    if name in COMPARED and epsilons == EPSILONS:
        for ridge in (1e-4, 1e-3):
            title = f"the same with `ridge={ridge:g}`"
            add(title, DPLogisticRegression, ridge=ridge, **facts)
        title = "penalties tuned privately (`applications.ScaledGroups`)"
        add(title, Planned, bounds, tuned)
        add("settings by `dpb.auto`", Planned, bounds, by_auto)
    if len(facts["classes"]) == 10 or epsilons == MIDDLE:
        add("`DPMLPClassifier`", DPMLPClassifier, **facts)
    plain = LogisticRegression(max_iter=1000)
    found["without privacy (scikit-learn)"] = without_privacy(plain, X, y, keys)
    return {method: measured for method, measured in found.items() if measured}


def of_numbers(name, X, y, bounds, target, epsilons=EPSILONS, keys=KEYS):
    """Return the same as `of_classes`, for one task of regression."""
    limits, amount = each_feature(bounds, X), {"epsilons": epsilons, "keys": keys}
    facts = {"bounds": tuple(limits), "target_bounds": target}
    plain = LinearRegression()
    found = {
        "diffprivlib": by_peer("linear", X, y, limits=limits, target=target, **amount),
        "`DPRidge`": scores(lambda epsilon: DPRidge(epsilon, **facts), X, y, **amount),
        "without privacy (scikit-learn)": without_privacy(plain, X, y, keys),
    }
    return {method: measured for method, measured in found.items() if measured}


# -------------------------------------------------------------------------- the tables


def table(title, head, rows):
    """Return a table of the page, with the day on which it was measured."""
    return f"#### {title}\n\n{pages.measured_today()}\n\n{pages.table(head, rows)}"


def times():
    """Time the first fit and three later ones (their median) in seconds.

    No program comes from a cache on disk, which would hide what a first fit compiles.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    amount = {"epsilons": (1.0,), "keys": 4}
    rows = []
    for name, measure, task in listed(tasks(), regressions()):
        if name.startswith("MNIST"):  # takes minutes
            continue
        for method, (_, seconds) in measure(name, *task, **amount).items():
            later = np.median(seconds[1:])
            rows.append([name, method, f"{seconds[0]:.3f}", f"{later:.3f}"])
            print(*rows[-1], flush=True)
    return table(TIMES, ["task", "method", "first fit", "later fit"], rows)


def listed(of_class, of_number):
    """Return name, measure and facts of tasks of both kinds."""
    found = [(name, of_classes, task) for name, task in of_class.items()]
    return found + [(name, of_numbers, task) for name, task in of_number.items()]


def cells(values, epsilons):
    return [pages.spread(values[epsilon], ".3f") for epsilon in epsilons]


def further_tasks():
    """Further tasks, all with default settings."""
    rows = []
    for name, measure, task in listed(further(), further_regressions()):
        for method, (values, _) in measure(name, *task, epsilons=MIDDLE).items():
            rows.append([name, method, *cells(values, MIDDLE)])
            print(*rows[-1], flush=True)
    head = ["test accuracy (Friedman: R²) at epsilon", "method", "1", "3"]
    return table(FURTHER, head, rows)


def of_task(name, measure, task):
    """Return the table of one task."""
    rows = [
        [method, *cells(values, EPSILONS)]
        for method, (values, _) in measure(name, *task).items()
    ]
    unit = "test accuracy" if measure is of_classes else "test R²"
    return table(name, [f"{unit} at epsilon", *map("{:g}".format, EPSILONS)], rows)


def keep(new):
    """Put a table into the page, in place of the one of its title or as the last."""
    _, inside, _ = re.split(f"{pages.BEGIN}|{pages.END}", PAGE.read_text())
    old = re.findall("#### [^#]*", inside)
    tables = {text.splitlines()[0]: text.strip() for text in (*old, new)}
    PAGE.write_text(pages.written(PAGE.read_text(), [*tables.values()]))


def main():
    warnings.simplefilter("ignore")
    wanted = {TIMES: times}  # first, while nothing is compiled or planned
    for given in listed(tasks(), regressions()):
        wanted[given[0]] = functools.partial(of_task, *given)
    wanted[FURTHER] = further_tasks
    for name, measure in wanted.items():
        if name.startswith(pages.options().get("task", "")):
            measured = measure()
            print(measured, flush=True)
            if os.environ.get("DIFFPRIVLIB") and ADULT.is_file() and MNIST.is_file():
                keep(measured)
