"""The alternating sampler of strongly log-concave densities on a bounded set."""

import dataclasses
import math
from typing import Self

import equinox as eqx
import jax
import jax.numpy as jnp
import scipy
from jaxtyping import Array, Float, PyTree

from ... import _checks
from ...privacy.noise import PRNGKey, check_key, derive, standard_normal
from ...sets import AbstractSet
from . import restricted
from ._walk_bounds import duration
from .base import AbstractPotential, AbstractSampler, Certificate, Regularity
from .proximal import AbstractProximalOracle, combination, draw_failure

_MOST_TRIES = 10**9
_LEAST_ACCEPTANCE = 1e-3
# How the distance is shared out: the start forgotten, accepted tries that have not
# their law, tries that run out, draws of proposals that run out.
_MIXING, _BIAS, _TRIES, _DRAWS = 0.5, 0.25, 0.125, 0.125


class _Chain(eqx.Module):
    x: PyTree
    y: PyTree
    prepared: PyTree
    done: Array  # accepted tries so far
    fresh: Array  # whether y is still to be drawn
    queries: Array  # evaluations that were needed
    key: PRNGKey


class AlternatingSampler(AbstractSampler):
    r"""Adds Gaussian noise, then draws from the density near by; in turns.

    For a potential $U$ with $U - \frac{\alpha}{2} \|x\|^2$ convex, $\alpha > 0$, on a
    convex set $X$ of diameter $D$, each of $T$ steps draws

    $$y_t = x_{t-1} + \sqrt\eta \, \mathcal N(0, I), \qquad
    x_t \propto e^{-U(x) - \|x - y_t\|^2 / (2 \eta)} \text{ on } X,$$

    the latter by the tries of the oracle. All steps draw on one fixed number of tries,
    so that neither time nor memory depends on the records, unless the potential's do.

    **Mixing.** The law $\pi \propto e^{-U}$ is stationary: both draws are conditionals
    of $e^{-U(x) - \|x - y\|^2 / (2 \eta)}$. Let $\pi_y$ be the law of $x_t$ at $y_t =
    y$, which is $(\alpha + 1/\eta)$-strongly log-concave. The log-densities of $\pi_y$
    and $\pi_{y'}$ differ by a linear function of slope $\|y - y'\| / \eta$, so that by
    the inequalities of Talagrand and log-Sobolev

    $$W_2(\pi_y, \pi_{y'}) \le \frac{\|y - y'\| / \eta}{\alpha + 1/\eta}
        = \frac{\|y - y'\|}{1 + \alpha \eta} .$$

    With the same noise for both, $W_2(\text{law of } x_m, \pi) \le D / (1 + \alpha
    \eta)^m$. In one step more, the laws of $x_m$ and of $\pi$ plus noise, and hence
    what is drawn from them, have a divergence $KL \le W_2^2 / (2 \eta)$, by coupling
    and convexity. By Pinsker's inequality

    $$TV(\text{law of } x_{m+1}, \pi)
        \le \frac{D}{2 \sqrt\eta \, (1 + \alpha \eta)^m} .$$

    Where values are within $\zeta$ of those of $U$, the density of the computed
    potential satisfies a log-Sobolev inequality with $\alpha' = e^{-2 \zeta} \alpha$
    (Holley and Stroock). The first step gives $KL \le D^2 / (2 \eta)$, by the same
    coupling, and each further one divides it by $(1 + \alpha' \eta)^2$: the same bound
    with $\alpha'$.

    **Total.** An accepted try has its law up to the oracle's bias, which adds up over
    the steps. A try is accepted with probability $p$ or more, so that $B$ tries do not
    serve $T$ steps with probability at most $P(\mathrm{Bin}(B, p) < T)$; then what is
    returned is the point of the last step made. The counts are chosen such that mixing
    takes half of `distance`, bias a quarter, tries that run out and draws that run out
    an eighth each.

    Args:
        oracle: `StochasticRejection` or `ConvexEnvelope`.
        distance: The total variation distance that is planned for; with $\varepsilon$
            to be guaranteed it adds $(1 + e^\varepsilon)$ times as much to $\delta$.
        num_steps: $T$. Static; planned where omitted.
        step_size: $\eta$; planned where omitted: the largest at which the bias is small
            enough.
        tries: $B$. Static; planned where omitted.
        max_queries: Planning refuses to make more evaluations than that. Static.

    Privacy:
        None by itself: see `Certificate`. That $U$ is strongly convex on the set is
        assumed, not checked.

    References:
        Lee, Shen and Tian, COLT 2021; Gopi, Lee and Liu, "Private Convex Optimization
        via Exponential Mechanism", Algorithm 1 and Theorem 16, which leaves the
        constants open; Chen, Chewi, Salim and Wibisono, "Improved analysis for a
        proximal algorithm for sampling", COLT 2022, Theorems 2 and 3.
    """

    oracle: AbstractProximalOracle
    distance: float
    num_steps: int | None = eqx.field(static=True, default=None)
    step_size: float | None = None
    tries: int | None = eqx.field(static=True, default=None)
    max_queries: int = eqx.field(static=True, default=10_000_000)

    def __check_init__(self):
        _checks.instance(
            "AlternatingSampler", AbstractProximalOracle, oracle=self.oracle
        )
        _checks.fraction("AlternatingSampler", distance=self.distance)
        for name in ("num_steps", "tries"):
            if getattr(self, name) is not None:
                _checks.count("AlternatingSampler", **{name: getattr(self, name)})
        if self.step_size is not None:
            _checks.positive("AlternatingSampler", step_size=self.step_size)

    def planned(self, regularity: Regularity, feasible: AbstractSet) -> Self:
        r"""The sampler with $\eta$, $T$, $B$ and the counts of its oracle.

        Args:
            regularity: What is known of the potential.
            feasible: The set.

        Raises:
            ValueError: A potential that is not known to be strongly convex, an
                unbounded set, a step size too large for the oracle, more than
                `max_queries` evaluations, or what the oracle does not serve.
        """
        _check(regularity, feasible)
        largest = self.oracle.largest_step(regularity, feasible)
        step_size = self.step_size
        if step_size is None:
            step_size = self._step_size(regularity, feasible, largest)
        num_steps = self.num_steps or self._steps(regularity, feasible, step_size)
        chance = self.oracle.acceptance(regularity, feasible, step_size)
        bias = num_steps * self.oracle.bias(regularity, step_size)
        if chance < _LEAST_ACCEPTANCE or bias > _BIAS * self.distance:
            found = self._step_size(regularity, feasible, largest)
            raise ValueError(
                f"AlternatingSampler: step_size {step_size:.3g} is too large: a try is "
                f"only known to be accepted with probability {chance:.2g}, and "
                f"accepted ones are off by {bias:.2g} in all. Use about {found:.3g}, "
                "or leave it open."
            )
        tries = self.tries or _enough_tries(num_steps, chance, _TRIES * self.distance)
        oracle = self.oracle.planned(
            regularity,
            feasible,
            step_size=step_size,
            num_steps=num_steps,
            tries=tries,
            share=_DRAWS * self.distance,
        )
        total = tries * oracle.evaluations()[1]
        if total > self.max_queries:
            raise ValueError(
                f"AlternatingSampler: {num_steps:.3g} certified steps in {tries:.3g} "
                f"tries make {total:.3g} evaluations, {duration(total * 3e-5)} at 30 "
                f"microseconds each; max_queries is {self.max_queries:.3g}. What "
                "helps: a smooth loss with a declared smoothness, ConvexEnvelope, a "
                "smaller epsilon or fewer records, or a larger max_queries."
            )
        return dataclasses.replace(
            self, oracle=oracle, num_steps=num_steps, step_size=step_size, tries=tries
        )

    def certificate(self, regularity: Regularity, feasible: AbstractSet) -> Certificate:
        """The bound of the class, at the counts of this sampler.

        With all of them open, `distance`, which planning will reach or refuse.

        `queries` is how many evaluations are needed on average; how many are made is
        in the notes. `proved` is false where the counts do not reach `distance`, or the
        oracle was planned for another potential.

        Args:
            regularity: What is known of the potential.
            feasible: The set.

        Raises:
            ValueError: The sampler is not planned.
        """
        _check(regularity, feasible)
        if (self.num_steps, self.step_size, self.tries) == (None, None, None):
            return Certificate(0, math.inf, distance=self.distance)
        if None in (self.num_steps, self.step_size, self.tries):
            return self.planned(regularity, feasible).certificate(regularity, feasible)
        num_steps, step_size, tries = self._counts()
        chance = self.oracle.acceptance(regularity, feasible, step_size)
        mixing = _mixing(regularity, feasible, step_size, num_steps)
        bias = num_steps * self.oracle.bias(regularity, step_size)
        late = float(scipy.stats.binom.cdf(num_steps - 1, tries, chance))
        draws = draw_failure(
            self.oracle,
            regularity,
            feasible,
            step_size=step_size,
            num_steps=num_steps,
            tries=tries,
            share=_DRAWS * self.distance,
        )
        total = min(1.0, mixing + bias + late + draws)
        mean, most = self.oracle.evaluations()
        serves = self.oracle.serves(regularity, feasible)
        stale = f"HEURISTIC: {type(self.oracle).__name__} was planned for another law"
        return Certificate(
            num_steps=num_steps,
            queries=min(num_steps / chance, tries) * mean,
            distance=total,
            proved=serves and total <= self.distance,
            aim=self.distance,
            notes=(
                *(() if serves else (stale,)),
                f"the potential is {regularity.strong_convexity:.4g}-strongly convex "
                "on the set",
                f"within {total:.3g} in total variation: {mixing:.2g} of the start, "
                f"{bias:.2g} of accepted tries, {late:.2g} of tries and {draws:.2g} of "
                "draws that run out",
                f"{num_steps} steps of size {step_size:.4g} in {tries} tries, which "
                f"make {tries * most} evaluations",
            ),
        )

    def draw(
        self,
        potential: AbstractPotential,
        feasible: AbstractSet,
        start: PyTree,
        *,
        key: PRNGKey,
    ) -> PyTree:
        """The point of the last step.

        Args:
            potential: The potential.
            feasible: The set.
            start: A public point; projected onto the set.
            key: A typed key.

        Raises:
            ValueError: The sampler is not planned.
        """
        return self._run(potential, feasible, start, key).x

    def _run(self, potential, feasible, start, key) -> _Chain:
        check_key(key)
        num_steps, step_size, tries = self._counts()

        def attempt(_, chain):
            keys = derive(chain.key, "next", "smooth", "reject")
            moved = _noisy(chain.x, step_size, keys[1])
            made = self.oracle.prepared(potential, feasible, moved, step_size)
            y = _where(chain.fresh, moved, chain.y)
            prepared = _where(chain.fresh, made, chain.prepared)
            x, accepted, queries = self.oracle.attempt(
                potential, feasible, y, prepared, step_size, key=keys[2]
            )
            running = chain.done < num_steps
            accepted = accepted & running
            return _Chain(
                _where(accepted, x, chain.x),
                y,
                prepared,
                chain.done + accepted.astype(jnp.int32),
                accepted,
                chain.queries + jnp.where(running, queries, 0).astype(jnp.float32),
                keys[0],
            )

        x = feasible.project(jax.tree.map(jnp.asarray, start))
        made = jax.eval_shape(
            lambda v: self.oracle.prepared(potential, feasible, v, step_size), x
        )
        blank = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), made)
        zero = jnp.zeros((), jnp.int32)
        first = _Chain(x, x, blank, zero, zero == 0, jnp.zeros((), jnp.float32), key)
        return jax.lax.fori_loop(0, tries, attempt, first)

    def _counts(self) -> tuple[int, float, int]:
        if self.num_steps is None or self.step_size is None or self.tries is None:
            raise ValueError(
                "AlternatingSampler: not planned; use "
                "sampler.planned(regularity, feasible) first."
            )
        return self.num_steps, self.step_size, self.tries

    def _steps(self, regularity, feasible, step_size) -> int:
        width = restricted.diameter(feasible, regularity.dimension)
        start = width / (2 * math.sqrt(step_size) * _MIXING * self.distance)
        rate = math.log1p(_convexity(regularity) * step_size)
        return 1 + max(0, math.ceil(math.log(start) / rate))

    def _step_size(self, regularity, feasible, largest: float) -> float:
        """The largest step size at which the bias of all steps takes its share."""

        def serves(step_size):
            steps = self.num_steps or self._steps(regularity, feasible, step_size)
            bias = steps * self.oracle.bias(regularity, step_size)
            # The oracle adds the cutting of its stages once it is planned.
            return bias <= 0.5 * _BIAS * self.distance

        if serves(largest):
            return largest
        low, high = math.log(largest) - 20.0, math.log(largest)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if serves(math.exp(middle)) else (low, middle)
        return math.exp(low)


