"""Noisy extragradient, and rounds of a solver, regularized towards earlier answers."""

import dataclasses
from typing import Any, ClassVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree
from typing_extensions import override

from .._checks import Count, Positive
from ..core.descent import Descent, Memory, Rule, StepSize, add_scaled, as_rule, scaled
from ..core.plan import least_multiplier
from ..core.solver import AbstractNoisySolver
from ..privacy.keys import PRNGKey, derive
from ..privacy.queries import RECORDS, Query
from ..privacy.releases import Release
from ..privacy.sampling.base import AbstractSampling
from ..privacy.sampling.fixed_size import FixedSize, SinglePass
from ..sets import AbstractSet
from . import base
from .base import AbstractSaddleSolver, Fields, TheoremConstants
from .problem import AbstractVariationalInequality


class _State(eqx.Module):
    u: PyTree  # the initial point of the next step
    w: PyTree  # the midpoint
    kept: PyTree  # by the output rule
    memory: Memory
    t: Int[Array, ""]


class NoisyExtragradient(AbstractSaddleSolver[_State]):
    r"""Extragradient method with clipped, noisy operators; two releases a step.

    $$
    w_t = \Pi_W(u_{t-1} - \gamma\, \tilde F_{2t-1}(u_{t-1})), \qquad
    u_t = \Pi_W(u_{t-1} - \gamma\, \tilde F_{2t}(w_t)), \qquad
    \tilde F_j(w) = \frac1m \sum_{i \in B_j} \mathrm{clip}_C(F_i(w)) + P(w) +
    \mathcal N(0, s^2 I).
    $$

    Every query has a batch of its own. The iterates are the midpoints $w_t$, whose
    average is in $W$. With `SinglePass` no record is read twice and the strong gap
    is bounded; with `FixedSize`, `Poisson` or `FullBatch` only the weak gap is.

    Args:
        num_steps: The number of steps $T$. Static.
        clip_norm: The bound $C$ on one record's operator in $\ell_2$. If it is
            below the problem's `bound`, clipping may make a monotone operator
            non-monotone: the guarantee holds, the theorems need not.
        step_size: The step size $\gamma$, at most $1 / (\sqrt3 L)$ in the theorems; or
            an optax optimizer, whose state takes both operators of a step one after the
            other, as in ExtraAdam, and for which there is no `bound`.
        sampling: How each query's batch is drawn.
        output: The output rule of the midpoints: `Mean()`, as in the theorems, or
            for instance `TailMean(0.5)`, which forgets the start and is often better,
            without a `bound`.

    Privacy:
        $2 T$ Gaussian releases, each of $\ell_2$ sensitivity $2C/m$ under replace-one
        ($C/m$ under add-or-remove-one), enforced by clipping for any operator:
        monotone or not. With `SinglePass` a record is charged for one of them a pass.
        All iterates are covered, so output and trajectory are post-processing.

    References:
        Boob and Guzman, "Optimal algorithms for differentially private stochastic
        monotone variational inequalities and saddle-point problems", 2024, Algorithm 1.
        There the multi-pass noise covers $T$ of the $2 T$ releases; here all are
        counted. Gidel, Berard, Vignoud, Vincent and Lacoste-Julien, "A variational
        inequality perspective on generative adversarial networks", ICLR 2019, Algorithm
        4 (ExtraAdam).
    """

    num_steps: Count = eqx.field(static=True)
    clip_norm: Positive
    step_size: StepSize = eqx.field(converter=as_rule)
    release_name: ClassVar[str] = "operator"
    releases_per_step: ClassVar[int] = 2

    @classmethod
    def tuned_fields(cls, constants, budget, passes, most_steps) -> Fields:
        """Return a dict of the fields with the least bound: batch, step size, steps.

        The step size of several passes follows from their exact multiplier.
        """
        n, most = constants.records, 2 * constants.spread
        if passes == "single":
            batch = np.arange(max(1, -(-n // (2 * most_steps))), n // 2 + 1)
            steps = n // (2 * batch)
            std = least_multiplier(SinglePass(1), 1, n, budget) * most / batch
            step_size = _best_step(constants, steps, batch, std)
            gap = constants.extragradient_gap(steps, step_size, batch, std)
            best = int(np.argmin(gap))
            sampling = SinglePass(int(batch[best]))
            return _fields(constants, int(steps[best]), step_size[best], sampling)
        counts = base.integers(n // 2, 25), base.integers(most_steps, 40)
        batch, steps = np.meshgrid(*counts)
        std = base.estimated_multiplier(batch / n, 2 * steps, budget) * most / batch
        _, gap = _best_weak_step(constants, steps, batch, std)
        best = base.cheapest(gap, steps * batch)
        size, count = int(batch.flat[best]), int(steps.flat[best])
        multiplier = least_multiplier(FixedSize(size), 2 * count, n, budget)
        exact = np.asarray(multiplier * most / size)
        chosen = np.asarray(count), np.asarray(size)
        step_size, _ = _best_weak_step(constants, *chosen, exact)
        return _fields(constants, count, step_size, FixedSize(size))

    @override
    def gap_and_stability(self, problem, constants, batch, std) -> tuple[Any, Any]:
        step_size, owner = cast(Any, self.step_size), "NoisyExtragradient.bound"
        if isinstance(step_size, Rule):
            raise ValueError(f"{owner}: no theorem covers an optax optimizer.")
        if step_size > constants.largest_step * (1 + 1e-6):
            raise ValueError(f"{owner}: no theorem covers step_size={step_size:.3g}.")
        path = self.num_steps, step_size
        gap = constants.extragradient_gap(*path, batch, std)
        return gap, constants.extragradient_stability(*path, std)

    def init(self, problem, w0) -> _State:
        """Return the state at `w0`, projected onto the set."""
        u = problem.w_set.project(jax.tree.map(jnp.asarray, w0))
        memory = Descent(self.step_size, problem.w_set).init(u)
        return _State(u, u, self.output.init(u), memory, jnp.zeros((), jnp.int32))

    def step(self, problem, data, state, *, key) -> _State:
        """Make two noisy, projected updates from one point; return the state."""
        key_first, key_then = derive(key, "first", "then")
        descent, u, t = Descent(self.step_size, problem.w_set), state.u, state.t
        g = self._operator(problem, data, u, 2 * t, key=key_first)
        w, memory = descent.update(g, state.memory, u)  # the midpoint
        g = self._operator(problem, data, w, 2 * t + 1, key=key_then)
        u, memory = descent.update(g, memory, u)  # from u again, not from w
        kept = self.remembered(state.kept, w, before=state.w, t=t)
        return _State(u, w, kept, memory, t + 1)

    def adversary_view(self, state) -> PyTree:
        """Return both points of the step, from which both releases follow."""
        return state.w, state.u

    @override
    def release(self, problem, sizes) -> Release:
        query = Query(RECORDS, sizes, self.clip_norm, self.sampling)
        noise, ratio = self.release_noise, self.clip_ratio(problem)
        return Release(self.release_name, 1, (query,), noise, clip_ratio=ratio)

    def _operator(self, problem, data, w, index, *, key: PRNGKey) -> PyTree:
        """Return the noisy operator of a new batch at `w`, plus the public one."""
        funs = {RECORDS: lambda record: problem.record_operator(w, record)}
        release = self.release(problem, self.sizes)
        released = release.apply(funs, data, key=key, index=index)
        return optax.tree.add(released, problem.public_operator(w))


def _fields(constants, steps, step_size, sampling: AbstractSampling) -> Fields:
    return {
        "num_steps": steps,
        "clip_norm": constants.spread,
        "step_size": float(step_size),
        "sampling": sampling,
    }


def _best_step(constants: TheoremConstants, steps: Any, batch: Any, std: Any) -> Any:
    """Return the step sizes with the least bounds on the strong gap."""
    noise = constants.spread**2 / batch + constants.dimension * std**2
    best = constants.diameter / np.sqrt(3.5 * steps * noise)
    return np.minimum(best, constants.largest_step)


def _best_weak_step(constants, steps, batch, std) -> tuple[np.ndarray, np.ndarray]:
    """Return the step sizes with the least bounds on the weak gap, and these bounds."""
    shrunk = _best_step(constants, steps, batch, std)
    step_size = shrunk[None] * np.logspace(-4, 0, 81).reshape(-1, *[1] * shrunk.ndim)
    gap = constants.extragradient_gap(steps, step_size, batch, std)
    stability = constants.extragradient_stability(steps, step_size, std)
    gap += constants.bound * stability
    best = np.argmin(gap, axis=0)[None]
    return tuple(np.take_along_axis(v, best, 0)[0] for v in (step_size, gap))


class _Regularized(AbstractVariationalInequality):
    """Game whose public operator gains `weight` times w, minus `target`."""

    game: AbstractVariationalInequality
    w_set: AbstractSet
    weight: Float[Array, ""]  # Lambda
    target: PyTree  # v, the weighted sum of released centers
    public: Any = eqx.field(static=True, default=True)  # there is a public term

    @override
    def record_operator(self, w, record) -> PyTree:
        return self.game.record_operator(w, record)

    @override
    def public_operator(self, w) -> PyTree:
        pull = optax.tree.sub(scaled(self.weight, w), self.target)
        return optax.tree.add(self.game.public_operator(w), pull)

    @override
    def check(self, w0, data) -> None:
        self.game.check(w0, data)


class _Round(eqx.Module):
    inner: Any  # that of the inner solver, which counts the steps of all rounds
    target: PyTree  # as in `_Regularized`


class RecursiveRegularization(
    AbstractNoisySolver[AbstractVariationalInequality, _Round]
):
    r"""Rounds of an inner solver, each pulled towards the answers of those before.

    On the games that we measured it is as good as its inner solver alone with the best
    step size and as many releases, or worse (`benchmarks/results/games.md`). It is for
    the rate of its theorem, which other solvers here do not have.

    Round $r = 0, 1, \dots, R - 1$ starts at $w_r$ and solves

    $$\langle F(w) + \sum_{s \le r} 2^s \lambda (w - w_s),\ w' - w \rangle \ge 0 \quad
    \forall w' \in W, \qquad w_{r+1} \approx w,$$

    so that the strong monotonicity doubles, and with it the accuracy of a round, as
    the distance from its start to its solution falls. The theorem has $\lambda \approx
    \frac{M}{D} \max(n^{-1/2}, \sqrt{d \log(1 / \delta)} / (\varepsilon n))$, $R \approx
    \log_2 (M / (D \lambda))$ and other records in every round: with `SinglePass`, whose
    batches must last for all rounds. Other samplings read all records in every round,
    with less noise at the same budget, but without the bound on the strong gap.

    Args:
        inner: The solver of a round, with the number of steps of a round. Its noise is
            that of this solver.
        rounds: The number of rounds $R$. Static.
        strength: The weight $\lambda$ of the first center.

    Privacy:
        $R$ times the releases of `inner`, of its sensitivity and under one composition;
        batches are numbered through all rounds, so that with `SinglePass` a record is
        charged for one release a pass. Centers follow from releases, so that what
        pulls towards them is public.

    References:
        Bassily, Guzman and Menart, "Differentially private algorithms for the
        stochastic saddle point problem with optimal rates for the strong gap", COLT
        2023 (recursive regularization; constants are absorbed in $\lambda$).
    """

    inner: NoisyExtragradient
    rounds: Count = eqx.field(static=True)
    strength: Positive
    problem_type: ClassVar[type] = AbstractVariationalInequality
    in_config: ClassVar[bool] = False

    def __check_init__(self):
        if self.inner.noise_multiplier is not None:
            raise ValueError(
                "RecursiveRegularization: inner has a noise_multiplier. Give inner "
                "without it."
            )

    release_name: ClassVar[str] = NoisyExtragradient.release_name
    releases_per_step: ClassVar[int] = NoisyExtragradient.releases_per_step

    @property
    @override
    def num_steps(self) -> int:
        return self.rounds * self.inner.num_steps

    @property
    def _solver(self) -> NoisyExtragradient:
        """Inner solver with the noise and the sizes of the run."""
        names = ("noise_multiplier", "neighbours", "precision", "sizes")
        fields: Any = {name: getattr(self, name) for name in names}
        return dataclasses.replace(self.inner, **fields)

    @override
    def init(self, problem, w0) -> _Round:
        inner = self.inner.init(problem, w0)
        target = optax.tree.scale(self.strength, self.inner.released(inner))
        return _Round(inner, target)

    @override
    def step(self, problem, data, state, *, key) -> _Round:
        solver, t = self._solver, state.inner.t
        rounds, steps = jnp.divmod(t, solver.num_steps)
        added = self.strength * 2.0 ** rounds.astype(jnp.result_type(float))
        # A round begins at its center, the answer of the round before; counts go on.
        center = solver.answer(problem, state.inner)
        start = eqx.tree_at(_counts, solver.init(problem, center), _counts(state.inner))
        begun = _Round(start, add_scaled(state.target, added, center))
        state = optax.tree.where((steps == 0) & (t > 0), begun, state)
        weight = 2 * added - self.strength
        game = _Regularized(problem, problem.w_set, weight, state.target)
        inner = solver.step(game, data, state.inner, key=key)
        return dataclasses.replace(state, inner=inner)

    @override
    def released(self, state) -> PyTree:
        return self.inner.released(state.inner)

    @override
    def adversary_view(self, state) -> PyTree:
        return self.inner.adversary_view(state.inner)

    @override
    def answer(self, problem, state) -> PyTree:
        return self.inner.answer(problem, state.inner)

    @override
    def release(self, problem, sizes) -> Release:
        return self._solver.release(problem, sizes)


def _counts(state: Any) -> tuple[Array, Any]:
    """Return the numbers of steps and of skipped updates of an inner state."""
    return state.t, state.memory.rejections
