"""Canaries, which leak as much as a ledger allows, and an audit of many in one run."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..bilevel.problem import Levels, Sizes
from ..core.loop import solved
from ..core.problem import AbstractProblem
from ..core.solution import Plan
from ..core.solver import AbstractSolver
from ..onelevel import FiniteSum, NoisyGD
from ..privacy.budget import Neighbours, People
from ..privacy.noise import PRNGKey, check_key
from ..privacy.queries import LEVELS, RECORDS
from ..privacy.releases import PERSON
from ..privacy.sampling.base import AbstractSampling, FullBatch
from ..privacy.sampling.fixed_size import AbstractFixedBatch, FixedSize
from ..search.gibo import GradientInformativeBO
from .claims import Claim, TradeOffCurve, ledger_claims
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
    # If upper records are clipped, a lower one moves the contributions of all of them.
    clips = getattr(solver, "upper_clip_norm", None) is not None
    small = solver if alone else _reduce(solver)
    everyone |= clips
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
    """Return all sampling schemes in the fields of a solver and its inner solvers."""
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


# Range of the search for the least refuted noise, in units of the claimed noise.
_MOST_NOISE, _LEAST_NOISE = 2.0**8, 2.0**-4


@dataclasses.dataclass(frozen=True)
class OneRun:
    r"""Outcome of a one-run audit.

    Attributes:
        canaries: Number of coin flips hidden in the run.
        guesses: Number of guesses; the auditor abstained on the other coins.
        correct: Number of right guesses.
        delta: $\delta$.
        significance: Chance that the bound is wrong.
        measured_epsilon: Lower bound on $\varepsilon$ at `delta`.
        claimed_epsilon: The accountant's $\varepsilon$ at `delta`.
    """

    canaries: int
    guesses: int
    correct: int
    delta: float
    significance: float
    measured_epsilon: float
    claimed_epsilon: float

    @property
    def passed(self) -> bool:
        """Whether no violation was found; not a proof of privacy."""
        return self.measured_epsilon <= self.claimed_epsilon

    def __str__(self) -> str:
        """Return the outcome in a sentence."""
        verdict = "no violation found" if self.passed else "VIOLATION"
        return (
            f"{verdict} in one run with {self.canaries} canaries: {self.correct} of "
            f"{self.guesses} guesses right, so epsilon is at least "
            f"{self.measured_epsilon:.3f} at delta = {self.delta:.3g} "
            f"({1 - self.significance:.2%} confidence); claimed: "
            f"{self.claimed_epsilon:.3f}"
        )


def one_run(
    solver: NoisyGD,
    *,
    key: PRNGKey,
    canaries: int = 1000,
    guesses: int = 100,
    delta: float = 1e-5,
    significance: float = 0.05,
) -> OneRun:
    r"""Return a `OneRun`: coin flips guessed from one run of noisy gradient descent.

    Record $i$ is $\pm e_i$, by a fair coin, far beyond the clip norm. The auditor sees
    the answer, guesses the signs of the largest coordinates and abstains on the others.
    The audit is far weaker than `trade_off`, which makes thousands of runs.

    Args:
        solver: `NoisyGD` under replace-one, with noise. It is bound to `canaries`
            records here; its own sizes are not used.
        key: A typed key.
        canaries: The number of records and of coordinates.
        guesses: The number of signs to guess, fixed beforehand.
        delta: $\delta$ at which to bound $\varepsilon$.
        significance: The chance that the bound is wrong.

    Raises:
        ValueError: More guesses than canaries, or no noise multiplier yet.
        TypeError: A plan instead of its solver, or no solver.

    Privacy:
        Reads no records: the data are canaries.

    References:
        Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run",
        NeurIPS 2023; Mahloujifar, Melis and Chaudhuri, "Auditing f-differential privacy
        in one run", ICML 2025 (the bound).
    """
    check_key(key)
    check_solver(solver, "one_run")
    _checks.count("one_run", canaries=canaries, guesses=guesses)
    _checks.fraction("one_run", delta=delta, significance=significance)
    if guesses > canaries:
        raise ValueError(f"one_run: guesses must be at most {canaries}, got {guesses}.")
    key_signs, key_run = jax.random.split(key)
    signs = jax.random.rademacher(key_signs, (canaries,), float)
    problem = FiniteSum(jnp.vdot)  # a record is its own gradient
    planned = solver.with_sizes(canaries)
    records, start = jnp.diag(BEYOND * signs), jnp.zeros(canaries)
    answer = jax.jit(solved)(problem, planned, records, start, key=key_run).value
    # Descent moves against the record.
    moved, hidden = -np.asarray(answer), np.asarray(signs)
    chosen = np.argsort(-np.abs(moved))[:guesses]
    correct = int((np.sign(moved[chosen]) == hidden[chosen]).sum())
    counts = correct, guesses, canaries, significance

    def with_noise(factor: float) -> NoisyGD:
        noise = factor * planned.release_noise.multiplier
        return dataclasses.replace(planned, noise_multiplier=noise)

    def is_refuted(factor: float) -> bool:
        (claim,) = ledger_claims(with_noise(factor).ledger(problem, canaries)).values()
        return refutes(*counts, claim)

    most = _least_refuted(is_refuted)
    measured = 0.0
    if most is not None:
        measured = with_noise(most).ledger(problem, canaries).epsilon(delta)
    claimed = planned.ledger(problem, canaries).epsilon(delta)
    return OneRun(canaries, guesses, correct, delta, significance, measured, claimed)


def refutes(
    correct: int, guesses: int, canaries: int, significance: float, claim: Claim
) -> bool:
    r"""Return whether so many right guesses of fair coins refute a privacy profile.

    Let $m$ coins be hidden, $r$ of them guessed, and $p_i$ the chance that $i$ guesses
    are right. With $\bar f(\beta)$ the largest chance under one of two neighbours of an
    event that has chance $\beta$ under the other, which is concave, flipping one coin
    turns its right guess into a wrong one and leaves one right guess less, so that for
    every $v$

    $$\sum_{i \ge v} \tfrac{i}{m} p_i \le
    \bar f\Bigl(\sum_{i \ge v - 1} \tfrac{r - i}{m} p_i\Bigr) .$$

    If $v$ or more are right with a chance of `significance`, this forces a least
    $p_{v-1}$, then a least $p_{v-2}$, and so on. The claim is refuted if these sum
    to more than 1 (`docs/audit.md`, "One run").

    Args:
        correct: $v$.
        guesses: $r$, at least $v$, a number that is fixed beforehand.
        canaries: $m$, at least $r$.
        significance: The chance that a true claim is refuted.
        claim: Its profile $\delta(\varepsilon)$, for one coin.

    Raises:
        ValueError: Counts out of order.

    References:
        Mahloujifar, Melis and Chaudhuri, "Auditing f-differential privacy in one run",
        ICML 2025.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError("refutes: needs 0 <= correct <= guesses <= canaries.")
    curve = TradeOffCurve(claim)
    right = significance * correct / canaries
    wrong = significance * (guesses - correct) / canaries
    for count in range(correct - 1, -1, -1):
        more = max(0.0, curve.least_false_positives(right) - wrong)
        wrong += more
        right += more * count / (guesses - count)
        if right + wrong > guesses / canaries:
            return True
    return False


def _least_refuted(is_refuted: Callable[[float], bool]) -> float | None:
    """Return the least noise factor whose claim is refuted, to 2 %, or `None`."""
    low, high = (_LEAST_NOISE, 1.0) if is_refuted(1.0) else (1.0, _MOST_NOISE)
    if high > 1 and not is_refuted(high):
        return None
    while high > 1.02 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_refuted(middle) else (middle, high)
    return high  # which is refuted
