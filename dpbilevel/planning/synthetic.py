"""Synthetic data for dry runs, and the populations that it is drawn from."""

import abc
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Key, PyTree
from typing_extensions import override

from ..core.levels import Levels, People, Sizes
from ..core.problem import AbstractProblem


@dataclasses.dataclass(frozen=True)
class SyntheticData:
    """Synthetic records for a run, and further ones for a test.

    Attributes:
        data: Records as for `solve`: `Levels`, or records of one level.
        test: Further records of the population that the model is for: of the upper
            level, or of the only one.
    """

    data: PyTree
    test: PyTree


class AbstractPopulation(eqx.Module):
    """A public distribution of records, for dry runs.

    A subclass has one method, `draw`. It must not follow records of people: a statistic
    of them would have to be released first.
    """

    @property
    def name(self) -> str:
        """Name in tables."""
        return type(self).__name__

    @abc.abstractmethod
    def draw(
        self, problem: AbstractProblem, w0: PyTree, sizes: Sizes | int, key: Key
    ) -> SyntheticData:
        """Draw records of these sizes.

        Args:
            problem: The problem.
            w0: The initial point.
            sizes: The planned sizes.
            key: A typed key; it protects nothing.
        """


class FunctionPopulation(AbstractPopulation):
    """Records that a function of the user draws, test records in the same call."""

    fun: Callable[[Key, Any], PyTree] = eqx.field(static=True)

    @property
    @override
    def name(self) -> str:
        return "synthetic"

    @override
    def draw(self, problem, w0, sizes, key):
        draw, order = jax.random.split(key)
        request = _with_tests(sizes)
        try:
            data = jax.tree.map(jnp.asarray, self.fun(draw, request))
            problem.check(w0, data)
            people = () if isinstance(sizes, int) else (sizes.people,)
            returned = problem.sizes_of(data, *people)
        except Exception as error:
            raise ValueError(
                f"auto: synthetic, a function of a key and sizes, was called with "
                f"{request} and failed or returned what the problem cannot read. "
                f"{type(error).__name__}: {error}"
            ) from error
        if returned != request:
            raise ValueError(
                f"auto: synthetic was called with {request}, test records included, "
                f"and returned {returned}. Draw as many as its second argument says."
            )
        upper = data.upper if isinstance(data, Levels) else data
        size = sizes.upper if isinstance(sizes, Sizes) else sizes
        rows = jax.random.permutation(order, 2 * size)  # they may be sorted
        upper, test = (
            jax.tree.map(operator.itemgetter(part), upper)
            for part in (rows[:size], rows[size:])
        )
        if isinstance(data, Levels):
            shared = data.is_shared
            upper = Levels.shared(upper) if shared else Levels(upper, data.lower)
        return SyntheticData(upper, test)


def _with_tests(sizes: Sizes | int) -> Sizes | int:
    """Return sizes with twice the records of the level that a model is tested on."""
    if isinstance(sizes, int):
        return 2 * sizes
    lower = sizes.lower * (2 if sizes.people is People.SHARED else 1)
    return Sizes(2 * sizes.upper, lower, sizes.people)
