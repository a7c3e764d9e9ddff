"""Proximal oracle that evaluates few random terms of a sum."""

import dataclasses
import math
from typing import ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, PyTree
from typing_extensions import override

from ...privacy.keys import PRNGKey, derive
from ...privacy.noise import standard_exponential
from ...sets import AbstractSet, Ball
from . import restricted
from .base import AbstractSumPotential, Regularity
from .proximal import AbstractProximalOracle, Attempt, ProximalPlan, ProximalTarget

_CLIP = 0.5
_MOST_STAGES = 63


class StochasticRejection(AbstractProximalOracle):
    r"""Proximal oracle that accepts by a few random terms of the potential's sum.

    For $U = \frac{1}{n} \sum_i u_i + \frac{m}{2} \|x - c\|^2$, a try draws $x, z$ from
    $\gamma \propto e^{-m \|x - c\|^2 / 2 - \|x - y\|^2 / (2 \eta)}$ on the set, random
    indices $j_1, j_2, \dots$, forms

    $$\rho = 1 + \sum_{a=1}^{N} \prod_{i \le a} \Delta_{j_i}, \qquad
    \Delta_j = \operatorname{clip}(u_j(z) - u_j(x), \pm \tfrac12), \qquad
    P(N \ge a) = \frac{1}{a!},$$

    and accepts $x$ with probability $\rho / 2$. As every $|\Delta_j| \le 1/2$, $\rho$
    lies in $[0, 2]$ always.

    **Distribution.** Given $x$ and $z$, with $u = \frac{1}{n} \sum_j \Delta_j$, $E \rho
    = e^u$; without clipping the exponent would be $v = \frac{1}{n} \sum_j (u_j(z) -
    u_j(x))$ and the distribution of an accepted $x$ exact. Dividing both densities by
    the larger of their masses,

    $$TV \le \frac{E |e^u - e^v|}{E e^v} \le E |e^u - e^v|,$$

    as $E e^v \ge e^{E v} = 1$. Let $W_j = (|u_j(z) - u_j(x)| - \frac12)^+$ and $\bar W$
    be their mean. $|u - v| \le \bar W$ and $\max(u, v) \le \frac12 + \bar W$, so that
    $|e^u - e^v| \le \sqrt e \, \bar W e^{\bar W} \le \sqrt e \, \frac1n \sum_j W_j
    e^{W_j}$ by convexity. The distribution of $(x, z)$ is $(m + 1/\eta)$-strongly
    log-concave and $u_j(z) - u_j(x)$ has mean zero and is $\sqrt2 G$-Lipschitz in $(x,
    z)$, hence $P(W_j > w) \le 2 e^{-(1/2 + w)^2 / (2 \sigma^2)}$ with $\sigma^2 = 2 G^2
    \eta / (1 + m \eta)$, and integrating $(1 + w) e^w$ against that,

    $$TV \le 2 \sqrt e \, e^{-1 / (8 \sigma^2)} \Bigl(\frac1c + \frac1{c^2}\Bigr),
    \qquad c = \frac{1}{2 \sigma^2} - 1 > 0 .$$

    A bias of $t$ needs no smaller $\eta$ than about $1 / (16 G^2 \log(2 / t))$. Only
    the Lipschitz constant of the terms enters: they need not be convex, nor smooth.

    The sum is cut after $A$ stages, which moves $E \rho$ by at most $\sum_{a > A}
    2^{-a} / a!$. $u$ is symmetric about zero, as $x$ and $z$ may be exchanged, so that
    odd powers have mean zero and a try is accepted with probability $\frac12 E
    \sum_{a \le A} u^a / a! \ge \frac12$, whatever $y$.

    Args:
        stages: $A$. Static; set by `with_counts`.
        draw_tries: The tries of one Gaussian draw on the set. Static; set by
            `with_counts`.

    References:
        Gopi, Lee and Liu, "Private Convex Optimization via Exponential Mechanism",
        Algorithm 2 and Lemmas 22 to 24; there $\rho$ itself is clipped, and the
        constant of the step size is not given.
    """

    stages: int | None = eqx.field(static=True, default=None)
    draw_tries: int | None = eqx.field(static=True, default=None)
    draws: ClassVar[int] = 2

    def largest_step(self, regularity: Regularity, feasible: AbstractSet) -> float:
        """Return a step size by the terms' slope, at most the squared diameter."""
        lipschitz = regularity.term_lipschitz
        if regularity.num_terms is None or lipschitz is None:
            raise ValueError(
                "StochasticRejection: no sum of terms. Use ConvexEnvelope."
            )
        if not 0 <= lipschitz < math.inf or regularity.error > 0:
            raise ValueError(
                "StochasticRejection: needs exact terms and a finite term_lipschitz, "
                f"got {lipschitz} and error={regularity.error}. Use ConvexEnvelope."
            )
        most = restricted.diameter(feasible, regularity.dimension) ** 2
        variance = 1 / (16 * lipschitz**2) if lipschitz > 0 else math.inf
        if regularity.quadratic * variance < 1:
            most = min(most, variance / (1 - regularity.quadratic * variance))
        return most

    def with_counts(self, plan: ProximalPlan) -> Self:
        """Return a copy with stages and tries; each costs at most `failure` / 4."""
        stages, allowed = self.stages or 1, plan.failure / 4
        if self.stages is None:
            while plan.num_steps * _cut(stages) > allowed and stages < _MOST_STAGES:
                stages += 1
        draw_tries = self.enough_draw_tries(plan)
        return dataclasses.replace(self, stages=stages, draw_tries=draw_tries)

    def serves(self, plan: ProximalPlan) -> bool:
        """Return whether the potential is an exact sum of Lipschitz terms."""
        potential = plan.regularity
        terms = potential.num_terms, potential.term_lipschitz
        return None not in terms and potential.error == 0

    def bias(self, plan: ProximalPlan) -> float:
        """Return a bound on a try's total variation, by clipping and cut stages."""
        deviation, _, _ = self.gaussian(plan)
        variance = 2 * (deviation * (plan.regularity.term_lipschitz or 0.0)) ** 2
        cut = 0.0 if self.stages is None else _cut(self.stages)
        if variance == 0:
            return cut
        rate = 1 / (2 * variance) - 1  # c
        if rate <= 0:
            return 1.0  # the bound says nothing
        tail = math.exp(0.5 - 1 / (8 * variance)) * 2
        return min(1.0, tail * (1 / rate + 1 / rate**2) + cut)

    @override
    def acceptance(self, plan: ProximalPlan) -> float:
        return 0.5

    def gaussian(self, plan: ProximalPlan) -> tuple[float, float, float]:
        """Return proposals' deviation; w, b: mean within w dist(y) + b of the set."""
        weight = 1 / (1 + plan.regularity.quadratic * plan.step_size)
        away, feasible = 0.0, plan.feasible  # how far zero is from a ball
        if isinstance(feasible, Ball) and feasible.center is not None:
            center = float(optax.tree.norm(feasible.center))
            away = max(0.0, center - float(feasible.radius))
        return math.sqrt(plan.step_size * weight), weight, (1 - weight) * away

    def evaluations(self) -> tuple[float, int]:
        """Return the mean and the largest number of term values per try."""
        return 2 * (math.e - 1), 2 * (self.stages or 1)

    def prepare(self, target: ProximalTarget, y: PyTree) -> PyTree:
        """Return the mean of the Gaussian proposals at `y`.

        Raises:
            TypeError: The potential is no sum.
        """
        if not isinstance(target.potential, AbstractSumPotential):
            raise TypeError("StochasticRejection: needs an AbstractSumPotential.")
        return target.potential.middle(y, target.step_size)

    def attempt(self, target, y, common, *, key) -> Attempt:
        """Make one try at `y`; return point, whether accepted, and values needed."""
        (potential, feasible, step_size), stages = target, self.stages or 1
        assert isinstance(potential, AbstractSumPotential)
        keys = derive(key, "proposal", "rival", "index", "stages", "accept")
        deviation = (step_size / (1 + potential.quadratic * step_size)) ** 0.5
        # Algorithm 2 of Gopi, Lee and Liu: x and z.
        draws = feasible, common, deviation, self.draw_tries or 1
        both = jax.vmap(lambda k: restricted.restricted_normal(*draws, key=k))(keys[:2])
        x, z = (jax.tree.map(lambda v, i=i: v[i], both) for i in (0, 1))
        # The inner loop: products of differences of random terms, until a break.
        indices = jax.random.randint(keys[2], (stages,), 0, potential.num_terms)
        values = jax.vmap(potential.term, (0, None))
        gaps = values(indices, z) - values(indices, x)
        gaps = jnp.where(jnp.isnan(gaps), 0, jnp.clip(gaps, -_CLIP, _CLIP))
        reached = _reached(stages, gaps.dtype, keys[3])
        rho = 1 + jnp.sum(jnp.where(reached, jnp.cumprod(gaps), 0))
        # The last line, u <= rho / 2, with u = exp(-coin).
        coin = standard_exponential((), rho.dtype, key=keys[4])
        return x, coin >= -jnp.log(rho / 2), 2 * jnp.sum(reached).astype(rho.dtype)


def _reached(stages: int, dtype, key: PRNGKey) -> Bool[Array, " stages"]:
    """Draw the reached stages as a mask: stage a is passed with chance 1 / (1 + a)."""
    # P(E > log(1 + a)) = 1 / (1 + a) for an exponential E.
    bars = jnp.log1p(jnp.arange(1, stages + 1).astype(dtype))
    onward = standard_exponential((stages,), dtype, key=key) > bars
    return jnp.concatenate([jnp.ones(1, bool), jnp.cumprod(onward)[:-1].astype(bool)])


def _cut(stages: int) -> float:
    """Return a bound on what the stages left out change in the mean estimate."""
    first = math.exp((stages + 1) * math.log(_CLIP) - math.lgamma(stages + 2))
    return first / (1 - _CLIP / (stages + 2))
