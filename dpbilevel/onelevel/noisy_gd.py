"""Noisy projected gradient descent for one-level problems."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .._checks import Count, Positive, ProperFraction
from ..core.curvature import overshooting_row, unstable_row
from ..core.descent import Descent, LastStep, Memory, Rule, StepSize, as_rule, scaled
from ..core.levels import Sizes
from ..core.solver import AbstractIterative, AbstractNoisySolver
from ..privacy.noise import PRNGKey
from ..privacy.releases import Release
from .problem import AbstractFiniteSum


class DescentState(eqx.Module):
    """State of a noisy descent."""

    w: PyTree
    kept: PyTree  # memory of the output rule
    memory: Memory
    t: Int[Array, ""]
    last: LastStep | None  # of plain steps only


class NoisyGD(AbstractNoisySolver[AbstractFiniteSum, DescentState], AbstractIterative):
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
    problem_type: ClassVar[type] = AbstractFiniteSum
    proximal: ClassVar = ("step_size", "momentum")

    def __check_init__(self):
        if self.momentum is not None and isinstance(self.step_size, Rule):
            raise ValueError(
                f"{type(self).__name__}: set momentum in the optax optimizer, not here."
            )

    def descent(self, problem: AbstractFiniteSum) -> Descent:
        """Return the `Descent` that makes projected steps in `w`."""
        prox = problem.proximal_step()
        return Descent(self.step_size, problem.w_set, self.momentum, prox)

    @override
    def init(self, problem, w0) -> DescentState:
        w = problem.w_set.project(jax.tree.map(jnp.asarray, w0))
        memory = self.descent(problem).init(w)
        # Momentum and optax rules go on along steps that were too long.
        plain = self.momentum is None and not isinstance(self.step_size, Rule)
        last = LastStep.none(w) if plain else None
        zero = jnp.zeros((), jnp.int32)
        return DescentState(w, self.output.init(w), memory, zero, last)

    @override
    def step(self, problem, data, state, *, key) -> DescentState:
        gradient = noisy_gradient(self, problem, data, state.w, key=key)
        deviation = self.release(problem, self.sizes).deviation
        return self.moved(problem, gradient, state, deviation)

    def moved(
        self,
        problem: AbstractFiniteSum,
        gradient: PyTree,
        state: DescentState,
        deviation,
    ) -> DescentState:
        """Return the state after a projected update along the released gradient.

        Args:
            problem: The problem.
            gradient: $q_t$.
            state: The state before.
            deviation: A bound on the standard deviation of $q_t$ in any direction.
        """
        descent, last = self.descent(problem), state.last
        along = descent.curvature_limited(gradient, problem.public_gradient, state.w)
        if last is not None and descent.prox is None:
            along = scaled(last.factor, along)
        elif last is not None:  # a proximal step is one of the shorter size as well
            size = last.factor * self.step_size
            descent = dataclasses.replace(descent, step_size=size)
        w, memory = descent.update(along, state.memory, state.w)  # projected step
        if last is not None:
            mapping = None
            if descent.prox is not None:
                mapping = scaled(1 / descent.step_size, optax.tree.sub(state.w, w))
            w, last = last.then(gradient, deviation, state.w, w, mapping)
        kept = self.remembered(state.kept, w, before=state.w, t=state.t)
        return DescentState(w, kept, memory, state.t + 1, last)

    @override
    def released(self, state):
        return state.w

    @override
    def answer(self, problem, state):
        return self.output.answer(state.kept, state.w)

    @override
    def release(self, problem, sizes) -> Release:
        return gradient_release(self, problem, sizes)

    @override
    def forecast(self, problem, sizes, w0):
        """Return `ForecastRow`s if steps overshoot public terms or the smoothness."""
        public = overshooting_row(self.step_size, problem.public_gradient, w0)
        smoothness = getattr(problem, "smoothness", None)
        return (*public, *unstable_row(self.step_size, smoothness, self.momentum))

    @override
    def dimensions(self, w0):
        return {GRADIENT: optax.tree.size(w0)}


GRADIENT = "gradient"


def noisy_gradient(
    solver: Any, problem: AbstractFiniteSum, data: PyTree, w: PyTree, *, key: PRNGKey
) -> PyTree:
    """Return the gradient at `w`: a release of the record terms, plus public terms.

    Privacy:
        One `solver.release`, of batch and noise by `key`.
    """
    release = solver.release(problem, solver.sizes)
    released = release.apply(problem.record_gradients(w), data, key=key)
    return optax.tree.add(released, problem.public_gradient(w))


def gradient_release(
    solver: Any, problem: AbstractFiniteSum, sizes: Sizes | int
) -> Release:
    """Return the `Release` that each `noisy_gradient` of `solver` makes."""
    queries, joint = problem.queries(solver.clip_norm, solver.sampling, sizes)
    return Release(GRADIENT, 1, queries, solver.release_noise, joint=joint)
