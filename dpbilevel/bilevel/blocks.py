"""One release a step of several directions, each measured in a unit of its own."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import AbstractVar
from ..core.solver import AbstractIterative, AbstractNoisySolver
from ..privacy.noise import PRNGKey
from ..privacy.releases import Release
from .penalized import levels_queries, row_in_x, rows_of_steps, shortened_in_x
from .problem import BilevelProblem, Levels, Sizes


class AbstractBlocks(eqx.Module):
    """Two entries like y, whose names subclasses choose, and one like x.

    Attributes:
        x: The last entry; `None` where no record's loss reads x.
    """

    x: AbstractVar[Any]


class JointState(eqx.Module):
    """The state of an `AbstractJointSolver`; `w` and `memory` are of its `blocks`."""

    w: Any  # the three variables, all released
    kept: PyTree  # by the output rule
    memory: Any  # of each variable's updates
    t: Int[Array, ""]


class AbstractJointSolver(
    AbstractNoisySolver[BilevelProblem, JointState], AbstractIterative
):
    r"""Moves three variables at once along the blocks of one clipped, noisy release.

    Every block is measured in its unit $u_b = C_b / \sqrt{s_b}$, with the bound $C_b$
    on the block of one lower record and the share $s_b$ of the block in the squared
    budget. A record's blocks are clipped together in these units: a record whose blocks
    are within their bounds is left as it is. A subclass writes `step`: it maps one
    record of each level to its blocks, for `directions`, and ends in `moved`.

    Attributes:
        blocks: The class of the blocks.
        clip_norm: The bound on the first block of one lower record.
        budget_split: $s_b$, for any sum. Where no record's loss reads x, of the first
            two.

    Privacy:
        In the blocks' units a lower record moves the mean by at most $1 / n_g$ and an
        upper record by its bounds over the units, in $\ell_2$, over $n_f$; twice that
        under replace-one.
    """

    blocks: ClassVar[type]  # of `AbstractBlocks`
    clip_norm: AbstractVar[float]
    budget_split: AbstractVar[tuple[float, float, float]]
    problem_type: ClassVar[type] = BilevelProblem

    def __check_init__(self):
        owner = type(self).__name__
        names = (field.name for field in dataclasses.fields(self.blocks))
        _checks.budget_split(owner, self.budget_split, *names)

    @abc.abstractmethod
    def start(self, x: PyTree, y: PyTree) -> Any:
        """The three variables at the given, feasible pair."""

    @abc.abstractmethod
    def descents(self, problem: BilevelProblem) -> Any:
        """The `Descent` of each variable."""

    @override
    def init(self, problem: BilevelProblem, w0: PyTree) -> JointState:
        x, y = jax.tree.map(jnp.asarray, tuple(w0))
        x, y = problem.x_set.project(x), problem.y_set.project(y)
        w = self.start(x, y)
        pairs = zip(*map(_entries, (self.descents(problem), w)), strict=True)
        memory = self.blocks(*(descent.init(v) for descent, v in pairs))
        return JointState(w, self.output.init((x, y)), memory, jnp.zeros((), jnp.int32))

    def curvature_limited(
        self, problem: BilevelProblem, q: Any, x: PyTree, y: PyTree
    ) -> Any:
        """The blocks, the first two shorter where steps overshoot the public term.

        For variables that both meet the Hessian of the lower public term at y.
        """
        if problem.lower_public is None:
            return q
        pull, descents = jax.grad(problem.lower_public, 1), self.descents(problem)
        *pairs, (_, of_x) = zip(_entries(descents), _entries(q), strict=True)
        first, second = (
            descent.curvature_limited(block, lambda y: pull(x, y), y)
            for descent, block in pairs
        )
        return self.blocks(first, second, of_x)

    def moved(self, problem: BilevelProblem, state: JointState, q: Any) -> JointState:
        """The state after each variable's projected update along its block of `q`."""
        descents, (x, y) = self.descents(problem), self.released(state)
        of_x = shortened_in_x(problem, descents.x, q.x, x, y)
        q = dataclasses.replace(q, x=of_x)
        parts = map(_entries, (descents, q, state.memory, state.w))
        pairs = [descent.update(*rest) for descent, *rest in zip(*parts, strict=True)]
        w, memory = (self.blocks(*values) for values in zip(*pairs, strict=True))
        kept = self.output.update(
            state.kept,
            (w.x, w.y),
            before=self.released(state),
            t=state.t,
            num_steps=self.num_steps,
            key=None,  # `check_output` refuses rules that draw
        )
        return JointState(w, kept, memory, state.t + 1)

    def released(self, state: JointState) -> PyTree:
        """The current pair."""
        return state.w.x, state.w.y

    def adversary_view(self, state: JointState) -> PyTree:
        """All three variables."""
        return state.w

    @override
    def forecast(self, problem, sizes, w0):
        """Rows where steps overshoot the public terms."""
        *of_y, _ = vars(self.descents(problem)).items()
        # Of the second variable's level; the first one's has no more curvature.
        penalty = getattr(self, "penalty", None)
        in_x = row_in_x(problem, self.descents(problem).x.step_size, w0)
        return (*rows_of_steps(problem, w0, dict(of_y), penalty), *in_x)

    @override
    def answer(self, problem, state: JointState):
        return self.output.answer(state.kept, self.released(state))

    @abc.abstractmethod
    def lower_bounds(self, sizes: Sizes | None) -> tuple[float, float, float]:
        """$C_b$: the bound on each block of one lower record.

        Args:
            sizes: The planned sizes, which decide bounds that are not given.
        """

    @abc.abstractmethod
    def upper_bounds(self) -> tuple[float | None, float | None, float]:
        """The bound on each block of one upper record; `None` where it has none."""

    def units(self, problem: BilevelProblem) -> Any:
        """The units of the blocks; `None` for x where no loss reads it."""
        return self._units(bool(problem.x_in_records), self.sizes)

    def balanced(self, upper_bound: float, sizes: Sizes | None) -> Any:
        r"""The bound on a block of lower records that upper ones of a bound share.

        $C_f n_g / n_f$ with the records of a batch, so that one upper record moves the
        block no more than a lower one does and few of them do not decide the noise of
        all blocks; at least `clip_norm`.
        """
        if sizes is None:
            return self.clip_norm
        upper, lower = map(self.sampling.denominator, (sizes.upper, sizes.lower))
        bounds: Any = self.clip_norm, upper_bound * lower / upper
        # Traced inside of a compiled step.
        return (
            max(bounds) if all(map(_checks.concrete, bounds)) else jnp.maximum(*bounds)
        )

    def release(self, problem: BilevelProblem, sizes: Sizes) -> Release:
        """All blocks at once, in their units."""
        units = self._units(bool(problem.x_in_records), sizes)
        clip_norms = self._clip_norms(problem, _entries(units), sizes)
        queries, joint = levels_queries(clip_norms, self.sampling, sizes)
        name = _name(units)
        return Release(name, 1, queries, self.release_noise, joint=joint)

    def dimensions(self, w0: PyTree) -> dict[str, int]:
        """Two blocks like y, and one like x where records' losses read it."""
        d_x, d_y = (optax.tree.size(w) for w in w0)
        return {
            _name(self._units(meets, self.sizes)): 2 * d_y + (d_x if meets else 0)
            for meets in (False, True)
        }

    def directions(
        self,
        problem: BilevelProblem,
        data: Levels,
        funs: dict[str, Callable[[PyTree], Any]],
        *,
        like: PyTree,
        key: PRNGKey,
    ) -> Any:
        """The released blocks; zero for x where no loss reads it.

        Args:
            problem: The problem.
            data: The records.
            funs: The blocks of one record, for each role.
            like: A pytree like x.
            key: A typed key for batches and noise.

        Privacy:
            One `release`.
        """
        units, release = self.units(problem), self.release(problem, self.sizes)
        measured = {
            role: lambda record, fun=fun: _scaled(fun(record), units, -1)
            for role, fun in funs.items()
        }
        q = _scaled(release.apply(measured, data, key=key), units, 1)
        if q.x is None:
            q = dataclasses.replace(q, x=optax.tree.zeros_like(like))
        return q

    def _units(self, meets_x: bool, sizes: Sizes | None) -> Any:
        split = self.budget_split
        total = sum(split) if meets_x else sum(split[:2])  # a free block takes no share
        first, second, x = (
            bound * (total / share) ** 0.5
            for bound, share in zip(self.lower_bounds(sizes), split, strict=True)
        )
        return self.blocks(first, second, x if meets_x else None)

    def _clip_norms(self, problem: BilevelProblem, units: list, sizes: Sizes) -> Levels:
        """What bounds the blocks of one record of each level, in their units."""

        def clip_norm(role, bounds):
            *both, of_x = zip(bounds, units, strict=True)
            # A level that does not read x has no block there to bound.
            terms = both + ([of_x] if problem.reads_x(role) else [])
            squares = [(b / unit) ** 2 for b, unit in terms if b is not None]
            return sum(squares[1:], squares[0]) ** 0.5

        return Levels(
            clip_norm("upper", self.upper_bounds()),
            clip_norm("lower", self.lower_bounds(sizes)),
        )


def _entries(blocks: AbstractBlocks) -> list[Any]:
    return list(vars(blocks).values())


def _name(units: AbstractBlocks) -> str:
    """The release, with the units that its noise and sensitivities are given in."""
    named = {k: v for k, v in vars(units).items() if v is not None}
    if not all(map(_checks.concrete, named.values())):
        return "directions"  # inside of a compiled step, where nobody reads it
    listed = ", ".join(f"{k} / {unit:.3g}" for k, unit in named.items())
    return f"directions of ({listed})"


def _scaled(blocks: Any, units: Any, power: int) -> Any:
    """Each block times a power of its unit; without x where x has no unit."""
    if units.x is None:
        blocks = dataclasses.replace(blocks, x=None)  # not released
    return jax.tree.map(
        lambda unit, block: optax.tree.scale(unit**power, block), units, blocks
    )
