"""Worst-case neighbouring data: canary problems that leak all that a ledger admits."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..bilevel.applications import (
    PenaltyTuning,
    SourceWeighting,
    penalty_tuning,
    source_weighting,
)
from ..bilevel.constants import SecondOrderConstants
from ..bilevel.problem import BilevelProblem, Levels, Sizes
from ..core.problem import AbstractProblem
from ..core.solution import Plan
from ..core.solver import AbstractSolver
from ..draws.exponential import ExponentialMechanism
from ..draws.regularized import RegularizedExponentialMechanism
from ..games.problem import VariationalInequality
from ..games.proximal_point import InexactProximalPoint
from ..onelevel.problem import FiniteSum
from ..privacy.budget import Neighbours, People
from ..privacy.clipping import Basis
from ..privacy.queries import LEVELS, RECORDS
from ..privacy.releases import PERSON
from ..privacy.sampling import (
    AbstractFixedBatch,
    AbstractSampling,
    FixedSize,
    FullBatch,
)
from ..search.base import AbstractAskTellSolver
from ..search.gibo import GradientInformativeBO
from ..search.random_search import RandomSearch
from ..sets import Ball, Box, Euclidean, Product
from .claims import Claim, ledger_claims

# A record's gradient, far beyond any clip norm.
BEYOND = 1e6
# Slopes of public terms that dwarf any noise and, over any penalty, each other.
_PUSH_LOWER, _PUSH_UPPER = 1e6, 1e15
# A start, and a jump of a loss, that dwarf what noise moves.
_FAR, _JUMP = 1e6, 1e15


@dataclasses.dataclass(frozen=True, eq=False)
class Canary:
    """Two neighbouring datasets that a solver has the hardest time to hide.

    Attributes:
        problem: Its per-record functions are linear: a record is its own gradient.
        solver: The solver, bound to the sizes of the data.
        w0: The starting point, zeros.
        data: The records with the person's far beyond the clip norm.
        neighbour: The same with the person's record reversed, or absent.
        claim: The profile that the solver's ledger promises the person.
    """

    problem: AbstractProblem
    solver: AbstractSolver
    w0: PyTree
    data: PyTree
    neighbour: PyTree
    claim: Claim


def canaries(
    solver: AbstractSolver,
    *,
    x_in_records: bool | tuple[str, ...] = True,
    others: float | None = None,
    coordinates: PyTree = 0.0,
) -> dict[str, Canary]:
    r"""A worst-case pair of datasets for each kind of person that a solver charges.

    All per-record functions are linear in the variables and the person's record is
    $10^6$ long, so each of its clipped contributions has the full clip norm, in one
    direction and at every step: $+C$ against $-C$ under replace-one, $+C$ against
    absent under add-or-remove-one. A person of disjoint levels has a record in one of
    them, otherwise in both. Everything is public: no records of anyone are needed.

    Records that contribute nothing are left out where batches cannot tell, so full
    batches are audited at their planned sizes. Otherwise sizes and batch sizes are
    divided by a common divisor, which changes no ratio of noise to sensitivity and
    leaves at least two of each.

    Args:
        solver: A calibrated solver, bound to its sizes.
        x_in_records: Which levels' records meet x: the problem's own, so that the
            claim is that of its plan.
        others: What everyone else contributes, in clip norms, in [-1, 1]. By default
            -1 where batches have a fixed size, because the others then tell who was
            left out, and 0 elsewhere.
        coordinates: A pytree whose leaves have the shapes of the variables.

    Returns:
        By kind of person as in the ledger: `"records"` for one level, `"upper"` and
        `"lower"` for disjoint people, `"person"` otherwise.

    Raises:
        ValueError: The solver has no noise or sizes yet, or solves another kind of
            problem.
        TypeError: A plan instead of its solver, or no solver.
    """
    check_solver(solver, "canaries")
    if solver.sizes is None:
        raise ValueError(
            f"canaries: {type(solver).__name__} is not bound to sizes; take it from "
            "dpbilevel.calibrate(...).solver or call solver.with_sizes(sizes)."
        )
    zeros = jax.tree.map(jnp.zeros_like, jax.tree.map(jnp.asarray, coordinates))
    problem, w0 = worst_case(solver, x_in_records, zeros)
    claims = ledger_claims(solver.ledger(problem, solver.sizes))
    schemes = _sampling(solver)
    fixed = any(isinstance(scheme, FixedSize) for scheme in schemes)
    others = (-1.0 if fixed else 0.0) if others is None else others
    everyone = fixed or others != 0 or any(scheme.numbered for scheme in schemes)
    everyone |= isinstance(solver, GradientInformativeBO)  # has a row for each of them
    # At the planned sizes where they cost nothing: a defect may depend on them.
    alone = not everyone and all(isinstance(s, FullBatch) for s in schemes)
    small = solver if alone else _reduced(solver)
    absent = -1.0 if solver.neighbours is Neighbours.REPLACE_ONE else 0.0

    def data(person: str, first: float) -> PyTree:
        def records(role: str, size: int) -> Float[Array, " n"]:
            rows = jnp.full(size if everyone else 1, others * BEYOND)
            return rows.at[0].set(first * BEYOND) if person in (role, PERSON) else rows

        if not isinstance(small.sizes, Sizes):
            return records(RECORDS, small.sizes)
        if small.sizes.people is People.SHARED:
            return Levels.shared(records(PERSON, small.sizes.lower))
        upper, lower = (records(role, getattr(small.sizes, role)) for role in LEVELS)
        return Levels(upper, lower)

    def canary(person: str) -> Canary:
        pair = data(person, 1.0), data(person, absent)
        return Canary(problem, small, w0, *pair, claims[person])

    return {person: canary(person) for person in claims}


def check_solver(solver: Any, owner: str) -> None:
    """Raises `TypeError` if `solver` is a plan or no solver."""
    if isinstance(solver, Plan):
        raise TypeError(f"{owner}: got a Plan as solver; pass plan.solver.")
    _checks.instance(owner, AbstractSolver, solver=solver)


@functools.singledispatch
def worst_case(
    solver: AbstractSolver, x_in_records: Any, zeros: PyTree
) -> tuple[AbstractProblem, PyTree]:
    """The canary problem of a solver and its starting point, by the solver's class.

    By default they follow from the class of its problems. `worst_case.register` adds
    those of a class of one's own.

    Args:
        solver: A calibrated solver, bound to its sizes.
        x_in_records: Which levels' records meet x.
        zeros: A start of zeros in one variable.

    Raises:
        ValueError: No worst case is known.
    """
    if issubclass(FiniteSum, solver.problem_type):
        return _LINEAR, zeros
    if issubclass(VariationalInequality, solver.problem_type):
        return _PULL, zeros
    if solver.problem_type is SourceWeighting:
        return _SOURCES, (jnp.zeros(1), (zeros, jnp.asarray(_FAR)))
    if solver.problem_type is PenaltyTuning:
        groups = jax.tree.map(lambda v: np.zeros(jnp.shape(v), int), zeros)
        problem = penalty_tuning(_of_one_group, groups, bounds=(-80.0, -70.0))
        return problem, (jnp.full(1, -80.0), zeros)
    if not issubclass(BilevelProblem, solver.problem_type):
        raise ValueError(
            f"canaries: no worst case is known for {solver.problem_type.__name__}; "
            "audit on neighbouring data of your own with audit.trade_off."
        )
    if solver.basis is Basis.CONSTANTS:
        return _certified(optax.tree.size(zeros)), (zeros, zeros)
    declared = BilevelProblem(_plain, _plain, x_in_records=x_in_records)
    reads = tuple(role for role in LEVELS if declared.reads_x(role))
    problem = _bilevel(reads)
    if "lower" in reads:
        return problem, (zeros, (zeros, jnp.zeros(())))
    return problem, (zeros, zeros)


@worst_case.register
def _(solver: ExponentialMechanism, _, zeros):
    if solver.clip_range is None:
        return _bounded(optax.tree.size(zeros)), (zeros, zeros)
    return _LINEAR, zeros


@worst_case.register
def _(solver: RegularizedExponentialMechanism, _, zeros):
    return _LIPSCHITZ, zeros


@worst_case.register
def _(solver: InexactProximalPoint, _, zeros):
    return _pulled(solver, optax.tree.size(zeros)), zeros


@worst_case.register
def _(solver: AbstractAskTellSolver, _, zeros):
    return _SHIFTED, jnp.zeros(optax.tree.size(zeros))


@worst_case.register
def _(solver: RandomSearch, _, zeros):
    return _TILTED, jnp.zeros(optax.tree.size(zeros))


@worst_case.register
def _(solver: GradientInformativeBO, _, zeros):
    return _LINEAR, jnp.ravel(zeros)


_LINEAR = FiniteSum(lambda w, z: z * optax.tree.sum(w))
# The same with records of the length that is declared.
_LIPSCHITZ = FiniteSum(
    lambda w, z: jnp.clip(z, -1.0, 1.0) * optax.tree.sum(w),
    w_set=Ball(10.0),
    lipschitz=1.0,
    smoothness=0.0,
)

# Losses at points of a box: a record moves those of two points against each other, or
# all of them alike.
_TILTED = FiniteSum(lambda w, z: z * w[0], w_set=Box(-1.0, 1.0))
_SHIFTED = FiniteSum(lambda w, z: z * jnp.ones_like(w[0]), w_set=_TILTED.w_set)

_PULL = VariationalInequality(
    lambda w, z: jax.tree.map(lambda v: jnp.full_like(v, z), w)
)


def _pulled(solver: InexactProximalPoint, size: int) -> VariationalInequality:
    """Constant operators, on a ball that the noisy points hardly leave.

    Where nothing is clipped, records have the length that is declared.
    """
    length = BEYOND * math.sqrt(size)
    if solver.inner != "picard":
        length = float(solver.clip_norm)
    assert solver.sizes is not None
    batch = solver.sampling.denominator(solver.sizes)
    step = solver.clip_norm / (solver.strength * batch)
    noise = 2 * step * solver.release_noise.event().noise_multiplier
    steps = solver.num_steps
    radius = 10 * math.sqrt(size) * (noise * math.sqrt(steps) + step * steps)
    radius = 2.0 ** math.ceil(math.log2(radius))
    return _constant(length / math.sqrt(size) / BEYOND, length, radius)


@functools.cache
def _constant(unit: float, length: float, radius: float) -> VariationalInequality:
    return VariationalInequality(
        lambda w, z: jax.tree.map(lambda v: jnp.full_like(v, unit * z), w),
        w_set=Ball(radius),
        lipschitz=0.0,
        bound=length,
    )


@functools.cache
def _bilevel(reads: tuple[str, ...]) -> BilevelProblem:
    """The canary of the bilevel problems in which these levels' records meet x."""
    upper = _reading if "upper" in reads else _plain
    if "lower" not in reads:
        return BilevelProblem(upper, _plain, x_in_records=reads)
    # x meets lower records through the difference of two solutions, which has no sign
    # of its own: public terms drive a switch, part of y, to opposite ends of its box.
    return BilevelProblem(
        upper,
        _switched,
        upper_public=lambda x, y: -_PUSH_UPPER * y[1],
        lower_public=lambda x, y: _PUSH_LOWER * y[1],
        y_set=Product((Euclidean(), Box(-1.0, 1.0))),
        x_in_records=reads,
    )


