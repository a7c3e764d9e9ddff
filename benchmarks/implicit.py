"""Sensitivities of hypergradients on the census, declared and with clipped records.

`python -m benchmarks implicit` prints the table of results/sensitivities.md, of 1000
validation and 20 000 training records. NON-PRIVATE evaluation.
"""

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.bilevel.certificates.certified import ClippedUpper
from dpbilevel.cli.tables import read_csv

from .pages import ADULT, table
from .source_tasks import encoded


def contributions(problem, x, data, size):
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


def clipped(count=11, upper=1000, lower=20_000):
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
    lines = []
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
        lines.append([f"{level}", *(f"{float(v):.2g}" for v in numbers)])
    head = "x", "C", "hypergradient", "2 C / n", "S_up", "S_low", "noise ratio"
    return table([*head, "noise / hypergradient"], lines)


def main():
    with jax.enable_x64(True):
        if not ADULT.is_file():
            print(f"sensitivities: left out, there is no {ADULT.name}")
            return
        print(clipped())
