"""From events to a privacy profile: exact for Gaussians, PLD for most others.

One convention for every `event`, a composition: the noise multiplier inside is the
noise over the sensitivity *under the stated relation*, `neighbours`. dp-accounting's
accountants disagree on who doubles a sensitivity under replace-one, so the conversion
is made here and nowhere else. `interval` is the discretization of the privacy loss;
finer is tighter and slower.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from . import allocation_loss, pure, renyi
from ._lazy import dp_accounting
from .allocation import RandomAllocationEvent
from .best_of import BestOf
from .budget import Neighbours
from .gaussian import Profile, gaussian_delta, gaussian_epsilon
from .repetitions import Repetitions

FINE = 1e-4  # discretization of the reported epsilon
COARSE = 1e-3  # discretization of the search for the noise
# Below this multiplier a privacy loss distribution takes minutes and gigabytes.
SMALLEST_SAMPLED_MULTIPLIER = 0.1
# Charged to delta per sampled release: transforms of a discretized loss round, in
# either direction, by up to a tenth of it, which decides deltas below 1e-10.
ROUNDING = 2.0**-50
_LARGEST_EPSILON = 700.0  # beyond it nothing is private

_Pld: TypeAlias = Any  # a dp-accounting PrivacyLossDistribution, which is untyped


def gaussian_mu(event: "dp_accounting.DpEvent") -> float | None:
    r"""The $\mu$ of Gaussian differential privacy, when the event has an exact one.

    $\sqrt{\sum_k m_k^{-2}}$ for compositions of unsampled Gaussians, else `None`.
    """
    mu, others = _split(event)
    return None if others else mu


def pure_epsilons(event: "dp_accounting.DpEvent") -> list[float] | None:
    """The epsilon of every part, where all are releases without delta, else `None`."""
    parts = _flatten(event)
    releases = [(part, count) for part, count in parts if pure.is_pure(part)]
    if len(releases) < len(parts):
        return None
    return [pure.epsilon_of(part) for part, count in releases for _ in range(count)]


def selects(event: "dp_accounting.DpEvent") -> bool:
    """Whether `event` is accounted for by Renyi divergences."""
    return renyi.selects(_flatten(event))


def is_exact(event: "dp_accounting.DpEvent") -> bool:
    """Whether the profile of `event` is a closed form."""
    parts = pure_epsilons(event)
    single = parts is not None and len(parts) <= 1
    return single or gaussian_mu(event) is not None or _draw_and_gaussians(event)


def total_variation_delta(epsilon: float, distance: float, delta: float = 0.0) -> float:
    r"""The $\delta$ of an output within total variation of a private one.

    With $P, Q$ the laws on two neighbours and $P^*, Q^*$ those of an $(\varepsilon,
    \delta)$-DP mechanism, each within $\eta$ of its own,

    $$
    P(S) \le P^*(S) + \eta \le e^\varepsilon Q^*(S) + \delta + \eta
         \le e^\varepsilon Q(S) + \delta + (1 + e^\varepsilon) \eta .
    $$

    The $\eta$ of several releases add up before they enter.

    Args:
        epsilon: $\varepsilon \ge 0$.
        distance: $\eta$: the chance that a batch overflows, or the distance of a
            sampler's law from its target; from a theorem, not from a diagnostic.
        delta: $\delta$ of the private mechanism.

    Returns:
        $\delta + (1 + e^\varepsilon) \eta$, at most 1.
    """
    return min(1.0, delta + (1 + math.exp(min(epsilon, 700.0))) * distance)


def delta(
    event: "dp_accounting.DpEvent",
    neighbours: Neighbours,
    epsilon: float,
    interval: float = FINE,
) -> float:
    r"""The smallest $\delta$ at which `event` is $(\varepsilon, \delta)$-DP.

    An upper bound, exact for unsampled Gaussians; for sampled ones never below
    $2^{-50}$ a release, to cover the rounding of their composition.
    """
    return profile(event, neighbours, interval)(epsilon)


def profile(
    event: "dp_accounting.DpEvent", neighbours: Neighbours, interval: float = FINE
) -> Callable[[float], float]:
    r"""The function from $\varepsilon \ge 0$ to what `delta` returns."""
    mu = gaussian_mu(event)
    if mu is not None:  # closed forms first
        return lambda epsilon: float(gaussian_delta(mu, epsilon))
    parts = pure_epsilons(event)
    if parts is not None and len(parts) == 1:
        return lambda epsilon: float(pure.delta(parts[0], epsilon))
    if selects(event):
        return _profile_of_selections(_flatten(event))
    if _draw_and_gaussians(event):
        mu, ((draw, _),) = _split(event)
        assert pure.is_pure(draw)
        total = pure.epsilon_of(draw)
        return lambda epsilon: float(pure.delta_with_gaussian(total, mu, epsilon))
    if _hopeless(event):
        return lambda epsilon: 1.0
    loss = privacy_loss(event, neighbours, interval)

    def numeric(epsilon: float) -> float:
        if parts is not None and epsilon >= sum(parts):
            return 0.0  # without the rounding of a discretized loss
        return float(loss.get_delta_for_epsilon(epsilon))

    return numeric


def epsilon(
    event: "dp_accounting.DpEvent",
    neighbours: Neighbours,
    delta: float,
    interval: float = FINE,
) -> float:
    r"""The smallest $\varepsilon$ at which `event` is $(\varepsilon, \delta)$-DP."""
    mu = gaussian_mu(event)
    if mu is not None:
        return gaussian_epsilon(mu, delta)
    parts = pure_epsilons(event)
    if parts is not None and (delta == 0 or len(parts) == 1):
        return pure.smallest_epsilon(sum(parts), delta)
    if selects(event) and delta == 0:
        return math.inf
    if selects(event) or _draw_and_gaussians(event):
        return smallest_epsilon(profile(event, neighbours), delta)
    if _hopeless(event):
        return math.inf
    loss = privacy_loss(event, neighbours, interval)
    value = float(loss.get_epsilon_for_delta(delta))
    return value if parts is None else min(value, sum(parts))


def smallest_epsilon(delta_of: Callable[[float], float], delta: float) -> float:
    r"""The smallest $\varepsilon \ge 0$ at which a profile is at most `delta`.

    The safe end of the last bracket.

    Args:
        delta_of: The profile, decreasing.
        delta: $\delta$ in [0, 1].
    """
    low = high = 0.0
    while not delta_of(high) <= delta:
        low, high = high, max(2 * high, 1e-3)
        if high > _LARGEST_EPSILON:
            return math.inf
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of(middle) <= delta else (middle, high)
    return high


def privacy_loss(
    event: "dp_accounting.DpEvent", neighbours: Neighbours, interval: float = FINE
) -> _Pld:
    """The privacy loss distribution of a composition of events.

    Raises:
        ValueError: An event that this library does not account for.
    """
    mu, sampled = _split(event)
    slack = min(1.0, ROUNDING * (1 + sum(count for _, count in sampled)))
    total = _bounded_loss(0.0, slack, interval)
    if mu:  # exactly one Gaussian, so discretized once
        merged = dp_accounting.GaussianDpEvent(1 / mu)
        total = total.compose(_single(merged, neighbours, interval))
    for part, count in sampled:
        single = _single(part, neighbours, interval)
        total = total.compose(single.self_compose(count))
    return total


def without_replacement_delta(epsilon: Profile, mu: float, fraction: float) -> Profile:
    r"""The profile of a Gaussian release of a random subset, under replace-one.

    With $q$ the fraction sampled and $\delta_\mu$ the profile of the release on the
    whole subset, $\delta(\varepsilon) = q\, \delta_\mu(\log(1 + (e^\varepsilon - 1) /
    q))$ for $\varepsilon \ge 0$, and $\delta(-\varepsilon) = 1 - e^{-\varepsilon} +
    e^{-\varepsilon} \delta(\varepsilon)$ by the symmetry of the relation.

    Args:
        epsilon: $\varepsilon$, of any sign; one or an array.
        mu: One over the noise multiplier.
        fraction: $q$, batch size over number of records.

    References:
        Balle, Barthe and Gaboardi, "Privacy amplification by subsampling", NeurIPS
        2018, Theorem 9.
    """
    size = np.abs(epsilon)
    # log(1 + (e^eps - 1) / q), without overflow at large losses.
    base = size + np.log(-np.expm1(-size) / fraction + np.exp(-size))
    positive = fraction * gaussian_delta(mu, base)
    mirrored = -np.expm1(-size) + np.exp(-size) * positive
    return np.where(np.asarray(epsilon) < 0, mirrored, positive)


def _bounded_loss(epsilon: float, delta: float, interval: float) -> _Pld:
    """That of the worst mechanism of one epsilon and delta."""
    pld = dp_accounting.pld
    parameters = pld.common.DifferentialPrivacyParameters(epsilon, delta)
    return pld.privacy_loss_distribution.from_privacy_parameters(parameters, interval)


def _single(part, neighbours: Neighbours, interval: float) -> _Pld:
    losses = dp_accounting.pld.privacy_loss_distribution
    match part:
        case dp_accounting.GaussianDpEvent(noise_multiplier=multiplier):
            return losses.from_gaussian_mechanism(
                multiplier, value_discretization_interval=interval
            )
        case dp_accounting.RandomizedResponseDpEvent(num_buckets=2):
            return _bounded_loss(pure.epsilon_of(part), 0.0, interval)
        case dp_accounting.PoissonSampledDpEvent(
            sampling_probability=rate,
            event=dp_accounting.GaussianDpEvent(noise_multiplier=multiplier),
        ):
            # Per-record noise: this constructor doubles the sensitivity itself.
            return losses.from_gaussian_mechanism(
                multiplier * neighbours.contributions,
                sampling_prob=rate,
                neighboring_relation=dp_accounting.NeighboringRelation[neighbours.name],
                value_discretization_interval=interval,
            )
        case dp_accounting.SampledWithoutReplacementDpEvent(
            source_dataset_size=size,
            sample_size=sample,
            event=dp_accounting.GaussianDpEvent(noise_multiplier=multiplier),
        ) if neighbours is Neighbours.REPLACE_ONE:
            return _without_replacement(sample / size, multiplier, interval)
        case RandomAllocationEvent(batches, event):
            mu = 1 / (event.noise_multiplier * neighbours.contributions)
            return _allocated(neighbours, mu, batches, interval)
    raise ValueError(
        f"accounting: {type(part).__name__} is not accounted for under {neighbours}."
    )


@functools.lru_cache(maxsize=64)
def _without_replacement(fraction: float, multiplier: float, interval: float) -> _Pld:
    """Samples the profile on a grid and connects the dots from above."""
    mu = 1 / multiplier
    # The largest loss with mass above 1e-20, amplified, and the same below.
    top = math.log1p(fraction * math.expm1(min(mu * (9.5 + mu / 2), 600.0)))
    steps = np.arange(-math.ceil(top / interval) - 1, math.ceil(top / interval) + 2)
    profile = without_replacement_delta(steps * interval, mu, fraction)
    deltas = np.clip(np.minimum.accumulate(profile), 0.0, 1.0)
    pld = dp_accounting.pld
    pmf = pld.pld_pmf.create_pmf_pessimistic_connect_dots(interval, steps, deltas)
    return pld.privacy_loss_distribution.PrivacyLossDistribution(pmf)


@functools.lru_cache(maxsize=64)
def _allocated(
    neighbours: Neighbours, mu: float, batches: int, interval: float
) -> _Pld:
    """Connects the dots between points of the profiles of a pass, from above."""
    pld = dp_accounting.pld
    masses = []
    for ratios, found in allocation_loss.profiles(neighbours, mu, batches):
        top = math.ceil(math.log(max(ratios[-1], 1 / ratios[1])) / interval)
        steps = np.arange(-top, top + 1)
        deltas = np.interp(np.exp(steps * interval), ratios, found)
        deltas = np.clip(np.minimum.accumulate(deltas), 0.0, 1.0)
        masses.append(
            pld.pld_pmf.create_pmf_pessimistic_connect_dots(interval, steps, deltas)
        )
    return pld.privacy_loss_distribution.PrivacyLossDistribution(*masses)


def _flatten(event, count: int = 1) -> "list[tuple[dp_accounting.DpEvent, int]]":
    match event:
        case dp_accounting.NoOpDpEvent():
            return []
        case dp_accounting.SelfComposedDpEvent(event=inner, count=repeats):
            return _flatten(inner, count * repeats)
        case dp_accounting.ComposedDpEvent(events=parts):
            return [leaf for part in parts for leaf in _flatten(part, count)]
    return [(event, count)]


def _split(event) -> "tuple[float, list[tuple[dp_accounting.DpEvent, int]]]":
    """The mu of all unsampled Gaussians together, and the other parts."""
    ratios, others = [], []
    for part, count in _flatten(event):
        if isinstance(part, dp_accounting.GaussianDpEvent):
            multiplier = part.noise_multiplier
            ratios.append(math.sqrt(count) / multiplier if multiplier else math.inf)
        else:
            others.append((part, count))
    return math.hypot(*ratios), others


def _profile_of_selections(parts) -> Callable[[float], float]:
    """From the divergences of all parts; of a single one also its own profile."""
    together = renyi.Divergences(parts).delta
    part, count = parts[0]
    if len(parts) > 1 or count > 1 or part.event.noise_multiplier == 0:
        return together
    law = Repetitions(part.mean, part.shape)
    alone = BestOf(law, 1 / part.event.noise_multiplier).delta
    return lambda epsilon: min(together(epsilon), alone(epsilon))


def _draw_and_gaussians(event) -> bool:
    """Whether it is one release without delta, once, and unsampled Gaussians."""
    mu, others = _split(event)
    one = [count for part, count in others if pure.is_pure(part)] == [1]
    return one and len(others) == 1 and 0 < mu < math.inf


def _hopeless(event) -> bool:
    mu, sampled = _split(event)
    multipliers = [
        getattr(getattr(part, "event", part), "noise_multiplier", math.inf)
        for part, _ in sampled
    ]
    smallest = min([*multipliers, 1 / mu if mu else math.inf])
    return smallest < SMALLEST_SAMPLED_MULTIPLIER
