r"""Gaussian noise that partly cancels the noise of earlier steps."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, Int, Int32, UInt32
from typing_extensions import override

from .. import _checks
from .._checks import Count, Number
from .._extras import dp_accounting
from .budget import People
from .exact import int61
from .exact.grid import release_places
from .exact.int61 import FRACTION_BITS, Limbs
from .exact.normal import normal_integers
from .keys import PRNGKey, wrapped
from .mechanisms import Gaussian
from .releases import Release
from .sampling.base import AbstractSampling, FullBatch
from .sampling.fixed_size import SinglePass

_FRACTIONS = 2**FRACTION_BITS  # per unit of a coefficient
# Roundings of fed-back noise may add 2**-14 of one record's contribution to the
# sensitivity. The step of the grid has as many more bits as that takes, up to these.
_MOST_FINER = 24
_ROUNDING = 1 + 1e-9  # of sums in float64


def rounded_feedback(feedback: Sequence[float]) -> tuple[float, ...]:
    """Return feedback coefficients, a tuple, rounded down to multiples of 2**-15.

    Raises:
        ValueError: There is none, one is negative, or they add up to 1 or more.
    """
    values = tuple(math.floor(_checks.number(a) * _FRACTIONS) for a in feedback)
    if not values or min(values) < 0 or sum(values) >= _FRACTIONS:
        raise ValueError(
            "feedback: give coefficients of at least 0 whose sum is below 1, got "
            f"{tuple(feedback)}."
        )
    return tuple(value / _FRACTIONS for value in values)


def square_root_feedback(bands: int) -> tuple[float, ...]:
    """Return a tuple: `bands - 1` coefficients of the banded inverse square root.

    $C^{-1}$ has the first $b$ coefficients of $(1 - x)^{1/2}$: 1, -1/2, -1/8, ...

    Args:
        bands: $b$, at least 2.

    Raises:
        ValueError: There are fewer than 2 bands.

    References:
        Kalinin, McKenna, Upadhyay and Lampert, "Back to square roots: an optimal bound
        on the matrix factorization error for multi-epoch differentially private SGD",
        ICLR 2026 (banded inverse square root).
    """
    if bands < 2:
        raise ValueError(f"square_root_feedback: at least 2 bands, got {bands}.")
    lags = np.arange(1, bands)
    return tuple((-scipy.special.binom(0.5, lags) * (-1.0) ** lags).tolist())


def _strategy(feedback: Sequence[float], added: np.ndarray) -> np.ndarray:
    """Return the array y with y_t = added_t + sum_j a_j y_(t-j), a = `feedback`."""
    return scipy.signal.lfilter([1.0], [1.0, *(-a for a in feedback)], added)


def sensitivity(feedback: Sequence[float], num_steps: int, gap: int) -> float:
    r"""Return the joint sensitivity of a run, in units of that of one step.

    It is $\|\sum_j C_{\cdot, j g}\|$, the largest over all records that are in steps
    $i, i + g, i + 2 g, \ldots$ of a run, or in some of them. Arguments are those of
    `Correlated`.
    """
    # C is not negative, so all contributions point in one direction at worst, and
    # none is left out. C is Toeplitz, so a later start sees fewer and shorter columns.
    taking_part = np.zeros(num_steps)
    taking_part[::gap] = 1.0
    return float(np.linalg.norm(_strategy(feedback, taking_part))) * _ROUNDING


class Correlated(Gaussian):
    r"""Gaussian noise, a part of which later steps cancel.

    Step $t$ of a run adds $s\,(z_t - \sum_{j \ge 1} a_j z_{t - j})$ to its value, with
    independent standard normal $z_t$. What was added to earlier steps is partly removed
    from the sum of all steps. Earlier noise is drawn again from its keys.

    Args:
        feedback: $a_1, \ldots, a_{b-1} \ge 0$ with a sum below 1, rounded down to
            multiples of $2^{-15}$. One coefficient $\lambda$ is DP-$\lambda$-CGD;
            `square_root_feedback` gives those of the banded inverse square root.
            Static.
        num_steps: Steps of the run. Static.
        gap: Steps between two batches with the same record; 1 for full batches. Static.
        earlier: Words of the ChaCha20 keys of the last $b - 1$ noises, latest first;
            `None` for the first step. As secret as the noise still to come.
        step: Number of the step in the run, from 0.

    Privacy:
        All steps together are one Gaussian release of $C v$, with $C^{-1} = I - \sum_j
        a_j \,\mathrm{shift}^j$ and the values $v$ of all steps, which is then
        multiplied by $C^{-1}$. `event` is that of the whole run: a ledger counts it
        once, as `CorrelatedRelease` does. On the grid, fed-back noise is rounded to
        integers, and the step is so fine that all these roundings are covered by the
        margin for rounding (docs/mathematics.md, "Correlated noise").

    References:
        DP-lambda-CGD, arXiv 2601.22334, 2026;
        Denisov, McMahan, Rush, Smith and Thakurta, "Improved differential privacy for
        SGD via optimal private linear operators on adaptive streams", NeurIPS 2022.
    """

    feedback: tuple[float, ...] = eqx.field(
        static=True, default=(0.5,), converter=rounded_feedback
    )
    num_steps: Count = eqx.field(static=True, default=1)
    gap: Count = eqx.field(static=True, default=1)
    earlier: UInt32[Array, "lags 8"] | None = None
    step: int | Int[Array, ""] = 0

    def __check_init__(self):
        if self.finer > _MOST_FINER:
            raise ValueError(
                f"{type(self).__name__}: no grid is fine enough for {self.num_steps} "
                f"steps and {len(self.feedback)} coefficients. Take fewer."
            )

    @override
    def integers(self, shapes, doublings, *, key: PRNGKey) -> list[Limbs]:
        now = normal_integers(shapes, doublings, key=key)
        if self.earlier is None:
            return now
        fractions = (np.asarray(self.feedback) * _FRACTIONS).astype(np.int32)

        def with_lag(total, lag_of):
            lag, fraction, words = lag_of
            # The step before the first one added no noise.
            fraction = jnp.where(self.step >= lag, fraction, 0)
            drawn = normal_integers(shapes, doublings, key=wrapped(words, "chacha20"))
            taken = [int61.negated(z.times_fraction(fraction)) for z in drawn]
            return [v.plus(z) for v, z in zip(total, taken, strict=True)], None

        lags = np.arange(1, len(fractions) + 1, dtype=np.int32)
        return jax.lax.scan(with_lag, now, (lags, fractions, self.earlier))[0]

    @property
    @override
    def independent(self) -> bool:
        return self.num_steps == 1 and self.earlier is None

    @property
    @override
    def finer(self) -> int:
        """Number of bits by which the grid is finer than rounding the value needs.

        Roundings move neighbours apart by $b - 1$ steps a coordinate and step of the
        run, before $C$ adds them up.
        """
        first = np.zeros(self.num_steps)
        first[0] = 1.0
        growth = _strategy(self.feedback, first).sum()  # at least the norm of C
        roundings = len(self.feedback) * math.sqrt(self.num_steps)
        return math.ceil(math.log2(2 * growth * roundings))

    @property
    @override
    def deviation(self) -> Number:
        growth = 1.0 if self.independent else math.hypot(1.0, *self.feedback)
        return self.multiplier * growth

    def check_room(self, size: int) -> None:
        """Raise `ValueError` if noise on `size` coordinates does not fit the grid.

        Raises:
            ValueError: There is no room, so that releases would be noise alone.
        """
        bits = math.log2(max(4 * float(self.multiplier), 1.0))  # of std / contribution
        if self.precision == "grid" and bits + release_places(size, self.finer) > 52:
            raise ValueError(
                f"{type(self).__name__}: the noise of {self.num_steps} steps with "
                f"{len(self.feedback)} coefficients is too large for the grid. Take "
                "fewer steps or coefficients, or a larger epsilon."
            )

    @override
    def event(self, fraction: float = 1.0) -> "dp_accounting.GaussianDpEvent":
        """Return one Gaussian event of a run for a person moving it by `fraction`."""
        moved = fraction * sensitivity(self.feedback, self.num_steps, self.gap)
        return dp_accounting.GaussianDpEvent(float(self.multiplier) / moved)


@dataclasses.dataclass(frozen=True)
class CorrelatedRelease(Release):
    """Planned steps of a run with `Correlated` noise, charged as one Gaussian release.

    Raises:
        ValueError: There are several queries, or the same record may be in batches of
            no fixed gap.
        TypeError: The mechanism is not `Correlated`.
    """

    spans_run: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        owner = type(self).__name__
        _checks.instance(owner, Correlated, mechanism=self.mechanism)
        if len(self.queries) != 1:
            raise ValueError(
                f"{owner}: takes one query, got {len(self.queries)}. Use NoisyGD if a "
                "release reads two levels."
            )
        check_sampling(owner, self.queries[0].sampling)

    @property
    def whole(self) -> Release:
        """Copy of this release whose mechanism has the number of steps and the gap."""
        (query,) = self.queries
        sampling = query.sampling
        gap = sampling.batches(query.size) if isinstance(sampling, SinglePass) else 1
        changed = dataclasses.replace(self.mechanism, num_steps=self.count, gap=gap)
        return dataclasses.replace(self, mechanism=changed)

    def after(self, earlier: UInt32[Array, "lags 8"], step: Int32[Array, ""]):
        """Return a copy of this planned release for one step, with earlier noise keys.

        They follow from the words of the keys of these releases, the latest first.
        """

        def of_noise(words):
            return jax.random.key_data(self.keys(wrapped(words, "chacha20"))[1])

        earlier = jax.vmap(of_noise)(earlier)
        changed = dataclasses.replace(self.mechanism, earlier=earlier, step=step)
        return dataclasses.replace(self, mechanism=changed)

    @override
    def repeated(self, count: int):
        """Return a tuple that holds this release `count` times: runs share no noise."""
        return (self,) * count

    @property
    @override
    def notes(self) -> tuple[str, ...]:
        mechanism = self.whole.mechanism
        assert isinstance(mechanism, Correlated)
        joint = sensitivity(mechanism.feedback, mechanism.num_steps, mechanism.gap)
        return (
            f"{self.name}: {self.count} releases with correlated noise are charged as "
            f"one, whose sensitivity is {joint:.4g} times that of one of them",
        )

    @override
    def charges(self, people: People) -> "Iterator[tuple[str, dp_accounting.DpEvent]]":
        for person, query, event in self.whole._events(people):
            yield person, query.sampling.event(event, self.neighbours, query.size)


def check_sampling(owner: str, sampling: AbstractSampling) -> None:
    """Raise `ValueError` unless a sampling is `FullBatch` or `SinglePass`.

    Raises:
        ValueError: A record may be in batches of no fixed gap.
    """
    if not isinstance(sampling, FullBatch | SinglePass):
        raise ValueError(
            f"{owner}: correlated noise is not accounted for with "
            f"{type(sampling).__name__}. Use FullBatch or SinglePass, or NoisyGD, "
            "which takes any sampling."
        )
