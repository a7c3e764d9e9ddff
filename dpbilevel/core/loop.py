"""The solver contract, and the one loop that runs every solver."""

import abc
import dataclasses
import typing
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, PyTree

from .. import _checks
from ..privacy.budget import Neighbours, People
from ..privacy.clipping import Basis, Precision
from ..privacy.ledger import Ledger
from ..privacy.mechanisms import Gaussian
from ..privacy.noise import PRNGKey, check_key, step_keys
from ..privacy.releases import AbstractRelease
from ..privacy.rows import padded, padded_rows
from .descent import rejected_updates
from .levels import Levels, people_of
from .problem import AbstractProblem
from .solution import Plan, Solution

Problem = TypeVar("Problem")
State = TypeVar("State")


class AbstractSolver(eqx.Module, Generic[Problem, State]):
    """A private iterative method: a frozen pytree that is its own configuration.

    Numbers are leaves, so changing them never retraces; counts and callables are
    static. A solver is run by `solve`, calibrated by `calibrate`.

    Attributes:
        problem_type: The class of problems it solves.
        in_config: Whether a config of the command line can hold it.
        num_steps: The fixed number of steps. Static.
        sizes: The planned numbers of records; set by `calibrate`. Static.
    """

    problem_type: eqx.AbstractClassVar[type]
    in_config: ClassVar[bool] = True

    if TYPE_CHECKING:  # mypy takes an AbstractVar for a field of this class

        @property
        def num_steps(self) -> int:
            """The fixed number of steps."""

        @property
        def sizes(self) -> Any:
            """The planned numbers of records."""

    else:
        num_steps: eqx.AbstractVar[int]
        sizes: eqx.AbstractVar[Any]

    @property
    @abc.abstractmethod
    def neighbours(self) -> Neighbours:
        """The relation that the noise refers to."""

    @property
    def basis(self) -> Basis:
        """What the sensitivities of its releases rest on; by default on clipping."""
        return Basis.CLIPPED

    @abc.abstractmethod
    def init(self, problem: Problem, w0: PyTree) -> State:
        """The state before the first step; reads no data."""

    @abc.abstractmethod
    def step(
        self, problem: Problem, data: PyTree, state: State, *, key: PRNGKey
    ) -> State:
        """One step; every read of `data` is released through a mechanism."""

    @abc.abstractmethod
    def released(self, state: State) -> PyTree:
        """The current iterate, released: one row of the trajectory."""

    def adversary_view(self, state: State) -> PyTree:
        """What an audit may look at after a step: all that the ledger pays for.

        By default `released(state)`. A solver whose state holds more released values
        names them here; one that must hide part of its state leaves that part out.
        """
        return self.released(state)

    @abc.abstractmethod
    def output(self, problem: Problem, state: State) -> PyTree:
        """The answer, computed from released values alone."""

    @abc.abstractmethod
    def ledger(self, problem: Problem, sizes: Any) -> Ledger:
        """Every release of a whole run on data of these sizes.

        Raises:
            ValueError: The solver is not calibrated.
        """

    @abc.abstractmethod
    def with_noise(self, scale: float) -> Self:
        """The same solver at this noise, with the ratios its fields ask for.

        Args:
            scale: The noise multiplier of the single Gaussian release that a run on
                full batches amounts to: the run is 1/scale-GDP. With sampling the run
                is more private than that.
        """

    def with_sizes(self, sizes: Any) -> Self:
        """The same solver, bound to these numbers of records.

        Args:
            sizes: `Sizes` for two levels, an integer for one.
        """
        changes: dict[str, Any] = {"sizes": sizes}
        return dataclasses.replace(self, **changes)

    def with_counts(self, problem: Problem, sizes: Any = None) -> Self:
        """With every count that follows from the noise: the last step of calibration.

        Args:
            problem: The problem.
            sizes: The planned sizes; the solver's own by default.
        """
        return self

    def with_precision(self, precision: Precision) -> Self:
        """The same solver with every mechanism in this precision.

        Args:
            precision: `"grid"` or `"float"`, as in `Gaussian`.
        """
        return jax.tree.map(
            lambda v: v.with_precision(precision) if isinstance(v, Gaussian) else v,
            self,
            is_leaf=lambda v: isinstance(v, Gaussian),
        )

    @abc.abstractmethod
    def dimensions(self, w0: PyTree) -> dict[str, int]:
        """The number of coordinates of each release, by its name in the ledger."""


