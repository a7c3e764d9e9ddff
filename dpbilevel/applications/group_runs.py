"""Groups of coefficients scaled by a first gradient, and one private model in them."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Fraction, NonNegative
from ..bilevel.penalized import PenalizedLevel, equal_weights, noise_std
from ..bilevel.runs import AbstractPipeline
from ..core.descent import Rule
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import AbstractFiniteSum
from ..sets import AbstractSet, Euclidean
from .base import PenaltyTuning

SCREEN, FIT = "screen", "fit"
# One step from zero: the negative gradient, and its noise.
_ONE_GRADIENT = NoisyGD(1, clip_norm=1.0, step_size=1.0)


class ScaledLevel(PenalizedLevel):
    r"""Both levels in the coordinates $u$ of $y = y_0 + s \circ u$.

    Gradients are those in $u$, so that they are scaled before they are clipped. Without
    scales $s = 1$ and the public terms are left out.
    """

    y0: PyTree = None
    scales: PyTree = None

    @property
    def w_set(self) -> AbstractSet:
        """All of space."""
        return Euclidean()

    def at(self, u: PyTree) -> PyTree:
        """The model at `u`."""
        return optax.tree.add(self.y0, self._scaled(u))

    def _scaled(self, v: PyTree) -> PyTree:
        return v if self.scales is None else optax.tree.mul(self.scales, v)

    @override
    def record_gradients(self, w: PyTree):
        funs = super().record_gradients(self.at(w))

        def scaled(fun):
            return lambda record: self._scaled(fun(record))

        return {role: scaled(fun) for role, fun in funs.items()}

    @override
    def public_gradient(self, w: PyTree) -> PyTree:
        if self.scales is None:
            return optax.tree.zeros_like(w)
        return self._scaled(super().public_gradient(self.at(w)))


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
       group, up to the bounds. Where $s_j = 0$ the coefficients stay at $y_0$, and
       neither noise nor clipped gradients are spent on them.

    A heuristic of two stages in the manner of empirical Bayes. It is not a method of
    bilevel optimization: validation records are used in the same way as training
    records. A group is dropped where its gradient at $y_0$ is below the noise, even if
    it would be useful together with others. Where all groups matter, plain descent on
    the records of both levels has more of the budget for the model.

    Args:
        fit: The one-level solver of the model. Steps refer to the mean over the
            training records plus $n_f / n_g$ times that over the validation records.
        margin: $m \ge 0$, in standard deviations of the energy of the noise.
        full_above: $a$ in (0, 1): groups with this share of the largest $e_j$ have
            scale 1.
        budget_split: How the squared budget is split over screen and fit.
        screen: The one step that releases the gradient.

    Raises:
        TypeError: A part is no solver of one-level problems.
        ValueError: A number is out of range; `screen` is not one step of size 1; the
            scales or the ledger are asked for before `sizes` are set.

    Privacy:
        The releases of two runs. Scales and penalties are functions of the first one's
        answer and of the public noise: free.
    """

    fit: NoisyGD
    margin: NonNegative = 1.0
    full_above: Fraction = 0.15
    budget_split: tuple[float, float] = eqx.field(
        default=(0.25, 0.75), converter=_checks.floats
    )
    screen: NoisyGD = _ONE_GRADIENT
    stages: ClassVar = dict.fromkeys((SCREEN, FIT), AbstractFiniteSum)
    problem_type: ClassVar[type] = PenaltyTuning
    in_config: ClassVar[bool] = True

    def __check_init__(self):
        step_size: Any = self.screen.step_size
        known = _checks.concrete(step_size) or isinstance(step_size, Rule)
        if self.screen.num_steps != 1 or (known and step_size != 1):
            raise ValueError(
                "ScaledGroups: screen must be one step of size 1, so that its answer "
                "is the negative gradient; set its clip_norm, sampling and noise only."
            )

    def scales(self, problem: PenaltyTuning, found: dict) -> Float[Array, " k"]:
        """Of the groups, in [0, 1]; ones where no energy stands out of the noise."""
        q, k = found[SCREEN], problem.num_groups
        pairs = list(
            zip(jax.tree.leaves(problem.groups), jax.tree.leaves(q), strict=True)
        )

        def by_group(values):
            parts = [
                jnp.zeros(k, v.dtype).at[jnp.ravel(g)].add(jnp.ravel(v))
                for (g, _), v in zip(pairs, values, strict=True)
            ]
            return sum(parts[1:], parts[0])

        count = jnp.maximum(by_group([jnp.ones_like(v) for _, v in pairs]), 1)
        mean = by_group([v * v for _, v in pairs]) / count
        # The standard deviation that the release adds to each coordinate.
        sigma = noise_std(self.screen, self._level(problem, SCREEN), self.sizes)
        above = mean - sigma**2 * (1 + self.margin * jnp.sqrt(2 / count))
        energy = jnp.sqrt(jnp.maximum(above, 0))
        top = jnp.max(energy)
        safe = jnp.where(top > 0, self.full_above * top, 1)
        return jnp.where(top > 0, jnp.minimum(energy / safe, 1), 1)

    def _level(self, problem, name, x=None, y0=None, scales=None) -> ScaledLevel:
        penalty = equal_weights("ScaledGroups", self.sizes)
        clip_norm = getattr(self, name).clip_norm
        return ScaledLevel(problem, x, penalty, clip_norm, y0, scales)

    def _penalties(self, problem, w0, scales) -> PyTree:
        x = w0[0] - 2 * jnp.log(jnp.maximum(scales, 1e-15)).astype(w0[0].dtype)
        return problem.x_set.project(x)

    @override
    def level(self, name, problem, w0, found) -> ScaledLevel:
        if name == SCREEN or found is None:
            return self._level(problem, name, *(w0 or ()))
        scales = self.scales(problem, found)
        x = self._penalties(problem, w0, scales)
        return self._level(problem, name, x, w0[1], _spread(problem, scales, w0[1]))

    @override
    def start(self, name, w0, found):
        return optax.tree.zeros_like(w0[1])

    @override
    def current_solution(
        self, name: str, problem: Any, w0: PyTree, found: dict
    ) -> PyTree:
        scales = self.scales(problem, found)
        x = self._penalties(problem, w0, scales)
        if name == SCREEN:
            return x, w0[1]
        level = self._level(problem, name, x, w0[1], _spread(problem, scales, w0[1]))
        return x, problem.y_set.project(level.at(found[FIT]))


def _spread(problem: PenaltyTuning, scales: Float[Array, " k"], y: PyTree) -> PyTree:
    """Every coefficient's scale."""
    return jax.tree.map(lambda g, v: scales[g].astype(v.dtype), problem.groups, y)
