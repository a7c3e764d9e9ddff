"""Answers on real tables: `python -m benchmarks real_tables`.

Medians of 5 keys and splits, on test records, of the estimators, other private methods
and fits without privacy. NON-PRIVATE evaluation. `--task=churn` runs tables whose names
begin so. Results are kept in runs/real_tables and measured again only for a method that
is named, as by `--method=NoisyGD`. results/real_tables.md is written if all are there.
"""

import dataclasses
import pathlib
import sys
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from sklearn import linear_model, metrics

import dpbilevel as dpb
from dpbilevel.sklearn import DPLogisticRegression, DPRidge

from . import pages, table_tasks
from .table_tasks import DELTA, EPSILONS, by_peer, each_key, gaussian_mu

ROWS = pathlib.Path("runs/real_tables/rows.json")
WORSE = 0.005  # than the constant answer, in log loss
BINS = 10
CONSTANT, PLAIN, OURS = "constant", "no privacy", "DPLogisticRegression"
PROBLEM, RUN = dpb.FiniteSum(dpb.logistic_loss), jax.jit(dpb.solve)
FAILS = 0.05  # chance that the ridge of AdaSSP is too small


@dataclasses.dataclass(frozen=True)
class Kind:
    """Methods and measures of labels, or of targets that are numbers."""

    methods: dict[str, Callable]  # predictions of each epsilon and key, of a task
    measures: dict[str, Callable]  # of true values and predictions; the first decides
    ours: str
    rivals: tuple[str, ...]
    sign: int  # 1 if the first measure is a loss, else -1

    def measured(self, y, predicted):
        """Return each measure of predictions."""
        return {name: float(of(y, predicted)) for name, of in self.measures.items()}

    def behind(self, case):
        """Return how much worse the estimator is than the best of the others."""
        first = next(iter(self.measures))
        values = {method: self.sign * row[first] for method, row in case.items()}
        return values[self.ours] - min(values[method] for method in self.rivals)


def by_share(score):
    """Return the score of the mean of the training labels as a NON-PRIVATE method."""
    return each_key(
        lambda task, _e, _k, fit, test: np.full(len(test), score(task.y[fit].mean()))
    )


def calibration_error(y, chance):
    """Return the mean gap of predicted and observed shares in bins of equal size."""
    inner = np.quantile(chance, np.arange(1, BINS) / BINS)
    bins = np.searchsorted(inner, chance)
    counts = np.bincount(bins, minlength=BINS)
    gaps = np.bincount(bins, weights=chance - y, minlength=BINS)
    return float(np.abs(gaps).sum() / counts.sum())


@each_key
def base_rate(task, epsilon, seed, fit, test):
    noise = np.random.default_rng([seed, 1]).normal() / gaussian_mu(epsilon)
    share = np.clip(task.y[fit].mean() + noise / len(fit), 1e-3, 1 - 1e-3)
    return np.full(len(test), scipy.special.logit(share))


@each_key
def no_privacy(task, epsilon, seed, fit, test):
    model = linear_model.LogisticRegression(C=100.0, max_iter=2000)
    model.fit(task.unit[fit], task.y[fit])
    return model.decision_function(task.unit[test])


@each_key
def estimator(task, epsilon, seed, fit, test):
    model = DPLogisticRegression(epsilon, DELTA, classes=[0, 1], bounds=task.limits)
    key = jax.random.key(seed, impl="threefry4x32")
    model.fit(task.X[fit], task.y[fit], key=key)
    return model.decision_function(task.X[test])


@each_key
def by_hand(task, epsilon, seed, fit, test):
    """`NoisyGD` on features in [-1, 1] and a constant, in rows of norm at most 1."""
    rows = np.concatenate([2 * task.unit - 1, np.ones((len(task.y), 1))], axis=1)
    rows = (rows / rows.shape[1] ** 0.5).astype("f4")
    records = {"features": rows[fit], "label": (2 * task.y[fit] - 1).astype("f4")}
    solver = dpb.NoisyGD(100, 1.0, 4.0, output=dpb.outputs.TailMean())
    start, budget = jnp.zeros(rows.shape[1]), dpb.PrivacyBudget(epsilon, DELTA)
    plan = dpb.calibrate(PROBLEM, solver, budget, sizes=len(fit), w0=start)
    key = jax.random.key(seed, impl="threefry4x32")
    found = RUN(PROBLEM, plan.solver, records, start, key=key).value
    return rows[test] @ np.asarray(found)


