"""Steps along released gradients, and forecasts of steps that are too long."""

import math
from collections.abc import Callable
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from .. import _checks
from ..privacy.rows import ForecastRow
from ..sets import AbstractSet


class Rule(eqx.Module):
    """An optax optimizer as a static part of a solver."""

    optimizer: optax.GradientTransformation = eqx.field(static=True)


def as_rule(value: Any) -> Any:
    """Wrap an optax optimizer in a static `Rule`; return a number as it is.

    A number stays a leaf of the solver, so that changing it does not retrace.
    """
    return Rule(value) if isinstance(value, optax.GradientTransformation) else value


def check_step_sizes(owner: str, **values: Any) -> None:
    """Raise `ValueError` unless each value is a positive number or an optax `Rule`."""
    for name, value in values.items():
        if isinstance(value, Rule):
            continue
        if callable(value) or isinstance(value, str):
            raise ValueError(
                f"{owner}: {name} must be a number or an optimizer, such as "
                f"optax.adam(0.1) or optax.sgd(schedule), got {_checks.shown(value)}."
            )
        if value is None:
            raise ValueError(f"{owner}: give {name}=, a number or an optax optimizer.")
        _checks.positive(owner, **{name: value})


# The field of a solver, checked as `Checked` checks annotations.
StepSize = Annotated[float | optax.GradientTransformation, check_step_sizes]


class SkippedUpdates(eqx.Module):
    """Number of updates that were left out because their result was not finite.

    The state of a solver holds one for each variable that it moves.

    Privacy:
        The count is post-processing: whether an update is left out depends on released
        values alone.
    """

    count: Int[Array, ""] = eqx.field(default_factory=lambda: jnp.zeros((), jnp.int32))

    def plus(self, *counts: Int[Array, ""]) -> "SkippedUpdates":
        """Return a copy with `counts` more skipped updates."""
        return SkippedUpdates(sum(counts, self.count))


def rejected_updates(state: PyTree) -> Int[Array, ""]:
    """Return the number of updates skipped in a run so far, as counted in its state."""
    nodes = jax.tree.leaves(state, is_leaf=lambda v: isinstance(v, SkippedUpdates))
    counts = (v.count for v in nodes if isinstance(v, SkippedUpdates))
    return sum(counts, SkippedUpdates().count)


class Memory(eqx.Module):
    """State of one variable's updates: the optax state, the number of skipped ones."""

    rule: optax.OptState  # the state of the optax rule
    rejections: SkippedUpdates


# A step was too long if the gradient after it points back along it by more than this
# fraction of the slope before it, plus this number of standard deviations.
_OVERSHOT, _SURELY = 0.5, 3.0
# The most steps and the accuracy of a power iteration.
_ITERATIONS, _ACCURACY = 100, 1e-4


class Descent(eqx.Module):
    r"""Projected steps along released gradients, of one size or by an optax rule.

    $$w_{t+1} = \Pi_W(w_t - \eta\, q_t)$$

    Args:
        step_size: $\eta$, or a `Rule`.
        w_set: $W$.
        momentum: $\beta$ of Nesterov's accelerated steps of one size, in [0, 1):
            $v_t = \beta v_{t-1} + q_t$ and a step along $\beta v_t + q_t$; `None` for
            plain steps.
        prox: A proximal operator: its step, of the size $\eta$, precedes $\Pi_W$.
    """

    step_size: Any
    w_set: AbstractSet
    momentum: Any = None
    prox: Callable[[Any, PyTree], PyTree] | None = None

    @property
    def rule(self) -> optax.GradientTransformation:
        """Optax rule that turns released gradients into updates."""
        if isinstance(self.step_size, Rule):
            return self.step_size.optimizer
        return optax.sgd(self.step_size, self.momentum, nesterov=True)

    def init(self, w: PyTree) -> Memory:
        """Return the `Memory` before the first update, which starts at `w`."""
        return Memory(self.rule.init(w), SkippedUpdates())

    def update(
        self, gradient: PyTree, memory: Memory, w: PyTree
    ) -> tuple[PyTree, Memory]:
        """Return the iterate after a step, the old one if not finite, and the `Memory`.

        If the result is not finite, variable and rule stay as they were, and the
        skipped update is counted.
        """
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integers
            updates, state = self.rule.update(gradient, memory.rule, w)
        updates = optax.tree.cast_like(updates, w)
        if self.prox is None:
            new = self.w_set.step(w, updates)
        else:
            new = self.prox(self.step_size, optax.apply_updates(w, updates))
            new = self.w_set.project(new)
        old = w, memory.rule
        (w, state), rejections = finite_or((new, state), old, memory.rejections)
        return w, Memory(state, rejections)

    def curvature_limited(
        self, gradient: PyTree, public_gradient: Callable[[PyTree], PyTree], w: PyTree
    ) -> PyTree:
        r"""Return the gradient, shortened if a step would overshoot the public terms.

        $$q \min\Bigl(1, \frac{\|q\|^2}{\eta \langle q, \nabla^2 r(w)\, q
        \rangle}\Bigr)$$

        The step ends at or before the minimum of $\langle q, w \rangle$ plus the
        quadratic model of the public terms. Clipped gradients are bounded, but a public
        term with a curvature above $2 / \eta$ would make the iterates diverge. The
        steps of an optax rule, and before proximal steps, are taken as they are. Here
        $q$ is the released gradient plus the public one, $\nabla r$.

        Privacy:
            Post-processing of released values: free.
        """
        if isinstance(self.step_size, Rule) or self.prox is not None:
            return gradient
        _, bent = jax.jvp(public_gradient, (w,), (gradient,))
        with jax.numpy_dtype_promotion("standard"):
            length = optax.tree.norm(gradient, squared=True)
            curvature = self.step_size * optax.tree.vdot(gradient, bent)
        overshoots = curvature > length
        factor = jnp.where(overshoots, length / jnp.where(overshoots, curvature, 1), 1)
        return scaled(factor, gradient)


