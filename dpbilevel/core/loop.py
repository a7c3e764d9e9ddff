"""`solve`: the one loop that runs every solver, and the checks before it."""

import functools
import typing
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Int, Key, PyTree

from .. import _checks
from .._version import TESTED_JAX, __version__
from ..privacy.budget import Neighbours
from ..privacy.exact.matmul_check import check_products
from ..privacy.keys import PRNGKey, check_key, check_shared, step_keys
from ..privacy.per_example import mixing
from ..privacy.records.disk import OnDisk
from ..privacy.records.rows import BLOCK, padded, padded_rows, shapes_of, shards_of
from . import process_spending
from .columns import Column, as_numbers, numbers
from .descent import Rule, rejected_updates
from .levels import Levels
from .problem import AbstractProblem, Lifted, arrays_of, lifted
from .solution import Plan, Solution
from .solver import AbstractSolver, Solver

Count = Int[Array, ""]


def solve(
    problem: AbstractProblem,
    solver: AbstractSolver,
    data: PyTree,
    w0: PyTree,
    *,
    key: PRNGKey,
    trajectory: bool = False,
    trainable: PyTree = None,
) -> Solution[None]:
    """Run `solver` on `problem` and return the released `Solution`.

    A pure function of its arguments: `jax.jit(solve)` compiles once for all numbers,
    `jax.vmap` runs a batch of keys or of stacked solvers: as many runs, as many
    budgets, and each needs its own key. Derivatives by `jax.grad` treat every released
    value as a constant: they are post-processing, not derivatives of the exact map.

    Args:
        problem: A `BilevelProblem` or a `FiniteSum`.
        solver: A calibrated solver of that problem.
        data: `Levels` for two levels, a pytree of records for one; tables as in `fit`.
        w0: The initial point, public or already private: `(x, y)` for two levels. Of
            an Equinox module the arrays are the variables, and the answer is a module.
        key: One typed key; consumed by this run.
        trajectory: Whether to return the released iterates. Static: under `jax.jit`
            use `static_argnames="trajectory"`.
        trainable: As in `fit`.

    Returns:
        The solution.

    Raises:
        TypeError: The key is not typed, or `data` is of the wrong kind.
        ValueError: The solver is not calibrated, shapes do not fit, the numbers of
            records differ from the plan's, the device computes matrix products too
            coarsely, or processes that share the records have different keys.

    Warns:
        PrivacyWarning: As `fit`.

    Privacy:
        The releases counted by `solver.ledger(problem, sizes)`, whatever the data
        holds. All errors depend on shapes and public values only. `dpbilevel.spent()`
        lists the run, if JAX does not trace the call: a function compiled by `jax.jit`
        is a run each time that it is executed, and is not counted. If the solver is not
        that of a plan, the cost of the run is printed to the standard error.
    """
    problem, w0, leaves = arrays_of("solve", problem, w0, trainable)
    data = arrays(data)
    bound = check_run("solve", problem, solver, data, w0, key)
    run = problem, bound, data, w0
    given = problem, solver, data, w0, key
    if any(isinstance(v, Tracer) for v in jax.tree.leaves(given)):
        solution = run_checked(*run, key=key, trajectory=trajectory)
    else:
        costs = process_spending.costs_of(problem, solver, bound.sizes, "solve")
        name, relation = f"solve: {type(solver).__name__}", solver.neighbours
        begun = name, relation.value, costs, bound.sizes, data, key
        count = process_spending.begun(*begun)
        solution = run_checked(*run, key=key, trajectory=trajectory)
        count()
    return solution if leaves is None else solution.with_leaves(leaves)


def arrays(records: PyTree) -> PyTree:
    """Return records with tables as matrices and single columns as vectors.

    Tables are those of pandas, polars and pyarrow. Their arrays are of float64, a
    missing number is NaN, and types do not depend on which are missing. Other arrays
    stay as they are.

    Raises:
        ValueError: A column stands for no numbers, by its type; it is named.

    Privacy:
        Each entry is read alone. Errors depend on types.
    """
    made: dict[int, Any] = {}  # the same table in both levels must stay the same array

    def array(path: Any, leaf: Any) -> Any:
        # Tables and their columns have one of these, and arrays of NumPy and JAX none.
        if not (hasattr(leaf, "to_numpy") or hasattr(leaf, "to_pylist")):
            return leaf
        if id(leaf) not in made:
            name = f"data{jax.tree_util.keystr(path)}"
            whole = len(getattr(leaf, "shape", ())) == 2
            try:
                column = None if whole else Column.of(leaf)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            if column is None:
                made[id(leaf)] = numbers(leaf, name)
            else:
                made[id(leaf)] = as_numbers(name, column)
        return made[id(leaf)]

    return jax.tree_util.tree_map_with_path(array, records)


