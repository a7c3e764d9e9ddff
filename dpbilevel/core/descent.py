"""How a released gradient moves a variable: optax rules, projected onto a set."""

from collections.abc import Callable
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int, PyTree

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


class Rejections(eqx.Module):
    """How many updates were left out because their result was not finite.

    A solver's state holds one for each variable it moves; `rejected_updates` adds up.

    Privacy:
        Counted from released values alone, which makes the count post-processing: what
        decides about an update must be released.
    """

    count: Int[Array, ""]

    @classmethod
    def none(cls) -> "Rejections":
        """Before the first update."""
        return cls(jnp.zeros((), jnp.int32))

    def plus(self, *counts: Int[Array, ""]) -> "Rejections":
        """With further updates that were left out."""
        return Rejections(sum(counts, self.count))


def rejected_updates(state: PyTree) -> Int[Array, ""]:
    """How many updates were left out on the way to a state."""
    nodes = jax.tree.leaves(state, is_leaf=_counts)
    return Rejections.none().plus(*(v.count for v in nodes if _counts(v))).count


class Memory(eqx.Module):
    """What one variable's updates remember."""

    rule: optax.OptState  # the state of the optax rule
    rejections: Rejections


class Descent(eqx.Module):
    r"""Projected steps along released gradients, of one size or by an optax rule.

    $$w_{t+1} = \Pi_W(w_t - \eta\, q_t)$$

    Args:
        step_size: $\eta$, or a `Rule`.
        w_set: $W$.
    """

    step_size: Any
    w_set: AbstractSet

    @property
    def rule(self) -> optax.GradientTransformation:
        """The optax rule: plain steps for a number."""
        if isinstance(self.step_size, Rule):
            return self.step_size.optimizer
        return optax.sgd(self.step_size)

    def init(self, w: PyTree) -> Memory:
        """What is remembered before the first update, which starts at `w`."""
        return Memory(self.rule.init(w), Rejections.none())

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

    def shortened(
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


def finite_or(
    new: PyTree, old: PyTree, rejections: Rejections
) -> tuple[PyTree, Rejections]:
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
    return isinstance(node, Rejections)
