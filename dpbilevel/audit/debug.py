"""NON-PRIVATE views of a problem, for developers only.

Nothing here is released, counted or noisy. Do not publish what these functions return
on sensitive records.
"""

from collections.abc import Callable

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from ..bilevel.problem import BilevelProblem, Levels
from ..games.groups import read_group
from ..games.problem import AbstractVariationalInequality
from ..oracles import objectives
from ..privacy.noise import PRNGKey, check_key
from ..search.base import BlackBox
from ..search.candidates import box_of, start_of, uniform
from .exact import as_float64, lower_solution
from .refutation import ConstantsSearch, refute_constants

__all__ = [
    "ConstantsSearch",
    "group_losses",
    "hyper_objective",
    "lower_objective",
    "lower_solution",
    "operator_norms",
    "random_search",
    "refute_constants",
    "upper_objective",
]


def upper_objective(
    problem: BilevelProblem, x: PyTree, y: PyTree, data: Levels
) -> jax.Array:
    r"""NON-PRIVATE. $f(x, y)$: the mean upper loss plus its public term.

    Args:
        problem: The problem.
        x: The upper variable.
        y: The lower variable.
        data: The records.
    """
    return objectives.upper_objective(problem, data).value(x, y)


def lower_objective(
    problem: BilevelProblem, x: PyTree, y: PyTree, data: Levels
) -> jax.Array:
    r"""NON-PRIVATE. $g(x, y)$: the mean lower loss plus its public term.

    Args:
        problem: The problem.
        x: The upper variable.
        y: The lower variable.
        data: The records.
    """
    return objectives.lower_objective(problem, data).value(x, y)


def hyper_objective(
    problem: BilevelProblem, x: PyTree, y0: PyTree, data: Levels
) -> float:
    r"""NON-PRIVATE. $F(x) = f(x, y^*(x))$ in float64.

    Args:
        problem: The problem.
        x: The upper variable.
        y0: A starting point for the lower solution.
        data: The records.
    """
    with jax.enable_x64(True):
        y = lower_solution(problem, x, y0, data)
        x, data = as_float64(x), as_float64(data)
        return float(upper_objective(problem, x, y, data))


def group_losses(
    loss: Callable[[PyTree, PyTree], jax.Array],
    x: PyTree,
    data: PyTree,
    num_groups: int,
    *,
    group: Callable[[PyTree], jax.Array] = read_group,
) -> jax.Array:
    """NON-PRIVATE. The mean loss of the records of each group.

    Args:
        loss: The loss of one record, as `loss(x, record)`.
        x: The model.
        data: The records.
        num_groups: The number of groups.
        group: Reads a record's group.

    Returns:
        One mean per group; NaN for a group without records.
    """
    losses, index = jax.vmap(lambda record: (loss(x, record), group(record)))(data)
    member = (index[:, None] == jnp.arange(num_groups)[None]).astype(losses.dtype)
    # Accelerators multiply matrices in reduced precision otherwise.
    return jnp.matmul(losses, member, precision="highest") / jnp.sum(member, 0)


def random_search(
    problem: BlackBox, w0: np.ndarray, num_candidates: int, *, key: PRNGKey
) -> tuple[np.ndarray, float]:
    """NON-PRIVATE. The uniform random point with the least mean loss, and that loss.

    Choosing any setting of a private run by it voids that run's guarantee.

    Args:
        problem: The black box.
        w0: A point of the box, for its shape.
        num_candidates: How many points are evaluated.
        key: A typed key.
    """
    check_key(key)
    if problem.losses is None:
        raise TypeError(
            "random_search: the black box has losses=None; give a function of the "
            "point."
        )
    with jax.enable_x64(True):
        box = box_of("random_search", problem)
        like = start_of("random_search", problem, np.asarray(w0, np.float64))
        points = np.asarray(uniform(box, like, num_candidates, key=key))
    # A copy: the losses are the user's Python, which may change its argument.
    means = [np.mean(problem.losses(point.copy())) for point in points]
    best = int(np.nanargmin(means))
    return points[best], float(means[best])


def operator_norms(
    problem: AbstractVariationalInequality, w: PyTree, data: PyTree
) -> jax.Array:
    """NON-PRIVATE. How long the operator of every record is, before clipping.

    Where most records of a group are longer than the clip norm, clipping undoes what
    weighs them.

    Args:
        problem: A `SaddleProblem` or a `VariationalInequality`.
        w: Where to look.
        data: The records.

    Returns:
        One norm per record.
    """

    def length(record):
        return optax.tree.norm(problem.record_operator(w, record))

    return jax.vmap(length)(data)
