"""Tasks of the black-box benchmarks: losses of many records at one point.

All data are generated, so that nothing here is anybody's: seeds are stated.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import make_friedman1
from sklearn.svm import SVR

import dpbilevel as dpb


@dataclasses.dataclass(frozen=True)
class Tuning:
    """One task with its data.

    Attributes:
        loss: The loss of one record at a point: `(theta, record) -> scalar`, for JAX.
        records: The records, leading axis n.
        w_set: The set of points.
        start: A starting point per replication: `(rng) -> (d,)`.
        optimum: The best point, if it is known.
    """

    loss: Callable[[Any, Any], Any]
    records: Any
    w_set: dpb.sets.AbstractSet
    start: Callable[[np.random.Generator], np.ndarray]
    optimum: np.ndarray | None = None

    @property
    def size(self):
        """The number of records."""
        return len(jax.tree.leaves(self.records)[0])

    @property
    def problem(self):
        """The task with its loss as a JAX function."""
        return dpb.FiniteSum(self.loss, w_set=self.w_set)

    def black_box(self, noise=0.0, seed=0):
        """Return the task as a black box, every value with noise of its own added."""
        rng = np.random.default_rng(seed)
        losses = jax.jit(jax.vmap(self.loss, in_axes=(None, 0)))

        def evaluated(point):
            with jax.enable_x64(True):
                values = np.asarray(losses(jnp.asarray(point), self.records))
            return values + noise * rng.standard_normal(values.shape)

        return dpb.search.BlackBox(evaluated, self.size, self.w_set)

    def objective(self, points):
        """Return the mean loss at each of the points, without noise. NON-PRIVATE."""
        losses = jax.jit(jax.vmap(self.loss, (None, 0)))
        with jax.enable_x64(True):
            means = [jnp.mean(losses(jnp.asarray(p), self.records)) for p in points]
        return np.asarray(means)


def length_scales(dimension, training, validation, seed, noise=1e-2):
    """Length-scales of a Gaussian process, by its error on validation records.

    theta holds log length-scales. Inputs are uniform on a cube; targets are one draw
    of the process with length-scales from exp(-.3), which matters, to exp(1.5), which
    hardly does.
    """
    rng = np.random.default_rng(seed)
    truth = np.linspace(-0.3, 1.5, dimension)
    inputs = rng.uniform(-1, 1, (training + validation, dimension))
    covariance = _rbf(inputs / np.exp(truth), inputs / np.exp(truth))
    covariance[np.diag_indices(len(inputs))] += noise
    targets = np.linalg.cholesky(covariance) @ rng.standard_normal(len(inputs))
    held = {"inputs": inputs[training:], "target": targets[training:]}
    with jax.enable_x64(True):
        known = jnp.asarray(inputs[:training]), jnp.asarray(targets[:training])
        records = jax.tree.map(jnp.asarray, held)

    def loss(theta, record):
        scales = jnp.exp(theta)
        scaled = known[0] / scales
        gram = _rbf(scaled, scaled, jnp) + noise * jnp.eye(training)
        factor = jax.scipy.linalg.cho_factor(gram, lower=True)
        weights = jax.scipy.linalg.cho_solve(factor, known[1])
        near = _rbf((record["inputs"] / scales)[None], scaled, jnp)[0]
        return (record["target"] - near @ weights) ** 2

    box = dpb.sets.Box(-2.0, 2.5)
    return Tuning(loss, records, box, lambda r: r.uniform(-2, 2.5, dimension), truth)


def _rbf(a, b, xp=np, rate=0.5):
    return xp.exp(-rate * _squares(a, b, xp))


def _squares(a, b, xp=np):
    squares = xp.sum(a**2, 1)[:, None] + xp.sum(b**2, 1)[None] - 2 * a @ b.T
    return xp.maximum(squares, 0.0)


def location(dimension, size, seed):
    """Return the mean of a Gaussian, by squared distance."""
    rng = np.random.default_rng(seed)
    values = 1.0 + rng.standard_normal((size, dimension))
    with jax.enable_x64(True):
        records = jnp.asarray(values)

    def loss(theta, record):
        return 0.5 * jnp.sum((record - theta) ** 2)

    start, box = np.zeros(dimension), dpb.sets.Box(-3.0, 3.0)
    return Tuning(loss, records, box, lambda r: start, values.mean(0))


def regression(dimension, size, seed):
    """Robust linear regression: Huber losses, far inputs weighted down."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((size, dimension))
    targets = inputs @ np.ones(dimension) + rng.standard_normal(size)
    weights = np.minimum(1.0, 2.0 / np.sum(inputs**2, 1))
    columns = {"inputs": inputs, "target": targets, "weight": weights}
    with jax.enable_x64(True):
        records = jax.tree.map(jnp.asarray, columns)

    def loss(theta, record):
        residual = jnp.abs(record["target"] - record["inputs"] @ theta)
        huber = jnp.where(residual <= 1, 0.5 * residual**2, residual - 0.5)
        return record["weight"] * huber

    box = dpb.sets.Box(-3.0, 3.0)
    return Tuning(loss, records, box, lambda r: np.zeros(dimension), np.ones(dimension))


class SupportVectors:
    """Kernel and penalties of a support vector regression with generated records.

    A hundred inputs of which five matter (Friedman's first function); a hundred
    length-scales, gamma, C and epsilon, each scaled from its range to [-1, 1], the
    first hundred and one by their logarithms. Trained by scikit-learn, so that losses
    come from Python.
    """

    RANGES = ((np.log(0.01), np.log(5.0)), (0.1, 3.0), (0.01, 1.0))
    w_set = dpb.sets.Box(-1.0, 1.0)
    optimum = None

    def __init__(self, features, training, validation, seed, noise=1.0):
        settings = {"noise": noise, "random_state": seed}
        inputs, targets = make_friedman1(training + validation, features, **settings)
        # In units of the training records, which are not protected.
        targets = (targets - targets[:training].mean()) / targets[:training].std()
        self.known = 2 * inputs[:training] - 1, targets[:training]
        self.inputs, self.targets = 2 * inputs[training:] - 1, targets[training:]
        self.features, self.size = features, validation

    def start(self, rng):
        """Long length-scales, uniform in the upper half of their range, and middles.

        With short length-scales in a hundred inputs every record is alone under the
        kernel, and no loss depends on the point.
        """
        return np.concatenate([rng.uniform(0, 1, self.features), np.zeros(3)])

    def losses(self, point):
        """Every validation record's squared error after training at the point."""
        scales, (low, high) = (
            np.exp(2 * point[: self.features]),
            np.transpose(self.RANGES),
        )
        middle, half = (low + high) / 2, (high - low) / 2
        log_gamma, penalty, width = middle + half * point[self.features :]
        gamma, known = np.exp(log_gamma), self.known[0] / scales
        model = SVR(gamma=gamma, C=penalty, epsilon=width, cache_size=500)
        model.fit(known, self.known[1])
        # The kernel by one matrix product, many times faster than predict.
        near = _rbf(self.inputs / scales, model.support_vectors_, rate=gamma)
        return (self.targets - near @ model.dual_coef_[0] - model.intercept_) ** 2

    def black_box(self, noise=0.0, seed=0):
        """Return the task as a black box; training is not random."""
        del noise, seed
        return dpb.search.BlackBox(self.losses, self.size, self.w_set)

    def objective(self, points):
        """Return the mean loss at each of the points. NON-PRIVATE."""
        return np.asarray([self.losses(point).mean() for point in points])


TASKS = {
    "length_scales": length_scales,
    "location": location,
    "regression": regression,
    "support_vectors": SupportVectors,
}
