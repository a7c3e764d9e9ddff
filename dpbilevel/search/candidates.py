"""Candidate points of a box, shared by the solvers that see losses only."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..privacy.noise import PRNGKey
from ..sets import Box
from .base import SearchProblem

LOSS = "mean loss"


def box_of(owner: str, problem: SearchProblem) -> Box:
    """Return the box of a problem.

    Raises:
        ValueError: The set is no box, or has an end at infinity.
    """
    box = problem.w_set
    if not isinstance(box, Box) or not _is_finite(box):
        raise ValueError(
            f"{owner}: draws candidates from a box with finite ends, got w_set={box}; "
            "give the problem w_set=dpbilevel.sets.Box(lower, upper)."
        )
    return box


def start_of(owner: str, problem: SearchProblem, w0: PyTree) -> Float[Array, " d"]:
    """Return the initial point, projected onto the box of the problem.

    Raises:
        ValueError: The initial point is not one vector.
    """
    if getattr(w0, "ndim", None) != 1:
        raise ValueError(
            f"{owner}: w0 must be one vector with all coordinates, got "
            f"{jax.tree.map(jnp.shape, w0)}; ravel it with "
            "jax.flatten_util.ravel_pytree."
        )
    return box_of(owner, problem).project(jnp.asarray(w0))


def starts_of(
    owner: str, starts: Any, box: Box, like: Float[Array, " d"]
) -> Float[Array, "k d"]:
    """Return a solver's `starts`, projected onto the box; no points for `None`.

    Raises:
        ValueError: Their shape is not `(k, d)`.
    """
    if starts is None:
        return like[None, :][:0]
    if np.ndim(starts) != 2 or np.shape(starts)[1] != like.size:
        raise ValueError(
            f"{owner}: starts must have shape (k, {like.size}), one point a row, got "
            f"{np.shape(starts)}."
        )
    return jax.vmap(box.project)(jnp.asarray(starts, like.dtype))


def check_starts(owner: str, starts: Any, **most: int) -> None:
    """Check that there are no more starts than evaluations.

    Raises:
        ValueError: There are more; `most` names the field that limits them.
    """
    number = 0 if starts is None else len(starts)
    for name, limit in most.items():
        if number > limit:
            raise ValueError(
                f"{owner}: {name}={limit} are too few for {number} starts; give "
                f"{name}={number} or more."
            )


def uniform(
    box: Box, like: Float[Array, " d"], count: int, *, key: PRNGKey
) -> Float[Array, "count d"]:
    """Sample points uniformly from a box, without reading records.

    Args:
        box: The box.
        like: A point of the shape and dtype of the samples.
        count: Number of points.
        key: A typed key for this draw alone.
    """
    lower, upper = ends(box, like)
    unit = jax.random.uniform(key, (count, *like.shape), like.dtype)
    return lower[None] + unit * (upper - lower)[None]


def ends(
    box: Box, like: Float[Array, " d"]
) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
    """Return two opposite corners of a box, in the shape and dtype of `like`."""
    largest = jnp.full_like(like, jnp.finfo(like.dtype).max)
    return box.project(-largest), box.project(largest)


def _is_finite(box: Box) -> bool:
    leaves = [v for v in jax.tree.leaves((box.lower, box.upper)) if _checks.concrete(v)]
    return all(math.isfinite(np.max(np.abs(np.asarray(v)))) for v in leaves)
