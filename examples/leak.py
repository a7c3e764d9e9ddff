"""Why bilevel problems leak even where the upper level has no data.

The upper level is public and the lower level fits the mean of the records. One exact
hypergradient at x = 0 is that mean, to the last digit. The private solver spends its
budget on noisy inner solves instead, and its answers for neighbouring data overlap.

    python examples/leak.py [--smoke]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

PROBLEM = dpb.BilevelProblem(
    lambda x, y, record: 0.0 * record,  # the upper level has no data
    lambda x, y, record: 0.5 * jnp.sum((y - record) ** 2),
    upper_public=lambda x, y: 0.5 * jnp.sum((x + y) ** 2),
    x_in_records=False,
)
NOTHING, START = jnp.zeros(1), jnp.zeros(1)


def exact_hypergradient(records):
    """Return the NON-PRIVATE derivative at x = 0."""
    data = dpb.Levels(NOTHING, records)
    y = dpb.oracles.lower_solution(PROBLEM, START, data, y0=START)
    return dpb.oracles.implicit_hypergradient(PROBLEM, START, y, data)[0][0]


def main(smoke: bool) -> None:
    """Print both answers for neighbouring data and check the overlap."""
    runs = 200 if smoke else 2_000
    rng = np.random.default_rng(0)
    ages = jnp.asarray(rng.uniform(0, 1, size=(200, 1)), jnp.float32)
    neighbour = ages.at[0].set(1.0 - ages[0])

    exact = [exact_hypergradient(records) for records in (ages, neighbour)]
    print(f"mean of the records:          {float(ages.mean()):.6f}")
    print(f"exact hypergradient:          {float(exact[0]):.6f}")
    print(f"... with one record replaced: {float(exact[1]):.6f}")
    assert float(jnp.abs(exact[0] - ages.mean())) < 1e-6
    assert float(exact[0]) != float(exact[1])

    solver = dpb.PenaltyBilevel(
        num_steps=1,
        penalty=10.0,
        step_size=1.0,
        inner=dpb.NoisyGD(num_steps=10, clip_norm=1.0, step_size=0.5),
        output=dpb.outputs.Last(),
    )
    budget = dpb.PrivacyBudget(epsilon=1.0, delta=1e-5)
    sizes = dpb.Sizes(upper=1, lower=200, people="disjoint")
    plan = dpb.calibrate(PROBLEM, solver, budget, sizes=sizes)

    def released(records, key):
        data = dpb.Levels(NOTHING, records)
        solution = dpb.solve(PROBLEM, plan.solver, data, (START, START), key=key)
        return -solution.x[0]

    keys, others = jax.random.split(dpb.root_key(), (2, runs))
    batch = jax.jit(jax.vmap(released, in_axes=(None, 0)))
    here, there = batch(ages, keys), batch(neighbour, others)
    shift = float(jnp.abs(jnp.mean(here) - jnp.mean(there)))
    spread = float(jnp.std(here))
    print(f"private answers:              {float(here.mean()):.3f} +- {spread:.3f}")
    print(f"moved by one record:          {shift / spread:.3f} standard deviations")
    assert shift < 0.5 * spread


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--smoke", action="store_true", help="a short run")
    main(parser.parse_args().smoke)