class LastStep(eqx.Module):
    r"""Last move of a descent, its slope and step factor, to detect a step too long.

    Attributes:
        move: $\Delta_t = w_t - w_{t-1}$.
        slope: $a_t = -\langle q_{t-1}, \Delta_t \rangle \ge 0$.
        factor: Factor of the step size.
    """

    move: PyTree
    slope: Float[Array, ""]
    factor: Float[Array, ""]

    def excess(self, gradient: PyTree, deviation: Any) -> Float[Array, ""]:
        r"""Return the factor by which the last step was too long, at least 2, else 1.

        With $r = \langle q_t, \Delta_t \rangle / a_t$ it is $\max(2, 1 + r)$ if $r >
        \tfrac12 + 3 s \|\Delta_t\| / a_t$, and else 1.

        On a quadratic function of curvature $h$ and without noise, $1 + r = \eta h$. So
        a step is too long from $\eta h = 3/2$ on, the shortened one is $1/h$ if $\eta h
        \ge 2$, and steps with $\eta h \le 1$ are left alone. An oscillation that
        clipping keeps from growing has $r \approx 1$. The noise of $q_t$ is independent
        of $\Delta_t$, and $s$ bounds its standard deviation in any direction. If the
        mean gradient does not point back, the result exceeds 1 with a probability of at
        most 0.0014.
        """
        with jax.numpy_dtype_promotion("standard"):  # leaves may be of several dtypes
            rise = optax.tree.vdot(gradient, self.move)
            noise = _SURELY * deviation * optax.tree.norm(self.move)
            is_long = rise > _OVERSHOT * self.slope + noise
            is_long &= jnp.isfinite(rise)  # a public gradient may be infinite
            ratio = rise / jnp.where(is_long, self.slope, 1)
            return jnp.where(is_long, jnp.maximum(2, 1 + ratio), 1)

    def then(
        self, gradient: PyTree, deviation: Any, w: PyTree, new: PyTree, mapping=None
    ) -> tuple[PyTree, "LastStep"]:
        r"""Return the pair of next iterate (`new`, or a step back) and its `LastStep`.

        After a proximal step $w_{t+1} = \mathrm{prox}_{\eta h}(w_t - \eta q_t)$ the
        gradient mapping $p_t = (w_t - w_{t+1}) / \eta$ takes the place of $q_t$, so
        $a_t = \|\Delta_t\|^2 / \eta$. With $\xi_t$ the subgradient of $h$ at $w_t$ that
        the last step chose, $p_{t-1} = q_{t-1} + \xi_t$. While the active set stays the
        same, $\langle p_t, \Delta_t \rangle = \langle q_t + \xi_t, \Delta_t \rangle$,
        and $r$ measures the curvature as before. The term $h$ also pulls back entries
        that noise moved off zero, so that the smaller excess of $p_t$ and $q_t$ counts.
        `new` is the iterate after the step along $q_t$, `mapping` is $p_t$, or `None`
        after a step that is not proximal.

        Privacy:
            Post-processing of released values: free.
        """
        excess = self.excess(gradient, deviation)
        if mapping is not None:
            excess = jnp.minimum(excess, self.excess(mapping, deviation))
            gradient = mapping
        moves = jax.tree.map(lambda a, b: a - b, new, w)

        def either(back, forth):
            return jnp.where(excess > 1, back, forth)

        def shortened(v):
            return v / excess.astype(v.dtype)

        move = jax.tree.map(lambda m, f: either(shortened(m), f), self.move, moves)
        back = jax.tree.map(lambda v, m: v - (m - shortened(m)), w, self.move)
        with jax.numpy_dtype_promotion("standard"):
            slope = jnp.negative(optax.tree.vdot(gradient, moves))
        slope = either(shortened(self.slope), slope.astype(self.slope.dtype))
        last = LastStep(move, slope, shortened(self.factor))
        return jax.tree.map(either, back, new), last


