"""Estimators beside diffprivlib: `python -m benchmarks estimators`.

diffprivlib runs by the Python of $DIFFPRIVLIB. With everything there each table goes
into results/estimators.md. `--task=iris` runs the tasks whose names begin so,
`--task=Seconds` that table.
"""

import functools
import os
import re
import time
import warnings

import jax
import numpy as np
from sklearn import datasets
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dpbilevel.sklearn import DPLogisticRegression, DPMLPClassifier, DPRidge

from . import pages
from .source_tasks import mnist
from .table_tasks import EPSILONS, declared, in_other_process

PAGE = pages.RESULTS / "estimators.md"
KEYS = 10
TIMES = "Seconds of one fit"


def census(categories):
    """Features, incomes and public bounds; the numbers of the notebook, or all."""
    names, *rows = (line.strip().split(",") for line in pages.ADULT.open())
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
    found = {}
    if pages.ADULT.is_file():
        found["census, 5 numbers (its notebook)"] = (*census(False), 2.0)
        found["census, all columns"] = (*census(True), 3.0)
    X, y = datasets.load_iris(return_X_y=True)
    found["iris (its docstring)"] = X, y, np.asarray([[4, 2, 1, 0], [8, 5, 7, 3]]), 12.0
    X, y = datasets.load_breast_cancer(return_X_y=True)
    found["breast cancer"] = X, y, rounded(X), 3.0
    X, y = datasets.load_digits(return_X_y=True)
    found["digits"] = X, y, np.asarray([[0.0] * 64, [16.0] * 64]), 4.0
    if pages.MNIST.is_file():
        X, y = mnist(pages.MNIST)
        found["MNIST, 14 x 14 (held out)"] = X, y, np.asarray([[0.0], [1.0]]), 10.0
    return found


def splits(y, keys):
    rows = np.arange(len(y))
    return [train_test_split(rows, test_size=0.25, random_state=k) for k in range(keys)]


def scores(make, X, y, epsilons=EPSILONS, keys=KEYS):
    """Return scores by epsilon, and seconds; an epsilon of None is no privacy."""
    found, seconds = {}, []
    jax.clear_caches()
    for epsilon in epsilons:
        model = make(epsilon)
        found[epsilon] = []
        for seed, (fit, test) in enumerate(splits(y, keys)):
            key = jax.random.key(seed, impl="threefry4x32")
            more = {"key": key} if epsilon else {}
            X_fit, y_fit, start = X[fit], y[fit], time.perf_counter()
            model.fit(X_fit, y_fit, **more)
            seconds.append(time.perf_counter() - start)
            found[epsilon].append(model.score(X[test], y[test]))
    return found, seconds


def without_privacy(model, X, y, keys=KEYS):
    """NON-PRIVATE scores, the same for every epsilon, and seconds."""
    scaled = make_pipeline(StandardScaler(), model)
    found, seconds = scores(lambda _: scaled, X, y, (None,), keys)
    return dict.fromkeys(EPSILONS, found[None]), seconds


def by_peer(kind, X, y, epsilons=EPSILONS, keys=KEYS, **options):
    if not os.environ.get("DIFFPRIVLIB"):
        return None
    pairs = splits(y, keys)
    options |= {"orders": [np.concatenate(pair) for pair in pairs]}
    options |= {"cut": len(pairs[0][0]), "epsilons": epsilons}
    found = in_other_process(kind, "DIFFPRIVLIB", X=X, y=y, **options)
    values = dict(zip(epsilons, found["scores"].tolist(), strict=True))
    return values, found["seconds"].ravel().tolist()


def of_classes(name, X, y, bounds, norm, epsilons=EPSILONS, keys=KEYS):
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
    add("`DPLogisticRegression`", DPLogisticRegression, **facts)
    if len(facts["classes"]) == 10:
        add("`DPMLPClassifier`", DPMLPClassifier, **facts)
    plain = LogisticRegression(max_iter=1000)
    found["without privacy (scikit-learn)"] = without_privacy(plain, X, y, keys)
    return {method: measured for method, measured in found.items() if measured}


def of_numbers(name, X, y, limits, target, epsilons=EPSILONS, keys=KEYS):
    amount = {"epsilons": epsilons, "keys": keys}
    facts = {"bounds": tuple(limits), "target_bounds": target}
    plain = LinearRegression()
    found = {
        "diffprivlib": by_peer("linear", X, y, limits=limits, target=target, **amount),
        "`DPRidge`": scores(lambda epsilon: DPRidge(epsilon, **facts), X, y, **amount),
        "without privacy (scikit-learn)": without_privacy(plain, X, y, keys),
    }
    return {method: measured for method, measured in found.items() if measured}


def table(title, head, rows):
    return f"#### {title}\n\n{pages.measured_today()}\n\n{pages.table(head, rows)}"


def times():
    """Time the first fit and three later ones (their median) in seconds."""
    # A cache on disk would hide what a first fit compiles.
    jax.config.update("jax_enable_compilation_cache", False)
    amount = {"epsilons": (1.0,), "keys": 4}
    rows = []
    for name, measure, task in listed():
        if name.startswith("MNIST"):  # takes minutes
            continue
        for method, (_, seconds) in measure(name, *task, **amount).items():
            later = np.median(seconds[1:])
            rows.append([name, method, f"{seconds[0]:.3f}", f"{later:.3f}"])
            print(*rows[-1], flush=True)
    return table(TIMES, ["task", "method", "first fit", "later fit"], rows)


def listed():
    found = [(name, of_classes, task) for name, task in tasks().items()]
    X, y = datasets.load_diabetes(return_X_y=True)
    limits = np.full((2, X.shape[1]), [[-0.2], [0.2]])
    return [*found, ("diabetes (its notebook)", of_numbers, (X, y, limits, (25, 346)))]


def of_task(name, measure, task):
    rows = [
        [method, *(pages.spread(values[e], ".3f") for e in EPSILONS)]
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
    for given in listed():
        wanted[given[0]] = functools.partial(of_task, *given)
    found = pages.ADULT.is_file() and pages.MNIST.is_file()
    for name in pages.chosen(wanted):
        measured = wanted[name]()
        print(measured, flush=True)
        if os.environ.get("DIFFPRIVLIB") and found:
            keep(measured)
