r"""Interface of samplers of a density proportional to $\exp(-U)$ on a set.

Nothing here is private by itself. An exponential mechanism hands a sampler the
potential $U$ of a density that is private, and charges how far the sampler's
distribution may be from it.
"""

import abc
import dataclasses
import math
from typing import ClassVar, Self
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equinox import AbstractVar  # noqa: F811
from jaxtyping import Array, Float, Int, PyTree
from typing_extensions import override

from ..._checks import Checked, Count, NonNegative, Number, check_fields
from ...core.descent import scaled
from ...privacy.keys import PRNGKey
from ...sets import AbstractSet

_BATCH = 128  # points whose potentials are computed side by side


@dataclasses.dataclass(frozen=True)
class Regularity:
    r"""Known regularity of a potential $U$, before any data is seen, in $\ell_2$.

    With $U = \frac{1}{n} \sum_i u_i + \frac{m}{2} \|x\|^2$ if it is a sum of terms. An
    unknown smoothness is infinite.
    """

    dimension: Count  # d
    lipschitz: float  # L, of U on the set
    # alpha >= 0 with U - alpha |x|^2 / 2 convex on the set; `None` if U may not be.
    strong_convexity: float | None = None
    smoothness: float = math.inf  # beta, the Lipschitz constant of the gradient
    error: NonNegative = 0.0  # zeta, of a computed value of U, at most
    gradient_error: NonNegative = 0.0  # of a computed gradient, at most
    # The further error by rounding, of a value and of a gradient times the diameter.
    rounding: NonNegative = 0.0
    num_terms: int | None = None  # n
    term_lipschitz: float | None = None  # of every u_i
    quadratic: NonNegative = 0.0  # m, of the public quadratic part

    def __post_init__(self):
        check_fields(self)
        if not self.lipschitz >= 0:  # NaN too; infinity is what is not known
            raise ValueError(f"Regularity: lipschitz is negative: {self.lipschitz}.")

    def of_potential(
        self, rate: float, regularizer: float, reach: float
    ) -> "Regularity":
        """Return the `Regularity` of `rate` times (this score plus a quadratic).

        The quadratic is `regularizer` / 2 times the squared distance, within `reach`.
        """
        quadratic, convexity = rate * regularizer, self.strong_convexity
        names = "lipschitz", "smoothness", "error", "gradient_error", "rounding"
        scaled = {name: rate * getattr(self, name) for name in names}
        scaled["lipschitz"] += quadratic * reach if quadratic else 0.0
        scaled["smoothness"] += quadratic
        if convexity is not None:
            scaled["strong_convexity"] = rate * convexity + quadratic
        if self.term_lipschitz is not None:
            scaled["term_lipschitz"] = rate * self.term_lipschitz
        return dataclasses.replace(self, quadratic=quadratic, **scaled)


@dataclasses.dataclass(frozen=True)
class SamplerGuarantee:
    r"""Proved distance of a sampler's distribution from its target, before any data.

    The distribution is within $\eta$ in total variation of one whose density over the
    target's lies within $e^{\pm \xi}$. If that is not `proved`, the sampler was cut
    short, or planned for another potential or set, and no guarantee may be claimed.
    """

    num_steps: int
    queries: float  # evaluations of the potential or of one term of it, on average
    log_ratio: float = 0.0  # xi
    distance: float = 0.0  # eta
    proved: bool = True  # by a theorem
    aim: float = 0.0  # the distance that is aimed at, which the noise is chosen for
    notes: tuple[str, ...] = ()  # of the report


class AbstractPotential(eqx.Module):
    """Potential on points of a set. NON-PRIVATE: it reads the records."""

    @abc.abstractmethod
    def __call__(self, x: PyTree) -> Float[Array, ""]:
        """Return the potential $U(x)$ at one point."""

    def many(self, xs: PyTree) -> Float[Array, " m"]:
        """Return the potential at many points, stacked along the leading axis."""
        return jax.lax.map(self, xs, batch_size=_BATCH)

    def value_and_gradient(self, x: PyTree) -> tuple[Float[Array, ""], PyTree]:
        """Return $U(x)$ and a subgradient, or another tangent that lies below."""
        return jax.value_and_grad(self)(x)


