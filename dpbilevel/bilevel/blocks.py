"""Joint solvers: one release a step, of several directions, each in its own unit."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equinox import AbstractVar  # noqa: F811
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Number, Positive
from ..core.descent import StepSize, as_rule
from ..core.proximal import smooth_part
from ..core.solver import AbstractIterative, AbstractNoisySolver
from ..privacy.keys import PRNGKey
from ..privacy.releases import Release
from .levels import levels_queries, row_in_x, rows_of_steps, shortened_in_x
from .problem import BilevelProblem, Levels, Sizes

# The blocks of a loss or public term, a function of (x, y).
LossBlocks = Callable[[Callable[[PyTree, PyTree], Any]], Any]


class AbstractBlocks(eqx.Module):
    """Triple of values: two like y, in fields that subclasses name, and one like x."""

    x: AbstractVar[Any]  # the last one; `None` if no record's loss reads x


class JointState(eqx.Module):
    """State of a joint solver: variables, output and update memories, step number."""

    w: Any  # the three variables, all released
    kept: PyTree  # memory of the output rule
    memory: Any  # of the updates of each variable
    t: Int[Array, ""]


class AbstractJointSolver(
    AbstractNoisySolver[BilevelProblem, JointState], AbstractIterative
):
    r"""Joint descent: three variables move along the blocks of one noisy release.

    Every block has a unit $u_b = C_b / \sqrt{s_b}$, with the bound $C_b$ on the block
    of one lower record and the fraction $s_b$ of the squared budget. A record's blocks
    are clipped together in these units. A record whose blocks are within their bounds
    is left as it is. The `step` of a subclass maps one record of each level to its
    blocks, for `directions`, and ends in `moved`. If no record's loss reads x, the
    first two parts of the budget count. The first variable has `lower_step_size`.

    Privacy:
        In the blocks' units a lower record moves the mean by at most $1 / n_g$ and an
        upper record by its bounds over the units, in $\ell_2$, over $n_f$; twice that
        under replace-one.
    """

    blocks: ClassVar[type]  # of `AbstractBlocks`
    # The field with the clip norm of a lower record's second block.
    second_clip_norm: ClassVar[str] = "clip_norm"
    step_size: StepSize = eqx.field(converter=as_rule, kw_only=True)
    lower_step_size: StepSize = eqx.field(converter=as_rule, kw_only=True)
    # Bounds on a record's blocks: a lower one's first, the one like x, an upper one's.
    clip_norm: Positive = eqx.field(default=1.0, kw_only=True)
    cross_clip_norm: Positive = eqx.field(default=1.0, kw_only=True)
    upper_clip_norm: Positive = eqx.field(default=1.0, kw_only=True)
    budget_split: tuple[float, float, float] = eqx.field(
        default=(0.4, 0.4, 0.2), converter=_checks.floats, kw_only=True
    )
    problem_type: ClassVar[type] = BilevelProblem

    def __check_init__(self):
        owner = type(self).__name__
        names = (field.name for field in dataclasses.fields(self.blocks))
        _checks.budget_split(owner, self.budget_split, *names)

    def start(self, x: PyTree, y: PyTree) -> Any:
        """Return the initial `blocks`: y, a second variable of zeros, and x."""
        return self.blocks(y, optax.tree.zeros_like(y), x)

    @abc.abstractmethod
    def descents(self, problem: BilevelProblem, *x: PyTree) -> Any:
        """Return an instance of `self.blocks` with the `Descent` of each variable.

        A proximal term is that at `x`, without which no step can be made.
        """

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
        """Return the blocks `q`, two shortened if they overshoot the lower public term.

        Both variables must meet the Hessian of the lower public term at y.
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
        """Return the state after one projected update of each variable."""
        x, y = self.released(state)
        descents = self.descents(problem, x)
        of_x = shortened_in_x(problem, descents.x, q.x, x, y)
        q = dataclasses.replace(q, x=of_x)
        parts = map(_entries, (descents, q, state.memory, state.w))
        pairs = [descent.update(*rest) for descent, *rest in zip(*parts, strict=True)]
        w, memory = (self.blocks(*values) for values in zip(*pairs, strict=True))
        kept = self.remembered(state.kept, (w.x, w.y), before=(x, y), t=state.t)
        return JointState(w, kept, memory, state.t + 1)

    @override
    def released(self, state):
        return state.w.x, state.w.y

    @override
    def adversary_view(self, state):
        return state.w

    @override
    def forecast(self, problem, sizes, w0):
        """Return a tuple of `ForecastRow`s: steps that overshoot public terms."""
        *of_y, _ = vars(self.descents(problem)).items()
        # The level of the second variable is at least as curved as that of the first.
        penalty = getattr(self, "penalty", None)
        in_x = row_in_x(problem, self.descents(problem).x.step_size, w0)
        return (*rows_of_steps(problem, w0, dict(of_y), penalty), *in_x)

    def lower_bounds(self, sizes: Sizes | None) -> tuple[float, float, float]:
        """Return the clip norms of a lower record's three blocks, defaults filled in.

        A second one that is not given is $C_f n_g / n_f$ with the records of a batch,
        or `clip_norm` if that is larger or there are no sizes. One upper record then
        moves the block no more than a lower one does. Otherwise few upper records would
        decide the noise of all blocks.
        """
        second: Any = getattr(self, self.second_clip_norm)
        if second is None:
            second = self.clip_norm
            if sizes is not None:
                denominator = self.sampling.denominator
                upper, lower = denominator(sizes.upper), denominator(sizes.lower)
                bounds: Any = second, self.upper_clip_norm * lower / upper
                known = all(map(_checks.concrete, bounds))  # not in a compiled step
                second = max(bounds) if known else jnp.maximum(*bounds)
        return self.clip_norm, second, self.cross_clip_norm

    def upper_bounds(self) -> tuple[float | None, Number | None, float]:
        """Return an upper record's three clip norms; `None` for the empty block."""
        return None, self.upper_clip_norm, self.upper_clip_norm

    def release(self, problem: BilevelProblem, sizes: Sizes) -> Release:
        """Return a step's planned `Release` of all blocks; reads no data."""
        units = self._units(bool(problem.x_in_records), sizes)

        def clip_norm(role, bounds):
            *both, of_x = zip(bounds, _entries(units), strict=True)
            # A level that does not read x has no block there to bound.
            terms = both + ([of_x] if problem.reads_x(role) else [])
            squares = [(b / unit) ** 2 for b, unit in terms if b is not None]
            return sum(squares[1:], squares[0]) ** 0.5

        clip_norms = Levels(  # of a record, over all blocks in their units
            clip_norm("upper", self.upper_bounds()),
            clip_norm("lower", self.lower_bounds(sizes)),
        )
        queries, joint = levels_queries(clip_norms, self.sampling, sizes)
        return Release(_name(units), 1, queries, self.release_noise, joint=joint)

    @override
    def dimensions(self, w0):
        d_x, d_y = (optax.tree.size(w) for w in w0)
        names = [_name(self._units(meets, self.sizes)) for meets in (False, True)]
        return dict(zip(names, (2 * d_y, 2 * d_y + d_x), strict=True))

    def directions(
        self,
        problem: BilevelProblem,
        data: Levels,
        upper: LossBlocks,
        lower: LossBlocks,
        *,
        like: PyTree,
        key: PRNGKey,
    ) -> Any:
        """Make one noisy release; return its blocks, zeros for x if none reads x.

        `upper` and `lower` return the blocks of such a loss, a function of (x, y).

        Privacy:
            One `release`.
        """
        units = self._units(bool(problem.x_in_records), self.sizes)

        def of_record(blocks, loss):
            def scaled(record):
                return _scaled(blocks(lambda x, y: loss(x, y, record)), units, -1)

            return scaled

        release = self.release(problem, self.sizes)
        funs = {
            "upper": of_record(upper, problem.upper),
            "lower": of_record(lower, problem.lower),
        }
        q = _scaled(release.apply(funs, data, key=key), units, 1)
        if q.x is not None:
            return q
        return dataclasses.replace(q, x=optax.tree.zeros_like(like))

    def with_public(
        self, problem: BilevelProblem, q: Any, upper: LossBlocks, lower: LossBlocks
    ) -> Any:
        """Return blocks `q` plus the public terms', a proximal one's first left out.

        The first block leaves out the term of a proximal step.
        """
        if (term := problem.lower_public) is not None:
            first, *others = _entries(lower(term))
            first = first if smooth_part(term) else optax.tree.zeros_like(first)
            q = optax.tree.add(q, self.blocks(first, *others))
        if problem.upper_public is not None:
            q = optax.tree.add(q, upper(problem.upper_public))
        return q

    def _units(self, meets_x: bool, sizes: Sizes | None) -> Any:
        """Return units: clip norms over roots of budget fractions; x may be `None`."""
        split = self.budget_split
        total = sum(split) if meets_x else sum(split[:2])  # a public block is free
        first, second, x = (
            bound * (total / share) ** 0.5
            for bound, share in zip(self.lower_bounds(sizes), split, strict=True)
        )
        return self.blocks(first, second, x if meets_x else None)


def _entries(blocks: AbstractBlocks) -> list[Any]:
    return list(vars(blocks).values())


def _name(units: AbstractBlocks) -> str:
    """Return the release's name, with every direction's unit if not traced."""
    named = {k: v for k, v in vars(units).items() if v is not None}
    if not all(map(_checks.concrete, named.values())):
        return "directions"  # inside of a compiled step, where nobody reads it
    listed = ", ".join(f"{k} / {unit:.3g}" for k, unit in named.items())
    return f"directions of ({listed})"


def _scaled(blocks: Any, units: Any, power: int) -> Any:
    """Return blocks times a power of their units; x is `None` if it has no unit."""
    if units.x is None:
        blocks = dataclasses.replace(blocks, x=None)  # not released
    return jax.tree.map(
        lambda unit, block: optax.tree.scale(unit**power, block), units, blocks
    )
