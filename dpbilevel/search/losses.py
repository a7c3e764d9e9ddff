"""Losses evaluated elsewhere: clipped, averaged and sealed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._checks import Number
from ..draws.mean_loss import public_part, spread_of
from ..draws.mechanisms import BoundedScore
from ..draws.samplers.base import AbstractPotential
from ..privacy.keys import PRNGKey
from ..privacy.per_example import clipping
from ..privacy.queries import RECORDS, Query
from ..privacy.records.rows import Padded, unpacked
from ..privacy.releases import AbstractNoisyRelease
from ..privacy.sampling.base import Batch
from .base import Proposal, SearchProblem
from .kernels import cast

Losses = Array | Padded


def clipped_loss(
    losses: Losses, clip_range: Number, size: int, precision: clipping.Precision
) -> clipping.Bounded:
    r"""Return a `Bounded` mean of losses clipped to $[0, B]$, minus $B / 2$.

    Absent rows of `Padded` losses are ignored.

    Privacy:
        One record moves the mean by at most $B / n$ under replace-one, enforced by
        clipping.
    """
    rows, present = unpacked(losses)
    width = cast(clip_range, rows)
    batch, fun = Batch(rows, present, float(size)), clip_and_center(width)
    return clipping.clipped_mean(fun, batch, clip_norm=width / 2, precision=precision)


def clip_and_center(clip_range: Number) -> Callable[[Array], Array]:
    """Return the function that clips a loss to $[0, B]$, NaN to $B$, less $B / 2$."""

    def center(loss):
        width = cast(clip_range, loss)
        # NaN, for example of a failed training, is the worst loss.
        return jnp.clip(jnp.nan_to_num(loss, nan=jnp.inf), 0, width) - width / 2

    return center


def loss_query(clip_range: Number, size: int) -> Query:
    """Return the `Query` of `noisy_loss`: centred losses in $[-B/2, B/2]$."""
    return Query(RECORDS, size, clip_range / 2)


def noisy_loss(
    release: AbstractNoisyRelease,
    problem: SearchProblem,
    proposal: Proposal,
    losses: Losses,
    clip_range: Number,
    *,
    key: PRNGKey,
) -> Float[Array, ""]:
    """Release the noisy objective, a scalar, at the only proposed point.

    The query of `release` is `loss_query`. Losses have one row per record, one column.
    """
    rows, present = unpacked(losses)
    funs = {RECORDS: clip_and_center(clip_range)}
    value = release.apply(funs, _pack(rows[:, 0], present), key=key)
    value = value.astype(proposal.points.dtype)
    value += cast(clip_range, value) / 2  # back in [0, B]
    if problem.public is None:
        return value
    return value + jax.vmap(problem.public)(proposal.points).astype(value.dtype)[0]


def score_of_candidates(
    losses: Losses,
    points: Float[Array, "m d"],
    public: Callable[[PyTree], Array] | None,
    start: Float[Array, " d"],
    clip_range: Number,
    size: int,
) -> BoundedScore:
    """Return a `BoundedScore` of the indices of points: their clipped mean losses.

    Losses have one row per record, one column per point. The public term is defined as
    zero at `start`.
    """
    rows, present = unpacked(losses)
    half = cast(clip_range, rows) / 2

    def score(row):
        point, column = row
        mean = clipped_loss(_pack(column, present), clip_range, size, "grid")
        return clipping.unsealed(mean) + public_part(public, point, start, half)

    scores = jax.lax.map(score, (points, rows.T))
    spread, _ = spread_of(clip_range, size, rows.dtype, public is not None)
    basis = clipping.Basis.CLIPPED
    return BoundedScore(_CandidateScore(scores), spread, "spread", basis)


def _pack(rows: Array, present: Array | None) -> Losses:
    """Return rows, as `Padded` if some may be absent; the inverse of `unpacked`."""
    return rows if present is None else Padded(rows, present)


class _CandidateScore(AbstractPotential):
    scores: Float[Array, " m"]

    def __call__(self, x: Float[Array, ""]) -> Float[Array, ""]:
        return self.scores[x.astype(jnp.int32)]
