"""Choose a mixture of plans that is safe in the worst scenario, privately.

Every person has a table of costs: one row per plan, one column per scenario, entries in
[-1, 1]. The mixture of plans (x) that makes the mean cost in the worst scenario least,
and the mixture of scenarios (y) that makes it largest, are a saddle point of the mean
table. The mean table is released once, at epsilon = 1, and its game is solved.

    python examples/matrix_game.py [--smoke]
"""

import argparse

import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

PLANS, SCENARIOS = 4, 3


def tables(count):
    """Costs of -1 or 1 around a mean table without a plan that is best throughout."""
    rng = np.random.default_rng(0)
    mean = np.array(
        [[-0.6, 0.5, 0.2], [0.5, -0.6, 0.2], [0.2, 0.2, -0.6], [0.1, 0.1, 0.1]]
    )
    draws = rng.random((count, PLANS, SCENARIOS)) < (1 + mean) / 2
    return jnp.asarray(np.where(draws, 1.0, -1.0), jnp.float32)


def main(smoke: bool) -> None:
    """Plans, runs, evaluates."""
    count = 2_000 if smoke else 20_000
    problem = dpb.games.matrix_game(PLANS, SCENARIOS)
    w0 = (jnp.full(PLANS, 1 / PLANS), jnp.full(SCENARIOS, 1 / SCENARIOS))
    budget, solver = dpb.PrivacyBudget(1.0, 1e-6), dpb.games.NoisyPayoff()
    data = tables(count)
    result = dpb.fit(problem, solver, data, w0, budget=budget, key=dpb.root_key())
    print(result.report)
    x, y = result.value
    print("released mixture of plans", np.round(x, 3), "of scenarios", np.round(y, 3))

    mean = np.asarray(data, float).mean(axis=0)

    def gap(x, y):  # what both could gain together, from the records themselves
        return np.max(x @ mean) - np.min(mean @ y)

    before, after = gap(*map(np.asarray, w0)), gap(x, y)
    print(f"NON-PRIVATE evaluation: gap {after:.4f}, at the start {before:.4f}")
    assert after < before
    assert float(x[3]) < 0.25  # the plan that is middling in every scenario


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--smoke", action="store_true", help="fewer records")
    main(parser.parse_args().smoke)
