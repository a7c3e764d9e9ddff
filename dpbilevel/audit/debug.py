"""NON-PRIVATE views of a problem, for developers only.

Nothing here is released, counted or noisy. Do not publish what these functions return
on sensitive records.
"""

from collections.abc import Callable

import jax
import jax.flatten_util
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from ..bilevel.problem import BilevelProblem, Levels
from ..games.groups import read_group
from ..games.problem import AbstractVariationalInequality
from ..oracles import objectives
from .refutation import ConstantsSearch, as_float64, lower_solution, refute_constants

__all__ = [
    "ConstantsSearch",
    "group_losses",
    "hyper_objective",
    "lower_objective",
    "lower_solution",
    "operator_norms",
    "refute_constants",
    "upper_objective",
]


def upper_objective(
    problem: BilevelProblem, x: PyTree, y: PyTree, data: Levels
) -> jax.Array:
    r"""Return $f(x, y)$, the mean upper loss plus its public term. NON-PRIVATE.

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
    r"""Return $g(x, y)$, the mean lower loss plus its public term. NON-PRIVATE.

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
    r"""Return $F(x) = f(x, y^*(x))$ in float64. NON-PRIVATE.

    Args:
        problem: The problem.
        x: The upper variable.
        y0: An initial point for the lower solution.
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
    """Return the mean loss of the records of each group. NON-PRIVATE.

    Args:
        loss: The loss of one record, as `loss(x, record)`.
        x: The model.
        data: The records.
        num_groups: The number of groups.
        group: A function that returns the group of a record.

    Returns:
        One mean per group; NaN for a group without records.
    """
    losses, index = jax.vmap(lambda record: (loss(x, record), group(record)))(data)
    member = (index[:, None] == jnp.arange(num_groups)[None]).astype(losses.dtype)
    # Accelerators multiply matrices in reduced precision otherwise.
    return jnp.matmul(losses, member, precision="highest") / jnp.sum(member, 0)


def operator_norms(
    problem: AbstractVariationalInequality, w: PyTree, data: PyTree
) -> jax.Array:
    """Return the norm of every record's operator before clipping. NON-PRIVATE.

    If most records of a group exceed the clip norm, clipping undoes the weights of the
    group.

    Args:
        problem: A `SaddleProblem` or a `VariationalInequality`.
        w: The point at which the operators are computed.
        data: The records.

    Returns:
        One norm per record.
    """
    return jax.vmap(lambda z: optax.tree.norm(problem.record_operator(w, z)))(data)
