"""Synthetic records from a function of the user."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Key, PyTree
from typing_extensions import override

from ..core.levels import Levels
from ..core.problem import AbstractOneLevel, AbstractProblem
from .teachers import AbstractTwin, Twin

_OF_TWO_LEVELS = """
def synthetic(key, sizes):  # from public knowledge; rows(key, n) draws n records
    keys = jax.random.split(key)
    return dpb.Levels(rows(keys[0], sizes.upper), rows(keys[1], sizes.lower))
"""
_OF_ONE_LEVEL = """
def synthetic(key, sizes):  # from public knowledge: a field for each of your records
    features = jax.random.normal(key, (sizes, 10))
    return {"features": features, "label": jnp.sign(features[:, 0])}
"""


def example_for(problem: AbstractProblem) -> str:
    """Return the text of a function for `synthetic=`, as an error message shows it."""
    one = isinstance(problem, AbstractOneLevel)
    return _OF_ONE_LEVEL if one else _OF_TWO_LEVELS


class Synthetic(AbstractTwin):
    """Records that a function of the user draws."""

    fun: Callable[[Key, Any], PyTree] = eqx.field(static=True)

    @property
    @override
    def name(self) -> str:
        return "synthetic"

    @override
    def draw(self, problem, w0, sizes, key) -> Twin:
        data, more = (
            jax.tree.map(jnp.asarray, self.fun(k, sizes)) for k in jax.random.split(key)
        )
        problem.check(w0, data)
        people = () if isinstance(sizes, int) else (sizes.people,)
        found = problem.sizes_of(data, *people)
        if found != sizes:
            raise ValueError(
                f"auto: synthetic must return records of the planned {sizes}, got "
                f"{found}. Draw as many as its second argument says."
            )
        return Twin(data, more.upper if isinstance(more, Levels) else more)
