"""Delta and epsilon of an event: by closed forms, or by composing privacy losses.

One convention for every `event`, a composition: the noise multiplier inside is the
noise over the sensitivity *under the stated relation*, `neighbours`. dp-accounting's
accountants disagree on who doubles a sensitivity under replace-one, so the conversion
is made here and nowhere else.
"""

import functools
import math
from collections.abc import Callable

from ..._extras import dp_accounting
from ..budget import Neighbours
from ..sampling.fixed_size import RandomAllocationEvent
from . import allocation_loss, closed_forms
from .closed_forms import gaussian_delta, gaussian_epsilon, is_pure, pure_epsilon
from .losses import AbstractLoss, Atoms, Shifted, Subset, allocated
from .repetitions import BestOf, Repetitions, is_selection, renyi_profile
from .summed_losses import Composition

# A batch with noise below one over this counts as a full batch, because its losses are
# too large to be discretized.
_LARGEST_SHIFT = 15.0
_LARGEST_EPSILON = 700.0  # beyond it nothing is private


def gaussian_mu(event: "dp_accounting.DpEvent") -> float | None:
    r"""Return the exact $\mu$ of an event in Gaussian DP; `None` if there is none.

    $\sqrt{\sum_k m_k^{-2}}$ for compositions of unsampled Gaussians, else `None`.
    """
    mu, others = _split(event)
    return None if others else mu


def pure_epsilons(event: "dp_accounting.DpEvent") -> list[float] | None:
    """Return a list of the epsilons of an event's releases; `None` if not all pure."""
    parts = _flatten(event)
    releases = [(part, count) for part, count in parts if is_pure(part)]
    if len(releases) < len(parts):
        return None
    return [pure_epsilon(part) for part, count in releases for _ in range(count)]


def uses_renyi(event: "dp_accounting.DpEvent") -> bool:
    """Return whether `event` is accounted for by Renyi divergences."""
    return any(is_selection(part) for part, _ in _flatten(event))


def is_exact(event: "dp_accounting.DpEvent") -> bool:
    """Return whether the profile of `event` is a closed form."""
    if gaussian_mu(event) is not None:
        return True
    parts = pure_epsilons(event)
    return _draw_and_gaussians(event) if parts is None else len(parts) <= 1


def total_variation_delta(epsilon: float, distance: float, delta: float = 0.0) -> float:
    r"""Return $\delta$ of an output within total variation `distance` of a private one.

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
    event: "dp_accounting.DpEvent", neighbours: Neighbours, epsilon: float
) -> float:
    r"""Return the smallest $\delta$ at which `event` is $(\varepsilon, \delta)$-DP.

    The result is an upper bound. It is exact for unsampled Gaussians, and above the
    exact value by less than a hundredth for sampled ones.

    Raises:
        ValueError: An event that this library does not account for.
    """
    return profile(event, neighbours)(epsilon)


def profile(
    event: "dp_accounting.DpEvent", neighbours: Neighbours, *, rough: bool = False
) -> Callable[[float], float]:
    r"""Return the function from $\varepsilon \ge 0$ to the least $\delta$ of `event`.

    A `rough` one estimates, which is enough for the choice of noise alone.
    """
    mu = gaussian_mu(event)
    if mu is not None:  # closed forms first
        return lambda epsilon: float(gaussian_delta(mu, epsilon))
    parts = pure_epsilons(event)
    if parts is not None and len(parts) == 1:
        return lambda epsilon: float(closed_forms.pure_delta(parts[0], epsilon))
    if uses_renyi(event):
        return _profile_of_selections(_flatten(event))
    if _draw_and_gaussians(event):
        mu, ((draw, _),) = _split(event)
        assert is_pure(draw)
        total = pure_epsilon(draw)
        both = closed_forms.pure_and_gaussian_delta
        return lambda epsilon: float(both(total, mu, epsilon))
    ways = compositions(event, neighbours, rough=rough)
    whole = full_batch_mu(event)

    def numeric(epsilon: float) -> float:
        if parts is not None and epsilon >= sum(parts):
            return 0.0  # without the rounding of a discretized loss
        epsilon = min(epsilon, _LARGEST_EPSILON)
        deltas = (w.delta(epsilon, rough=rough) for w in ways)
        return min(float(gaussian_delta(whole, epsilon)), max(deltas, default=1.0))

    return numeric


def epsilon(
    event: "dp_accounting.DpEvent", neighbours: Neighbours, delta: float
) -> float:
    r"""Return the least $\varepsilon$ of `event` at this $\delta$, or infinity."""
    mu = gaussian_mu(event)
    if mu is not None:
        return gaussian_epsilon(mu, delta)
    parts = pure_epsilons(event)
    if parts is not None and (delta == 0 or len(parts) == 1):
        return closed_forms.smallest_pure_epsilon(sum(parts), delta)
    if delta == 0 and not _draw_and_gaussians(event):
        return math.inf
    about = smallest_epsilon(profile(event, neighbours, rough=True), delta)
    start = min(about, _LARGEST_EPSILON)
    value = smallest_epsilon(profile(event, neighbours), delta, start)
    value = min(value, gaussian_epsilon(full_batch_mu(event), delta))
    return value if parts is None else min(value, sum(parts))


def smallest_epsilon(
    delta_of: Callable[[float], float], delta: float, about: float = 0.0
) -> float:
    r"""Return the least $\varepsilon \ge 0$ of a profile at `delta`, or infinity.

    The result is the safe end of the last bracket, found to six digits from a finite
    `about` on, or else to twelve.
    """
    low, high, step = 0.0, about, max(about / 128, 1e-3)
    if about > step and not delta_of(about - step) <= delta:
        low = about - step
    while not delta_of(high) <= delta:
        low, high, step = high, high + step, 2 * step
        if high > _LARGEST_EPSILON:
            return math.inf
    while high - low > (1e-6 if about else 1e-12) * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of(middle) <= delta else (middle, high)
    return high


def full_batch_mu(event: "dp_accounting.DpEvent") -> float:
    r"""Return $\mu$ of an event's Gaussian releases as if on full batches, or infinity.

    By the convexity of the divergence in pairs of laws, a batch that is drawn
    independently of record values costs no more than a batch with the record.

    Returns:
        Infinity if there are other releases.
    """
    mu, sampled = _split(event)
    if any(is_pure(part) or is_selection(part) for part, _ in sampled):
        return math.inf
    return math.hypot(mu, *(math.sqrt(n) * _shift(part) for part, n in sampled))


def compositions(
    event: "dp_accounting.DpEvent", neighbours: Neighbours, *, rough: bool = False
) -> tuple[Composition, ...]:
    """Return a tuple: a `Composition` per direction of the relation; may be empty.

    There are none if losses are too large to be discretized. A `rough` one replaces a
    pass by as many Poisson batches.

    Raises:
        ValueError: An event that this library does not account for.
    """
    mu, sampled = _split(event)
    for i, (part, count) in enumerate(sampled):
        if rough and isinstance(part, RandomAllocationEvent) and part.batches > 1:
            batch = dp_accounting.PoissonSampledDpEvent(1 / part.batches, part.event)
            sampled[i] = batch, count * part.batches  # about the cost of the pass
    kept = [(_losses(part, neighbours), count) for part, count in sampled]
    if max([mu, *(_shift(part) for part, _ in sampled)]) > _LARGEST_SHIFT:
        return ()
    if mu:
        kept.append(((Shifted(1.0, 1.0, mu / 2),), 1))
    number = max((len(ways) for ways, _ in kept), default=0)
    return tuple(
        _composition(tuple((ways[min(way, len(ways) - 1)], n) for ways, n in kept))
        for way in range(number)
    )


_composition = functools.lru_cache(maxsize=16)(Composition)


def _shift(part) -> float:
    """Return a release's shift on a full batch over the noise: epsilon / 15 if pure."""
    if is_pure(part):  # large if epsilon is large
        return pure_epsilon(part) / _LARGEST_SHIFT
    base = getattr(part, "event", None)
    if not isinstance(base, dp_accounting.GaussianDpEvent):
        raise ValueError(f"accounting: {part} is not accounted for.")
    multiplier = base.noise_multiplier
    return 1 / multiplier if multiplier else math.inf


