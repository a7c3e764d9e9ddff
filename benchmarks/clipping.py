"""The price of clipping: a per-record clipped gradient over the plain mean gradient.

Run by `python -m benchmarks clipping` on one core and on all.
"""

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

from .timing import ratios, show


def naive(gradient, records):
    """Clips after a vmap over all records at once."""

    def clip(value):
        return value * jnp.minimum(1, 1 / jnp.linalg.norm(value))

    return jnp.mean(jax.vmap(lambda r: clip(gradient(r)))(records), 0)


def compare(loss, w, records, chunks):
    def plain(w, records):
        return jax.grad(lambda w: jnp.mean(jax.vmap(lambda r: loss(w, r))(records)))(w)

    def clipped(microbatch, precision="float", noise=False):
        def run(w, records):
            bounded = dpb.privacy.clipped_mean(
                lambda r: jax.grad(loss)(w, r),
                records,
                clip_norm=1.0,
                microbatch=microbatch,
                precision=precision,
            )
            if not noise:
                return bounded
            mechanism = dpb.privacy.Gaussian(1.0, precision=precision)
            return mechanism.release(bounded, key=jax.random.key(0))

        return run

    candidates = {
        "plain gradient": plain,
        "clipped_mean, float": clipped("auto"),
        "clipped_mean, grid": clipped("auto", "grid"),
        "clipped_mean, grid, with noise": clipped("auto", "grid", noise=True),
        "vmap, then clip": lambda w, r: naive(lambda one: jax.grad(loss)(w, one), r),
    }
    for rows in chunks:
        candidates[f"clipped_mean, float, chunks of {rows}"] = clipped(rows)
    show(ratios(candidates, w, records, reference="plain gradient"))


def main():
    rng = np.random.default_rng(0)
    n = 100_000
    for d in (32, 128, 512):
        count = n if d < 512 else n // 4
        records = {
            "features": jnp.asarray(rng.normal(size=(count, d)), jnp.float32),
            "label": jnp.asarray(np.sign(rng.normal(size=count)), jnp.float32),
        }
        w = jnp.asarray(0.1 * rng.normal(size=d), jnp.float32)
        print(f"\nlogistic regression, n = {count}, d = {d}")
        compare(dpb.logistic_loss, w, records, (256, 1024, 4096))
