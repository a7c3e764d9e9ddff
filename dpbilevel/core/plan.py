"""Plans: the least noise that reaches a budget, before any data is seen."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import PyTree

from .. import _checks
from ..privacy import Gaussian, Ledger, Neighbours, PrivacyBudget, Query, Release
from ..privacy.accounting import profiles
from ..privacy.exact.floats import check_rounding
from ..privacy.ledger import AbstractRelease
from ..privacy.per_example.clipping import SUMS, Precision
from ..privacy.queries import RECORDS
from ..privacy.report import describe, large_delta
from ..privacy.sampling.base import AbstractSampling
from . import process_spending
from .levels import Sizes, check_pair
from .loop import solver_for
from .problem import AbstractProblem, arrays_of
from .solution import Plan, Solver

_LARGEST_SCALE = 2.0**60
_TINY = 1e-300  # shows a root search the sign, and nothing else


def calibrate(
    problem: AbstractProblem,
    solver: Solver,
    budget: PrivacyBudget,
    *,
    sizes: Sizes | int,
    w0: PyTree | None = None,
    precision: Precision = "grid",
    before: tuple[AbstractRelease, ...] = (),
    trainable: PyTree = None,
) -> Plan[Solver]:
    r"""Return a `Plan` with the least noise at which one run stays within `budget`.

    Everything that decides the guarantee is public and on the host: the ledger of the
    whole run is composed for a common noise scale, and $\delta$ at the target
    $\varepsilon$ is solved for the scale, by Brent's method. A scale is returned only
    if its $\delta$ is at most the target, so the reported epsilon never exceeds the
    budget.

    Args:
        problem: A `BilevelProblem` or `FiniteSum`.
        solver: A solver of that problem; its own noise is replaced.
        budget: The guarantee to reach.
        sizes: `Sizes(upper, lower, people)` for two levels, the number of records for
            one.
        w0: The initial point, or its shapes; it only sharpens the report's forecast.
            As in `solve`, it may be an Equinox module.
        precision: `"grid"` sums records exactly and rounds the noise to the same grid,
            so that the guarantee survives floating-point arithmetic; `"float"` is for
            research and labelled so in the report.
        before: Further releases of the same records, with their noise, such as the
            releases of a `RecordsCheck`. They count against the budget and are in the
            report; the caller makes them, `solve` does not.
        trainable: As in `fit`.

    Returns:
        The calibrated solver, bound to these sizes, and the report.

    Raises:
        ValueError: Gaussian noise with `delta = 0`; a `w0` of two levels that is no
            pair; a sampling scheme that the relation does not admit; a budget that no
            noise reaches, such as a delta below the probability of an overflowing
            batch; scores that are computed too coarsely for the budget.

    Warns:
        UserWarning: Delta is not below one over the number of records; or steps are
            too long for a declared smoothness, or at `w0` for the curvature of the
            public terms, which shortens them.

    Privacy:
        Touches no data. The guarantee holds for one run of the returned solver, as it
        is, on this problem and data of these sizes. A second run is a second release,
        and changing a field of the solver or the problem voids the report. Initial
        point, step size and public terms may follow from releases in the ledger.
    """
    options: Any = {"precision": precision, "before": before, "trainable": trainable}
    plan = calibrated(problem, solver, budget, sizes=sizes, w0=w0, **options)
    plan.warn("calibrate")
    return plan


def calibrated(
    problem,
    solver: Solver,
    budget,
    *,
    sizes,
    w0=None,
    precision: Precision = "grid",
    before=(),
    trainable=None,
) -> Plan[Solver]:
    """Return the `Plan` of `calibrate`, without warning of its remarks."""
    solver_for(problem, solver, "calibrate")
    _checks.instance("calibrate", PrivacyBudget, budget=budget)
    _checks.instance("calibrate", tuple, before=before)
    problem.check_sizes("calibrate", sizes)
    _checks.one_of("calibrate", "precision", precision, tuple(SUMS))
    planned = solver.with_sizes(sizes).with_precision(precision)

    def point(leaf: Any) -> Any:  # zeros that take no memory, for a shape
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)

    def whole_of(found: Solver) -> Ledger:
        own = found.ledger(problem, sizes)
        return dataclasses.replace(own, releases=(*before, *own.releases))

    def ledger(scale: float) -> Ledger:
        return whole_of(planned.with_noise(scale))

    name, any_noise = type(solver).__name__, ledger(1.0)
    if not any_noise.releases:
        raise ValueError(f"calibrate: {name} makes no release; run it without a plan.")
    if budget.delta == 0:
        _check_pure(any_noise, name)
    for release in any_noise.releases:
        release.check(budget)
    scale = _least_scale(ledger, budget)
    inexact = sum(release.computed_error for release in ledger(scale).releases)
    if inexact:
        _check_accuracy(inexact, budget, name)
    found = planned.with_noise(scale).with_counts(problem)
    two_levels = isinstance(sizes, Sizes)
    if w0 is not None and two_levels:
        check_pair("calibrate", w0)
    w0 = jax.tree.map(point, w0)
    problem, w0, _ = arrays_of("calibrate", problem, w0, trainable)
    dimensions = {} if w0 is None else found.dimensions(w0)
    forecast = () if w0 is None else found.forecast(problem, sizes, w0)
    known: Any = {"levels": two_levels, "unit": problem.unit, "forecast": forecast}
    whole = whole_of(found)
    report = describe(whole, budget, dimensions=dimensions, **known)
    process_spending.remember(found, found.sizes, process_spending.costs_by(report))
    too_long = (str(row) for row in forecast if row.from_start)
    return Plan(found, report, remarks=(*large_delta(whole, budget), *too_long))


def least_multiplier(
    sampling: AbstractSampling,
    count: int,
    size: int,
    budget: PrivacyBudget,
    neighbours: Neighbours = Neighbours.REPLACE_ONE,
) -> float:
    """Return the least noise multiplier at which `count` releases stay in a budget.

    Each is a Gaussian release from a batch of `size` records. Raises `ValueError` if no
    noise reaches the budget.
    """
    release = sampling, count, size
    return _least_scale(lambda m: gaussian_ledger(*release, m, neighbours), budget)


def gaussian_ledger(sampling, count: int, size: int, multiplier, neighbours) -> Ledger:
    """Return a `Ledger` of `count` planned Gaussian releases, each on a batch."""
    query, noise = Query(RECORDS, size, 1.0, sampling), Gaussian(multiplier, neighbours)
    return Ledger((Release("query", count, (query,), noise),))


def check_promise(
    owner: str,
    bound: Callable[[int], float],
    trivial: float,
    records: int,
    most: int = 10**12,
) -> None:
    """Raise `ValueError` unless a bound is below `trivial`; say how many records do.

    `bound` maps a number of records to the bound of their plan, or raises `ValueError`
    if there is none; at most `most` records are tried.

    Raises:
        ValueError: The bound is no smaller. The message has the number of records from
            which on it is, found by bisection.
    """
    if (found := bound(records)) < trivial:
        return

    def holds(n: int) -> bool:
        with warnings.catch_warnings(action="ignore"):
            try:
                return bound(n) < trivial
            except ValueError:
                return False

    low, step = records, 2
    while not (enough := holds(high := min(step * records, most))) and high < most:
        low, step = high, step**2  # the bracket grows doubly exponentially
    while enough and high - low > max(1, high // 1000):
        middle = max(low + 1, math.isqrt(low * high))
        low, high = (low, middle) if holds(middle) else (middle, high)
    need = f"{high}" if enough else f"more than {most:.0e}"
    raise ValueError(
        f"{owner}: hopeless: the bound with {records} records is {found:.4g}, but no "
        f"answer is worse than {trivial:.4g}. Use {need} records at this budget, or a "
        "larger epsilon."
    )


def _check_pure(ledger: Ledger, name: str) -> None:
    """Raise `ValueError` if a ledger for delta = 0 has releases that are not pure."""
    if not all(map(profiles.pure_epsilons, ledger.events().values())):
        raise ValueError(
            f"calibrate: {name} has no noise for delta = 0. Use a delta well below "
            "1/n, ExponentialMechanism, or RandomSearch."
        )
    if ledger.failure > 0:
        raise ValueError(
            f"calibrate: {name} draws approximately; give delta > 0, or use Grid."
        )


def _check_accuracy(inexact: float, budget: PrivacyBudget, name: str) -> None:
    """Raise `ValueError` if score errors cost more than half of the budget's delta."""
    cost = profiles.total_variation_delta(budget.epsilon, inexact)  # of all draws
    check_rounding(
        "calibrate",
        f"errors of the scores that {name} computes",
        cost,
        budget.delta,
        jnp.result_type(float),
        allowed=0.5,
        of=f"delta = {budget.delta:.3g}",
        remedy="use a larger delta, fewer records, a stronger convexity of the lower "
        "level, or ExponentialMechanism(Grid(...))",
    )


