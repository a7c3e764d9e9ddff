"""The bound of `GradientInformativeBO`: what its theorems promise of a plan."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy

from .. import _checks
from ..core.descent import Rule
from ..core.outputs import Last
from ..privacy.mechanisms import ROUNDING_MARGIN
from ..sets import moves_by_entropy
from .base import SearchProblem
from .kernels import AbstractStationary


class BoundedDescent:
    """Mixin of `GradientInformativeBO`: the bound that its theorems promise."""

    def bound(
        self: Any,
        problem: SearchProblem,
        w0: Any,
        *,
        smoothness: float,
        strong_convexity: float,
        initial_gap: float,
        gradient_bound: float,
        norm: float | None = None,
        radius: float | None = None,
        failure: float = 0.05,
    ) -> float:
        r"""Return a bound on the last iterate's excess loss, but for `failure`.

        With probability `1 - failure` the mean loss $f(\theta_T)$ exceeds
        $f(\theta^*)$ by at most

        $$(1 - \eta \tau)^T \Delta + \frac{1 - (1 - \eta \tau)^T}{2 \tau} (b + N)^2,$$

        where $N$ bounds the norm of the plan's noise in all $T$ steps that descend, $b
        = R \sqrt u$ the bias of a gradient, and $u$ is the tolerated trace in squared
        units of the gradient. Without `evaluation_noise` $R$ is `norm` (Theorem 3.7).
        With it (Theorem 3.10) $R$ is slightly above 1 and the losses are assumed to be
        independent samples of the prior, with independent Gaussian errors of variance
        $\sigma^2$, jitter included. Given losses are no samples: that bound is about
        the average over such losses. A sample's gradient is longer than
        `gradient_bound` with a probability above zero, which is not in `failure`.

        It is assumed that the points meet the tolerance in every step, and with
        `evaluation_noise` that none is dropped for a nearby later one. Both are public,
        and `minimize` warns if the tolerance is missed.

        Args:
            problem: The problem that the solver is calibrated for.
            w0: The initial point, for its shape.
            smoothness: $L$ of the mean loss, within `radius` of $\theta^*$.
            strong_convexity: $\tau \le L$ of the mean loss there.
            initial_gap: $\Delta \ge f(\theta_0) - f(\theta^*)$, with a `portfolio` at
                each of its points.
            gradient_bound: $B$, a bound on the gradient of every record's loss there.
            norm: $R$, a bound on $\sqrt{\|h\|^2 + a^2 / c_0}$ for every record's loss
                $h + a$, with $a$ a number, $h$ in the kernel's space and $c_0$ times
                the kernel's `variance` for $c_0$. `None` with `evaluation_noise`.
            radius: $r$, at least the distance from $\theta_0$ to $\theta^*$, the
                minimizer on the set; with `None` the constants hold on the whole set.
            failure: Probability in (0, 1) that the bound does not hold.

        Raises:
            ValueError: The solver is not calibrated, the theorems do not cover it or
                the problem, or `radius` is so small that iterates may leave the ball.

        Privacy:
            Reads public numbers only, and is no part of the guarantee.

        References:
            Sopa, Marusic, Avella-Medina and Cunningham, Theorems 3.7 and 3.10; derived
            with all constants and for projected steps in docs/mathematics.md.
        """
        owner = "GradientInformativeBO.bound"
        given: Any = {"smoothness": smoothness, "strong_convexity": strong_convexity}
        given |= {"initial_gap": initial_gap, "gradient_bound": gradient_bound}
        given |= {} if norm is None else {"norm": norm}
        given |= {} if radius is None else {"radius": radius}
        _checks.positive(owner, **given)
        _checks.fraction(owner, failure=failure)
        noisy = self.evaluation_noise > 0
        needs = {
            "strong_convexity up to smoothness": strong_convexity <= smoothness,
            "clip_norm of at least gradient_bound": self.clip_norm >= gradient_bound,
            "norm= if evaluation_noise is 0, and only then": noisy == (norm is None),
        }
        _check_covers(owner, self, problem, w0, smoothness, needs)
        parts, size = failure / 2 if noisy else failure, np.size(w0)
        std = self.release(problem, self.sizes).noise_std * (1 + ROUNDING_MARGIN)
        # Survival of the chi-square distribution; a union bound over the steps.
        error = std * math.sqrt(scipy.special.chdtri(size, parts / self.num_releases))
        error += _bias(self, problem, size, norm, parts)
        if radius is not None and error > strong_convexity * radius:
            least = f"{error / strong_convexity:.4g}"
            raise ValueError(
                f"{owner}: iterates may leave the ball. Give constants for a radius of "
                f"{least}, more records or a larger epsilon."
            )
        rate = min(float(self.step_size) * strong_convexity, 1.0)
        left = (1 - rate) ** self.num_releases
        return left * initial_gap + (1 - left) * error**2 / (2 * strong_convexity)


def _check_covers(
    owner: str, solver: Any, problem: Any, w0: Any, smoothness: float, needs: dict
) -> None:
    """Raise `ValueError` if the theorems do not cover solver, problem or constants."""
    rule, most = isinstance(solver.step_size, Rule), 1 / smoothness
    asked = solver.num_releases * solver._capacity(np.asarray(w0))
    needs = needs | {
        "a solver of a calibrated plan": solver.sizes is not None,
        "output=Last()": isinstance(solver.output, Last),
        f"a number up to {most:.4g} as step_size": not rule
        and solver.step_size <= (1 + 1e-6) * most,
        "a tolerance in place of batch=": solver.batch is None,
        "a stationary kernel": isinstance(solver.kernel, AbstractStationary),
        "a problem without a public term": problem.public is None,
        "projected steps": not moves_by_entropy(problem.w_set),
        # A point that is dropped because of later losses is no part of a posterior.
        f"keep of at least {asked} with evaluation_noise": solver.keep >= asked
        or solver.evaluation_noise == 0,
    }
    for need, met in needs.items():
        if not met:
            raise ValueError(f"{owner}: the theorems need {need}.")


def _bias(
    solver: Any, problem: Any, size: int, norm: float | None, failure: float
) -> float:
    """Return a bound on every gradient's bias, except with probability `failure`."""
    if solver.tolerance is None:
        trace = size * solver.release(problem, solver.sizes).deviation ** 2
    else:
        prior = solver.kernel.prior(jnp.zeros(size))
        trace = solver.tolerance * float(jnp.trace(prior))
    if norm is None:
        norm = excess_of_samples(solver.sizes, failure / solver.num_releases)
    rounding = 2.0**-22 * math.sqrt(size) * solver.clip_norm  # of the clipped mean
    return norm * math.sqrt(trace) + rounding


def excess_of_samples(records: int, failure: float) -> float:
    r"""Return a likely bound on the root mean square of Gaussian vectors of trace 1.

    The mean over the records of the squared norms of independent Gaussian vectors, each
    with a covariance of trace at most $u$, exceeds $R^2 u$ with a probability of at
    most `failure`, $p$. $R^2$ is the root above 1 of $q - 1 - \log q = \frac2n \log
    \frac1p$.
    """
    away = -2 * math.log(failure) / records
    return math.sqrt(-scipy.special.lambertw(-math.exp(-1 - away), -1).real)
