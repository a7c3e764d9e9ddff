"""The price of a step of the single-loop method over one clipped gradient.

The gradient is that of the lower level at the same point; the step makes the noise too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

from .timing import ratios, show


def weighting(n, d):
    """Source weighting on `n` training and `n / 4` validation records."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(n, d))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    lower = {
        "features": jnp.asarray(features, jnp.float32),
        "label": jnp.asarray(np.sign(rng.normal(size=n)), jnp.float32),
        "source": jnp.asarray(rng.integers(0, 8, n), jnp.int32),
    }
    upper = {key: lower[key][: n // 4] for key in ("features", "label")}
    return dpb.source_weighting(dpb.logistic_loss, 8), dpb.Levels(upper, lower)


def gradient(problem, precision, state, data):
    return dpb.privacy.clipped_mean(
        lambda record: jax.grad(problem.lower, 1)(state.w.x, state.w.y, record),
        data.lower,
        clip_norm=1.0,
        precision=precision,
    )


def step(problem, solver, state, data):
    return solver.step(problem, data, state, key=jax.random.key(0))


def compare(n, d, precision):
    problem, data = weighting(n, d)
    solver = dpb.SingleLoopBilevel(
        1, step_size=1.0, lower_step_size=1.0, linear_step_size=1.0
    )
    solver = solver.with_noise(1.0).with_precision(precision)
    solver = solver.with_sizes(problem.sizes_of(data))
    state = solver.init(problem, (jnp.zeros(8), jnp.full(d, 0.1)))
    candidates = {
        "clipped gradient": functools.partial(gradient, problem, precision),
        "single-loop step": functools.partial(step, problem, solver),
    }
    print(f"\nn = {n} and {n // 4}, d = {d}, precision {precision}")
    show(ratios(candidates, state, data, reference="clipped gradient"))


def main():
    for n, d in ((100_000, 128), (20_000, 109)):
        for precision in ("float", "grid"):
            compare(n, d, precision)
