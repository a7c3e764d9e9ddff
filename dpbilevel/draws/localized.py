"""Draws in rounds, each centred at the last one and from a narrower density."""

import dataclasses
import functools
from typing import ClassVar, Self

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
from .exponential import RegularizedExponentialMechanism
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

    on the full set: the quadratic term keeps it within about $R_m$ of $x_m$, and no
    ball needs to contain the minimizer. Narrower rounds have larger $k_m = \mu_m /
    (m_m S)^2$. The expected value of a round exceeds that of its center $x_m$ by at
    most $d / k_m$.

    Args:
        draw: The draw of a round; its `radius` is not read.
        radii: $R_0, R_1, \dots$, one per round: guesses of the distance between the
            minimizer and the center. Public.
        budget_split: The split of the squared budget over the rounds; by default in
            equal parts.
        samplers: One per round; set by `calibrate`.

    Privacy:
        `len(radii)` draws under replace-one, each as private as a Gaussian release, in
        one ledger. Centers are released before they are used. Radii affect accuracy
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
    problem_type: ClassVar[type] = FiniteSum
    in_config: ClassVar[bool] = False

    def __check_init__(self):
        owner = type(self).__name__
        _checks.instance(owner, RegularizedExponentialMechanism, draw=self.draw)
        if not isinstance(self.radii, tuple) or not self.radii:
            raise ValueError(f"{owner}: radii must be one per round: {self.radii}.")
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
        r"""Return `LocalizedDraws` whose radii shrink from half the set's diameter.

        Every round has twice the squared budget of the one before. The last round has
        $\mu = 3 G / (D \sqrt d)$, as if the slope in one direction, about $G / \sqrt
        d$, changed by three times its size over the diameter. Its radius is then $m S
        \sqrt{2 d} / \mu$.

        Args:
            draw: The draw of a round.
            problem: A problem with `lipschitz` on a bounded set.
            budget: The budget of the run.
            sizes: The planned number of records.
            num_rounds: The number of rounds.

        Raises:
            ValueError: A constant is not declared, or the budget cannot be met.
        """
        _checks.count(f"{cls.__name__}.tuned", num_rounds=num_rounds)
        single = calibrated(problem, draw, budget, sizes=sizes).solver
        noise, mu, _ = single.bound_terms(problem)
        slope = single.plan(problem, sizes).regularity.lipschitz
        diameter, d = float(problem.w_set.diameter), draw.coordinates()
        split = tuple(2.0**m for m in range(num_rounds))
        multiple = (sum(split) / split[-1] * mu * noise / d) ** 0.5  # m S, last round
        half = diameter / 2
        last_mu = 3 * slope / (diameter * d**0.5)
        last = min(half, multiple * (2 * d) ** 0.5 / last_mu)
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
        """Tuple of every round's solver, with its radius, noise, sampler and sizes.

        Raises:
            ValueError: The solver is not calibrated.
        """
        multiplier = self.draw.mechanism.calibrated()
        split = self.budget_split or (1.0,) * self.num_steps
        samplers = self.samplers or (self.draw.sampler,) * self.num_steps
        rounds = []
        for radius, part, sampler in zip(self.radii, split, samplers, strict=True):
            draw = dataclasses.replace(
                self.draw, radius=radius, sampler=sampler, sizes=self.sizes
            )
            rounds.append(draw.with_noise(multiplier * (sum(split) / part) ** 0.5))
        return tuple(rounds)

    def init(self, problem, w0) -> _State:
        """Return the state at the first center: `w0`, projected onto the set."""
        return _State(self.draw.init(problem, w0).x, jnp.zeros((), jnp.int32))

    def step(self, problem, data, state, *, key) -> _State:
        """Draw a point about the last one, and return the state after this round."""

        def draw(solver, center, key):
            return solver.step(problem, data, DrawState(center, center, 1), key=key).x

        rounds, center = self.rounds, state.x
        if len({jax.tree.structure(solver) for solver in rounds}) == 1:
            # They differ in numbers alone, so that one program serves all.
            solver = jax.tree.map(lambda *v: jnp.stack(v)[state.t], *rounds)
            center = draw(solver, center, key)
        else:
            branches = [functools.partial(draw, solver) for solver in rounds]
            center = jax.lax.switch(state.t, branches, center, key)
        return _State(center, state.t + 1)

    def bound(self, problem: FiniteSum, *, distance: float | None = None) -> float:
        r"""Return a bound on the expected excess of the answer, known before any data.

        $b_0 = \frac{d}{k_0} + \frac{\mu_0}{2} \|x^* - x_0\|^2$ and

        $$b_m = \frac{d}{k_m} + \min(\tfrac{\mu_m}{2} D^2, b_{m-1}),$$

        as a round is compared with a minimizer and with its own center. The sampling
        error of each round is added, as in `RegularizedExponentialMechanism.bound`. It
        holds for any radii; for curved losses the answer is far better.

        Args:
            problem: The problem that the solver is calibrated for.
            distance: An upper bound on the distance of a minimizer from the initial
                point; by default the diameter of the set.

        Raises:
            ValueError: The solver is not calibrated, or constants are missing.
        """
        first, *others = self.rounds
        bound = first.bound(problem, distance=distance)
        for solver in others:
            noise, mu, error = solver.bound_terms(problem)
            start = min(mu / 2 * float(problem.w_set.diameter) ** 2, bound)
            bound = error + noise + start
        return bound

    def released(self, state) -> PyTree:
        """Return the last drawn point, the center of the next round."""
        return state.x

    def ledger(self, problem, sizes) -> Ledger:
        """Return the ledger of the draws of all rounds."""
        first, *others = (
            solver.ledger(problem, sizes).named(f"round {m}")
            for m, solver in enumerate(self.rounds, start=1)
        )
        return sum(others, first)

    def with_noise(self, scale: Number) -> Self:
        """Return a copy whose rounds together have the noise multiplier `scale`."""
        return dataclasses.replace(self, draw=self.draw.with_noise(scale))

    def with_counts(self, problem, sizes=None) -> Self:
        """Return a copy with dtype and all samplers set, for JAX's default dtype."""
        sizes = self.sizes if sizes is None else sizes
        rounds = [solver.with_counts(problem, sizes) for solver in self.rounds]
        draw = dataclasses.replace(self.draw, dtype=rounds[0].dtype)
        samplers = tuple(solver.sampler for solver in rounds)
        return dataclasses.replace(self, draw=draw, samplers=samplers)

    @override
    def dimensions(self, w0) -> dict[str, int]:
        size = self.draw.coordinates()
        return {f"round {m + 1}: {DRAW}": size for m in range(self.num_steps)}
