"""A clip norm that is ten times too long or too short, fixed and adaptive.

Test losses of plain private descent at epsilon 1, medians and quartiles of 10 keys.
NON-PRIVATE evaluation, on the records of `benchmarks.census` that no level uses, or on
half of the upper level where there are none. Run by `python -m benchmarks clip_norms`.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import dpbilevel as dpb
from dpbilevel.onelevel import AdaptiveClipGD

from .census import load, quartiles

KEYS, STEPS, HIDDEN = 10, 60, 16
STARTS = (0.1, 1.0, 10.0)
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
RULES = {"steps of 4": 4.0, "adam(.05)": optax.adam(0.05)}
KINDS = {"fixed": dpb.NoisyGD, "adaptive": AdaptiveClipGD}


def network_loss(layers, record):
    """A network of one hidden layer."""
    hidden = jnp.tanh(record["features"] @ layers["first"] + layers["bias"])
    return jax.nn.softplus(-record["label"] * (hidden @ layers["last"]))


def models(width):
    """A loss and a start for each model."""
    keys = jax.random.split(jax.random.key(1), 2)
    layers = {
        "first": 2 * jax.random.normal(keys[0], (width, HIDDEN)) / width**0.5,
        "bias": jnp.zeros(HIDDEN),
        "last": 0.1 * jax.random.normal(keys[1], (HIDDEN,)),
    }
    return {
        "logistic": (dpb.logistic_loss, jnp.zeros(width)),
        "network": (network_loss, layers),
    }


def records():
    """Records to fit and to test."""
    _, levels, test = load()
    fit = {name: levels.upper[name] for name in ("features", "label")}
    if test is None:
        half = len(fit["label"]) // 2
        test = jax.tree.map(lambda v: v[half:], fit)
        fit = jax.tree.map(lambda v: v[:half], fit)
    return fit, test


def losses(loss, start, solver, fit, test):
    problem = dpb.FiniteSum(loss)
    size = len(fit["label"])
    plan = dpb.calibrate(problem, solver, BUDGET, sizes=size, w0=start)
    run = functools.partial(dpb.solve, problem, plan.solver, fit, start)
    keys = jax.random.split(jax.random.key(0), KEYS)
    found = jax.jit(jax.vmap(lambda key: run(key=key).value))(keys)
    each = jax.vmap(loss, (None, 0))
    return jax.vmap(lambda w: jnp.mean(each(w, test)))(found)


def main():
    fit, test = records()
    starts = [f"C_0 = {start:g}" for start in STARTS]
    print(f"| model | steps | clip norm | {' | '.join(starts)} |")
    print("|---|---|---|" + "---|" * len(STARTS))
    for model, (loss, start) in models(fit["features"].shape[1]).items():
        for rule, step_size in RULES.items():
            for kind, solver in KINDS.items():
                cells = [
                    quartiles(
                        losses(loss, start, solver(STEPS, norm, step_size), fit, test)
                    )
                    for norm in STARTS
                ]
                print(
                    f"| {model} | {rule} | {kind} | {' | '.join(cells)} |", flush=True
                )
