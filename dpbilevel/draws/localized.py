"""Draws in rounds, each about the last one and from a narrower density."""

import dataclasses
import functools
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Number
from ..core.plan import calibrated
from ..core.solver import AbstractSolver
from ..onelevel.problem import FiniteSum
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.ledger import Ledger
from ..privacy.per_example.clipping import Basis
from .base import DRAW, DrawState
from .regularized import RegularizedExponentialMechanism
from .samplers.base import AbstractSampler


class _State(eqx.Module):
    x: PyTree
    t: Int[Array, ""]


class LocalizedDraws(AbstractSolver[FiniteSum, _State]):
    r"""Regularized draws in rounds, each about the answer of the round before.

    Round $m$ draws

    $$x_{m+1} \propto \exp\Bigl(-k_m \bigl(\Phi(x)
        + \tfrac{\mu_m}{2} \|x - x_m\|^2\bigr)\Bigr), \qquad
    \mu_m = \frac{m_m S \sqrt{2 d}}{R_m},$$

    on the whole set: the quadratic term keeps it to about $R_m$ of $x_m$, and no ball
    needs to hold the minimizer for certain. Narrower rounds have larger $k_m = \mu_m /
    (m_m S)^2$. Against the point $x_m$ itself a round loses at most $d / k_m$ in
    expectation, so that no round spoils what was reached by more than that.

    Args:
        draw: What a round draws; its `radius` is not read.
        radii: $R_0, R_1, \dots$, one a round: the distance that the minimizer may have
            from the center, as a guess. Public.
        budget_split: How the squared budget is split over the rounds; by default in
            equal parts.
        samplers: One a round; set by `calibrate`.
        sizes: The planned number of records; set by `calibrate`. Static.

    Privacy:
        `len(radii)` draws under replace-one, each as private as a Gaussian release, in
        one ledger; centers are released before they are used. Radii affect accuracy
        alone. Status and assumptions are those of `RegularizedExponentialMechanism`.

    References:
        Feldman, Koren and Talwar, "Private stochastic convex optimization: optimal
        rates in linear time", STOC 2020, for localization by shrinking radii; Gopi, Lee
        and Liu, "Private convex optimization via exponential mechanism", COLT 2022,
        Theorem 4, for a round. Their combination is ours.
    """

    draw: RegularizedExponentialMechanism
    radii: tuple[float, ...]
    budget_split: tuple[float, ...] | None = None
    samplers: tuple[AbstractSampler, ...] | None = eqx.field(default=None, kw_only=True)
    sizes: Any = eqx.field(static=True, default=None, kw_only=True)
    problem_type: ClassVar[type] = FiniteSum
    in_config: ClassVar[bool] = False

    def __check_init__(self):
        owner = type(self).__name__
        _checks.instance(owner, RegularizedExponentialMechanism, draw=self.draw)
        if not isinstance(self.radii, tuple) or not self.radii:
            raise ValueError(
                f"{owner}: radii must be a tuple with one radius per round, got "
                f"{self.radii!r}."
            )
        for radius in self.radii:
            _checks.positive(owner, radii=radius)
        if self.budget_split is not None:
            names = [f"round {m}" for m in range(len(self.radii))]
            _checks.budget_split(owner, self.budget_split, *names)

    @classmethod
    def tuned(
        cls,
        draw: RegularizedExponentialMechanism,
        problem: FiniteSum,
        budget: PrivacyBudget,
        sizes: int,
        *,
        num_rounds: int = 5,
    ) -> Self:
        r"""Return draws with radii that shrink from $D / 2$ to what the noise allows.

        Every round has twice the squared budget of the one before. The last round has
        $\mu = 3 G / (D \sqrt d)$, as if the slope in one direction, about $G / \sqrt
        d$, changed by three times its size over the diameter: a quadratic term that
        bends somewhat more than the loss draws best. Its radius is then $m S \sqrt{2
        d} / \mu$. The factor was compared on the tasks of docs/draws.md.

        Args:
            draw: What a round draws.
            problem: A problem with `lipschitz` on a bounded set.
            budget: The budget of the run.
            sizes: The planned number of records.
            num_rounds: The number of rounds.

        Raises:
            ValueError: A constant is not declared, or the budget cannot be met.
        """
        _checks.count(f"{cls.__name__}.tuned", num_rounds=num_rounds)
        one = calibrated(problem, draw, budget, sizes=sizes).solver
        noise, bend, _ = one.promises(problem)  # d / k and mu
        slope = one.plan(problem, sizes).regularity.lipschitz
        diameter, d = float(problem.w_set.diameter), draw.coordinates()
        split = tuple(2.0**m for m in range(num_rounds))
        multiple = (sum(split) / split[-1] * bend * noise / d) ** 0.5  # m S, last round
        half = diameter / 2
        bends = 3 * slope / (diameter * d**0.5)  # mu, last round
        last = min(half, multiple * (2 * d) ** 0.5 / bends)
        powers = (m / max(num_rounds - 1, 1) for m in range(num_rounds))
        return cls(draw, tuple(half * (last / half) ** p for p in powers), split)

    @property
    def num_steps(self) -> int:
        """Number of rounds: one draw each."""
        return len(self.radii)

    @property
    @override
    def neighbours(self) -> Neighbours:
        return self.draw.neighbours

    @property
    @override
    def basis(self) -> Basis:
        return self.draw.basis

    @property
    def rounds(self) -> tuple[RegularizedExponentialMechanism, ...]:
        """Draws of all rounds, with their radii and noise, bound to the sizes.

        Raises:
            ValueError: The solver is not calibrated.
        """
        multiplier = self.draw.mechanism.calibrated()
        split = self.budget_split or (1.0,) * self.num_steps
        samplers = self.samplers or (self.draw.sampler,) * self.num_steps
        rounds = []
        for radius, share, sampler in zip(self.radii, split, samplers, strict=True):
            changes: dict[str, Any] = {"radius": radius, "sampler": sampler}
            changes["sizes"] = self.sizes
            part = dataclasses.replace(self.draw, **changes)
            rounds.append(part.with_noise(multiplier * (sum(split) / share) ** 0.5))
        return tuple(rounds)

    @override
    def init(self, problem, w0) -> _State:
        """Return the first center: `w0`, projected onto the set."""
        return _State(self.draw.init(problem, w0).x, jnp.zeros((), jnp.int32))

    @override
    def step(self, problem, data, state, *, key) -> _State:
        """Make one round: a draw about the last one."""

        def drawn(part, center, key):
            return part.step(problem, data, DrawState(center, center, 1), key=key).x

        rounds, center = self.rounds, state.x
        if len({jax.tree.structure(part) for part in rounds}) == 1:
            # They differ in numbers alone, so that one program serves all.
            numbers = jax.tree.map(lambda *v: jnp.stack(v)[state.t], *rounds)
            center = drawn(numbers, center, key)
        else:
            branches = [functools.partial(drawn, part) for part in rounds]
            center = jax.lax.switch(state.t, branches, center, key)
        return _State(center, state.t + 1)

    def bound(self, problem: FiniteSum, *, distance: float | None = None) -> float:
        r"""Return a bound on the expected excess of the answer, known before any data.

        $b_0 = \frac{d}{k_0} + \frac{\mu_0}{2} \|x^* - x_0\|^2$ and

        $$b_m = \frac{d}{k_m} + \min(\tfrac{\mu_m}{2} D^2, b_{m-1}),$$

        as a round is compared with a minimizer and with its own center; the distance of
        each law from its density adds to each, as in
        `RegularizedExponentialMechanism.bound`. It holds for any radii; where losses
        bend the answer is far better.

        Args:
            problem: The problem that the solver is calibrated for.
            distance: At least that of a minimizer from the start; by default the
                diameter of the set.

        Raises:
            ValueError: The solver is not calibrated, or constants are missing.
        """
        first, *others = self.rounds
        bound = first.bound(problem, distance=distance)
        for part in others:
            noise, bend, slip = part.promises(problem)
            bound = (
                slip + noise + min(bend / 2 * float(problem.w_set.diameter) ** 2, bound)
            )
        return bound

    @override
    def released(self, state) -> PyTree:
        """Return the center of the next round."""
        return state.x

    @override
    def ledger(self, problem, sizes) -> Ledger:
        """Return the ledger of the draws of all rounds."""
        parts = [part.ledger(problem, sizes) for part in self.rounds]
        first, *others = (
            part.named(f"round {m}") for m, part in enumerate(parts, start=1)
        )
        return sum(others, first)

    @override
    def with_noise(self, scale: Number) -> Self:
        """Split the squared budget over the rounds."""
        changes: dict[str, Any] = {"draw": self.draw.with_noise(scale)}
        return dataclasses.replace(self, **changes)

    @override
    def with_counts(self, problem, sizes=None) -> Self:
        """Set the counts of every round's sampler, for scores of the default dtype."""
        sizes = self.sizes if sizes is None else sizes
        parts = [part.with_counts(problem, sizes) for part in self.rounds]
        draw: dict[str, Any] = {"dtype": parts[0].dtype}
        changes: dict[str, Any] = {
            "draw": dataclasses.replace(self.draw, **draw),
            "samplers": tuple(part.sampler for part in parts),
        }
        return dataclasses.replace(self, **changes)

    @override
    def dimensions(self, w0) -> dict[str, int]:
        size = self.draw.coordinates()
        return {f"round {m + 1}: {DRAW}": size for m in range(self.num_steps)}