def needed_queries(
    sampler: AlternatingSampler,
    potential: AbstractPotential,
    feasible: AbstractSet,
    start: PyTree,
    *,
    key: PRNGKey,
) -> Float[Array, ""]:
    """NON-PRIVATE: how many evaluations a draw needed, for benchmarks.

    A sampler that stopped at the last accepted try, and left out the stages that were
    not reached, would make that many. It depends on the records: never release it.

    Args:
        sampler: Planned.
        potential: The potential.
        feasible: The set.
        start: A point.
        key: A typed key; the draw is that of `sampler.draw` with it.
    """
    return sampler._run(potential, feasible, start, key).queries


def _check(regularity: Regularity, feasible: AbstractSet) -> None:
    if not regularity.strong_convexity:
        raise ValueError(
            "AlternatingSampler: the potential must be strongly convex, got "
            f"strong_convexity={regularity.strong_convexity}. Add a quadratic to it, "
            "or use a sampler that needs no convexity."
        )
    width = restricted.diameter(feasible, regularity.dimension)
    if not 0 < width < math.inf:
        raise ValueError(
            "AlternatingSampler: the set must be bounded and more than a point, got "
            f"a {type(feasible).__name__} of diameter {width}. Use a Box or a Ball."
        )
    restricted.check_set(feasible)