class AbstractNoisySolver(AbstractSolver[Problem, State]):
    """A solver that makes the same Gaussian releases at every step.

    What it releases is declared once, in `releases`; the ledger follows from that.

    Attributes:
        noise: The mechanism; its multiplier is per release.
        releases_per_step: How many releases a step makes.
    """

    releases_per_step: ClassVar[int] = 1

    if TYPE_CHECKING:

        @property
        def noise(self) -> Gaussian:
            """The mechanism."""

    else:
        noise: eqx.AbstractVar[Gaussian]

    @property
    def neighbours(self) -> Neighbours:
        """The relation of the mechanism."""
        return self.noise.neighbours

    @property
    def num_releases(self) -> int:
        """Of a whole run."""
        return self.releases_per_step * self.num_steps

    @abc.abstractmethod
    def release(self, problem: Problem, sizes: Any) -> AbstractRelease:
        """What a step releases, with its count in a whole run.

        Args:
            problem: The problem.
            sizes: The planned sizes.

        Raises:
            ValueError: The problem lacks what the sensitivity rests on.
        """

    def assumptions(self, problem: Problem, sizes: Any) -> tuple[str, ...]:
        """What the guarantee rests on besides clipping; by default nothing.

        Args:
            problem: The problem.
            sizes: The planned sizes.
        """
        del problem, sizes
        return ()

    def ledger(self, problem: Problem, sizes: Any) -> Ledger:
        """All of its releases."""
        return Ledger(
            (self.release(problem, sizes),),
            people_of(sizes) or People.OVERLAPPING,
            self.assumptions(problem, sizes),
        )

    def with_noise(self, scale: float) -> Self:
        """Sets the multiplier of a release to `scale` times the root of their number.

        Args:
            scale: As in `AbstractSolver.with_noise`.
        """
        noise = self.noise.with_multiplier(scale * self.num_releases**0.5)
        changes: dict[str, Any] = {"noise": noise}
        return dataclasses.replace(self, **changes)


def solve(
    problem: AbstractProblem,
    solver: AbstractSolver,
    data: PyTree,
    w0: PyTree,
    *,
    key: PRNGKey,
    trajectory: bool = False,
) -> Solution:
    """Runs `solver` on `problem` and returns what it releases.

    A pure function of its arguments: `jax.jit(solve)` compiles once for all numbers,
    `jax.vmap` runs a batch of keys or of stacked solvers: as many runs, as many
    budgets, and each needs its own key. Derivatives by `jax.grad` treat every released
    value as a constant: they are post-processing, not derivatives of the exact map.

    Args:
        problem: A `BilevelProblem` or a `FiniteSum`.
        solver: A calibrated solver of that problem.
        data: `Levels` for two levels, a pytree of records for one.
        w0: The starting point, public or already private: `(x, y)` for two levels.
        key: One typed key; consumed by this run.
        trajectory: Whether to return the released iterates. Static: under `jax.jit`
            use `static_argnames="trajectory"`.

    Returns:
        The solution.

    Raises:
        TypeError: The key is not typed, or `data` is of the wrong kind.
        ValueError: The solver is not calibrated, shapes do not fit, or the numbers of
            records differ from the plan's.

    Privacy:
        The releases counted by `solver.ledger(problem, sizes)`, whatever the data
        holds. All errors depend on shapes and public values only.
    """
    check_key(key)
    solver_for(problem, solver, "solve")
    if isinstance(trajectory, jax.core.Tracer):
        raise TypeError(
            "solve: trajectory must be a Python bool; under jax.jit pass "
            'static_argnames="trajectory".'
        )
    problem.check(w0, data)
    # Before records are copied: two levels with one array would get two.
    solver = bound_to(problem, solver, data)
    data = planned_rows(solver, _checks.on_device(data))
    state = solver.init(problem, w0)
    _, keys = step_keys(key, solver.num_steps)
    state, path = advance(problem, solver, data, state, keys, trajectory=trajectory)
    value = solver.output(problem, state)
    return Solution(value, path, rejected_updates(state))


def advance(
    problem: AbstractProblem,
    solver: AbstractSolver,
    data: PyTree,
    state: Any,
    keys: Key[Array, " steps"],
    *,
    trajectory: bool = False,
) -> tuple[Any, PyTree | None]:
    """Runs one step per key: the loop under `solve`, for runs made in chunks.

    Args:
        problem: The problem.
        solver: A calibrated solver, bound to the data's sizes.
        data: The records, in `planned_rows`.
        state: The state to go on from.
        keys: One typed key per step.
        trajectory: Whether to return the released iterates.

    Returns:
        The new state, and the released iterates or `None`.
    """

    def one_step(state, key):
        state = solver.step(problem, data, state, key=key)
        return state, solver.released(state) if trajectory else None

    return jax.lax.scan(one_step, state, keys)


