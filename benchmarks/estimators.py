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

import datetime
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
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

from .paths import ADULT, ROOT
from .tuned_training import digits as pixels
from .utility import BEGIN, END, MNIST

PAGE = ROOT / "benchmarks/results/estimators.md"
PEER = os.environ.get("DIFFPRIVLIB", "")
EPSILONS = (0.3, 1.0, 3.0, 10.0)
KEYS, DELTA = 10, 1e-5
MIDDLE = (1.0, 3.0)  # epsilons of further tasks
TIMES, FURTHER = "Seconds of one fit", "Further tasks"
COMPARED = ("census, 5 numbers (its notebook)", "breast cancer")  # settings, too
# Bounds of log-penalties. Rows have length 1, so that useful penalties are far below
# the default bounds, which are for features of unit variance.
PENALTIES = (-16.0, -6.0)
NUMBERS = {
    "age": (17, 90),
    "education-num": (1, 16),
    "capital-gain": (0, 100_000),
    "capital-loss": (0, 5000),
    "hours-per-week": (1, 99),
}
CATEGORIES = ("workclass", "marital-status", "occupation", "relationship")
CATEGORIES += ("race", "sex")


def census(categories):
    """Features, incomes and public bounds; the numbers of the notebook, or all."""
    names, *rows = (line.strip().split(",") for line in ADULT.open())
    columns = dict(zip(names, np.asarray(rows).T, strict=True))
    parts = [columns[name].astype(float)[:, None] for name in NUMBERS]
    lower, upper = (list(v) for v in zip(*NUMBERS.values(), strict=True))
    for name in categories:
        parts.append(columns[name][:, None] == np.unique(columns[name]))
    X = np.concatenate(parts, axis=1).astype(float)
    more = X.shape[1] - len(lower)
    bounds = np.asarray([lower + [0] * more, upper + [1] * more], float)
    return X, (columns["income-per-year"] == ">50K").astype(int), bounds


def rounded(X):
    """Bounds a little wider than the range: what a person who knows the field says."""
    low, high = X.min(axis=0), X.max(axis=0)
    margin = 0.05 * (high - low) + 1e-9
    return np.asarray([low - margin, high + margin])


def tasks():
    """For each task its records, bounds and the norm that diffprivlib is given."""
    found = {}
    if ADULT.is_file():
        found["census, 5 numbers (its notebook)"] = (*census(()), 2.0)
        X, y, bounds = census(CATEGORIES)
        found["census, all columns"] = X, y, bounds, 3.0
    X, y = datasets.load_iris(return_X_y=True)
    found["iris (its docstring)"] = X, y, np.asarray([[4, 2, 1, 0], [8, 5, 7, 3]]), 12.0
    X, y = datasets.load_breast_cancer(return_X_y=True)
    found["breast cancer"] = X, y, rounded(X), 3.0
    X, y = datasets.load_digits(return_X_y=True)
    found["digits"] = X, y, np.asarray([[0.0] * 64, [16.0] * 64]), 4.0
    if MNIST.is_file():
        X, y = pixels()
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


def each_feature(bounds, X):
    """Return a lower and an upper bound for each feature."""
    return np.broadcast_to(np.reshape(bounds, (2, -1)), (2, X.shape[1])).astype(float)


def splits(X, y, keys=KEYS):
    """Return the records of each key: training and test."""
    for seed in range(keys):
        yield train_test_split(X, y, test_size=0.25, random_state=seed)


def scores(make, X, y, epsilons=EPSILONS, keys=KEYS):
    """For each epsilon the test scores of an estimator, one a key, and its seconds."""
    found, seconds = {}, []
    jax.clear_caches()
    for epsilon in epsilons:
        model = make(epsilon)
        found[epsilon] = []
        for seed, (X_fit, X_test, y_fit, y_test) in enumerate(splits(X, y, keys)):
            key = jax.random.key(seed, impl="threefry4x32")
            start = time.perf_counter()
            model.fit(X_fit, y_fit, key=key)
            seconds.append(time.perf_counter() - start)
            found[epsilon].append(model.score(X_test, y_test))
    return found, seconds


