"""Noisy descent along implicit hypergradients, private by declared constants."""

import math
from typing import Any, ClassVar, Self, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from .. import _checks
from .._checks import Count, Positive, check_fields
from ..core.descent import Descent, Memory, Rule, StepSize, as_rule
from ..core.outputs import AbstractOutput, UniformIterate
from ..core.plan import check_promise
from ..core.solver import AbstractNoisySolver
from ..privacy import Basis, Neighbours, PrivacyBudget, Release
from ..privacy.keys import derive
from ..privacy.releases import CertifiedRelease
from ..sets import Euclidean, moves_by_entropy
from .certificates import certified, sensitivities
from .problem import BilevelProblem, Sizes

HYPERGRADIENT = "hypergradient"


class _State(eqx.Module):
    x: PyTree
    start: PyTree  # where every lower solve starts: a function of w0 alone
    memory: Memory
    kept: PyTree  # by the output rule
    t: Int[Array, ""]


class ImplicitBilevel(AbstractNoisySolver[BilevelProblem, _State]):
    r"""Projected descent along noisy implicit hypergradients; releases $x$ only.

    $$
    x_{t+1} = \Pi_X \bigl( x_t - \eta\, (\bar\nabla F(x_t, y_t) + \mathcal N(0, s_t^2
    I)) \bigr), \qquad \bar\nabla F(x, y) = \nabla_x F - \nabla_{xy} G\, [\nabla_{yy}
    G]^{-1} \nabla_y F,
    $$

    with $y_t \approx y^*(x_t)$ found without noise. Neither $y_t$ nor the solution of
    the linear system is released, and none of them is kept: every inner solve starts
    anew from the given $y_0$, which needs no more steps, because their fixed numbers
    are those for the worst start. The dimension of $y$ adds no noise.

    The problem brings the constants: `problem.constants` is a certificate, from which
    the numbers of inner steps and the sensitivity follow. For a private $y$ wrap the
    solver in `Refitted`.

    Args:
        num_steps: $T$. Static.
        step_size: $\eta$, at most $1 / (2 \beta_\Phi)$ in the theorem; or an optax
            optimizer fed with the released hypergradient.
        output: Which iterate is the answer: `UniformIterate()`, one of $x_0, \dots,
            x_{T-1}$ at random, which the theorem is about (the paper writes $x_1,
            \dots, x_T$), or for instance `Last()`.
        upper_clip_norm: $C$, at which every upper record's contribution $\nabla_x f +
            J^T \nabla_y f$ to the hypergradient is clipped, with $J$ the derivative of
            the lower solution and the public term in $f$; by default no clip. Static:
            the numbers of inner steps follow from it. It takes $d_x$ linear systems a
            step instead of one.

    Privacy:
        $T$ Gaussian releases of the hypergradient at released points. Its $\ell_2$
        sensitivity under replace-one rests on the constants (status `CONDITIONAL`) and
        includes the errors of both inner solves, at most 1 % together, and a bound on
        rounding; the noise is relative to the sensitivity at $x_t$. A person with a
        record in both levels is charged the sum of the levels' sensitivities, disjoint
        people their own. With `upper_clip_norm` an upper record's sensitivity, $2 C /
        n_f$, is enforced by clipping and rests on no constant; a lower record's rests
        on those of both levels still. Add-or-remove-one is refused: with a private
        number of records over a public denominator no constant bounds the mean loss.
        Not covered: a record that violates a declared constant; in precision `"float"`,
        the addition of noise.

    References:
        Lowy and Liu, "Differentially private bilevel optimization: efficient
        algorithms with near-optimal rates", Algorithm 1 and Theorem 4.2. There the
        sensitivity is $4 K / n$ and the noise $32 K \sqrt{T \log(1/\delta)} / (n
        \varepsilon)$; here it is derived term by term and composed exactly.
    """

    num_steps: Count = eqx.field(static=True)
    step_size: StepSize = eqx.field(converter=as_rule)
    output: AbstractOutput = eqx.field(default=UniformIterate(), kw_only=True)
    upper_clip_norm: Positive | None = eqx.field(
        static=True, default=None, converter=_checks.number
    )
    problem_type: ClassVar[type] = BilevelProblem
    in_config: ClassVar[bool] = False
    basis: ClassVar[Basis] = Basis.CONSTANTS

    def __check_init__(self):
        owner = "ImplicitBilevel"
        check_fields(self)
        if self.neighbours is not Neighbours.REPLACE_ONE:
            raise ValueError(
                f"{owner}: needs Neighbours.REPLACE_ONE, got {self.neighbours}."
            )

    @classmethod
    def from_theorem(
        cls,
        problem: BilevelProblem,
        budget: PrivacyBudget,
        sizes: Sizes,
        *,
        dimension_x: int,
        initial_gap: float,
        **fields: Any,
    ) -> Self:
        r"""Return a solver with the number of steps and step size of the theorem.

        With $\beta_\Phi$ and $K$ of the constants and $\Delta$ the initial gap, $\eta =
        1 / (2 \beta_\Phi)$ and

        $$T = \Bigl\lceil \frac{n \varepsilon}{\sqrt{d_x \log(1 / \delta)}} \cdot
        \frac{\sqrt{\beta_\Phi \Delta}}{K} \Bigr\rceil.$$

        Args:
            problem: A problem with a certificate.
            budget: $\varepsilon$ and $\delta$ of the whole run.
            sizes: $n$ is the smaller of the two levels.
            dimension_x: $d_x$.
            initial_gap: $\Delta \ge \Phi(x_0) - \inf \Phi$.
            **fields: Further fields of `ImplicitBilevel`.

        Raises:
            ValueError: There is no certificate, or the theorem bounds the hypergradient
                of its answer by more than the constants do everywhere. The message has
                the number of records from which on it does not.

        References:
            Lowy and Liu, Theorem C.3.
        """
        owner = "ImplicitBilevel.from_theorem"
        constants = certified.certificate_of(problem).second_order
        _checks.instance(owner, PrivacyBudget, budget=budget)
        problem.check_sizes(owner, sizes)
        _checks.count(owner, dimension_x=dimension_x)
        _checks.positive(owner, initial_gap=initial_gap)
        _checks.fraction(owner, delta=budget.delta)
        records = min(sizes.upper, sizes.lower)
        drop = math.sqrt(constants.smoothness * initial_gap)
        noise = math.sqrt(dimension_x * math.log(1 / budget.delta)) / budget.epsilon
        noise *= constants.sensitivity_constant

        def promised(n: int) -> float:
            return math.sqrt(drop * noise / n)

        check_promise(owner, promised, constants.upper_total, records)
        steps = math.ceil(records * drop / noise)
        step_size = 1 / (2 * constants.smoothness)
        defaults: Any = {"num_steps": max(steps, 1), "step_size": step_size}
        return cls(**(defaults | fields))

    def bound(
        self, problem: BilevelProblem, w0: PyTree, *, initial_gap: float
    ) -> float:
        r"""Return a bound on the root mean square hypergradient at the answer.

        It bounds the root of the expected square, $(E \|\nabla \Phi\|^2)^{1/2}$, with
        the noise $\sigma$ of the plan and $b$ the largest error of a computed
        hypergradient. Without a set of $x$ the square is at most

        $$\frac{2 \Delta}{\eta T} + b^2 + \eta \beta_\Phi d_x \sigma^2,$$

        with a set it is of the gradient mapping of step size $\eta$, and at most

        $$\frac{8 \Delta}{\eta T} + 28 b^2 + 12 d_x \sigma^2.$$

        Args:
            problem: The problem that the solver is calibrated for.
            w0: The initial point, for its dtype and shapes.
            initial_gap: $\Delta \ge \Phi(x_0) - \inf \Phi$.

        Raises:
            ValueError: The solver is not calibrated, or the derivation does not cover
                it: its output is not `UniformIterate`, $\eta$ is no number or above $1
                / \beta_\Phi$, there is an `upper_clip_norm`, or `x_set` moves by the
                entropy.

        References:
            Lowy and Liu, Theorem C.3 with the noise of the plan; derived with all
            constants in docs/mathematics.md.
        """
        owner = "ImplicitBilevel.bound"
        _checks.positive(owner, initial_gap=initial_gap)
        certificate = certified.certificate_of(problem)
        constants, eta = certificate.second_order, cast(Any, self.step_size)
        most = 1 / constants.smoothness
        rule = isinstance(self.step_size, Rule)
        covered = isinstance(self.output, UniformIterate) and not rule
        covered = covered and self.upper_clip_norm is None
        covered = covered and not moves_by_entropy(problem.x_set)
        if self.sizes is None or not covered or eta > most * (1 + 1e-6):
            raise ValueError(
                f"{owner}: covers calibrated solvers with output=UniformIterate(), no "
                f"upper_clip_norm, projected steps and a step_size up to {most:.4g}."
            )
        x, dtype = w0[0], jnp.result_type(*jax.tree.leaves(w0))
        given = certificate, self.sizes, dtype
        error = float(sensitivities.hypergradient_error(*given))
        release: Any = self.release(problem, self.sizes)
        noise = optax.tree.size(x) * release.noise_std**2
        drop = initial_gap / (eta * self.num_steps)
        if isinstance(problem.x_set, Euclidean):
            scaled = eta * constants.smoothness * noise
            return math.sqrt(2 * drop + error**2 + scaled)
        return math.sqrt(8 * drop + 28 * error**2 + 12 * noise)

    def init(self, problem: BilevelProblem, w0: PyTree) -> _State:
        """Return the state at `w0 = (x, y)`; every lower solve starts at `y`."""
        x, y = jax.tree.map(jnp.asarray, tuple(w0))
        x = problem.x_set.project(x)
        memory = Descent(self.step_size, problem.x_set).init(x)
        return _State(x, y, memory, self.output.init(x), jnp.zeros((), jnp.int32))

    def step(self, problem, data, state, *, key) -> _State:
        """Return the state after one noisy hypergradient and one projected update."""
        key_noise, key_output = derive(key, "noise", "answer")
        # Algorithm 1: y near the lower solution, not released, and the hypergradient.
        assert self.sizes is not None
        release = self.release(problem, self.sizes)
        gradient = release.apply((state.x, state.start), data, key=key_noise)
        # The noisy step, and the uniform choice among the iterates so far.
        descent = Descent(self.step_size, problem.x_set)
        x, memory = descent.update(gradient, state.memory, state.x)
        run: Any = {"t": state.t, "num_steps": self.num_steps, "key": key_output}
        kept = self.output.update(state.kept, x, before=state.x, **run)
        return _State(x, state.start, memory, kept, state.t + 1)

    def released(self, state: _State) -> PyTree:
        """Return the pair of the current `x` and `None` in place of `y`."""
        return state.x, None

    def answer(self, problem: BilevelProblem, state: _State) -> PyTree:
        """Return the pair of the output rule's `x` and `None` in place of `y`."""
        return self.output.answer(state.kept, state.x), None

    def release(self, problem: BilevelProblem, sizes: Sizes) -> Release:
        """Return a step's planned hypergradient `Release`; raise without a proof."""
        query = certified.HypergradientQuery(problem, sizes, self.upper_clip_norm)
        return CertifiedRelease(HYPERGRADIENT, 1, self.release_noise, query=query)

    def assumptions(self, problem: BilevelProblem, sizes: Sizes) -> tuple[str, ...]:
        """Return a tuple of sentences: what certificate and computation assume."""
        certificate = certified.certificate_of(problem, self.upper_clip_norm)
        counts = sensitivities.step_counts(certificate, sizes)
        numerical = (
            f"{counts.lower} accelerated gradient and {counts.linear} Chebyshev steps "
            "per release; their errors, and rounding of per-record derivatives exact "
            f"to {sensitivities.UNITS} units of roundoff, are part of the sensitivity"
        )
        assumptions = (*certificate.assumptions, numerical)
        if certificate.varies:
            follows = "the noise follows the sensitivity at the released x, "
            assumptions += (follows + "at most the one listed",)
        return assumptions

    def dimensions(self, w0: PyTree) -> dict[str, int]:
        """Return a dict: the size of x by the hypergradient release's name."""
        return {HYPERGRADIENT: optax.tree.size(w0[0])}