LABELS = Kind(
    methods={
        CONSTANT: by_share(scipy.special.logit),
        "private base rate": base_rate,
        PLAIN: no_privacy,
        OURS: estimator,
        "DP-EBM": by_peer("DP-EBM", "TABLES"),
        "diffprivlib": by_peer("logistic", "DIFFPRIVLIB"),
        "NoisyGD": by_hand,
    },
    measures={
        "log loss": lambda y, odds: np.mean(np.logaddexp(0, (1 - 2 * y) * odds)),
        "calibration error": lambda y, odds: calibration_error(
            y, scipy.special.expit(odds)
        ),
        "AUC": metrics.roc_auc_score,
        "accuracy": lambda y, odds: metrics.accuracy_score(y, odds > 0),
    },
    ours=OURS,
    rivals=(CONSTANT, "DP-EBM", "diffprivlib", "NoisyGD"),
    sign=1,
)


@each_key
def least_squares(task, epsilon, seed, fit, test):
    model = linear_model.LinearRegression().fit(task.unit[fit], task.y[fit])
    return model.predict(task.unit[test])


@each_key
def ridge(task, epsilon, seed, fit, test):
    facts = {"bounds": task.limits, "target_bounds": tuple(task.target)}
    key = jax.random.key(seed, impl="threefry4x32")
    model = DPRidge(epsilon, DELTA, **facts).fit(task.X[fit], task.y[fit], key=key)
    return model.predict(task.X[test])


@each_key
def ada_ssp(task, epsilon, seed, fit, test):
    """Least squares from noisy moments, with a ridge that fits the noise.

    Wang, "Revisiting differentially private linear regression", UAI 2018, with Gaussian
    noise for records that are replaced. Rows have norm 1 at most, targets are in
    [-1, 1]. Replacing a record moves the moments by 2**.5 in the Frobenius norm, their
    least eigenvalue by 1, and the products with targets by 2. Each release has a third
    of the budget.
    """
    rows = np.concatenate([task.centered, np.ones((len(task.y), 1))], axis=1)
    rows /= np.hypot(task.longest, 1.0)
    low, high = task.target
    scaled = 2 * (np.clip(task.y, low, high) - low) / (high - low) - 1
    width = rows.shape[1]
    rng, noise = np.random.default_rng([seed, 2]), 3**0.5 / gaussian_mu(epsilon)
    moments = rows[fit].T @ rows[fit]
    least = np.linalg.eigvalsh(moments)[0] + noise * rng.normal()
    least = max(least - noise * np.log(6 / DELTA) ** 0.5, 0.0)
    upper = np.triu(2**0.5 * noise * rng.normal(size=moments.shape))
    moments += upper + np.triu(upper, 1).T
    products = rows[fit].T @ scaled[fit] + 2 * noise * rng.normal(size=width)
    enough = (width * np.log(2 * width**2 / FAILS)) ** 0.5 * 2**0.5 * noise
    added = max(0.0, enough - least)
    model = np.linalg.solve(moments + added * np.eye(width), products)
    return low + (rows[test] @ model + 1) / 2 * (high - low)


TARGETS = Kind(
    methods={
        "mean": by_share(float),
        "least squares": least_squares,
        "DPRidge": ridge,
        "AdaSSP": ada_ssp,
        "diffprivlib, linear": by_peer("linear", "DIFFPRIVLIB"),
    },
    measures={"R²": metrics.r2_score},
    ours="DPRidge",
    rivals=("mean", "AdaSSP", "diffprivlib, linear"),
    sign=-1,
)
# The groups of tables.toml, with their titles and kinds.
GROUPS = {
    "never used": ("tables never used to choose a setting", LABELS),
    "chosen on": ("tables that settings were chosen on", LABELS),
    "numbers": ("tables whose targets are numbers", TARGETS),
}


