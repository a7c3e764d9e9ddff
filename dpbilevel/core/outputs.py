"""Output rules: which of the released iterates is the answer of a run."""

import abc
import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Checked, Fraction
from ..privacy.keys import PRNGKey

__all__ = [
    "AbstractOutput",
    "Last",
    "Mean",
    "SmallestStep",
    "TailMean",
    "UniformIterate",
]


class AbstractOutput(Checked):
    """The rule that makes an answer from the released iterates of a run.

    Attributes:
        needs_key: Whether `update` draws at random. Only solvers that derive a key for
            their output accept such a rule.

    Privacy:
        Post-processing of released iterates: free.
    """

    needs_key: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self, w: PyTree) -> PyTree:
        """Return the rule's memory before the first step; `w` is like an iterate."""

    @abc.abstractmethod
    def update(
        self,
        memory: PyTree,
        w: PyTree,
        *,
        before: PyTree,
        t: Int[Array, ""],
        num_steps: int,
        key: PRNGKey | None,
    ) -> PyTree:
        """Return the memory of the rule after step `t`, counted from 0.

        The step went from `before` to `w`. Rules that draw get a typed key.
        """

    def answer(self, memory: PyTree, last: PyTree) -> PyTree:
        """Return the answer of the run; by default the memory after the last step."""
        return memory


class Last(AbstractOutput):
    """Output rule: the last iterate."""

    @override
    def init(self, w):
        return None

    @override
    def update(self, memory, w, *, before, t, num_steps, key):
        return None

    @override
    def answer(self, memory, last):
        return last


class AbstractMean(AbstractOutput):
    """Output rule: an average of iterates."""

    def first(self, num_steps: int) -> int:
        """Return the number of the step at which the average begins, by default 0."""
        return 0

    @override
    def init(self, w):
        return optax.tree.zeros_like(w)

    @override
    def update(self, memory, w, *, before, t, num_steps, key):
        return running_mean(memory, w, jnp.maximum(t - self.first(num_steps), 0))


class Mean(AbstractMean):
    """Output rule: the average of all iterates, with less noise than one of them."""


class TailMean(AbstractMean):
    """Output rule: the average of the last iterates, which forgets the initial point.

    Args:
        fraction: The part of the run that is averaged, between 0 and 1; rounded to a
            number of steps, at least one. Static.
    """

    fraction: Fraction = eqx.field(static=True, default=0.5)

    @override
    def first(self, num_steps):
        return num_steps - max(1, math.floor(self.fraction * num_steps + 0.5))


class SmallestStep(AbstractOutput):
    r"""Output rule: the $w_t$ before the smallest step $\|w_{t+1} - w_t\|$.

    It needs steps that are accurate from the first one on. If inner solves are short
    and start at the same point, the first step is small although the gradient is not.

    References:
        Kornowski, "Differentially private bilevel optimization", Algorithm 1.
    """

    @override
    def init(self, w):
        return w, jnp.asarray(jnp.inf)  # any step is shorter

    @override
    def update(self, memory, w, *, before, t, num_steps, key):
        best, least = memory
        length = optax.tree.norm(optax.tree.sub(w, before)).astype(least.dtype)
        shorter = length < least  # of equal steps the first
        best = jax.tree.map(lambda a, b: jnp.where(shorter, a, b), before, best)
        return best, jnp.where(shorter, length, least)

    @override
    def answer(self, memory, last):
        return memory[0]


class UniformIterate(AbstractOutput):
    r"""Output rule: one of $w_0, \dots, w_{T-1}$, where steps start, at random.

    Each has the same probability. Bounds on the mean of $\|\nabla F(w_t)\|^2$ add up
    the progress of every step, so they are about the points where gradients are taken.

    Privacy:
        The choice is by coins that read no data: free.

    References:
        Vitter, "Random sampling with a reservoir", 1985, Algorithm R with one place.
    """

    needs_key: ClassVar[bool] = True

    @override
    def init(self, w):
        return w

    @override
    def update(self, memory, w, *, before, t, num_steps, key):
        assert key is not None
        # The point before step t replaces the choice with probability 1 / (t + 1).
        replaces = jax.random.randint(key, (), 0, t + 1) == 0
        return jax.tree.map(lambda a, b: jnp.where(replaces, a, b), before, memory)


def check_output(owner: str, output: AbstractOutput) -> None:
    """Raise `TypeError` or `ValueError` unless `output` is a rule that needs no key.

    Raises:
        TypeError: It is no output rule.
        ValueError: It draws at random, and `owner` derives no key for it.
    """
    _checks.instance(owner, AbstractOutput, output=output)
    if output.needs_key:
        raise ValueError(
            f"{owner}: output={type(output).__name__}() draws at random, for which "
            "this solver has no key. Use Last(), Mean(), TailMean() or SmallestStep()."
        )


def running_mean(mean: PyTree, value: PyTree, t: Int[Array, ""]) -> PyTree:
    """Return the mean of `t + 1` values, given the mean of the first `t`."""
    return jax.tree.map(lambda m, v: m + (v - m) / (t + 1).astype(m.dtype), mean, value)
