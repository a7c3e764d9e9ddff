"""Alternating sampler of strongly log-concave densities on a bounded set."""

import dataclasses
import math
from typing import Any, Literal, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import scipy
from jaxtyping import Array, Bool, Float, Int, PyTree
from typing_extensions import override

from ..._checks import Count, Fraction, Positive
from ...core.descent import add_scaled
from ...privacy.exact.normal import standard_normal
from ...privacy.keys import PRNGKey, check_key, derive
from ...sets import AbstractSet
from . import _untimed, proximal, restricted
from ._lattice import duration
from .base import AbstractPotential, AbstractSampler, Regularity, SamplerGuarantee

_LEAST_ACCEPTANCE = 1e-3
# Fractions of the distance: effect of the initial point, bias of accepted tries, tries
# that run out, draws of proposals that run out.
_MIXING, _BIAS, _TRIES, _DRAWS = 0.5, 0.25, 0.125, 0.125
_COUNTS = ("num_steps", "step_size", "tries")
_MOST_STEPS = 2**30
_STALE = "HEURISTIC: {} was planned for another potential or set"
_NOT_PLANNED = "AlternatingSampler: its counts are not planned by with_counts."
_CONVEX = "the potential is {:.4g}-strongly convex on the set"


class Chain(eqx.Module):
    """State of a run after a number of tries. NON-PRIVATE.

    `queries` counts what was needed: the evaluations of a sampler that stops at the
    last accepted try and leaves out the stages that are not reached.
    """

    x: PyTree  # the point of the last step made
    y: PyTree  # the noisy point that tries are made at
    common: PyTree  # what the tries at y have in common
    done: Int[Array, ""]  # steps made: tries that were accepted
    fresh: Bool[Array, ""]  # whether the next try is the first of a step
    queries: Float[Array, ""]
    key: PRNGKey  # of the next try


