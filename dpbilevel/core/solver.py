"""The solver contract: what every private iterative method declares and does."""

import abc
import dataclasses
from typing import Any, ClassVar, Generic, Self, TypeVar
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import numpy as np
import optax
from equinox import AbstractVar  # noqa: F811
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .._checks import Checked, NonNegative, Number
from ..privacy import Basis, FullBatch, Gaussian, Ledger, Neighbours, People
from ..privacy.keys import PRNGKey
from ..privacy.ledger import AbstractRelease
from ..privacy.per_example.clipping import Precision
from ..privacy.rows import ForecastRow
from ..privacy.sampling.base import AbstractSampling, check_sampling
from .outputs import AbstractOutput, Last, check_output

Problem = TypeVar("Problem")
State = TypeVar("State")


class AbstractSolver(Checked, Generic[Problem, State]):
    """A private iterative method: a frozen pytree that is its own configuration.

    Numbers are leaves, so changing them never retraces; counts and callables are
    static. A solver is run by `solve`, calibrated by `calibrate`.

    Attributes:
        problem_type: The class of problems it solves.
        in_config: Whether a config of the command line can hold it.
        proximal: The fields with the sizes or the solvers of its proximal steps; `None`
            if it makes none.
        basis: `Basis` of the sensitivities of all releases; by default clipping.
        num_steps: The fixed number of steps. Static.
        neighbours: Neighbouring relation of the noise.
        sizes: The planned numbers of records: `Sizes` for two levels, an integer for
            one. `calibrate` sets it. Static.
    """

    problem_type: eqx.AbstractClassVar[type]
    in_config: ClassVar[bool] = True
    proximal: ClassVar[tuple[str, ...] | None] = None
    basis: ClassVar[Basis] = Basis.CLIPPED

    num_steps: AbstractVar[int]
    neighbours: AbstractVar[Neighbours]
    sizes: Any = eqx.field(static=True, default=None, kw_only=True)

    @abc.abstractmethod
    def init(self, problem: Problem, w0: PyTree) -> State:
        """Return the state before the first step; no data is read."""

    @abc.abstractmethod
    def step(
        self, problem: Problem, data: PyTree, state: State, *, key: PRNGKey
    ) -> State:
        """Return the state after a step, which releases all it reads by mechanisms."""

    @abc.abstractmethod
    def released(self, state: State) -> PyTree:
        """Return the current iterate, which is released: a row of the trajectory."""

    def adversary_view(self, state: State) -> PyTree:
        """Return the values that an audit may see after a step: all that were released.

        By default `released(state)`. A solver whose state holds more released values
        overrides it.
        """
        return self.released(state)

    def answer(self, problem: Problem, state: State) -> PyTree:
        """Return the answer, a function of released values; by default the iterate."""
        return self.released(state)

    @abc.abstractmethod
    def ledger(self, problem: Problem, sizes: Any) -> Ledger:
        """Return the `Ledger` of all releases of a run on data of these sizes.

        Raises:
            ValueError: The solver is not calibrated.
        """

    def ledger_of_steps(self, problem: Problem, sizes: Any, done: int) -> Ledger:
        """Return the `Ledger` of the first `done` steps, at least 1.

        The default is all releases of the run, which are more than were made. A solver
        whose steps all make the same releases overrides it.
        """
        return self.ledger(problem, sizes)

    @abc.abstractmethod
    def with_noise(self, scale: Number) -> Self:
        """Return a copy whose Gaussian releases on full batches are 1/scale-GDP.

        Args:
            scale: The noise multiplier of the single Gaussian release that a run on
                full batches amounts to: the run is 1/scale-GDP. With sampling the run
                is more private than that. It is not the noise multiplier of a step,
                which is the field `noise_multiplier`.
        """

    def with_sizes(self, sizes: Any) -> Self:
        """Return a copy of the solver, bound to these numbers of records.

        They are `Sizes` for two levels, an integer for one.
        """
        whole = isinstance(sizes, np.integer)  # a NumPy integer would not be static
        changes: dict[str, Any] = {"sizes": int(sizes) if whole else sizes}
        return dataclasses.replace(self, **changes)

    def with_counts(self, problem: Problem, sizes: Any = None) -> Self:
        """Return the solver with counts set that depend on noise; default: itself.

        `calibrate` calls it last. Sizes are by default those of the solver.
        """
        return self

    def with_precision(self, precision: Precision) -> Self:
        """Return a copy of the solver with every mechanism in this precision.

        It is `"grid"` or `"float"`, as in `Gaussian`.
        """
        return _with(self, precision=precision)

    def forecast(
        self, problem: Problem, sizes: Any, w0: PyTree
    ) -> tuple[ForecastRow, ...]:
        """Return a tuple of `ForecastRow`s on noise and steps; by default empty.

        `w0` is the initial point, or zeros if only shapes are known.
        """
        return ()

    def with_neighbours(self, neighbours: Neighbours) -> Self:
        """Return a copy of the solver with every mechanism under this relation.

        Raises:
            ValueError: The solver does not support it. `calibrate` refuses some
                relations later.
        """
        return _with(self, neighbours=neighbours)

    @abc.abstractmethod
    def dimensions(self, w0: PyTree) -> dict[str, int]:
        """Return a dict of each release's number of coordinates, by its name."""


