"""How a released gradient moves a variable: optax rules, projected onto a set."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from .. import _checks
from ..sets import AbstractSet


def descent(
    step_size: float | Float[Array, ""] | None,
    optimizer: optax.GradientTransformation | None,
) -> optax.GradientTransformation:
    """The update rule that a solver's `step_size` or `optimizer` field names."""
    if optimizer is not None:
        return optimizer
    assert step_size is not None
    return optax.sgd(step_size)


def check_descent(owner: str, step_size, optimizer, prefix: str = "") -> None:
    """Raises unless exactly one of `step_size` and `optimizer` is given."""
    names = f"{prefix}step_size", f"{prefix}optimizer"
    if (step_size is None) == (optimizer is None):
        raise ValueError(
            f"{owner}: give one of {names[0]} and {names[1]} (an optax optimizer), "
            f"got {'both' if optimizer is not None else 'neither'}."
        )
    if callable(step_size):
        raise ValueError(
            f"{owner}: {names[0]} must be a positive number, got {step_size!r}. Pass a "
            f"schedule as {names[1]}=optax.sgd(schedule)."
        )
    if step_size is not None:
        _checks.positive(owner, **{names[0]: step_size})
    if optimizer is not None:
        _checks.instance(owner, optax.GradientTransformation, **{names[1]: optimizer})


class Rejections(eqx.Module):
    """How many updates were left out because their result was not finite.

    A solver's state holds one for each variable it moves; `rejected_updates` adds them
    up.

    Attributes:
        count: The number so far.

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
    """What one variable's updates remember.

    Attributes:
        rule: The state of the optax rule.
        rejections: The updates that were left out.
    """

    rule: optax.OptState
    rejections: Rejections

    @classmethod
    def of(cls, rule: optax.GradientTransformation, w: PyTree) -> "Memory":
        """Before the first update, which starts at `w`."""
        return cls(rule.init(w), Rejections.none())


def projected_update(
    rule: optax.GradientTransformation,
    gradient: PyTree,
    memory: Memory,
    w: PyTree,
    w_set: AbstractSet,
) -> tuple[PyTree, Memory]:
    """One update by `rule` from a released gradient, projected onto the set.

    Where the result is not finite, variable and rule stay as they were: the update is
    left out and counted.
    """
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        updates, state = rule.update(gradient, memory.rule, w)
    new = w_set.project(optax.apply_updates(w, updates))
    (w, state), rejections = finite_or(
        (new, state), (w, memory.rule), memory.rejections
    )
    return w, Memory(state, rejections)


def finite_or(
    new: PyTree, old: PyTree, rejections: Rejections
) -> tuple[PyTree, Rejections]:
    """`new` where it is finite, else `old`.

    So must be its squares, for the sake of norms and averages of what is kept. What
    optimizers keep may start at infinity: only what was finite has to stay so.

    Args:
        new: Released values, a pytree.
        old: What to keep otherwise, a pytree like `new`.
        rejections: Counts it if `old` is kept.
    """
    pairs = zip(*map(jax.tree.leaves, (new, old)), strict=True)
    fits = jnp.stack([_fits(a, b) for a, b in pairs]).all()
    kept = jax.tree.map(lambda a, b: jnp.where(fits, a, b), new, old)
    return kept, rejections.plus((~fits).astype(jnp.int32))


def shortened(
    gradient: PyTree,
    step_size: float | Float[Array, ""] | None,
    public_gradient: Callable[[PyTree], PyTree],
    w: PyTree,
) -> PyTree:
    r"""The gradient, shorter where a step of this size overshoots the public terms.

    $$q \min\Bigl(1, \frac{\|q\|^2}{\eta \langle q, \nabla^2 r(w)\, q \rangle}\Bigr)$$

    The step ends where $\langle q, w \rangle$ plus the quadratic model of the public
    terms is least, or before: gradients of records are clipped and only pull so far,
    but a public term that is curved by more than $2 / \eta$ would drive the iterates
    apart without limit.

    Args:
        gradient: $q$, the released gradient plus the public one.
        step_size: $\eta$; with `None` the gradient stays as it is.
        public_gradient: $\nabla r$.
        w: Where the step starts.

    Privacy:
        Post-processing of released values: free.
    """
    if step_size is None:
        return gradient
    _, bent = jax.jvp(public_gradient, (w,), (gradient,))
    with jax.numpy_dtype_promotion("standard"):
        length = optax.tree.norm(gradient, squared=True)
        curvature = step_size * optax.tree.vdot(gradient, bent)
    overshoots = curvature > length
    factor = jnp.where(overshoots, length / jnp.where(overshoots, curvature, 1), 1)
    return jax.tree.map(lambda v: factor.astype(v.dtype) * v, gradient)


def _fits(new: Array, old: Array) -> Bool[Array, ""]:
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        return jnp.asarray(True)
    return jnp.all(jnp.isfinite(new * new) | ~jnp.isfinite(old * old))


def _counts(node: object) -> bool:
    return isinstance(node, Rejections)
