"""Output rules: which of the released iterates is the answer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from ..privacy.noise import PRNGKey


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


def uniform_iterate(
    chosen: PyTree, value: PyTree, t: Int[Array, ""], *, key: PRNGKey
) -> PyTree:
    r"""One of the iterates, each with the same chance, without keeping them all.

    Args:
        chosen: The choice among the first $t$ iterates.
        value: Iterate $t + 1$, which takes its place with probability $1 / (t + 1)$.
        t: How many iterates there were; public.
        key: A typed key of its own: the choice is independent of all noise.

    Privacy:
        Post-processing of released iterates by a coin that reads no data: free.

    References:
        Vitter, "Random sampling with a reservoir", 1985, Algorithm R with one place.
    """
    replaces = jax.random.randint(key, (), 0, t + 1) == 0
    return jax.tree.map(lambda a, b: jnp.where(replaces, a, b), value, chosen)
