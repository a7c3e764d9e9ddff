"""The noisy extragradient method for saddle points and variational inequalities."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .._fields import Count, Positive
from ..core.descent import Descent, Memory
from ..core.outputs import AbstractOutput, Mean
from ..privacy.budget import PrivacyBudget
from ..privacy.mechanisms import Gaussian
from ..privacy.noise import PRNGKey, derive
from ..privacy.queries import RECORDS, Query
from ..privacy.releases import Release
from ..privacy.sampling import AbstractSampling, FullBatch
from . import rates
from .base import AbstractSaddleSolver
from .choices import (
    Fields,
    Passes,
    bound_inputs,
    extragradient_theorem,
    extragradient_tuned,
)
from .problem import AbstractVariationalInequality
from .rates import Scene

OPERATOR = "operator"


class _State(eqx.Module):
    u: PyTree  # where steps start
    w: PyTree  # the midpoint
    kept: PyTree  # by the output rule
    memory: Memory
    t: Int[Array, ""]


class NoisyExtragradient(AbstractSaddleSolver[_State]):
    r"""Extragradient steps with clipped, noisy operators; two releases a step.

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
        num_steps: $T$. Static.
        clip_norm: $C$, the bound on one record's operator in $\ell_2$. Where it is
            below the problem's `bound`, clipping may make a monotone operator
            non-monotone: the guarantee holds, the theorems need not.
        step_size: $\gamma$, at most $1 / (\sqrt3 L)$ in the theorems.
        sampling: How each query's batch is drawn.
        noise: The mechanism of the whole run, seen as one release on full batches.
        output: Which midpoint is the answer: `Mean()` of all, as in the theorems, or
            for instance `TailMean(0.5)`, which forgets the start and is often better,
            without a `bound`.
        sizes: The planned number of records; set by `calibrate`. Static.

    Privacy:
        $2 T$ Gaussian releases, each of $\ell_2$ sensitivity $2C/m$ under replace-one
        ($C/m$ under add-or-remove-one), enforced by clipping for any operator:
        monotone or not. With `SinglePass` a record is charged for one of them a pass.
        All iterates are covered, so output and trajectory are post-processing.

    References:
        Boob and Guzman, "Optimal algorithms for differentially private stochastic
        monotone variational inequalities and saddle-point problems", 2024, Algorithm 1.
        There the multi-pass noise pays for $T$ of the $2 T$ releases; here all are
        counted.
    """

    num_steps: Count = eqx.field(static=True)
    clip_norm: Positive
    step_size: Positive
    sampling: AbstractSampling = FullBatch()
    noise: Gaussian = Gaussian()
    output: AbstractOutput = Mean()
    sizes: int | None = eqx.field(static=True, default=None)
    releases_per_step: ClassVar[int] = 2

    @classmethod
    def theorem_fields(
        cls, scene: Scene, a: float, budget: PrivacyBudget, passes: Passes
    ) -> Fields:
        r"""The parameters of the paper, in whole numbers.

        With $a = \sqrt{d \log(1 / \delta)} / \varepsilon$ and $z$ the exact noise
        multiplier,

        $$B = \min(\max(\lceil a \rceil, 1), \lfloor n / 2 \rfloor), \quad T =
        \Bigl\lfloor \frac{n}{2 B} \Bigr\rfloor, \quad \sigma = \frac{2 M z}{B},
        \quad \gamma = \min\Bigl(\frac{D}{\sqrt{\frac72 T (M^2 / B + d \sigma^2)}},
        \frac{1}{\sqrt3 L}\Bigr)$$

        for a single pass over disjoint batches and, for several, batches of one record,
        $T = n^2$ and $\gamma = \min(D / M, 1 / L) / (n \max(\sqrt n, a))$: beyond a
        thousand records more steps than can be run, so `tuned` is for those.

        Args:
            scene: The problem as theorems see it.
            a: $a$.
            budget: $\varepsilon$ and $\delta$.
            passes: `"single"` or `"multi"`.

        References:
            Boob and Guzman, Corollary 1 and Theorem 4; there the step size of the first
            has no cap, and the noise of the second pays for half of the releases.
        """
        return extragradient_theorem(scene, a, budget, passes)

    @classmethod
    def tuned_fields(
        cls, scene: Scene, budget: PrivacyBudget, passes: Passes, most_steps: int
    ) -> Fields:
        """Batch and step size with the least bound, for several passes steps too.

        The step size of several passes follows from their exact multiplier.

        Args:
            scene: The problem as theorems see it.
            budget: The budget.
            passes: `"single"` or `"multi"`.
            most_steps: The largest number of steps.
        """
        return extragradient_tuned(scene, budget, passes, most_steps)

    def bound(self, problem: AbstractVariationalInequality, *, dimension: int) -> float:
        r"""The bound on the expected gap of the answer: a promise, before any data.

        For a single pass over fresh records `rates.extragradient_gap` bounds the
        strong gap on the population. Otherwise that, plus $M$ times the stability of
        the answer, bounds the weak gap. It holds for monotone operators within the
        declared constants, a clip norm of at least `bound` and a step size of at most
        $1 / (\sqrt3 L)$.

        Args:
            problem: A problem with declared constants on a bounded set.
            dimension: $d$; `problem.w_set.dimension(w0)`.

        Raises:
            ValueError: The solver is not calibrated or bound to sizes, or no theorem
                covers its parameters.
        """
        scene, std, batch, single = bound_inputs(self, problem, dimension)
        if self.step_size > scene.largest_step * (1 + 1e-6):
            raise ValueError(
                f"NoisyExtragradient.bound: no theorem covers step_size="
                f"{self.step_size:.3g}; it must be at most {scene.largest_step:.3g}."
            )
        gap = rates.extragradient_gap(scene, self.num_steps, self.step_size, batch, std)
        if not single:
            gap += scene.bound * rates.extragradient_stability(
                scene, self.num_steps, self.step_size, std
            )
        return float(gap)

    def init(self, problem: AbstractVariationalInequality, w0: PyTree) -> _State:
        """Starts at `w0`, projected onto the set."""
        u = problem.w_set.project(jax.tree.map(jnp.asarray, w0))
        memory = Descent(self.step_size, problem.w_set).init(u)
        return _State(u, u, self.output.init(u), memory, jnp.zeros((), jnp.int32))

    def step(
        self,
        problem: AbstractVariationalInequality,
        data: PyTree,
        state: _State,
        *,
        key: PRNGKey,
    ) -> _State:
        """Two noisy operators, two projected updates from the same point."""
        key_first, key_then = derive(key, "first", "then")
        descent, u, t = Descent(self.step_size, problem.w_set), state.u, state.t
        # Algorithm 1: the midpoint, from the operator at u.
        first = self._operator(problem, data, u, 2 * t, key=key_first)
        w, memory = descent.update(first, state.memory, u)
        # The next point, from u again but by the operator at the midpoint.
        then = self._operator(problem, data, w, 2 * t + 1, key=key_then)
        u, memory = descent.update(then, memory, u)
        kept = self.output.update(
            state.kept, w, before=state.w, t=t, num_steps=self.num_steps
        )
        return _State(u, w, kept, memory, t + 1)

    def released(self, state: _State) -> PyTree:
        """The midpoint."""
        return state.w

    def adversary_view(self, state: _State) -> PyTree:
        """Both points of the step, from which both releases follow."""
        return state.w, state.u

    @override
    def answer(self, problem: AbstractVariationalInequality, state: _State) -> PyTree:
        return self.output.answer(state.kept, state.w)

    def release(self, problem: AbstractVariationalInequality, sizes: int) -> Release:
        """The operator."""
        return Release(
            OPERATOR,
            1,
            (Query(RECORDS, sizes, self.clip_norm, self.sampling),),
            self.release_noise,
            clip_ratio=self.clip_ratio(problem),
        )

    def dimensions(self, w0: PyTree) -> dict[str, int]:
        """The operator has as many coordinates as `w0`."""
        return {OPERATOR: optax.tree.size(w0)}

    def _operator(
        self,
        problem: AbstractVariationalInequality,
        data: PyTree,
        w: PyTree,
        index: Any,
        *,
        key: PRNGKey,
    ) -> PyTree:
        """The released operator at `w` on a batch of its own, plus the public one."""
        assert self.sizes is not None
        funs = {RECORDS: problem.saturated_operator(w)}
        release = self.release(problem, self.sizes)
        released = release.of(funs, data, key=key, index=index)
        return optax.tree.add(released, problem.public_operator(w))
