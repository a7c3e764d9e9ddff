"""The exponential mechanism: one private draw instead of many noisy steps."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..clipping import Basis
from ..noise import PRNGKey
from ..privacy.budget import Neighbours, People
from ..privacy.draws import Draw, Exponential
from ..privacy.ledger import RECORDS, Ledger, Query
from ..problems.bilevel import BilevelProblem
from ..problems.finite_sum import FiniteSum
from ..samplers.base import AbstractSampler, Regularity
from ..samplers.grid import Grid
from ..scores.base import AbstractScore, Facts
from ..scores.hyper import GradientNorm, HyperObjective
from ..scores.mean_loss import MeanLoss
from .base import AbstractSolver

DRAW = "draw of x"


class DrawState(eqx.Module):
    """The public start, and the answer once it is drawn.

    Attributes:
        start: The start: `(x, y)` for two levels.
        x: The start's, then the drawn one.
        levels: How many levels the problem has. Static.
    """

    start: PyTree
    x: PyTree
    levels: int = eqx.field(static=True)


class ExponentialMechanism(AbstractSolver[Any, DrawState]):
    r"""Draws $x$ with a density $\propto \exp(-k \Phi(x))$; releases $x$ only.

    Pure differential privacy where the sampler is exact. The score $\Phi$ is the
    objective of a one-level problem, the hyper-objective $F(x, y^*(x))$ of a bilevel
    one, or the norm of its gradient. No convexity is needed. One step: the whole budget
    buys one draw.

    Args:
        sampler: How to draw: `Grid`, `GridWalk`.
        score: `"value"`, or `"gradient_norm"` for stationary points. Static.
        clip_range: $B$: losses of single (upper-level) records are clipped to $[0, B]$.
            Without it their range follows from declared constants.
        convex: Whether the score is declared convex on the set for every possible
            dataset. The mechanism does without, but the number of steps that walks are
            certified for rests on it. Static.
        mechanism: The mechanism and its epsilon.
        dimension: The number of coordinates of $x$, which samplers on continuous sets
            must know before data is seen. Static.
        sizes: The planned sizes; set by `calibrate`. Static.

    Privacy:
        One draw, with $k = \varepsilon / o$, where $o$ bounds how far apart one record
        can move the scores of two points. One level with `clip_range`: $o = 2 B / n$
        under replace-one and $B / n$ under add-or-remove-one, enforced. Two levels:
        replace-one only; the share of an upper record is enforced by `clip_range` or
        follows from the constants, that of a lower record follows from the constants
        (status `CONDITIONAL`); the errors of the inner solves are part of $o$. A person
        in both levels is charged the sum. A sampler that is not exact adds to epsilon
        or delta what is proved of it.

    References:
        Lowy and Liu, "Differentially private bilevel optimization: efficient
        algorithms with near-optimal rates", equation (4) and Appendix C.3. There $k =
        \varepsilon / (2 s)$ with $s$ our $o$: half of what is safe.
    """

    sampler: AbstractSampler
    score: Literal["value", "gradient_norm"] = eqx.field(static=True, default="value")
    clip_range: float | Float[Array, ""] | None = None
    convex: bool = eqx.field(static=True, default=False, kw_only=True)
    mechanism: Exponential = Exponential()
    dimension: int | None = eqx.field(static=True, default=None)
    sizes: Any = eqx.field(static=True, default=None)
    problem_type: ClassVar[Any] = BilevelProblem | FiniteSum

    def __check_init__(self):
        owner = "ExponentialMechanism"
        _checks.instance(owner, AbstractSampler, sampler=self.sampler)
        _checks.instance(owner, Exponential, mechanism=self.mechanism)
        _checks.one_of(owner, "score", self.score, ("value", "gradient_norm"))
        if self.clip_range is not None:
            _checks.positive(owner, clip_range=self.clip_range)
            if self.score == "gradient_norm":
                raise ValueError(
                    f"{owner}: clip_range is for losses; the sensitivity of the "
                    "gradient norm follows from the problem's constants."
                )

    @property
    def num_steps(self) -> int:
        """One."""
        return 1

    @property
    def neighbours(self) -> Neighbours:
        """The relation of the mechanism."""
        return self.mechanism.neighbours

    @property
    def basis(self) -> Basis:
        """Constants, where no clipping enforces the range of a one-level loss."""
        return Basis.CLIPPED if self.clip_range is not None else Basis.CONSTANTS

    def init(self, problem: Any, w0: PyTree) -> DrawState:
        """Starts at `w0`, which only samplers on continuous sets read."""
        return initial(problem, w0, dimension_of(self))

    def step(
        self, problem: Any, data: PyTree, state: DrawState, *, key: PRNGKey
    ) -> DrawState:
        """One draw."""
        score = self._score(problem, self.sizes).bounded(data, state.start)
        x = self.mechanism.draw(
            score, self.sampler, feasible_set(problem), state.x, key=key
        )
        return dataclasses.replace(state, x=x)

    def released(self, state: DrawState) -> PyTree:
        """The drawn `x`; no `y`."""
        return answer(state)

    def output(self, problem: Any, state: DrawState) -> PyTree:
        """The drawn `x`; no `y`."""
        return answer(state)

    def ledger(self, problem: Any, sizes: Any) -> Ledger:
        """One draw.

        Raises:
            ValueError: The problem lacks constants, the solver is not calibrated, or
                the default floating-point dtype is too coarse.
        """
        facts, rate, regularity = self._plan(problem, sizes)
        certificate = self.sampler.certificate(regularity, feasible_set(problem))
        queries = queries_of(facts, sizes)
        draw = Draw(DRAW, 1, queries, self.mechanism, rate, certificate, facts.basis)
        convex = ("declared: the score is convex on the set, for every dataset",)
        assumptions = (*(convex if self.convex else ()), *facts.assumptions)
        return Ledger((draw,), people_of(sizes), assumptions)

    def with_noise(self, scale: float) -> Self:
        r"""Sets $\varepsilon$ to `2 / scale`.

        A draw of bounded range $\varepsilon$ has the zero-concentrated privacy of a
        Gaussian release of multiplier $2 / \varepsilon$.
        """
        mechanism = dataclasses.replace(self.mechanism, epsilon=2 / scale)
        return dataclasses.replace(self, mechanism=mechanism)

    def prepared(self, problem: Any, sizes: Any = None) -> Self:
        """The same solver with the counts of its sampler.

        Args:
            problem: The problem.
            sizes: The planned sizes; its own by default.
        """
        *_, regularity = self._plan(problem, self.sizes if sizes is None else sizes)
        sampler = self.sampler.planned(regularity, feasible_set(problem))
        return dataclasses.replace(self, sampler=sampler)

    def dimensions(self, w0: PyTree) -> dict[str, int]:
        """The draw has the size of x."""
        del w0
        return {DRAW: dimension_of(self)}

    def _plan(self, problem, sizes) -> tuple[Facts, float, Regularity]:
        check_relation(self, problem)
        facts = self._score(problem, sizes).facts(jnp.result_type(float))
        share = sum(map(float, facts.contributions.values()))
        rate = float(self.mechanism.rate(self.neighbours.contributions * share))
        convexity = 0.0 if self.convex else None
        regularity = facts.regularity(dimension_of(self), convexity)
        return facts, rate, regularity.scaled(rate, 0.0, 0.0)

    def _score(self, problem, sizes) -> AbstractScore:
        if self.score == "gradient_norm":
            if isinstance(problem, FiniteSum):
                raise ValueError(
                    'ExponentialMechanism: score="gradient_norm" is for bilevel '
                    "problems."
                )
            return GradientNorm(problem, "spread", sizes)
        kind = MeanLoss if isinstance(problem, FiniteSum) else HyperObjective
        return kind(problem, "spread", sizes, self.clip_range)


def initial(problem: Any, w0: PyTree, dimension: int) -> DrawState:
    """The state before the draw.

    Args:
        problem: The problem.
        w0: The public start.
        dimension: The planned number of coordinates.

    Raises:
        ValueError: The start is of another size.
    """
    w0 = jax.tree.map(jnp.asarray, w0)
    two = isinstance(problem, BilevelProblem)
    x = w0[0] if two else w0
    if optax.tree.size(x) != dimension:
        raise ValueError(
            f"solve: the plan is for {dimension} coordinates, but the starting point "
            f"has {optax.tree.size(x)}; give candidates, or dimension=, of that size."
        )
    x = feasible_set(problem).project(x)
    start = (x, w0[1]) if two else x
    return DrawState(start, x, 2 if two else 1)


def answer(state: DrawState) -> PyTree:
    """`x`, or `(x, None)` for two levels.

    Args:
        state: The state.
    """
    return (state.x, None) if state.levels == 2 else state.x


def feasible_set(problem: Any) -> Any:
    """The set that is drawn from.

    Args:
        problem: A `FiniteSum` or a `BilevelProblem`.
    """
    return problem.x_set if isinstance(problem, BilevelProblem) else problem.w_set


def dimension_of(solver: Any) -> int:
    """The number of coordinates, from the candidates or as declared.

    Args:
        solver: A solver that draws.

    Raises:
        ValueError: It is not declared.
    """
    if isinstance(solver.sampler, Grid):
        return solver.sampler.dimension
    _checks_dimension(solver)
    return solver.dimension


def _checks_dimension(solver) -> None:
    owner = type(solver).__name__
    if solver.dimension is None:
        raise ValueError(
            f"{owner}: {type(solver.sampler).__name__} takes more steps in more "
            "dimensions, and they are fixed before data is seen; give dimension=, the "
            "number of coordinates of x."
        )
    _checks.count(owner, dimension=solver.dimension)


def check_relation(solver: Any, problem: Any) -> None:
    """Raises unless the relation is one that the problem's sensitivity is proved for.

    Args:
        solver: A solver that draws.
        problem: The problem.
    """
    two = isinstance(problem, BilevelProblem)
    if two and solver.neighbours is not Neighbours.REPLACE_ONE:
        raise ValueError(
            f"{type(solver).__name__}: with two levels its sensitivity is proved under "
            f"replace-one only, got {solver.neighbours}."
        )


def queries_of(facts: Facts, sizes: Any) -> tuple[Query, ...]:
    """What the score reads, one query per role.

    Args:
        facts: The shares.
        sizes: The planned sizes.
    """
    return tuple(
        Query(role, n, float(share) * n)
        for role, share in facts.contributions.items()
        for n in [sizes if role == RECORDS else getattr(sizes, role)]
    )


def people_of(sizes: Any) -> People:
    """Who may have records where.

    Args:
        sizes: `Sizes` for two levels, an integer for one.
    """
    return getattr(sizes, "people", People.OVERLAPPING)
