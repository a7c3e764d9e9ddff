"""The price of exact sums and rounded noise: solvers on the grid over floating point.

Run by `python -m benchmarks precision`.
"""

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

from .timing import ratios, show


def generated(n, d, num_sources, rng):
    features = rng.normal(size=(n, d)) / np.sqrt(d)
    return {
        "features": jnp.asarray(features, jnp.float32),
        "label": jnp.asarray(np.sign(features[:, 0]), jnp.float32),
        "source": jnp.asarray(rng.integers(num_sources, size=n), jnp.int32),
    }


def compare(problem, solver, sizes, *arguments):
    """Times one calibrated solver in both precisions."""

    def run(precision):
        budget = dpb.PrivacyBudget(epsilon=1.0, delta=1e-5)
        plan = dpb.calibrate(problem, solver, budget, sizes=sizes, precision=precision)

        def solve(data, w0, key):
            return dpb.solve(problem, plan.solver, data, w0, key=key).value

        return solve

    candidates = {precision: run(precision) for precision in ("float", "grid")}
    show(ratios(candidates, *arguments, reference="float", repeats=10))


def main():
    rng = np.random.default_rng(0)
    key = jax.random.key(0)

    d, num_sources = 105, 8
    lower, upper = (generated(n, d, num_sources, rng) for n in (20_000, 6_000))
    problem = dpb.source_weighting(dpb.logistic_loss, num_sources, ridge=0.005)
    inner = dpb.NoisyGD(10, 1.0, step_size=1.0)
    solver = dpb.PenaltyBilevel(20, 10.0, inner, step_size=20.0)
    print("\nsource weighting, 20 x 10 steps, n = 20000 and 6000, d = 105")
    data, w0 = dpb.Levels(upper, lower), (jnp.zeros(num_sources), jnp.zeros(d))
    compare(problem, solver, dpb.Sizes(6_000, 20_000, "disjoint"), data, w0, key)

    for n, d in ((100_000, 128), (1_000, 10_000)):
        print(f"\nnoisy gradient descent, 20 steps, logistic, n = {n}, d = {d}")
        compare(
            dpb.FiniteSum(dpb.logistic_loss),
            dpb.NoisyGD(20, 1.0, step_size=0.5),
            n,
            generated(n, d, num_sources, rng),
            jnp.zeros(d),
            key,
        )