@functools.cache
def _certified(size: int) -> BilevelProblem:
    r"""The canary of solvers that rest on constants: all of them are attained.

    $f = \langle z 1 + y, x \rangle$ and $g = \frac12 \|y\|^2 - \langle z 1, y \rangle$
    have the hypergradient $(\bar z_f + \bar z_g) 1$.
    """
    length = BEYOND * math.sqrt(size)
    return BilevelProblem(
        lambda x, y, z: z * optax.tree.sum(x),
        lambda x, y, z: -z * optax.tree.sum(y),
        upper_public=lambda x, y: optax.tree.vdot(x, y),
        lower_public=lambda x, y: 0.5 * optax.tree.norm(y, squared=True),
        x_in_records=("upper",),
        constants=SecondOrderConstants(
            strong_convexity=1.0,
            solution_radius=length,
            upper_x=2 * length,
            upper_x_spread=length,
            upper_y=length,  # whatever x is, it only meets zeros: G_xy and G_yyy
            upper_xx=0.0,
            upper_xy=1.0,
            upper_yy=0.0,
            lower_y=length,
            lower_xy=0.0,
            lower_yy=1.0,
            lower_yy_spread=0.0,
            lower_xy_in_x=0.0,
            lower_yy_in_x=0.0,
            lower_xy_in_y=0.0,
            lower_yy_in_y=0.0,
            per_record=True,
        ),
    )


