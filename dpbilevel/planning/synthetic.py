"""Synthetic records from a function of the user."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Key, PyTree
from typing_extensions import override

from ..core.levels import Levels, People, Sizes
from ..core.problem import AbstractOneLevel, AbstractProblem
from .teachers import AbstractTwin, Twin

_OF_TWO_LEVELS = """
def synthetic(key, sizes):  # from public knowledge
    keys = jax.random.split(key, 3)
    truth = jax.random.normal(keys[0], (10,))  # the same one for both levels
    # rows(key, n, truth) draws n records: a field for each of your records.
    upper = rows(keys[1], sizes.upper, truth)
    return dpb.Levels(upper, rows(keys[2], sizes.lower, truth))
"""
_OF_ONE_LEVEL = """
def synthetic(key, sizes):  # from public knowledge: a field for each of your records
    keys = jax.random.split(key)
    features = jax.random.normal(keys[0], (sizes, 10))
    truth = jax.random.normal(keys[1], (10,))
    return {"features": features, "label": jnp.sign(features @ truth)}
"""


def example_for(problem: AbstractProblem) -> str:
    """Return the text of a function for `synthetic=`, as an error message shows it."""
    one = isinstance(problem, AbstractOneLevel)
    return _OF_ONE_LEVEL if one else _OF_TWO_LEVELS


class Synthetic(AbstractTwin):
    """Records that a function of the user draws, test records in the same call."""

    fun: Callable[[Key, Any], PyTree] = eqx.field(static=True)

    @property
    @override
    def name(self) -> str:
        return "synthetic"

    @override
    def draw(self, problem, w0, sizes, key) -> Twin:
        drawn, order = jax.random.split(key)
        asked = _with_tests(sizes)
        people = () if isinstance(sizes, int) else (sizes.people,)
        self._check_signature()
        try:
            data = jax.tree.map(jnp.asarray, self.fun(drawn, asked))
            problem.check(w0, data)
            found = problem.sizes_of(data, *people)
        except Exception as error:
            raise ValueError(
                f"auto: synthetic, asked for {asked} records, failed or returned what "
                f"the problem cannot read. {type(error).__name__}: {error}"
            ) from error
        if found != asked:
            raise ValueError(
                f"auto: synthetic was asked for {asked} records, test records among "
                f"them, and returned {found}. Draw as many as its second argument says."
            )
        upper = data.upper if isinstance(data, Levels) else data
        size = sizes.upper if isinstance(sizes, Sizes) else sizes
        rows = jax.random.permutation(order, 2 * size)  # they may be sorted
        upper, test = (
            jax.tree.map(lambda v, kept=kept: v[kept], upper)
            for kept in (rows[:size], rows[size:])
        )
        if not isinstance(data, Levels):
            return Twin(upper, test)
        shared = data.is_shared
        return Twin(Levels.shared(upper) if shared else Levels(upper, data.lower), test)

    def _check_signature(self) -> None:
        """Check that the function can be called with a key and sizes."""
        try:
            inspect.signature(self.fun).bind(None, None)
        except TypeError as error:
            raise TypeError(
                "auto: synthetic must take two arguments, a typed key and the sizes, "
                f"got a function of other ones ({error})."
            ) from None
        except ValueError:  # some built-in functions have no known signature
            return


def _with_tests(sizes: Sizes | int) -> Sizes | int:
    """Return sizes with twice the records of the level that a model is tested on."""
    if isinstance(sizes, int):
        return 2 * sizes
    lower = sizes.lower * (2 if sizes.people is People.SHARED else 1)
    return Sizes(2 * sizes.upper, lower, sizes.people)
