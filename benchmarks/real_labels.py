"""Classification on the tables of `benchmarks.real_tables`: methods and measures."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, roc_auc_score

import dpbilevel as dpb
from dpbilevel.sklearn import DPLogisticRegression

from .table_tasks import DELTA, by_peer, each_key, gaussian_mu

BINS = 10
CONSTANT, PLAIN, OURS = "constant", "no privacy", "DPLogisticRegression"
RIVALS = ("DP-EBM", "diffprivlib", "NoisyGD")
MEASURES = ("log loss", "calibration error", "AUC", "accuracy")
PROBLEM, RUN = dpb.FiniteSum(dpb.logistic_loss), jax.jit(dpb.solve)


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
    values = (
        np.mean(np.logaddexp(0, (1 - 2 * y) * log_odds)),
        calibration_error(y, scipy.special.expit(log_odds)),
        roc_auc_score(y, log_odds),
        accuracy_score(y, log_odds > 0),
    )
    return dict(zip(MEASURES, map(float, values), strict=True))


@each_key
def constant(task, epsilon, seed, fit, test):
    """NON-PRIVATE share of the training labels."""
    return np.full(len(test), scipy.special.logit(task.y[fit].mean()))


@each_key
def base_rate(task, epsilon, seed, fit, test):
    """Share of the training labels with Gaussian noise, cut to [.001, .999]."""
    noise = np.random.default_rng([seed, 1]).normal() / gaussian_mu(epsilon)
    share = np.clip(task.y[fit].mean() + noise / len(fit), 1e-3, 1 - 1e-3)
    return np.full(len(test), scipy.special.logit(share))


@each_key
def no_privacy(task, epsilon, seed, fit, test):
    """NON-PRIVATE logistic model with a light ridge."""
    model = LogisticRegression(C=100.0, max_iter=2000)
    model.fit(task.unit[fit], task.y[fit])
    return model.decision_function(task.unit[test])


@each_key
def estimator(task, epsilon, seed, fit, test):
    """`DPLogisticRegression` with its default settings."""
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


METHODS = {
    CONSTANT: constant,
    "private base rate": base_rate,
    PLAIN: no_privacy,
    OURS: estimator,
    "DP-EBM": by_peer("DP-EBM", "TABLES"),
    "diffprivlib": by_peer("logistic", "DIFFPRIVLIB"),
    "NoisyGD": by_hand,
}


def behind(case):
    """Return how far the estimator's log loss is above the best of the others."""
    losses = {method: row["log loss"] for method, row in case.items()}
    return losses[OURS] - min(losses[method] for method in (CONSTANT, *RIVALS))