def _convexity(regularity: Regularity) -> float:
    error = regularity.error + regularity.rounding
    return (regularity.strong_convexity or 0.0) * math.exp(-2 * error)


def _mixing(regularity, feasible, step_size: float, num_steps: int) -> float:
    width = restricted.diameter(feasible, regularity.dimension)
    rate = math.log1p(_convexity(regularity) * step_size)
    return width / (2 * math.sqrt(step_size)) * math.exp(-(num_steps - 1) * rate)


def _enough_tries(num_steps: int, chance: float, failure: float) -> int:
    """The least number of tries of which too few are accepted with that chance."""

    def serves(tries):
        return scipy.stats.binom.cdf(num_steps - 1, tries, chance) <= failure

    low, high = num_steps - 1, max(num_steps, math.ceil(num_steps / chance))
    while not serves(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if serves(middle) else (middle, high)
    if high > _MOST_TRIES:
        raise ValueError(
            f"AlternatingSampler: {num_steps} steps would need {high} tries; at most "
            f"{_MOST_TRIES} are made. Use a larger distance or regularizer, or a "
            "potential that is less steep."
        )
    return high


def _noisy(x: PyTree, step_size, key: PRNGKey) -> PyTree:
    return combination(1, x, step_size**0.5, standard_normal(x, key=key))


def _where(condition, left: PyTree, right: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), left, right)
