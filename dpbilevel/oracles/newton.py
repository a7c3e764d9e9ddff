"""NON-PRIVATE Newton steps for the lower level, by truncated conjugate gradients."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from .._checks import Count, Positive
from ..sets import Euclidean
from .linear import ConjugateGradient
from .minimizers import AbstractLowerSolver, check_no_set, ended
from .objectives import AbstractObjective

Scalar = Float[Array, ""]

_DECREASE = 1e-4
_SHORTEST = 2.0**-30
# The fraction of the gradient that a step may leave before all records are used.
_CONTRACTION = 0.5


class NewtonCG(AbstractLowerSolver):
    r"""Newton's method, each system solved by truncated conjugate gradients.

    The system of a step is solved to $\min(0.5, \sqrt{\|\nabla_y g\|})$ of its
    right-hand side, which converges superlinearly, and no further than a tenth of the
    tolerance; a halving line search accepts a decrease of $10^{-4}$ of the predicted
    one. A try reads the records once: value, gradient and linearization together.

    For many records every 16th gives the Hessian at first, and all of them once a step
    leaves more than half of the gradient: fewer passes if those records are like the
    others, and Newton's method if they are not. Values and gradients, and hence
    the end of the solve, are always of all records.

    Args:
        num_steps: The most Newton steps. Static.
        tolerance: The norm $\|\nabla_y g\|_2$ that stops the solve.
        cg_steps: The most conjugate gradient steps in one of them. Static.

    References:
        Nocedal and Wright, "Numerical optimization", Algorithm 7.1; Byrd, Chin,
        Neveitt and Nocedal, "On the use of stochastic Hessian information in
        optimization methods for machine learning", Section 2.
    """

    num_steps: Count = eqx.field(static=True, default=50)
    tolerance: Positive = 1e-6
    cg_steps: Count = eqx.field(static=True, default=200)

    def minimize(self, objective, x, y0, y_set=Euclidean()):
        """Return the last Newton iterate and a `LowerInfo`; no set is allowed."""
        check_no_set("NewtonCG", y_set, objective)

        def unfinished(state):
            moves = (state.norm > self.tolerance) & ~state.is_stuck
            return moves & (state.steps < self.num_steps)

        # The first pass of the loop moves along nothing: it evaluates the start.
        dtype = jax.eval_shape(objective.value, x, y0).dtype
        nothing = jax.tree.map(jnp.zeros_like, y0)
        zero, infinite = jnp.zeros((), dtype), jnp.asarray(jnp.inf, dtype)
        steps = jnp.asarray(-1, jnp.int32)
        no = jnp.asarray(False)
        start = _Newton(y0, nothing, infinite, zero, infinite, zero + 1, steps, no, ~no)
        few = objective.subsample()  # for Hessian products alone
        state = jax.lax.while_loop(
            unfinished, lambda state: self._step(objective, few, x, state), start
        )
        return state.y, ended(state.norm, state.steps, self.tolerance)

    def _step(self, objective, few, x, state: "_Newton") -> "_Newton":
        """Return the state after trying one step length, accepted or not.

        One pass evaluates and linearizes.
        """
        y = jax.tree.map(
            lambda u, d: u + state.length.astype(u.dtype) * d, state.y, state.direction
        )
        value, slope, product = objective.linearize(x, y)
        norm = optax.tree.norm(slope)
        slack = 8 * jnp.finfo(value.dtype).eps * jnp.abs(state.value)
        decrease = _DECREASE * state.length * state.predicted

        def is_rounding():
            # Once values differ by rounding only, the gradient decides.
            return (state.predicted <= slack) & (norm >= state.norm)

        is_short = (value <= state.value - decrease + slack) & ~is_rounding()
        accepted = is_short | (state.steps < 0)
        is_rough = state.is_rough & (norm <= _CONTRACTION * state.norm)
        if few is not None:
            product = _alternative(is_rough, few, x, y, product)

        def move():
            direction, predicted = self._direction(product, slope, norm, accepted)
            one, steps, no = jnp.ones_like(value), state.steps + 1, jnp.asarray(False)
            rest = one, steps, no, is_rough
            return _Newton(y, direction, value, predicted, norm, *rest)

        def shorten():
            length = state.length / 2  # backtracking
            is_stuck = is_rounding() | (length < _SHORTEST)
            return state._replace(length=length, is_stuck=is_stuck)

        return optax.tree.where(accepted, move(), shorten())

    def _direction(self, product, slope, norm, accepted) -> tuple[PyTree, Scalar]:
        """Return the next step and the decrease it predicts."""
        wanted = jnp.minimum(0.5, jnp.sqrt(norm))  # superlinear
        # A residual far below the tolerance is as good as none.
        forcing = jnp.maximum(wanted, 0.1 * self.tolerance / norm)
        # No product is spent on a direction that is not taken: under `vmap` every
        # problem computes one.
        forcing = jnp.where(accepted & (norm > self.tolerance), forcing, 2)
        size = jnp.where(norm > 0, norm, 1)
        downhill = jax.tree.map(lambda s: -s / size.astype(s.dtype), slope)
        linear_solver = ConjugateGradient(num_steps=self.cg_steps, tolerance=forcing)
        direction = linear_solver.truncated(product, downhill)
        predicted = optax.tree.vdot(downhill, direction)
        # Without curvature along the gradient the solve makes no step.
        descends = jnp.greater(predicted, 0)
        direction = jax.tree.map(
            lambda d, s: size.astype(d.dtype) * jnp.where(descends, d, s),
            direction,
            downhill,
        )
        return direction, norm**2 * jnp.where(descends, predicted, 1)


class _Newton(NamedTuple):
    y: PyTree
    direction: PyTree
    value: Scalar
    predicted: Scalar
    norm: Scalar
    length: Scalar
    steps: Array
    is_stuck: Array
    is_rough: Array


def _alternative(is_rough, few: AbstractObjective, x, y, product) -> Callable:
    """Return the function of Hessian products of the subsample, or of all records."""

    def rough(v):
        return jax.jvp(lambda y: few.gradient(x, y), (y,), (v,))[1]

    return lambda v: jax.lax.cond(is_rough, rough, product, v)
