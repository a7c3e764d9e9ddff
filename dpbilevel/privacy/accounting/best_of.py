r"""The profile of private selection: the best of $K$ runs that are each $\mu$-GDP.

With $f(s)$ the mean of $s^K$, $p'(p) = \Phi(\Phi^{-1}(p) + \mu)$ and

$$
\kappa(s) = \max_{p} \bigl(f'(1 - p) - s f'(1 - p'(p))\bigr)_+
$$

the best is $(\varepsilon, \delta)$-DP with $\delta = \mathrm E\, \kappa(e^{\varepsilon}
e^{-L})$, where $L \sim \mathcal N(\mu^2 / 2, \mu^2)$ is the privacy loss of the
Gaussian. The proof is in `docs/mathematics.md`, "Private selection".
"""

import numpy as np
import scipy

from .gaussian import Profile, gaussian_delta
from .repetitions import Repetitions

_CELLS, _KINKS = 6_000, 150
# Beyond these quantiles of a chance one cell stands for all.
_FEWEST, _MOST = -8.0, 5.0


class BestOf:
    r"""The profile of one selection, from above.

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
        r"""$\delta$ at $\varepsilon \ge 0$."""
        found: Profile = gaussian_delta(self._mu, epsilon - self._shifts)
        total = float(self._weights @ found)
        return min(1.0, total) if np.isfinite(total) else 1.0
