"""Coverage of the intervals of coefficients at the nominal level of 95 %.

`python -m benchmarks intervals` prints the table of results/estimators.md, cell by
cell; `--model=logistic`, `--size=2000`, `--epsilon=1` and `--law=normal` choose a part.
Each repetition draws new records and a new key; both budgets see the same records.
"""

import itertools
import statistics
import warnings

import jax
import numpy as np

from dpbilevel.sklearn import DPLogisticRegression, DPRidge

from . import pages
from .table_tasks import DELTA

LEVEL, WIDTH, EFFECTS = 0.95, 6, 3
# Repetitions by the number of records.
SIZES = {2_000: 100, 10_000: 160, 50_000: 40}
EPSILONS = 1.0, 3.0
RATES = (0.5, 0.3, 0.2, 0.15, 0.08, 0.5)
# Bounds, coefficients with an effect, and constant.
LAWS = {
    "normal": ((-4, 4), (1.0, -0.5, 0.5), 0.3),
    "correlated": ((-4, 4), (1.0, -0.5, 0.5), -0.5),
    "long tails, cut": ((-6, 6), (0.6, -0.3, 0.3), 0.0),
    "indicators, rare class": ((0, 1), (1.5, -1.0, 0.0), -3.0),
}
MODELS = "logistic", "ridge"
HEAD = ["model, law", "records", "epsilon", "coefficients", "without effect"]
HEAD += [
    "constant",
    "coefficients, without privacy",
    "width over width without privacy",
]


def drawn(law, size, rng):
    if law == "indicators, rare class":
        return (rng.random((size, WIDTH)) < RATES).astype(float)
    rows = rng.normal(size=(size, WIDTH))
    if law == "correlated":  # every two with .6
        rows = 0.4**0.5 * rows + 0.6**0.5 * rng.normal(size=(size, 1))
    elif law == "long tails, cut":
        rows = rng.standard_t(3, size=(size, WIDTH))
    return np.clip(rows, *LAWS[law][0])


def fitted(kind, law, size, epsilon, number):
    """Return errors over deviations, without privacy, too, and ratios of deviations."""
    rng = np.random.default_rng(number)
    bounds, effects, constant = LAWS[law]
    X = drawn(law, size, rng)
    true = np.asarray([*effects, *[0.0] * (WIDTH - EFFECTS), constant])
    rows = np.concatenate([X, np.ones((size, 1))], axis=1)
    scores = rows @ true
    declared = {"bounds": bounds, "intervals": True}
    if kind == "logistic":
        chances = 1 / (1 + np.exp(-scores))
        y = (rng.random(size) < chances).astype(int)
        model = DPLogisticRegression(epsilon, DELTA, classes=[0, 1], **declared)
        start = true
    else:  # errors whose size depends on the first feature
        length = np.abs(X[:, 0])
        deviation = 1 + 0.5 * length / (1 + length)
        y = scores + deviation * rng.normal(size=size)
        model = DPRidge(epsilon, DELTA, target_bounds=(-20, 20), **declared)
        start = None
    exact, without = classical(rows, y, start)
    model.fit(X, y, key=jax.random.key(number))
    found = np.append(model.coef_, model.intercept_)
    deviations = np.append(model.coef_std_, model.intercept_std_)
    errors = (found - true) / deviations, (exact - true) / without
    return *errors, deviations / without


def classical(rows, y, start):
    point = np.zeros(rows.shape[1]) if start is None else start
    for _ in range(1 if start is None else 8):  # Newton's steps
        means = rows @ point if start is None else 1 / (1 + np.exp(-rows @ point))
        curve = np.ones(len(y)) if start is None else means * (1 - means)
        inverse = np.linalg.inv((rows * curve[:, None]).T @ rows)
        point = point + inverse @ rows.T @ (y - means)
    means = rows @ point if start is None else 1 / (1 + np.exp(-rows @ point))
    middle = (rows * np.square(y - means)[:, None]).T @ rows
    return point, np.sqrt(np.diag(inverse @ middle @ inverse))


def row(kind, law, size, epsilon, numbers):
    errors, without, widths = zip(
        *(fitted(kind, law, size, epsilon, number) for number in numbers), strict=True
    )
    most = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)
    inside = np.abs(errors) < most
    parts = inside[:, :-1], inside[:, EFFECTS:-1], inside[:, -1]
    parts = *parts, np.abs(without)[:, :-1] < most
    coverage = [f"{part.mean():.3f}" for part in parts]
    wider = f"{np.median(widths):.2f}"
    return [f"{kind}, {law}", str(size), f"{epsilon:g}", *coverage, wider]


def main():
    warnings.simplefilter("ignore")
    chosen, rows = pages.options(), []
    for size, kind, law, epsilon in itertools.product(SIZES, MODELS, LAWS, EPSILONS):
        cell = {"model": kind, "law": law, "size": f"{size}", "epsilon": f"{epsilon:g}"}
        if all(chosen.get(k, v) == v for k, v in cell.items()):
            rows.append(row(kind, law, size, epsilon, range(SIZES[size])))
            print(*rows[-1], flush=True)
    print(pages.measured_today())
    print(pages.table(HEAD, rows))