def rows_of(name, task, method, kind):
    predicted = kind.methods[method](task)
    true = [task.y[order[task.cut :]] for order in task.orders]
    rows = []
    for epsilon, of_keys in zip(EPSILONS, predicted, strict=True):
        each = [kind.measured(y, z) for y, z in zip(true, of_keys, strict=True)]
        medians = {m: float(np.median([v[m] for v in each])) for m in kind.measures}
        rows.append({"table": name, "method": method, "epsilon": epsilon} | medians)
    shown = [round(row[next(iter(kind.measures))], 4) for row in rows]
    print(f"{name}, {method}: {shown}", flush=True)
    return rows


def by_case(rows, names, kind):
    cases = {}
    for row in rows:
        if row["table"] in names:
            place = row["table"], row["epsilon"]
            cases.setdefault(place, {})[row["method"]] = row
    return dict(sorted(cases.items(), key=lambda item: -kind.behind(item[1])))


def cases_table(cases, measure, kind):
    head, rows = ["table", "epsilon", *kind.methods], []
    decides = measure == next(iter(kind.measures))
    for (name, epsilon), case in cases.items():
        values = [case[method][measure] for method in kind.methods]
        cells = [f"{v:z.3f}" if abs(v) < 1e3 else f"{v:.1e}" for v in values]
        more = [f"{kind.behind(case):+.3f}"] if decides else []
        rows.append([name, f"{epsilon:g}", *cells, *more])
    return pages.table([*head, "behind"] if decides else head, rows)


def summary(groups):
    head = ["method", "epsilon"]
    for words in ("worse than constant", "relative log loss", "calibration error"):
        head += [f"{words}, {short}" for short in groups]
    rows = []
    for method in LABELS.methods:
        same = method in (CONSTANT, PLAIN)
        for epsilon in EPSILONS[:1] if same else EPSILONS:
            parts = [
                _summary_of(method, [c for (_, e), c in cases.items() if e == epsilon])
                for cases in groups.values()
            ]
            columns = [cell for cells in zip(*parts, strict=True) for cell in cells]
            rows.append([method, "any" if same else f"{epsilon:g}", *columns])
    return pages.table(head, rows)


def _summary_of(method, cases):
    compared = method, CONSTANT, PLAIN
    losses = [[case[m]["log loss"] for m in compared] for case in cases]
    worse = sum(own > base + WORSE for own, base, _ in losses)
    relative = [(own - best) / (base - best) for own, base, best in losses]
    errors = [case[method]["calibration error"] for case in cases]
    middle = f"{np.median(relative):.2f}", f"{np.median(errors):.3f}"
    return f"{worse} of {len(cases)}", *middle


def page(rows, names):
    found = {g: by_case(rows, names[g], kind) for g, (_, kind) in GROUPS.items()}
    two = {group: found[group] for group in ("never used", "chosen on")}
    parts = ["## Summary", summary(two)]
    for group, cases in found.items():
        title, kind = GROUPS[group]
        for measure in kind.measures:
            heading = f"## {measure[0].upper() + measure[1:]}, {title}"
            parts += [heading, cases_table(cases, measure, kind)]
    return parts


def main():
    warnings.simplefilter("ignore")
    table_tasks.check_environments()
    options = pages.options()
    named, prefix = options.get("method"), options.get("task", "")
    known = [*LABELS.methods, *TARGETS.methods]
    if named not in (None, *known):
        sys.exit(f"real_tables: unknown method {named!r}; choose from {known}.")
    rows, names, expected = pages.kept(ROWS), {}, 0
    declared = table_tasks.declared()
    for group, (_, kind) in GROUPS.items():
        names[group] = [n for n, table in declared.items() if table.group == group]
        expected += len(names[group]) * len(kind.methods) * len(EPSILONS)
        chosen = {n: declared[n] for n in names[group] if n.startswith(prefix)}
        for name, task in table_tasks.load(chosen).items():
            for method in kind.methods:
                place = name, method
                others = [r for r in rows if (r["table"], r["method"]) != place]
                if named == method or (named is None and len(others) == len(rows)):
                    rows = [*others, *rows_of(name, task, method, kind)]
                    pages.keep(ROWS, rows)
    if len(rows) == expected and pages.ADULT.is_file():
        pages.write(pages.RESULTS / "real_tables.md", page(rows, names))
