"""Gradient-informative Bayesian optimization with private gradients."""

import dataclasses
import functools
from typing import Literal, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Count, NonNegative, Number, Positive, check_fields
from ..core.descent import Descent, Memory, StepSize, as_rule, check_step_sizes
from ..core.outputs import AbstractOutput, Last, check_output
from ..core.solver import AbstractNoisySolver
from ..draws.base import DRAW
from ..onelevel.noisy_gd import GRADIENT
from ..onelevel.problem import check_start
from ..privacy.budget import Neighbours
from ..privacy.ledger import AbstractRelease
from ..privacy.noise import PRNGKey
from ..privacy.queries import RECORDS, Query
from ..privacy.releases import Release
from ..privacy.sampling.base import FullBatch
from .base import AbstractAskTellSolver, Proposal
from .choice import Choice
from .design import choose_batch
from .gp import GradientPosterior, gradient_posterior
from .kernels import RBF, AbstractKernel, cast
from .portfolio import Portfolio, relative
from .problem import SearchProblem
from .seen import Seen, joined, record_gradient

# Earlier points nearer than this to a later one, in reaches, only harm the algebra.
_NEARBY = 1e-3


class _State(eqx.Module):
    w: Float[Array, " d"]
    kept: PyTree  # by the output rule
    memory: Memory
    t: Int[Array, ""]
    seen: Seen  # its values are private: only `tell` reads them
    evaluations: Int[Array, ""]
    unmet: Int[Array, ""]  # steps whose points did not reach the tolerance


