"""Losses that were evaluated elsewhere: clipped, averaged and sealed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..draws.mechanisms import BoundedScore
from ..draws.samplers.base import AbstractPotential
from ..draws.scores.mean_loss import public_part, spread_of
from ..privacy.clipping import Basis, Bounded, Precision, clipped_mean, unsealed
from ..privacy.queries import RECORDS, Query
from ..privacy.rows import Padded, unpacked
from ..privacy.sampling import Batch


def clipped_loss(
    losses: Float[Array, " n"] | Padded,
    clip_range: float | Float[Array, ""],
    size: int,
    precision: Precision,
) -> Bounded:
    r"""The mean of losses clipped to $[0, B]$, less $B / 2$.

    Args:
        losses: One per record; of `Padded` ones those that are present.
        clip_range: $B$.
        size: The planned number of records.
        precision: How they are summed, as in `clipped_mean`.

    Privacy:
        One record moves the mean by at most $B / n$ under replace-one, enforced by
        clipping.
    """
    rows, present = unpacked(losses)
    reach = jnp.asarray(clip_range).astype(rows.dtype)
    batch = Batch(rows, present, float(size))
    return clipped_mean(
        centered(reach), batch, clip_norm=reach / 2, precision=precision
    )


def centered(clip_range: float | Float[Array, ""]) -> Callable[[Array], Array]:
    """A loss clipped to $[0, B]$, less $B / 2$.

    A loss of NaN, as of a training that failed, counts as $B$, the worst there is.

    Args:
        clip_range: $B$.
    """

    def of(loss):
        reach = jnp.asarray(clip_range).astype(loss.dtype)
        return jnp.clip(jnp.nan_to_num(loss, nan=jnp.inf), 0, reach) - reach / 2

    return of


def column(
    losses: Float[Array, "n q"] | Padded, index: int
) -> Float[Array, " n"] | Padded:
    """The losses at one point.

    Args:
        losses: One row per record, one column per point.
        index: The point's number.
    """
    if isinstance(losses, Padded):
        return Padded(losses.records[:, index], losses.present)
    return losses[:, index]


def loss_query(clip_range: float | Float[Array, ""], size: int) -> Query:
    """The query that reads `centered` losses.

    Args:
        clip_range: $B$.
        size: The planned number of records.
    """
    return Query(RECORDS, size, clip_range / 2)


def score_of_candidates(
    losses: Float[Array, "n m"] | Padded,
    points: Float[Array, "m d"],
    public: Callable[[PyTree], Float[Array, ""]] | None,
    start: Float[Array, " d"],
    clip_range: float | Float[Array, ""],
    size: int,
) -> BoundedScore:
    """A score of the indices of points: the clipped mean loss at each.

    Args:
        losses: One row per record, one column per point.
        points: The points.
        public: The public term, or `None`.
        start: Where the public term counts as zero.
        clip_range: $B$, as in `clipped_loss`.
        size: The planned number of records.
    """
    rows, present = unpacked(losses)
    half = jnp.asarray(clip_range).astype(rows.dtype) / 2

    def scored(row):
        point, found = row
        found = found if present is None else Padded(found, present)
        mean = clipped_loss(found, clip_range, size, "grid")
        return unsealed(mean) + public_part(public, point, start, half)

    scores = jax.lax.map(scored, (points, rows.T))
    share, _ = spread_of(clip_range, size, rows.dtype, public is not None)
    return BoundedScore(_CandidateScore(scores), share, "spread", Basis.CLIPPED)


class _CandidateScore(AbstractPotential):
    scores: Float[Array, " m"]

    def __call__(self, x: Float[Array, ""]) -> Float[Array, ""]:
        return self.scores[x.astype(jnp.int32)]
