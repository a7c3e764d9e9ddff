"""Choose a mixture of plans that is safe in the worst scenario, privately.

Every person has a table of costs: one row per plan, one column per scenario, entries in
[-1, 1]. The mixture of plans (x) that makes the mean cost in the worst scenario least,
and the mixture of scenarios (y) that makes it largest, are a saddle point of the mean
table. One pass over disjoint batches releases both at epsilon = 1 and bounds the strong
gap before any data are touched.

    python examples/matrix_game.py [--smoke]
"""

import argparse

import jax
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
    """Plans with the parameters that minimize the bound, runs, evaluates."""
    count = 50_000 if smoke else 100_000
    problem = dpb.games.matrix_game(PLANS, SCENARIOS)
    w0 = (jnp.full(PLANS, 1 / PLANS), jnp.full(SCENARIOS, 1 / SCENARIOS))
    budget, dimension = dpb.PrivacyBudget(1.0, 1e-6), problem.w_set.dimension(w0)
    solver = dpb.games.NoisyExtragradient.tuned(
        problem, budget, count, dimension=dimension, passes="single"
    )
    plan = dpb.calibrate(problem, solver, budget, sizes=count, w0=w0)
    print(plan.report)
    promised = plan.solver.bound(problem, dimension=dimension)
    print(f"promised: an expected strong gap of at most {promised:.3f}")

    data = tables(count)
    run = jax.jit(dpb.solve)
    x, y = run(problem, plan.solver, data, w0, key=dpb.root_key()).value
    print("released mixture of plans", np.round(x, 3), "of scenarios", np.round(y, 3))

    known = dpb.games.zoo.matrix_game(data)
    before, after = float(known.gap(w0)), float(known.gap((x, y)))
    print(f"NON-PRIVATE evaluation: gap {after:.4f}, at the start {before:.4f}")
    assert after < before
    assert float(x[3]) < 0.25  # the plan that is middling in every scenario


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--smoke", action="store_true", help="fewer records")
    main(parser.parse_args().smoke)
