"""Scoring 1 000 penalties in one batched pass, over a loop of scikit-learn fits.

Both find the coefficients of a logistic regression on 20 000 x 109 records for every
candidate, to the same largest error, and its loss on 6 000 others. Ours is the score of
a private draw: a number of steps that no record decides, float64, clipped sums.

Run by `python -m benchmarks selection`.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.linear_model import LogisticRegression

import dpbilevel as dpb

LOW, HIGH, SIDE = -4.0, 0.0, 10
TRAINING, VALIDATION, FEATURES = 20_000, 6_000, 109


def records(rng, n, weights):
    features = rng.normal(size=(n, FEATURES))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    noise = rng.logistic(size=n)
    return {"features": features, "label": np.sign(features @ weights + noise)}


def fit(data, penalties, tolerance):
    scale = 1 / np.sqrt(penalties)
    model = LogisticRegression(
        C=1 / TRAINING, fit_intercept=False, tol=tolerance, max_iter=10_000
    )
    model.fit(data["features"] * scale, data["label"])
    return model.coef_[0] * scale


def loss(data, coefficients):
    return np.logaddexp(0, -data["label"] * (data["features"] @ coefficients)).mean()


def main():
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=FEATURES) * np.repeat([8.0, 3.0, 0.5], [30, 40, 39])
    upper, lower = (records(rng, n, weights) for n in (VALIDATION, TRAINING))
    groups = np.repeat([0, 1, 2], [30, 40, 39])
    problem = dpb.linear_tuning(dpb.Logistic(), jnp.asarray(groups), bounds=(LOW, HIGH))
    axis = jnp.linspace(LOW, HIGH, SIDE)
    grid = dpb.draws.Grid.product(axis, axis, axis)
    sizes = dpb.Sizes(VALIDATION, TRAINING, "disjoint")
    solver = dpb.draws.ExponentialMechanism(grid, clip_range=2.0)
    plan = dpb.calibrate(problem, solver, dpb.PrivacyBudget(1.0, 0.0), sizes=sizes)
    print(plan.report)
    data = jax.tree.map(jnp.asarray, dpb.Levels(upper, lower))
    w0 = (jnp.zeros(3), jnp.zeros(FEATURES))

    start = time.perf_counter()
    solve = jax.jit(dpb.solve).lower(
        problem, plan.solver, data, w0, key=jax.random.key(0)
    )
    solve = solve.compile()
    compiled = time.perf_counter() - start
    start = time.perf_counter()
    chosen = solve(problem, plan.solver, data, w0, key=jax.random.key(1)).x
    jax.block_until_ready(chosen)
    ours = time.perf_counter() - start
    print(f"ours: {ours:.1f} s, compiled in {compiled:.1f} s; drew {chosen}")

    # What the plan allows a coefficient vector to be off.
    allowed = plan.solver.score_of(problem, sizes)._target(jnp.float64)
    candidates = np.asarray(grid.candidates)
    few = candidates[:: len(candidates) // 12]
    newton = jax.jit(
        lambda x, data: dpb.oracles.lower_solution(
            problem, x, data, y0=w0[1], solver=dpb.oracles.NewtonCG(tolerance=1e-12)
        )
    )
    exact = [np.asarray(newton(jnp.asarray(x), data)) for x in few]
    for tolerance in 10.0 ** -np.arange(3, 10):
        found = [fit(lower, np.exp(x)[groups], tolerance) for x in few]
        error = max(np.linalg.norm(a - b) for a, b in zip(exact, found, strict=True))
        if error <= allowed:
            break
    start = time.perf_counter()
    values = [loss(upper, fit(lower, np.exp(x)[groups], tolerance)) for x in candidates]
    theirs = time.perf_counter() - start
    print(
        f"scikit-learn, tol={tolerance:.0e} (error {error:.1e}, allowed {allowed:.1e}):"
        f" {theirs:.1f} s"
    )
    print(f"ratio: {theirs / ours:.1f}")
    best = candidates[int(np.argmin(values))]
    print(f"best candidate: {best}, loss {min(values):.4f}, worst {max(values):.4f}")
