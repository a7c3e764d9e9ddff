"""Records of sources, solvers and references that the tests of pipelines share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.applications import (
    MixedSources,
    SelectedSources,
)
from tests.problems import found_by

K, D = 3, 3

RIDGE = 0.05

GD = dpb.NoisyGD(4, clip_norm=1.0, step_size=0.5)

BUDGET = dpb.PrivacyBudget(1.0, 1e-6)

W0 = jnp.zeros(K), jnp.zeros(D)

WEIGHTING = dpb.source_weighting(dpb.logistic_loss, K, ridge=RIDGE)


def records(n, seed, *, flipped=(), d=D, counts=None):
    """Unit features, labels of one model, negated in the flipped sources."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    label = np.sign(x @ np.linspace(1.0, -2.0, d))
    source = np.arange(n) % K if counts is None else np.repeat(np.arange(K), counts)
    label = np.where(np.isin(source, flipped), -label, label)
    found = {"features": x, "label": label}
    tree = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), found)
    return tree | {"source": jnp.asarray(source, jnp.int32)}


def levels(n_upper=30, n_lower=60, flipped=(2,), **options):
    upper = records(n_upper, 0, d=options.get("d", D))
    del upper["source"]
    return dpb.Levels(upper, records(n_lower, 1, flipped=flipped, **options))


def of_sources(data, kept):
    """The training records of these sources."""
    rows = np.isin(np.asarray(data.lower["source"]), kept)
    return jax.tree.map(lambda v: v[rows], data.lower)


DATA = levels()

SELECTED = SelectedSources(GD, dataclasses.replace(GD, num_steps=3))

MIXED = MixedSources(*(dataclasses.replace(GD, num_steps=n) for n in (2, 3, 4, 2)))

TWO = dataclasses.replace(GD, num_steps=2)


def exact(solver, people="disjoint", data=DATA, problem=WEIGHTING):
    """The solver without noise, bound to the sizes of the data."""
    solver = solver.with_noise(0.0).with_precision("float")
    return solver.with_sizes(problem.sizes_of(data, people))


def long(num_steps, step_size=0.5):
    """Descent that clips nothing."""
    return dpb.NoisyGD(num_steps, 100.0, step_size)


def runs(solver, data=DATA, problem=WEIGHTING, w0=W0):
    solver = exact(solver, "disjoint", data, problem)
    return found_by(problem, solver, data, w0, jax.random.key(0))


# The same everywhere, because compiling takes the time.
LONG = SelectedSources(long(20), long(30))

LONG_MIXED = MixedSources(long(30), long(20), long(15), long(10, 0.2))


def one_level(records, solver, *, ridge=RIDGE, key=None):
    """Noisy gradient descent on a finite sum of these records."""
    problem = dpb.FiniteSum(dpb.logistic_loss, public=lambda w: ridge * jnp.sum(w * w))
    key = jax.random.key(0) if key is None else key
    solver = solver.with_sizes(len(records["label"]))
    return jax.jit(dpb.solve)(problem, solver, records, W0[1], key=key).value


def alone(records, solver, ridge=RIDGE):
    return one_level(
        records,
        solver.with_noise(0.0).with_precision("float"),
        ridge=ridge,
    )


def scores(model, loss=dpb.logistic_loss, start=W0[1]):
    """Mean signs of improvement and shares of records, by source, in their units."""
    losses = jax.vmap(loss, (None, 0))
    better = np.asarray(losses(model, DATA.lower) < losses(start, DATA.lower))
    signs, source = np.where(better, 1.0, -1.0), np.asarray(DATA.lower["source"])
    means = [
        [np.mean((source == s) * of) for s in range(K)] for of in (signs, signs**2)
    ]
    return np.array([[0.96], [0.28]]) * means


def descend(loss, w, num_steps, step_size=0.5):
    def one_step(_, w):
        return w - step_size * jax.grad(loss)(w)

    return jax.jit(lambda w: jax.lax.fori_loop(0, num_steps, one_step, w))(w)


def mean_loss(w, records):
    return jnp.mean(jax.vmap(dpb.logistic_loss, (None, 0))(w, records))


ADD_OR_REMOVE = dpb.Neighbours.ADD_OR_REMOVE_ONE
