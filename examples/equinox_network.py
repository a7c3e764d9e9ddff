"""An Equinox network as the lower variable, inside a user's own jitted pipeline.

The lower level trains the network on records of four sources, half of them mislabelled;
the upper level weighs the sources by the loss on clean records. The single-loop method
moves weights and network together, each by its own optax optimizer, and releases both.
The pipeline around it, from starting point to test accuracy, is one jitted function.

    python examples/equinox_network.py [--smoke]
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpbilevel as dpb

SOURCES, FEATURES = 4, 4
UPPER, LOWER = 10_000, 40_000


def records(seed):
    """Labels say on which side of a curve a point lies; sources 2 and 3 are wrong."""
    rng = np.random.default_rng(seed)
    features = rng.uniform(-1, 1, size=(UPPER + LOWER, FEATURES))
    label = np.where(np.sin(3 * features[:, 0]) > features[:, 1], 1.0, -1.0)
    source = rng.integers(0, SOURCES, LOWER)
    trained = np.where(source >= 2, -label[UPPER:], label[UPPER:])

    def batch(rows, labels):
        return {
            "features": jnp.asarray(features[rows], jnp.float32),
            "label": jnp.asarray(labels, jnp.float32),
        }

    lower = batch(slice(UPPER, None), trained)
    lower["source"] = jnp.asarray(source, jnp.int32)
    return dpb.Levels(batch(slice(UPPER), label[:UPPER]), lower)


def start(key):
    """Return a small network with random weights; the key is not that of the noise."""
    return eqx.nn.MLP(FEATURES, "scalar", 16, 1, activation=jax.nn.tanh, key=key)


# All of a network but its weights: activations and sizes.
_, REST = eqx.partition(start(jax.random.key(0)), eqx.is_inexact_array)


def margin(params, record):
    """How far a record is on the side of its label."""
    return record["label"] * eqx.combine(params, REST)(record["features"])


def upper(x, params, record):
    """Return the loss on a clean record, which does not meet the weights."""
    return jax.nn.softplus(-margin(params, record))


def lower(x, params, record):
    """Return the loss on a training record, weighted by its source."""
    weight = SOURCES * dpb.source_weights(x)[record["source"]]
    return weight * jax.nn.softplus(-margin(params, record))


def ridge(x, params):
    """Return a public term; it keeps the linear system of the method well posed."""
    return 0.01 * optax.tree.norm(params, squared=True)


def main(smoke: bool) -> None:
    """Plans at epsilon = 2, runs the pipeline, checks its accuracy."""
    data = records(0)
    problem = dpb.BilevelProblem(
        upper, lower, lower_public=ridge, x_in_records=("lower",)
    )
    solver = dpb.SingleLoopBilevel(
        num_steps=100 if smoke else 300,
        step_size=optax.adam(0.05),
        lower_step_size=optax.adam(optax.cosine_decay_schedule(0.05, 300)),
        linear_step_size=optax.sgd(0.3),
    )
    budget = dpb.PrivacyBudget(epsilon=2.0, delta=1e-6)
    sizes = dpb.Sizes(upper=UPPER, lower=LOWER, people="disjoint")
    plan = dpb.calibrate(problem, solver, budget, sizes=sizes)
    print(plan.report)

    @jax.jit
    def pipeline(solver, data, test, key):
        key_start, key_noise = jax.random.split(key)
        params, _ = eqx.partition(start(key_start), eqx.is_inexact_array)
        w0 = (jnp.zeros(SOURCES), params)
        found = dpb.solve(problem, solver, data, w0, key=key_noise)
        right = jax.vmap(lambda record: margin(found.y, record) > 0)(test)
        return dpb.source_weights(found.x), jnp.mean(right)

    test = records(1).upper
    weights, accuracy = pipeline(plan.solver, data, test, dpb.root_key())
    print(
        f"source weights {np.round(weights, 2)}, accuracy on new records {accuracy:.3f}"
    )
    assert float(weights[0] + weights[1]) > 0.9
    assert float(accuracy) > 0.8


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--smoke", action="store_true", help="a short run")
    main(parser.parse_args().smoke)
