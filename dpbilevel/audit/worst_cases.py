"""Worst-case problems: a record is its own gradient, the same at every step."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from ..applications.penalties import PenaltyTuning, penalty_tuning
from ..applications.recalibration import Recalibration
from ..applications.sources import SourceWeighting, source_weighting
from ..bilevel import BilevelProblem, SecondOrderConstants
from ..core.problem import AbstractProblem
from ..core.solver import AbstractSolver
from ..draws.exponential import ExponentialMechanism, RegularizedExponentialMechanism
from ..draws.localized import LocalizedDraws
from ..games.bilinear import BilinearGame, NoisyPayoff
from ..games.group_descent import GroupDescent
from ..games.groups import group_fair
from ..games.problem import VariationalInequality
from ..games.proximal_point import InexactProximalPoint
from ..onelevel import AdaptiveClipGD, AdaptiveGD, FiniteSum
from ..privacy.per_example.clipping import Basis
from ..privacy.queries import LEVELS
from ..search.base import AbstractAskTellSolver
from ..search.gibo import GradientInformativeBO
from ..search.random_search import RandomSearch
from ..search.tuned_training import TunedTraining
from ..sets import Ball, Box, Euclidean, Product

# Gradient of a record, far beyond any clip norm.
BEYOND = 1e6
# Slopes of public terms that dwarf any noise and, over any penalty, each other.
_PUSH_LOWER, _PUSH_UPPER = 1e6, 1e15
# Initial point whose sign noise does not change.
_AHEAD = 1e3
# Initial point and jump of a loss that dwarf any noise.
_FAR, _JUMP = 1e6, 1e15


@functools.singledispatch
def worst_case(
    solver: AbstractSolver, x_in_records: Any, zeros: PyTree
) -> tuple[AbstractProblem, PyTree]:
    """Return the canary problem for a solver, and its initial point.

    By default both follow from the class of its problems. `worst_case.register` adds
    those of another class.

    Args:
        solver: A calibrated solver, bound to its sizes.
        x_in_records: The levels whose losses read x.
        zeros: Zeros of the shapes of one variable.

    Raises:
        ValueError: No worst case is known.
    """
    if issubclass(FiniteSum, solver.problem_type):
        return _LINEAR, zeros
    if issubclass(VariationalInequality, solver.problem_type):
        return _PULL, zeros
    if solver.problem_type is SourceWeighting:
        return _SOURCES, (jnp.zeros(1), (zeros, jnp.asarray(_FAR)))
    if getattr(solver, "first", solver).problem_type is SourceWeighting:
        y = jnp.append(jnp.ravel(zeros), _FAR)
        return _SOURCES_OF_ARRAYS, (jnp.zeros(1), y)
    if solver.problem_type is PenaltyTuning:
        groups = jax.tree.map(lambda v: np.zeros(jnp.shape(v), int), zeros)
        # A group that is alone has scale 1 for every energy.
        problem = penalty_tuning(_LINEAR.loss, groups, bounds=(-80.0, -70.0))
        return problem, (jnp.full(1, -80.0), zeros)
    if not issubclass(BilevelProblem, solver.problem_type):
        raise ValueError(
            "canaries: no worst case is known for this problem. Use audit.trade_off."
        )
    if solver.basis is Basis.CONSTANTS:
        return _certified(optax.tree.size(zeros)), (zeros, zeros)
    declared = BilevelProblem(_plain, _plain, x_in_records=x_in_records)
    reads = tuple(role for role in LEVELS if declared.reads_x(role))
    problem = _bilevel(reads)
    if isinstance(getattr(solver, "then", None), Recalibration):
        # Slope along a model whose sign noise does not change.
        return problem, (zeros, jax.tree.map(lambda v: v + _AHEAD, zeros))
    if "lower" in reads:
        return problem, (zeros, (zeros, jnp.zeros(())))
    return problem, (zeros, zeros)


_LINEAR = FiniteSum(lambda w, z: z * optax.tree.sum(w))
# The same; a record of zero counts for nothing, not even for its coordinate.
_PRESENT = FiniteSum(lambda w, z: z * (z / z) * optax.tree.sum(w))
# The same with records of the length that is declared.
_LIPSCHITZ = FiniteSum(
    lambda w, z: jnp.clip(z, -1.0, 1.0) * optax.tree.sum(w),
    w_set=Ball(10.0),
    lipschitz=1.0,
    smoothness=0.0,
)

# Losses at points of a box: a record moves the losses of two points in opposite
# directions, or all losses alike.
_TILTED = FiniteSum(lambda w, z: z * w[0], w_set=Box(-1.0, 1.0))
_SHIFTED = FiniteSum(lambda w, z: z * jnp.ones_like(w[0]), w_set=_TILTED.w_set)

_PULL = VariationalInequality(
    lambda w, z: jax.tree.map(lambda v: jnp.full_like(v, z), w)
)


# All coefficients are the record.
_PAYOFF = BilinearGame(lambda z: jnp.full((2, 2), z))

# Gradients and losses have the sign of the record; one group is the worst case.
_ONE_GROUP = group_fair(
    lambda x, z: z * (optax.tree.sum(x) + _JUMP), (1.0,), group=lambda z: jnp.int32(0)
)


def _pulled(solver: InexactProximalPoint, zeros: PyTree) -> VariationalInequality:
    """Return the canary `VariationalInequality`: constant operators, a large ball."""
    size = optax.tree.size(zeros)
    assert solver.sizes is not None
    batch = solver.sampling.denominator(solver.sizes)
    step = solver.clip_norm / (solver.strength * batch)
    noise = 2 * step * solver.release_noise.event().noise_multiplier
    steps = solver.num_steps
    radius = 10 * math.sqrt(size) * (noise * math.sqrt(steps) + step * steps)
    radius = 2.0 ** math.ceil(math.log2(radius))
    return _constant(BEYOND * math.sqrt(size), radius)


@functools.cache
def _constant(length: float, radius: float) -> VariationalInequality:
    known: Any = {"w_set": Ball(radius), "lipschitz": 0.0, "bound": length}
    return dataclasses.replace(_PULL, **known)


@functools.cache
def _bilevel(reads: tuple[str, ...]) -> BilevelProblem:
    """Return the canary `BilevelProblem` whose losses of levels `reads` read x."""
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
    r"""Return a canary `BilevelProblem` with constants, all of which are attained.

    $f = \langle z 1 + y, x \rangle$ and $g = \frac12 \|y\|^2 - \langle z 1, y \rangle$
    have the hypergradient $(\bar z_f + \bar z_g) 1$.
    """
    length = BEYOND * math.sqrt(size)
    blocks = "lower_xy_in_x lower_yy_in_x lower_xy_in_y lower_yy_in_y lower_yy_spread"
    zero: Any = dict.fromkeys(f"upper_xx upper_yy lower_xy {blocks}".split(), 0.0)
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
            upper_xy=1.0,
            lower_y=length,
            lower_yy=1.0,
            per_record=True,
            **zero,
        ),
    )


@functools.cache
def _bounded(size: int) -> BilevelProblem:
    """Return a canary `BilevelProblem` on the unit ball, with constants for draws.

    Draws take the range of a score from constants that hold on the set.
    """
    problem = _certified(size)
    declared = problem.constants
    assert isinstance(declared, SecondOrderConstants)
    spreads = {"upper_y_spread": 1.0, "upper_x_spread": declared.upper_x}
    constants = dataclasses.replace(declared, upper_y=1.0, **spreads)
    return dataclasses.replace(problem, x_set=Ball(1.0), constants=constants)


def _selecting(solver: TunedTraining, zeros: PyTree) -> BilevelProblem:
    """Return a canary `BilevelProblem` in which a record moves both loss and model.

    The weight is the one at which both leak the most.
    """
    first, sizes = solver.candidates[0], solver.sizes
    assert sizes is not None
    assert isinstance(first.step_size, float)
    mechanisms = solver.release_noise, first.run_noise
    loss_noise, noise = (v.event().noise_multiplier for v in mechanisms)
    step = first.step_size * float(first.clip_norm) / sizes.lower
    of_model = noise * step * first.num_steps * optax.tree.size(zeros) ** 0.5
    of_loss = loss_noise * float(solver.clip_range / 2)
    return _selection(of_loss / sizes.upper / of_model * (loss_noise / noise))


@functools.cache
def _selection(weight: float) -> BilevelProblem:
    return BilevelProblem(
        lambda x, y, z: z,
        _plain,
        upper_public=lambda x, y: -weight * optax.tree.sum(y),
        x_in_records=False,
    )


def _of_sources(y, z):
    """Return the canary's loss of record z, linear in block y[0] and anchor y[1].

    Only mixtures notice the anchor. It starts far from zero and hardly moves, so that a
    mixture's gradient in its coefficients has a known sign. A jump away from the start,
    which derivatives do not see, gives a known sign to every score.
    """
    block, anchor = y
    moved = optax.tree.norm(block, squared=True) > 0
    jump = jax.lax.stop_gradient(jnp.where(moved, _JUMP, 0.0))
    return z * (10 * optax.tree.sum(block) + anchor + jump)


# One source, which is kept whatever its score; a record of zero is of no source. The
# anchor of one array is its last entry.
_SOURCES, _SOURCES_OF_ARRAYS = (
    source_weighting(loss, 1, source=lambda z: -(z == 0).astype(int))
    for loss in (_of_sources, lambda y, z: _of_sources((y[:-1], y[-1]), z))
)


def _first(y: PyTree) -> PyTree:
    return y[0] if isinstance(y, tuple) else y


def _plain(x, y, z):
    return z * optax.tree.sum(_first(y))


def _square(x, y, z):
    return z * (z / z) * jnp.sum(y * y) / 2


# Curvatures of both signs; a record of zero counts for nothing.
_CURVED = BilevelProblem(_plain, _square, x_in_records=False)


def _reading(x, y, z):
    return z * (optax.tree.sum(x) + optax.tree.sum(_first(y)))


def _switched(x, y, z):
    switch = jax.lax.stop_gradient(y[1])
    return z * (optax.tree.sum(y[0]) + switch * optax.tree.sum(x))


def _flat(zeros: PyTree) -> jax.Array:
    return jnp.zeros(optax.tree.size(zeros))


def _draws(solver: ExponentialMechanism, zeros: PyTree) -> tuple[Any, PyTree]:
    if solver.clip_range is None:
        return _bounded(optax.tree.size(zeros)), (zeros, zeros)
    return _LINEAR, zeros


# Problem and initial point by class of solver, from the solver and zeros.
_CASES: dict[type[AbstractSolver], Callable[[Any, PyTree], tuple[Any, PyTree]]] = {
    Recalibration: lambda _, zeros: (_CURVED, (zeros, optax.tree.ones_like(zeros))),
    ExponentialMechanism: _draws,
    AdaptiveClipGD: lambda _, zeros: (_PRESENT, zeros),
    AdaptiveGD: lambda _, zeros: (_PRESENT, zeros),
    RegularizedExponentialMechanism: lambda _, zeros: (_LIPSCHITZ, zeros),
    LocalizedDraws: lambda _, zeros: (_LIPSCHITZ, zeros),
    InexactProximalPoint: lambda solver, zeros: (_pulled(solver, zeros), zeros),
    NoisyPayoff: lambda _, zeros: (_PAYOFF, (jnp.full(2, 0.5), jnp.full(2, 0.5))),
    GroupDescent: lambda _, zeros: (_ONE_GROUP, (zeros, jnp.ones(1))),
    AbstractAskTellSolver: lambda _, zeros: (_SHIFTED, _flat(zeros)),
    RandomSearch: lambda _, zeros: (_TILTED, _flat(zeros)),
    GradientInformativeBO: lambda _, zeros: (_LINEAR, jnp.ravel(zeros)),
    TunedTraining: lambda solver, zeros: (_selecting(solver, zeros), (zeros, zeros)),
}
for _kind, _case in _CASES.items():
    worst_case.register(_kind, lambda solver, _, zeros, case=_case: case(solver, zeros))