def solved(problem, solver, data, w0, *, key, trajectory=False) -> Solution[None]:
    """Return the `Solution` of `solve`, not counted among the runs of this process.

    It is for callers that count it themselves, and for runs on synthetic records.
    """
    bound = check_run("solve", problem, solver, data, w0, key)
    return run_checked(problem, bound, data, w0, key=key, trajectory=trajectory)


def check_run(owner: str, problem, solver, data, w0, key) -> AbstractSolver:
    """Check the arguments of `solve`; return the solver bound to the data's sizes.

    Errors are those of `solve`, and name `owner`, the called function.
    """
    check_key(key)
    solver_for(problem, solver, owner)
    check_device(owner)
    problem.check_unit(data)
    problem.check(w0, data)
    return bound_to(problem, solver, data, owner)


def check_device(owner: str) -> None:
    """Check the device's matrix products; with an untested JAX also rows, and warn.

    The latter is tested if JAX is newer than the tested releases; a warning then says
    so, once in a process. Errors are those of `check_products` and `check_rows`.
    """
    check_products(owner)
    if jax.__version_info__ > tuple(map(int, TESTED_JAX.split("."))):
        mixing.check_rows(owner)
        _warn()


@functools.cache
def _warn() -> None:
    warnings.warn(
        f"dpbilevel {__version__} was tested with JAX up to {TESTED_JAX}, and this is "
        f"JAX {jax.__version__}. A short test on this device passed. Run `dpbilevel "
        f"device` for a longer one, or install jax=={TESTED_JAX}.",
        stacklevel=4,
    )


def run_checked(problem, solver, data, w0, *, key, trajectory=False) -> Solution[None]:
    """Return the `Solution` of a bound solver, as `solve` does, without its checks."""
    if isinstance(trajectory, Tracer):
        raise TypeError(
            "solve: trajectory must be a Python bool. Under jax.jit give "
            'static_argnames="trajectory".'
        )
    data = _checks.on_device(data)
    check_shared(key, data)
    data = planned_rows(solver, data)
    state = solver.init(problem, w0)
    _, keys = step_keys(key, solver.num_steps)  # as for a run in parts
    # If the caller compiles this call, the loop is traced as a part of that program.
    steps = all_steps if _checks.concrete(key) else scan_steps
    given = lifted(problem), solver, data, state, keys
    state, path = steps(*given, trajectory=trajectory)
    return Solution(solver.answer(problem, state), path, rejected_updates(state))


def scan_steps(
    problem: AbstractProblem | Lifted,
    solver: AbstractSolver,
    data: PyTree,
    state: PyTree,
    keys: Key[Array, " steps"],
    *,
    trajectory: bool = False,
) -> tuple[PyTree, PyTree | None]:
    """Run one step per key; return the last state, and the iterates or `None`.

    The solver is calibrated and bound to the data's sizes, the records are in
    `planned_rows`. With `trajectory` the released iterates are returned.
    """
    if isinstance(problem, Lifted):
        problem = problem.lowered()

    def one_step(state, key):
        state = solver.step(problem, data, state, key=key)
        return state, solver.released(state) if trajectory else None

    return jax.lax.scan(one_step, state, keys)


# Defined at module level, so that runs of the same shapes share one program.
all_steps = jax.jit(scan_steps, static_argnames="trajectory")


def inner_solve(problem, solver, data, start, *, key) -> tuple[PyTree, Count]:
    """Make a whole run; return its answer and the number of skipped updates.

    Solver and records are as for `scan_steps`; `start` is the initial point.
    """
    _, keys = step_keys(key, solver.num_steps)
    state, _ = scan_steps(problem, solver, data, solver.init(problem, start), keys)
    return solver.answer(problem, state), rejected_updates(state)


def bound_to(
    problem: AbstractProblem, solver: Solver, data: PyTree, owner: str = "solve"
) -> Solver:
    """Return the solver bound to planned sizes, else the data's; refuse a mismatch.

    Only shapes are read. A `ValueError` names `owner` if, under add-or-remove-one, no
    plan has public sizes, or is that of `check_planned`.
    """
    if solver.sizes is not None:
        check_planned(problem, solver, data, owner)
        return solver
    if solver.neighbours is Neighbours.ADD_OR_REMOVE_ONE:
        raise ValueError(
            f"{owner}: add-or-remove-one needs public sizes; use calibrate(sizes=)."
        )
    return solver.with_sizes(problem.sizes_of(data))


