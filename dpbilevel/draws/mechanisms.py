r"""Mechanisms that draw their answer, from a density that the records shape."""

import dataclasses
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..privacy import pure
from ..privacy._lazy import dp_accounting
from ..privacy.budget import Neighbours
from ..privacy.clipping import Basis
from ..privacy.mechanisms import ROUNDING_MARGIN
from ..privacy.noise import PRNGKey
from ..sets import AbstractSet
from .samplers.base import AbstractPotential, AbstractSampler, Certificate
from .samplers.potentials import scaled

# What the contribution of a score bounds, for the change that one record makes in it:
# the largest difference between two points, or the Lipschitz constant.
Measure = Literal["spread", "slope"]


class BoundedScore(eqx.Module):
    r"""A score of points computed from records, sealed with one record's share.

    Only a mechanism may open it.

    Attributes:
        raw: The score $\Phi$, to be small. NON-PRIVATE.
        contribution: $c$: under replace-one the change $\Phi_Z - \Phi_{Z'}$ has measure
            at most $2 c$, under add-or-remove-one $c$.
        measure: Of what: `"spread"`, $\sup \Delta - \inf \Delta$, or `"slope"`, the
            Lipschitz constant in $\ell_2$. Static.
        basis: What $c$ rests on. Static.
    """

    raw: AbstractPotential
    contribution: Float[Array, ""] | float
    measure: Measure = eqx.field(static=True)
    basis: Basis = eqx.field(static=True)

    def sensitivity(self, neighbours: Neighbours) -> Float[Array, ""] | float:
        """The measure of the change between neighbours.

        Args:
            neighbours: Which datasets count as neighbours.
        """
        return neighbours.contributions * _checks.at_least_single(self.contribution)


class Exponential(eqx.Module):
    r"""The exponential mechanism: draws $x$ from a density $\propto \exp(-k \Phi(x))$.

    With $o$ the spread of the change that one record makes in the score, $k =
    \varepsilon / o$. The log-density at $x$ changes by $k \Delta(x)$ and by the
    normalization, whose logarithm lies between $-k \sup \Delta$ and $-k \inf \Delta$:
    by at most $k o = \varepsilon$ together. The bound by twice the largest change
    that is common in the literature is never smaller.

    Args:
        epsilon: $\varepsilon > 0$; `None` until a plan sets it.
        neighbours: The relation under which the spread is taken. Static.

    Privacy:
        One draw: $\varepsilon$-DP without $\delta$ where the sampler is exact. Real
        numbers stand for floating-point ones.

    References:
        McSherry and Talwar, "Mechanism design via differential privacy", FOCS 2007;
        Dong, Durfee and Rogers, "Optimal differential privacy composition for
        exponential mechanisms", ICML 2020 (bounded range).
    """

    epsilon: float | Float[Array, ""] | None = None
    neighbours: Neighbours = eqx.field(static=True, default=Neighbours.REPLACE_ONE)
    precision: ClassVar[str] = "draw"
    measure: ClassVar[Measure] = "spread"

    def __check_init__(self):
        if self.epsilon is not None:
            _checks.positive("Exponential", epsilon=self.epsilon)
        _checks.instance("Exponential", Neighbours, neighbours=self.neighbours)

    def draw(
        self,
        score: BoundedScore,
        sampler: AbstractSampler,
        feasible: AbstractSet,
        start: PyTree,
        *,
        key: PRNGKey,
    ) -> PyTree:
        """Opens `score` and draws a point by it.

        Args:
            score: What to select by, with the measure `"spread"`.
            sampler: How to draw; planned.
            feasible: The set.
            start: A public point.
            key: A typed key for this draw alone.

        Raises:
            ValueError: The mechanism is not calibrated.
            TypeError: `score` is not sealed, or with another measure.
        """
        _check_score(self, score)
        sensitivity = score.sensitivity(self.neighbours)
        rate = self.rate(sensitivity * (1 + ROUNDING_MARGIN))
        potential = scaled(score.raw, jnp.asarray(rate), 0.0)
        return _drawn(potential, sampler, feasible, start, key)

    def rate(self, sensitivity: float | Float[Array, ""]) -> float | Float[Array, ""]:
        r"""$k = \varepsilon / o$.

        Args:
            sensitivity: $o$ under the mechanism's relation.
        """
        return _calibrated(self, self.epsilon) / sensitivity

    def event(self, share: float, certificate: Certificate) -> "dp_accounting.DpEvent":
        r"""One draw, for a person who moves the score by a share of the sensitivity.

        Both laws may be off by the sampler's $\xi$ in the logarithm, so that the draw
        is $(s \varepsilon + 2 \xi)$-DP.

        Args:
            share: $s$ in (0, 1].
            certificate: What is proved of the sampler.
        """
        epsilon = float(_calibrated(self, self.epsilon))
        return pure.event(share * epsilon + 2 * certificate.log_ratio)

    def scaled(self, factor: float) -> "Exponential":
        """The same mechanism with `factor` times the noise."""
        epsilon = _calibrated(self, self.epsilon) / factor
        return dataclasses.replace(self, epsilon=epsilon)


