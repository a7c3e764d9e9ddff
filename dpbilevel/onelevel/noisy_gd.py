"""Noisy projected gradient descent, also over passes with random allocation."""

import dataclasses
from typing import Any, ClassVar, TypeVar
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equinox import AbstractVar  # noqa: F811
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .._checks import Count, Positive, ProperFraction
from ..core.descent import (
    Descent,
    LastStep,
    Memory,
    Rule,
    StepSize,
    as_rule,
    overshooting_row,
    scaled,
)
from ..core.outputs import AbstractOutput, Last, check_output
from ..core.solver import AbstractIterative, AbstractNoisySolver, State
from ..privacy.keys import PRNGKey, derive, step_keys
from ..privacy.releases import Release
from ..privacy.rows import ForecastRow
from ..privacy.sampling.fixed_size import RandomAllocation
from .problem import AbstractFiniteSum, FiniteSum

GRADIENT = "gradient"


class DescentState(eqx.Module):
    """State of a descent: iterate, output rule's memory, updates, step number."""

    w: PyTree
    kept: PyTree  # memory of the output rule
    memory: Memory
    t: Int[Array, ""]
    last: LastStep | None  # of plain steps only


Descending = TypeVar("Descending", bound=DescentState)


class AbstractGradientSolver(AbstractNoisySolver[AbstractFiniteSum, State]):
    """Solver each of whose releases is a mean of clipped gradients of the losses."""

    problem_type: ClassVar[type] = AbstractFiniteSum
    release_name: ClassVar[str] = GRADIENT

    @override
    def release(self: Any, problem, sizes) -> Release:
        queries, joint = problem.queries(self.clip_norm, self.sampling, sizes)
        return Release(GRADIENT, 1, queries, self.release_noise, joint=joint)

    def noisy_gradient(
        self, problem: AbstractFiniteSum, data: PyTree, w: PyTree, *, key: PRNGKey
    ) -> PyTree:
        """Return the gradient at `w`: a release of the record terms, plus public terms.

        Privacy:
            One `release`, of batch and noise by `key`.
        """
        release = self.release(problem, self.sizes)
        released = release.apply(problem.record_gradients(w), data, key=key)
        return optax.tree.add(released, problem.public_gradient(w))


