"""Private draws of one of many public points by its loss, also to start a search."""

import dataclasses
import math
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from typing_extensions import override

from .. import _checks
from .._checks import Checked, Count, Fraction, Number, Positive, check_fields
from ..draws.base import DRAW
from ..draws.mean_loss import spread_of
from ..draws.mechanisms import Draw, Exponential
from ..draws.samplers.base import SamplerGuarantee
from ..draws.samplers.grid import Grid
from ..privacy.budget import Neighbours
from ..privacy.keys import PRNGKey, derive
from ..privacy.mechanisms import ROUNDING_MARGIN
from ..privacy.queries import RECORDS, Query, check_rows
from ..privacy.records.rows import unpacked
from ..sets import AbstractSet, Box, Euclidean
from . import base
from .base import AbstractAskTellSolver, BlackBox, Proposal, SearchProblem
from .kernels import AbstractKernel, cast
from .losses import Losses, score_of_candidates

_DIAGONAL = 19  # points whose coordinates are all at the same fraction of their ranges
# Distances of other points from these, as fractions of the ranges.
_NEAR, _FAR = 0.05, 0.5
# Differences of mean losses to resolve, as a fraction of the clip range.
_RESOLUTION = 1 / 200
# Epsilon of a draw without noise, in place of infinity.
_NOISELESS = 1e6


class Choice(Checked):
    r"""Draw of one of $M$ points by mean loss $f$, with chance $\propto \exp(-k f(w))$.

    $f$ is the mean of the losses clipped to $[0, B]$, plus the public term.

    Privacy:
        As in `RandomSearch`.
    """

    count: Count = eqx.field(static=True)  # M
    clip_range: Positive  # B
    mechanism: Exponential

    def release(self, problem: SearchProblem, sizes: int) -> Draw:
        """Return the planned `Draw` of one of the points; reads no record."""
        # A black box is searched in float64, whatever the default of JAX.
        is_black_box = isinstance(problem, BlackBox)
        dtype = jnp.float64 if is_black_box else jnp.result_type(float)
        public = problem.public is not None
        spread, _ = spread_of(self.clip_range, sizes, dtype, public)
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
        """Draw one of the points; those of small mean loss are more likely.

        Arguments are those of `score_of_candidates`.
        """
        check_rows(RECORDS, losses, sizes, self.mechanism.neighbours)
        public, clip_range = problem.public, self.clip_range
        score = score_of_candidates(losses, points, public, start, clip_range, sizes)
        # Indices of points are drawn, as points of a grid on the line.
        indices = jnp.arange(self.count, dtype=unpacked(losses)[0].dtype)
        grid, first = Grid(indices), indices[0]
        index = self.mechanism.draw(score, grid, Euclidean(), first, key=key)
        return points[index.astype(jnp.int32)]


class _State(eqx.Module):
    start: Float[Array, " d"]
    w: Float[Array, " d"]


