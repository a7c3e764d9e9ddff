"""`WarmStarted`: a bilevel solver that starts at the released answer of another."""

from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from ..bilevel.certificates.certified import certificate_of
from ..bilevel.implicit import ImplicitBilevel
from ..bilevel.pipeline import AbstractStages, with_prefix
from ..bilevel.problem import BilevelProblem, Sizes
from ..core.solver import AbstractSolver
from ..privacy.budget import PrivacyBudget
from ..privacy.keys import derive
from ..privacy.ledger import Ledger
from .sources import SourceWeighting

FIRST, THEN = "first", "then"


class _State(eqx.Module):
    first: PyTree
    then: PyTree
    y0: PyTree  # the given y, for a first solver that releases none
    t: Int[Array, ""]


class WarmStarted(AbstractStages[_State]):
    r"""Runs one bilevel solver and starts another one from its released answer.

    Args:
        first: The solver that finds the start, also one of sources alone.
        then: The solver that goes on from there.
        budget_split: The split of the squared budget over both.

    Privacy:
        The releases of both runs, composed; the status is the worse of the two. Only
        released values pass from one to the other: `x`, and `y` if the first releases
        it. Otherwise the second starts from the given `y`.

    References:
        Lowy and Liu, "Differentially private bilevel optimization: efficient
        algorithms with near-optimal rates", Algorithm 2, where the first is the
        exponential mechanism.
    """

    first: AbstractSolver[BilevelProblem, Any]
    then: AbstractSolver[BilevelProblem, Any]
    budget_split: tuple[float, float] = _checks.split_field(0.5, 0.5)
    stages: ClassVar = {FIRST: SourceWeighting, THEN: BilevelProblem}
    in_config: ClassVar[bool] = True

    @classmethod
    def from_theorem(
        cls,
        problem: BilevelProblem,
        budget: PrivacyBudget,
        sizes: Sizes,
        *,
        first: AbstractSolver[BilevelProblem, Any],
        dimension_x: int,
        **fields: Any,
    ) -> Self:
        r"""Return a solver with the theorem's parameters: a draw, then implicit steps.

        The steps are those of `ImplicitBilevel.from_theorem` for half of $\varepsilon$
        and $\delta$ and the gap of the draw, $\Psi d_x / (\varepsilon n / 2)$ with

        $$\Psi = L_{fx} D_x + 2 L_{fy} r + \frac{L_{fy} L_{gy}}{\mu_g},$$

        $r$ the radius of the lower solutions; constants and logarithms are 1.

        Args:
            problem: A problem with a certificate on a bounded set of $x$.
            budget: $\varepsilon$ and $\delta$ of the whole run.
            sizes: $n$ is the smaller of the two levels.
            first: A `draws.ExponentialMechanism` whose sampler covers the set.
            dimension_x: $d_x$.
            **fields: Further fields of `WarmStarted`.

        Raises:
            ValueError: As `ImplicitBilevel.from_theorem`.

        References:
            Lowy and Liu, Theorem 4.3 and Algorithm 2.
        """
        known = certificate_of(problem).second_order
        half = PrivacyBudget(budget.epsilon / 2, budget.delta / 2)
        reach = known.upper_x and known.upper_x * float(problem.x_set.diameter)
        solution = 2 * known.solution_radius + known.lower_y / known.strong_convexity
        scale = half.epsilon * min(sizes.upper, sizes.lower)
        gap = (reach + known.upper_y * solution) * dimension_x / scale
        given: Any = {"dimension_x": dimension_x, "initial_gap": gap}
        then = ImplicitBilevel.from_theorem(problem, half, sizes, **given)
        return cls(first, then, **fields)

    @property
    def num_steps(self) -> int:
        """Total number of steps of both solvers."""
        return self.first.num_steps + self.then.num_steps

    @override
    def init(self, problem, w0) -> _State:
        first, then = (part.init(problem, w0) for part in self.parts)
        y0 = jax.tree.map(jnp.asarray, w0[1])
        return _State(first, then, y0, jnp.zeros((), jnp.int32))

    @override
    def step(self, problem, data, state, *, key) -> _State:
        key_first, key_then = derive(key, *self.stages)
        first, then = self.parts

        def go_first():
            new = first.step(problem, data, state.first, key=key_first)
            x, y = first.answer(problem, new)
            start = then.init(problem, (x, state.y0 if y is None else y))
            return new, start

        def go_then():
            return state.first, then.step(problem, data, state.then, key=key_then)

        # The number of the step is public: both runs always happen.
        done, begun = jax.lax.cond(state.t < first.num_steps, go_first, go_then)
        return _State(done, begun, state.y0, state.t + 1)

    @override
    def released(self, state):
        """Return the second solver's iterate, which starts at the first's answer."""
        return self.then.released(state.then)

    @override
    def adversary_view(self, state):
        first = self.first.adversary_view(state.first)
        return first, self.then.adversary_view(state.then)

    @override
    def answer(self, problem, state):
        return self.then.answer(problem, state.then)

    @override
    def ledger(self, problem, sizes) -> Ledger:
        _checks.instance("WarmStarted", self.first.problem_type, problem=problem)
        first = self.first.ledger(problem, sizes).named(FIRST)
        return first + self.then.ledger(problem, sizes).named(THEN)

    @override
    def dimensions(self, w0):
        first = with_prefix(FIRST, self.first.dimensions(w0))
        return first | with_prefix(THEN, self.then.dimensions(w0))
