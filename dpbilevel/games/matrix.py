"""Matrix games: mixtures of plans against mixtures of scenarios."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import _checks
from ..sets import Simplex
from .problem import SaddleProblem, Scalar


def matrix_game(rows: int, columns: int) -> SaddleProblem:
    r"""Return the game of mixed strategies for the mean of payoff matrices.

    $$\min_{x \in \Delta_m} \max_{y \in \Delta_k} \frac1n \sum_i x^\top A_i y.$$

    For instance $m$ plans, $k$ scenarios and the cost to each person of each plan in
    each scenario: the answer is the mixture of plans whose mean cost is least in the
    worst scenario. Entries are cut to $[-1, 1]$ and those that are not finite read as
    0, so that $\|A_i y\| \le \sqrt m$, $\|A_i^\top x\| \le \sqrt k$ and $\|A_i\| \le
    \sqrt{m k}$: hence $M = \sqrt{m + k}$ and $L = \sqrt{m k}$, both attained by a
    matrix of ones.

    Args:
        rows: $m$.
        columns: $k$.

    Returns:
        A problem over records `A`, of shape `(m, k)`, with all constants declared.

    Raises:
        ValueError: A number of rows or columns below 1.

    Privacy:
        The bounds are enforced by the cut, for every possible record. Where $m k$ is
        small against the number of records, one release of the noisy mean matrix,
        solved exactly, can be more accurate.

    References:
        Boob and Guzman, 2024, Section 2.
    """
    _checks.count("matrix_game", rows=rows, columns=columns)

    def payoff(
        x: Float[Array, " m"], y: Float[Array, " k"], record: Float[Array, "m k"]
    ) -> Scalar:
        if (jnp.shape(x), jnp.shape(y)) != ((rows,), (columns,)):
            raise ValueError(
                f"matrix_game: x must have shape ({rows},) and y shape ({columns},), "
                f"got {jnp.shape(x)} and {jnp.shape(y)}. Start from uniform mixtures."
            )
        if jnp.shape(record) != (rows, columns):
            raise ValueError(
                f"matrix_game: every record must be a matrix of shape ({rows}, "
                f"{columns}), got {jnp.shape(record)}."
            )
        matrix = jnp.clip(record, -1, 1).astype(x.dtype)
        matrix = jnp.where(jnp.isfinite(record), matrix, jnp.zeros_like(matrix))
        return x @ (matrix @ y)

    return SaddleProblem(
        payoff,
        x_set=Simplex(),
        y_set=Simplex(),
        lipschitz=math.sqrt(rows * columns),
        bound=math.sqrt(rows + columns),
    )
