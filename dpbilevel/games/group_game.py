"""Games of a model against groups, as solvers see the model and the groups."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._checks import Positive, number
from .problem import SaddleProblem, Scalar

ReadGroup = Callable[[PyTree], Int[Array, ""]]


class GroupGame(SaddleProblem):
    r"""Game of a model $x$ against weights $s y$ of groups.

    Beside the payoff, which is all that solvers of other saddle points read, it has its
    parts.

    Args:
        loss: $\ell(x, z)$, the loss of the model on one record. Static.
        shares: $p$, the declared shares of the groups. Static.
        group: Reads the group of a record. Static.
        smoothness: $\beta$, declared: a Lipschitz constant of $\nabla_x \ell$ for every
            possible record. Static.
        loss_bound: $B$: losses from there on count as $B$ where losses are bounded.
            Static.
    """

    loss: Callable[[PyTree, PyTree], Scalar] = eqx.field(static=True, kw_only=True)
    shares: tuple[float, ...] = eqx.field(static=True, kw_only=True)
    group: ReadGroup = eqx.field(static=True, kw_only=True)
    smoothness: Positive | None = eqx.field(static=True, default=None, kw_only=True)
    loss_bound: Positive | None = eqx.field(static=True, default=None, kw_only=True)

    @property
    def scale(self) -> Any:
        """Scale $s$, the sum of the second variable."""
        y_set: Any = self.y_set
        return number(y_set.scale)

    def member(self, record: PyTree) -> tuple[Int[Array, ""], Bool[Array, ""]]:
        """Return the group of a record, and whether it is one of those listed."""
        return member(self.group, record, len(self.shares))


def member(
    group: ReadGroup, record: PyTree, count: int
) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """Return the group of a record, 0 if it is not listed, and whether it is listed.

    Raises:
        TypeError: The group is no integer.
    """
    value = group(record)
    dtype = jnp.result_type(value)
    if jnp.shape(value) != () or jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            "group game: the group of a record must be one integer from 0 on, got "
            f"{dtype}{list(jnp.shape(value))}."
        )
    index = jnp.asarray(value).astype(jnp.int32)  # a truth value is one of two groups
    known = (index >= 0) & (index < count)
    return jnp.where(known, index, 0), known


def entropic_step(
    y: Float[Array, " k"],
    gain: Float[Array, " k"],
    shares: Float[Array, " k"],
    price: Float[Array, ""],
) -> Float[Array, " k"]:
    r"""Make a step of mirror ascent by entropy, with a price on the largest ratio.

    $$\arg\max_{v \in \Delta}\ \langle g, v \rangle - \mathrm{KL}(v \,\|\, y) - c
    \max_j \frac{v_j^2}{q_j^2}, \qquad v_j \propto q_j \min(r_j, m), \quad r_j =
    \frac{y_j}{q_j} e^{g_j}.$$

    With a bound $\kappa$ on the ratios, the solution is $v_j = \min(\kappa q_j,
    \vartheta r_j q_j)$ with multipliers $\lambda_j = [\log(r_j / m)]_+$ for $m = \kappa
    / \vartheta$, and raising $\kappa$ gains $\sum_j q_j \lambda_j$. The best $m$ makes
    that equal to the marginal price $2 c \kappa$ with $\kappa = m / \sum_j q_j
    \min(r_j, m)$; one side decreases in $m$ and the other one increases, so that
    bisection finds it. Without a price this is multiplicative weights; with a large one
    $v = q$.

    Args:
        y: The weights, positive and of sum 1.
        gain: $g$, payoffs times the step size.
        shares: $q$, positive and of sum 1.
        price: $c \ge 0$.
    """
    ratio = jnp.log(jnp.maximum(y, _LEAST)) - jnp.log(shares) + gain
    ratio = ratio - jnp.max(ratio)  # log r: any common factor is normalized away

    def halved(_, ends):
        low, high = ends
        middle = (low + high) / 2
        worth = jnp.sum(shares * jnp.maximum(ratio - middle, 0))
        total = jnp.sum(shares * jnp.exp(jnp.minimum(ratio - middle, 0)))
        pays = worth > 2 * price / total  # to raise the bound
        return jnp.where(pays, middle, low), jnp.where(pays, high, middle)

    ends = jnp.min(ratio), jnp.zeros_like(ratio[0])
    _, bound = jax.lax.fori_loop(0, _HALVINGS, halved, ends)
    v = shares * jnp.exp(jnp.minimum(ratio, bound))
    return v / jnp.sum(v)


_LEAST = 1e-12  # of a weight, so that every group can come back
_HALVINGS = 40