def scaled(factor: Any, tree: PyTree) -> PyTree:
    """Return a pytree times a scalar, each leaf in its own dtype."""
    return jax.tree.map(lambda v: jnp.asarray(factor, v.dtype) * v, tree)


def add_scaled(tree: PyTree, factor: Any, direction: PyTree) -> PyTree:
    """Return `tree + factor * direction`, each leaf in the dtype of `direction`."""
    return optax.tree.add(tree, scaled(factor, direction))


def finite_or(
    new: PyTree, old: PyTree, rejections: SkippedUpdates
) -> tuple[PyTree, SkippedUpdates]:
    """Return `new` if finite, else `old`, and the updated `SkippedUpdates`.

    The squares of `new` must be finite too, for norms and averages of iterates. The
    state of an optimizer may start at infinity: only values that were finite must stay
    finite.
    """

    def fits_one(new: Array, old: Array) -> Bool[Array, ""]:
        if not jnp.issubdtype(new.dtype, jnp.inexact):
            return jnp.asarray(True)
        return jnp.all(jnp.isfinite(new * new) | ~jnp.isfinite(old * old))

    pairs = zip(*map(jax.tree.leaves, (new, old)), strict=True)
    fits = jnp.stack([fits_one(a, b) for a, b in pairs]).all()
    kept = jax.tree.map(lambda a, b: jnp.where(fits, a, b), new, old)
    return kept, SkippedUpdates(rejections.count + (~fits).astype(jnp.int32))


def overshooting_row(
    step_size: Any, public_gradient: Callable[[PyTree], PyTree], w0: PyTree
) -> tuple[ForecastRow, ...]:
    """Return a tuple: a `ForecastRow` if steps overshoot the public terms, or empty.

    Descent on a function of curvature $h$ diverges along steps longer than $2 / h$.
    `Descent.curvature_limited` then shortens the steps in all coordinates. Nothing is
    known about the steps of a `Rule`.
    """
    if isinstance(step_size, Rule):
        return ()
    w0 = jax.tree.map(float_array, w0)
    curvature, step_size = largest_curvature(public_gradient, w0), float(step_size)
    if step_size * curvature <= 2:
        return ()
    known: Any = {"step_size": step_size, "public_curvature": curvature}
    return (ForecastRow("steps", from_start=True, **known),)


def largest_curvature(gradient: Callable[[PyTree], PyTree], w: PyTree) -> float:
    """Estimate the largest eigenvalue of a Hessian from below; infinity if not finite.

    The result is infinity if the derivative of the gradient is not finite at `w`.
    """
    if not jax.tree.leaves(w):
        return 0.0

    # Compiled, as the steps of the solver are.
    @jax.jit
    def farthest_from_minus(shift: Float[Array, ""], w: PyTree) -> Float[Array, ""]:
        flat, unravel = ravel_pytree(w)

        def product(v):
            return ravel_pytree(jax.jvp(gradient, (w,), (unravel(v),))[1])[0]

        def unit(v):
            # The largest entry divides first: squares would overflow.
            largest = jnp.max(jnp.abs(v))
            v = v / jnp.where(largest > 0, largest, 1)
            return v / jnp.where(largest > 0, jnp.linalg.norm(v), 1)

        def moves(state):
            count, _, before, found = state
            moved = jnp.abs(found - before) > _ACCURACY * jnp.abs(found)
            return (count < 2) | ((count < _ITERATIONS) & moved)  # stops at NaN

        def iterate(state):
            count, v, _, before = state
            along = product(v)
            v_next = unit(along + shift.astype(v.dtype) * v)
            return count + 1, v_next, before, v @ along

        # Entries of different sizes and signs in every leaf.
        start = unit(jnp.cos(jnp.arange(flat.size, dtype=flat.dtype)))
        zero = jnp.zeros((), flat.dtype)
        return jax.lax.while_loop(moves, iterate, (0, start, zero, zero))[-1]

    with jax.numpy_dtype_promotion("standard"):  # leaves may be of several dtypes
        found = float(farthest_from_minus(jnp.asarray(0.0), w))
        if found < 0:  # the largest in absolute value; a shift finds the largest one
            found = float(farthest_from_minus(jnp.asarray(-found), w))
    return found if math.isfinite(found) else math.inf


def float_array(value: Any) -> jax.Array:
    """Convert a value to a JAX array of floats, so that derivatives exist."""
    value = jnp.asarray(value)
    floating = jnp.issubdtype(value.dtype, jnp.inexact)
    return value if floating else value.astype(jnp.result_type(float))