class RandomSearch(AbstractAskTellSolver[_State]):
    r"""Draw of one of $M$ random points by loss $f$, with chance $\propto e^{-k f(w)}$.

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
    num_steps: ClassVar[int] = 1

    def __check_init__(self):
        check_fields(self)
        base.check_starts(self, "num_candidates")

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
        start = base.start_of("RandomSearch", problem, w0)
        return _State(start, start)

    @override
    def ask(self, problem: SearchProblem, state: _State, *, key: PRNGKey) -> Proposal:
        box = base.box_of("RandomSearch", problem)
        starts = base.starts_of("RandomSearch", self.starts, box, state.start)
        rest = self.num_candidates - len(starts)
        others = base.uniform(box, state.start, rest, key=key)
        points = jnp.concatenate([starts, others])
        return Proposal(points, jnp.asarray(self.num_candidates, jnp.int32))

    @override
    def tell(self, problem, state, proposal, losses, *, key) -> _State:
        start, points = state.start, proposal.points
        w = self._choice.draw(problem, points, losses, start, self.sizes, key=key)
        return _State(start, w)

    @override
    def releases(self, problem: SearchProblem, sizes: int) -> tuple[Draw]:
        return (self._choice.release(problem, sizes),)

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


class Portfolio(Checked):
    r"""Public initial points of a local search, one of which the first step draws.

    The first points are `w0`, the middle of the box, and `starts`. Then follow points
    whose coordinates are all at the same fraction of their ranges. The others are
    normal around random ones of these, with standard deviations of a twentieth to a
    half of the range. If the set is no bounded box, the part within two reaches of `w0`
    is used. A point is drawn with a probability $\propto \exp(-k f(w))$, where $f$ is
    the mean over records of the loss minus the record's least loss at any of the
    points, clipped to $[0, B]$.

    Args:
        size: $M$, the number of points, each with an evaluation; more cost no privacy.
            Static.
        starts: Points of your own, one a row, such as answers on public data; at most
            `size - 2`.
        share: Largest fraction of the squared budget for the draw. A plan takes less if
            less suffices to resolve mean losses that differ by $B / 200$.
        clip_range: $B$; by default the solver's clip norm times the kernel's reach.
        mechanism: The mechanism and its epsilon.

    Raises:
        ValueError: There are more starts than points.

    Privacy:
        One draw, $\varepsilon$-DP without $\delta$, as in `RandomSearch`: the least
        loss that is subtracted is that of the same record.

    References:
        McSherry and Talwar, "Mechanism design via differential privacy", FOCS 2007.
    """

    size: Count = eqx.field(static=True, default=60)
    starts: Any = None
    share: Fraction = 0.3
    clip_range: Positive | None = None
    mechanism: Exponential = Exponential()

    def __check_init__(self):
        number = 0 if self.starts is None else len(self.starts)
        if self.size < number + 2:
            raise ValueError(
                f"Portfolio: {self.size} points are too few for w0, the middle and "
                f"{number} starts."
            )

    def points(
        self,
        feasible: AbstractSet,
        w0: Float[Array, " d"],
        reach: Number,
        *,
        key: PRNGKey,
    ) -> Float[Array, "size d"]:
        """Return the candidate points, from public values and the key alone.

        Args:
            feasible: The set.
            w0: The initial point of the search.
            reach: The reach of the kernel.
            key: A typed key.
        """
        key_base, key_length, key_move = derive(key, "base", "length", "move")
        around = 2 * cast(reach, w0)
        lower, upper = w0 - around, w0 + around
        if isinstance(feasible, Box):
            low, high = base.ends(feasible, w0)
            largest = jnp.finfo(w0.dtype).max
            bounded = (low > -largest) & (high < largest)
            lower = jnp.where(bounded, low, lower)
            upper = jnp.where(bounded, high, upper)
        width = upper - lower
        fractions = jnp.arange(1, _DIAGONAL + 1).astype(w0.dtype) / (_DIAGONAL + 1)
        diagonal = lower[None] + fractions[:, None] * width[None]
        middle = (lower + upper) / 2
        fixed = [w0[None], middle[None], diagonal]
        if self.starts is not None:
            fixed.insert(2, jnp.asarray(self.starts, w0.dtype))
        fixed = jnp.concatenate(fixed)[: self.size]
        rest = self.size - len(fixed)
        near = jax.random.randint(key_base, (rest,), 0, len(fixed), jnp.int32)
        unit = jax.random.uniform(key_length, (rest, 1), w0.dtype)
        length = _NEAR * (_FAR / _NEAR) ** unit
        move = jax.random.normal(key_move, (rest, w0.size), w0.dtype)
        others = fixed[near] + length * move * width[None]
        points = jnp.clip(jnp.concatenate([fixed, others]), lower[None], upper[None])
        return jax.vmap(feasible.project)(points)

    def choice(self, clip_norm: Number, kernel: AbstractKernel) -> Choice:
        """Return the `Choice`; default clip range: `clip_norm` times kernel's reach."""
        clip_range: Any = self.clip_range
        if clip_range is None:
            clip_range = clip_norm * kernel.reach
        return Choice(self.size, clip_range, self.mechanism)

    def split(self, scale: Number, size: int | None) -> tuple[Number, Number]:
        r"""Return the epsilon of the draw, and the noise multiplier of later releases.

        Together they have the zero-concentrated privacy of a Gaussian release of
        multiplier `scale`: $\varepsilon^2 / 4 + m^{-2} = $ `scale`$^{-2}$.

        Args:
            scale: The noise multiplier of both together.
            size: The planned number of records.
        """
        wanted = 2 * math.log(self.size) / _RESOLUTION / size if size else _NOISELESS
        if _checks.concrete(scale) and scale == 0:
            return min(wanted, _NOISELESS), 0.0
        concrete = _checks.concrete(scale) and _checks.concrete(self.share)
        smaller = min if concrete else jnp.minimum
        epsilon = smaller(2 * self.share**0.5 / scale, wanted)
        return epsilon, (scale**-2 - epsilon**2 / 4) ** -0.5


def relative(losses: Float[Array, "n m"]) -> Float[Array, "n m"]:
    """Return each record's losses minus its least one; infinity if not finite."""
    finite = jnp.isfinite(losses)
    least = jnp.min(jnp.where(finite, losses, jnp.inf), axis=1, keepdims=True)
    least = jnp.where(jnp.isfinite(least), least, 0)
    return jnp.where(finite, losses - least, jnp.inf)
