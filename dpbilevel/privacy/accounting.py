"""From events to a privacy profile: exact for Gaussians, PLD for the rest.

One convention throughout: the noise multiplier inside an event is the noise over the
sensitivity *under the stated relation*. dp-accounting's accountants disagree on who
doubles a sensitivity under replace-one, so the conversion is made here and nowhere
else.
"""

import functools
import math
from typing import Any, TypeAlias

import dp_accounting
import numpy as np
import scipy.special
from dp_accounting.pld import pld_pmf, privacy_loss_distribution

from .budget import Neighbours

FINE = 1e-4  # discretization of the reported epsilon
COARSE = 1e-3  # discretization of the search for the noise
# Below this multiplier a privacy loss distribution takes minutes and gigabytes.
SMALLEST_SAMPLED_MULTIPLIER = 0.1

Profile: TypeAlias = Any  # a float or an array of them
_Pld: TypeAlias = Any  # a dp-accounting PrivacyLossDistribution, which is untyped


def gaussian_mu(event: dp_accounting.DpEvent) -> float | None:
    r"""The $\mu$ of Gaussian differential privacy, when the event has an exact one.

    Args:
        event: A composition of events in this module's convention.

    Returns:
        $\sqrt{\sum_k m_k^{-2}}$ for compositions of unsampled Gaussians, else `None`.
    """
    total = 0.0
    for part, count in _flatten(event):
        if not isinstance(part, dp_accounting.GaussianDpEvent):
            return None
        if part.noise_multiplier == 0:
            return math.inf
        total += count / part.noise_multiplier**2
    return math.sqrt(total)


def gaussian_delta(mu: float, epsilon: Profile) -> Profile:
    r"""The profile of $\mu$-GDP: $\Phi(-\varepsilon/\mu + \mu/2) - e^\varepsilon
    \Phi(-\varepsilon/\mu - \mu/2)$.

    Args:
        mu: $\mu \ge 0$.
        epsilon: $\varepsilon$, of any sign; one or an array.

    References:
        Balle and Wang, "Improving the Gaussian mechanism for differential privacy",
        ICML 2018, Theorem 8.
    """  # noqa: D205
    if mu == 0:
        return np.maximum(0.0, -np.expm1(epsilon))
    if math.isinf(mu):
        return np.ones_like(epsilon)
    near = scipy.special.log_ndtr(-epsilon / mu + mu / 2)
    far = epsilon + scipy.special.log_ndtr(-epsilon / mu - mu / 2)
    # far < near; the difference is taken in the log domain to keep small deltas.
    return np.exp(near) * -np.expm1(np.minimum(far - near, 0.0))


def delta(
    event: dp_accounting.DpEvent,
    neighbours: Neighbours,
    epsilon: float,
    interval: float = FINE,
) -> float:
    r"""The smallest $\delta$ at which `event` is $(\varepsilon, \delta)$-DP.

    Args:
        event: A composition of events in this module's convention.
        neighbours: The relation its multipliers refer to.
        epsilon: $\varepsilon \ge 0$.
        interval: Discretization of the privacy loss; finer is tighter and slower.

    Returns:
        An upper bound on $\delta$, exact for unsampled Gaussians.
    """
    mu = gaussian_mu(event)
    if mu is not None:
        return float(gaussian_delta(mu, epsilon))
    if _hopeless(event):
        return 1.0
    profile = privacy_loss(event, neighbours, interval)
    return float(profile.get_delta_for_epsilon(epsilon))


def epsilon(
    event: dp_accounting.DpEvent,
    neighbours: Neighbours,
    delta: float,
    interval: float = FINE,
) -> float:
    r"""The smallest $\varepsilon$ at which `event` is $(\varepsilon, \delta)$-DP.

    Args:
        event: A composition of events in this module's convention.
        neighbours: The relation its multipliers refer to.
        delta: $\delta$.
        interval: Discretization of the privacy loss.
    """
    mu = gaussian_mu(event)
    if mu is not None:
        if mu == 0 or math.isinf(mu):
            return mu
        return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta))
    if _hopeless(event):
        return math.inf
    profile = privacy_loss(event, neighbours, interval)
    return float(profile.get_epsilon_for_delta(delta))


def privacy_loss(
    event: dp_accounting.DpEvent, neighbours: Neighbours, interval: float = FINE
) -> _Pld:
    """The privacy loss distribution of a composition of events.

    Args:
        event: A composition of events in this module's convention.
        neighbours: The relation its multipliers refer to.
        interval: Discretization of the privacy loss.

    Raises:
        ValueError: An event that this library does not account for.
    """
    parts = _flatten(event)
    unsampled = [p for p in parts if isinstance(p[0], dp_accounting.GaussianDpEvent)]
    total = privacy_loss_distribution.identity(interval)
    if unsampled:  # exactly one Gaussian, so discretized once
        merged = sum(count / part.noise_multiplier**2 for part, count in unsampled)
        event = dp_accounting.GaussianDpEvent(merged**-0.5)
        total = total.compose(_single(event, neighbours, interval))
    for part, count in parts:
        if not isinstance(part, dp_accounting.GaussianDpEvent):
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


def _single(part, neighbours: Neighbours, interval: float) -> _Pld:
    match part:
        case dp_accounting.GaussianDpEvent(noise_multiplier=multiplier):
            return privacy_loss_distribution.from_gaussian_mechanism(
                multiplier, value_discretization_interval=interval
            )
        case dp_accounting.PoissonSampledDpEvent(
            sampling_probability=rate,
            event=dp_accounting.GaussianDpEvent(noise_multiplier=multiplier),
        ):
            # Per-record noise: this constructor doubles the sensitivity itself.
            return privacy_loss_distribution.from_gaussian_mechanism(
                multiplier * neighbours.contributions,
                sampling_prob=rate,
                neighboring_relation=_RELATIONS[neighbours],
                value_discretization_interval=interval,
            )
        case dp_accounting.SampledWithoutReplacementDpEvent(
            source_dataset_size=size,
            sample_size=sample,
            event=dp_accounting.GaussianDpEvent(noise_multiplier=multiplier),
        ) if neighbours is Neighbours.REPLACE_ONE:
            return _without_replacement(sample / size, multiplier, interval)
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
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots(interval, steps, deltas)
    return privacy_loss_distribution.PrivacyLossDistribution(pmf)


def _flatten(event, count: int = 1) -> list[tuple[dp_accounting.DpEvent, int]]:
    match event:
        case dp_accounting.NoOpDpEvent():
            return []
        case dp_accounting.SelfComposedDpEvent(event=inner, count=repeats):
            return _flatten(inner, count * repeats)
        case dp_accounting.ComposedDpEvent(events=parts):
            return [leaf for part in parts for leaf in _flatten(part, count)]
    return [(event, count)]


def _hopeless(event) -> bool:
    return any(
        getattr(getattr(part, "event", part), "noise_multiplier", math.inf)
        < SMALLEST_SAMPLED_MULTIPLIER
        for part, _ in _flatten(event)
    )


_RELATIONS = {
    Neighbours.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,
    Neighbours.ADD_OR_REMOVE_ONE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
}