@functools.cache
def _bounded(size: int) -> BilevelProblem:
    r"""The same hyper-objective $(\bar z_f + \bar z_g) \langle 1, x \rangle$ on a ball.

    Draws take the range of a score from constants that hold on the set.
    """
    problem = _certified(size)
    declared = problem.constants
    assert isinstance(declared, SecondOrderConstants)
    constants = dataclasses.replace(
        declared, upper_y=1.0, upper_y_spread=1.0, upper_x_spread=declared.upper_x
    )
    return dataclasses.replace(problem, x_set=Ball(1.0), constants=constants)


def _of_sources(y, z):
    """Linear in the block y[0] and, which only mixtures notice, in the anchor y[1].

    The anchor starts far from zero and hardly moves, so that a mixture's gradient in
    its coefficients has a known sign. A jump away from the start, which derivatives do
    not see, gives a known sign to every score.
    """
    block, anchor = y
    moved = optax.tree.norm(block, squared=True) > 0
    jump = jax.lax.stop_gradient(jnp.where(moved, _JUMP, 0.0))
    return z * (10 * optax.tree.sum(block) + anchor + jump)


def _of_one_group(y, z):
    """Linear. A group that is alone has scale 1, whatever its energy."""
    return z * optax.tree.sum(y)


# One source, which is kept whatever its score; a record of zero is of no source.
_SOURCES = source_weighting(_of_sources, 1, source=lambda z: -(z == 0).astype(int))


