"""Tuning from losses alone, the tables of results/black_box.md.

`--task=NAME` runs configs in configs/experiments whose names begin so, `--stated=yes`
the sizes of the paper (hours), and `--saved=FILE` keeps replications and goes on from
them. $CT_SLICE names the CSV file of the CT slices. NON-PRIVATE losses.
"""

import dataclasses
import functools
import json
import os
import time
import tomllib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import make_friedman1
from sklearn.svm import SVR

import dpbilevel as dpb

from . import pages

CONFIGS = pages.ROOT / "configs/experiments"


@dataclasses.dataclass(frozen=True)
class Tuning:
    """One task with its data."""

    losses: Callable[[np.ndarray], np.ndarray]  # of all records at a point
    size: int  # the number of records
    w_set: dpb.sets.AbstractSet
    start: Callable[[np.random.Generator], np.ndarray]  # of a replication
    optimum: np.ndarray | None = None  # if it is known
    loss: Callable[[Any, Any], Any] | None = None  # of one record, for JAX
    records: Any = None  # of `loss`, leading axis n

    def black_box(self, noise=0.0, seed=0):
        """Return the task as a black box, every value with noise of its own added."""
        rng = np.random.default_rng(seed)

        def noisy(point):
            return self.losses(point) + noise * rng.standard_normal(self.size)

        return dpb.search.BlackBox(noisy, self.size, self.w_set)

    def objective(self, points):
        """Return the mean loss at each of the points, without noise. NON-PRIVATE."""
        return np.asarray([self.losses(point).mean() for point in points])


def of_loss(loss, columns, w_set, start, optimum=None):
    with jax.enable_x64(True):
        records = jax.tree.map(jnp.asarray, columns)
    compiled = jax.jit(jax.vmap(loss, in_axes=(None, 0)))

    def losses(point):
        with jax.enable_x64(True):
            return np.asarray(compiled(jnp.asarray(point), records))

    size = len(jax.tree.leaves(records)[0])
    return Tuning(losses, size, w_set, start, optimum, loss, records)


def length_scales(dimension, training, validation, seed, noise=1e-2):
    """Log length-scales of a Gaussian process, by its error on validation records."""
    rng = np.random.default_rng(seed)
    truth = np.linspace(-0.3, 1.5, dimension)
    inputs = rng.uniform(-1, 1, (training + validation, dimension))
    covariance = _rbf(inputs / np.exp(truth), inputs / np.exp(truth))
    covariance[np.diag_indices(len(inputs))] += noise
    targets = np.linalg.cholesky(covariance) @ rng.standard_normal(len(inputs))
    with jax.enable_x64(True):
        known = jnp.asarray(inputs[:training]), jnp.asarray(targets[:training])

    def loss(theta, record):
        scales = jnp.exp(theta)
        scaled = known[0] / scales
        gram = _rbf(scaled, scaled, jnp) + noise * jnp.eye(training)
        factor = jax.scipy.linalg.cho_factor(gram, lower=True)
        weights = jax.scipy.linalg.cho_solve(factor, known[1])
        near = _rbf((record["inputs"] / scales)[None], scaled, jnp)[0]
        return (record["target"] - near @ weights) ** 2

    columns = {"inputs": inputs[training:], "target": targets[training:]}
    box = dpb.sets.Box(-2.0, 2.5)
    return of_loss(loss, columns, box, lambda r: r.uniform(-2, 2.5, dimension), truth)


def _rbf(a, b, xp=np, rate=0.5):
    squares = xp.sum(a**2, 1)[:, None] + xp.sum(b**2, 1)[None] - 2 * a @ b.T
    return xp.exp(-rate * xp.maximum(squares, 0.0))


def location(dimension, size, seed):
    values = 1.0 + np.random.default_rng(seed).standard_normal((size, dimension))

    def loss(theta, record):
        return 0.5 * jnp.sum((record - theta) ** 2)

    start, box = np.zeros(dimension), dpb.sets.Box(-3.0, 3.0)
    return of_loss(loss, values, box, lambda r: start)


