r"""Games of a model against groups: learning that is fair to them, or robust.

Constants of the group games. Let $p$ be the shares, $y$ here the variable, of sum $s$,
$c = \max_g 1 / p_g$, rows at most $R$ long and $x$ in a ball of radius $r$, so that
margins are at most $m = r R$; and on $|t| \le m$ let $|\varphi'| \le p_1$, $\varphi''
\le p_2$ and $\varphi \le \ell = \varphi_0 + m p_1$. One record of group $g$ has

$$\nabla_x = \frac{y_g}{s p_g} \varphi' a, \qquad
\nabla_{y_g} = \frac{1}{s p_g} \varphi, \qquad 0 \le y_g \le s,$$

hence $M = c \sqrt{p_1^2 R^2 + \ell^2 / s^2}$. Its derivative acts on the directions of
$a$ and of $y_g$ alone, as $c$ times at most $\begin{pmatrix} \alpha & \beta \\ -\beta
& 0 \end{pmatrix}$ with $\alpha = p_2 R^2$ and $\beta = p_1 R / s$, whose norm gives $L
= \frac{c}{2} (\alpha + \sqrt{\alpha^2 + 4 \beta^2})$.

In units of $s$ the bound on the gap is of the order of $M D$ with $M^2 = M_x^2 + M_y^2
/ s^2$ and $D^2 = D_x^2 + s^2 D_y^2$, which is least, $M_x D_x + M_y D_y$, for $s^2 =
M_y D_x / (M_x D_y)$.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from .. import _checks
from .._checks import Positive
from ..onelevel.losses import AbstractLinearModel, linear_loss
from ..onelevel.problem import check_start
from ..sets import AbstractSet, Ball, Euclidean, Simplex
from .problem import AbstractSaddleProblem, Scalar

ModelLoss = Callable[[PyTree, PyTree], Scalar]
ReadGroup = Callable[[PyTree], Int[Array, ""]]


class GroupGame(AbstractSaddleProblem):
    r"""Game of a model against groups, by a second variable of `scale` times weights.

    Args:
        loss: $\ell(x, z)$, the loss of the model on one record. Static.
        shares: $p$, the declared shares of the groups. Static.
        factors: $1 / (s p)$, the weights of losses per unit of the variable. Static.
        group: A function that reads the group of a record. Static.
        x_set: The set of models.
        y_set: The simplex of scale $s$.
        public: The public term of $(x, s y)$, with a mixture $y$ of groups. Static.
        lipschitz, bound, public_lipschitz, public_bound: As in `SaddleProblem`. Static.
        smoothness: $\beta$, declared: a Lipschitz constant of $\nabla_x \ell$ for every
            possible record. Static.
        loss_bound: $B$: a solver that bounds losses counts larger ones as $B$. Static.
    """

    loss: ModelLoss = eqx.field(static=True)
    shares: tuple[float, ...] = eqx.field(static=True)
    factors: tuple[float, ...] = eqx.field(static=True)
    group: ReadGroup = eqx.field(static=True)
    x_set: AbstractSet
    y_set: Simplex
    public: Callable[..., Scalar] | None = eqx.field(static=True, default=None)
    smoothness: Positive | None = eqx.field(static=True, default=None)
    loss_bound: Positive | None = eqx.field(static=True, default=None)

    @property
    def scale(self) -> Any:
        """Scale: the sum of the second variable's entries."""
        return _checks.number(self.y_set.scale)

    def fun(self, x: PyTree, y: Float[Array, " k"], record: PyTree) -> Scalar:
        """Return a record's weighted loss, 0 for other groups; `y` sums to `scale`."""
        if jnp.shape(y) != (len(self.shares),):
            k = len(self.shares)
            raise ValueError(
                f"group game: y must have shape ({k},), got {jnp.shape(y)}."
            )
        index, listed = self.member(record)
        weight = y[index] * jnp.asarray(self.factors, y.dtype)[index]
        weight = jnp.where(listed, weight, jnp.zeros_like(weight))
        return weight * self.loss(x, record)

    def member(self, record: PyTree) -> tuple[Int[Array, ""], Bool[Array, ""]]:
        """Return the group of a record, 0 if it is not listed, and whether it is.

        Raises:
            TypeError: The group is no integer.
        """
        group = self.group(record)
        dtype = jnp.result_type(group)
        if jnp.shape(group) != () or jnp.issubdtype(dtype, jnp.inexact):
            kind = f"{dtype}{list(jnp.shape(group))}"
            raise TypeError(f"group game: the group must be one integer, got {kind}.")
        index = jnp.asarray(group).astype(jnp.int32)  # a boolean is one of two groups
        listed = (index >= 0) & (index < len(self.shares))
        return jnp.where(listed, index, 0), listed


