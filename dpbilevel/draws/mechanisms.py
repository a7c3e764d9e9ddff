"""Mechanisms that draw their answer, from a density that depends on the records."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import AbstractVar  # noqa: F811
from jaxtyping import PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Number, Positive
from .._extras import dp_accounting
from ..privacy.accounting import profiles
from ..privacy.accounting.closed_forms import pure_event
from ..privacy.budget import Neighbours, People, PrivacyBudget
from ..privacy.keys import PRNGKey
from ..privacy.ledger import AbstractRelease
from ..privacy.mechanisms import ROUNDING_MARGIN, AbstractMechanism
from ..privacy.per_example.clipping import Basis
from ..privacy.queries import RECORDS
from ..privacy.releases import PERSON
from ..privacy.rows import ForecastRow, LedgerRow
from ..privacy.sampling.base import FullBatch
from ..sets import AbstractSet
from .samplers.base import (
    AbstractPotential,
    AbstractSampler,
    SamplerGuarantee,
    scaled_potential,
)

# The contribution of a score bounds this measure of the change by one record: the
# largest difference between two points, or the Lipschitz constant.
Measure = Literal["spread", "slope"]


class BoundedScore(eqx.Module):
    r"""Score $\Phi$ of points, sealed with a bound $c$ on one record's contribution.

    Only a mechanism may open it. Under replace-one the change $\Delta = \Phi_Z -
    \Phi_{Z'}$ has `measure` at most $2 c$, under add-or-remove-one $c$: `"spread"`,
    $\sup \Delta - \inf \Delta$, or `"slope"`, the Lipschitz constant in $\ell_2$.
    """

    raw: AbstractPotential  # to be small. NON-PRIVATE
    contribution: Number  # c
    measure: Measure = eqx.field(static=True)
    basis: Basis = eqx.field(static=True)  # of c: clipping or constants

    def sensitivity(self, neighbours: Neighbours) -> Number:
        """Return how much the score may change between neighbours, in `measure`."""
        return neighbours.contributions * _checks.at_least_single(self.contribution)


class AbstractDrawMechanism(AbstractMechanism):
    """Mechanism that draws a point from a density defined by a sealed score."""

    neighbours: AbstractVar[Neighbours]  # the relation that sensitivities refer to
    measure: eqx.AbstractClassVar[Measure]  # of the change by one record
    parameter: eqx.AbstractClassVar[str]  # the name of the field that sets the noise
    precision: ClassVar[str] = "draw"  # in the report

    def __check_init__(self):
        _checks.instance(type(self).__name__, Neighbours, neighbours=self.neighbours)

    def draw(
        self,
        score: BoundedScore,
        sampler: AbstractSampler,
        feasible: AbstractSet,
        start: PyTree,
        *,
        regularizer: Number = 0.0,
        convexity: Number = 0.0,
        key: PRNGKey,
    ) -> PyTree:
        r"""Return a point drawn by `score`; refuse one with another kind of bound.

        The counts of the sampler are set, `start` is a public point of the set,
        `regularizer` the coefficient $\mu_0 \ge 0$ of a quadratic term about it, and
        `convexity` the declared strong convexity $\mu_1 \ge 0$ of the score.

        Raises:
            ValueError: The mechanism is not calibrated, or does not go with the
                sampler.
            TypeError: `score` is not sealed, or with another measure.
        """
        owner = type(self).__name__
        _checks.instance(owner, BoundedScore, score=score)
        if score.measure != self.measure:
            raise TypeError(f"{owner}: needs a score sealed with its {self.measure}.")
        self.check_sampler(sampler)
        sensitivity = score.sensitivity(self.neighbours) * (1 + ROUNDING_MARGIN)
        rate = self.rate(sensitivity, regularizer + convexity)
        center = start if self.measure == "slope" else None
        potential = scaled_potential(score.raw, jnp.asarray(rate), regularizer, center)
        # To derivatives the answer is a constant, as every release is.
        potential, start = jax.lax.stop_gradient((potential, start))
        # Errors of scores are planned for products in full precision, on every device.
        with jax.default_matmul_precision("highest"):
            x = sampler.draw(potential, feasible, start, key=key)
        return jax.lax.stop_gradient(x)

    @abc.abstractmethod
    def rate(self, sensitivity: Number, convexity: Number = 0.0) -> Number:
        r"""Return the factor of the score in the exponent of the density.

        The sensitivity is under the mechanism's relation, and the convexity $\mu =
        \mu_0 + \mu_1$ that of the regularized score.
        """

    @abc.abstractmethod
    def event(
        self, fraction: float = 1.0, log_ratio: float = 0.0
    ) -> "dp_accounting.DpEvent":
        r"""Return the dp-accounting event of one draw, at a fraction of sensitivity.

        $s$ in (0, 1], and $\xi$ of the sampler, as in `SamplerGuarantee`.
        """

    @abc.abstractmethod
    def with_multiplier(self, multiplier: Number) -> Self:
        """Return a copy with the privacy of a Gaussian release of this multiplier."""

    def check_sampler(self, sampler: AbstractSampler) -> None:
        """Raise `ValueError` if the guarantee does not hold for the sampler."""
        if self.measure == "slope" and not sampler.continuous:
            name = type(sampler).__name__
            raise ValueError(f"{name}: takes no convex set; use AlternatingSampler.")

    def calibrated(self) -> Number:
        """Return the number that sets the noise, checked not to be `None`."""
        value = getattr(self, self.parameter)
        if value is None:
            raise ValueError(
                f"{type(self).__name__}: not calibrated yet. Take the solver from "
                "dpbilevel.calibrate(problem, solver, budget, sizes=...).solver."
            )
        return value


class Exponential(AbstractDrawMechanism):
    r"""Exponential mechanism: draws $x$ from a density $\propto \exp(-k \Phi(x))$.

    With $o$ the spread of the change that one record makes in the score, $k =
    \varepsilon / o$. The log-density at $x$ changes by $k \Delta(x)$ and by the
    normalization, whose logarithm lies between $-k \sup \Delta$ and $-k \inf \Delta$:
    by at most $k o = \varepsilon$ together. The bound by twice the largest change
    that is common in the literature is never smaller.

    Args:
        epsilon: $\varepsilon > 0$; `None` until a plan sets it.
        neighbours: The relation under which the spread is taken. Static.

    Privacy:
        One draw: $\varepsilon$-DP without $\delta$ if the sampler is exact. Real
        numbers stand for floating-point ones.

    References:
        McSherry and Talwar, "Mechanism design via differential privacy", FOCS 2007;
        Dong, Durfee and Rogers, "Optimal differential privacy composition for
        exponential mechanisms", ICML 2020 (bounded range).
    """

    epsilon: Positive | None = None
    neighbours: Neighbours = eqx.field(static=True, default=Neighbours.REPLACE_ONE)
    measure: ClassVar[Measure] = "spread"
    parameter: ClassVar[str] = "epsilon"

    def rate(self, sensitivity, convexity=0.0) -> Number:
        """Return the score's factor in the exponent: epsilon over sensitivity."""
        return self.calibrated() / sensitivity

    def event(self, fraction=1.0, log_ratio=0.0) -> "dp_accounting.DpEvent":
        """Return the pure-DP event of `fraction` times epsilon plus 2 `log_ratio`."""
        return pure_event(fraction * float(self.calibrated()) + 2 * log_ratio)

    def with_multiplier(self, multiplier: Number) -> Self:
        """Return a copy of epsilon 2 / `multiplier`, equal as zero-concentrated DP."""
        return dataclasses.replace(self, epsilon=2 / multiplier)

    @override
    def scaled(self, factor: Number) -> Self:
        changes: dict[str, Any] = {"epsilon": self.calibrated() / factor}
        return dataclasses.replace(self, **changes)


class RegularizedExponential(AbstractDrawMechanism):
    r"""Draws by score plus quadratic, $\exp(-k (\Phi(x) + \frac\mu2 \|x - c\|^2))$.

    The center $c$ is public. For a convex score on a convex set the distributions on
    two neighbours are no easier to tell apart than two unit Gaussians whose means are
    $S \sqrt{k / \mu}$ apart, where $S$ is the Lipschitz constant of the change that one
    record makes in the score.

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

    noise_multiplier: Positive | None = None
    neighbours: Neighbours = eqx.field(static=True, default=Neighbours.REPLACE_ONE)
    measure: ClassVar[Measure] = "slope"
    parameter: ClassVar[str] = "noise_multiplier"

    def rate(self, sensitivity, convexity=0.0) -> Number:
        """Return the score's factor: convexity / (multiplier * sensitivity)^2."""
        return convexity / (self.calibrated() * sensitivity) ** 2

    def event(self, fraction=1.0, log_ratio=0.0) -> "dp_accounting.DpEvent":
        """Return a draw's `GaussianDpEvent`; raise if `log_ratio` is not 0.

        Raises:
            ValueError: The sampler is exact in the logarithm only, which a Gaussian
                event has no place for.
        """
        if log_ratio:
            raise ValueError("RegularizedExponential: needs an AlternatingSampler.")
        return dp_accounting.GaussianDpEvent(float(self.calibrated()) / fraction)

    @override
    def with_multiplier(self, multiplier: Number) -> Self:
        return dataclasses.replace(self, noise_multiplier=multiplier)

    @override
    def scaled(self, factor: Number) -> Self:
        return self.with_multiplier(factor * self.calibrated())


@dataclasses.dataclass(frozen=True)
class Draw(AbstractRelease):
    """Planned release of answers drawn by a score, for a ledger; draws nothing.

    Args:
        name: The name in the ledger.
        count: The number of draws.
        queries: The queries of the score, one per role.
        mechanism: The noise, relative to the sum of the queries' sensitivities.
        rate: $k$; two points whose scores differ by less than $1 / k$ are nearly
            equally likely.
        guarantee: The guarantee of the sampler.
        basis: The basis of the sensitivities.
        inexact: The total variation distance of each distribution from the exact one,
            besides the sampler's error.

    Privacy:
        A person with a record in every role moves the score by the sum of the roles'
        sensitivities and is charged the mechanism's event. Disjoint people are charged
        for their role's fraction.
    """

    mechanism: AbstractDrawMechanism
    rate: float
    guarantee: SamplerGuarantee
    basis: Basis = Basis.CLIPPED
    inexact: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        _checks.instance("Draw", AbstractDrawMechanism, mechanism=self.mechanism)
        _checks.instance("Draw", SamplerGuarantee, guarantee=self.guarantee)
        _checks.positive("Draw", rate=self.rate)
        _checks.non_negative("Draw", inexact=self.inexact)
        if any(not isinstance(q.sampling, FullBatch) for q in self.queries):
            raise ValueError("Draw: a score reads all records; use FullBatch.")
        if not self.guarantee.proved:
            object.__setattr__(self, "basis", Basis.UNPROVED)  # the class is frozen

    @property
    def failure(self) -> float:
        """Total variation distance of all draws together; the aim's if unproved."""
        guarantee = self.guarantee
        distance = guarantee.distance if guarantee.proved else guarantee.aim
        return self.count * (distance + self.inexact)

    @property
    @override
    def computed_error(self) -> float:
        return self.count * self.inexact

    @property
    def notes(self) -> tuple[str, ...]:
        """Tuple of sentences: the sampler's notes, and a proved distance."""
        if not self.failure or not self.guarantee.proved:
            return self.guarantee.notes
        distance = (
            f"{self.name}: within {self.failure:.3g} of the exact distribution, "
            "in total variation; counted in delta"
        )
        return (*self.guarantee.notes, distance)

    @override
    def charges(self, people: People) -> "Iterator[tuple[str, dp_accounting.DpEvent]]":
        disjoint, fractions = people is People.DISJOINT, {PERSON: 1.0}
        if disjoint or any(query.role == RECORDS for query in self.queries):
            total = self.contribution
            fractions = {q.role: q.contribution / total for q in self.queries}
        # If nothing is proved nothing is claimed; the noise is as if it were proved.
        log_ratio = self.guarantee.log_ratio if self.guarantee.proved else 0.0
        for person, fraction in fractions.items():
            event = self.mechanism.event(fraction, log_ratio)
            yield person, dp_accounting.SelfComposedDpEvent(event, self.count)

    def check(self, budget: PrivacyBudget) -> None:
        """Refuse samplers whose error alone exceeds the budget, at any noise.

        Raises:
            ValueError: The sampler's distance from its target alone costs as much.
        """
        if not self.guarantee.proved:
            return
        log_ratio, distance = self.guarantee.log_ratio, self.guarantee.distance
        spent = 2 * log_ratio  # the distributions on both neighbours may be off
        if spent >= budget.epsilon:
            raise ValueError(
                f"calibrate: log_ratio alone costs epsilon = {spent:.3g}; lower it."
            )
        cost = profiles.total_variation_delta(budget.epsilon, distance)
        if distance and cost >= budget.delta:
            small = 0.01 * budget.delta * distance / cost
            raise ValueError(
                f"calibrate: distance alone costs delta = {cost:.3g}; give {small:.1g}."
            )

    @override
    def row(self) -> LedgerRow:
        return dataclasses.replace(super().row(), temperature=1 / self.rate)

    def forecast(self, coordinates: int | None) -> ForecastRow:
        """Return a `ForecastRow`: the least score difference that a draw can tell."""
        temperature = 1 / self.rate
        return ForecastRow(self.name, temperature=temperature, coordinates=coordinates)