class AbstractDescent(AbstractGradientSolver[State]):
    """Solver that moves along released gradients as `NoisyGD` does.

    Attributes:
        step_size: The step size, or an optax optimizer.
        momentum: As in `NoisyGD`.
        output: Which iterate is the answer: `Last()`, `Mean()` of all,
            or `TailMean()` of the second half.
    """

    step_size: AbstractVar[Any]
    momentum: AbstractVar[Any]
    output: AbstractOutput = eqx.field(default=Last(), kw_only=True)

    def __check_init__(self):
        check_output(type(self).__name__, self.output)
        if self.momentum is not None and isinstance(self.step_size, Rule):
            raise ValueError(
                f"{type(self).__name__}: set momentum in the optax optimizer, not here."
            )

    @override
    def init(self, problem, w0) -> Any:
        w = problem.w_set.project(jax.tree.map(jnp.asarray, w0))
        memory = Descent(self.step_size, problem.w_set, self.momentum).init(w)
        last = None  # momentum and optax rules go on along steps that were too long
        if self.momentum is None and not isinstance(self.step_size, Rule):
            last = LastStep(optax.tree.zeros_like(w), jnp.zeros(()), jnp.ones(()))
        zero = jnp.zeros((), jnp.int32)
        return DescentState(w, self.output.init(w), memory, zero, last)

    def moved(
        self,
        problem: AbstractFiniteSum,
        gradient: PyTree,
        state: Descending,
        deviation: Any,
    ) -> Descending:
        """Return the state after a projected update along the released gradient $q_t$.

        `deviation` is a bound on its standard deviation in any direction.
        """
        prox, last = problem.proximal_step(), state.last
        descent = Descent(self.step_size, problem.w_set, self.momentum, prox)
        along = descent.curvature_limited(gradient, problem.public_gradient, state.w)
        if last is not None and prox is None:
            along = scaled(last.factor, along)
        elif last is not None:  # a proximal step is one of the shorter size as well
            size = last.factor * self.step_size
            descent = dataclasses.replace(descent, step_size=size)
        w, memory = descent.update(along, state.memory, state.w)  # projected step
        if last is not None:
            mapping = None
            if prox is not None:
                mapping = scaled(1 / descent.step_size, optax.tree.sub(state.w, w))
            w, last = last.then(gradient, deviation, state.w, w, mapping)
        run: Any = {"t": state.t, "num_steps": self.num_releases, "key": None}
        kept = self.output.update(state.kept, w, before=state.w, **run)
        moved: Any = {"w": w, "kept": kept, "memory": memory, "last": last}
        return dataclasses.replace(state, t=state.t + 1, **moved)

    @override
    def answer(self, problem, state: Any):
        return self.output.answer(state.kept, state.w)

    @override
    def forecast(self, problem, sizes, w0):
        """Return `ForecastRow`s if steps overshoot public terms or the smoothness."""
        rows: tuple[ForecastRow, ...] = ()
        step_size, mu = self.step_size, self.momentum
        if not (isinstance(problem, FiniteSum) and problem.public is None):
            rows = overshooting_row(step_size, problem.public_gradient, w0)
        smoothness = getattr(problem, "smoothness", None)
        if isinstance(step_size, Rule) or smoothness is None:
            return rows
        # Steps on losses of curvature beta are stable up to a size of 2 / beta, with
        # Nesterov's momentum mu up to (2 + 2 mu) / (1 + 2 mu) / beta.
        most = 2 if mu is None else (2 + 2 * mu) / (1 + 2 * mu)
        if step_size * smoothness <= most:
            return rows
        known: Any = {"step_size": float(step_size), "stable_product": float(most)}
        known["record_curvature"] = float(smoothness)
        return (*rows, ForecastRow("steps", from_start=True, **known))


class NoisyGD(AbstractDescent[DescentState], AbstractIterative):
    r"""Projected gradient descent with a clipped, noisy gradient at every step.

    $$w_{t+1} = \Pi_W\bigl(w_t - \eta\,(\tilde g_t + \nabla r(w_t))\bigr), \qquad
    \tilde g_t = \frac{1}{m} \sum_{i \in B_t} \mathrm{clip}_C(\nabla \ell(w_t, z_i)) +
    \mathcal N(0, s^2 I).$$

    With `FullBatch` this is noisy gradient descent, with `Poisson` DP-SGD. The step
    size along $q_t = \tilde g_t + \nabla r(w_t)$ is at most $\|q_t\|^2 / \langle q_t,
    \nabla^2 r(w_t)\, q_t \rangle$, so that the public term cannot make the iterates
    diverge. A step was too long for the records if $q_{t+1}$ points back along it by
    more than half of its slope, beyond what noise explains. Most of it is then taken
    back, and later steps are shorter. If $r$ is a term of `proximal`, its proximal step
    of the same size takes the place of $\nabla r$, and a step was too long if $(w_t -
    w_{t+1}) / \eta$ points back as well. An update whose result is not finite is left
    out; `Solution.rejected_updates` counts them.

    Args:
        num_steps: The number of steps. Static.
        clip_norm: The bound $C$ on one record's gradient in $\ell_2$.
        step_size: The longest step size $\eta$; or an optax optimizer fed with the
            released gradient, whose steps are taken as they are.
        momentum: $\beta$ in [0, 1) of Nesterov's accelerated steps, which move up to
            $1 / (1 - \beta)$ times as far at the same number of releases; `None` for
            plain steps, and for an optax optimizer, which brings its own.

    Privacy:
        `num_steps` Gaussian releases, each of $\ell_2$ sensitivity $2C/m$ under
        replace-one ($C/m$ under add-or-remove-one), enforced by clipping for any loss.
        All iterates are covered, so output and trajectory are post-processing.

    References:
        Bassily, Smith and Thakurta, "Private empirical risk minimization", FOCS 2014;
        Nesterov, "A method for solving the convex programming problem with convergence
        rate $O(1 / k^2)$", 1983 (momentum);
        Abadi et al., "Deep learning with differential privacy", CCS 2016, Algorithm 1.
    """

    num_steps: Count = eqx.field(static=True)
    clip_norm: Positive
    step_size: StepSize = eqx.field(converter=as_rule)
    momentum: ProperFraction | None = None
    proximal: ClassVar = ("step_size", "momentum")

    @override
    def step(self, problem, data, state, *, key) -> DescentState:
        gradient = self.noisy_gradient(problem, data, state.w, key=key)
        deviation = self.release(problem, self.sizes).deviation
        return self.moved(problem, gradient, state, deviation)


