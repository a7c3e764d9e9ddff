"""Private random search: many public candidates, one of them drawn by its loss."""

import dataclasses
from typing import Any, Self

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float
from typing_extensions import override

from .._checks import Count, Number, Positive, check_fields
from ..draws.base import DRAW
from ..draws.mechanisms import Draw, Exponential
from ..privacy.budget import Neighbours
from ..privacy.noise import PRNGKey
from .base import AbstractAskTellSolver, Proposal
from .candidates import box_of, check_starts, start_of, starts_of, uniform
from .choice import Choice
from .problem import SearchProblem


class _State(eqx.Module):
    start: Float[Array, " d"]
    w: Float[Array, " d"]


class RandomSearch(AbstractAskTellSolver[_State]):
    r"""Draws one of $M$ random points with a probability $\propto \exp(-k f(w))$.

    The points are uniform in the problem's box, but for `starts`; $f$ is the mean of
    the losses clipped to $[0, B]$, plus the public term. One step: all candidates are
    evaluated, and one is drawn and released, without its loss.

    Args:
        num_candidates: $M$, the number of evaluations. Static.
        clip_range: $B$: losses below 0 count as 0, above $B$ and NaN as $B$.
        mechanism: The mechanism and its epsilon.
        starts: Points of one's own among the candidates, one a row, such as good ones
            on public data; at most $M$.

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
        w = self._choice.of(problem, points, losses, start, self.sizes, key=key)
        return _State(start, w)

    @override
    def released(self, state: _State) -> Float[Array, " d"]:
        return state.w

    @override
    def releases(self, problem: SearchProblem, sizes: int) -> tuple[Draw]:
        return (self._choice.release(problem, sizes),)

    @override
    def with_noise(self, scale: Number) -> Self:
        r"""Sets $\varepsilon$ to `2 / scale`, as in `ExponentialMechanism`."""
        mechanism = self.mechanism.with_multiplier(scale)
        return dataclasses.replace(self, mechanism=mechanism)

    @override
    def dimensions(self, w0: Float[Array, " d"]) -> dict[str, int]:
        return {DRAW: w0.size}

    @property
    def _choice(self) -> Choice:
        return Choice(self.num_candidates, self.clip_range, self.mechanism)
