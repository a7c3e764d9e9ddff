"""A bilevel solver inside a user's own jitted optax pipeline.

One jitted function learns source weights with `dpbilevel.solve`, then trains a small
network on the weighted records in a hand-written optax loop from the building blocks
`clipped_mean` and `Gaussian`. One ledger adds up both runs, so that the pipeline as a
whole has one epsilon.

    python examples/optax_pipeline.py [--smoke]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpbilevel as dpb

SOURCES, FEATURES, HIDDEN = 4, 10, 16
UPPER, LOWER = 8_000, 20_000


def records(seed):
    """Labels depend on a ring in the first two features; sources 2 and 3 are wrong."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(UPPER + LOWER, FEATURES)) / np.sqrt(FEATURES)
    label = np.where(np.sum(features[:, :2] ** 2, 1) > 0.14, 1.0, -1.0)
    source = rng.integers(0, SOURCES, LOWER)
    trained = np.where(source >= 2, -label[UPPER:], label[UPPER:])
    squares = np.concatenate([features, features**2], axis=1)

    def batch(rows, labels):
        return {
            "features": jnp.asarray(squares[rows], jnp.float32),
            "label": jnp.asarray(labels, jnp.float32),
        }

    lower = batch(slice(UPPER, None), trained)
    lower["source"] = jnp.asarray(source, jnp.int32)
    return dpb.Levels(batch(slice(UPPER), label[:UPPER]), lower)


def network(params, features):
    """Return a network with one hidden layer."""
    hidden = jnp.tanh(features @ params["in"] + params["bias"])
    return hidden @ params["out"]


def start(key):
    """Random initial weights; the key is not the privacy noise's."""
    key_in, key_out = jax.random.split(key)
    return {
        "in": jax.random.normal(key_in, (2 * FEATURES, HIDDEN)) / 3,
        "bias": jnp.zeros(HIDDEN),
        "out": jax.random.normal(key_out, (HIDDEN,)) / 4,
    }


def main(smoke: bool) -> None:
    """Run the pipeline at epsilon = 2.5 and check its accuracy."""
    steps = 60 if smoke else 150
    data = records(0)
    sizes = dpb.Sizes(upper=UPPER, lower=LOWER, people="disjoint")
    problem = dpb.source_weighting(dpb.logistic_loss, SOURCES, ridge=0.01)
    search = dpb.PenaltyBilevel(
        num_steps=8,
        penalty=10.0,
        step_size=10.0,
        inner=dpb.NoisyGD(num_steps=8, clip_norm=1.0, step_size=1.0),
        output=dpb.outputs.Last(),
    )
    sampling = dpb.Poisson(rate=0.1)
    budget = dpb.PrivacyBudget(epsilon=1.5, delta=5e-6)
    plan = dpb.calibrate(problem, search, budget, sizes=sizes)
    noise = dpb.privacy.Gaussian(noise_multiplier=3.0, precision="grid")
    optimizer = optax.adam(0.03)

    @jax.jit
    def pipeline(solver, data, params, key):
        key_search, key_train = jax.random.split(key)
        w0 = (jnp.zeros(SOURCES), jnp.zeros(2 * FEATURES))
        x = dpb.solve(problem, solver, data, w0, key=key_search).x
        weights = SOURCES * dpb.source_weights(x)

        def loss(params, record):
            margin = record["label"] * network(params, record["features"])
            return weights[record["source"]] * jnp.logaddexp(0.0, -margin)

        def train_step(carry, key):
            params, memory = carry
            key_batch, key_noise = jax.random.split(key)
            batch = sampling.draw(data.lower, LOWER, key=key_batch)
            mean = dpb.privacy.clipped_mean(
                lambda record: jax.grad(loss)(params, record),
                batch,
                clip_norm=1.0,
                precision=noise.precision,
            )
            gradient = noise.release(mean, key=key_noise)
            updates, memory = optimizer.update(gradient, memory, params)
            return (optax.apply_updates(params, updates), memory), None

        keys = jax.random.split(key_train, steps)
        carry, _ = jax.lax.scan(train_step, (params, optimizer.init(params)), keys)
        return weights, carry[0]

    training = dpb.privacy.Release(
        "network gradient",
        steps,
        (dpb.privacy.Query("lower", LOWER, 1.0, sampling),),
        noise,
    )
    ledger = plan.solver.ledger(problem, sizes) + dpb.privacy.Ledger(
        (training,), sizes.people
    )
    epsilon = ledger.epsilon(delta=1e-5)
    print(f"the whole pipeline is ({epsilon:.3f}, 1e-05)-differentially private")

    key_start, key_run = jax.random.split(dpb.root_key())
    weights, params = pipeline(plan.solver, data, start(key_start), key_run)
    fresh = records(1).upper
    accuracy = jnp.mean(jnp.sign(network(params, fresh["features"])) == fresh["label"])
    print(
        f"source weights {np.round(weights, 2)}, accuracy on new records {accuracy:.3f}"
    )
    assert epsilon < 2.5
    assert float(weights[0] + weights[1]) > 3.0
    assert float(accuracy) > 0.75


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--smoke", action="store_true", help="a short run")
    main(parser.parse_args().smoke)
