"""Groups of coefficients scaled by a first gradient, and one private model in them."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Fraction, NonNegative
from ..bilevel import levels
from ..bilevel.pipeline import AbstractPipeline, Outputs
from ..core.descent import Rule
from ..onelevel.adaptive_clip import NoisyDescent
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import AbstractFiniteSum
from ..sets import Euclidean
from .penalties import PenaltyTuning

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
        """Return the scale of each group, in [0, 1].

        All scales are 1 if the energy of no group exceeds the noise.
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
        """Return the log-penalties of the fit at these scales, within their bounds."""
        x = x - 2 * jnp.log(jnp.maximum(scales, 1e-15)).astype(x.dtype)
        return problem.x_set.project(x)


def _in_coordinates(
    whole: levels.Objective, model: Callable[[PyTree], PyTree], scales: PyTree = None
) -> levels.Objective:
    """Return the `Objective` of y as a function of the coordinates u of `model`.

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
    r"""Return $y_0 + s \circ u$."""
    return optax.tree.add(y0, optax.tree.mul(spread, u))


def _spread(problem: PenaltyTuning, scales: Float[Array, " k"], y: PyTree) -> PyTree:
    """Return a pytree like y that holds the scale of each coefficient's group."""
    return jax.tree.map(lambda g, v: scales[g].astype(v.dtype), problem.groups, y)