def check_planned(
    problem: AbstractProblem, solver: AbstractSolver, data: PyTree, owner: str = "solve"
) -> None:
    """Check that the data fit the planned sizes of a solver, by their shapes alone.

    A `ValueError` names `owner` if, under replace-one, sizes are not the planned ones.
    Under add-or-remove-one sizes are private, and only the people are compared.
    """
    people = getattr(solver.sizes, "people", None)  # None for one level
    if solver.neighbours is Neighbours.ADD_OR_REMOVE_ONE:
        if people is not None:
            problem.check_people(data, people)
    elif (found := problem.sizes_of(data, people)) != solver.sizes:
        raise ValueError(
            f"{owner}: the plan is for {solver.sizes}; calibrate with sizes={found}."
        )


def planned_rows(solver: AbstractSolver, data: PyTree, owner: str = "solve") -> PyTree:
    """Return the records, padded under add-or-remove-one to the rows of the plan.

    Under add-or-remove-one the number of records is private, and the program that reads
    them, down to the rounding of every record's gradient, depends on the shapes that it
    is compiled for. They are padded to the rows of the plan, and the padding is masked:
    `Padded` records, in each level, or `OnDisk` ones of so many rows. Under replace-one
    they stay as they are. More records than rows are a `ValueError`.
    """
    sizes = solver.sizes
    if solver.neighbours is not Neighbours.ADD_OR_REMOVE_ONE:
        return data
    if not isinstance(data, Levels):
        return public_rows(data, sizes, "data", owner)
    upper = public_rows(data.upper, sizes.upper, "data.upper", owner)
    if data.is_shared:
        return Levels.shared(upper)  # one copy, or it would read as two levels
    return Levels(upper, public_rows(data.lower, sizes.lower, "data.lower", owner))


def public_rows(records: PyTree, size: int, name: str, owner: str) -> PyTree:
    """Return one level's records padded to the rows of a plan; refuse more records."""
    rows = padded_rows(size)
    if _checks.leading_axis(name, shapes_of(records)) > rows:
        raise ValueError(
            f"{owner}: {name} has more records than the {rows} rows of the plan for "
            f"{size} records. Calibrate with a larger sizes=."
        )
    if isinstance(records, OnDisk):
        return records.padded(rows)
    # Every device gets whole blocks; otherwise a row's rounding depends on its place.
    # If the devices are not known, the shapes must not depend on them.
    shards = shards_of(records)
    return padded(records, rows + -rows % (BLOCK * shards.known))


def solver_for(problem: Any, solver: Any, owner: str) -> AbstractSolver:
    """Return `solver`, checked to be a solver of problems of this kind.

    Raises:
        TypeError: The solver is a plan or no solver, or holds numbers of half
            precision, or the problem is of another kind.
        ValueError: The problem has a proximal term, and the solver takes none.
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
            f"{type(problem).__name__} as problem.{_checks.such_as(*kinds)}"
        )
    if problem.has_proximal:
        _check_proximal(owner, solver)
    return solver


def _check_proximal(owner: str, solver: AbstractSolver) -> None:
    """Raise `ValueError` unless a solver makes proximal steps of one constant size."""
    text = f"{owner}: {type(solver).__name__}"
    if solver.proximal is None:
        raise ValueError(f"{text} makes no proximal steps. Use NoisyGD or F2SA.")
    for field in solver.proximal:
        part = getattr(solver, field)
        if isinstance(part, AbstractSolver):
            _check_proximal(owner, part)
        elif isinstance(part, Rule) or (field == "momentum" and part is not None):
            raise ValueError(f"{text} needs steps of one size for proximal terms.")


def check_planned_dtype(owner: str, dtype: str | None, w0: PyTree) -> None:
    """Raise `ValueError` if `w0` has a coarser float type than `dtype`, the planned."""
    found = jnp.result_type(*jax.tree.leaves(w0))
    if dtype is None or jnp.finfo(found).bits >= jnp.finfo(dtype).bits:
        return
    raise ValueError(
        f"{owner}: planned for {dtype}, the initial point is {found.name}; convert it."
    )