class RegularizedExponential(eqx.Module):
    r"""Draws $x$ from a density $\propto \exp(-k (\Phi(x) + \frac{\mu}{2} \|x\|^2))$.

    For a convex score on a convex set the laws on two neighbours are no easier to tell
    apart than two unit Gaussians whose means are $S \sqrt{k / \mu}$ apart, where $S$ is
    the Lipschitz constant of the change that one record makes in the score.

    Args:
        noise_multiplier: $m = \sqrt{\mu / k} / S$; `None` until a plan sets it.
        neighbours: The relation under which $S$ is taken. Static.

    Privacy:
        One draw, exactly as private as a Gaussian release of noise multiplier $m$, if
        the score is convex on every dataset and $S$ holds. Real numbers stand for
        floating-point ones.

    References:
        Gopi, Lee and Liu, "Private convex optimization via exponential mechanism",
        COLT 2022, Theorem 4.
    """

    noise_multiplier: float | Float[Array, ""] | None = None
    neighbours: Neighbours = eqx.field(static=True, default=Neighbours.REPLACE_ONE)
    precision: ClassVar[str] = "draw"
    measure: ClassVar[Measure] = "slope"

    def __check_init__(self):
        owner = "RegularizedExponential"
        if self.noise_multiplier is not None:
            _checks.positive(owner, noise_multiplier=self.noise_multiplier)
        _checks.instance(owner, Neighbours, neighbours=self.neighbours)

    def draw(
        self,
        score: BoundedScore,
        sampler: AbstractSampler,
        feasible: AbstractSet,
        start: PyTree,
        *,
        regularizer: float | Float[Array, ""],
        convexity: float | Float[Array, ""] = 0.0,
        key: PRNGKey,
    ) -> PyTree:
        r"""Opens `score` and draws a point by it.

        Args:
            score: What to select by, with the measure `"slope"`.
            sampler: How to draw; planned.
            feasible: The set.
            start: A public point.
            regularizer: $\mu_0 \ge 0$, the coefficient of the quadratic term.
            convexity: $\mu_1 \ge 0$, the declared strong convexity of the score; $\mu =
                \mu_0 + \mu_1$.
            key: A typed key for this draw alone.

        Raises:
            ValueError: The mechanism is not calibrated, or the sampler draws from
                single points.
            TypeError: `score` is not sealed, or with another measure.
        """
        _check_score(self, score)
        check_continuous(sampler)
        sensitivity = score.sensitivity(self.neighbours) * (1 + ROUNDING_MARGIN)
        rate = self.rate(sensitivity, regularizer + convexity)
        potential = scaled(score.raw, jnp.asarray(rate), regularizer)
        return _drawn(potential, sampler, feasible, start, key)

    def rate(
        self,
        sensitivity: float | Float[Array, ""],
        convexity: float | Float[Array, ""],
    ) -> float | Float[Array, ""]:
        r"""$k = \mu / (m S)^2$.

        Args:
            sensitivity: $S$ under the mechanism's relation.
            convexity: $\mu$ of the regularized score.
        """
        return convexity / (self.calibrated() * sensitivity) ** 2

    def calibrated(self) -> float | Float[Array, ""]:
        """The noise multiplier.

        Raises:
            ValueError: There is none yet.
        """
        return _calibrated(self, self.noise_multiplier)

    def event(self, share: float, certificate: Certificate) -> "dp_accounting.DpEvent":
        """One draw, for a person who moves the score by a share of the sensitivity.

        Args:
            share: In (0, 1].
            certificate: What is proved of the sampler.

        Raises:
            ValueError: The sampler is exact in the logarithm only, which a Gaussian
                event has no place for.
        """
        if certificate.log_ratio:
            raise ValueError(
                "RegularizedExponential: needs a sampler that is close to its target "
                "in total variation, such as AlternatingSampler."
            )
        multiplier = float(_calibrated(self, self.noise_multiplier))
        return dp_accounting.GaussianDpEvent(multiplier / share)

    def scaled(self, factor: float) -> "RegularizedExponential":
        """The same mechanism with `factor` times the noise."""
        multiplier = factor * _calibrated(self, self.noise_multiplier)
        return dataclasses.replace(self, noise_multiplier=multiplier)


def check_continuous(sampler: AbstractSampler) -> None:
    """Refuses samplers that draw from single points of the set.

    Args:
        sampler: The sampler of a regularized draw.

    Raises:
        ValueError: The sampler draws from a finite set.
    """
    if not sampler.continuous:
        raise ValueError(
            "RegularizedExponentialMechanism: its guarantee is about densities on a "
            f"convex set, and {type(sampler).__name__} draws from single points of it. "
            "Use AlternatingSampler, or ExponentialMechanism with this sampler."
        )


def _drawn(potential, sampler, feasible, start, key) -> PyTree:
    # To derivatives the answer is a constant, as every release is.
    potential, start = jax.lax.stop_gradient((potential, start))
    # Errors of scores are planned for products in full precision, on every device.
    with jax.default_matmul_precision("highest"):
        drawn = sampler.draw(potential, feasible, start, key=key)
    return jax.lax.stop_gradient(drawn)


def _check_score(mechanism, score) -> None:
    owner = type(mechanism).__name__
    _checks.instance(owner, BoundedScore, score=score)
    if score.measure != mechanism.measure:
        raise TypeError(
            f"{owner}: needs a score sealed with its {mechanism.measure}, got one with "
            f"its {score.measure}."
        )


def _calibrated(mechanism, value):
    if value is None:
        raise ValueError(
            f"{type(mechanism).__name__}: not calibrated yet, so nothing can be drawn. "
            "Get a calibrated solver from dpbilevel.calibrate(problem, solver, budget, "
            "sizes=...).solver."
        )
    return value