def _least_scale(ledger: Callable[[float], Ledger], budget: PrivacyBudget) -> float:
    exact = all(map(profiles.is_exact, ledger(1.0).events().values()))

    def delta(scale: float, *, rough: bool = False) -> float:
        return ledger(scale).delta_if_proved(budget.epsilon, rough=rough)

    if exact:
        return least_safe(delta, budget.delta, 1.0, 1e-12)
    estimate = functools.partial(delta, rough=True)
    start = least_safe(estimate, budget.delta, 1.0, 2e-3)
    return least_safe(delta, budget.delta, start, 5e-4, step=1.005)


def least_safe(delta, allowed, start, tolerance: float, step: float = 2.0) -> float:
    """Return the least scale with `delta(scale) <= allowed`; raise if there is none."""
    delta = functools.cache(delta)  # with sampled batches one takes a second

    def unsafe(scale: float) -> bool:
        return not delta(scale) <= allowed  # NaN is not safe

    low = high = start
    while unsafe(high):
        low, high = high, high * step  # more noise is needed
        step = step**2  # the bracket grows doubly exponentially
        if high > _LARGEST_SCALE:
            raise ValueError(
                "calibrate: no noise meets the budget. Raise epsilon, or delta above "
                "the chance that a batch overflows, or give less in before=. See "
                "docs/errors.md#no-noise-meets-the-budget."
            )
    if low == high:
        while not unsafe(low):
            high, low = low, low / step  # less noise is enough
            step = step**2
            if low < 1 / _LARGEST_SCALE:
                return high

    ends = {math.log(scale): scale for scale in (low, high)}

    def excess(log_scale: float) -> float:
        # The ends as found: the exponential of a logarithm is rounded.
        scale = ends.get(log_scale, math.exp(log_scale))
        if delta(scale) > 0 and allowed > 0:  # nearly linear in the logarithm
            ratio = math.log(delta(scale) / allowed)
        else:
            ratio = 1.0 if unsafe(scale) else -1.0
        if unsafe(scale):
            return max(ratio, _TINY)
        if -4 * tolerance < ratio < 0:
            return 0.0  # close enough: the search stops
        # Not 0 if delta equals the allowed one: it may be the same for less noise.
        return min(ratio, -_TINY)

    root = scipy.optimize.brentq(excess, *ends, xtol=tolerance / 4, maxiter=500)
    scale = math.exp(root)
    while scale < high and unsafe(scale):
        scale *= 1 + tolerance / 2
    return min(scale, high)
