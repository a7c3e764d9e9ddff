"""Certified hypergradients: their noise against the paper's, and with clipped records.

On a million generated records; and sensitivities of 1000 validation and 20 000 training
records of the census, where there are such. NON-PRIVATE evaluation.

Run by `python -m benchmarks implicit`.
"""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.bilevel.certificates.certified import ClippedUpper
from dpbilevel.cli.files import read_csv

from .paths import ADULT
from .utility import encoded

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
        multiplier = plan.report.ledger[0].noise_multiplier
        stds = []
        for level in (0.0, 1.0):
            here = problem.constants.bounds(sizes, jnp.full(4, level))
            stds.append(multiplier * float(here.upper + here.lower))
        paper = paper_std(constants, sizes, budget)
        worst = plan.report.ledger[0].noise_std
        print(
            f"| {epsilon} | {paper:.3g} | {worst:.3g} | {stds[0]:.3g} | {stds[1]:.3g} "
            f"| {paper / stds[1]:.0f} |"
        )


def contributions(problem, x, data, size):
    """Return each upper record's part of the hypergradient, by dense solves."""

    def lower(y):
        return dpb.debug.lower_objective(problem, x, y, data)

    def newton(y, _):
        step = jnp.linalg.solve(jax.hessian(lower)(y), jax.grad(lower)(y))
        return y - step, None

    y, _ = jax.lax.scan(newton, jnp.zeros(size), length=12)

    def slope(x):
        return jax.grad(lambda y: dpb.debug.lower_objective(problem, x, y, data))(y)

    moves = -jnp.linalg.solve(jax.hessian(lower)(y), jax.jacobian(slope)(x))
    gradients = jax.vmap(jax.grad(problem.upper, 1), (None, None, 0))
    return gradients(x, y, data.upper) @ moves


def clipped_table(count=11, upper=1000, lower=20_000):
    """Print the sensitivities of both levels, declared and clipped, by penalty."""
    if not ADULT.is_file():
        print("clipped contributions: no census records")
        return
    features, label = encoded(read_csv(ADULT))
    records = {"features": features, "label": label}
    order = np.random.default_rng(0).permutation(len(label))
    rows = order[:upper], order[upper : upper + lower]
    data = dpb.Levels(
        *({k: jnp.asarray(v[i], jnp.float64) for k, v in records.items()} for i in rows)
    )
    size = data.lower["features"].shape[1]
    groups = np.arange(size) * count // size
    problem = dpb.linear_tuning(dpb.Logistic(), groups, bounds=(-6.0, 1.0))
    sizes = problem.sizes_of(data, "overlapping")
    measured = jax.jit(lambda x, data: contributions(problem, x, data, size))
    print(
        f"\nclipped contributions, n = {sizes.upper} and {sizes.lower}, C: the largest"
    )
    columns = "x", "C", "hypergradient", "2 C / n", "S_up", "S_low", "noise ratio"
    columns += ("noise / hypergradient",)
    print(f"| {' | '.join(columns)} |")
    print("|" + "---|" * len(columns))
    for level in range(-6, 2):
        x = jnp.full(count, float(level))
        own = measured(x, data)
        norm = float(jnp.max(jnp.linalg.norm(own, axis=1)))
        value = float(jnp.linalg.norm(jnp.mean(own, axis=0)))
        plain = problem.constants.bounds(sizes, x)
        short = ClippedUpper(problem.constants, norm).bounds(sizes, x)
        sums = [float(b.upper + b.lower) for b in (plain, short)]
        # Noise of one release at epsilon 1 out of ten, with all coordinates.
        noise = 4.0 * (10 * count) ** 0.5 * sums[1]
        numbers = norm, value, short.upper, plain.upper, plain.lower
        numbers += sums[0] / sums[1], noise / value
        print(f"| {level} | {' | '.join(f'{float(v):.2g}' for v in numbers)} |")


def main():
    jax.config.update("jax_enable_x64", True)
    clipped_table()
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
