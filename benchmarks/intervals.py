"""Coverage of the intervals of coefficients at the nominal level of 95 %.

`python -m benchmarks intervals` prints the table of results/estimators.md, row by row;
`--task=logistic` and `--epsilon=1` choose a part. Each repetition draws new records and
a new key; both budgets see the same records.
"""

import itertools
import statistics
import warnings

import jax
import numpy as np
import scipy.special

from dpbilevel.sklearn import DPLogisticRegression, DPRidge

from . import pages
from .table_tasks import DELTA

LEVEL, WIDTH, EFFECTS = 0.95, 6, 3
# Repetitions by the number of records.
SIZES = {2_000: 100, 10_000: 160, 50_000: 40}
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
HEAD += ["constant", "coefficients, without privacy"]
HEAD += ["width over width without privacy"]


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
        y = (rng.random(size) < scipy.special.expit(scores)).astype(int)
        model = DPLogisticRegression(epsilon, DELTA, classes=[0, 1], **declared)
    else:  # errors whose size depends on the first feature
        length = np.abs(X[:, 0])
        deviation = 1 + 0.5 * length / (1 + length)
        y = scores + deviation * rng.normal(size=size)
        model = DPRidge(epsilon, DELTA, target_bounds=(-20, 20), **declared)
    exact, without = classical(rows, y, true, kind == "logistic")
    model.fit(X, y, key=jax.random.key(number))
    found = np.append(model.coef_, model.intercept_)
    deviations = np.append(model.coef_std_, model.intercept_std_)
    errors = (found - true) / deviations, (exact - true) / without
    return *errors, deviations / without


def classical(rows, y, point, logistic):
    for _ in range(8):  # Newton's steps, of which least squares needs one
        scores = rows @ point
        means = scipy.special.expit(scores) if logistic else scores
        curve = means * (1 - means) if logistic else np.ones(len(y))
        inverse = np.linalg.inv((rows * curve[:, None]).T @ rows)
        point = point + inverse @ rows.T @ (y - means)
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
    rows, budgets = [], pages.budgets("1,3")
    for size, kind, law, epsilon in itertools.product(SIZES, MODELS, LAWS, budgets):
        if pages.chosen([f"{kind}, {law}"]):
            rows.append(row(kind, law, size, epsilon, range(SIZES[size])))
            print(*rows[-1], flush=True)
    print(pages.measured_today())
    print(pages.table(HEAD, rows))
