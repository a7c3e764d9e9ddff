"""The best of a random number of runs, which is all that is shown of them."""

from typing import Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int, PyTree

from ..privacy.accounting.repetitions import Repetitions
from ..privacy.exact.floats import double_precision
from ..privacy.noise import PRNGKey, standard_exponential

# A chance of needing more runs than are made that no budget would pay for.
_FAILURE = 1e-3


class BestRun(eqx.Module):
    """The best of the first $K$ of a fixed number of runs, hidden until the last one.

    Attributes:
        w: The start, until the last run; then what the best run found.
        value: Its noisy loss; zero, until the last run.
        best: SECRET, as all below: it reveals K.
        best_value: Its noisy loss.
        repeats: K.
        t: The number of runs made.
    """

    w: PyTree
    value: Float[Array, ""]
    best: PyTree
    best_value: Float[Array, ""]
    repeats: Int[Array, ""]
    t: Int[Array, ""]

    @classmethod
    def start(cls, w: PyTree, dtype: DTypeLike) -> Self:
        """Before the first run.

        Args:
            w: The answer where K is zero.
            dtype: Of the values.
        """
        infinite, zero = jnp.asarray(jnp.inf, dtype), jnp.zeros((), jnp.int32)
        return cls(w, jnp.zeros((), dtype), w, infinite, zero, zero)

    def after(
        self,
        w: PyTree,
        value: Float[Array, ""],
        law: Repetitions,
        num_runs: int,
        *,
        key: PRNGKey,
    ) -> Self:
        """With one more run.

        Args:
            w: What it found.
            value: Its noisy loss, released.
            law: The law of K.
            num_runs: The number of runs that are made.
            key: A typed key, from which K is drawn at the first run.
        """
        drawn = number_of_runs(law, num_runs, key=key)
        repeats = jnp.where(self.t == 0, drawn, self.repeats)
        better = (self.t < repeats) & (value < self.best_value)  # among the first K
        best = _chosen(better, w, self.best)
        best_value = jnp.where(better, value, self.best_value)
        # Where nothing was repeated there is no value to show.
        last = (self.t == num_runs - 1) & jnp.isfinite(best_value)
        shown = _chosen(last, best, self.w)
        shown_value = jnp.where(last, best_value, self.value)
        return type(self)(shown, shown_value, best, best_value, repeats, self.t + 1)


def _chosen(condition, first, second):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)


def number_of_runs(law: Repetitions, most: int, *, key: PRNGKey) -> Int[Array, ""]:
    """Draws K, at most `most`; the draw reads no data."""
    beyond = law.beyond(most - 1)
    with double_precision():
        drawn = standard_exponential((), jnp.float64, key=key)
        # K > k exactly where a uniform number is below P(K > k).
        limits = jnp.asarray(-np.log(np.maximum(beyond, 1e-300)), jnp.float64)
        return jnp.sum(drawn > limits, dtype=jnp.int32)


def check_enough(owner: str, law: Repetitions, num_steps: int) -> None:
    """Refuses a number of runs that K exceeds too often.

    Raises:
        ValueError: Its chance is above 1/1000; the message names a number that serves.
    """
    chance = law.beyond(num_steps)[-1]
    if chance > _FAILURE:
        beyond = law.beyond(num_steps + int(500 * law.mean))
        enough = int(np.argmax(beyond < 1e-9))
        raise ValueError(
            f"{owner}: more than num_steps={num_steps} repetitions "
            f"have probability {chance:.2g}, which delta has to pay for; with "
            f"mean={law.mean:.6g} and shape={law.shape:.6g} num_steps={enough} "
            "makes it less than 1e-9. Or lower the mean."
        )
