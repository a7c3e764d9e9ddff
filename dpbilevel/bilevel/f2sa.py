"""The fully first-order method: gradients alone, one joint release a step."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Count, Positive
from ..core.descent import Descent, StepSize, as_rule, check_step_sizes
from ..core.outputs import AbstractOutput, Last, check_output
from ..privacy.mechanisms import Gaussian
from ..privacy.noise import PRNGKey
from ..privacy.sampling import AbstractSampling, FullBatch, unnumbered
from .blocks import AbstractBlocks, AbstractJointSolver
from .penalized import PenalizedLevel, penalty_gradients, public_penalty_gradient
from .problem import BilevelProblem, Sizes


class _Blocks(AbstractBlocks):
    y: Any
    z: Any
    x: Any


class _State(eqx.Module):
    x: PyTree
    y: PyTree  # follows the solution of the lower level
    z: PyTree  # follows the solution of the penalized level
    kept: PyTree  # by the output rule
    memory: _Blocks
    t: Int[Array, ""]


class F2SA(AbstractJointSolver[_State]):
    r"""Fully first-order bilevel optimization with one clipped, noisy release a step.

    $y$ follows the solution of the lower level and $z$ that of the penalized level $g +
    f / \lambda$. One step moves all three variables from the same point and the same
    batch:

    $$
    q_y = \nabla_y g(x, y), \qquad q_z = \nabla_y g(x, z) + \tfrac1\lambda \nabla_y f(x,
    z), \qquad q_x = \nabla_x f(x, z) + \lambda \bigl(\nabla_x g(x, z) - \nabla_x g(x,
    y)\bigr),
    $$
    $$
    y \leftarrow \Pi_Y(y - \rho\, q_y), \qquad z \leftarrow \Pi_Y(z - \rho\, q_z),
    \qquad x \leftarrow \Pi_X(x - \eta\, q_x).
    $$

    A lower record enters with $(\nabla_y g(x, y), \nabla_y g(x, z), \lambda (\nabla_x
    g(x, z) - \nabla_x g(x, y)))$ at the price of two gradients, an upper one with $(0,
    \nabla_y f / \lambda, \nabla_x f)$. A record's three blocks are clipped together: a
    record whose blocks are within their clip norms is left as it is. Compared with
    `PenaltyBilevel` there is no inner loop; compared with `SingleLoopBilevel` there is
    no Hessian, and a bias that falls like $1 / \lambda$.

    Steps of $y$ and $z$ are shorter where they would overshoot the public terms, as in
    `NoisyGD`.

    Args:
        num_steps: The number of steps. Static.
        penalty: $\lambda > 0$. The bias of the hypergradient falls like $1/\lambda$,
            the effect of the noise of y and z on it grows like $\lambda$.
        step_size: $\eta$, or an optax optimizer fed with $q_x$.
        lower_step_size: $\rho$, or an optax optimizer fed with $q_y$ and $q_z$.
        clip_norm: $C_y$, for $\nabla_y g$ of one lower record.
        cross_clip_norm: $C_x$, for $\lambda (\nabla_x g - \nabla_x g)$ of one lower
            record; it includes the factor $\lambda$. Where no lower record meets x,
            the unit of $\nabla_x f$.
        upper_clip_norm: $C_f$, for $\nabla_y f$ and for $\nabla_x f$ of one upper
            record.
        sampling: How each step's batches are drawn, one per level.
        noise: The mechanism of the whole run, seen as one release on full batches.
        budget_split: How the squared budget is split over $y$, $z$ and $x$: the noise
            of a block is $C_b / \sqrt{s_b}$ times a common factor. Where no record
            meets x, over the first two.
        output: Which pair $(x, y)$ is the answer: `Last()`, or `Mean()` of all.
        sizes: The planned sizes; set by `calibrate`. Static.

    Privacy:
        `num_steps` Gaussian releases of all blocks at once, from one batch per level.
        In units $u_b = C_b / \sqrt{s_b}$ of the blocks a lower record moves the mean by
        at most $1 / n_g$ and an upper record by at most $\sqrt{(C_f / (\lambda u_z))^2
        + (C_f / u_x)^2} / n_f$, the second term only where upper records meet x; twice
        that under replace-one. Enforced by clipping, for any functions. Where no record
        meets x, $q_x$ is a function of released values: no noise, no budget. $x$, $y$,
        $z$ and the whole trajectory are released.

    References:
        Kwon, Kwon, Wright and Nowak, "A fully first-order method for stochastic bilevel
        optimization", ICML 2023, Algorithm 1 (F2SA). Here with clipped and noisy
        directions, one inner step, all directions at the same point, a constant
        penalty, and $q_z$ divided by $\lambda$, which makes its steps those of $q_y$.
        There $y$ and $z$ change places.
    """

    num_steps: Count = eqx.field(static=True)
    penalty: Positive
    step_size: StepSize = eqx.field(converter=as_rule)
    lower_step_size: StepSize = eqx.field(converter=as_rule)
    clip_norm: Positive = 1.0
    cross_clip_norm: Positive = 1.0
    upper_clip_norm: Positive = 1.0
    sampling: AbstractSampling = FullBatch()
    noise: Gaussian = Gaussian()
    budget_split: tuple[float, float, float] = eqx.field(
        default=(0.4, 0.4, 0.2), converter=_checks.floats
    )
    output: AbstractOutput = Last()
    sizes: Sizes | None = eqx.field(static=True, default=None)
    blocks: ClassVar = _Blocks

    def __check_init__(self):
        unnumbered("F2SA", self.sampling)
        check_step_sizes(
            "F2SA", step_size=self.step_size, lower_step_size=self.lower_step_size
        )
        check_output("F2SA", self.output)
        _checks.budget_split("F2SA", self.budget_split, "y", "z", "x")

    def init(self, problem: BilevelProblem, w0: PyTree) -> _State:
        """Starts at `w0 = (x, y)` and $z = y$."""
        x, y = jax.tree.map(jnp.asarray, tuple(w0))
        x, y = problem.x_set.project(x), problem.y_set.project(y)
        descents = self._descents(problem)
        memory = _Blocks(descents.y.init(y), descents.z.init(y), descents.x.init(x))
        kept = self.output.init((x, y))
        return _State(x, y, y, kept, memory, jnp.zeros((), jnp.int32))

    def step(self, problem, data, state, *, key) -> _State:
        """One joint release, three projected updates from the same point."""
        # Algorithm 1 (F2SA): all gradients at the same point and on the same batch.
        q = self._direction(problem, data, state, key)
        descents, memory = self._descents(problem), state.memory

        # The inner step of the lower and of the penalized level, then the outer step.
        y, memory_y = descents.y.update(q.y, memory.y, state.y)
        z, memory_z = descents.z.update(q.z, memory.z, state.z)
        x, memory_x = descents.x.update(q.x, memory.x, state.x)

        kept = self.keep(state, (x, y))
        memory = _Blocks(memory_y, memory_z, memory_x)
        return _State(x, y, z, kept, memory, state.t + 1)

    def adversary_view(self, state: _State) -> PyTree:
        """All three variables."""
        return state.x, state.y, state.z

    @override
    def lower_bounds(self):
        return self.clip_norm, self.clip_norm, self.cross_clip_norm

    @override
    def upper_bounds(self):
        return None, self.upper_clip_norm / self.penalty, self.upper_clip_norm

    def _descents(self, problem: BilevelProblem) -> _Blocks:
        lower = Descent(self.lower_step_size, problem.y_set)
        return _Blocks(lower, lower, Descent(self.step_size, problem.x_set))

    def _direction(self, problem, data, state: _State, key: PRNGKey) -> _Blocks:
        """The released blocks plus the public terms, shortened where they overshoot."""
        x, y, z = state.x, state.y, state.z
        lower = PenalizedLevel(problem, x)
        penalized = PenalizedLevel(problem, x, self.penalty, self.upper_clip_norm)
        outer = penalty_gradients(problem, self.penalty, x, y, z)

        def blocks(role):
            of_y, of_z = lower.record_gradients(y), penalized.record_gradients(z)
            parts = (of_y.get(role), y), (of_z.get(role), z), (outer.get(role), x)

            def of_record(record):
                return _Blocks(
                    *(
                        optax.tree.zeros_like(like) if fun is None else fun(record)
                        for fun, like in parts
                    )
                )

            return of_record

        funs = {role: blocks(role) for role in ("upper", "lower")}
        q = self.directions(problem, data, funs, like=x, key=key)
        public_x = public_penalty_gradient(problem, self.penalty, x, y, z)
        q = optax.tree.add(
            q, _Blocks(lower.public_gradient(y), penalized.public_gradient(z), public_x)
        )
        descents = self._descents(problem)
        return _Blocks(
            descents.y.shortened(q.y, lower.public_gradient, y),
            descents.z.shortened(q.z, penalized.public_gradient, z),
            q.x,
        )
