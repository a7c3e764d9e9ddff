"""Penalties of groups of coefficients: problems of two levels, their initial points."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..bilevel.problem import BilevelProblem
from ..core.proximal import as_groups, group_lasso, l1
from ..sets import Box

ModelLoss = Callable[[PyTree, PyTree], Float[Array, ""]]


class PenaltyTuning(BilevelProblem):
    """Problem of `penalty_tuning` with quadratic penalties, and its groups.

    Attributes:
        groups: The group of each coefficient.
        num_groups: The number of groups.
    """

    groups: PyTree = eqx.field(kw_only=True)
    num_groups: int = eqx.field(static=True, kw_only=True)


def penalty_start(problem: BilevelProblem, model: PyTree) -> tuple[PyTree, PyTree]:
    """Return `penalty_tuning`'s initial pair (x, y): the least penalties, `model`.

    Args:
        problem: The problem.
        model: The parameters that the model starts from, public.

    Returns:
        The pair $(x, y)$.
    """
    box: Any = getattr(problem, "x_set", None)
    _checks.instance("penalty_start", Box, x_set=box)
    return box.lower, model


def penalty_tuning(
    loss: ModelLoss,
    groups: PyTree,
    *,
    penalty: str | Callable[[Array], Array] = "l2",
    bounds: tuple[float, float] | None = None,
) -> BilevelProblem:
    r"""Return the problem of tuning one penalty per group of coefficients.

    At small budgets a small penalty that is fixed is better than a tuned one.

    $$
    \min_{x \in [l, u]^k} \frac{1}{n_f} \sum_i \ell(y^*(x), z_i), \qquad y^*(x) =
    \arg\min_y \frac{1}{n_g} \sum_i \ell(y, z'_i) + r(x, y),
    $$

    | `penalty` | $r(x, y)$ | $x$ |
    |---|---|---|
    | `"l2"` | $\frac12 \sum_j e^{x_{g(j)}} y_j^2$ | logarithms of penalties |
    | `"l1"` | $\sum_j x_{g(j)} \lvert y_j \rvert$, as of the lasso | penalties |
    | `"group_l1"` | $\sum_i x_i \lVert y_{g = i} \rVert_2$, group lasso | penalties |
    | a function $R$ | $\sum_j x_{g(j)} R(y_j)$ | penalties |

    No record's loss reads $x$, so the outer step needs no noise and no budget.

    Args:
        loss: $\ell(y, z)$: the model's loss on one record.
        groups: $g$: a pytree like $y$ of integers in $[0, k)$; public.
        penalty: `"l2"`, `"l1"`, `"group_l1"`, or a convex function $R$ with a gradient,
            which maps arrays entry by entry. `"l1"` and `"group_l1"` need a solver that
            makes proximal steps.
        bounds: $(l, u)$, the box of $x$; by default $(-8, 2)$ for logarithms and
            $(0, 1)$ for penalties. `penalty_start` is its lower end. Start there: at
            penalties that make every coefficient zero, the gradient in $x$ is zero.

    Returns:
        A problem over `Levels(upper=validation, lower=training)` whose $x$ has one
        entry per group; a `PenaltyTuning` for `"l2"`.

    Raises:
        ValueError: Bounds are not finite or out of order, or negative for penalties;
            groups are not integers of at least 0; or an unknown penalty.

    References:
        Kornowski, "Differentially private bilevel optimization", Section 7 (one
        penalty, noise on the free outer step, and a wrong sign in the last display;
        see the documentation).
    """
    if not callable(penalty):
        _checks.one_of("penalty_tuning", "penalty", penalty, ("l2", "l1", "group_l1"))
    is_log = penalty == "l2"
    bounds = ((-8.0, 2.0) if is_log else (0.0, 1.0)) if bounds is None else bounds
    low, high = bounds
    if not (low < high and math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            f"penalty_tuning: bounds must be finite and increasing, got {bounds}."
        )
    if not is_log:
        _checks.non_negative("penalty_tuning: of penalties", bounds=low)
    groups, num_groups = as_groups("penalty_tuning", groups)  # k

    def record_loss(_, y, record):
        return loss(y, record)

    def penalties(x):
        if jnp.shape(x) != (num_groups,):
            raise ValueError(
                f"penalty_tuning: x needs shape ({num_groups},), got {jnp.shape(x)}."
            )
        return jnp.exp(x) / 2 if is_log else x

    def of_entries(x):
        each = penalties(x)
        return jax.tree.map(lambda g: each[g], groups)

    def smooth(x, y):
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (groups, y)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"penalty_tuning: groups must have shapes {shapes[1]}, got {shapes[0]}."
            )
        function: Any = jnp.square if is_log else penalty
        values = jax.tree.map(function, y)
        return optax.tree.sum(optax.tree.mul(of_entries(x), values))

    proximal = {"l1": l1(of_entries), "group_l1": group_lasso(penalties, groups)}
    own: Any = {"groups": groups, "num_groups": num_groups} if is_log else {}
    return (PenaltyTuning if is_log else BilevelProblem)(
        record_loss,
        record_loss,
        lower_public=smooth if callable(penalty) else proximal.get(penalty, smooth),
        x_set=Box(jnp.full(num_groups, low), jnp.full(num_groups, high)),
        x_in_records=False,
        **own,
    )