def _first(y: PyTree) -> PyTree:
    return y[0] if isinstance(y, tuple) else y


def _plain(x, y, z):
    return z * optax.tree.sum(_first(y))


def _reading(x, y, z):
    return z * (optax.tree.sum(x) + optax.tree.sum(_first(y)))


def _switched(x, y, z):
    switch = jax.lax.stop_gradient(y[1])
    return z * (optax.tree.sum(y[0]) + switch * optax.tree.sum(x))


def _sampling(solver: AbstractSolver) -> list[AbstractSampling]:
    """Every sampling scheme among the fields of a solver and its inner ones."""
    parts = jax.tree.leaves(solver, is_leaf=lambda v: isinstance(v, AbstractSampling))
    return [part for part in parts if isinstance(part, AbstractSampling)]


def _reduced(solver: AbstractSolver) -> AbstractSolver:
    """The solver at sizes and batch sizes divided by a common divisor."""
    sizes = solver.sizes
    counts = [sizes.upper, sizes.lower] if isinstance(sizes, Sizes) else [sizes]
    kinds = AbstractFixedBatch
    schemes = [s for s in _sampling(solver) if isinstance(s, kinds)]
    counts_of_all = [*counts, *(scheme.size for scheme in schemes)]
    common, fewest = math.gcd(*counts_of_all), min(counts_of_all)
    # Alone in a batch, a clip of the batch would pass for a clip of the record.
    divisor = max(d for d in _divisors(common) if d == 1 or fewest // d >= 2)
    small = jax.tree.map(
        lambda v: type(v)(v.size // divisor) if isinstance(v, kinds) else v,
        solver,
        is_leaf=lambda v: isinstance(v, kinds),
    )
    if isinstance(sizes, Sizes):
        upper, lower = (count // divisor for count in counts)
        return small.with_sizes(dataclasses.replace(sizes, upper=upper, lower=lower))
    return small.with_sizes(sizes // divisor)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return [*small, *(number // d for d in small)]
