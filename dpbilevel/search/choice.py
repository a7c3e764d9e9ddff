"""One of some public points, drawn by everyone's losses there."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._checks import Checked, Count, Positive
from ..draws.base import DRAW
from ..draws.mechanisms import Draw, Exponential
from ..draws.samplers.base import SamplerGuarantee
from ..draws.samplers.grid import Grid
from ..draws.scores.mean_loss import spread_of
from ..privacy.mechanisms import ROUNDING_MARGIN
from ..privacy.noise import PRNGKey
from ..privacy.queries import RECORDS, Query, check_rows
from ..privacy.records.rows import unpacked
from ..sets import Euclidean
from .losses import Losses, score_of_candidates
from .problem import BlackBox, SearchProblem


class Choice(Checked):
    r"""Draws one of $M$ points with a probability $\propto \exp(-k f(w))$.

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
        """What the draw is charged for.

        Raises:
            ValueError: The mechanism is not calibrated.
        """
        # A black box is searched in float64, whatever is the default here.
        exact = isinstance(problem, BlackBox)
        dtype = jnp.float64 if exact else jnp.result_type(float)
        public = problem.public is not None
        share, _ = spread_of(self.clip_range, sizes, dtype, public)
        query = Query.of_contribution(RECORDS, sizes, float(share))
        factor = self.mechanism.neighbours.contributions
        sensitivity = factor * share * (1 + ROUNDING_MARGIN)
        rate = float(self.mechanism.rate(sensitivity))  # k
        note = f"drawn exactly from {self.count} public candidates"
        guarantee = SamplerGuarantee(1, self.count, notes=(note,))
        return Draw(DRAW, 1, (query,), self.mechanism, rate, guarantee)

    def of(
        self,
        problem: SearchProblem,
        points: Float[Array, "count d"],
        losses: Losses,
        start: Float[Array, " d"],
        sizes: int,
        *,
        key: PRNGKey,
    ) -> Float[Array, " d"]:
        """The point that is drawn.

        Args:
            problem: Its public term is read.
            points: The points.
            losses: One row per record, one column per point.
            start: Where the public term counts as zero.
            sizes: The planned number of records.
            key: A typed key for this draw alone.
        """
        check_rows(RECORDS, losses, sizes, self.mechanism.neighbours)
        score = score_of_candidates(
            losses, points, problem.public, start, self.clip_range, sizes
        )
        # The index of a point is drawn, as a point of a grid on the line.
        numbers = jnp.arange(self.count, dtype=unpacked(losses)[0].dtype)
        grid, first = Grid(numbers), numbers[0]
        number = self.mechanism.draw(score, grid, Euclidean(), first, key=key)
        return points[number.astype(jnp.int32)]
