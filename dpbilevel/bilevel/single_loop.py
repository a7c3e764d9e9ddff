"""The single-loop method: one joint release moves all three variables."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._fields import Count, Positive
from ..core.descent import Descent, StepSize, as_rule, check_step_sizes
from ..core.outputs import AbstractOutput, Last, check_output
from ..core.solver import AbstractNoisySolver
from ..privacy.mechanisms import Gaussian
from ..privacy.noise import PRNGKey
from ..privacy.releases import Release
from ..privacy.sampling import AbstractSampling, FullBatch, unnumbered
from ..sets import Euclidean
from .penalized import levels_queries
from .problem import BilevelProblem, Levels, Sizes


class _Blocks(eqx.Module):
    """One entry for each variable; `x` is `None` where no record meets x."""

    y: PyTree
    v: PyTree
    x: PyTree


class _State(eqx.Module):
    x: PyTree
    y: PyTree
    v: PyTree  # tracks the solution of the linear system
    kept: PyTree  # by the output rule
    memory: _Blocks
    t: Int[Array, ""]


class SingleLoopBilevel(AbstractNoisySolver[BilevelProblem, _State]):
    r"""Stochastic bilevel optimization with one clipped, noisy release a step.

    A third variable $v$ tracks $[\nabla_{yy}^2 g]^{-1} \nabla_y f$. One step moves all
    three from the same point and the same batch:

    $$
    q_y = \nabla_y g, \qquad q_v = \nabla_{yy}^2 g \, v - \nabla_y f, \qquad
    q_x = \nabla_x f - \nabla_{xy}^2 g \, v,
    $$
    $$
    y \leftarrow \Pi_Y(y - \rho_y q_y), \qquad v \leftarrow v - \rho_v q_v, \qquad
    x \leftarrow \Pi_X(x - \eta q_x),
    $$

    all at $(x, y, v)$. A lower record enters with $(\nabla_y g, \nabla_{yy}^2 g \, v,
    -\nabla_{xy}^2 g \, v)$ at the price of about two gradients, an upper one with $(0,
    -\nabla_y f, \nabla_x f)$. Every block is measured in its unit $u_b = C_b /
    \sqrt{s_b}$, with the lower level's clip norm $C_b$ and the share $s_b$ of the
    block, and a record's three blocks are clipped together: a record whose blocks are
    within their clip norms is left as it is. Unlike in the penalty method there is no
    inner loop, and no large factor multiplies the noise of the lower level.

    The hypergradient formula holds where $y^*(x)$ is in the interior of `y_set`. Steps
    of $y$ and $v$ are shorter where they would overshoot the public terms, as in
    `NoisyGD`.

    Args:
        num_steps: The number of steps. Static.
        step_size: $\eta$, or an optax optimizer fed with $q_x$.
        lower_step_size: $\rho_y$, or an optax optimizer fed with $q_y$.
        linear_step_size: $\rho_v$, below two over the largest eigenvalue of
            $\nabla_{yy}^2 g$; or an optax optimizer fed with $q_v$.
        clip_norm: $C_y$, for $\nabla_y g$ of one lower record.
        hessian_clip_norm: $C_v$, for $\nabla_{yy}^2 g \, v$ of one lower record.
        cross_clip_norm: $C_x$, for $\nabla_{xy}^2 g \, v$ of one lower record; where no
            lower record meets x, the unit of $\nabla_x f$.
        upper_clip_norm: $C_f$, for $\nabla_y f$ and for $\nabla_x f$ of one upper
            record.
        sampling: How each step's batches are drawn, one per level.
        noise: The mechanism of the whole run, seen as one release on full batches.
        budget_split: How the squared budget is split over $y$, $v$ and $x$: the noise
            of a block is $C_b / \sqrt{s_b}$ times a common factor. Where no record
            meets x, over the first two.
        output: Which pair is the answer: `Last()`, or `Mean()` of all.
        sizes: The planned sizes; set by `calibrate`. Static.

    Privacy:
        `num_steps` Gaussian releases of all blocks at once, from one batch per level.
        In the blocks' units a lower record moves the mean by at most $1 / n_g$ and an
        upper record by at most $\sqrt{(C_f / u_v)^2 + (C_f / u_x)^2} / n_f$, the second
        term only where upper records meet x; twice that under replace-one. Enforced by
        clipping, for any functions. Where no record meets x, $q_x$ is a function of
        released values: no noise, no budget. $x$, $y$, $v$ and the whole trajectory are
        released.

    References:
        Dagréou, Ablin, Vaiter and Moreau, "A framework for bilevel optimization that
        enables stochastic and global variance reduction algorithms", NeurIPS 2022,
        Algorithm 1 (SOBA), here with clipped and noisy directions.
    """

    num_steps: Count = eqx.field(static=True)
    step_size: StepSize = eqx.field(converter=as_rule)
    lower_step_size: StepSize = eqx.field(converter=as_rule)
    linear_step_size: StepSize = eqx.field(converter=as_rule)
    clip_norm: Positive = 1.0
    hessian_clip_norm: Positive = 1.0
    cross_clip_norm: Positive = 1.0
    upper_clip_norm: Positive = 1.0
    sampling: AbstractSampling = FullBatch()
    noise: Gaussian = Gaussian()
    budget_split: tuple[float, float, float] = eqx.field(
        default=(0.4, 0.4, 0.2), converter=_checks.floats
    )
    output: AbstractOutput = Last()
    sizes: Sizes | None = eqx.field(static=True, default=None)
    problem_type: ClassVar[type] = BilevelProblem

    def __check_init__(self):
        owner = "SingleLoopBilevel"
        unnumbered(owner, self.sampling)
        check_step_sizes(
            owner,
            step_size=self.step_size,
            lower_step_size=self.lower_step_size,
            linear_step_size=self.linear_step_size,
        )
        check_output(owner, self.output)
        _checks.budget_split(owner, self.budget_split, "y", "v", "x")

    def init(self, problem: BilevelProblem, w0: PyTree) -> _State:
        """Starts at `w0 = (x, y)` and $v = 0$."""
        x, y = jax.tree.map(jnp.asarray, tuple(w0))
        x, y = problem.x_set.project(x), problem.y_set.project(y)
        v, descents = optax.tree.zeros_like(y), self._descents(problem)
        memory = _Blocks(descents.y.init(y), descents.v.init(v), descents.x.init(x))
        kept = self.output.init((x, y))
        return _State(x, y, v, kept, memory, jnp.zeros((), jnp.int32))

    def step(
        self, problem: BilevelProblem, data: Levels, state: _State, *, key: PRNGKey
    ) -> _State:
        """One joint release, three projected updates from the same point."""
        # Algorithm 1 (SOBA): all directions at the same point and on the same batch.
        q = self._shortened(problem, state, self._direction(problem, data, state, key))
        descents, memory = self._descents(problem), state.memory

        y, memory_y = descents.y.update(q.y, memory.y, state.y)
        v, memory_v = descents.v.update(q.v, memory.v, state.v)
        x, memory_x = descents.x.update(q.x, memory.x, state.x)

        before = state.x, state.y
        kept = self.output.update(
            state.kept, (x, y), before=before, t=state.t, num_steps=self.num_steps
        )
        memory = _Blocks(memory_y, memory_v, memory_x)
        return _State(x, y, v, kept, memory, state.t + 1)

    @override
    def released(self, state: _State) -> PyTree:
        return state.x, state.y

    @override
    def adversary_view(self, state: _State) -> PyTree:
        return state.x, state.y, state.v

    @override
    def answer(self, problem: BilevelProblem, state: _State) -> PyTree:
        return self.output.answer(state.kept, (state.x, state.y))

    def release(self, problem: BilevelProblem, sizes: Sizes) -> Release:
        """All blocks at once, in their units."""
        clip_norms = self._clip_norms(problem)
        queries, joint = levels_queries(clip_norms, self.sampling, sizes)
        name = _name(self._units(problem))
        return Release(name, 1, queries, self.release_noise, joint=joint)

    def dimensions(self, w0: PyTree) -> dict[str, int]:
        """Two blocks like y, and one like x where records meet it."""
        d_x, d_y = (optax.tree.size(w) for w in w0)
        return {
            _name(self._units_of(free)): 2 * d_y + (0 if free else d_x)
            for free in (False, True)
        }

    def _descents(self, problem: BilevelProblem) -> _Blocks:
        return _Blocks(
            Descent(self.lower_step_size, problem.y_set),
            Descent(self.linear_step_size, Euclidean()),
            Descent(self.step_size, problem.x_set),
        )

    def _shortened(self, problem: BilevelProblem, state: _State, q: _Blocks) -> _Blocks:
        """No step of y or v overshoots the public term, whose Hessian both meet."""
        if problem.lower_public is None:
            return q
        pull, descents = jax.grad(problem.lower_public, 1), self._descents(problem)

        def along(direction, descent):
            return descent.shortened(direction, lambda y: pull(state.x, y), state.y)

        return _Blocks(along(q.y, descents.y), along(q.v, descents.v), q.x)

    def _units(self, problem: BilevelProblem) -> _Blocks:
        return self._units_of(not problem.x_in_records)

    def _units_of(self, free: bool) -> _Blocks:
        r"""$u_b = C_b / \sqrt{s_b}$, with shares that add up to one."""
        split = self.budget_split
        total = sum(split[:2]) if free else sum(split)
        clip_norms = (self.clip_norm, self.hessian_clip_norm, self.cross_clip_norm)
        y, v, x = (
            clip_norm * (total / share) ** 0.5
            for clip_norm, share in zip(clip_norms, split, strict=True)
        )
        return _Blocks(y, v, None if free else x)

    def _clip_norms(self, problem: BilevelProblem) -> Levels:
        """What bounds the blocks of one record of each level, in their units."""
        u, upper = self._units(problem), self.upper_clip_norm
        of_upper = (upper / u.v) ** 2
        of_lower = (self.clip_norm / u.y) ** 2 + (self.hessian_clip_norm / u.v) ** 2
        if problem.reads_x("upper"):
            of_upper = of_upper + (upper / u.x) ** 2
        if problem.reads_x("lower"):
            of_lower = of_lower + (self.cross_clip_norm / u.x) ** 2
        return Levels(of_upper**0.5, of_lower**0.5)

    def _direction(self, problem, data, state: _State, key: PRNGKey) -> _Blocks:
        """The released blocks plus the public terms."""
        assert self.sizes is not None
        x, y, v, units = state.x, state.y, state.v, self._units(problem)

        def of_lower(record):
            blocks = _lower_blocks(lambda x, y: problem.lower(x, y, record), x, y, v)
            return _scaled(blocks, units, -1)

        def of_upper(record):
            blocks = _upper_blocks(lambda x, y: problem.upper(x, y, record), x, y)
            return _scaled(blocks, units, -1)

        funs = {"upper": of_upper, "lower": of_lower}
        released = self.release(problem, self.sizes).of(funs, data, key=key)
        return _with_public(problem, _scaled(released, units, 1), x, y, v)


def _name(units: _Blocks) -> str:
    """The release, with the units that its noise and sensitivities are given in."""
    named = {k: v for k, v in vars(units).items() if v is not None}
    if not all(map(_checks.concrete, named.values())):
        return "directions"  # inside of a compiled step, where nobody reads it
    listed = ", ".join(f"{k} / {unit:.3g}" for k, unit in named.items())
    return f"directions of ({listed})"


def _lower_blocks(g, x: PyTree, y: PyTree, v: PyTree) -> _Blocks:
    r"""$(\nabla_y g, \nabla_{yy}^2 g \, v, -\nabla_{xy}^2 g \, v)$ at $(x, y)$."""
    (_, gradient), (cross, hessian) = jax.jvp(
        lambda y: jax.grad(g, (0, 1))(x, y), (y,), (v,)
    )
    return _Blocks(gradient, hessian, optax.tree.scale(-1, cross))


def _upper_blocks(f, x: PyTree, y: PyTree) -> _Blocks:
    r"""$(0, -\nabla_y f, \nabla_x f)$ at $(x, y)$."""
    gradient_x, gradient_y = jax.grad(f, (0, 1))(x, y)
    return _Blocks(
        optax.tree.zeros_like(y), optax.tree.scale(-1, gradient_y), gradient_x
    )


def _scaled(blocks: _Blocks, units: _Blocks, power: int) -> _Blocks:
    """Each block times a power of its unit; without x where x has no unit."""
    if units.x is None:
        blocks = dataclasses.replace(blocks, x=None)
    return jax.tree.map(
        lambda unit, block: optax.tree.scale(unit**power, block), units, blocks
    )


def _with_public(problem: BilevelProblem, q: _Blocks, x, y, v) -> _Blocks:
    """Adds the blocks of the public terms, and zero where x has no block."""
    if q.x is None:
        q = dataclasses.replace(q, x=optax.tree.zeros_like(x))
    if problem.lower_public is not None:
        q = optax.tree.add(q, _lower_blocks(problem.lower_public, x, y, v))
    if problem.upper_public is not None:
        q = optax.tree.add(q, _upper_blocks(problem.upper_public, x, y))
    return q
