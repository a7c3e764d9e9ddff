"""Bilinear games: payoffs that are linear in the variable of either player."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Positive
from ..sets import AbstractSet, Simplex
from .problem import AbstractSaddleProblem, Scalar

# A, and b and c, of which a game may lack either or both.
Coefficients = tuple[Array, Array | None, Array | None]
Vector = Callable[[PyTree], Float[Array, " _"]]


class BilinearGame(AbstractSaddleProblem):
    r"""Game $\min_{x \in X} \max_{y \in Y}$ of payoffs that are linear in $x$ and $y$.

    $$\frac1n \sum_i \bigl(x^\top A_i y + b_i^\top x + c_i^\top y\bigr) + r(x, y).$$

    The mean of the records' coefficients determines the game, and `NoisyPayoff`
    releases that mean once. The solvers of `SaddleProblem` solve the game as well.

    Args:
        matrix: $A$ as a function of a record, of shape `(m, k)`. Static.
        x_term: $b$ as a function of a record, of shape `(m,)`. Static.
        y_term: $c$ as a function of a record, of shape `(k,)`. Static.
        public: $r(x, y)$, as in `SaddleProblem`. Static.
        x_set: $X$, of vectors of shape `(m,)`.
        y_set: $Y$, of vectors of shape `(k,)`.
        coefficient_bound: A declared constant: at least $(\|A_i\|_F^2 + \|b_i\|^2 +
            \|c_i\|^2)^{1/2}$ for every possible record. Static.
        lipschitz: $L$, as in `SaddleProblem`. Static.
        bound: $M$, as in `SaddleProblem`. Static.
        public_lipschitz: A Lipschitz constant of the public operator. Static.
        public_bound: A bound on its norm. Static.
        largest_gap: At least the gap of every point, for every dataset. Static.

    Privacy:
        As for `SaddleProblem`.
    """

    matrix: Callable[[PyTree], Float[Array, "m k"]] = eqx.field(static=True)
    x_term: Vector | None = eqx.field(static=True, default=None)
    y_term: Vector | None = eqx.field(static=True, default=None)
    public: Callable[..., Scalar] | None = eqx.field(static=True, default=None)
    x_set: AbstractSet = Simplex()
    y_set: AbstractSet = Simplex()
    coefficient_bound: Positive | None = eqx.field(
        static=True, default=None, kw_only=True
    )

    def coefficients(self, record: PyTree) -> Coefficients:
        """Return the coefficients of one record's payoff."""
        x_term, y_term = (
            None if term is None else term(record)
            for term in (self.x_term, self.y_term)
        )
        return self.matrix(record), x_term, y_term

    @override
    def fun(self, x, y, record) -> Scalar:
        return payoff(self.coefficients(record), x, y)


def payoff(coefficients: Coefficients, x: Array, y: Array) -> Scalar:
    r"""Return $x^\top A y + b^\top x + c^\top y$, in the dtype of $x$.

    Raises:
        ValueError: The shapes of coefficients and variables do not fit.
    """
    shapes = (*jnp.shape(x), *jnp.shape(y)), jnp.shape(x), jnp.shape(y)
    for value, shape in zip(coefficients, shapes, strict=True):
        if value is not None and jnp.shape(value) != shape:
            raise ValueError(
                f"BilinearGame: needs coefficients of shape {shape}, got "
                f"{jnp.shape(value)}."
            )
    matrix, b, c = jax.tree.map(lambda v: v.astype(x.dtype), coefficients)
    value = x @ (matrix @ y)
    value = value if b is None else value + b @ x
    return value if c is None else value + c @ y


def matrix_game(rows: int, columns: int, *, entropy: bool = False) -> BilinearGame:
    r"""Return the `BilinearGame` of mixed strategies for mean payoff matrices.

    $$\min_{x \in \Delta_m} \max_{y \in \Delta_k} \frac1n \sum_i x^\top A_i y.$$

    For instance $m$ plans, $k$ scenarios and the cost to each person of each plan in
    each scenario: the answer is the mixture of plans whose mean cost is least in the
    worst scenario. Entries are cut to $[-1, 1]$ and those that are not finite read as
    0, so that $\|A_i y\| \le \sqrt m$, $\|A_i^\top x\| \le \sqrt k$ and $\|A_i\| \le
    \|A_i\|_F \le \sqrt{m k}$: hence $M = \sqrt{m + k}$, and $\sqrt{m k}$ is both $L$
    and the bound on the coefficients. A matrix of ones attains all of them.

    Divide payoffs by a public bound first: in euros, say, most entries would be cut to
    1, and the game would be another one without a warning.

    Args:
        rows: $m$.
        columns: $k$.
        entropy: Whether `NoisyExtragradient` moves mixtures by mirror steps of the
            entropy, as in `Simplex`.

    Returns:
        A problem over records `A`, of shape `(m, k)`, with all constants declared.
        `NoisyPayoff()` solves it.

    Raises:
        ValueError: A number of rows or columns below 1.

    Privacy:
        The bounds are enforced by the cut, for every possible record.

    References:
        Boob and Guzman, 2024, Section 2.
    """
    _checks.count("matrix_game", rows=rows, columns=columns)

    def matrix(record: Float[Array, "m k"]) -> Float[Array, "m k"]:
        if (given := jnp.shape(record)) != (rows, columns):
            raise ValueError(
                f"matrix_game: needs records of shape {(rows, columns)}, got {given}."
            )
        value = jnp.clip(record, -1, 1)
        return jnp.where(jnp.isfinite(record), value, jnp.zeros_like(value))

    length = math.sqrt(rows * columns)
    constants = {"lipschitz": length, "bound": math.sqrt(rows + columns)}
    constants["largest_gap"] = 2.0
    sets: dict[str, Any] = dict.fromkeys(("x_set", "y_set"), Simplex(entropy=entropy))
    return BilinearGame(matrix, coefficient_bound=length, **constants, **sets)
