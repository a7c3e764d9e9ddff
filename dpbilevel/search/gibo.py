"""Gradient-informative Bayesian optimization with private gradients."""

import dataclasses
import functools
from typing import Any, Self

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
from ..privacy.keys import PRNGKey
from ..privacy.ledger import AbstractRelease
from ..privacy.queries import RECORDS, Query
from ..privacy.releases import Release
from ..privacy.sampling.base import FullBatch
from .base import AbstractAskTellSolver, Proposal, SearchProblem
from .design import choose_batch
from .gibo_bound import BoundedDescent
from .gp import GradientPosterior, History, gradient_posterior, record_gradient
from .kernels import RBF, AbstractKernel, cast
from .random_search import Choice, Portfolio, relative

# Earlier points nearer than this to a later one, in units of the kernel's reach, are
# dropped: they only make the algebra ill-conditioned.
_NEARBY = 1e-3


class _State(eqx.Module):
    w: Float[Array, " d"]
    output: PyTree  # state of the output rule
    memory: Memory
    t: Int[Array, ""]
    history: History  # its losses are private: only `tell` reads them
    evaluations: Int[Array, ""]
    unmet: Int[Array, ""]  # number of steps whose points did not reach the tolerance


def _tolerance(value: Any) -> Any:
    """Return a tolerance, `None` for `"noise"`: leaves of solvers hold no text."""
    return None if isinstance(value, str) and value == "noise" else value


