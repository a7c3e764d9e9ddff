"""Recursive regularization: rounds of an inner solver around their own answers."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .._checks import Count, Positive
from ..core.solver import AbstractNoisySolver
from ..privacy.releases import Release
from ..sets import AbstractSet
from .extragradient import NoisyExtragradient
from .problem import AbstractVariationalInequality


class _Regularized(AbstractVariationalInequality):
    r"""Game with the public operator $P(w) + \Lambda w - v$."""

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
        pull = optax.tree.sub(_times(self.weight, w), self.target)
        return optax.tree.add(self.game.public_operator(w), pull)

    @override
    def check(self, w0, data) -> None:
        self.game.check(w0, data)


class _State(eqx.Module):
    inner: Any  # that of the inner solver, which counts the steps of all rounds
    target: PyTree  # as in `_Regularized`


class RecursiveRegularization(
    AbstractNoisySolver[AbstractVariationalInequality, _State]
):
    r"""Rounds of an inner solver, each pulled towards the answers of those before.

    On the games that we measured it is as good as its inner solver alone with the best
    step size and as many releases, or worse: see the page on games. It is for the rate
    of its theorem, which other solvers here do not have.

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
    def init(self, problem, w0) -> _State:
        inner = self.inner.init(problem, w0)
        target = optax.tree.scale(self.strength, self.inner.released(inner))
        return _State(inner, target)

    @override
    def step(self, problem, data, state, *, key) -> _State:
        solver, t = self._solver, state.inner.t
        rounds, steps = jnp.divmod(t, solver.num_steps)
        added = self.strength * 2.0 ** rounds.astype(jnp.result_type(float))
        # A round begins at its center, the answer of the round before; counts go on.
        center = solver.answer(problem, state.inner)
        start = eqx.tree_at(_counts, solver.init(problem, center), _counts(state.inner))
        begun = _State(start, optax.tree.add(state.target, _times(added, center)))
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

    @override
    def dimensions(self, w0) -> dict[str, int]:
        return self.inner.dimensions(w0)


def _times(factor: Array, w: PyTree) -> PyTree:
    return jax.tree.map(lambda v: factor.astype(v.dtype) * v, w)


def _counts(state: Any) -> tuple[Array, Any]:
    """Return the numbers of steps and of skipped updates of an inner state."""
    return state.t, state.memory.rejections