class AllocatedGD(AbstractDescent[DescentState]):
    r"""DP-SGD in passes: every record is in one batch of each pass, at random.

    At the start of a pass each record is put into one of $t$ batches, uniformly and
    independently. Then one update of `NoisyGD` is made for each batch in turn,

    $$w_{k+1} = \Pi_W\bigl(w_k - \eta\,(\tilde g_k + \nabla r(w_k))\bigr), \qquad
    \tilde g_k = \frac{t}{n} \sum_{i \in B_k} \mathrm{clip}_C(\nabla \ell(w_k, z_i)) +
    \mathcal N(0, s^2 I).$$

    It reads every record once a pass, as shuffled epochs do. The privacy cost is about
    that of Poisson batches of rate $1 / t$. If time permits, full batches give the
    better answer.

    A step of this solver is a pass, and the trajectory has one iterate for each.
    Calibration takes some seconds, and longer for fewer passes.

    Args:
        num_passes: The number of passes. Static.
        batches: $t$, the batches of a pass, at most 65 536. Static.
        clip_norm: The bound $C$ on one record's gradient in $\ell_2$.
        step_size: As in `NoisyGD`.
        output: Which iterate is the answer: `Last()`, `Mean()` of all,
            or `TailMean()` of the second half.

    Privacy:
        `num_passes` compositions of `RandomAllocation`: a pass makes $t$ Gaussian
        releases, and a record influences one of them, whose number is secret. Enforced
        by clipping for any loss, under both relations.

    References:
        Chua, Ghazi, Harrison, Leeman, Kamath, Kumar, Manurangsi, Sinha and Zhang,
        "Balls-and-bins sampling for DP-SGD", AISTATS 2025; Feldman and Shenfeld,
        "Privacy amplification by random allocation", NeurIPS 2025.
    """

    num_passes: Count = eqx.field(static=True)
    batches: Count = eqx.field(static=True)
    clip_norm: Positive
    step_size: StepSize = eqx.field(converter=as_rule)
    momentum: ClassVar[None] = None

    @property
    def num_steps(self) -> int:
        """Number of passes, each of which is one `step`."""
        return self.num_passes

    @property
    @override
    def releases_per_step(self) -> int:
        return self.batches

    @property
    def sampling(self) -> RandomAllocation:
        """Sampling of the batches of a pass."""
        return RandomAllocation(self.batches)

    @override
    def step(self, problem, data, state, *, key) -> DescentState:
        # Every record into one batch of the pass.
        key_pass, key_noise = derive(key, "sampling", "noise")
        release = self.release(problem, self.sizes).in_pass(data, key=key_pass)

        def update(state, batch):  # one noisy update for each batch
            index, key = batch
            gradients = problem.record_gradients(state.w)
            gradient = release.apply(gradients, data, key=key, index=index)
            gradient = optax.tree.add(gradient, problem.public_gradient(state.w))
            moved = self.moved(problem, gradient, state, release.deviation)
            return moved, None

        _, keys = step_keys(key_noise, self.batches)
        batches = jnp.arange(self.batches), keys
        return jax.lax.scan(update, state, batches)[0]

    @override
    def adversary_view(self, state):
        """Return the pair of the last iterate and the memory of the output rule."""
        return state.w, state.kept