class AlternatingSampler(AbstractSampler):
    r"""Sampler that adds Gaussian noise and draws from the density near by, in turns.

    For a potential $U$ with $U - \frac{\alpha}{2} \|x\|^2$ convex, $\alpha > 0$, on a
    convex set $X$ of diameter $D$, each of $T$ steps draws

    $$y_t = x_{t-1} + \sqrt\eta \, \mathcal N(0, I), \qquad
    x_t \propto e^{-U(x) - \|x - y_t\|^2 / (2 \eta)} \text{ on } X,$$

    the latter by the tries of the oracle. All steps draw on one fixed number of tries,
    so that neither time nor memory depends on the records, unless the potential's do.

    **Mixing.** The distribution $\pi \propto e^{-U}$ is stationary: both draws are
    conditionals of $e^{-U(x) - \|x - y\|^2 / (2 \eta)}$. Let $\pi_y$ be the
    distribution of $x_t$ at $y_t = y$, which is $(\alpha + 1/\eta)$-strongly
    log-concave. The log-densities of $\pi_y$ and $\pi_{y'}$ differ by a linear function
    of slope $\|y - y'\| / \eta$, so that by the inequalities of Talagrand and
    log-Sobolev

    $$W_2(\pi_y, \pi_{y'}) \le \frac{\|y - y'\| / \eta}{\alpha + 1/\eta}
        = \frac{\|y - y'\|}{1 + \alpha \eta} .$$

    With the same noise for both, $W_2(\text{distribution of } x_m, \pi) \le D / (1 +
    \alpha \eta)^m$. In one step more, the distributions of $x_m$ and of $\pi$ plus
    noise, and hence what is drawn from them, have a divergence $KL \le W_2^2 / (2
    \eta)$, by coupling and convexity. By Pinsker's inequality

    $$TV(\text{distribution of } x_{m+1}, \pi)
        \le \frac{D}{2 \sqrt\eta \, (1 + \alpha \eta)^m} .$$

    If values are within $\zeta$ of those of $U$, the density of the computed
    potential satisfies a log-Sobolev inequality with $\alpha' = e^{-2 \zeta} \alpha$
    (Holley and Stroock). The first step gives $KL \le D^2 / (2 \eta)$, by the same
    coupling, and each further one divides it by $(1 + \alpha' \eta)^2$: the same bound
    with $\alpha'$.

    **Total.** An accepted try has its distribution up to the oracle's bias, which adds
    up over the steps. A try is accepted with probability $p$ or more, so that $B$ tries
    do not serve $T$ steps with probability at most $P(\mathrm{Bin}(B, p) < T)$; then
    what is returned is the point of the last step made. The counts are chosen such that
    mixing takes half of `distance`, bias a quarter, tries that run out and draws that
    run out an eighth each.

    **Unprotected running time.** The bound on mixing holds at every $\eta$, and tries
    of `ConvexEnvelope` have their distribution at every $\eta$ and $c$. With
    `running_time="unprotected"` the records choose: descent finds a start, and a few
    tries there find the step worth its tries, never below the planned one; $T$ follows
    from it, and every step takes as many tries as it needs. For every step size that
    may be chosen the distribution is within the bound, hence also their mixture. All of
    `distance` goes to mixing, as tries cannot run out. The time depends on the records.

    Args:
        oracle: `StochasticRejection` or `ConvexEnvelope`.
        distance: The total variation distance that is aimed at; with $\varepsilon$
            to be guaranteed it adds $(1 + e^\varepsilon)$ times as much to $\delta$.
        num_steps: $T$; by default set by `with_counts`. Static.
        step_size: $\eta$; by default the largest whose bias is small enough.
        tries: $B$; by default set by `with_counts`. Static.
        max_queries: `with_counts` refuses to make more evaluations than that. Static.
        running_time: `"fixed"`, or `"unprotected"`, which is orders of magnitude faster
            and shows how long it takes. Static.
        mixing: Set by `with_counts` if the running time is unprotected.

    Privacy:
        A sampler alone has none: see `SamplerGuarantee`. Strong convexity of $U$ on the
        set is assumed, not checked. An unprotected running time is part of no
        guarantee: use it only if nobody untrusted can time the draw.

    References:
        Lee, Shen and Tian, COLT 2021; Gopi, Lee and Liu, "Private Convex Optimization
        via Exponential Mechanism", Algorithm 1 and Theorem 16, which leaves the
        constants open; Chen, Chewi, Salim and Wibisono, "Improved analysis for a
        proximal algorithm for sampling", COLT 2022, Theorems 2 and 3.
    """

    oracle: proximal.AbstractProximalOracle
    distance: Fraction
    num_steps: Count | None = eqx.field(static=True, default=None)
    step_size: Positive | None = None
    tries: Count | None = eqx.field(static=True, default=None)
    max_queries: int = eqx.field(static=True, default=10_000_000)
    running_time: Literal["fixed", "unprotected"] = eqx.field(
        static=True, default="fixed", kw_only=True
    )
    mixing: proximal.Mixing | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        if self._time_unprotected and (self.num_steps or self.tries):
            raise ValueError(
                "AlternatingSampler: leave out num_steps and tries: records set them "
                'if running_time="unprotected".'
            )

    @property
    def _time_unprotected(self) -> bool:
        return self.running_time == "unprotected"

    @property
    @override
    def assumptions(self) -> tuple[str, ...]:
        if not self._time_unprotected:
            return self.oracle.assumptions
        return (
            *self.oracle.assumptions,
            "unprotected: how long the draw takes; its step size and its number of "
            "steps and tries depend on records",
        )

    def with_counts(self, regularity: Regularity, feasible: AbstractSet) -> Self:
        r"""Return a copy with step size, steps, tries and oracle counts set.

        Raises:
            ValueError: A potential that is not known to be strongly convex, an
                unbounded set, a step size too large for the oracle, more than
                `max_queries` evaluations, or what the oracle does not serve.
        """
        _check(regularity, feasible)
        largest = self.oracle.largest_step(regularity, feasible)
        open_plan = self._plan(regularity, feasible, step_size=largest)
        step_size = self.step_size or self._step_size(open_plan)
        plan = self._plan(regularity, feasible, step_size=step_size)
        if self._time_unprotected:
            # The least step size; records choose the one in use.
            while self._steps(plan) > _MOST_STEPS:  # any step size will do
                plan = dataclasses.replace(plan, step_size=2 * plan.step_size)
            oracle = _untimed.require_exact(self.oracle).without_counts(plan)
            planned: Any = {"step_size": plan.step_size}
            planned |= {"oracle": oracle, "mixing": proximal.Mixing.of(plan)}
            return dataclasses.replace(self, **planned)
        num_steps = self.num_steps or self._steps(plan)
        chance = self.oracle.acceptance(plan)
        bias = num_steps * self.oracle.bias(plan)
        if chance < _LEAST_ACCEPTANCE or bias > _BIAS * self.distance:
            raise ValueError(
                f"AlternatingSampler: step_size={step_size:.3g} is too large. Use "
                f"about {self._step_size(open_plan):.3g}."
            )
        failure = _TRIES * self.distance
        tries = self.tries or proximal.enough_tries(num_steps, chance, failure)
        plan = dataclasses.replace(plan, num_steps=num_steps, tries=tries)
        oracle = self.oracle.with_counts(plan)
        total = tries * oracle.evaluations()[1]
        if total > self.max_queries:
            raise ValueError(
                f"AlternatingSampler: {total:.3g} evaluations, about "
                f"{duration(total * 3e-5)}, exceed max_queries={self.max_queries:.3g}. "
                "Declare a smoothness, or use ConvexEnvelope."
            )
        return dataclasses.replace(
            self, oracle=oracle, num_steps=num_steps, step_size=step_size, tries=tries
        )

    def guarantee(self, regularity, feasible) -> SamplerGuarantee:
        """Return the `SamplerGuarantee` for these counts, as the class text derives it.

        With all of them open, `distance`, which `with_counts` will reach or refuse.

        `queries` is how many evaluations are needed on average; how many are made is
        in the notes. `proved` is false if the counts do not reach `distance`, or
        those of the oracle are for another potential.

        Raises:
            ValueError: Some counts are open, and `with_counts` refuses.
        """
        _check(regularity, feasible)
        if self._time_unprotected:
            return self._unprotected_guarantee(regularity, feasible)
        counts = {name: getattr(self, name) for name in _COUNTS}
        if all(count is None for count in counts.values()):
            return SamplerGuarantee(0, math.inf, distance=self.distance)
        if None in counts.values():
            sampler = self.with_counts(regularity, feasible)
            return sampler.guarantee(regularity, feasible)
        num_steps, step_size, tries = counts.values()
        plan = self._plan(regularity, feasible, **counts)
        chance = self.oracle.acceptance(plan)
        mixing = proximal.Mixing.of(plan).remaining(step_size, num_steps)
        bias = num_steps * self.oracle.bias(plan)
        late = float(scipy.stats.binom.cdf(num_steps - 1, tries, chance))
        draws = self.oracle.draw_failure(plan)
        total = min(1.0, mixing + bias + late + draws)
        mean, most = self.oracle.evaluations()
        serves = self.oracle.serves(plan)
        stale = _STALE.format(type(self.oracle).__name__)
        notes = (
            *(() if serves else (stale,)),
            _CONVEX.format(regularity.strong_convexity),
            f"within {total:.3g} in total variation: {mixing:.2g} of the start, "
            f"{bias:.2g} of accepted tries, {late:.2g} of tries and {draws:.2g} of "
            "draws that run out",
            f"{num_steps} steps of size {step_size:.4g} in {tries} tries, which "
            f"make {tries * most} evaluations",
        )
        queries, proved = min(num_steps / chance, tries) * mean, total <= self.distance
        found = num_steps, queries, 0.0, total, serves and proved
        return SamplerGuarantee(*found, self.distance, notes)

    def draw(self, potential, feasible, start, *, key) -> PyTree:
        """Return a drawn point: the last step's, begun at `start` on the set."""
        if self._time_unprotected:
            check_key(key)
            if self.step_size is None or self.mixing is None:
                raise ValueError(_NOT_PLANNED)
            target = proximal.ProximalTarget(potential, feasible, self.step_size)
            oracle = _untimed.require_exact(self.oracle)
            rest = self.mixing, self.distance, start
            return _untimed.draw(oracle, target, *rest, key=key)
        return self.run(potential, feasible, start, key=key).x

    def run(
        self,
        potential: AbstractPotential,
        feasible: AbstractSet,
        start: PyTree,
        *,
        key: PRNGKey,
    ) -> Chain:
        """Return the `Chain` of all tries. NON-PRIVATE: its counts depend on records.

        Raises:
            ValueError: The sampler's counts are open.
        """
        check_key(key)
        num_steps, step_size, tries = self.num_steps, self.step_size, self.tries
        if num_steps is None or step_size is None or tries is None:
            raise ValueError(_NOT_PLANNED)
        target = proximal.ProximalTarget(potential, feasible, step_size)

        def attempt(_, chain):
            keys = derive(chain.key, "next", "smooth", "reject")
            # Algorithm 1 of Gopi, Lee and Liu: y_t, once per step.
            noise = standard_normal(chain.x, key=keys[1])
            noisy = add_scaled(chain.x, step_size**0.5, noise)
            y = optax.tree.where(chain.fresh, noisy, chain.y)
            common = self.oracle.prepare(target, noisy)  # in vain if the step goes on
            common = optax.tree.where(chain.fresh, common, chain.common)
            # Line 1 of that algorithm: x_t given y_t, by one try.
            x, accepted, queries = self.oracle.attempt(target, y, common, key=keys[2])
            running = chain.done < num_steps  # else the point of the last step stays
            accepted = accepted & running
            x = optax.tree.where(accepted, x, chain.x)
            done = chain.done + accepted.astype(jnp.int32)
            queries = jnp.where(running, queries, 0).astype(jnp.float32)
            queries = chain.queries + queries
            return Chain(x, y, common, done, accepted, queries, keys[0])

        x = feasible.project(jax.tree.map(jnp.asarray, start))
        shapes = jax.eval_shape(lambda y: self.oracle.prepare(target, y), x)
        blank = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), shapes)
        zero = jnp.zeros((), jnp.int32)
        first = Chain(x, x, blank, zero, zero == 0, jnp.zeros((), jnp.float32), key)
        return jax.lax.fori_loop(0, tries, attempt, first)

    def _plan(self, regularity, feasible, **counts: Any) -> proximal.ProximalPlan:
        failure = _DRAWS * self.distance
        return proximal.ProximalPlan(regularity, feasible, failure=failure, **counts)

    def _steps(self, plan: proximal.ProximalPlan) -> int:
        """Return the fewest steps that make the initial point's effect small enough."""
        distance = (1 if self._time_unprotected else _MIXING) * self.distance
        return int(proximal.Mixing.of(plan).num_steps(float(plan.step_size), distance))

    def _unprotected_guarantee(self, regularity, feasible) -> SamplerGuarantee:
        """Return the unprotected draw's `SamplerGuarantee`, proved or not."""
        notes: tuple[str, ...] = (_CONVEX.format(regularity.strong_convexity),)
        step_size, proved, steps = self.step_size, True, 0
        if self.mixing is not None and step_size is not None:
            plan = self._plan(regularity, feasible, step_size=float(step_size))
            steps, due = self._steps(plan), proximal.Mixing.of(plan)
            planned = self.mixing.width, self.mixing.convexity
            proved = self.oracle.serves(plan) and planned == (due.width, due.convexity)
            stale = _STALE.format("AlternatingSampler")
            notes += (
                f"at most {steps} steps of size {step_size:.4g} or more, each of as "
                "many tries as it takes",
                *(() if proved else (stale,)),
            )
        aim = self.distance
        return SamplerGuarantee(steps, math.inf, 0.0, aim, proved, aim, notes)

    def _step_size(self, plan: proximal.ProximalPlan) -> float:
        """Return the largest step size with a bias that is small enough."""
        largest = plan.step_size

        def serves(step_size):
            smaller = dataclasses.replace(plan, step_size=step_size)
            steps = self.num_steps or self._steps(smaller)
            # The oracle adds the cutting of its stages once their number is set.
            return steps * self.oracle.bias(smaller) <= 0.5 * _BIAS * self.distance

        if serves(largest):
            return largest
        low, high = math.log(largest) - 20.0, math.log(largest)
        for _ in range(60):  # down to the rounding of the logarithm
            middle = (low + high) / 2
            low, high = (middle, high) if serves(math.exp(middle)) else (low, middle)
        return math.exp(low)


def _check(regularity: Regularity, feasible: AbstractSet) -> None:
    if not regularity.strong_convexity:
        raise ValueError(
            "AlternatingSampler: the potential must be strongly convex; add a "
            "quadratic."
        )
    width = restricted.diameter(feasible, regularity.dimension)
    if not 0 < width < math.inf:
        raise ValueError(
            "AlternatingSampler: the set must be bounded and more than a point."
        )
    restricted.check_set(feasible)
