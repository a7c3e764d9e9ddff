"""The first-order penalty method for private bilevel optimization."""

import dataclasses
import math
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Count, Number, Positive, check_fields
from ..core.descent import Descent, Memory, SkippedUpdates, StepSize, as_rule
from ..core.loop import inner_solve
from ..core.solver import AbstractIterative, AbstractSolver
from ..onelevel.localized import restarted
from ..onelevel.problem import AbstractFiniteSum
from ..privacy import Gaussian, Ledger, Neighbours, Release
from ..privacy.keys import derive
from ..privacy.rows import ForecastRow
from . import levels
from .levels import Level
from .penalty_plans import PlannedPenalty
from .pipeline import with_prefix
from .problem import BilevelProblem, Levels, Sizes

LOWER = "lower solution"
PENALIZED = "penalized solution"
OUTER = "outer gradient"


class _State(eqx.Module):
    x: PyTree
    y: PyTree  # released solution of the lower level at the last x
    z: PyTree  # released solution of the penalized level at the last x
    memory: Memory
    inner: SkippedUpdates  # of both inner solves
    kept: PyTree  # memory of the output rule
    t: Int[Array, ""]


class PenaltyBilevel(PlannedPenalty, AbstractIterative[BilevelProblem, _State]):
    r"""Bilevel descent with two private inner solves and one noisy outer gradient.

    One step at $x_t$ with penalty $\lambda$:

    $$
    y_t \approx \arg\min_y g(x_t, y), \qquad
    z_t \approx \arg\min_y f(x_t, y) + \lambda g(x_t, y),
    $$
    $$
    \tilde g_t = \nabla_x f(x_t, z_t) + \lambda \bigl(\nabla_x g(x_t, z_t) - \nabla_x
    g(x_t, y_t)\bigr) + \nu_t, \qquad x_{t+1} = \Pi_X(x_t - \eta \tilde g_t).
    $$

    Both inner solves start from the previous step's private solutions. If no
    record's loss reads $x$, $\tilde g_t$ is a function of released values and needs no
    noise and no budget.

    Args:
        num_steps: The number of outer steps $T$. Static.
        penalty: The penalty $\lambda$. The bias of the hypergradient falls like
            $1/\lambda$, the effect of inner noise on it grows like $\lambda$.
        inner: The solver of both inner problems, for instance
            `NoisyGD(num_steps=10, step_size=1.0, clip_norm=1.0)`. Its `clip_norm`
            bounds $\nabla_y g(x, y; z)$. A `LocalizedGD` takes its `first_radii` in the
            first outer step.
        clip_norm: The bound $C_x$ on $\lambda (\nabla_x g(x, z_t; z) - \nabla_x g(x,
            y_t; z))$ of one lower record; it includes the factor $\lambda$.
        upper_clip_norm: The bound $C_f$ on $\nabla_y f$ and on $\nabla_x f$ of one
            upper record.
        step_size: The step size $\eta$ of $x$, less where it overshoots the upper
            public term, or an optax optimizer fed with $\tilde g_t$.
        sampling: How the batches of the outer gradient are drawn. Inner solves use
            `inner.sampling`.
        penalized_inner: The solver of the penalized problem, by default `inner`.
        run_noise: The mechanism of a single release on full batches that the whole run
            amounts to; not that of a step. `calibrate` sets it.
        budget_split: The split of the squared budget over lower solves, penalized
            solves and outer gradients; if outer gradients are free, over the others.
        output: Which pair is the answer: `Last()`; `Mean()`, which is better if records
            are few; or as in the paper `SmallestStep()`, the $x_t$ with the smallest
            $\|x_{t+1} - x_t\|$ and its $y_t$.

    Privacy:
        Per outer step the releases of two inner runs and one Gaussian release. An
        inner gradient of the lower level has $\ell_2$ sensitivity $2 C_g / n_g$ under
        replace-one, of the penalized level $2 C_g / n_g$ for a lower and $2 C_f /
        (\lambda n_f)$ for an upper record; the outer gradient $2 C_x / n_g$ and $2 C_f
        / n_f$. Enforced by clipping, for any functions: no Lipschitz constant and no
        accuracy of the inner solves is assumed. $x$, $y$ and the whole trajectory are
        released.

    References:
        Kornowski, "Differentially private bilevel optimization", Algorithms 1 and 3
        and Section 7. There the sensitivity is taken at the exact inner solutions,
        which the algorithm does not have; clipping removes that gap. Noise is
        calibrated numerically instead of by the constants of the theorems.
    """

    num_steps: Count = eqx.field(static=True)
    penalty: Positive
    inner: AbstractSolver
    clip_norm: Positive = 1.0
    upper_clip_norm: Positive = 1.0
    step_size: StepSize = eqx.field(converter=as_rule, kw_only=True)
    penalized_inner: AbstractSolver | None = eqx.field(default=None, kw_only=True)
    run_noise: Gaussian = Gaussian()
    budget_split: tuple[float, float, float] = _checks.split_field(0.4, 0.4, 0.2)
    problem_type: ClassVar[type] = BilevelProblem
    proximal: ClassVar = "inner", "penalized_inner"

    def __check_init__(self):
        owner = "PenaltyBilevel"
        for inner in self.inner_solvers:
            if not isinstance(inner, AbstractSolver) or not issubclass(
                AbstractFiniteSum, inner.problem_type
            ):
                raise TypeError(
                    f"{owner}: inner must solve a one-level problem, such as "
                    "NoisyGD(...)."
                )
        check_fields(self)
        parts = "lower solves", "penalized solves", "outer gradients"
        _checks.budget_split(owner, self.budget_split, *parts)
        for inner in self.inner_solvers:
            if getattr(inner, "noise_multiplier", None) is not None:
                raise ValueError(
                    f"{owner}: inner has a noise_multiplier. Give inner without it."
                )
            if inner.neighbours is not self.run_noise.neighbours:
                raise ValueError(
                    f"{owner}: give run_noise and inner the same relation."
                )

    @property
    def inner_solvers(self) -> tuple[AbstractSolver, AbstractSolver]:
        """Pair of lower and penalized problem's solvers, before calibration."""
        penalized = self.penalized_inner
        return self.inner, self.inner if penalized is None else penalized

    @property
    @override
    def neighbours(self) -> Neighbours:
        return self.run_noise.neighbours

    @override
    def init(self, problem, w0) -> _State:
        x, y = jax.tree.map(jnp.asarray, tuple(w0))
        x, y = problem.x_set.project(x), problem.y_set.project(y)
        memory = Descent(self.step_size, problem.x_set).init(x)
        kept, t = self.output.init((x, y)), jnp.zeros((), jnp.int32)
        return _State(x, y, y, memory, SkippedUpdates(), kept, t)

    @override
    def step(self, problem, data, state, *, key) -> _State:
        key_lower, key_penalized, key_outer = derive(key, "lower", "penalized", "outer")
        of_lower, of_penalized, noise = self._parts(problem)
        of_lower, of_penalized = restarted((of_lower, of_penalized), state.t)
        lower, penalized = self._levels(problem, state.x)

        # Algorithm 1: private solutions y and z of both strongly convex problems.
        y, lost_y = inner_solve(lower, of_lower, data, state.y, key=key_lower)
        z, lost_z = inner_solve(
            penalized, of_penalized, data, state.z, key=key_penalized
        )
        # The noisy outer gradient, whose public part costs no budget.
        at = problem, self.penalty, state.x, y, z
        gradient = levels.public_penalty_gradient(*at)
        if noise is not None:
            outer = self._outer(problem, noise, self.sizes)
            released = outer.apply(levels.penalty_gradients(*at), data, key=key_outer)
            gradient = optax.tree.add(gradient, released)

        # The projected step, and the candidates for t_out.
        descent = Descent(self.step_size, problem.x_set)
        gradient = levels.shortened_in_x(problem, descent, gradient, state.x, z)
        x, memory = descent.update(gradient, state.memory, state.x)
        kept = self.remembered(state.kept, (x, y), before=(state.x, y), t=state.t)
        inner = state.inner.plus(lost_y, lost_z)
        return _State(x, y, z, memory, inner, kept, state.t + 1)

    @override
    def released(self, state):
        """Return the pair of the current x and the lower solution at the last x."""
        return state.x, state.y

    @override
    def adversary_view(self, state):
        return state.x, state.y, state.z

    @override
    def ledger(self, problem: BilevelProblem, sizes: Sizes) -> Ledger:
        lower, penalized, outer = self.ledgers(problem, sizes)
        total = lower.named(LOWER) + penalized.named(PENALIZED) + outer
        return total.repeat(self.num_steps)

    def ledgers(self, problem: BilevelProblem, sizes: Sizes) -> tuple[Ledger, ...]:
        """Return a step's ledgers: lower solve, penalized solve, outer gradient."""
        of_lower, of_penalized, noise = self._parts(problem)
        lower, penalized = self._levels(problem, None)
        outer = () if noise is None else (self._outer(problem, noise, sizes),)
        return (
            of_lower.ledger(lower, sizes),
            of_penalized.ledger(penalized, sizes),
            Ledger(outer, sizes.people),
        )

    @override
    def ledger_of_steps(self, problem, sizes, done) -> Ledger:
        return self.ledger(problem, sizes).part(done, self.num_steps)

    @override
    def with_noise(self, scale: Number) -> Self:
        noise = self.run_noise.with_multiplier(scale)
        return dataclasses.replace(self, run_noise=noise)

    @override
    def dimensions(self, w0):
        lower, penalized = (inner.dimensions(w0[1]) for inner in self.inner_solvers)
        both = with_prefix(LOWER, lower) | with_prefix(PENALIZED, penalized)
        return both | {OUTER: optax.tree.size(w0[0])}

    @override
    def forecast(self, problem, sizes, w0):
        r"""Return `ForecastRow`s: noise of inner solutions, and overshooting steps.

        $K$ gradient steps with noise of standard deviations $s_y$ and $s_z$ per
        coordinate add about $\eta \sqrt{K d_y (s_y^2 + s_z^2)}$ to $z - y$. The term $f
        / \lambda$ moves $z$ from $y$ by at most $\eta K C_f / \lambda$. The ratio
        does not depend on the step size:

        $$\frac{\lambda}{C_f} \sqrt{\frac{d_y (s_y^2 + s_z^2)}{K}}.$$
        """
        runs = zip(self._parts(problem)[:2], self._levels(problem, None), strict=True)
        releases: list[Any] = [run.ledger(level, sizes).releases for run, level in runs]
        count = sum(release.count for release in releases[1])  # K
        variance = sum(r.count * r.noise_std**2 for rs in releases for r in rs)
        noise = math.sqrt(optax.tree.size(w0[1]) * variance) / count
        penalty, ratio = float(self.penalty), noise / float(self.upper_clip_norm)
        row = ForecastRow(
            "inner solutions",
            penalty=penalty,
            multiplied_noise_over_signal=penalty * ratio,
        )
        solvers = {"inner": self.inner, "penalized_inner": self.penalized_inner}
        inner = levels.rows_of_steps(problem, w0, solvers, self.penalty)
        return (row, *inner, *levels.row_in_x(problem, self.step_size, w0))

    def _parts(
        self, problem: BilevelProblem
    ) -> tuple[AbstractSolver, AbstractSolver, Gaussian | None]:
        """Return both calibrated inner solvers, and the outer `Gaussian` or `None`."""
        meets_x = problem.x_in_records
        noise = self.run_noise.scaled(self.num_steps**0.5)
        lower, penalized, outer = self.budget_split
        total = lower + penalized + (outer if meets_x else 0.0)

        def part(share):
            return noise.scaled((total / share) ** 0.5)

        pairs = zip(self.inner_solvers, (lower, penalized), strict=True)
        of_lower, of_penalized = (
            solver.with_noise(part(share).multiplier).with_sizes(self.sizes)
            for solver, share in pairs
        )
        return of_lower, of_penalized, part(outer) if meets_x else None

    def _levels(self, problem: BilevelProblem, x: PyTree) -> tuple[Level, Level]:
        """Return the pair of one-level problems in y at `x`: lower and penalized.

        The queries of neither depend on `x`.
        """
        at = problem, x, self.penalty, self.upper_clip_norm
        return levels.lower_level(problem, x), levels.penalized_level(*at)

    def _outer(
        self, problem: BilevelProblem, mechanism: Gaussian, sizes: Sizes
    ) -> Release:
        """Return a step's planned `Release` of the gradient in x; reads no data."""
        clip_norms = Levels(
            self.upper_clip_norm if problem.reads_x("upper") else None,
            self.clip_norm if problem.reads_x("lower") else None,
        )
        queries, joint = levels.levels_queries(clip_norms, self.sampling, sizes)
        return Release(OUTER, 1, queries, mechanism, joint=joint)
