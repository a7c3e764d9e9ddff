"""NON-PRIVATE solvers of the lower level: gradient steps, L-BFGS and Newton steps."""

import abc
import functools
import math
from typing import Annotated, Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from .. import _checks
from .._checks import Checked, Count, Positive, positive
from ..core.descent import add_scaled, scaled
from ..sets import AbstractSet, Euclidean
from .linear import ConjugateGradient
from .objectives import AbstractObjective

Scalar = Float[Array, ""]


class LowerInfo(NamedTuple):
    r"""Outcome of a lower-level solve: gradient norm, steps, and whether converged.

    Attributes:
        gradient_norm: $\|\nabla_y g(x, y)\|_2$ at the answer; with a set or a
            proximal term, the norm of the gradient mapping $(y - P(y - s \nabla_y g)) /
            s$.
        num_steps: The steps taken.
        converged: Whether `gradient_norm` is at most the solver's tolerance. A solver
            without one never claims it.
    """

    gradient_norm: Scalar
    num_steps: Int[Array, ""]
    converged: Bool[Array, ""]


class AbstractLowerSolver(Checked):
    """Solver that minimizes an objective over y at a fixed x."""

    @abc.abstractmethod
    def minimize(
        self,
        objective: AbstractObjective,
        x: PyTree,
        y0: PyTree,
        y_set: AbstractSet = Euclidean(),
    ) -> tuple[PyTree, LowerInfo]:
        """Return the minimizer over a set, and a `LowerInfo` on how the solve ended.

        Args:
            objective: The objective, from `lower_objective`.
            x: The upper variable.
            y0: The initial point, a pytree of arrays of floats.
            y_set: The feasible set.

        Raises:
            ValueError: The solver cannot keep to `y_set`.
        """


class AcceleratedGradient(AbstractLowerSolver):
    r"""Nesterov's accelerated gradient method, projected onto the set.

    With a term of `proximal` its proximal step comes before the projection $P$ (FISTA).
    $y_{k+1} = P(z_k - s \nabla_y g(z_k))$ and $z_{k+1} = y_{k+1} + \beta_k (y_{k+1} -
    y_k)$. Without a `tolerance` exactly `num_steps` gradients are taken, whatever the
    records are, and forward and reverse mode go through the steps.

    Args:
        num_steps: The most steps; without `tolerance`, the number of steps. Static.
        step_size: $s$. `None` searches: from 1 on, halved until the quadratic bound of
            smoothness $1/s$ holds; a try that fails still is a step.
        momentum: $\beta$ in $[0, 1)$; `None` lets $\beta_k$ grow as for convex
            functions and restarts it when the momentum points uphill.
        tolerance: The norm of the gradient mapping at $z_k$ that stops the solve.

    References:
        Nesterov, "Introductory lectures on convex optimization", 2.2.20; Beck and
        Teboulle, "A fast iterative shrinkage-thresholding algorithm"; O'Donoghue and
        Candès, "Adaptive restart for accelerated gradient schemes", gradient scheme.
    """

    num_steps: Count = eqx.field(static=True, default=5000)
    step_size: Annotated[float | Scalar, positive] | None = None
    momentum: Annotated[float | Scalar, _checks.proper_fraction] | None = None
    tolerance: Positive | None = 1e-6

    def __check_init__(self):
        if self.tolerance is None and self.step_size is None:
            raise ValueError(
                "AcceleratedGradient: a fixed number of steps (tolerance=None) needs a "
                "step_size. See AcceleratedGradient.from_constants."
            )

    @classmethod
    def from_constants(
        cls, num_steps: int, *, smoothness: float, strong_convexity: float
    ) -> Self:
        r"""Return a solver with a fixed number of steps, sized by the constants.

        They have $s = 1/L$ and $\beta = (\sqrt\kappa - 1) / (\sqrt\kappa + 1)$ with
        $\kappa = L / \mu$. From an initial point at distance $D$: $g(y_k) - g(y^*) \le
        \frac{L + \mu}{2} D^2 (1 - 1/\sqrt\kappa)^k$, hence $\|y_k - y^*\| \le
        \sqrt{\kappa + 1}\, D\, (1 - 1 / \sqrt\kappa)^{k/2}$.

        Args:
            num_steps: $k$.
            smoothness: $L$ of $g(x, \cdot)$.
            strong_convexity: $\mu \le L$ of $g(x, \cdot)$.

        Raises:
            ValueError: A constant out of range.
        """
        _checks.positive(cls.__name__, smoothness=smoothness)
        _checks.positive(cls.__name__, strong_convexity=strong_convexity)
        if strong_convexity > smoothness:
            text = f"{cls.__name__}: strong_convexity={strong_convexity} exceeds"
            raise ValueError(f"{text} smoothness={smoothness}; no function has both.")
        root = math.sqrt(smoothness / strong_convexity)
        return cls(num_steps, 1 / smoothness, (root - 1) / (root + 1), None)

    def minimize(self, objective, x, y0, y_set=Euclidean()):
        """Return the last iterate, started at `y0` projected, and a `LowerInfo`."""
        y0 = y_set.project(y0)  # a feasible start
        dtype = jnp.result_type(*jax.tree.leaves(y0))
        first = 1.0 if self.step_size is None else self.step_size
        size, zero = jnp.asarray(first, dtype), jnp.zeros((), dtype)
        start = _Accelerated(y0, y0, size, zero + 1, zero + jnp.inf)

        def step(state):
            return self._step(objective, x, state, y_set)

        tolerance = self.tolerance
        if tolerance is None:

            def body(state, _):
                return step(state), None

            body = jax.checkpoint(body, prevent_cse=False)  # keeps the iterates alone
            state = jax.lax.scan(body, start, length=self.num_steps)[0]
            steps = jnp.asarray(self.num_steps, jnp.int32)
        else:
            steps, state = jax.lax.while_loop(
                lambda c: (c[0] < self.num_steps) & (c[1].mapping > tolerance),
                lambda c: (c[0] + 1, step(c[1])),
                (jnp.asarray(0, jnp.int32), start),
            )
        slope = objective.gradient(x, state.y)
        _, norm = mapping(objective, x, state.y, slope, state.step_size, y_set)
        return state.y, ended(norm, steps, self.tolerance)

    def _step(self, objective, x, state: "_Accelerated", y_set) -> "_Accelerated":
        z, size = state.z, state.step_size
        if self.step_size is not None:
            slope = objective.gradient(x, z)
            y, length = mapping(objective, x, z, slope, size, y_set)
            return self._accelerate(state, y, length)
        value, slope = objective.value_and_gradient(x, z)
        y, length = mapping(objective, x, z, slope, size, y_set)
        move = optax.tree.sub(y, z)
        square = optax.tree.vdot(move, move) / (2 * size)
        bound = value + optax.tree.vdot(slope, move) + square
        trial = objective.value(x, y)
        # Rounding alone must not halve the step for ever.
        slack = 8 * jnp.finfo(trial.dtype).eps * jnp.abs(value)
        fits = trial <= bound + slack
        accepted = self._accelerate(state, y, length)
        refused = state._replace(step_size=size / 2)  # a try that fails moves nothing
        return optax.tree.where(fits, accepted, refused)

    def _accelerate(self, state: "_Accelerated", y, mapping) -> "_Accelerated":
        move = optax.tree.sub(y, state.y)
        if self.momentum is not None:
            momentum, age = jnp.asarray(self.momentum, state.age.dtype), state.age
        else:
            uphill = jnp.greater(optax.tree.vdot(optax.tree.sub(state.z, y), move), 0)
            old = jnp.where(uphill, 1, state.age)  # the restart
            age = (1 + jnp.sqrt(1 + 4 * old**2)) / 2
            momentum = (old - 1) / age  # beta_k
        z = add_scaled(y, momentum, move)
        return _Accelerated(y, z, state.step_size, age, mapping)