def without_privacy(model, X, y, keys=KEYS):
    """NON-PRIVATE scores, the same for every epsilon, and seconds."""
    values, seconds = [], []
    for X_fit, X_test, y_fit, y_test in splits(X, y, keys):
        start = time.perf_counter()
        scale = StandardScaler().fit(X_fit)
        model.fit(scale.transform(X_fit), y_fit)
        seconds.append(time.perf_counter() - start)
        values.append(model.score(scale.transform(X_test), y_test))
    return dict.fromkeys(EPSILONS, values), seconds


def by_peer(kind, X, y, epsilons=EPSILONS, keys=KEYS, **options):
    """Return `scores` of diffprivlib, in its own process; `None` without it."""
    if not PEER:
        return None
    with tempfile.TemporaryDirectory() as folder:
        given = f"{folder}/records.npz"
        np.savez(given, X=X, y=y, **options)
        command = [PEER, str(ROOT / "benchmarks/estimators_peer.py"), kind, given]
        command += [json.dumps([epsilons, keys])]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    pairs, seconds = json.loads(done.stdout)
    return {float(epsilon): values for epsilon, values in pairs.items()}, seconds


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
    solver = dpb.applications.ScaledGroups(
        dpb.NoisyGD(200, 0.25, 24.0, output=dpb.outputs.TailMean()),
        margin=2.0,
        full_above=0.1,
    )
    sizes = dpb.Sizes(cut, size - cut, "disjoint")
    start = jnp.full(width, sum(PENALTIES) / 2), jnp.zeros(width)
    plan = dpb.calibrate(problem, solver, budget, sizes=sizes)
    return run(problem, plan.solver, dpb.Levels(upper, lower), start, key=key).y


@functools.lru_cache
def penalties(width):
    groups = jnp.arange(width)
    return dpb.penalty_tuning(dpb.logistic_loss, groups, bounds=PENALTIES)


run = jax.jit(dpb.solve)


def table(title, head, rows):
    """Return a table of the page, with the day on which it was measured."""
    today = datetime.date.today().isoformat()
    lines = [f"#### {title}", "", f"Measured on {today}.", ""]
    lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def cells(values, epsilons):
    """For each epsilon the median and the quartiles."""
    for epsilon in epsilons:
        low, middle, high = np.quantile(values[epsilon], (0.25, 0.5, 0.75))
        yield f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def of_classes(name, X, y, bounds, norm, epsilons=EPSILONS, keys=KEYS):
    """Return the scores and seconds of each method for one task of classification."""
    classes = np.unique(y)
    facts = {"classes": classes, "bounds": tuple(bounds)}
    amount = {"epsilons": epsilons, "keys": keys}
    # diffprivlib has one norm for all features: they are scaled to [0, 1] first.
    unit = (X - bounds[0]) / (bounds[1] - bounds[0])
    own = X if name.startswith("iris") else unit
    plain = LogisticRegression(max_iter=1000)
    found = {"diffprivlib": by_peer("logistic", own, y, norm=norm, **amount)}
    if own is X:
        scaled = by_peer("logistic", unit, y, norm=2.0, **amount)
        found["diffprivlib, features scaled to [0, 1]"] = scaled
    if epsilons == MIDDLE:  # rows around 0, as the estimators here make them
        around = by_peer("logistic", 2 * unit - 1, y, norm=norm, **amount)
        found["diffprivlib, features scaled to [-1, 1]"] = around
    found["`DPLogisticRegression`"] = scores(
        lambda epsilon: DPLogisticRegression(epsilon, **facts), X, y, **amount
    )
    if name in COMPARED and epsilons == EPSILONS:
        for ridge in (1e-4, 1e-3):
            found[f"the same with `ridge={ridge:g}`"] = scores(
                lambda epsilon, ridge=ridge: DPLogisticRegression(
                    epsilon, ridge=ridge, **facts
                ),
                X,
                y,
            )
        found["penalties tuned privately (`applications.ScaledGroups`)"] = scores(
            lambda epsilon: Planned(epsilon, bounds, tuned), X, y
        )
        found["settings by `dpb.auto`"] = scores(
            lambda epsilon: Planned(epsilon, bounds, by_auto), X, y
        )
    if len(classes) == 10 or epsilons == MIDDLE:
        found["`DPMLPClassifier`"] = scores(
            lambda epsilon: DPMLPClassifier(epsilon, **facts), X, y, **amount
        )
    found["without privacy (scikit-learn)"] = without_privacy(plain, X, y, keys)
    return {method: measured for method, measured in found.items() if measured}


