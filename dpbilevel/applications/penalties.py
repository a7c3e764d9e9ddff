"""Penalties of groups of coefficients: problem, initial point, `ScaledGroups`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Fraction, NonNegative
from ..bilevel import levels
from ..bilevel.pipeline import AbstractPipeline, Outputs
from ..bilevel.problem import BilevelProblem
from ..core.descent import Rule
from ..core.proximal import as_groups, group_lasso, l1
from ..onelevel.adaptive import NoisyDescent
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import AbstractFiniteSum
from ..sets import Box, Euclidean

ModelLoss = Callable[[PyTree, PyTree], Float[Array, ""]]


class PenaltyTuning(BilevelProblem):
    """Problem that `penalty_tuning` makes of quadratic penalties, with its groups.

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


SCREEN, FIT = "screen", "fit"
# One step from zero: the negative gradient, and its noise.
_ONE_GRADIENT = NoisyGD(1, clip_norm=1.0, step_size=1.0)


class ScaledGroups(AbstractPipeline):
    r"""Scales groups of coefficients by one noisy gradient, then fits a model.

    1. `screen` releases one gradient $q$ of the records of both levels at $y_0$, with
       noise of a known standard deviation $\sigma$ in each coordinate.
    2. The energy of group $j$ with $d_j$ coefficients, without that of the noise, gives
       its scale. This reads no records:

       $$
       e_j^2 = \Bigl(\frac{\|q_j\|^2}{d_j} - \sigma^2 \Bigl(1 + m \sqrt{2 / d_j} \Bigr)
       \Bigr)_+, \qquad s_j = \min\Bigl(1, \frac{e_j}{a \max_i e_i}\Bigr).
       $$
    3. `fit` fits $y = y_0 + s \circ u$ on the records of both levels, each with the
       same weight, by descent in $u$ at the log-penalties $x_j = x_{0, j} - 2 \log s_j$
       within their bounds. From $y_0 = 0$ the penalty of $u$ is that of $x_0$ in every
       group, up to the bounds. If $s_j = 0$ the coefficients stay at $y_0$, and neither
       noise nor clipped gradients are spent on them.

    A heuristic of two stages in the manner of empirical Bayes, not a method of bilevel
    optimization: validation and training records are used in the same way. A group is
    dropped if its gradient at $y_0$ is below the noise, even if it would be useful
    together with others. If all groups matter, plain descent on the records of both
    levels has more of the budget for the model.

    Args:
        fit: The one-level solver of the model. Steps refer to the mean over the
            training records plus $n_f / n_g$ times that over the validation records.
        margin: $m \ge 0$, in standard deviations of the energy of the noise.
        full_above: $a$ in (0, 1): groups with this share of the largest $e_j$ have
            scale 1.
        budget_split: The split of the squared budget over screen and fit.
        screen: The one step that releases the gradient.

    Raises:
        TypeError: A part is no solver of one-level problems.
        ValueError: A number is out of range, `screen` is not one step of size 1, or the
            scales are asked for before `sizes` are set.

    Privacy:
        The releases of two runs. Scales and penalties are functions of the first answer
        and of the public noise: free.
    """

    fit: NoisyDescent
    margin: NonNegative = 1.0
    full_above: Fraction = 0.15
    budget_split: tuple[float, float] = _checks.split_field(0.25, 0.75)
    screen: NoisyGD = _ONE_GRADIENT
    stages: ClassVar = dict.fromkeys((SCREEN, FIT), AbstractFiniteSum)
    problem_type: ClassVar[type] = PenaltyTuning
    in_config: ClassVar[bool] = True

    def __check_init__(self):
        step_size: Any = self.screen.step_size
        known = _checks.concrete(step_size) or isinstance(step_size, Rule)
        if self.screen.num_steps != 1 or (known and step_size != 1):
            raise ValueError("ScaledGroups: screen must be one step of size 1.")

    @override
    def queries(self, name):
        return levels.queries_of("both")

    @override
    def objective(self, name, problem, w0, outputs):
        penalty, (x, y0) = levels.equal_weights(self.sizes), w0
        if name == SCREEN:  # the gradient of the records alone
            whole = levels.lower_objective(problem, x, penalty)
            shifted = _in_coordinates(whole, lambda u: optax.tree.add(y0, u))
            return dataclasses.replace(shifted, public=optax.tree.zeros_like)
        scales = self.scales(problem, outputs)
        x = self._penalties(problem, x, scales)
        whole = levels.lower_objective(problem, x, penalty)
        spread = _spread(problem, scales, y0)
        return _in_coordinates(whole, lambda u: _model(y0, spread, u), spread)

    @override
    def start(self, name, w0, outputs):
        return optax.tree.zeros_like(w0[1])

    @override
    def current_solution(self, name, problem, w0, outputs):
        scales = self.scales(problem, outputs)
        x, y = self._penalties(problem, w0[0], scales), w0[1]
        if name == SCREEN:
            return x, y
        y = _model(y, _spread(problem, scales, y), outputs[FIT])
        return x, problem.y_set.project(y)

    def scales(self, problem: PenaltyTuning, outputs: Outputs) -> Float[Array, " k"]:
        """Return the scale of each group, in [0, 1]; all 1 if noise hides all groups.

        It hides a group whose energy does not exceed the noise.
        """
        q, k = jax.tree.leaves(outputs[SCREEN]), problem.num_groups
        groups = jax.tree.leaves(problem.groups)

        def by_group(values):
            parts = [
                jnp.zeros(k, v.dtype).at[jnp.ravel(g)].add(jnp.ravel(v))
                for g, v in zip(groups, values, strict=True)
            ]
            return sum(parts[1:], parts[0])

        count = jnp.maximum(by_group([jnp.ones_like(v) for v in q]), 1)
        mean = by_group([v * v for v in q]) / count
        # The standard deviation that the release adds to each coordinate.
        sigma = levels.noise_std(self.screen, self.queries(SCREEN), self.sizes)
        above = mean - sigma**2 * (1 + self.margin * jnp.sqrt(2 / count))
        energy = jnp.sqrt(jnp.maximum(above, 0))
        top = jnp.max(energy)
        safe = jnp.where(top > 0, self.full_above * top, 1)
        return jnp.where(top > 0, jnp.minimum(energy / safe, 1), 1)

    def _penalties(self, problem: PenaltyTuning, x: PyTree, scales) -> PyTree:
        """Return log-penalties: `x` minus 2 log `scales`, projected on the set."""
        x = x - 2 * jnp.log(jnp.maximum(scales, 1e-15)).astype(x.dtype)
        return problem.x_set.project(x)


def _in_coordinates(
    whole: levels.Objective, model: Callable[[PyTree], PyTree], scales: PyTree = None
) -> levels.Objective:
    """Return the objective `whole` of y as one of u, with y = `model(u)`.

    Gradients in u are multiplied by the scales before they are clipped.
    """

    def scaled(gradient):
        return gradient if scales is None else optax.tree.mul(scales, gradient)

    def of_level(fun):
        return lambda u, record: scaled(fun(model(u), record))

    records = {role: of_level(fun) for role, fun in whole.records.items()}
    return levels.Objective(
        Euclidean(), records, lambda u: scaled(whole.public(model(u)))
    )


def _model(y0: PyTree, spread: PyTree, u: PyTree) -> PyTree:
    """Return the model: `y0` plus `spread` times `u`, entry by entry."""
    return optax.tree.add(y0, optax.tree.mul(spread, u))


def _spread(problem: PenaltyTuning, scales: Float[Array, " k"], y: PyTree) -> PyTree:
    """Return a pytree like y that holds the scale of each coefficient's group."""
    return jax.tree.map(lambda g, v: scales[g].astype(v.dtype), problem.groups, y)
