"""Points and losses that a search keeps, and gradients inferred from them."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .base import Proposal
from .gp import GradientPosterior


class Seen(NamedTuple):
    """Points and everyone's losses there; rows and columns without a mask are empty."""

    points: Float[Array, "m d"]
    values: Float[Array, "n m"]
    mask: Bool[Array, " m"]


def record_gradient(
    posterior: GradientPosterior, seen: Seen
) -> Callable[[Array], Array]:
    """The posterior mean gradient of a record, from the losses that are kept of it."""
    return lambda losses: posterior.weights @ _usable(losses, seen.mask)


def joined(proposal: Proposal, losses: Float[Array, "n q"], seen: Seen) -> Seen:
    """The latest points first."""
    points, values, mask = seen
    order = jnp.arange(len(proposal.points), dtype=proposal.count.dtype)
    fresh = order < proposal.count
    losses = jnp.where(fresh[None], losses.astype(values.dtype), 0)
    return Seen(
        jnp.concatenate([proposal.points, points]),
        jnp.concatenate([losses, values], axis=1),
        jnp.concatenate([fresh, mask]),
    )


def _usable(losses: Float[Array, " m"], mask: Bool[Array, " m"]) -> Array:
    """One record's losses, where one is not finite its own largest that is."""
    finite = jnp.isfinite(losses)
    largest = jnp.max(jnp.where(finite & mask, losses, -jnp.inf))
    return jnp.where(finite, losses, jnp.where(jnp.isfinite(largest), largest, 0))