def of_numbers(X, y, bounds, target, epsilons=EPSILONS, keys=KEYS):
    """Return the same as `of_classes`, for one task of regression."""
    facts = {"bounds": tuple(each_feature(bounds, X)), "target_bounds": target}
    amount = {"epsilons": epsilons, "keys": keys}
    own = {"bounds": each_feature(bounds, X), "target": target}
    plain = LinearRegression()
    found = {
        "diffprivlib": by_peer("linear", X, y, **own, **amount),
        "`DPRidge`": scores(lambda epsilon: DPRidge(epsilon, **facts), X, y, **amount),
        "without privacy (scikit-learn)": without_privacy(plain, X, y, keys),
    }
    return {method: measured for method, measured in found.items() if measured}


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


def times():
    """Time the first fit and three later ones (their median) in seconds."""
    amount = {"epsilons": (1.0,), "keys": 4}
    rows = []
    found = [(n, of_classes, (n, *task)) for n, task in tasks().items()]
    found += [(n, of_numbers, task) for n, task in regressions().items()]
    for name, measure, task in found:
        if name.startswith("MNIST"):  # takes minutes
            continue
        for method, (_, seconds) in measure(*task, **amount).items():
            later = np.median(seconds[1:])
            rows.append([name, method, f"{seconds[0]:.3f}", f"{later:.3f}"])
            print(*rows[-1], flush=True)
    return table(TIMES, ["task", "method", "first fit", "later fit"], rows)


def further_tasks():
    """Further tasks, all with default settings."""
    rows = []
    found = [(n, of_classes, (n, *task)) for n, task in further().items()]
    found += [(n, of_numbers, task) for n, task in further_regressions().items()]
    for name, measure, task in found:
        for method, (values, _) in measure(*task, epsilons=MIDDLE).items():
            rows.append([name, method, *cells(values, MIDDLE)])
            print(*rows[-1], flush=True)
    head = ["test accuracy (Friedman: R²) at epsilon", "method"]
    head += [f"{epsilon:g}" for epsilon in MIDDLE]
    return table(FURTHER, head, rows)


def of_task(name, unit, found):
    """Return the table of one task."""
    rows = [[method, *cells(values, EPSILONS)] for method, (values, _) in found.items()]
    return table(name, [f"{unit} at epsilon", *map("{:g}".format, EPSILONS)], rows)


def keep(new):
    """Put a table into the page, in place of the one of its title or as the last."""
    before, inside, after = re.split(f"{BEGIN}|{END}", PAGE.read_text())
    old = re.findall("#### [^#]*", inside)
    tables = {text.splitlines()[0]: text.strip() for text in (*old, new)}
    inside = "\n\n".join([BEGIN, *tables.values(), END])
    PAGE.write_text(before + inside + after)


def main():
    warnings.simplefilter("ignore")
    options = dict(text[2:].split("=", 1) for text in sys.argv[1:] if "=" in text)
    wanted = {TIMES: times}  # first, while nothing is compiled or planned
    for name, task in tasks().items():
        wanted[name] = lambda name=name, task=task: of_task(
            name, "test accuracy", of_classes(name, *task)
        )
    for name, task in regressions().items():
        wanted[name] = lambda name=name, task=task: of_task(
            name, "test R²", of_numbers(*task)
        )
    wanted[FURTHER] = further_tasks
    for name, measure in wanted.items():
        if not name.startswith(options.get("task", "")):
            continue
        measured = measure()
        print(measured, flush=True)
        if PEER and ADULT.is_file() and MNIST.is_file():
            keep(measured)
