"""How a released gradient moves a variable: optax rules, projected onto a set."""

import jax
import optax
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..sets import AbstractSet


def descent(
    step_size: float | Float[Array, ""] | None,
    optimizer: optax.GradientTransformation | None,
) -> optax.GradientTransformation:
    """The update rule that a solver's `step_size` or `optimizer` field names."""
    return optax.sgd(step_size) if optimizer is None else optimizer


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


def projected_update(
    rule: optax.GradientTransformation,
    gradient: PyTree,
    memory: optax.OptState,
    w: PyTree,
    w_set: AbstractSet,
) -> tuple[PyTree, optax.OptState]:
    """One update by `rule` from a released gradient, projected onto the set."""
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        updates, memory = rule.update(gradient, memory, w)
    return w_set.project(optax.apply_updates(w, updates)), memory
