"""Output rules: which of the released iterates is the answer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree


class Best(eqx.Module):
    """The best released value so far.

    Attributes:
        value: The value.
        score: Its score; smaller is better.
    """

    value: PyTree
    score: Float[Array, ""]

    @classmethod
    def none(cls, like: PyTree) -> "Best":
        """Before the first step: any score is better."""
        return cls(like, jnp.asarray(jnp.inf))


def smallest_step(best: Best, value: PyTree, step: PyTree) -> Best:
    r"""Keeps the iterate after which the method moved least.

    Args:
        best: The best so far.
        value: The iterate $x_t$, with whatever belongs to it.
        step: $x_{t+1} - x_t$.

    Privacy:
        Post-processing of released iterates: free.

    References:
        Kornowski, "Differentially private bilevel optimization", Algorithm 1.
    """
    score = optax.tree.norm(step).astype(best.score.dtype)
    better = score < best.score
    pick = jax.tree.map(lambda a, b: jnp.where(better, a, b), value, best.value)
    return Best(pick, jnp.where(better, score, best.score))
