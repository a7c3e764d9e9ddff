"""Tune one penalty per feature group, privately and without an outer release.

Twenty useful features and sixty useless ones: the useless group should get the larger
penalty. No record meets the penalties themselves, so the outer step costs no budget
and the ledger has no outer release.

    python examples/penalty_tuning.py [--smoke]
"""

import argparse

import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

USEFUL, USELESS = 20, 60


def records(count, seed):
    """Generates linear-regression records of which one feature group matters."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(count, USEFUL + USELESS)) / np.sqrt(USEFUL + USELESS)
    truth = np.concatenate([np.ones(USEFUL), np.zeros(USELESS)])
    label = features @ truth + 0.5 * rng.normal(size=count)
    return {
        "features": jnp.asarray(features, jnp.float32),
        "label": jnp.asarray(label, jnp.float32),
    }


def main(smoke: bool) -> None:
    """Tunes two penalties at epsilon = 2 and checks their order."""
    data = dpb.Levels(upper=records(20_000, 1), lower=records(40_000, 2))
    groups = jnp.asarray([0] * USEFUL + [1] * USELESS)
    problem = dpb.penalty_tuning(dpb.squared_loss, groups, bounds=(-8.0, 0.0))
    w0 = (jnp.full(2, -4.0), jnp.zeros(USEFUL + USELESS))
    solver = dpb.PenaltyBilevel(
        num_steps=10 if smoke else 30,
        penalty=3.0,
        step_size=200.0,
        inner=dpb.NoisyGD(num_steps=20, clip_norm=1.0, step_size=10.0),
        output=dpb.outputs.Last(),
    )
    result = dpb.fit(
        problem,
        solver,
        data,
        w0,
        budget=dpb.PrivacyBudget(epsilon=2.0, delta=1e-6),
        people="disjoint",
        key=dpb.root_key(),
    )
    print(result.report)
    useful, useless = np.exp(np.asarray(result.value[0]))
    print(f"penalty of the useful group {useful:.4g}, of the useless one {useless:.4g}")
    assert not [row for row in result.report.ledger if "outer" in row["release"]]
    assert useless > useful


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--smoke", action="store_true", help="a short run")
    main(parser.parse_args().smoke)