def _losses(part, neighbours: Neighbours) -> tuple[AbstractLoss, ...]:
    """Return a tuple of the privacy losses of one release, two if directions differ."""
    match part:
        case dp_accounting.RandomizedResponseDpEvent(num_buckets=2):
            ratio = math.exp(-pure_epsilon(part))
            masses = 1 / (1 + ratio), ratio / (1 + ratio)
            return (Atoms(masses, masses[::-1]),)
        case dp_accounting.PoissonSampledDpEvent(
            sampling_probability=rate, event=dp_accounting.GaussianDpEvent()
        ):
            if neighbours is Neighbours.REPLACE_ONE:
                return (Shifted(rate, rate, _shift(part) / 2),)
            return tuple(Shifted(rate, 0.0, _shift(part), v) for v in (False, True))
        case dp_accounting.SampledWithoutReplacementDpEvent(
            source_dataset_size=size,
            sample_size=sample,
            event=dp_accounting.GaussianDpEvent(),
        ) if neighbours is Neighbours.REPLACE_ONE:
            return (Subset(sample / size, _shift(part)),)
        case RandomAllocationEvent(batches, dp_accounting.GaussianDpEvent()):
            mu = _shift(part) / neighbours.contributions
            ways: tuple[allocation_loss.Way, ...] = ("replace",)
            if neighbours is Neighbours.ADD_OR_REMOVE_ONE:
                ways = "remove", "add"
            return tuple(allocated(way, mu, batches) for way in ways)
    raise ValueError(f"accounting: {part} is not accounted for.")


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
    """Return mu of all unsampled Gaussians together, and a list of the other parts."""
    ratios, others = [], []
    for part, count in _flatten(event):
        if isinstance(part, dp_accounting.GaussianDpEvent):
            multiplier = part.noise_multiplier
            ratios.append(math.sqrt(count) / multiplier if multiplier else math.inf)
        else:
            others.append((part, count))
    return math.hypot(*ratios), others


def _profile_of_selections(parts) -> Callable[[float], float]:
    """Return a function from epsilon to delta, for events with private selections."""
    together = renyi_profile(parts)
    part, count = parts[0]
    if len(parts) > 1 or count > 1 or part.event.noise_multiplier == 0:
        return together
    law = Repetitions(part.mean, part.shape)
    alone = BestOf(law, 1 / part.event.noise_multiplier).delta
    return lambda epsilon: min(together(epsilon), alone(epsilon))


def _draw_and_gaussians(event) -> bool:
    """Return whether an event composes one pure release and unsampled Gaussians."""
    mu, others = _split(event)
    one = [count for part, count in others if is_pure(part)] == [1]
    return one and len(others) == 1 and 0 < mu < math.inf
