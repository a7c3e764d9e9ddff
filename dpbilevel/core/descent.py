"""How a released gradient moves a variable: optax rules, projected onto a set."""

from collections.abc import Callable
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from .. import _checks
from ..sets import AbstractSet


class Rule(eqx.Module):
    """An optax optimizer as a static part of a solver."""

    optimizer: optax.GradientTransformation = eqx.field(static=True)


def as_rule(value: Any) -> Any:
    """The converter of `StepSize` fields: an optimizer becomes a static part.

    A number stays a leaf of the solver, so that changing it does not retrace.
    """
    return Rule(value) if isinstance(value, optax.GradientTransformation) else value


def check_step_sizes(owner: str, **values: Any) -> None:
    """Raises `ValueError` unless every value is a positive number or an optimizer."""
    for name, value in values.items():
        if isinstance(value, Rule):
            continue
        if callable(value) or isinstance(value, str):
            raise ValueError(
                f"{owner}: {name} must be a positive number or an optax optimizer such "
                f"as optax.adam(0.1), got {_checks.shown(value)}. Pass a schedule as "
                f"{name}=optax.sgd(schedule)."
            )
        if value is None:
            raise ValueError(
                f"{owner}: give {name}, a positive number or an optax optimizer."
            )
        _checks.positive(owner, **{name: value})


# The field of a solver, checked as `Checked` checks annotations.
StepSize = Annotated[float | optax.GradientTransformation, check_step_sizes]


class SkippedUpdates(eqx.Module):
    """How many updates were left out because their result was not finite.

    A solver's state holds one for each variable it moves; `rejected_updates` adds up.

    Privacy:
        Counted from released values alone, which makes the count post-processing: what
        decides about an update must be released.
    """

    count: Int[Array, ""]

    @classmethod
    def none(cls) -> "SkippedUpdates":
        """Before the first update."""
        return cls(jnp.zeros((), jnp.int32))

    def plus(self, *counts: Int[Array, ""]) -> "SkippedUpdates":
        """With further updates that were left out."""
        return SkippedUpdates(sum(counts, self.count))


def rejected_updates(state: PyTree) -> Int[Array, ""]:
    """How many updates were left out on the way to a state."""
    nodes = jax.tree.leaves(state, is_leaf=_counts)
    return SkippedUpdates.none().plus(*(v.count for v in nodes if _counts(v))).count


class Memory(eqx.Module):
    """What one variable's updates remember."""

    rule: optax.OptState  # the state of the optax rule
    rejections: SkippedUpdates


# A step was too long if the gradient after it points back along it with more than this
# share of the slope before it, and by so many standard deviations more.
_OVERSHOT, _SURELY = 0.5, 3.0


class Descent(eqx.Module):
    r"""Projected steps along released gradients, of one size or by an optax rule.

    $$w_{t+1} = \Pi_W(w_t - \eta\, q_t)$$

    Args:
        step_size: $\eta$, or a `Rule`.
        w_set: $W$.
        momentum: $\beta$ of Nesterov's accelerated steps of one size, in [0, 1):
            $v_t = \beta v_{t-1} + q_t$ and a step along $\beta v_t + q_t$; `None` for
            plain steps, which remember nothing.
    """

    step_size: Any
    w_set: AbstractSet
    momentum: Any = None

    @property
    def rule(self) -> optax.GradientTransformation:
        """Optax rule that turns released gradients into updates."""
        if isinstance(self.step_size, Rule):
            return self.step_size.optimizer
        return optax.sgd(self.step_size, self.momentum, nesterov=True)

    def init(self, w: PyTree) -> Memory:
        """What is remembered before the first update, which starts at `w`."""
        return Memory(self.rule.init(w), SkippedUpdates.none())

    def update(
        self, gradient: PyTree, memory: Memory, w: PyTree
    ) -> tuple[PyTree, Memory]:
        """One update of $w_t$ by the released gradient $q_t$.

        Where the result is not finite, variable and rule stay as they were: the update
        is left out and counted.
        """
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integers
            updates, state = self.rule.update(gradient, memory.rule, w)
        new = self.w_set.project(optax.apply_updates(w, updates))
        (w, state), rejections = finite_or(
            (new, state), (w, memory.rule), memory.rejections
        )
        return w, Memory(state, rejections)

    def curvature_limited(
        self, gradient: PyTree, public_gradient: Callable[[PyTree], PyTree], w: PyTree
    ) -> PyTree:
        r"""The gradient, shorter where a step overshoots the public terms.

        $$q \min\Bigl(1, \frac{\|q\|^2}{\eta \langle q, \nabla^2 r(w)\, q
        \rangle}\Bigr)$$

        The step ends where $\langle q, w \rangle$ plus the quadratic model of the
        public terms is least, or before: gradients of records are clipped and only pull
        so far, but a public term that is curved by more than $2 / \eta$ would drive the
        iterates apart without limit. The steps of an optax rule are taken as they are.

        Args:
            gradient: $q$, the released gradient plus the public one.
            public_gradient: $\nabla r$.
            w: Where the step starts.

        Privacy:
            Post-processing of released values: free.
        """
        if isinstance(self.step_size, Rule):
            return gradient
        _, bent = jax.jvp(public_gradient, (w,), (gradient,))
        with jax.numpy_dtype_promotion("standard"):
            length = optax.tree.norm(gradient, squared=True)
            curvature = self.step_size * optax.tree.vdot(gradient, bent)
        overshoots = curvature > length
        factor = jnp.where(overshoots, length / jnp.where(overshoots, curvature, 1), 1)
        return jax.tree.map(lambda v: factor.astype(v.dtype) * v, gradient)


