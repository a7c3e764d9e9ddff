r"""The grid walk: a random walk on a lattice of cells, then rejection within a cell."""

import dataclasses
import math
from typing import Any, Self

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
from jaxtyping import PyTree

from ... import _checks
from ..._checks import Count, Number, Positive
from ...privacy.keys import derive
from ...privacy.noise import standard_exponential
from ...sets import AbstractSet
from . import _lattice
from ._lattice import FLATNESS, WalkBounds, duration, queries
from .base import AbstractSampler, Regularity, SamplerGuarantee

_SPREAD = 0.5  # of e^-h in a cell, as planned
_PLANNED = ("cells", "penalty", "slack")


class GridWalk(AbstractSampler):
    r"""Walk on the cells of a lattice, and one exact draw within the last of them.

    A set $X$ is surrounded by a box $A$ of $n$ axes, cut into $\prod_i N_i$ equal
    cells with the middles $x$, and the potential is extended to a convex, Lipschitz
    $h$ on $A$ whose excess outside $X$ is penalised (`_lattice.Extended`; a box is its
    own $A$, with $h = U$). From the middle cell, each of $T$ steps stays with
    probability 1/2 and otherwise proposes one of the $2n$ neighbours $y$, accepted
    with probability $\min(1, e^{h(x) - h(y)})$; beyond the lattice it stays. Then
    $\theta$, uniform in the cell of the last $x$, is accepted if it is in $X$, with
    probability $e^{h(x) - h(\theta) - c}$, where $c$ bounds $|h(\theta) - h(x)|$ in a
    cell. Of $M$ such tries the first accepted is returned. If none is, the last
    $\theta$ is, and with the gauge $\psi > 1$ about the centre of $X$ where it is
    outside, $\theta / \psi^2$ in its stead.

    With `tabulate`, $h$ is computed once in every cell and $x$ is drawn exactly from
    $q(x) \propto e^{-h(x)}$, with Gumbel noise: no step, no convexity, but
    $\prod_i N_i$ evaluations.

    **The distribution** has, relative to the density $\pi \propto e^{-U}$ on $X$ of the
    potential *as it is computed*, a log ratio within $\pm \xi$. What separates that
    from the density of $U$ itself, twice `Regularity.error` in each data set, is not in
    $\xi$ and is for the caller to charge; the proof only allows for it. Let $\ell$ be
    the Lipschitz constant of $h$ ($L$ on a box; outside, the penalty $K$ and the
    inradius $r$ make it $L + K / r$, or $L + (K + 2 L R) / r$ without convexity, $R$
    being the circumradius), $g$ the diagonal of a cell, $\zeta'$ what remains in the
    extension of the error $\zeta$ of $U$ (at most $(2 \max \psi - 1) \zeta$), and $c =
    \ell g / 2 + 2 \zeta'$.

    1. *Gap.* A union $S$ of cells has, for $\mu \propto e^{-h}$ log-concave on $A$,
       an area, weighted by $\mu$ and by the width of a cell across the faces, of at
       least $(2 / \max_i N_i) \min(\mu(S), \mu(A \setminus S))$: in the norm whose
       unit ball is a cell doubled, $A$ has the diameter $\max_i N_i$. On a face
       $e^{-h}$ is at most $e^{\ell g / 2}$ times its values at both middles, and the
       mean over a cell at least $e^{-\ell g / \sqrt{12}}$ times that at its middle, by
       Jensen's inequality. As $q(x) P(x, y) \propto \frac{1}{4 n} \min(e^{-h(x)},
       e^{-h(y)})$, the conductance is at least $\phi = e^{-\ell g (1/2 + 1/\sqrt{12})
       - 2 \zeta'} / (2 n \max_i N_i)$ and the gap $\lambda$ at least $\phi^2 / 2$. For
       any $h$ at all, $\lambda \ge e^{-\mathrm{osc}} (1 - \cos(\pi / \max_i N_i)) /
       (2 n)$, by comparison with the walk of a constant potential. The larger counts.
    2. *Cells.* The walk is lazy and reversible: $|P^T(x_0, x) / q(x) - 1| \le
       (1 - \lambda)^T / \min q =: \epsilon_1$, with $\min q \ge e^{-\mathrm{osc}} /
       \prod_i N_i$. This is the largest error over all $x$ and all starts.
    3. *Tries.* The density of an accepted $\theta$ is $e^{-h(\theta)}$ up to a constant
       and $1 \pm \epsilon_1$, as $c$ keeps the probability below 1. One try succeeds
       with probability $p \ge (1 - \epsilon_1) e^{-c - \ell g / \sqrt{12} - 2 \zeta'} /
       (1 + o)$, where $o$ bounds the odds of being outside $X$: along a ray from the
       centre, $\int_1^{\psi} t^{n-1} e^{-(t-1)(K - L R)} dt$ against $\int_0^1
       t^{n-1} e^{-(1-t) L R} dt \ge 1 / (n + L R)$.
    4. *Exhaustion.* The last $\theta$ has a density of at most $e^{2c} p \pi(\theta) (1
       + \epsilon_1) / (1 - \epsilon_1)$ in $X$. Folding the gauge $\psi$ into $1 /
       \psi$ stretches densities by $\psi^{2n}$ at most and does not raise $h$, which
       falls by at least $(\psi - 1)(K - L R) - (1 - 1/\psi) L R \ge 0$ as $K \ge 2 L
       R$. So exhaustion adds at most $\epsilon_2 = (1 - p)^{M-1} B$ to the ratio, with
       $B = e^{2c} (1 + \max \psi^{2n} e^{2 \zeta'})$, on a box $e^{2c}$, and takes no
       more from it. No bound on the range of $U$ is needed.

    Together $\xi = \log \frac{1 + \epsilon_1}{1 - \epsilon_1} - \log(1 - \epsilon_2)$;
    planning gives each half.

    Args:
        log_ratio: $\xi$, what planning aims at. It enters $T$ and $M$ by its logarithm.
            Static.
        num_steps: $T$; certified when omitted. Fewer than certified make the run
            HEURISTIC. Static.
        tabulate: Whether to draw the cell from a table of all cells; by default where
            that takes fewer evaluations than the certified walk. Static.
        max_queries: Planning refuses more evaluations than this, unless `num_steps` is
            given. Static.
        num_tries: $M$; planned when omitted. Static.
        cells: $N_i$; planned when omitted, so that $\ell g (1/2 + 1/\sqrt{12}) \le
            1/2$. Static.
        penalty: $K$; planned when omitted, as $L R + \max(L R, 2 n)$, which keeps $o$
            below 3.
        slack: $c$; planned when omitted.

    Privacy:
        Nothing is released but the draw. Trip counts, shapes and the number of
        evaluations are public, as long as those inside the potential are; whether a try
        was accepted shows in none of them. If the potential is not finite it counts
        as 0. In exact real arithmetic.

    References:
        Applegate and Kannan, "Sampling and integration of near log-concave functions",
        STOC 1991. Lowy and Liu, "Differentially private bilevel optimization:
        efficient algorithms with near-optimal rates", Lemmas B.9, B.11, B.12 and
        Theorem B.14. Isoperimetry in any norm: Dyer and Frieze, "Computing the volume
        of convex bodies", 1991; Lovász and Simonovits, "Random walks in a convex body
        and an improved volume algorithm", 1993.
    """

    log_ratio: Positive = eqx.field(static=True, default=0.01)
    num_steps: Count | None = eqx.field(static=True, default=None)
    tabulate: bool | None = eqx.field(static=True, default=None)
    max_queries: Count = eqx.field(static=True, default=10_000_000)
    num_tries: Count | None = eqx.field(static=True, default=None)
    cells: tuple[int, ...] | None = eqx.field(static=True, default=None)
    penalty: Number | None = None
    slack: Number | None = None

    def __check_init__(self):
        cells = {f"cells[{i}]": count for i, count in enumerate(self.cells or ())}
        _checks.count("GridWalk", **cells)
        if self.tabulate and self.num_steps is not None:
            raise ValueError("GridWalk: leave num_steps out if tabulate=True.")

    def with_counts(self, regularity: Regularity, feasible: AbstractSet) -> Self:
        """Return a copy with cells, penalty, slack, tries and steps set.

        Raises:
            ValueError: The set is no bounded `Box`, `Ball` or `Simplex`, the Lipschitz
                constant is infinite, or there would be more than `max_queries`
                evaluations while `num_steps` was left open.
        """
        bounds = self._bounds(regularity, feasible)
        ways = (True, False) if self.tabulate is None else (self.tabulate,)
        if self.num_steps is not None:
            ways = (False,)
        plans = [(way, *self._counts(bounds, way)) for way in ways]
        tabulate, steps, tries, total = min(plans, key=lambda plan: plan[-1])
        limited = tries if self.num_steps else total  # a given walk is as long as it is
        if limited > self.max_queries:
            raise ValueError(self._refusal(bounds, steps, tries, total))
        counts: Any = {name: getattr(bounds, name) for name in _PLANNED}
        counts["num_steps"] = None if steps is None else math.ceil(steps)
        counts["num_tries"] = math.ceil(tries)
        return dataclasses.replace(self, tabulate=tabulate, **counts)

    def guarantee(self, regularity, feasible) -> SamplerGuarantee:
        r"""Return the `SamplerGuarantee` for these counts, without a `distance`.

        `log_ratio` is $\xi$ for these counts; infinite, and unproved, if it is above
        what was aimed at, because the walk was cut short or a count, the penalty or the
        slack was set too low. With all counts open, it is what is aimed at.
        """
        plan = self._plan()
        if plan is None:
            if self.num_steps is None:
                return SamplerGuarantee(0, math.inf, log_ratio=self.log_ratio)
            sampler = self.with_counts(regularity, feasible)
            return sampler.guarantee(regularity, feasible)
        cells, tries, _, _ = plan
        bounds = self._bounds(regularity, feasible)
        steps = self.num_steps or 0
        mixing = 0.0 if self.tabulate else bounds.mixing(steps)
        exhausted = bounds.exhausted(mixing, tries)
        ratio = math.inf
        if max(mixing, exhausted) < 1:
            ratio = 2 * math.atanh(mixing) - math.log1p(-exhausted)
        # A rounding of the bound itself is not a walk cut short.
        proved = (
            ratio <= self.log_ratio * (1 + 1e-9)
            and bounds.slack >= bounds.needed_slack * (1 - 1e-9)
            and (bounds.frame.reach == 1 or bounds.penalty >= 2 * bounds.rise)
        )
        shape = "convex and " if bounds.convex else ""
        count = f"{steps} steps on" if steps else "a table of"
        note = (
            f"GridWalk: the potential is {shape}{regularity.lipschitz:.4g}-Lipschitz "
            f"on the set; {count} {math.prod(cells)} cells and {tries} tries draw "
            f"within a log ratio of {ratio:.3g}"
        )
        if not proved:
            needed = bounds.steps(math.tanh(self.log_ratio / 4))
            note = (
                f"GridWalk: HEURISTIC, {steps} steps and {tries} tries prove no log "
                f"ratio of {self.log_ratio:.3g}; {needed:.3g} steps are certified"
            )
        evaluations = queries(cells, self.num_steps, tries)
        found = steps, evaluations, ratio if proved else math.inf
        return SamplerGuarantee(*found, proved=proved, notes=(note,))

    def draw(self, potential, feasible, start, *, key) -> PyTree:
        """Return one drawn point of the set; only the shape of `start` is read.

        Raises:
            ValueError: The counts are open, or for points of another dimension.
        """
        plan = self._plan()
        if plan is None:
            raise ValueError("GridWalk: not planned yet. Call with_counts(...) first.")
        cells, tries, penalty, slack = plan
        flat, unravel = jax.flatten_util.ravel_pytree(start)
        frame = _lattice.frame_of("GridWalk", feasible, flat.size)
        if len(frame.corner) != len(cells):
            axes = len(frame.corner)
            raise ValueError(f"GridWalk: planned for {len(cells)} axes, got {axes}.")
        frame = jax.tree.map(lambda v: jnp.asarray(v, flat.dtype), frame)
        extended = _lattice.Extended(potential, frame, unravel, penalty)
        reference = extended.reference()

        def energy(index):
            return extended.many(_lattice.middles(frame, cells, index), reference)

        # The steps of Lowy and Liu, Appendix B.3.1: 3(a) to (c), the last cell x.
        key_walk, key_cell, key_accept = derive(key, "walk", "cell", "restart")
        if self.tabulate:
            index, lowest = _lattice.from_table(energy, cells, tries, key=key_walk)
        else:
            walks = energy, cells, tries, self.num_steps, flat.dtype
            index, lowest = _lattice.from_walks(*walks, key=key_walk)
        # 3(d), theta uniform in the cell of x.
        offset = jax.random.uniform(key_cell, (tries, len(cells)), flat.dtype)
        thetas = _lattice.within(frame, cells, index, offset)
        # 3(e), accepted with probability exp(h(x) - h(theta) - c), in X only.
        excess = extended.many(thetas, reference) - lowest + slack
        gauges = jax.vmap(frame.gauge)(thetas)
        coins = standard_exponential((tries,), flat.dtype, key=key_accept)
        accepted = (gauges <= 1) & (coins >= excess)
        chosen = jnp.where(jnp.any(accepted), jnp.argmax(accepted), tries - 1)
        # No restart: if all tries are rejected, the last one is folded into X.
        away = thetas[chosen] - frame.center
        fold = jnp.maximum(gauges[chosen], 1.0) ** 2
        return unravel(frame.point(frame.center + away / fold))

    def _bounds(self, regularity, feasible) -> WalkBounds:
        if not math.isfinite(regularity.lipschitz):
            raise ValueError("GridWalk: needs a Lipschitz constant of the potential.")
        frame = _lattice.frame_of("GridWalk", feasible, regularity.dimension)
        n = len(frame.sides)
        rise = regularity.lipschitz * float(frame.radius)
        penalty = self.penalty
        if penalty is None:
            penalty = rise + max(rise, 2.0 * n) if frame.reach > 1 else 0.0
        bounds = WalkBounds(regularity, frame, (1,) * n, float(penalty), 0.0)
        cells = self.cells
        if cells is None:
            fineness = bounds.lipschitz * math.sqrt(n) * FLATNESS / _SPREAD
            cells = tuple(max(1, math.ceil(side * fineness)) for side in frame.sides)
        bounds = dataclasses.replace(bounds, cells=cells)
        slack = bounds.needed_slack if self.slack is None else float(self.slack)
        return dataclasses.replace(bounds, slack=slack)

    def _counts(self, bounds: WalkBounds, tabulate: bool):
        """Return the numbers of steps (`None` for a table), tries and evaluations."""
        mixing = 0.0 if tabulate else math.tanh(self.log_ratio / 4)
        part = self.log_ratio if tabulate else self.log_ratio / 2  # of the last resort
        tries = self.num_tries or bounds.tries(mixing, -math.expm1(-part))
        steps = None if tabulate else self.num_steps or bounds.steps(mixing)
        return steps, tries, queries(bounds.cells, steps, tries)

    def _plan(self) -> tuple[tuple[int, ...], int, Number, Number] | None:
        """Return cells, tries, penalty and slack, or `None` if a count is open."""
        cells, tries, walks = self.cells, self.num_tries, self.num_steps
        if not (walks or self.tabulate) or cells is None or tries is None:
            return None
        if self.penalty is None or self.slack is None:
            return None
        return cells, tries, self.penalty, self.slack

    def _refusal(self, bounds, steps, tries, total) -> str:
        size = float(min(math.prod(bounds.cells), 10**300))
        work = "a table of" if steps is None else f"T = {steps:.3g} certified steps on"
        remedies = {
            "fewer dimensions, a Grid of candidates, a larger max_queries": True,
            "tabulate=True": steps is not None and size <= self.max_queries,
            "a potential declared convex": steps is not None and not bounds.convex,
            "an explicit num_steps for a HEURISTIC run": steps is not None,
        }
        return (
            f"GridWalk: {work} {size:.3g} cells and {tries:.3g} tries take {total:.3g} "
            f"evaluations, about {duration(total * 1e-3)}; max_queries is "
            f"{self.max_queries:.3g}. What helps: "
            f"{', '.join(text for text, helps in remedies.items() if helps)}."
        )