def regression(dimension, size, seed):
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((size, dimension))
    targets = inputs @ np.ones(dimension) + rng.standard_normal(size)
    weights = np.minimum(1.0, 2.0 / np.sum(inputs**2, 1))

    def loss(theta, record):
        residual = jnp.abs(record["target"] - record["inputs"] @ theta)
        huber = jnp.where(residual <= 1, 0.5 * residual**2, residual - 0.5)
        return record["weight"] * huber

    columns = {"inputs": inputs, "target": targets, "weight": weights}
    start, box = np.zeros(dimension), dpb.sets.Box(-3.0, 3.0)
    return of_loss(loss, columns, box, lambda r: start)


def ct_slices(count, features, seed):
    """Return random CT slices (Graf and others, 2011): patient, 384 inputs, place."""
    rows = np.loadtxt(os.environ["CT_SLICE"], delimiter=",", skiprows=1)
    rng = np.random.default_rng((seed, 3))
    rows = rows[rng.choice(len(rows), count, replace=False)]
    return rows[:, 1 + rng.choice(384, features, replace=False)], rows[:, -1]


def support_vectors(features, training, validation, seed, noise=1.0, uniform=False):
    """Kernel and penalties of a support vector regression of scikit-learn.

    Inputs are of the CT slices if $CT_SLICE names their file, else generated: five
    matter. Length-scales, gamma (both in logarithms), C and epsilon are scaled to
    [-1, 1]. Unless starts are `uniform`, length-scales start in the upper half of their
    range: with short ones every record is alone under the kernel.
    """
    ranges = (np.log(0.01), np.log(5.0)), (0.1, 3.0), (0.01, 1.0)
    middle, half = np.transpose([((a + b) / 2, (b - a) / 2) for a, b in ranges])
    if "CT_SLICE" in os.environ:
        inputs, targets = ct_slices(training + validation, features, seed)
        low, high = inputs[:training].min(0), inputs[:training].max(0)
        inputs = (inputs - low) / np.where(high > low, high - low, 1)
    else:
        settings = {"noise": noise, "random_state": seed}
        inputs, targets = make_friedman1(training + validation, features, **settings)
    inputs = 2 * inputs - 1
    # In units of the training records, which are not protected.
    targets = (targets - targets[:training].mean()) / targets[:training].std()

    def losses(point):
        scaled = inputs / np.exp(2 * point[:features])
        log_gamma, penalty, width = middle + half * point[features:]
        gamma = np.exp(log_gamma)
        model = SVR(gamma=gamma, C=penalty, epsilon=width, cache_size=500)
        model.fit(scaled[:training], targets[:training])
        # The kernel by one matrix product, many times faster than predict.
        near = _rbf(scaled[training:], model.support_vectors_, rate=gamma)
        return (targets[training:] - near @ model.dual_coef_[0] - model.intercept_) ** 2

    def start(rng):
        if uniform:
            return rng.uniform(-1, 1, features + 3)
        return np.concatenate([rng.uniform(0, 1, features), np.zeros(3)])

    return Tuning(losses, validation, dpb.sets.Box(-1.0, 1.0), start)


TASKS = {
    "length_scales": length_scales,
    "location": location,
    "regression": regression,
    "support_vectors": support_vectors,
}


@functools.cache  # one object for all replications, or each would compile anew
def rule(adagrad=None, sgd=None):
    if adagrad is not None:
        return optax.adagrad(adagrad, initial_accumulator_value=0.0)
    return optax.sgd(sgd)


def gradient_search(task, settings):
    fields = {}
    if "trace" in settings:
        fields["tolerance"] = settings["trace"] / settings["task"]["dimension"]
    names = "batch evaluation_noise jitter max_batch constant tolerance".split()
    fields |= {name: settings[name] for name in names if name in settings}
    quadratic = settings.get("kernel") == "quadratic"
    solver = dpb.search.GradientInformativeBO(
        settings["num_steps"],
        settings["clip_norm"],
        step_size=rule(settings.get("adagrad"), settings.get("sgd")),
        kernel=dpb.search.Quadratic() if quadratic else dpb.search.RBF(),
        portfolio=None,
        **fields,
    )
    return solver.with_noise(1 / settings["mu"]).with_sizes(task.size)