class AbstractSumPotential(AbstractPotential):
    r"""Potential that is a mean of terms $u_i(x)$ plus $\frac{m}{2} \|x - c\|^2$.

    The center $c$ is a point of the set that is drawn from, or zero.
    """

    num_terms: AbstractVar[int]  # n
    quadratic: AbstractVar[Float[Array, ""] | float]  # m; public

    @abc.abstractmethod
    def term(self, index: Int[Array, ""], x: PyTree) -> Float[Array, ""]:
        """Return the value at `x` of one term; `index` is in [0, num_terms)."""

    def middle(self, y: PyTree, step_size: Number) -> PyTree:
        """Return the minimizer of the quadratic term plus |x - y|^2 / (2 step_size).

        The term has its center at 0; with another one override this method.
        """
        return scaled(1 / (1 + self.quadratic * step_size), y)


def scaled_potential(
    score: AbstractPotential, rate: Number, regularizer: Number, center: PyTree = None
) -> AbstractPotential:
    """Return the potential rate * (score + regularizer / 2 * |x - center|^2).

    The center is zero by default. For a sum of terms the result is a sum, too.
    """
    if isinstance(score, AbstractSumPotential):
        return _ScaledSum(score, rate, rate * regularizer, center, score.num_terms)
    return _Scaled(score, rate, rate * regularizer, center)


class _Scaled(AbstractPotential):
    score: AbstractPotential
    rate: Number
    quadratic: Number
    center: PyTree

    def __call__(self, x: PyTree) -> Float[Array, ""]:
        return self._times_rate(self.score(x)) + self._square(x)

    @override
    def many(self, xs: PyTree) -> Float[Array, " m"]:
        values = self.score.many(xs)
        squares = jax.vmap(self._square)(xs)
        return self._times_rate(values) + squares.astype(values.dtype)

    @override
    def value_and_gradient(self, x: PyTree) -> tuple[Float[Array, ""], PyTree]:
        value, gradient = self.score.value_and_gradient(x)

        def regularized(g, v):
            return self._times_rate(g) + _like(self.quadratic, v) * v

        total = self._times_rate(value) + self._square(x)
        return total, jax.tree.map(regularized, gradient, self._offset(x))

    def _offset(self, x: PyTree) -> PyTree:
        return x if self.center is None else optax.tree.sub(x, self.center)

    def _square(self, x: PyTree) -> Array:
        square = optax.tree.norm(self._offset(x), squared=True)
        return _like(self.quadratic, square) / 2 * square

    def _times_rate(self, value: Array) -> Array:
        return _like(self.rate, value) * value


class _ScaledSum(_Scaled, AbstractSumPotential):
    score: AbstractSumPotential
    num_terms: int = eqx.field(static=True)

    @override
    def term(self, index: Int[Array, ""], x: PyTree) -> Float[Array, ""]:
        return self._times_rate(self.score.term(index, x))

    @override
    def middle(self, y: PyTree, step_size: Number) -> PyTree:
        offset = super().middle(self._offset(y), step_size)
        return offset if self.center is None else optax.tree.add(self.center, offset)


def _like(number: Number, value: Array) -> Array:
    return jnp.asarray(number, jnp.asarray(value).dtype)


class AbstractSampler(Checked):
    """Sampler of one point, by steps whose number is fixed before data is seen.

    Steps are planned from the `Regularity` of a potential and from the set. A sampler
    whose running time depends on records says so in `assumptions`.

    Attributes:
        continuous: Whether it draws from all of the set, or from candidates.
        assumptions: What a report lists besides the guarantee; by default nothing.
    """

    continuous: ClassVar[bool] = True
    assumptions: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def with_counts(self, regularity: Regularity, feasible: AbstractSet) -> Self:
        """Return a copy with every count and step size set that was left open.

        On the host: the counts are static.

        Raises:
            ValueError: The sampler does not serve such a potential or set, or needs
                more steps than anyone would run.
        """

    @abc.abstractmethod
    def guarantee(
        self, regularity: Regularity, feasible: AbstractSet
    ) -> SamplerGuarantee:
        """Return the `SamplerGuarantee` that is proved of the draws.

        For a sampler whose counts are open, what `with_counts` will reach or refuse:
        calibration needs it at noises far from the final one.
        """

    @abc.abstractmethod
    def draw(
        self,
        potential: AbstractPotential,
        feasible: AbstractSet,
        start: PyTree,
        *,
        key: PRNGKey,
    ) -> PyTree:
        r"""Return one point, drawn by about the density $\propto e^{-U}$ on the set.

        Args:
            potential: $U$.
            feasible: The set.
            start: A public point; some samplers read only its shape.
            key: A typed key.

        Raises:
            ValueError: The sampler's counts are open.
        """
