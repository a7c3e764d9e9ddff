"""Batches of passes, Poisson batches, subsets and full batches at one budget.

Test losses and accuracies of a network of 64 ReLU units that is trained by Adam on
8 000 images of digits, medians of 10 keys. NON-PRIVATE evaluation. Needs MNIST, as
`python -m benchmarks utility` does. Run by `python -m benchmarks passes`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpbilevel as dpb
from dpbilevel.onelevel import AllocatedGD

from .utility import MNIST

KEYS, SIZE, PASSES, BATCHES, HIDDEN = 10, 8000, 20, 16, 64
EPSILONS = (1.0, 3.0)
UPDATES = PASSES * BATCHES
SLOW, FAST = optax.adam(0.003), optax.adam(0.01)
METHODS = {
    "passes of 16 batches": AllocatedGD(PASSES, BATCHES, 1.0, SLOW),
    "Poisson batches": dpb.NoisyGD(
        UPDATES, 1.0, SLOW, sampling=dpb.Poisson(1 / BATCHES)
    ),
    "subsets": dpb.NoisyGD(UPDATES, 1.0, SLOW, sampling=dpb.FixedSize(SIZE // BATCHES)),
    "full batches, 100 steps": dpb.NoisyGD(100, 1.0, FAST),
}


def records():
    """Images of unit norm, for training and for the test."""
    with np.load(MNIST) as file:
        images = file["images"].reshape(len(file["labels"]), -1).astype(np.float32)
        images /= np.linalg.norm(images, axis=1, keepdims=True)
        data = {"image": images, "label": file["labels"].astype(np.int32)}
    data = jax.tree.map(jnp.asarray, data)
    return tuple(
        jax.tree.map(lambda v, part=part: v[part], data)
        for part in (slice(SIZE), slice(SIZE, None))
    )


def start(width):
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "first": 8.4 * jax.random.normal(keys[0], (width, HIDDEN)) / width**0.5,
        "bias": jnp.zeros(HIDDEN),
        "last": jax.random.normal(keys[1], (HIDDEN, 10)) / HIDDEN**0.5,
        "offset": jnp.zeros(10),
    }


def logits(y, record):
    hidden = jax.nn.relu(record["image"] @ y["first"] + y["bias"])
    return hidden @ y["last"] + y["offset"]


def loss(y, record):
    return -jax.nn.log_softmax(logits(y, record))[record["label"]]


def main():
    fit, test = records()
    problem, w0 = dpb.FiniteSum(loss), start(fit["image"].shape[1])

    @jax.jit
    def judged(y):
        losses = jax.vmap(loss, (None, 0))(y, test)
        found = jax.vmap(logits, (None, 0))(y, test).argmax(axis=-1)
        return jnp.mean(losses), jnp.mean(found == test["label"])

    print("| epsilon | method | noise std | test loss | accuracy |")
    print("|---|---|---|---|---|")
    for epsilon in EPSILONS:
        budget = dpb.PrivacyBudget(epsilon, 1e-5)
        for name, solver in METHODS.items():
            plan = dpb.calibrate(problem, solver, budget, sizes=SIZE, w0=w0)
            run = jax.jit(functools.partial(dpb.solve, problem, plan.solver, fit, w0))
            keys = jax.random.split(jax.random.key(5), KEYS)
            found = np.median([judged(run(key=key).value) for key in keys], axis=0)
            std = plan.solver.release(problem, SIZE).noise_std
            cells = f"{std:.4f} | {found[0]:.3f} | {found[1]:.3f}"
            print(f"| {epsilon:g} | {name} | {cells} |", flush=True)
