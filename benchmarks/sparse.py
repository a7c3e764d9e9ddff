"""Sparse regression: a lasso weight that is fixed, tuned, or zero, at equal budgets.

Prints the last table of benchmarks/results/penalties.md, which explains it.
"""

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

N, D, USEFUL, TEST = 1000, 100, 4, 4000
EPSILONS, DRAWS = (1.0, 4.0), 8
DESCENT = {"clip_norm": 0.5, "step_size": 8.0}
FIT = dpb.NoisyGD(50, **DESCENT, output=dpb.outputs.TailMean())
ZERO = jnp.zeros(D)


def task(seed):
    rng = np.random.default_rng(seed)
    w = np.r_[3 * rng.normal(size=USEFUL), np.zeros(D - USEFUL)]
    rows = rng.normal(size=(2 * N + TEST, D))
    label = (rows @ w + rng.normal(size=len(rows))) / 10
    rows /= 1.1 * D**0.5
    rows /= np.maximum(1, np.linalg.norm(rows, axis=1, keepdims=True))
    parts = [
        {
            "features": jnp.asarray(rows[s], jnp.float32),
            "label": jnp.asarray(label[s], jnp.float32),
        }
        for s in (slice(N, 2 * N), slice(N), slice(2 * N, None))
    ]
    return dpb.Levels(*parts[:2]), parts[2]


def tuned(penalty, step_size, x):
    """Return a problem, a search of ten steps with a refit, and an initial point."""
    problem = dpb.penalty_tuning(dpb.squared_loss, np.zeros(D, int), penalty=penalty)
    search = dpb.PenaltyBilevel(
        num_steps=10,
        penalty=5.0,
        inner=dpb.NoisyGD(10, **DESCENT),
        upper_clip_norm=0.5,
        step_size=step_size,
    )
    split = {"budget_split": (0.3, 0.7), "refit_reads": "both"}
    return problem, dpb.Refitted(search, FIT, **split), (jnp.full(1, x), ZERO)


def methods():
    for weight in (0.0, 0.002, 0.005, 0.01):
        problem = dpb.FiniteSum(dpb.squared_loss, dpb.proximal.l1(weight))
        yield f"all records, l1 weight {weight:g}", (problem, FIT, ZERO)
    yield "tuned l1 weight, refit", tuned("l1", 0.005, 0.002)
    yield "tuned l2 penalty, refit", tuned("l2", 5.0, -4.0)


def errors(problem, solver, w0, epsilon):
    one = isinstance(problem, dpb.FiniteSum)
    sizes = 2 * N if one else dpb.Sizes(N, N, "disjoint")
    budget = dpb.PrivacyBudget(epsilon, 1e-5)
    plan = dpb.calibrate(problem, solver, budget, sizes=sizes)
    run = jax.jit(dpb.solve)
    for seed in range(DRAWS):
        data, test = task(seed)
        if one:
            pair = data.upper, data.lower
            data = jax.tree.map(lambda *v: jnp.concatenate(v), *pair)
        found = run(problem, plan.solver, data, w0, key=jax.random.key(seed)).value
        residual = test["features"] @ (found if one else found[1]) - test["label"]
        yield float(jnp.mean(residual**2) / jnp.mean(test["label"] ** 2))


def main():
    for name, parts in methods():
        cells = [float(np.median([*errors(*parts, e)])) for e in EPSILONS]
        print(f"| {name} | {' | '.join(f'{cell:.3f}' for cell in cells)} |", flush=True)