def read_group(record: PyTree) -> Int[Array, ""]:
    """Return the group of a record: its entry `"group"`."""
    if not isinstance(record, Mapping) or "group" not in record:
        raise ValueError("group game: records need an entry 'group', or give group=.")
    return record["group"]


def group_fair(
    loss: ModelLoss | AbstractLinearModel,
    shares: Sequence[float],
    *,
    radius: float | None = None,
    scale: float | None = None,
    ridge: float = 0.0,
    row_norm: float = 1.0,
    group: ReadGroup = read_group,
) -> GroupGame:
    r"""Return the game that minimizes the loss of the worst group.

    $$
    \min_{\|x\| \le r} \max_{y \in \Delta} \frac1n \sum_i \frac{y_{g_i}}{p_{g_i}}
    \ell(x, z_i) + \rho \|x\|^2 = \min_{\|x\| \le r} \max_g L_g(x) + \rho \|x\|^2,
    $$

    with $L_g$ the mean loss of group $g$ if $p_g$ is its fraction of the records, and
    otherwise that times the ratio of true to declared fraction. At $y = p$ the first
    player sees the mean loss of all records, which makes it a good start.

    The argument `y` of functions is $s y$, on the simplex of scale $s$: see
    `group_weights`. Clipping and noise are joint over $(x, s y)$, in whose units a
    record's part for $y$ is $\ell / (s p_g)$: a larger scale leaves more of the clip
    norm to the model and makes the weights slower, by $s^2$, and noisier, by $s$.

    Args:
        loss: $\ell(x, z)$, convex in $x$; or a linear model such as `Logistic()` for
            records `{"features": a, "label": b, "group": g}`, whose constants are
            derived: `bound`, `lipschitz` and those of the public term. Of a function
            nothing is known, and clipping needs nothing; if a method asks for
            constants, declare them by `dataclasses.replace(game, lipschitz=L,
            bound=M)`, for the operator over $(x, s y)$ and every possible record.
        shares: $p$, positive, of sum at most 1: the declared fraction of each group.
        radius: $r$, of the ball of models about the origin; unbounded when omitted,
            and required for a linear model.
        scale: $s > 0$; 1 for a function. For a linear model the one that balances the
            bound, $s^2 = \sqrt2 r \ell / (p_1 R)$ with $\ell$ the largest possible
            loss. With a clip norm far below `bound` see docs/games.md: too small a
            scale or clip norm counts records of small groups less.
        ridge: $\rho \ge 0$; public.
        row_norm: $R$ for a linear model: longer rows are shortened to it.
        group: Reads a record's group, an integer in $[0, k)$; a record of any other
            group has no influence.

    Returns:
        A problem over $(x, s y)$ with $y$ of length $k$.

    Raises:
        ValueError: A number out of range, shares that are not positive or sum to more
            than 1, a linear model without `radius` or whose loss has no bound.

    Privacy:
        The group of a record is part of the record. Shares, scale and ridge are public:
        the true shares are a statistic of the records, so dividing by them would be a
        release that is not in the ledger, and would make one record's term depend on
        the others. Declare them from a census or a sampling plan. Wrong ones only
        change the objective: what is enforced by clipping stays, and so do the
        constants.

    References:
        Mohri, Sivek and Suresh, "Agnostic federated learning", 2019; Sagawa et al.,
        "Distributionally robust neural networks for group shifts", 2020; as a private
        saddle point, Boob and Guzman, 2024, Section 2.1.
    """
    owner = "group_fair"
    return _game(owner, loss, shares, 0.0, radius, scale, ridge, row_norm, group)