class GradientInformativeBO(
    AbstractAskTellSolver[_State], AbstractNoisySolver[SearchProblem, _State]
):
    r"""Descent along private gradients that a Gaussian process infers from losses.

    The first step draws the start from a portfolio of public points. Each other step
    chooses the fewest points $Z_t$ that bring the trace of the posterior covariance of
    the gradient at $\theta_t$ to the tolerance, evaluates everyone's losses there, and
    with all points $D_t$ that are kept,

    $$g_i = W_t\, y_i, \quad W_t = \nabla k(\theta_t, D_t) (k(D_t, D_t) + c_0 +
    \sigma^2 I)^{-1}, \qquad \theta_{t+1} = \Pi\Bigl(\theta_t - \eta \Bigl(\frac1n
    \sum_i \mathrm{clip}_C(g_i) + \mathcal N(0, s^2 I)\Bigr)\Bigr).$$

    Points and $W_t$ are functions of released iterates and of the kernel alone. Needs
    float64 and a vector `w0`; scale the parameters to a common box, and give
    `clip_norm` and the kernel in these units.

    Args:
        num_steps: The number of steps, that of the draw included. Static.
        clip_norm: $C$, the bound on one record's gradient in $\ell_2$.
        step_size: $\eta$, or an optax optimizer fed with the released gradient.
        kernel: $k$, public: not fitted to any record's loss.
        evaluation_noise: $\sigma \ge 0$, the standard deviation of the noise in one
            loss, as where training is random.
        tolerance: Of the trace, as a share of its value before any evaluation.
        batch: A fixed number of points per step, whatever the tolerance. Static.
        max_batch: The most points per step; $2d + 16$ by default. Where they do not
            reach the tolerance, the step counts as unmet, of which `minimize` warns.
            Static.
        may_skip: Whether a step may evaluate nothing, if earlier points suffice.
            Static.
        keep: How many earlier points stay in use. Static.
        keep_rule: Which: the `"last"`, or those `"closest"` to the iterate. Static.
        polish: The most L-BFGS steps on a design of points. Static.
        jitter: Added to $\sigma^2$ against rounding, in variances of the kernel; known
            to the choice of points.
        constant: $c_0$, in variances of the kernel.
        portfolio: The public starts; with `None` all steps descend, from `w0`.
        output: Which iterate is the answer: `Last()`, or for instance
            `TailMean(0.2)`, the average of the last fifth.

    Privacy:
        One draw without $\delta$, as in `Portfolio`, and a Gaussian release in each of
        the other steps, of $\ell_2$ sensitivity $2C/n$ under replace-one, enforced by
        clipping for any loss and any kernel. The relation is replace-one: the state has
        a row for every record. The start, all iterates, points and
        numbers of points are covered; losses are not and stay in the state. A loss that
        is not finite counts as the largest finite one of the same record. Protects the
        records whose losses are evaluated, not what the losses are computed from
        besides, such as the training data.

    References:
        Sopa, Marusic, Avella-Medina and Cunningham, "Scalable differentially private
        Bayesian optimization", Algorithm 1. Here the tolerance bounds the posterior
        trace itself, losses of earlier points are used again, and an unknown constant
        is part of the prior.
    """

    num_steps: Count = eqx.field(static=True)
    clip_norm: Positive
    step_size: StepSize = eqx.field(converter=as_rule)
    kernel: AbstractKernel = RBF()
    evaluation_noise: NonNegative = 0.0
    tolerance: Positive = 1 / 30
    batch: Count | None = eqx.field(static=True, default=None)
    max_batch: Count | None = eqx.field(static=True, default=None)
    may_skip: bool = eqx.field(static=True, default=False)
    keep: Count = eqx.field(static=True, default=512)
    keep_rule: Literal["last", "closest"] = eqx.field(static=True, default="last")
    polish: int = eqx.field(static=True, default=30)
    jitter: Positive = 1e-8
    constant: NonNegative = 1e4
    portfolio: Portfolio | None = Portfolio()
    output: AbstractOutput = eqx.field(default=Last(), kw_only=True)

    def __check_init__(self):
        owner = type(self).__name__
        check_fields(self)
        if self.neighbours is not Neighbours.REPLACE_ONE:
            raise ValueError(
                f"{owner}: keeps every record's losses, in a state whose shape would "
                "tell their number, which add-or-remove-one keeps private; use "
                "Neighbours.REPLACE_ONE."
            )
        if self.polish != 0:
            _checks.count(owner, polish=self.polish)
        if self.num_releases < 1:
            raise ValueError(
                f"{owner}: the first step draws the start, so num_steps must be at "
                "least 2; or give portfolio=None."
            )
        check_step_sizes(owner, step_size=self.step_size)
        check_output(owner, self.output)

    @property
    @override
    def most_evaluations(self) -> int | None:
        most = self.batch or self.max_batch
        starts = self.portfolio.size if self.portfolio is not None else 0
        return None if most is None else starts + self.num_releases * most

    @override
    def init(self, problem: SearchProblem, w0: Float[Array, " d"]) -> _State:
        """From `w0`, projected onto the set, without losses.

        Raises:
            ValueError: `w0` is no vector of floats, or no number of records is planned.
        """
        owner = type(self).__name__
        w0 = jnp.asarray(w0)
        check_start(w0)
        if w0.ndim != 1:
            raise ValueError(
                f"{owner}: w0 must be one vector of parameters, got shape {w0.shape}; "
                "put all parameters into one array and unpack them in the loss."
            )
        if self.sizes is None:
            raise ValueError(
                f"{owner}: keeps every record's losses, so the number of records must "
                "be planned; run dpbilevel.calibrate(problem, solver, budget, "
                "sizes=...) or solver.with_sizes(sizes)."
            )
        w = problem.w_set.project(w0)
        memory = Descent(self.step_size, problem.w_set).init(w)
        zero = jnp.zeros((), jnp.int32)
        seen = Seen(
            jnp.zeros((self.keep, w.size), w.dtype),
            jnp.zeros((self.sizes, self.keep), w.dtype),  # one row a record
            jnp.zeros(self.keep, bool),
        )
        kept = self.output.init(w)
        return _State(w, kept, memory, zero, seen, zero, zero)

    @override
    def ask(self, problem: SearchProblem, state: _State, *, key: PRNGKey) -> Proposal:
        portfolio = self.portfolio
        if portfolio is None:
            return self._ask_near(problem, state, key)
        rows = max(portfolio.size, self._capacity(state.w))

        def starts(state, key):
            reach = self.kernel.reach
            points = portfolio.points(problem.w_set, state.w, reach, key=key)
            return _padded(Proposal(points, jnp.asarray(len(points), jnp.int32)), rows)

        def near(state, key):
            return _padded(self._ask_near(problem, state, key), rows)

        return jax.lax.cond(state.t == 0, starts, near, state, key)

    def _capacity(self, w: Array) -> int:
        """The most points of a step that descends."""
        return self.batch or self.max_batch or 2 * w.size + 16

    def _ask_near(self, problem, state: _State, key: PRNGKey) -> Proposal:
        posterior = self._posterior(state.w, state.seen)
        design = choose_batch(  # lines 4 and 5: how many points are enough, and which
            posterior,
            problem.w_set,
            tolerance=self._tolerated(posterior),
            capacity=self._capacity(state.w),
            batch=self.batch,
            polish=self.polish,
            at_least=0 if self.may_skip else 1,
            key=key,
        )
        return Proposal(design.points, design.count)

    @override
    def tell(self, problem, state, proposal, losses, *, key) -> _State:
        if self.portfolio is None:
            return self._descended(problem, state, proposal, losses, key)
        drawn, descended = (
            functools.partial(part, problem) for part in (self._drawn, self._descended)
        )
        parts = state, proposal, losses, key
        return jax.lax.cond(state.t == 0, drawn, descended, *parts)

    def _drawn(self, problem, state, proposal, losses, key) -> _State:
        """At the start that is drawn."""
        choice, start = self._choice, state.w
        points, rows = proposal.points[: choice.count], losses[:, : choice.count]
        w = choice.of(problem, points, relative(rows), start, self.sizes, key=key)
        w = w.astype(start.dtype)
        return dataclasses.replace(
            state,
            w=w,
            kept=self.output.init(w),
            memory=Descent(self.step_size, problem.w_set).init(w),
            t=state.t + 1,
            evaluations=state.evaluations + proposal.count,
        )

    def _descended(self, problem, state, proposal, losses, key) -> _State:
        """One step further along the gradient at the iterate."""
        rows = self._capacity(state.w)
        proposal = Proposal(proposal.points[:rows], proposal.count)
        losses = losses[:, :rows]
        seen = joined(proposal, losses, state.seen)  # line 6: the new points too
        posterior = self._posterior(state.w, seen)
        funs = {RECORDS: record_gradient(posterior, seen)}  # line 7: of each record
        release = self.release(problem, self.sizes)
        gradient = release.apply(funs, seen.values, key=key)  # line 8, noise of 9
        gradient = gradient.astype(state.w.dtype) + problem.public_gradient(state.w)
        descent = Descent(self.step_size, problem.w_set)
        gradient = descent.curvature_limited(gradient, problem.public_gradient, state.w)
        w, memory = descent.update(gradient, state.memory, state.w)  # line 9: the step
        kept = self.output.update(
            state.kept, w, before=state.w, t=state.t, num_steps=self.num_steps, key=None
        )
        met = posterior.trace <= self._tolerated(posterior)
        evaluations = state.evaluations + proposal.count
        unmet = state.unmet + (~met).astype(jnp.int32)
        seen = self._kept(seen, w)
        return _State(w, kept, memory, state.t + 1, seen, evaluations, unmet)

    @override
    def released(self, state: _State) -> Float[Array, " d"]:
        return state.w

    @override
    def remark(self, state: _State) -> str | None:
        unmet = int(state.unmet)
        if self.batch is not None or unmet == 0:
            return None
        return (
            f"the most points a step may ask for did not bring the gradient's "
            f"uncertainty to the tolerance of {float(self.tolerance):.3g} in {unmet} "
            f"of {self.num_releases} steps, whose gradients are shrunk and less sure "
            "than that; give a larger max_batch or tolerance. What was released is as "
            "private as stated."
        )

    @override
    def adversary_view(self, state: _State) -> PyTree:
        """The iterate, the points so far and how many there were; no losses."""
        points, _, mask = state.seen
        return state.w, points, mask, state.evaluations, state.unmet

    @override
    def answer(self, problem: SearchProblem, state: _State) -> Float[Array, " d"]:
        return self.output.answer(state.kept, state.w)

    @override
    def release(self, problem: SearchProblem, sizes: int) -> Release:
        query = Query(RECORDS, sizes, self.clip_norm, FullBatch())
        return Release(GRADIENT, 1, (query,), self.release_noise)

    @property
    @override
    def num_releases(self) -> int:
        """Of gradients: the step that draws makes none."""
        return self.num_steps - (self.portfolio is not None)

    @property
    def _choice(self) -> Choice:
        assert self.portfolio is not None
        return self.portfolio.choice(self.clip_norm, self.kernel)

    @override
    def releases(
        self, problem: SearchProblem, sizes: int
    ) -> tuple[AbstractRelease, ...]:
        gradients = self.counted_release(problem, sizes)
        if self.portfolio is None:
            return (gradients,)
        return self._choice.release(problem, sizes), gradients

    @override
    def with_noise(self, scale: Number) -> Self:
        """Splits the squared budget between the draw and the gradients."""
        if self.portfolio is None:
            return super().with_noise(scale)
        epsilon, multiplier = self.portfolio.split(scale, self.sizes)
        drawn = dataclasses.replace(self.portfolio.mechanism, epsilon=epsilon)
        return dataclasses.replace(
            self,
            portfolio=dataclasses.replace(self.portfolio, mechanism=drawn),
            noise_multiplier=multiplier * self.num_releases**0.5,
        )

    @override
    def dimensions(self, w0: PyTree) -> dict[str, int]:
        names = (DRAW, GRADIENT) if self.portfolio is not None else (GRADIENT,)
        return dict.fromkeys(names, optax.tree.size(w0))

    def _posterior(self, w: Array, seen: Seen) -> GradientPosterior:
        jitter = cast(self.jitter, w) * cast(self.kernel.variance, w)
        nugget = cast(self.evaluation_noise, w) ** 2 + jitter
        places = w, seen.points, seen.mask
        return gradient_posterior(
            self.kernel, *places, nugget=nugget, constant=self.constant
        )

    def _tolerated(self, posterior: GradientPosterior) -> Float[Array, ""]:
        return cast(self.tolerance, posterior.theta) * posterior.prior_trace

    def _kept(self, seen: Seen, w: Array) -> Seen:
        """The points to carry on, by a rule that reads points only."""
        order = jnp.arange(len(seen.mask), dtype=jnp.int32)
        offsets = (seen.points - w[None]) / cast(self.kernel.reach, w)
        lengths = jnp.sum(offsets * offsets, axis=1)
        squares = lengths[:, None] + lengths[None] - 2 * offsets @ offsets.T
        later = order[None] < order[:, None]
        nearby = (squares < _NEARBY**2) & later & seen.mask[None]
        valid = seen.mask & ~jnp.any(nearby, axis=1)
        rank = order.astype(w.dtype) if self.keep_rule == "last" else lengths
        chosen = jnp.argsort(jnp.where(valid, rank, jnp.inf))[: self.keep]
        return Seen(seen.points[chosen], seen.values[:, chosen], valid[chosen])


def _padded(proposal: Proposal, rows: int) -> Proposal:
    """As many rows for either kind of step; those beyond `count` are not evaluated."""
    points = proposal.points
    more = jnp.broadcast_to(points[:1], (rows - len(points), points.shape[1]))
    return Proposal(jnp.concatenate([points, more]), proposal.count)
