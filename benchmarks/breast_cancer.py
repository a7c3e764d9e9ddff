"""Many penalties on few records: bilevel tuning against plain private descent.

scikit-learn's breast cancer records, standardised: 284 for training, 142 for
validation, 143 for testing. Logistic regression with a penalty for each of its 30
coefficients by `PenaltyBilevel`, released as its last model or
the mean of them, and plain private descent on the training records, or on those of
training and validation. Twenty keys each; test accuracies and how many answers were not
finite.

Run by `python -m benchmarks breast_cancer`. NON-PRIVATE evaluation: the test accuracies
are computed from the records.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_breast_cancer

import dpbilevel as dpb

from .census import quartiles

KEYS = 20
EPSILONS = (0.3, 1.0, 3.0, 10.0)
DELTA = 1e-5
TUNING = dpb.PenaltyBilevel(
    num_steps=15,
    penalty=10.0,
    step_size=5.0,
    inner=dpb.NoisyGD(num_steps=8, clip_norm=1.0, step_size=1.0),
)
PLAIN = dpb.NoisyGD(num_steps=50, clip_norm=1.0, step_size=1.0)


def load():
    """Records of training, validation and testing, by a fixed permutation."""
    features, target = load_breast_cancer(return_X_y=True)
    features = (features - features.mean(0)) / features.std(0)
    order = np.random.default_rng(0).permutation(len(target))
    parts = np.split(order, [len(order) // 2, len(order) // 2 + len(order) // 4])
    return [
        {
            "features": jnp.asarray(features[part], jnp.float32),
            "label": jnp.asarray(2 * target[part] - 1, jnp.float32),
        }
        for part in parts
    ]


def released(problem, solver, data, w0, budget, **sizes):
    """The solutions of all keys, at a budget."""
    solver = dpb.calibrate(problem, solver, budget, w0=w0, **sizes).solver
    keys = jax.random.split(jax.random.key(7), KEYS)
    run = jax.vmap(lambda key: dpb.solve(problem, solver, data, w0, key=key))
    return jax.jit(run)(keys)


def row(models, test):
    """Quartiles of the test accuracy, and the number of models that are not finite."""
    signs = jnp.sign(models @ test["features"].T)
    accuracies = np.asarray(jnp.mean(signs == test["label"], axis=1))
    lost = KEYS - int(jnp.sum(jnp.all(jnp.isfinite(models), axis=1)))
    return f"{quartiles(accuracies)}   not finite: {lost} of {KEYS}"


def main():
    """Prints one table for each epsilon."""
    train, validation, test = load()
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), train, validation)
    tuned = dpb.penalty_tuning(dpb.logistic_loss, jnp.arange(30))
    plain = dpb.FiniteSum(dpb.logistic_loss)
    sizes = dpb.Sizes(len(validation["label"]), len(train["label"]), "disjoint")
    start = (jnp.zeros(30), jnp.zeros(30))
    for epsilon in EPSILONS:
        budget = dpb.PrivacyBudget(epsilon, DELTA)
        print(f"epsilon {epsilon}: test accuracy, median [quartiles]")
        for rule in (dpb.outputs.Last(), dpb.outputs.Mean()):
            solver = dataclasses.replace(TUNING, output=rule)
            data = dpb.Levels(validation, train)
            found = released(tuned, solver, data, start, budget, sizes=sizes)
            print(
                f"  30 penalties, {type(rule).__name__:18} {row(found.y, test)}",
                flush=True,
            )
        for name, records in (("training", train), ("and validation", both)):
            count = len(records["label"])
            found = released(plain, PLAIN, records, start[0], budget, sizes=count)
            print(f"  plain, {name:18}        {row(found.value, test)}", flush=True)
