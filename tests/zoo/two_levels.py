"""Problems of two levels with answers in closed form."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from dpbilevel.bilevel.certificates.constants import (
    Constants,
    SecondOrderConstants,
    terms_of,
)
from dpbilevel.bilevel.problem import BilevelProblem, Levels
from dpbilevel.onelevel.losses import shortened
from dpbilevel.sets import Ball, Euclidean

__all__ = ["Example", "hard_instance", "leak", "quadratic_bilevel"]

Vector = Float[Array, " d"]


@dataclasses.dataclass(frozen=True)
class Example:
    r"""A problem, its data and its exact answers. NON-PRIVATE: all read the data.

    Attributes:
        problem: The problem.
        data: The records.
        w0: A starting point `(x, y)`.
        lower_solution: $y^*(x)$.
        penalized_solution: $(x, \lambda) \mapsto \arg\min_y f(x, y) + \lambda g(x,
            y)$.
        hyper_objective: $F(x) = f(x, y^*(x))$.
        hypergradient: $\nabla F(x)$.
    """

    problem: BilevelProblem
    data: Levels
    w0: tuple[PyTree, PyTree]
    lower_solution: Callable[[Vector], Vector]
    penalized_solution: Callable[[Vector, float], Vector]
    hyper_objective: Callable[[Vector], Float[Array, ""]]
    hypergradient: Callable[[Vector], Vector]


def quadratic_bilevel(
    targets: Float[Array, "n d"],
    centers: Float[Array, "m d"],
    *,
    radius: float | None = None,
):
    r"""Return an `Example` of quadratic losses, with all its solutions.

    The losses are $f = \frac12 \|y - a\|^2$ and $g = \frac12 \|y - B x - b\|^2 +
    \frac14 \|y\|^2$. $B$ is twice the identity; $a$ are upper records and $b$ lower
    ones. With means $\bar a$ and $\bar b$: $y^*(x) = \frac23 (2 x + \bar b)$, and $F$
    is minimal where $y^*(x) = \bar a$. Both records and public terms take part in the
    lower level.

    Args:
        targets: $a$, one row per upper record.
        centers: $b$, one row per lower record.
        radius: $R$: records are shortened to this norm inside the losses and $x$ is
            kept within it, so that the problem has a certificate. Its sensitivities
            $\frac43 \cdot 2 R / n_f$ and $\frac43 \cdot 2 R / (\frac32 n_g)$ are exact.

    Returns:
        An `Example` with $d_x = d_y = d$.
    """

    def read(record):
        return record if radius is None else shortened(record, radius)

    @jax.jit  # one program, not one for each operation
    def facts(targets, centers):
        targets, centers = jax.vmap(read)(targets), jax.vmap(read)(centers)
        a_bar, b_bar = jnp.mean(targets, 0), jnp.mean(centers, 0)
        spread = 0.5 * jnp.mean(jnp.sum((targets - a_bar[None]) ** 2, 1))  # free of x
        return targets, centers, a_bar, b_bar, spread

    targets, centers, a_bar, b_bar, spread = facts(targets, centers)
    gain = 2.0 / 1.5  # the derivative of y* in x

    def upper(_, y, record):
        return 0.5 * jnp.sum((y - read(record)) ** 2)

    def lower(x, y, record):
        return 0.5 * jnp.sum((y - 2 * x - read(record)) ** 2)

    def lower_public(_, y):
        return 0.25 * jnp.sum(y**2)

    def lower_solution(x):
        return (2 * x + b_bar) / 1.5

    zero = jnp.zeros_like(a_bar)
    problem = BilevelProblem(
        upper,
        lower,
        lower_public=lower_public,
        x_set=Euclidean() if radius is None else Ball(radius),
        x_in_records=("lower",),
    )
    if radius is not None:
        constants = _quadratic_constants(radius, terms_of(problem))
        problem = dataclasses.replace(problem, constants=constants)
    return Example(
        problem,
        Levels(targets, centers),
        (zero, zero),
        lower_solution,
        lambda x, penalty: (a_bar + penalty * (2 * x + b_bar)) / (1 + 1.5 * penalty),
        lambda x: 0.5 * jnp.sum((lower_solution(x) - a_bar) ** 2) + spread,
        lambda x: gain * (lower_solution(x) - a_bar),
    )


def _quadratic_constants(radius: float, terms: tuple) -> SecondOrderConstants:
    """Return `quadratic_bilevel`'s constants: its Hessians read no record."""
    zeros = ["upper_x", "upper_xx", "upper_xy", "lower_xy_spread", "lower_yy_spread"]
    zeros += ["lower_xy_in_x", "lower_yy_in_x", "lower_xy_in_y", "lower_yy_in_y"]
    return SecondOrderConstants(
        strong_convexity=1.5,
        solution_radius=2 * radius,
        upper_y=3 * radius,
        upper_y_spread=radius,
        upper_yy=1.0,
        lower_y=5 * radius,
        lower_y_spread=radius,
        lower_xy=2.0,
        lower_yy=1.5,
        per_record=True,
        terms=terms,
        **dict.fromkeys(zeros, 0.0),
    )


