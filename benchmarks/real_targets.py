"""Regression on the tables of `benchmarks.real_tables`: methods and their R².

AdaSSP is by Wang, "Revisiting differentially private linear regression", UAI 2018, with
Gaussian noise for records that are replaced.
"""

import jax
import numpy as np
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

from dpbilevel.sklearn import DPRidge

from .table_tasks import DELTA, by_peer, each_key, gaussian_mu

OURS, RIVALS = "DPRidge", ("mean", "AdaSSP", "diffprivlib, linear")
MEASURES = ("R²",)
FAILS = 0.05  # chance that the ridge of AdaSSP is too small


@each_key
def constant(task, epsilon, seed, fit, test):
    """NON-PRIVATE mean of the training targets."""
    return np.full(len(test), task.y[fit].mean())


@each_key
def no_privacy(task, epsilon, seed, fit, test):
    """NON-PRIVATE least squares."""
    model = LinearRegression().fit(task.unit[fit], task.y[fit])
    return model.predict(task.unit[test])


@each_key
def estimator(task, epsilon, seed, fit, test):
    """`DPRidge` with its default settings."""
    facts = {"bounds": task.limits, "target_bounds": tuple(task.target)}
    key = jax.random.key(seed, impl="threefry4x32")
    model = DPRidge(epsilon, DELTA, **facts).fit(task.X[fit], task.y[fit], key=key)
    return model.predict(task.X[test])


@each_key
def ada_ssp(task, epsilon, seed, fit, test):
    """Least squares from noisy moments, with a ridge that fits the noise.

    Rows have norm 1 at most, and targets are in [-1, 1]. Replacing a record moves the
    moments of the rows by 2**.5 in the Frobenius norm, their least eigenvalue by 1, and
    the products with the targets by 2. Each release has a third of the budget.
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
    ridge = max(0.0, enough - least)
    model = np.linalg.solve(moments + ridge * np.eye(width), products)
    return low + (rows[test] @ model + 1) / 2 * (high - low)


METHODS = {
    "mean": constant,
    "least squares": no_privacy,
    OURS: estimator,
    "AdaSSP": ada_ssp,
    "diffprivlib, linear": by_peer("linear", "DIFFPRIVLIB"),
}


def measured(y, predicted):
    """Return the R²."""
    return {"R²": float(r2_score(y, predicted))}


def behind(case):
    """Return how far the R² of the estimator is below the best of the others."""
    values = {method: row["R²"] for method, row in case.items()}
    return max(values[method] for method in RIVALS) - values[OURS]
