"""Learn which data sources to trust, privately, from a small clean validation set.

Eight sources supply training records; in five of them labels are partly or mostly
wrong. The weights of the sources are learned at epsilon = 1, the model is refitted
privately at those weights, and both are released.

    python examples/source_reweighting.py [--smoke]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

FLIPPED = np.array([0, 0, 0, 0.5, 0.5, 0.9, 0.9, 0.9])


def records(num_training, num_validation, num_features, seed):
    """Generates unit-norm features with logistic labels, flipped by source."""
    rng = np.random.default_rng(seed)
    total = num_training + num_validation
    features = rng.normal(size=(total, num_features))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    margin = features @ rng.normal(size=num_features)
    label = np.where(rng.random(total) < 1 / (1 + np.exp(-6 * margin)), 1.0, -1.0)
    source = rng.integers(0, len(FLIPPED), num_training)
    flip = rng.random(num_training) < FLIPPED[source]

    def batch(rows, labels):
        return {
            "features": jnp.asarray(features[rows], jnp.float32),
            "label": jnp.asarray(labels, jnp.float32),
        }

    training = batch(
        slice(num_training), np.where(flip, -label[:num_training], label[:num_training])
    )
    training["source"] = jnp.asarray(source, jnp.int32)
    validation = batch(slice(num_training, total), label[num_training:])
    return dpb.Levels(upper=validation, lower=training)


def main(smoke: bool) -> None:
    """Plans, prints the guarantee, runs, checks the answer."""
    data = records(20_000, 6_000, 20, seed=0)
    problem = dpb.source_weighting(dpb.logistic_loss, len(FLIPPED), ridge=0.005)
    w0 = (jnp.zeros(len(FLIPPED)), jnp.zeros(20))
    search = dpb.PenaltyBilevel(
        num_steps=8 if smoke else 20,
        penalty=10.0,
        step_size=20.0,
        upper_clip_norm=0.5,
        inner=dpb.NoisyGD(num_steps=10, clip_norm=1.0, step_size=1.0),
        output=dpb.outputs.Last(),
    )
    refit = dpb.NoisyGD(num_steps=30, clip_norm=1.0, step_size=2.0)
    solver = dpb.Refitted(search, refit, budget_split=(0.8, 0.2))

    budget = dpb.PrivacyBudget(epsilon=1.0, delta=1e-5)
    sizes = dpb.Sizes(upper=6_000, lower=20_000, people="disjoint")
    plan = dpb.calibrate(problem, solver, budget, sizes=sizes, w0=w0)
    print(plan.report)  # the guarantee, before any data are touched

    solution = jax.jit(dpb.solve)(problem, plan.solver, data, w0, key=dpb.root_key())
    weights = dpb.source_weights(solution.x)
    for index, (weight, flipped) in enumerate(zip(weights, FLIPPED, strict=True)):
        print(f"source {index}: {flipped:4.0%} wrong labels, weight {weight:.3f}")

    clean = float(jnp.sum(weights[:3]))
    print(f"released weight on the clean sources: {clean:.3f} (started at 0.375)")
    assert clean > 0.6


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--smoke", action="store_true", help="a short run")
    main(parser.parse_args().smoke)
