"""Private random search: many public candidates, one of them drawn by its loss."""

import dataclasses
from typing import Any, Self

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float
from typing_extensions import override

from .._checks import Checked, Count, Number, Positive, check_fields
from ..draws.base import DRAW
from ..draws.mechanisms import Draw, Exponential
from ..draws.samplers.base import SamplerGuarantee
from ..draws.samplers.grid import Grid
from ..draws.scores.mean_loss import spread_of
from ..privacy.budget import Neighbours
from ..privacy.mechanisms import ROUNDING_MARGIN
from ..privacy.noise import PRNGKey
from ..privacy.queries import RECORDS, Query, check_rows
from ..privacy.records.rows import unpacked
from ..sets import Euclidean
from .base import AbstractAskTellSolver, BlackBox, Proposal, SearchProblem
from .candidates import box_of, check_starts, start_of, starts_of, uniform
from .losses import Losses, score_of_candidates


class Choice(Checked):
    r"""A draw of one of $M$ points with a probability $\propto \exp(-k f(w))$.

    $f$ is the mean of the losses clipped to $[0, B]$, plus the public term.

    Args:
        count: $M$. Static.
        clip_range: $B$.
        mechanism: The mechanism and its epsilon.

    Privacy:
        One draw, $\varepsilon$-DP without $\delta$, with $k = \varepsilon / o$: one
        record moves the scores of two points by at most $o = 2 B / n$ against each
        other under replace-one, $B / n$ under add-or-remove-one, enforced by clipping.
    """

    count: Count = eqx.field(static=True)
    clip_range: Positive
    mechanism: Exponential

    def release(self, problem: SearchProblem, sizes: int) -> Draw:
        """Return the release of the draw.

        Raises:
            ValueError: The mechanism is not calibrated.
        """
        # A black box is searched in float64, whatever the default of JAX.
        is_black_box = isinstance(problem, BlackBox)
        dtype = jnp.float64 if is_black_box else jnp.result_type(float)
        spread, _ = spread_of(
            self.clip_range, sizes, dtype, public=problem.public is not None
        )
        query = Query.of_contribution(RECORDS, sizes, float(spread))
        factor = self.mechanism.neighbours.contributions
        sensitivity = factor * spread * (1 + ROUNDING_MARGIN)
        rate = float(self.mechanism.rate(sensitivity))  # k
        note = f"drawn exactly from {self.count} public candidates"
        guarantee = SamplerGuarantee(1, self.count, notes=(note,))
        return Draw(DRAW, 1, (query,), self.mechanism, rate, guarantee)

    def draw(
        self,
        problem: SearchProblem,
        points: Float[Array, "count d"],
        losses: Losses,
        start: Float[Array, " d"],
        sizes: int,
        *,
        key: PRNGKey,
    ) -> Float[Array, " d"]:
        """Return a point drawn by the losses.

        Args:
            problem: The problem, whose public term is read.
            points: The points.
            losses: One row per record, one column per point.
            start: The point at which the public term is defined as zero.
            sizes: The planned number of records.
            key: A typed key for this draw alone.
        """
        check_rows(RECORDS, losses, sizes, self.mechanism.neighbours)
        score = score_of_candidates(
            losses, points, problem.public, start, self.clip_range, sizes
        )
        # Indices of points are drawn, as points of a grid on the line.
        indices = jnp.arange(self.count, dtype=unpacked(losses)[0].dtype)
        grid, first = Grid(indices), indices[0]
        index = self.mechanism.draw(score, grid, Euclidean(), first, key=key)
        return points[index.astype(jnp.int32)]


class _State(eqx.Module):
    start: Float[Array, " d"]
    w: Float[Array, " d"]


class RandomSearch(AbstractAskTellSolver[_State]):
    r"""A draw of one of $M$ random points with a probability $\propto \exp(-k f(w))$.

    The points are `starts` and uniform points in the problem's box; $f$ is the mean of
    the losses clipped to $[0, B]$, plus the public term. In one step all candidates are
    evaluated, and one is drawn and released, without its loss.

    Args:
        num_candidates: $M$, the number of evaluations. Static.
        clip_range: $B$: losses below 0 count as 0, above $B$ and NaN as $B$.
        mechanism: The mechanism and its epsilon.
        starts: Candidates of your own, one a row, such as good ones on public data; at
            most $M$.

    Raises:
        ValueError: There are more starts than candidates.

    Privacy:
        One draw, $\varepsilon$-DP without $\delta$, with $k = \varepsilon / o$: one
        record moves the scores of two points by at most $o = 2 B / n$ against each
        other under replace-one, $B / n$ under add-or-remove-one, enforced by clipping.
        The privacy cost does not depend on the number of candidates.

    References:
        McSherry and Talwar, "Mechanism design via differential privacy", FOCS 2007.
    """

    num_candidates: Count = eqx.field(static=True)
    clip_range: Positive
    mechanism: Exponential = Exponential()
    starts: Any = None

    def __check_init__(self):
        check_fields(self)
        check_starts("RandomSearch", self.starts, num_candidates=self.num_candidates)

    @property
    @override
    def num_steps(self) -> int:
        return 1

    @property
    @override
    def most_evaluations(self) -> int:
        return self.num_candidates

    @property
    @override
    def neighbours(self) -> Neighbours:
        return self.mechanism.neighbours

    @override
    def init(self, problem: SearchProblem, w0: Float[Array, " d"]) -> _State:
        start = start_of("RandomSearch", problem, w0)
        return _State(start, start)

    @override
    def ask(self, problem: SearchProblem, state: _State, *, key: PRNGKey) -> Proposal:
        box = box_of("RandomSearch", problem)
        starts = starts_of("RandomSearch", self.starts, box, state.start)
        rest = self.num_candidates - len(starts)
        points = jnp.concatenate([starts, uniform(box, state.start, rest, key=key)])
        return Proposal(points, jnp.asarray(self.num_candidates, jnp.int32))

    @override
    def tell(self, problem, state, proposal, losses, *, key) -> _State:
        start, points = state.start, proposal.points
        w = self._choice.draw(problem, points, losses, start, self.sizes, key=key)
        return _State(start, w)

    @override
    def released(self, state: _State) -> Float[Array, " d"]:
        return state.w

    @override
    def releases(self, problem: SearchProblem, sizes: int) -> tuple[Draw]:
        return (self._choice.release(problem, sizes),)

    @override
    def with_noise(self, scale: Number) -> Self:
        """Return a copy with epsilon `2 / scale`, as in `ExponentialMechanism`."""
        mechanism = self.mechanism.with_multiplier(scale)
        return dataclasses.replace(self, mechanism=mechanism)

    @override
    def dimensions(self, w0: Float[Array, " d"]) -> dict[str, int]:
        return {DRAW: w0.size}

    @property
    def _choice(self) -> Choice:
        return Choice(self.num_candidates, self.clip_range, self.mechanism)