def _with(part: Any, **changes: Any) -> Any:
    """Return a solver's part with all fields of these names replaced, at any depth."""
    if isinstance(part, tuple):
        parts = tuple(_with(inner, **changes) for inner in part)
        same = all(new is old for new, old in zip(parts, part, strict=True))
        return part if same else parts
    if not isinstance(part, eqx.Module):
        return part
    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part) if f.init}
    changed = {
        name: new
        for name, old in values.items()
        if (new := changes[name] if name in changes else _with(old, **changes))
        is not old
    }
    return dataclasses.replace(part, **changed) if changed else part


class AbstractGaussianSolver(AbstractSolver[Problem, State]):
    """A solver whose fields specify the Gaussian mechanism of each of its releases.

    Attributes:
        noise_multiplier: The standard deviation of the noise of one release, over the
            sensitivity of that release: the noise multiplier of DP-SGD. `None` until
            `calibrate` or `with_noise` sets it.
        neighbours: The neighbouring relation of the sensitivity. `calibrate` sets it to
            the relation of the budget. Static.
        precision: `"grid"` or `"float"`, as in `Gaussian`. `calibrate` sets it.
            Static.
    """

    noise_multiplier: NonNegative | None = eqx.field(default=None, kw_only=True)
    neighbours: Neighbours = eqx.field(
        static=True, default=Neighbours.REPLACE_ONE, kw_only=True
    )
    precision: Precision = eqx.field(static=True, default="grid", kw_only=True)

    @property
    def release_noise(self) -> Gaussian:
        """Gaussian mechanism of one release."""
        return Gaussian(self.noise_multiplier, self.neighbours, self.precision)


# Names of the fields that `calibrate` sets.
MECHANISM_FIELDS = frozenset(AbstractGaussianSolver.__dataclass_fields__)


class AbstractNoisySolver(AbstractGaussianSolver[Problem, State]):
    """A solver that makes the same Gaussian releases at every step.

    `release` declares what a step releases, and the ledger follows from it. Solvers
    whose states have no `w` define `released`.

    Attributes:
        release_name: Name of a release with one number for each coordinate of `w0`.
            Solvers with other releases define `dimensions`.
        releases_per_step: The number of releases of a step.
    """

    release_name: ClassVar[str]
    releases_per_step: ClassVar[int] = 1

    @property
    def num_releases(self) -> int:
        """Number of releases in a run."""
        return self.releases_per_step * self.num_steps

    @property
    def run_noise(self) -> Gaussian:
        """Gaussian mechanism of the one full-batch release that a run amounts to."""
        return self.release_noise.scaled(self.num_releases**-0.5)

    @abc.abstractmethod
    def release(self, problem: Problem, sizes: Any) -> AbstractRelease:
        """Return a step's planned release (queries, mechanism); reads no record.

        Raises:
            ValueError: The problem lacks what the sensitivity rests on.
        """

    def counted_release(self, problem: Problem, sizes: Any) -> AbstractRelease:
        """Return the planned `release` with its `count` for a whole run."""
        release = self.release(problem, sizes)
        return dataclasses.replace(release, count=self.num_releases)

    def assumptions(self, problem: Problem, sizes: Any) -> tuple[str, ...]:
        """Return a tuple of texts: assumptions besides clipping; default: empty."""
        return ()

    @override
    def ledger(self, problem: Problem, sizes: Any) -> Ledger:
        return Ledger(
            (self.counted_release(problem, sizes),),
            # Without effect for one level, whose sizes are a number.
            getattr(sizes, "people", People.OVERLAPPING),
            self.assumptions(problem, sizes),
        )

    @override
    def ledger_of_steps(self, problem: Problem, sizes: Any, done: int) -> Ledger:
        return self.ledger(problem, sizes).part(done, self.num_steps)

    @override
    def with_noise(self, scale: Number) -> Self:
        changes: dict[str, Any] = {"noise_multiplier": scale * self.num_releases**0.5}
        return dataclasses.replace(self, **changes)

    @override
    def released(self, state: Any) -> PyTree:
        return state.w

    @override
    def dimensions(self, w0: PyTree) -> dict[str, int]:
        return {self.release_name: optax.tree.size(w0)}


class AbstractIterative(AbstractSolver[Problem, State]):
    """Solver on sampled batches with an output rule, whose memory is state.kept.

    Attributes:
        sampling: How the batches of a step are drawn, one per level.
        output: Which iterate is the answer: `Last()`, `Mean()` of all, or `TailMean()`
            of the second half.
        numbers_batches: Whether steps number their batches, as `SinglePass` needs.
    """

    sampling: AbstractSampling = eqx.field(default=FullBatch(), kw_only=True)
    output: AbstractOutput = eqx.field(default=Last(), kw_only=True)
    numbers_batches: ClassVar[bool] = False

    def __check_init__(self):
        owner = type(self).__name__
        check_sampling(owner, self.sampling, self.numbers_batches)
        check_output(owner, self.output)

    def remembered(
        self, memory: PyTree, w: PyTree, *, before: PyTree, t: Int[Array, ""]
    ) -> PyTree:
        """Return the output rule's memory after step `t` from `before` to `w`."""
        run: Any = {"t": t, "num_steps": self.num_steps, "key": None}
        return self.output.update(memory, w, before=before, **run)

    @override
    def answer(self, problem: Problem, state: Any) -> PyTree:
        return self.output.answer(state.kept, self.released(state))


Solver = TypeVar("Solver", bound=AbstractSolver)