def _nothing(_x, _y, record):
    """Return the loss of a level without data: zero for its rows of zeros."""
    return 0.0 * record


def leak(records: Float[Array, "n d"]):
    r"""Return an `Example` in which a hypergradient leaks a mean of lower records.

    This happens even though the upper level has no data:
    $f(x, y) = \frac12 \|x + y\|^2$ is public, $g = \frac12 \|y - z\|^2$ has the
    records. Then $y^* = \bar z$ and $\nabla F(0) = \bar z$: one exact hypergradient
    publishes the mean of the data.

    Args:
        records: $z$, one row per lower record.

    Returns:
        An `Example`. Its upper level reads no record; `data.upper` holds one row of
        zeros because every level has records.

    References:
        Kornowski, "Differentially private bilevel optimization", Example 1.
    """
    z_bar = jnp.mean(records, 0)

    def lower(_, y, record):
        return 0.5 * jnp.sum((y - record) ** 2)

    def upper_public(x, y):
        return 0.5 * jnp.sum((x + y) ** 2)

    zero = jnp.zeros_like(z_bar)
    problem = BilevelProblem(
        _nothing, lower, upper_public=upper_public, x_in_records=False
    )
    return Example(
        problem,
        Levels(jnp.zeros(1, records.dtype), records),
        (zero, zero),
        lambda x: z_bar,
        lambda x, penalty: (penalty * z_bar - x) / (1 + penalty),
        lambda x: 0.5 * jnp.sum((x + z_bar) ** 2),
        lambda x: x + z_bar,
    )


def hard_instance(
    records: Float[Array, "n d"],
    *,
    dimension_x: int | None = None,
    x_diameter: float = 2.0,
    y_diameter: float = 2.0,
    upper_lipschitz: float = 1.0,
    strong_convexity: float = 1.0,
):
    r"""Return the `Example` behind the lower bounds of private bilevel optimization.

    $f = -L \langle y, z \rangle$ and $g = \frac{\mu}{2} \|y - \zeta E x\|^2$ with
    $\zeta = D_y / D_x$ on balls of diameters $D_x$ and $D_y$, where $E$ keeps the first
    $d = \min(d_x, d_y)$ coordinates and fills up with zeros, so $F(x) = -L \zeta
    \langle E x, \bar z \rangle$ with minimizer $\frac{D_x}{2} E^T \bar z / \|E^T \bar
    z\|$. No algorithm beats an excess of order $L D_y \min(1, d / (n \varepsilon))$
    under pure privacy, and $L D_y \min(1, \sqrt{d \log(1/\delta)} / (n \varepsilon))$
    under $(\varepsilon, \delta)$, for all means $\bar z$.

    Args:
        records: $z$, one row per upper record; the bound takes entries $\pm 1 / \sqrt
            d$ in the first $d$ coordinates and zeros after them.
        dimension_x: $d_x$; by default $d_y$, the length of a record.
        x_diameter: $D_x$.
        y_diameter: $D_y$.
        upper_lipschitz: $L$.
        strong_convexity: $\mu$.

    Returns:
        An `Example`. Its lower level reads no record; `data.lower` holds zeros.

    References:
        Lowy and Liu, "Differentially private bilevel optimization: efficient
        algorithms with near-optimal rates", Theorem 3.10.
    """
    zeta, scale, mu = y_diameter / x_diameter, upper_lipschitz, strong_convexity
    z_bar = jnp.mean(records, 0)
    dimension_y = len(z_bar)
    dimension_x = dimension_y if dimension_x is None else dimension_x

    def lower_solution(x):
        return zeta * _resized(x, dimension_y)

    def upper(_, y, record):
        return -scale * (y @ record)

    def lower_public(x, y):
        return 0.5 * mu * jnp.sum((y - lower_solution(x)) ** 2)

    problem = BilevelProblem(
        upper,
        _nothing,
        lower_public=lower_public,
        x_set=Ball(x_diameter / 2),
        y_set=Ball(y_diameter / 2),
        x_in_records=False,
        constants=Constants(
            strong_convexity=mu,
            upper_lipschitz=scale,
            upper_smoothness=0.0,
            lower_lipschitz=mu * y_diameter,  # y and zeta x are in one ball
            lower_smoothness=mu * max(1.0, zeta) ** 2 * 2,  # at least mu (1 + zeta^2)
            lower_hessian_lipschitz=0.0,
        ),
    )
    ball, slope = problem.y_set, -scale * zeta * _resized(z_bar, dimension_x)
    return Example(
        problem,
        Levels(records, jnp.zeros(len(records), records.dtype)),
        (jnp.zeros_like(slope), jnp.zeros_like(z_bar)),
        lower_solution,
        lambda x, penalty: ball.project(
            lower_solution(x) + scale * z_bar / (mu * penalty)
        ),
        lambda x: x @ slope,
        lambda x: slope,
    )


def _resized(vector: Vector, length: int) -> Vector:
    """Return a vector of `length` entries: cut, or filled up with zeros."""
    return jnp.pad(vector[:length], (0, max(length - len(vector), 0)))
