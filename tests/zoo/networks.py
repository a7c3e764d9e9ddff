"""Networks with weights by NumPy, for which no program is compiled."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


def mlp(*sizes, seed=0, **options):
    """Return `equinox.nn.MLP(*sizes)` with weights of a seed."""
    rng = np.random.default_rng(seed)

    def network():
        return eqx.nn.MLP(*sizes, key=jax.random.key(0), **options)

    def drawn(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jnp.asarray(rng.uniform(-0.7, 0.7, leaf.shape).astype(leaf.dtype))

    return jax.tree.map(drawn, eqx.filter_eval_shape(network))
