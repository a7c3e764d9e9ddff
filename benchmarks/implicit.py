"""Certified hypergradients on a million records, and their noise against the paper's.

Run by `python -m benchmarks implicit`.
"""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

N, DIMENSION, NUM_STEPS = 1_000_000, 20, 10
GROUPS = np.arange(DIMENSION) % 4
BOUNDS = (0.0, 1.0)
DELTA = 1e-8


def generated(n, key):
    """Rows of norm about 1 whose first group of features tells the label."""
    key_features, key_noise = jax.random.split(key)
    features = jax.random.normal(key_features, (n, DIMENSION)) / DIMENSION**0.5
    margin = features @ jnp.asarray(10.0 * (GROUPS == 0))
    noise = jax.random.logistic(key_noise, (n,))
    return {"features": features, "label": jnp.sign(margin + noise)}


def paper_std(constants, sizes, budget):
    """32 K sqrt(T log(1/delta)) / (n epsilon)."""
    spread = math.sqrt(NUM_STEPS * math.log(1 / budget.delta))
    n = min(sizes.upper, sizes.lower)
    return 32 * constants.sensitivity_constant * spread / (n * budget.epsilon)


def table(problem, solver, sizes):
    constants = problem.constants.second_order
    columns = (
        "epsilon",
        "paper's std",
        "worst x",
        "x = 0",
        "x = 1",
        "paper / x = 1",
    )
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|")
    for epsilon in (0.1, 1.0, 10.0):
        budget = dpb.PrivacyBudget(epsilon, DELTA)
        plan = dpb.calibrate(problem, solver, budget, sizes=sizes)
        multiplier = plan.report.ledger[0]["noise_multiplier"]
        stds = []
        for level in (0.0, 1.0):
            here = problem.constants.bounds(sizes, jnp.full(4, level))
            stds.append(multiplier * float(here.upper + here.lower))
        paper = paper_std(constants, sizes, budget)
        worst = plan.report.ledger[0]["noise_std"]
        print(
            f"| {epsilon} | {paper:.3g} | {worst:.3g} | {stds[0]:.3g} | {stds[1]:.3g} "
            f"| {paper / stds[1]:.0f} |"
        )


def main():
    jax.config.update("jax_enable_x64", True)
    problem = dpb.linear_tuning(dpb.Logistic(), jnp.asarray(GROUPS), bounds=BOUNDS)
    keys = jax.random.split(jax.random.key(0), 2)
    data = dpb.Levels(*(generated(N, key) for key in keys))
    sizes = problem.sizes_of(data, "overlapping")
    solver = dpb.ImplicitBilevel(NUM_STEPS, step_size=20.0, output=dpb.outputs.Last())
    print(f"\npenalties of a logistic model, n = {N} twice, d = {DIMENSION}")
    table(problem, solver, sizes)

    w0 = jnp.full(4, 0.5), jnp.zeros(DIMENSION)
    start = time.perf_counter()
    result = dpb.fit(
        problem,
        solver,
        data,
        w0,
        budget=dpb.PrivacyBudget(1.0, DELTA),
        people="overlapping",
        key=dpb.root_key(),
    )
    jax.block_until_ready(result.value)
    seconds = time.perf_counter() - start
    print(f"\n{result.report}\n\n{seconds:.1f} s, x = {np.round(result.x, 3)}")
    part = jax.tree.map(lambda v: v[: N // 20], data)
    for name, x in (("start", w0[0]), ("answer", result.x)):
        value = dpb.debug.hyper_objective(problem, x, w0[1], part)
        print(f"objective at the {name}, on a part: {value:.5f}")
