"""Canaries: worst-case pairs of datasets, which leak as much as a ledger allows."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..bilevel.problem import Levels, Sizes
from ..core.problem import AbstractProblem
from ..core.solution import Plan
from ..core.solver import AbstractSolver
from ..privacy.budget import Neighbours, People
from ..privacy.queries import LEVELS, RECORDS
from ..privacy.releases import PERSON
from ..privacy.sampling.base import AbstractSampling, FullBatch
from ..privacy.sampling.fixed_size import AbstractFixedBatch, FixedSize
from ..search.gibo import GradientInformativeBO
from .claims import Claim, ledger_claims
from .worst_cases import BEYOND, worst_case


@dataclasses.dataclass(frozen=True, eq=False)
class Canary:
    """Two neighbouring datasets that are a worst case for a solver.

    Attributes:
        problem: A problem of linear per-record functions: a record is its own gradient.
        solver: The solver, bound to the sizes of the data.
        w0: The initial point, zeros.
        data: The records; the person's is far beyond the clip norm.
        neighbour: The same records with the person's reversed, or absent.
        claim: The privacy profile of the person, from the solver's ledger.
    """

    problem: AbstractProblem
    solver: AbstractSolver
    w0: PyTree
    data: PyTree
    neighbour: PyTree
    claim: Claim


def canaries(
    solver: AbstractSolver,
    *,
    x_in_records: bool | tuple[str, ...] = True,
    others: float | None = None,
    coordinates: PyTree = 0.0,
) -> dict[str, Canary]:
    r"""Return a dict of `Canary`, worst-case pairs of datasets, by kind of person.

    All per-record functions are linear in the variables and the person's record is
    $10^6$ long, so each of its clipped contributions has the full clip norm, in one
    direction and at every step: $+C$ against $-C$ under replace-one, $+C$ against
    absent under add-or-remove-one. A person of disjoint levels has a record in one of
    them, otherwise in both. Everything is public: no records of anyone are needed.

    Records that contribute nothing are left out if batches do not depend on them, so
    full batches are audited at their planned sizes. Otherwise sizes and batch sizes are
    divided by a common divisor, which changes no ratio of noise to sensitivity and
    leaves at least two of each.

    Args:
        solver: A calibrated solver, bound to its sizes.
        x_in_records: The levels whose losses read x, as in the problem of the plan, so
            that the claim is that of the plan.
        others: The contribution of everyone else, in clip norms, in [-1, 1]. By default
            -1 if batches have a fixed size, because the others then show who was left
            out, and 0 otherwise.
        coordinates: A pytree whose leaves have the shapes of the variables.

    Returns:
        A canary for each kind of person in the ledger: `"records"` for one level,
        `"upper"` and `"lower"` for disjoint people, `"person"` otherwise.

    Raises:
        ValueError: The solver has no noise or sizes yet, or solves another kind of
            problem.
        TypeError: A plan instead of its solver, or no solver.
    """
    check_solver(solver, "canaries")
    if solver.sizes is None:
        raise ValueError("canaries: give the solver sizes by with_sizes(sizes).")
    zeros = jax.tree.map(jnp.zeros_like, jax.tree.map(jnp.asarray, coordinates))
    problem, w0 = worst_case(solver, x_in_records, zeros)
    claims = ledger_claims(solver.ledger(problem, solver.sizes))
    schemes = _sampling(solver)
    fixed = any(isinstance(scheme, FixedSize) for scheme in schemes)
    others = (-1.0 if fixed else 0.0) if others is None else others
    everyone = fixed or others != 0 or any(scheme.numbered for scheme in schemes)
    everyone |= isinstance(solver, GradientInformativeBO)  # has a row for each of them
    # At the planned sizes if they cost nothing: a defect may depend on them.
    alone = not everyone and all(isinstance(s, FullBatch) for s in schemes)
    small = solver if alone else _reduce(solver)
    # If upper records are clipped, a lower one moves the contributions of all of them.
    everyone |= getattr(solver, "upper_clip_norm", None) is not None
    absent = -1.0 if solver.neighbours is Neighbours.REPLACE_ONE else 0.0

    def data(person: str, first: float) -> PyTree:
        def records(role: str, size: int) -> Float[Array, " n"]:
            rows = jnp.full(size if everyone else 1, others * BEYOND)
            return rows.at[0].set(first * BEYOND) if person in (role, PERSON) else rows

        if not isinstance(small.sizes, Sizes):
            return records(RECORDS, small.sizes)
        if small.sizes.people is People.SHARED:
            return Levels.shared(records(PERSON, small.sizes.lower))
        upper, lower = (records(role, getattr(small.sizes, role)) for role in LEVELS)
        return Levels(upper, lower)

    def canary(person: str) -> Canary:
        pair = data(person, 1.0), data(person, absent)
        return Canary(problem, small, w0, *pair, claims[person])

    return {person: canary(person) for person in claims}


def check_solver(solver: Any, owner: str) -> None:
    """Raise `TypeError` if `solver` is a plan or no solver."""
    if isinstance(solver, Plan):
        raise TypeError(f"{owner}: got a Plan as solver; pass plan.solver.")
    _checks.instance(owner, AbstractSolver, solver=solver)


def _sampling(solver: AbstractSolver) -> list[AbstractSampling]:
    """Return a list of all sampling schemes in a solver and its inner solvers."""
    parts = jax.tree.leaves(solver, is_leaf=lambda v: isinstance(v, AbstractSampling))
    return [part for part in parts if isinstance(part, AbstractSampling)]


def _reduce(solver: AbstractSolver) -> AbstractSolver:
    """Return the solver at sizes and batch sizes divided by a common divisor."""
    sizes = solver.sizes
    counts = [sizes.upper, sizes.lower] if isinstance(sizes, Sizes) else [sizes]
    kinds = AbstractFixedBatch
    schemes = [s for s in _sampling(solver) if isinstance(s, kinds)]
    counts_of_all = [*counts, *(scheme.size for scheme in schemes)]
    common, fewest = math.gcd(*counts_of_all), min(counts_of_all)
    # A clip of a batch of one record would pass for a clip of the record.
    factors = (d for d in range(1, math.isqrt(common) + 1) if common % d == 0)
    divisors = {d for f in factors for d in (f, common // f)}
    divisor = max(d for d in divisors if d <= max(1, fewest // 2))

    def reduced(v: Any) -> Any:
        return type(v)(v.size // divisor) if isinstance(v, kinds) else v

    small = jax.tree.map(reduced, solver, is_leaf=lambda v: isinstance(v, kinds))
    if isinstance(sizes, Sizes):
        upper, lower = (count // divisor for count in counts)
        return small.with_sizes(dataclasses.replace(sizes, upper=upper, lower=lower))
    return small.with_sizes(sizes // divisor)
