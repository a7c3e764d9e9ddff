r"""Private selection: the law of the number of repetitions, and the profiles.

The best of $K$ runs that are each $\mu$-GDP has a profile in closed form.
With $f(s)$ the mean of $s^K$, $p'(p) = \Phi(\Phi^{-1}(p) + \mu)$ and

$$
\kappa(s) = \max_{p} \bigl(f'(1 - p) - s f'(1 - p'(p))\bigr)_+
$$

the best is $(\varepsilon, \delta)$-DP with $\delta = \mathrm E\, \kappa(e^{\varepsilon}
e^{-L})$, where $L \sim \mathcal N(\mu^2 / 2, \mu^2)$ is the privacy loss of the
Gaussian.

Compositions of selections have no privacy loss distribution and are accounted for by
Renyi divergences. With $m$ the mean of $K$ the one of a selection at the order
$\lambda$ is at most

$$
\frac{\lambda \mu^2}{2} + \frac{\log m}{\lambda - 1} + \sup_p w(p), \qquad
a = \frac{\lambda}{\lambda - 1},
$$

$w = m (p' - a p)$ for the Poisson law, $w = (1 + \eta) \log(u' u^{-a} \gamma^{a - 1})$
for the others, with $u = \gamma + (1 - \gamma) p$ and $u'$ the same of $p'$. The
proofs are in `docs/mathematics.md`, "Private selection".
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import scipy
from jaxtyping import Float
from typing_extensions import TypeIs

from ..._extras import dp_accounting
from .closed_forms import Profile, gaussian_delta

# Dense enough that finer ones change no third digit; see tests.
_ORDERS = 1 + np.geomspace(0.05, 2.0**17, 120)
_RATIOS = _ORDERS / (_ORDERS - 1)

_Curve: TypeAlias = Float[np.ndarray, " orders"]

_CELLS, _KINKS = 6_000, 150
# Beyond these quantiles of a chance one cell stands for all.
_FEWEST, _MOST = -8.0, 5.0


@dataclasses.dataclass(frozen=True)
class Repetitions:
    r"""The law of a random number of repetitions $K$.

    For a finite shape $\eta$ a negative binomial law on $K \ge 1$ with $P(K = k)
    \propto (1 - \gamma)^k \Gamma(k + \eta) / k!$: the geometric law at $\eta = 1$, the
    logarithmic one at 0. An infinite shape is the Poisson law, with which there may be
    no repetition at all.

    Args:
        mean: The expected number, above 1.
        shape: $\eta \ge 0$, possibly infinite.
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self):
        if not (math.isfinite(self.mean) and self.mean > 1):
            raise ValueError(f"Repetitions: mean must be above 1, got {self.mean!r}.")
        if not self.shape >= 0:
            raise ValueError(f"Repetitions: shape must be >= 0, got {self.shape!r}.")

    def __str__(self) -> str:
        """Return the law in words."""
        mean = f"mean {self.mean:.6g}"
        if math.isinf(self.shape):
            return f"Poisson, {mean}"
        return f"truncated negative binomial, shape {self.shape:.6g}, {mean}"

    @functools.cached_property
    def gamma(self) -> float:
        r"""Parameter $\gamma$ of the negative binomial law, solved from the mean."""

        def excess(log_gamma: float) -> float:
            gamma = math.exp(log_gamma)
            odds = 1 / gamma - 1
            if self.shape == 0:
                return odds / -math.log(gamma) - self.mean
            some = -math.expm1(self.shape * math.log(gamma))  # not zero repetitions
            return self.shape * odds / some - self.mean

        low = math.log(1e-3 / self.mean / (1 + self.shape))
        return math.exp(scipy.optimize.brentq(excess, low, -1e-12, xtol=1e-14))

    def slope(self, p: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return $f'(1 - p)$: $f(s)$ is the mean of $s^K$ for $K$ repetitions."""
        if math.isinf(self.shape):
            return self.mean * np.exp(-self.mean * p)
        ratio = self.gamma / (self.gamma + (1 - self.gamma) * p)
        return self.mean * ratio ** (1 + self.shape)

    def beyond(self, count: int) -> Float[np.ndarray, " count+1"]:
        """Return an array: chances of more than 0, 1, ..., `count` repetitions."""
        numbers = np.arange(count + 1)
        if math.isinf(self.shape):
            return scipy.stats.poisson.sf(numbers, self.mean)
        if self.shape > 0:
            law = scipy.stats.nbinom(self.shape, self.gamma)
            none = -math.expm1(self.shape * math.log(self.gamma))
            return np.minimum(law.sf(numbers) / none, 1.0)
        # Summed from the far end, so that small ones keep their digits.
        terms = np.arange(1, count + math.ceil(60 / self.gamma))
        chances = np.exp(terms * math.log1p(-self.gamma)) / terms
        chances /= -math.log(self.gamma)
        return np.minimum(np.cumsum(chances[::-1])[::-1][: count + 1], 1.0)

    def event(self, base: "dp_accounting.DpEvent") -> "dp_accounting.DpEvent":
        """Return the event of the best of a random number of runs, each of `base`."""
        events = dp_accounting.dp_event
        return events.RepeatAndSelectDpEvent(base, self.mean, self.shape)


class BestOf:
    r"""Upper bound on the privacy profile of one private selection.

    $\kappa$ is convex, and replaced by its chords: $\sum_j c_j (s_j - s)_+$ with $c_j
    \ge 0$, of which the mean is $\sum_j c_j s_j \delta_\mu(\varepsilon - \log s_j)$.
    On a cell of chances $f'(1 - p)$ is taken at the left end and $f'(1 - p')$ at the
    right one, where they are largest and smallest.

    Args:
        law: The law of $K$.
        mu: $\mu > 0$ of one run.
    """

    def __init__(self, law: Repetitions, mu: float):
        quantiles = np.linspace(_FEWEST - mu, _MOST, _CELLS)
        first, last = np.zeros(1), np.ones(1)
        left = np.concatenate([first, scipy.special.ndtr(quantiles)])
        right = np.concatenate([scipy.special.ndtr(quantiles + mu), last])
        # The factor covers the rounding of chances and slopes.
        larger, smaller = (1 + 2.0**-40) * law.slope(left), law.slope(right)
        largest = np.max(larger / smaller)  # here and beyond kappa is zero
        scales = np.geomspace(1 / largest, largest, _KINKS)
        scales = np.concatenate([first, scales])
        lines = larger[None] - scales[:, None] * smaller[None]
        kappa = np.maximum(lines.max(axis=1), 0.0)
        kappa[-1] = 0.0
        slopes = np.concatenate([np.diff(kappa) / np.diff(scales), first])
        # Rounding may leave a chord less steep than the next; more is safe.
        self._weights = np.maximum(np.diff(slopes), 0.0) * scales[1:]
        self._shifts, self._mu = np.log(scales[1:]), mu

    def delta(self, epsilon: float) -> float:
        r"""Return an upper bound on the selection's $\delta$ at $\varepsilon \ge 0$."""
        found: Profile = gaussian_delta(self._mu, epsilon - self._shifts)
        total = float(self._weights @ found)
        return min(1.0, total) if np.isfinite(total) else 1.0


def renyi_profile(
    parts: "list[tuple[dp_accounting.DpEvent, int]]",
) -> Callable[[float], float]:
    r"""Return a function from $\varepsilon \ge 0$ to $\delta$, by Renyi divergences.

    Args:
        parts: Gaussian releases and selections among such, each with how often it
            happens; multipliers are relative to the sensitivity under the relation.

    Raises:
        ValueError: Another event is among them.

    References:
        Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy",
        ICLR 2022: Theorem 6, with the exact profile of the Gaussian in it, and the
        proof of Theorem 2, with the exact chances of its events.
    """
    curves = (count * _curve(part) for part, count in parts)
    orders, curve = list(_ORDERS), list(sum(curves, np.zeros_like(_ORDERS)))
    compute = dp_accounting.rdp.rdp_privacy_accountant.compute_delta
    return lambda epsilon: float(compute(orders, curve, max(epsilon, 0.0))[0])


def is_selection(
    part: "dp_accounting.DpEvent",
) -> "TypeIs[dp_accounting.dp_event.RepeatAndSelectDpEvent]":
    """Return whether a part of a composition is a private selection."""
    return isinstance(part, dp_accounting.dp_event.RepeatAndSelectDpEvent)


def _curve(part: "dp_accounting.DpEvent") -> _Curve:
    """Return an array of a part's Renyi divergences, one for each order."""
    base = part.event if is_selection(part) else part
    if not isinstance(base, dp_accounting.GaussianDpEvent):
        raise ValueError(
            f"accounting: {base} is not accounted for beside private selection."
        )
    if base.noise_multiplier == 0:
        return np.full_like(_ORDERS, math.inf)
    mu = 1 / base.noise_multiplier
    single = _ORDERS * mu * mu / 2
    if not is_selection(part):
        return single
    # The bound and w are in the module's docstring.
    law = Repetitions(part.mean, part.shape)
    if math.isinf(law.shape):
        weight = law.mean * gaussian_delta(mu, np.log(_RATIOS))
    else:
        weight = (1 + law.shape) * _largest_log_ratio(law.gamma, mu)
    selected = single + math.log(law.mean) / (_ORDERS - 1) + weight
    # A divergence grows with its order, so a larger order's bounds a smaller's.
    return np.minimum.accumulate(selected[::-1])[::-1]


def _largest_log_ratio(gamma: float, mu: float) -> _Curve:
    r"""Return upper bounds on the module text's $\sup_p w / (1 + \eta)$, by order.

    A concave function of $p$ over a convex one has a single peak, and beside it every
    value is bounded by $u'$ at the right end of its bracket and $u$ at the left.
    """

    def log_u(quantile):
        return np.log1p((1 / gamma - 1) * scipy.special.ndtr(quantile))  # over gamma

    low, high = np.full_like(_ORDERS, -50 - mu), np.full_like(_ORDERS, 50.0)
    for _ in range(80):
        middle = (low + high) / 2
        slopes = log_u(middle) - log_u(middle + mu) - mu * (middle + mu / 2)
        rises = slopes > np.log(_RATIOS)
        low, high = np.where(rises, middle, low), np.where(rises, high, middle)
    return log_u(high + mu) - _RATIOS * log_u(low)