class GradientInformativeBO(
    BoundedDescent,
    AbstractAskTellSolver[_State],
    AbstractNoisySolver[SearchProblem, _State],
):
    r"""Descent along private gradients that a Gaussian process infers from losses.

    The first step draws the initial point from a portfolio of public points. Each other
    step chooses the fewest points $Z_t$ that bring the trace of the posterior
    covariance of the gradient at $\theta_t$ to the tolerance, and evaluates all
    records' losses there. With all points $D_t$ in the history,

    $$g_i = W_t\, y_i, \quad W_t = \nabla k(\theta_t, D_t) (k(D_t, D_t) + c_0 +
    \sigma^2 I)^{-1}, \qquad \theta_{t+1} = \Pi\Bigl(\theta_t - \eta \Bigl(\frac1n
    \sum_i \mathrm{clip}_C(g_i) + \mathcal N(0, s^2 I)\Bigr)\Bigr).$$

    Points and $W_t$ are functions of released iterates and the kernel alone. The solver
    needs float64 and a vector `w0`. Scale the parameters to a common box, and give
    `clip_norm` and the kernel in these units.

    Args:
        num_steps: The number of steps, including the draw. Static.
        clip_norm: $C$, the bound on one record's gradient in $\ell_2$.
        step_size: $\eta$, or an optax optimizer of the released gradient.
        kernel: $k$, public: not fitted to any record's loss.
        evaluation_noise: $\sigma \ge 0$, the standard deviation of the noise in one
            loss, for example of random training.
        tolerance: Limit of the trace, as a fraction of its value before any evaluation.
            With `"noise"`, kept as `None`, the limit is $d s^2$, the mean squared norm
            of the privacy noise of a step: $d (2 C \sqrt T / (n \mu))^2$ for $T$ steps
            that are $\mu$-GDP. A bias below the noise gains nothing (Theorem 3.7).
            Lemma 3.8 takes $T$ of the order of $\log n$.
        batch: A fixed number of points per step, whatever the tolerance. Static.
        max_batch: The largest number of points per step; $2d + 16$ by default.
            `minimize` warns of steps whose points do not reach the tolerance. Static.
        may_skip: Whether a step may evaluate nothing, if earlier points suffice.
            Static.
        keep: Number of latest points that stay in use. Static.
        polish: Largest number of L-BFGS steps on a design of points. Static.
        jitter: Value added to $\sigma^2$ against rounding, in variances of the kernel.
            The choice of points takes it into account.
        constant: $c_0$, in variances of the kernel.
        portfolio: The public initial points; with `None` all steps descend, from `w0`.
        output: The answer: `Last()`, the last iterate, or for instance `TailMean(0.2)`,
            the average of the last fifth of the iterates.

    Privacy:
        One draw without $\delta$, as in `Portfolio`, and a Gaussian release in each
        other step, of $\ell_2$ sensitivity $2C/n$ under replace-one, enforced by
        clipping for any loss and any kernel. The relation is replace-one: the state has
        a row for every record. The initial point, all iterates, points and numbers of
        points are covered; losses are not, and stay in the state. A loss that is not
        finite counts as the largest finite one of the same record. The records whose
        losses are evaluated are protected, other inputs of the losses, such as training
        data, are not.

    References:
        Sopa, Marusic, Avella-Medina and Cunningham, "Scalable differentially private
        Bayesian optimization", Algorithm 1. Here the tolerance bounds the posterior
        trace itself, earlier losses are used again, and an unknown constant is part of
        the prior.
    """

    num_steps: Count = eqx.field(static=True)
    clip_norm: Positive
    step_size: StepSize = eqx.field(converter=as_rule)
    kernel: AbstractKernel = RBF()
    evaluation_noise: NonNegative = 0.0
    tolerance: Positive | None = eqx.field(converter=_tolerance, default=1 / 30)
    batch: Count | None = eqx.field(static=True, default=None)
    max_batch: Count | None = eqx.field(static=True, default=None)
    may_skip: bool = eqx.field(static=True, default=False)
    keep: Count = eqx.field(static=True, default=512)
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
                f"{owner}: the state reveals n. Use Neighbours.REPLACE_ONE."
            )
        if self.polish != 0:
            _checks.count(owner, polish=self.polish)
        if self.num_releases < 1:
            raise ValueError(f"{owner}: needs num_steps >= 2: the first step draws.")
        check_step_sizes(owner, step_size=self.step_size)
        check_output(owner, self.output)

    @property
    @override
    def most_evaluations(self) -> int | None:
        most = self.batch or self.max_batch
        starts = self.portfolio.size if self.portfolio is not None else 0
        return None if most is None else starts + self.num_releases * most

    def init(self, problem: SearchProblem, w0: Float[Array, " d"]) -> _State:
        """Return the state at `w0`, projected onto the set, without losses.

        Raises:
            ValueError: `w0` is no vector of floats, or no number of records is planned.
        """
        owner = type(self).__name__
        w0 = jnp.asarray(w0)
        check_start(w0)
        if w0.ndim != 1:
            raise ValueError(f"{owner}: w0 must be one vector, got shape {w0.shape}.")
        if self.sizes is None:
            raise ValueError(
                f"{owner}: sizes are missing. Use solver.with_sizes(sizes)."
            )
        w = problem.w_set.project(w0)
        memory = Descent(self.step_size, problem.w_set).init(w)
        zero = jnp.zeros((), jnp.int32)
        history = History(
            jnp.zeros((self.keep, w.size), w.dtype),
            jnp.zeros((self.sizes, self.keep), w.dtype),  # one row a record
            jnp.zeros(self.keep, bool),
        )
        output = self.output.init(w)
        return _State(w, output, memory, zero, history, zero, zero)

    @override
    def ask(self, problem: SearchProblem, state: _State, *, key: PRNGKey) -> Proposal:
        portfolio = self.portfolio
        if portfolio is None:
            return self._ask_near(problem, state, key)
        rows, reach = max(portfolio.size, self._capacity(state.w)), self.kernel.reach

        def starts(state, key):
            points = portfolio.points(problem.w_set, state.w, reach, key=key)
            return _pad(Proposal(points, jnp.asarray(len(points), jnp.int32)), rows)

        def near(state, key):
            return _pad(self._ask_near(problem, state, key), rows)

        return jax.lax.cond(state.t == 0, starts, near, state, key)

    def _capacity(self, w: Array) -> int:
        """Return the largest number of points that a descent step evaluates."""
        return self.batch or self.max_batch or 2 * w.size + 16

    def _ask_near(self, problem, state: _State, key: PRNGKey) -> Proposal:
        posterior = self._posterior(state.w, state.history)
        sizes: Any = {"capacity": self._capacity(state.w), "batch": self.batch}
        sizes |= {"at_least": 0 if self.may_skip else 1, "polish": self.polish}
        limit = self._tolerated(problem, posterior)
        # Lines 4 and 5: how many points are enough, and which.
        design = choose_batch(posterior, problem.w_set, limit, key=key, **sizes)
        return Proposal(design.points, design.count)

    @override
    def tell(self, problem, state, proposal, losses, *, key) -> _State:
        if self.portfolio is None:
            return self._descent_step(problem, state, proposal, losses, key)
        draw = functools.partial(self._draw_step, problem)
        descend = functools.partial(self._descent_step, problem)
        return jax.lax.cond(state.t == 0, draw, descend, state, proposal, losses, key)

    def _draw_step(self, problem, state, proposal, losses, key) -> _State:
        """Draw the initial point privately, and return the state there."""
        choice, start = self._choice, state.w
        points, rows = proposal.points[: choice.count], losses[:, : choice.count]
        w = choice.draw(problem, points, relative(rows), start, self.sizes, key=key)
        w = w.astype(start.dtype)
        memory = Descent(self.step_size, problem.w_set).init(w)
        state = dataclasses.replace(state, w=w, memory=memory, t=state.t + 1)
        evaluations = state.evaluations + proposal.count
        output = self.output.init(w)
        return dataclasses.replace(state, output=output, evaluations=evaluations)

    def _descent_step(self, problem, state, proposal, losses, key) -> _State:
        rows = self._capacity(state.w)
        proposal = Proposal(proposal.points[:rows], proposal.count)
        losses = losses[:, :rows]
        history = state.history.with_latest(proposal, losses)  # line 6
        posterior = self._posterior(state.w, history)
        funs = {RECORDS: record_gradient(posterior, history.mask)}  # line 7
        release = self.release(problem, self.sizes)
        gradient = release.apply(funs, history.losses, key=key)  # line 8, noise of 9
        gradient = gradient.astype(state.w.dtype) + problem.public_gradient(state.w)
        descent = Descent(self.step_size, problem.w_set)
        gradient = descent.curvature_limited(gradient, problem.public_gradient, state.w)
        w, memory = descent.update(gradient, state.memory, state.w)  # line 9: the step
        step: Any = {"before": state.w, "t": state.t, "num_steps": self.num_steps}
        output = self.output.update(state.output, w, key=None, **step)
        met = posterior.trace <= self._tolerated(problem, posterior)
        evaluations = state.evaluations + proposal.count
        unmet = state.unmet + (~met).astype(jnp.int32)
        history = self._latest(history, w)
        return _State(w, output, memory, state.t + 1, history, evaluations, unmet)

    @override
    def remark(self, state: _State) -> str | None:
        unmet = int(state.unmet)
        if self.batch is not None or unmet == 0:
            return None
        limit = "norm of the privacy noise"
        if self.tolerance is not None:
            limit = f"tolerance of {float(self.tolerance):.3g}"
        return (
            f"in {unmet} of {self.num_releases} steps the points did not bring the "
            f"gradient's uncertainty to the {limit}, "
            "so that these gradients are shrunk; the privacy guarantee holds. Give a "
            "larger max_batch or tolerance."
        )

    def adversary_view(self, state: _State) -> PyTree:
        """Return the iterate, the points and the counts of evaluations; no losses."""
        points, _, mask = state.history
        return state.w, points, mask, state.evaluations, state.unmet

    @override
    def answer(self, problem: SearchProblem, state: _State) -> Float[Array, " d"]:
        return self.output.answer(state.output, state.w)

    @override
    def release(self, problem: SearchProblem, sizes: int) -> Release:
        query = Query(RECORDS, sizes, self.clip_norm, FullBatch())
        return Release(GRADIENT, 1, (query,), self.release_noise)

    @property
    def num_releases(self) -> int:
        """Number of gradient releases: all steps but the draw."""
        return self.num_steps - (self.portfolio is not None)

    @property
    def _choice(self) -> Choice:
        assert self.portfolio is not None
        return self.portfolio.choice(self.clip_norm, self.kernel)

    @override
    def releases(self, problem, sizes) -> tuple[AbstractRelease, ...]:
        gradients = self.counted_release(problem, sizes)
        if self.portfolio is None:
            return (gradients,)
        return self._choice.release(problem, sizes), gradients

    def with_noise(self, scale: Number) -> Self:
        """Return a copy whose draw and gradients together have noise `scale`."""
        if self.portfolio is None:
            return super().with_noise(scale)
        epsilon, multiplier = self.portfolio.split(scale, self.sizes)
        mechanism = dataclasses.replace(self.portfolio.mechanism, epsilon=epsilon)
        portfolio = dataclasses.replace(self.portfolio, mechanism=mechanism)
        noise = multiplier * self.num_releases**0.5
        return dataclasses.replace(self, portfolio=portfolio, noise_multiplier=noise)

    @override
    def dimensions(self, w0: PyTree) -> dict[str, int]:
        names = (DRAW, GRADIENT) if self.portfolio is not None else (GRADIENT,)
        return dict.fromkeys(names, optax.tree.size(w0))

    def _posterior(self, w: Array, history: History) -> GradientPosterior:
        jitter = cast(self.jitter, w) * cast(self.kernel.variance, w)
        nugget, known = cast(self.evaluation_noise, w) ** 2 + jitter, history
        options = {"nugget": nugget, "constant": self.constant}
        return gradient_posterior(self.kernel, w, known.points, known.mask, **options)

    def _tolerated(self, problem, posterior: GradientPosterior) -> Float[Array, ""]:
        if self.tolerance is None:  # public: noise, sizes, clip norm and dimension
            deviation = self.release(problem, self.sizes).deviation
            return posterior.theta.size * cast(deviation, posterior.theta) ** 2
        return cast(self.tolerance, posterior.theta) * posterior.prior_trace

    def _latest(self, history: History, w: Array) -> History:
        """Return a `History` of the `keep` latest points, without near duplicates."""
        order = jnp.arange(len(history.mask), dtype=jnp.int32)
        offsets = (history.points - w[None]) / cast(self.kernel.reach, w)
        lengths = jnp.sum(offsets * offsets, axis=1)
        squares = lengths[:, None] + lengths[None] - 2 * offsets @ offsets.T
        later = order[None] < order[:, None]
        nearby = (squares < _NEARBY**2) & later & history.mask[None]
        valid = history.mask & ~jnp.any(nearby, axis=1)
        chosen = jnp.argsort(~valid, stable=True)[: self.keep]
        points, losses, _ = history
        return History(points[chosen], losses[:, chosen], valid[chosen])


def _pad(proposal: Proposal, rows: int) -> Proposal:
    """Return a `Proposal` with `rows` rows; those beyond `count` are not evaluated."""
    points = proposal.points
    more = jnp.broadcast_to(points[:1], (rows - len(points), points.shape[1]))
    return Proposal(jnp.concatenate([points, more]), proposal.count)