ASK = jax.jit(lambda solver, *given, key: solver.ask(*given, key=key))
TELL = jax.jit(lambda solver, *given, key: solver.tell(*given, key=key))


def follow(task, solver, box, start, seed):
    """Return the true loss at the answer of a run, and its number of evaluations."""
    public, evaluations = dataclasses.replace(box, losses=len), 0
    with jax.enable_x64(True):
        state = solver.init(public, jnp.asarray(start))
        for key in jax.random.split(jax.random.key(seed), solver.num_steps):
            key_ask, key_tell = jax.random.split(key)
            asked = ASK(solver, public, state, key=key_ask)
            count = int(asked.count)
            losses = np.zeros((len(asked.points), task.size))
            for number in range(count):
                losses[number] = box.losses(np.asarray(asked.points[number]))
            told = asked, jnp.asarray(losses.T)
            state = TELL(solver, public, state, *told, key=key_tell)
            evaluations += count
    return task.objective([np.asarray(state.w)])[0], evaluations


def descent(task, settings, start, seed):
    size = rule(settings.get("adagrad"), settings.get("sgd"))
    steps, clip = settings["num_steps"], settings["clip_norm"]
    solver = dpb.NoisyGD(steps, clip, size, output=dpb.outputs.Last())
    solver = solver.with_noise(1 / settings["mu"]).with_sizes(task.size)
    with jax.enable_x64(True):
        problem = dpb.FiniteSum(task.loss, w_set=task.w_set)
        given = problem, solver, task.records, jnp.asarray(start)
        answer = jax.jit(dpb.solve)(*given, key=jax.random.key(seed)).value
    return task.objective([np.asarray(answer)])[0], 0


def random(task, settings, start, seed):
    rng = np.random.default_rng((seed, 2))
    points = [task.start(rng) for _ in range(settings["evaluations"])]
    return task.objective([start, *points]).min(), len(points)


def middle(task, settings, start, seed):
    point = np.full(len(start), (task.w_set.lower + task.w_set.upper) / 2)
    return task.objective([point])[0], 0


def replication(settings, seed):
    sizes = {k: v for k, v in settings["task"].items() if k != "name"}
    task = TASKS[settings["task"]["name"]](**sizes, seed=seed)
    start = task.start(np.random.default_rng((seed, 1)))
    others = {"descent": descent, "random": random, "middle": middle}
    if other := others.get(settings.get("method")):
        return other(task, settings, start, seed)
    box = task.black_box(settings.get("noise", 0.0), seed)
    return follow(task, gradient_search(task, settings), box, start, seed)


def replications(settings, file):
    setting = {k: v for k, v in settings.items() if k != "replications"}
    setting["records"] = os.environ.get("CT_SLICE")
    name = json.dumps(setting, sort_keys=True)

    def one(seed):
        loss, asked = replication(settings, seed)
        return float(loss), int(asked)

    seeds = range(settings["replications"])
    return [pages.once(file, f"{s} {name}", functools.partial(one, s)) for s in seeds]


def main():
    given, rows = pages.options(), []
    for config in sorted(CONFIGS.glob(f"{given.get('task', '')}*.toml")):
        experiment = tomllib.loads(config.read_text())
        stated, curves = experiment.pop("stated", {}), experiment.pop("curve")
        if "stated" in given:
            task = experiment["task"] | stated.pop("task", {})
            experiment |= stated | {"task": task}
        print(experiment["title"], flush=True)
        for curve in curves:
            began, settings = time.perf_counter(), experiment | curve
            final, asked = np.transpose(replications(settings, pages.saved()))
            error = final.std(ddof=1) / len(final) ** 0.5 if len(final) > 1 else np.nan
            rows.append([config.stem, curve["label"], f"{np.mean(asked):.0f}"])
            rows[-1] += [f"{final.mean():.4f} ± {error:.4f}", f"{np.median(final):.4f}"]
            rows[-1].append(f"{(time.perf_counter() - began) / len(final):.1f}")
            print(*rows[-1], flush=True)
    head = ("experiment", "curve", "evaluations", "mean final loss", "median")
    print(pages.table([*head, "s a run"], rows))