def group_robust(
    loss: ModelLoss | AbstractLinearModel,
    shares: Sequence[float],
    strength: float,
    *,
    radius: float | None = None,
    scale: float | None = None,
    ridge: float = 0.0,
    row_norm: float = 1.0,
    group: ReadGroup = read_group,
) -> GroupGame:
    r"""Return the game of the worst mixture of groups near the declared one.

    $$
    \min_{\|x\| \le r} \max_{y \in \Delta} \frac1n \sum_i \frac{y_{g_i}}{p_{g_i}}
    \ell(x, z_i) + \rho \|x\|^2 - \frac{\tau}{2} \sum_g \frac{(y_g - q_g)^2}{p_g},
    \qquad q = \frac{p}{\sum_g p_g}.
    $$

    For sources, sites or domains whose mixture will be another one than that of the
    records. The penalty is a chi-square divergence; it is public, so it costs nothing,
    and it damps the noise in $y$. If no weight reaches 0, the value is the mean loss
    plus the variance of group losses over $2 \tau$: small $\tau$ is near to
    `group_fair`, large $\tau$ to the mean loss.

    Args:
        loss: As in `group_fair`.
        shares: $p$, as in `group_fair`.
        strength: $\tau \ge 0$, in units of the loss.
        radius: As in `group_fair`, like all that follow.
        scale: $s$.
        ridge: $\rho$.
        row_norm: $R$.
        group: Reads a record's group.

    Returns:
        A problem over $(x, s y)$.

    Raises:
        ValueError: As `group_fair`.

    Privacy:
        As for `group_fair`; the strength is public, too.

    References:
        Namkoong and Duchi, "Variance-based regularization with convex objectives",
        2017.
    """
    owner = "group_robust"
    return _game(owner, loss, shares, strength, radius, scale, ridge, row_norm, group)


def group_weights(problem: GroupGame, y: Float[Array, " k"]) -> Float[Array, " k"]:
    """Return the weights of the groups, of sum 1, from the second variable of a game.

    Args:
        problem: A game of `group_fair` or `group_robust`.
        y: The second variable, $s y$ in the formulas, with any leading axes.

    Raises:
        TypeError: The problem is no group game, or `y` is no array of numbers.

    Privacy:
        A function of what is released: free.
    """
    _checks.instance("group_weights", GroupGame, problem=problem)
    if not hasattr(y, "dtype"):
        raise TypeError(f"group_weights: y must be an array, got {type(y).__name__}.")
    return y / float(problem.scale)


def group_start(
    problem: GroupGame, x: PyTree, shares: Sequence[float]
) -> tuple[PyTree, Float[Array, " k"]]:
    """Return the initial pair: `x`, and the shares as the second variable.

    Args:
        problem: A game of `group_fair` or `group_robust`.
        x: The first model, public.
        shares: The declared shares, as there.

    Raises:
        TypeError: The problem is no group game.
        ValueError: Shares that are not positive or sum to more than 1, or a model that
            is not of finite floating-point numbers.
    """
    _checks.instance("group_start", GroupGame, problem=problem)
    check_start(x)
    values = _checked_shares("group_start", shares)
    weights = values / np.sum(values)
    dtype = jnp.result_type(*jax.tree.leaves(x))
    return x, jnp.asarray(weights * float(problem.scale), dtype)


