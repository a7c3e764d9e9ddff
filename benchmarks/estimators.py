"""Estimators beside diffprivlib and settings of other kinds: docs/estimators.md.

Tasks of diffprivlib's notebooks and docstrings and larger ones of scikit-learn: medians
and quartiles of 10 splits into training and test records, each with a key of its own,
test accuracy or R^2, at equal epsilon. Where bounds are needed all methods get the same
public ones. Tasks are held out where no setting was chosen with them in view.
diffprivlib runs in a process of its own, by the Python of $DIFFPRIVLIB, in
whose environment it is installed; without it its rows are left out. Prints tables and
writes them into the page where everything is there. `python -m benchmarks estimators`.
"""

import functools
import json
import os
import subprocess
import tempfile
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

from .census import ADULT, ROOT
from .tuned_training import digits as pixels
from .utility import MNIST, write

PAGE = ROOT / "docs/estimators.md"
PEER = os.environ.get("DIFFPRIVLIB", "")
EPSILONS = (0.3, 1.0, 3.0, 10.0)
KEYS, DELTA = 10, 1e-5
COMPARED = ("census, 5 numbers (its notebook)", "breast cancer")  # settings, too
# Of log-penalties: rows have length 1, so that useful ones are far below the default's,
# which is for features of unit variance.
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


def splits(X, y):
    """The records of each key: training and test."""
    for seed in range(KEYS):
        yield train_test_split(X, y, test_size=0.25, random_state=seed)


def scores(make, X, y, epsilons=EPSILONS):
    """The test scores of an estimator, for each epsilon one number a key."""
    found = {}
    for epsilon in epsilons:
        model = make(epsilon)
        found[epsilon] = []
        for seed, (X_fit, X_test, y_fit, y_test) in enumerate(splits(X, y)):
            key = jax.random.key(seed, impl="threefry4x32")
            found[epsilon].append(
                model.fit(X_fit, y_fit, key=key).score(X_test, y_test)
            )
    return found


def without_privacy(model, X, y):
    """NON-PRIVATE scores, the same for every epsilon."""
    values = []
    for X_fit, X_test, y_fit, y_test in splits(X, y):
        scale = StandardScaler().fit(X_fit)
        model.fit(scale.transform(X_fit), y_fit)
        values.append(model.score(scale.transform(X_test), y_test))
    return dict.fromkeys(EPSILONS, values)


def by_peer(kind, X, y, **options):
    """The scores of diffprivlib, in its own process; `None` where it is not there."""
    if not PEER:
        return None
    with tempfile.TemporaryDirectory() as folder:
        given = f"{folder}/records.npz"
        np.savez(given, X=X, y=y, **options)
        command = [PEER, str(ROOT / "benchmarks/estimators_peer.py"), kind, given]
        command += [json.dumps([EPSILONS, KEYS])]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    pairs = json.loads(done.stdout)
    return {float(epsilon): values for epsilon, values in pairs.items()}


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
        """The accuracy."""
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
    solver = dpb.bilevel.ScaledGroups(
        dpb.NoisyGD(200, 0.25, 24.0, output=dpb.outputs.TailMean())
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


def table(title, found, unit):
    """Rows of methods, a column for each epsilon."""
    lines = [
        f"#### {title}",
        "",
        f"| {unit} |" + "".join(f" {e:g} |" for e in EPSILONS),
    ]
    lines += ["|---|" + "---|" * len(EPSILONS)]
    for method, values in found.items():
        cells = []
        for epsilon in EPSILONS:
            low, middle, high = np.quantile(values[epsilon], (0.25, 0.5, 0.75))
            cells.append(f" {middle:.3f} [{low:.3f}, {high:.3f}] |")
        lines.append(f"| {method} |" + "".join(cells))
    return "\n".join(lines)


def of_classes(name, X, y, bounds, norm):
    """The rows of one task of classification."""
    classes = np.unique(y)
    facts = {"classes": classes, "bounds": tuple(bounds)}
    # diffprivlib has one norm for all features: they are scaled to [0, 1] first.
    unit = (X - bounds[0]) / (bounds[1] - bounds[0])
    own = X if name.startswith("iris") else unit
    plain = LogisticRegression(max_iter=1000)
    found = {"diffprivlib": by_peer("logistic", own, y, norm=norm)}
    if own is X and norm == 12.0:
        scaled = by_peer("logistic", unit, y, norm=2.0)
        found["diffprivlib, features scaled to [0, 1]"] = scaled
    found["`DPLogisticRegression`"] = scores(
        lambda epsilon: DPLogisticRegression(epsilon, **facts), X, y
    )
    if name in COMPARED:
        for ridge in (1e-4, 1e-3):
            found[f"the same with `ridge={ridge:g}`"] = scores(
                lambda epsilon, ridge=ridge: DPLogisticRegression(
                    epsilon, ridge=ridge, **facts
                ),
                X,
                y,
            )
        found["penalties tuned privately (`bilevel.ScaledGroups`)"] = scores(
            lambda epsilon: Planned(epsilon, bounds, tuned), X, y
        )
        found["settings by `dpb.auto`"] = scores(
            lambda epsilon: Planned(epsilon, bounds, by_auto), X, y
        )
    if len(classes) == 10:
        found["`DPMLPClassifier`"] = scores(
            lambda epsilon: DPMLPClassifier(epsilon, **facts), X, y
        )
    found["without privacy (scikit-learn)"] = without_privacy(plain, X, y)
    found = {method: values for method, values in found.items() if values}
    return table(name, found, "test accuracy at epsilon")


def of_numbers(name, X, y, bounds, target):
    """The rows of one task of regression."""
    facts = {"bounds": tuple(bounds), "target_bounds": target}
    both = np.broadcast_to(np.reshape(bounds, (2, -1)), (2, X.shape[1]))
    found = {
        "diffprivlib": by_peer("linear", X, y, bounds=both, target=target),
        "`DPRidge`": scores(lambda epsilon: DPRidge(epsilon, **facts), X, y),
        "without privacy (scikit-learn)": without_privacy(LinearRegression(), X, y),
    }
    found = {method: values for method, values in found.items() if values}
    return table(name, found, "test R² at epsilon")


def regressions():
    """For each task its records and the bounds of features and target."""
    X, y = datasets.load_diabetes(return_X_y=True)
    found = {"diabetes (its notebook)": (X, y, (-0.2, 0.2), (25.0, 346.0))}
    X, y = datasets.make_friedman1(5000, noise=1.0, random_state=0)
    found["Friedman's first, 5 000 records (held out)"] = X, y, (0.0, 1.0), (0.0, 30.0)
    return found


def main():
    warnings.simplefilter("ignore")
    tables = []
    for name, records in tasks().items():
        tables.append(of_classes(name, *records))
        print(tables[-1], flush=True)
    for name, records in regressions().items():
        tables.append(of_numbers(name, *records))
        print(tables[-1], flush=True)
    if PEER and ADULT.is_file() and MNIST.is_file():
        write(PAGE, tables)