class LBFGS(AbstractLowerSolver):
    r"""Limited-memory BFGS with a zoom line search, by `optax.lbfgs`.

    Args:
        num_steps: The most steps. Static.
        tolerance: The norm $\|\nabla_y g\|_2$ that stops the solve.
        memory_size: The number of pairs in memory. Static.
    """

    num_steps: Count = eqx.field(static=True, default=500)
    tolerance: Positive = 1e-6
    memory_size: Count = eqx.field(static=True, default=10)

    def minimize(self, objective, x, y0, y_set=Euclidean()):
        """Return the last quasi-Newton iterate and a `LowerInfo`; no set is allowed."""
        check_no_set("LBFGS", y_set, objective)
        rule = optax.lbfgs(memory_size=self.memory_size)
        value_fn = functools.partial(objective.value, x)

        def step(carry):
            steps, y, value, slope, memory = carry
            at: Any = {"value": value, "grad": slope, "value_fn": value_fn}
            updates, memory = rule.update(slope, memory, y, **at)
            y = optax.apply_updates(y, updates)
            return steps + 1, y, *objective.value_and_gradient(x, y), memory

        def unfinished(carry):
            steep = optax.tree.norm(carry[3]) > self.tolerance
            return (carry[0] < self.num_steps) & steep

        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            first = objective.value_and_gradient(x, y0)
            start = jnp.asarray(0, jnp.int32), y0, *first, rule.init(y0)
            steps, y, _, slope, _ = jax.lax.while_loop(unfinished, step, start)
        return y, ended(optax.tree.norm(slope), steps, self.tolerance)


class _Accelerated(NamedTuple):
    y: PyTree
    z: PyTree
    step_size: Scalar
    age: Scalar
    mapping: Scalar


def check_no_set(owner: str, y_set: AbstractSet, objective: AbstractObjective) -> None:
    """Raise `ValueError` if there is a set to keep y in, or a proximal term."""
    if objective.prox is not None or not isinstance(y_set, Euclidean):
        raise ValueError(
            f"{owner}: cannot keep y in a set or make proximal steps. Pass "
            "AcceleratedGradient(), or use Euclidean() and a smooth public term."
        )


def ended(norm: Scalar, steps: Array, tolerance: float | None) -> LowerInfo:
    """Return the `LowerInfo` of a solve, converged if `norm` is at most `tolerance`."""
    converged = jnp.asarray(False) if tolerance is None else norm <= tolerance
    return LowerInfo(norm, steps, converged)


def mapping(objective, x, z, slope, size, y_set) -> tuple[PyTree, Scalar]:
    """Return the proximal, projected step from `z`, and the gradient mapping's norm."""
    moved = add_scaled(z, -size, slope)
    if objective.prox is not None:
        moved = objective.prox(size, x, moved)
    elif isinstance(y_set, Euclidean):
        return moved, optax.tree.norm(slope)
    y = y_set.project(moved)
    return y, optax.tree.norm(optax.tree.sub(z, y)) / size


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
        y = add_scaled(state.y, state.length, state.direction)
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

            def rough(v):  # a Hessian product of the subsample
                return jax.jvp(lambda y: few.gradient(x, y), (y,), (v,))[1]

            product = functools.partial(jax.lax.cond, is_rough, rough, product)

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
        """Return the truncated Newton step and the decrease that it predicts."""
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
        direction = scaled(size, optax.tree.where(descends, direction, downhill))
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
