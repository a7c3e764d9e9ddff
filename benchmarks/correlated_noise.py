"""Test accuracy of a network with correlated and with independent noise.

A network 784-64-10 learns 8 000 images of MNIST, in about as many passes by all
methods; each is shown at the best of its step sizes, in hindsight.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpbilevel as dpb
from dpbilevel.onelevel import CorrelatedGD
from dpbilevel.privacy import SinglePass, square_root_feedback

from . import pages

N, BATCH, PASSES, HIDDEN = 8_000, 500, 10, 64
SEEDS = range(3)
STEPS = PASSES * N // BATCH
STEP_SIZES = 0.5, 1.0, 2.0


def images():
    with np.load(pages.MNIST) as file:
        order = np.random.default_rng(0).permutation(len(file["labels"]))
        x = file["images"][order].reshape(-1, 784).astype(np.float32) / 255
        y = file["labels"][order].astype(np.int32)
    return ((x[part], y[part]) for part in (slice(N), slice(N, N + 2_000)))


def logits(w, x):
    first, a, last, b = w
    return jnp.tanh(x @ first + a) @ last + b


def loss(w, record):
    x, y = record
    return optax.softmax_cross_entropy_with_integer_labels(logits(w, x), y)


def start():
    rng = np.random.default_rng(1)
    first = rng.normal(size=(784, HIDDEN)) / 28
    last = rng.normal(size=(HIDDEN, 10)) / 8
    shapes = (first, np.zeros(HIDDEN), last, np.zeros(10))
    return tuple(jnp.asarray(v, jnp.float32) for v in shapes)


def methods():
    """Return solvers by name; their step sizes are replaced."""

    def correlated(*feedback):
        sampling = SinglePass(BATCH)
        return CorrelatedGD(STEPS, 1.0, 1.0, feedback, sampling=sampling)

    sampled = dpb.NoisyGD(STEPS, 1.0, 1.0, sampling=dpb.Poisson(BATCH / N))
    return {
        "passes, independent noise": correlated(0.0),
        "passes, lambda = 0.5": correlated(0.5),
        "passes, lambda = 0.9": correlated(0.9),
        "passes, 4 bands": correlated(*square_root_feedback(4)),
        "Poisson batches, independent noise": sampled,
    }


def accuracies(solver, epsilon, training, test, run):
    problem, budget = dpb.FiniteSum(loss), dpb.PrivacyBudget(epsilon, 1e-5)
    plan = dpb.calibrate(problem, solver, budget, sizes=N)
    found = {}
    for size in STEP_SIZES:
        sized = dataclasses.replace(plan.solver, step_size=size)
        found[size] = []
        for seed in SEEDS:
            w = run(problem, sized, training, start(), key=jax.random.key(seed)).value
            right = np.argmax(logits(w, test[0]), 1) == test[1]
            found[size].append(float(np.mean(right)))
    return found


def main():
    training, test = images()
    run, rows = jax.jit(dpb.solve), []
    chosen = pages.chosen(made := methods())
    for name in chosen:
        row = [name]
        for epsilon in pages.budgets("1,3,8"):
            found = accuracies(made[name], epsilon, training, test, run)
            best = max(found, key=lambda size: np.median(found[size]))
            row.append(f"{pages.spread(found[best], '.3f', (0, 1))}")
            print(name, epsilon, best, row[-1], flush=True)
        rows.append(row)
    budgets = [f"epsilon {epsilon:g}" for epsilon in pages.budgets("1,3,8")]
    table = pages.table(["method", *budgets], rows)
    print(table)
    if len(chosen) == len(made):
        pages.write(pages.RESULTS / "correlated_noise.md", [table])