def inner_solve(
    problem: AbstractProblem,
    solver: AbstractSolver,
    data: PyTree,
    start: PyTree,
    *,
    key: PRNGKey,
) -> tuple[PyTree, Int[Array, ""]]:
    """A whole run of an inner solver on a problem at hand.

    Returns:
        Its released answer, and how many updates were left out.
    """
    _, keys = step_keys(key, solver.num_steps)
    state, _ = advance(problem, solver, data, solver.init(problem, start), keys)
    return solver.output(problem, state), rejected_updates(state)


def bound_to(
    problem: AbstractProblem, solver: AbstractSolver, data: PyTree, owner: str = "solve"
) -> AbstractSolver:
    """The solver with the sizes that its plan fixed, checked against the data.

    Args:
        problem: The problem.
        solver: The solver.
        data: The records, or their shapes.
        owner: What to name in an error.

    Raises:
        ValueError: Under replace-one, the data's sizes are not the planned ones; under
            add-or-remove-one, there is no plan to take the public sizes from.
    """
    people = people_of(solver.sizes)
    if people is not None:
        problem.check_people(data, people)
    if solver.neighbours is Neighbours.ADD_OR_REMOVE_ONE:
        if solver.sizes is None:
            raise ValueError(
                f"{owner}: under add-or-remove-one the number of records is private, "
                "so the public denominators must come from a plan; run "
                "dpbilevel.calibrate(problem, solver, budget, sizes=...) first."
            )
        return solver
    if solver.sizes is None:
        return solver.with_sizes(problem.sizes_of(data))
    found = problem.sizes_of(data, people)
    if found != solver.sizes:
        raise ValueError(
            f"{owner}: the plan is for {solver.sizes}, but the data have {found}. The "
            "guarantee holds for the planned numbers only; calibrate again with "
            "sizes= these."
        )
    return solver


def planned_rows(solver: AbstractSolver, data: PyTree, owner: str = "solve") -> PyTree:
    """The records in a number of rows that is public.

    Under add-or-remove-one how many there are is private, and the program that reads
    them, down to the rounding of every record's gradient, depends on the shapes that it
    is compiled for. They are padded to the rows of the plan, and the padding is masked.

    Args:
        solver: A solver, bound to its planned sizes.
        data: The records.
        owner: What to name in an error.

    Returns:
        `data` under replace-one; else `Padded` records, in each level.

    Raises:
        ValueError: There are more records than rows.
    """
    if solver.neighbours is not Neighbours.ADD_OR_REMOVE_ONE:
        return data

    def pad(records, size, name):
        rows = padded_rows(size)
        if _checks.leading_axis(name, records) > rows:
            raise ValueError(
                f"{owner}: {name} has more records than the {rows} rows that the plan "
                f"for {size} pads them to. Under add-or-remove-one the planned size is "
                "a public bound; calibrate with a larger sizes=."
            )
        return padded(records, rows)

    if not isinstance(data, Levels):
        return pad(data, solver.sizes, "data")
    upper = pad(data.upper, solver.sizes.upper, "data.upper")
    if data.is_shared:
        return Levels.shared(upper)
    return Levels(upper, pad(data.lower, solver.sizes.lower, "data.lower"))


def solver_for(problem: Any, solver: Any, owner: str) -> AbstractSolver:
    """The solver, if it is one and solves problems of this kind.

    Args:
        problem: What was given as problem.
        solver: What was given as solver.
        owner: The function to name in an error.

    Raises:
        TypeError: The solver is a plan or no solver, or holds numbers of half
            precision, or the problem is of another kind.
    """
    if isinstance(solver, Plan):
        raise TypeError(f"{owner}: got a Plan as solver; pass plan.solver.")
    _checks.instance(owner, AbstractSolver, solver=solver)
    _checks.single_precision(owner, solver)
    if not isinstance(problem, solver.problem_type):
        kinds = typing.get_args(solver.problem_type) or (solver.problem_type,)
        names = " or a ".join(k.__name__.removeprefix("Abstract") for k in kinds)
        raise TypeError(
            f"{owner}: {type(solver).__name__} solves a {names}, got "
            f"{type(problem).__name__} as problem."
        )
    return solver


def check_planned_dtype(owner: str, dtype: str | None, w0: PyTree) -> None:
    """Raises where a start is coarser than what errors are planned for.

    Args:
        owner: The solver to name in an error.
        dtype: What the plan takes values to be computed in, if there is a plan.
        w0: The start.

    Raises:
        ValueError: Its dtype is coarser.
    """
    found = jnp.result_type(*jax.tree.leaves(w0))
    if dtype is None or jnp.finfo(found).bits >= jnp.finfo(dtype).bits:
        return
    raise ValueError(
        f"{owner}: planned for values computed in {dtype}, but the starting point is "
        f"of {found.name}; give {dtype} records and starting point, or calibrate "
        "without 64-bit."
    )
