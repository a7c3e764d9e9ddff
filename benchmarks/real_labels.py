"""Classification on the tables of `benchmarks.real_tables`: methods and measures."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, roc_auc_score

import dpbilevel as dpb
from dpbilevel.sklearn import DPLogisticRegression

from .table_tasks import DELTA, each_key, gaussian_mu, in_other_process

BINS = 10
CONSTANT, PLAIN, OURS = "constant", "no privacy", "DPLogisticRegression"
RIVALS = ("DP-EBM", "diffprivlib", "NoisyGD")
MEASURES = ("log loss", "calibration error", "AUC", "accuracy")


def calibration_error(y, chance):
    """Return the mean distance of predicted and observed shares in bins of equal size.

    Args:
        y: Labels, 0 or 1.
        chance: Predicted chances of 1; equal ones are in the same bin.
    """
    inner = np.quantile(chance, np.arange(1, BINS) / BINS)
    bins = np.searchsorted(inner, chance)
    counts = np.bincount(bins, minlength=BINS)
    gaps = np.bincount(bins, weights=chance - y, minlength=BINS)
    return float(np.abs(gaps).sum() / counts.sum())


def measured(y, log_odds):
    """Return each measure of predictions."""
    chance = scipy.special.expit(log_odds)
    values = (
        np.mean(np.logaddexp(0, (1 - 2 * y) * log_odds)),
        calibration_error(y, chance),
        roc_auc_score(y, log_odds),
        accuracy_score(y, log_odds > 0),
    )
    return dict(zip(MEASURES, map(float, values), strict=True))


def constant(task):
    """NON-PRIVATE share of the training labels."""

    def fitted(epsilon, seed, fit, test):
        return np.full(len(test), scipy.special.logit(task.y[fit].mean()))

    return each_key(task, fitted)


def base_rate(task):
    """Share of the training labels with Gaussian noise, cut to [.001, .999]."""

    def fitted(epsilon, seed, fit, test):
        noise = np.random.default_rng([seed, 1]).normal() / gaussian_mu(epsilon)
        share = np.clip(task.y[fit].mean() + noise / len(fit), 1e-3, 1 - 1e-3)
        return np.full(len(test), scipy.special.logit(share))

    return each_key(task, fitted)


def no_privacy(task):
    """NON-PRIVATE logistic model with a light ridge."""
    X = task.unit

    def fitted(epsilon, seed, fit, test):
        model = LogisticRegression(C=100.0, max_iter=2000)
        return model.fit(X[fit], task.y[fit]).decision_function(X[test])

    return each_key(task, fitted)


def estimator(task):
    """`DPLogisticRegression` with its default settings."""
    X, limits = task.X, task.limits

    def fitted(epsilon, seed, fit, test):
        model = DPLogisticRegression(epsilon, DELTA, classes=[0, 1], bounds=limits)
        key = jax.random.key(seed, impl="threefry4x32")
        return model.fit(X[fit], task.y[fit], key=key).decision_function(X[test])

    return each_key(task, fitted)


def by_hand(task):
    """`NoisyGD` on features in [-1, 1] and a constant, in rows of norm at most 1."""
    rows = np.concatenate([2 * task.unit - 1, np.ones((len(task.y), 1))], axis=1)
    rows = (rows / rows.shape[1] ** 0.5).astype("f4")
    label = (2 * task.y - 1).astype("f4")
    problem = dpb.FiniteSum(dpb.logistic_loss)
    solver = dpb.NoisyGD(100, 1.0, 4.0, output=dpb.outputs.TailMean())
    start, run = jnp.zeros(rows.shape[1]), jax.jit(dpb.solve)

    def fitted(epsilon, seed, fit, test):
        budget = dpb.PrivacyBudget(epsilon, DELTA)
        plan = dpb.calibrate(problem, solver, budget, sizes=len(fit), w0=start)
        records = {"features": rows[fit], "label": label[fit]}
        key = jax.random.key(seed, impl="threefry4x32")
        found = run(problem, plan.solver, records, start, key=key).value
        return rows[test] @ np.asarray(found)

    return each_key(task, fitted)


METHODS = {
    CONSTANT: constant,
    "private base rate": base_rate,
    PLAIN: no_privacy,
    OURS: estimator,
    "DP-EBM": lambda task: in_other_process("DP-EBM", "TABLES", task),
    "diffprivlib": lambda task: in_other_process("diffprivlib", "DIFFPRIVLIB", task),
    "NoisyGD": by_hand,
}


def behind(case):
    """Return how far the estimator's log loss is above the best of the others."""
    losses = {method: row["log loss"] for method, row in case.items()}
    return losses[OURS] - min(losses[method] for method in (CONSTANT, *RIVALS))