class LastStep(eqx.Module):
    r"""The last step of a descent, which the next gradient may show to be too long.

    Attributes:
        move: $\Delta_t = w_t - w_{t-1}$.
        slope: $a_t = -\langle q_{t-1}, \Delta_t \rangle \ge 0$.
        factor: What the step size is multiplied by.
    """

    move: PyTree
    slope: Float[Array, ""]
    factor: Float[Array, ""]

    @classmethod
    def none(cls, w: PyTree) -> "LastStep":
        """Return the state before the first step."""
        return cls(optax.tree.zeros_like(w), jnp.zeros(()), jnp.ones(()))

    def shorter(self, gradient: PyTree) -> PyTree:
        """Return the gradient times the factor of the step size."""
        return jax.tree.map(lambda v: self.factor.astype(v.dtype) * v, gradient)

    def excess(self, gradient: PyTree, deviation: Any) -> Float[Array, ""]:
        r"""Return how many times too long the step was for the curvature along it.

        Return 1 if it was not too long. With $r = \langle q_t, \Delta_t \rangle / a_t$,
        return $\max(2, 1 + r)$ if $r > \tfrac12 + 3 s \|\Delta_t\| / a_t$.

        On a quadratic function of curvature $h$ and without noise, $1 + r = \eta h$.
        Noise alone gives more than 1 once in 700 times, or less often.

        Args:
            gradient: $q_t$, the released gradient plus the public one.
            deviation: $s$: a bound on the standard deviation of $q_t$ in any direction.
        """
        with jax.numpy_dtype_promotion("standard"):  # leaves may be of several dtypes
            rise = optax.tree.vdot(gradient, self.move)
            noise = _SURELY * deviation * optax.tree.norm(self.move)
            is_long = rise > _OVERSHOT * self.slope + noise
            is_long &= jnp.isfinite(rise)  # a public gradient may be infinite
            ratio = rise / jnp.where(is_long, self.slope, 1)
            return jnp.where(is_long, jnp.maximum(2, 1 + ratio), 1)

    def then(
        self, gradient: PyTree, deviation: Any, w: PyTree, new: PyTree
    ) -> tuple[PyTree, "LastStep"]:
        r"""Return the next iterate: back along a step that was too long, or `new`.

        Args:
            gradient: $q_t$.
            deviation: As for `excess`.
            w: $w_t$.
            new: The iterate after the step along $q_t$.

        Privacy:
            Post-processing of released values: free.
        """
        excess = self.excess(gradient, deviation)
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


def finite_or(
    new: PyTree, old: PyTree, rejections: SkippedUpdates
) -> tuple[PyTree, SkippedUpdates]:
    """`new` where it is finite, else `old`.

    So must be its squares, for the sake of norms and averages of what is kept. What
    optimizers keep may start at infinity: only what was finite has to stay so. Where
    `old` is kept, `rejections` counts it.
    """
    pairs = zip(*map(jax.tree.leaves, (new, old)), strict=True)
    fits = jnp.stack([_fits(a, b) for a, b in pairs]).all()
    kept = jax.tree.map(lambda a, b: jnp.where(fits, a, b), new, old)
    return kept, rejections.plus((~fits).astype(jnp.int32))


def _fits(new: Array, old: Array) -> Bool[Array, ""]:
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        return jnp.asarray(True)
    return jnp.all(jnp.isfinite(new * new) | ~jnp.isfinite(old * old))  # as norms need


def _counts(node: object) -> bool:
    return isinstance(node, SkippedUpdates)
