"""Choose two penalties by one private draw, without delta and without a gradient.

A grid of candidates is scored by the loss on validation records; every lower level is
solved by a number of steps that no record decides. The draw is as good as the privacy
budget allows: with more records, the best candidate is drawn nearly always.

    python examples/private_draw.py [--smoke]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

USEFUL, USELESS = 5, 15


def records(count, seed):
    """Generate classification records of which one feature group matters."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(count, USEFUL + USELESS))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    margin = 12.0 * features[:, :USEFUL].sum(1)
    label = np.sign(margin + rng.logistic(size=count))
    return {"features": jnp.asarray(features), "label": jnp.asarray(label)}


def main(smoke: bool) -> None:
    """Draws two log-penalties at epsilon = 1 and compares with all candidates."""
    jax.config.update("jax_enable_x64", True)
    count, side = (2_000, 5) if smoke else (20_000, 13)
    data = dpb.Levels(upper=records(count, 1), lower=records(count, 2))
    groups = [0] * USEFUL + [1] * USELESS
    problem = dpb.linear_tuning(dpb.Logistic(), jnp.asarray(groups), bounds=(-3.0, 0.0))
    axis = jnp.linspace(-3.0, 0.0, side)
    grid = dpb.draws.Grid.product(axis, axis)
    w0 = (jnp.zeros(2), jnp.zeros(USEFUL + USELESS))
    result = dpb.fit(
        problem,
        dpb.draws.ExponentialMechanism(grid, clip_range=2.0),
        data,
        w0,
        budget=dpb.PrivacyBudget(epsilon=1.0, delta=0.0),
        people="disjoint",
        key=dpb.root_key(),
    )
    print(result.report)

    @jax.jit
    def loss(x, data):  # NON-PRIVATE, to see what the draw is worth
        y = dpb.oracles.lower_solution(problem, x, data, y0=w0[1])
        return dpb.debug.upper_objective(problem, x, y, data)

    losses = np.asarray(jax.vmap(loss, (0, None))(grid.candidates, data))
    drawn = float(loss(result.x, data))
    print(f"drew {result.x}: loss {drawn:.4f}")
    print(f"candidates: best {losses.min():.4f}, worst {losses.max():.4f}")
    assert result.report.delta == 0
    assert losses.min() - 1e-6 <= drawn <= losses.max() + 1e-6


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--smoke", action="store_true", help="a small, fast run")
    main(parser.parse_args().smoke)
