"""Penalties of groups of coefficients: problems of two levels, their initial points."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..bilevel.problem import BilevelProblem
from ..sets import Box

ModelLoss = Callable[[PyTree, PyTree], Float[Array, ""]]


class PenaltyTuning(BilevelProblem):
    """Problem of `penalty_tuning`, with its groups.

    Attributes:
        groups: The group of each coefficient.
        num_groups: The number of groups.
    """

    groups: PyTree = eqx.field(kw_only=True)
    num_groups: int = eqx.field(static=True, kw_only=True)


def penalty_start(problem: PenaltyTuning, model: PyTree) -> tuple[PyTree, PyTree]:
    """Return `penalty_tuning`'s initial pair (x, y): the least log-penalties, `model`.

    Args:
        problem: The problem.
        model: The parameters that the model starts from, public.

    Returns:
        The pair $(x, y)$.
    """
    _checks.instance("penalty_start", PenaltyTuning, problem=problem)
    box = problem.x_set
    assert isinstance(box, Box)  # that of `penalty_tuning`
    return box.lower, model


def penalty_tuning(
    loss: ModelLoss, groups: PyTree, *, bounds: tuple[float, float] = (-8.0, 2.0)
) -> PenaltyTuning:
    r"""Return the problem of tuning one quadratic penalty per group of coefficients.

    $$
    \min_{x \in [l, u]^k} \frac{1}{n_f} \sum_i \ell(y^*(x), z_i), \qquad y^*(x) =
    \arg\min_y \frac{1}{n_g} \sum_i \ell(y, z'_i) + \frac12 \sum_j e^{x_{g(j)}} y_j^2.
    $$

    No record's loss reads $x$, so the outer step needs no noise and no budget.

    Args:
        loss: $\ell(y, z)$: the model's loss on one record.
        groups: $g$: a pytree like $y$ of integers in $[0, k)$; public.
        bounds: $(l, u)$, the box of the log-penalties. `penalty_start` is its lower
            end.

    Returns:
        A problem over `Levels(upper=validation, lower=training)` whose $x$ has one
        log-penalty per group.

    Raises:
        ValueError: Bounds are not finite or out of order, or groups are not integers of
            at least 0.

    References:
        Kornowski, "Differentially private bilevel optimization", Section 7 (one
        penalty, noise on the free outer step, and a wrong sign in the last display;
        see the documentation).
    """
    low, high = bounds
    if not (low < high and math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            f"penalty_tuning: bounds must be finite and increasing, got {bounds}."
        )
    if isinstance(groups, list | tuple) and not any(
        map(np.ndim, jax.tree.leaves(groups))
    ):
        # A list of numbers is an array, not a tree of single coefficients. Lists of
        # several lengths make an array of objects, which is refused.
        lengths = {np.size(g) for g in groups if isinstance(g, list | tuple)}
        groups = np.asarray(groups, object if len(lengths) > 1 else None)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(groups)]
    if not leaves or not all(
        leaf.size and np.issubdtype(leaf.dtype, np.integer) for leaf in leaves
    ):
        raise ValueError(
            "penalty_tuning: groups must hold the group of each coefficient, such as "
            f"numpy.repeat([0, 1, 2], 5), got {_checks.shown(groups)}."
        )
    least = min(int(leaf.min()) for leaf in leaves)
    if least < 0:
        raise ValueError(f"penalty_tuning: groups must be counted from 0, got {least}.")
    # One dtype, whether or not float64 is enabled.
    groups = jax.tree.map(lambda leaf: np.asarray(leaf, np.int32), groups)
    num_groups = 1 + max(int(leaf.max()) for leaf in leaves)  # k

    def record_loss(_, y, record):
        return loss(y, record)

    def lower_public(x, y):
        if jnp.shape(x) != (num_groups,):
            raise ValueError(
                f"penalty_tuning: x needs shape ({num_groups},), got {jnp.shape(x)}."
            )
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (groups, y)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"penalty_tuning: groups must have shapes {shapes[1]}, got {shapes[0]}."
            )
        terms = jax.tree.map(lambda g, v: jnp.sum(jnp.exp(x)[g] * v * v), groups, y)
        return 0.5 * optax.tree.sum(terms)

    return PenaltyTuning(
        record_loss,
        record_loss,
        lower_public=lower_public,
        x_set=Box(jnp.full(num_groups, low), jnp.full(num_groups, high)),
        x_in_records=False,
        groups=groups,
        num_groups=num_groups,
    )
