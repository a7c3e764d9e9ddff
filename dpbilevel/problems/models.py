"""Ready-made per-record losses: linear models on one record."""

import jax.numpy as jnp
from jaxtyping import Array, Float

Record = dict[str, Float[Array, "..."]]


def logistic_loss(weights: Float[Array, " d"], record: Record) -> Float[Array, ""]:
    r"""$\log(1 + e^{-b \langle a, w \rangle})$ for features $a$ and label $b = \pm 1$.

    Args:
        weights: $w$.
        record: `{"features": a, "label": b}`; rows of norm at most 1 make every
            gradient at most 1 long.
    """
    return jnp.logaddexp(0.0, -record["label"] * (record["features"] @ weights))


def squared_loss(weights: Float[Array, " d"], record: Record) -> Float[Array, ""]:
    r"""$\frac12 (\langle a, w \rangle - b)^2$ for features $a$ and target $b$.

    Args:
        weights: $w$.
        record: `{"features": a, "label": b}`.
    """
    return 0.5 * (record["features"] @ weights - record["label"]) ** 2