def _game(
    owner, loss, shares, strength, radius, scale, ridge, row_norm, group
) -> GroupGame:
    """Check the arguments of both group games, and build the `GroupGame`."""
    shares = _checked_shares(owner, shares)
    positive = {"radius": radius, "scale": scale, "row_norm": row_norm}
    _checks.positive(owner, **{k: v for k, v in positive.items() if v is not None})
    _checks.non_negative(owner, strength=strength, ridge=ridge)
    _checks.function(owner, group=group)
    constants: dict[str, Any] = {}
    if isinstance(loss, AbstractLinearModel):
        scale, constants = _of_model(owner, loss, shares, radius, scale, row_norm)
        loss, radius = linear_loss(loss, row_norm), float(radius)
    elif not callable(loss) or isinstance(loss, type):
        raise TypeError(
            f"{owner}: loss must be a function of (x, record) or a linear model such "
            f"as Logistic(), got {_checks.shown(loss)}."
        )
    scale = 1.0 if scale is None else float(scale)
    if ridge or strength:
        constants["public"] = _public(shares, scale, ridge, float(strength))
        constants |= _public_constants(shares, scale, radius, ridge, float(strength))
    x_set = Euclidean() if radius is None else Ball(radius)
    weights = shares.tolist(), (1 / (scale * shares)).tolist()
    parts: Any = (loss, *map(tuple, weights), group, x_set, Simplex(scale))
    return GroupGame(*parts, **constants)


def _of_model(owner, model, shares, radius, scale, row_norm) -> tuple[float, dict]:
    """Return the scale of a linear model's game, and a dict of its constants."""
    if radius is None:
        raise ValueError(f"{owner}: a linear model needs radius=, a bound on |x|.")
    if not math.isfinite(model.start):
        name = type(model).__name__
        raise ValueError(f"{owner}: the loss of {name} has no bound. Use Logistic().")
    margin = float(radius * row_norm)
    slope = float(model.slope(margin))
    largest = model.start + margin * slope  # of all losses
    if scale is None:
        scale = math.sqrt(math.sqrt(2) * radius * largest / (slope * row_norm))
    most = 1 / float(np.min(shares))  # c
    along, across = model.curvature * row_norm**2, slope * row_norm / scale
    lipschitz = most * (along + math.hypot(along, 2 * across)) / 2  # L
    bound = most * math.hypot(slope * row_norm, largest / scale)  # M
    constants = {"lipschitz": lipschitz, "bound": bound, "smoothness": along}
    return float(scale), constants | {"loss_bound": 2 * model.start}


def _public(shares: np.ndarray, scale: float, ridge: float, strength) -> Callable:
    reference = shares / np.sum(shares)

    def public(x: PyTree, y: Float[Array, " k"]) -> Scalar:
        value = ridge * optax.tree.norm(x, squared=True)
        if strength:
            away = y / scale - jnp.asarray(reference, y.dtype)
            distance = jnp.sum(away * away / jnp.asarray(shares, y.dtype))
            value = value - strength / 2 * distance
        return value

    return public


def _public_constants(shares, scale, radius, ridge, strength) -> dict[str, Any]:
    """Return a dict of the constants of the ridge and the chi-square penalty."""
    corners = (np.eye(len(shares)) - shares / np.sum(shares)) / shares
    farthest = np.max(np.linalg.norm(corners, axis=1))  # a convex function of y
    bound = None
    if radius is not None:
        bound = math.hypot(2 * ridge * radius, strength * farthest / scale)
    slope = float(max(2 * ridge, strength / (scale**2 * np.min(shares))))
    return {"public_lipschitz": slope, "public_bound": bound}


def _checked_shares(owner: str, shares: Sequence[float]) -> np.ndarray:
    try:
        values = np.asarray(shares, float)
    except (TypeError, ValueError):
        values = np.zeros(0)
    good = values.ndim == 1 and values.size > 0 and bool(np.all(values > 0))
    if not good or not np.sum(values) <= 1 + 1e-6:  # shares may be rounded
        given = _checks.shown(shares)  # declared, and so public
        if values.size:
            given = f"{values.tolist()} of sum {np.sum(values):.4g}"
        raise ValueError(
            f"{owner}: shares must be positive numbers of sum 1 or less, got {given}. "
            "Declare them from public knowledge."
        )
    return values
