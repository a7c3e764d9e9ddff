"""Private random search: many public candidates, one of them drawn by its loss."""

import dataclasses
from typing import Any, Self

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float
from typing_extensions import override

from .. import _checks
from .._checks import Number
from ..draws.base import DRAW
from ..draws.mechanisms import Exponential
from ..draws.release import Draw
from ..draws.samplers.base import SamplerGuarantee
from ..draws.samplers.grid import Grid
from ..draws.scores.mean_loss import spread_of
from ..privacy.budget import Neighbours
from ..privacy.ledger import Ledger
from ..privacy.mechanisms import ROUNDING_MARGIN
from ..privacy.noise import PRNGKey
from ..privacy.queries import RECORDS, Query
from ..privacy.rows import unpacked
from ..sets import Euclidean
from .base import AbstractAskTellSolver, Proposal, black_box_assumptions
from .candidates import box_of, public_of, start_of, uniform
from .losses import score_of_candidates
from .problem import BlackBox, SearchProblem


class _State(eqx.Module):
    start: Float[Array, " d"]
    w: Float[Array, " d"]


class RandomSearch(AbstractAskTellSolver[_State]):
    r"""Draws one of $M$ random points with a probability $\propto \exp(-k f(w))$.

    The points are uniform in the problem's box; $f$ is the mean of the losses clipped
    to $[0, B]$, plus the public term. One step: all candidates are evaluated, and one
    is drawn and released, without its loss.

    Args:
        num_candidates: $M$, the number of evaluations. Static.
        clip_range: $B$: losses below 0 count as 0, above $B$ and NaN as $B$.
        mechanism: The mechanism and its epsilon.
        sizes: The planned number of records; set by `calibrate`. Static.

    Privacy:
        One draw, $\varepsilon$-DP without $\delta$, with $k = \varepsilon / o$: one
        record moves the scores of two points by at most $o = 2 B / n$ against each
        other under replace-one, $B / n$ under add-or-remove-one, enforced by clipping.
        The number of candidates costs nothing.

    References:
        McSherry and Talwar, "Mechanism design via differential privacy", FOCS 2007.
    """

    num_candidates: int = eqx.field(static=True)
    clip_range: float | Float[Array, ""]
    mechanism: Exponential = Exponential()
    sizes: Any = eqx.field(static=True, default=None)

    def __check_init__(self):
        _checks.count("RandomSearch", num_candidates=self.num_candidates)
        _checks.positive("RandomSearch", clip_range=self.clip_range)
        _checks.instance("RandomSearch", Exponential, mechanism=self.mechanism)

    @property
    def num_steps(self) -> int:
        """One."""
        return 1

    @property
    def most_evaluations(self) -> int:
        """One per candidate."""
        return self.num_candidates

    @property
    @override
    def neighbours(self) -> Neighbours:
        return self.mechanism.neighbours

    def init(self, problem: SearchProblem, w0: Float[Array, " d"]) -> _State:
        """Starts at `w0`, of which only the shape matters."""
        start = start_of("RandomSearch", problem, w0)
        return _State(start, start)

    @override
    def ask(self, problem: SearchProblem, state: _State, *, key: PRNGKey) -> Proposal:
        box = box_of("RandomSearch", problem)
        points = uniform(box, state.start, self.num_candidates, key=key)
        return Proposal(points, jnp.asarray(self.num_candidates, jnp.int32))

    @override
    def tell(self, problem, state, proposal, losses, *, key) -> _State:
        dtype = unpacked(losses)[0].dtype
        numbers = jnp.arange(self.num_candidates, dtype=dtype)
        number = self.mechanism.draw(
            score_of_candidates(
                losses,
                proposal.points,
                public_of(problem),
                state.start,
                self.clip_range,
                self.sizes,
            ),
            Grid(numbers),
            Euclidean(),
            numbers[0],
            key=key,
        )
        return _State(state.start, proposal.points[number.astype(jnp.int32)])

    @override
    def released(self, state: _State) -> Float[Array, " d"]:
        return state.w

    @override
    def ledger(self, problem: SearchProblem, sizes: int) -> Ledger:
        # A black box is searched in float64, whatever is the default here.
        exact = isinstance(problem, BlackBox)
        dtype = jnp.float64 if exact else jnp.result_type(float)
        public = public_of(problem) is not None
        share, _ = spread_of(self.clip_range, sizes, dtype, public)
        sensitivity = self.neighbours.contributions * share * (1 + ROUNDING_MARGIN)
        draw = Draw(
            DRAW,
            1,
            (Query(RECORDS, sizes, float(share) * sizes),),
            self.mechanism,
            float(self.mechanism.rate(sensitivity)),
            SamplerGuarantee(
                1,
                self.num_candidates,
                notes=(f"drawn exactly from {self.num_candidates} random candidates",),
            ),
        )
        return Ledger(
            (draw,), assumptions=black_box_assumptions(problem, self.most_evaluations)
        )

    def with_noise(self, scale: Number) -> Self:
        r"""Sets $\varepsilon$ to `2 / scale`, as in `ExponentialMechanism`."""
        mechanism = self.mechanism.with_multiplier(scale)
        return dataclasses.replace(self, mechanism=mechanism)

    def dimensions(self, w0: Float[Array, " d"]) -> dict[str, int]:
        """The draw has the size of `w0`."""
        return {DRAW: w0.size}
