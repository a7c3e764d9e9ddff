"""Epsilon, delta and noise of DP-SGD in one call, and the records that a plan needs."""

import math
from typing import Any, TypeVar

from jaxtyping import PyTree

from .. import _checks
from ..privacy import FullBatch, Ledger, Neighbours, Poisson, PrivacyBudget
from ..privacy.sampling.base import AbstractSampling
from .levels import Sizes
from .plan import calibrated, gaussian_ledger, least_multiplier, least_safe
from .problem import AbstractOneLevel, AbstractProblem
from .solver import AbstractSolver

_START, _MOST = 1e3, 1e12  # the first and the largest multiple that is tried
_IMPOSSIBLE = 1e300  # stands for the noise of sizes that have no plan
Counts = TypeVar("Counts", int, Sizes)


def epsilon(
    *,
    noise_multiplier: float,
    rate: float,
    steps: int,
    delta: float,
    neighbours: Neighbours | str = Neighbours.REPLACE_ONE,
) -> float:
    r"""Return the least $\varepsilon$ of DP-SGD at $\delta$, for noise, rate and steps.

    Each of `steps` releases is a sum of vectors, clipped to $C$ in $\ell_2$, over a
    Poisson batch of the records, plus $\mathcal N(0, (\sigma C)^2 I)$. The unit of
    $\sigma$ is the clip norm, under both relations: it is the `noise_multiplier` of
    Opacus and of dp-accounting's `GaussianDpEvent`. A solver and its report state the
    noise in units of the sensitivity instead: $\sigma / 2$ under replace-one, where the
    sensitivity is $2 C$, and $\sigma$ under add-or-remove-one.

    Args:
        noise_multiplier: $\sigma > 0$, the noise's standard deviation over $C$.
        rate: Chance in (0, 1] that a record is in a batch: the batch size over the
            number of records. 1 is the full batch.
        steps: Number of releases, at least 1.
        delta: $\delta$ in (0, 1), well below one over the number of records.
        neighbours: `Neighbours.REPLACE_ONE`, the default as everywhere in this
            library, or `ADD_OR_REMOVE_ONE`, the relation of Opacus; or its value as
            text.

    Returns:
        The epsilon, rounded towards more. It is exact for full batches, and an upper
        bound of it to about three digits for others.

    Raises:
        ValueError: An argument is out of range.

    Privacy:
        Reads no records. The accountant is that of `calibrate`.
    """
    _checks.gaussian_delta("epsilon", delta=delta)
    return _ledger("epsilon", noise_multiplier, rate, steps, neighbours).epsilon(delta)


def delta(
    *,
    noise_multiplier: float,
    rate: float,
    steps: int,
    epsilon: float,
    neighbours: Neighbours | str = Neighbours.REPLACE_ONE,
) -> float:
    r"""Return the least $\delta$ of DP-SGD at $\varepsilon$, for noise, rate and steps.

    Args:
        noise_multiplier: $\sigma$, the noise's standard deviation over the clip norm,
            as in Opacus and dp-accounting: twice a solver's under replace-one.
        rate: As in `dpb.epsilon`.
        steps: As in `dpb.epsilon`.
        epsilon: $\varepsilon \ge 0$.
        neighbours: As in `dpb.epsilon`.

    Raises:
        ValueError: An argument is out of range.

    Privacy:
        Reads no records. The accountant is that of `calibrate`.
    """
    _checks.non_negative("delta", epsilon=epsilon)
    return _ledger("delta", noise_multiplier, rate, steps, neighbours).delta(epsilon)


def noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    rate: float,
    steps: int,
    neighbours: Neighbours | str = Neighbours.REPLACE_ONE,
) -> float:
    r"""Return DP-SGD's least noise multiplier for a budget, in units of the clip norm.

    Its unit is the clip norm, as in Opacus and dp-accounting. A solver's own
    `noise_multiplier` is in units of the sensitivity: half of this one under
    replace-one, where the sensitivity is twice the clip norm. With `rate=1` and
    `steps=1` the inverse of the solver's is $\mu$ of Gaussian differential privacy.

    Args:
        epsilon: $\varepsilon > 0$.
        delta: $\delta$ in (0, 1), well below one over the number of records.
        rate: As in `dpb.epsilon`.
        steps: As in `dpb.epsilon`.
        neighbours: As in `dpb.epsilon`.

    Returns:
        $\sigma$, the noise's standard deviation over the clip norm. It is too large by
        at most a thousandth, never too small.

    Raises:
        ValueError: An argument is out of range, or no noise meets the budget.

    Privacy:
        Reads no records. The accountant is that of `calibrate`.
    """
    owner = "noise_multiplier"
    _checks.gaussian_delta(owner, delta=delta)
    _checks.positive(owner, epsilon=epsilon)
    _checks.count(owner, steps=steps)
    sampling, relation = _sampling(owner, rate), _relation(owner, neighbours)
    run = sampling, steps, 1, PrivacyBudget(epsilon, delta), relation
    return least_multiplier(*run) * relation.contributions


def records_needed(
    problem: AbstractProblem,
    solver: AbstractSolver,
    budget: PrivacyBudget,
    ratio: float = 0.3,
    *,
    w0: PyTree,
    sizes: Counts | None = None,
) -> Counts:
    """Return the fewest records, or `Sizes`, with noise of `ratio` clip norms.

    The noise is that of the forecast in a plan's report: the expected norm of a
    release's noise over the clip norm, which is the largest possible signal. The
    release with the most noise decides.

    Args:
        problem: The problem.
        solver: A solver of that problem; its own noise is replaced.
        budget: The guarantee to reach.
        ratio: The largest wanted ratio of noise and signal. Reports call noise good
            below 0.3.
        w0: The initial point, or its shapes: noise grows with the root of the number
            of coordinates.
        sizes: For two levels, `Sizes` whose proportion and people are kept; by default
            both levels have equally many records, and people may overlap.

    Returns:
        An integer for one level, `Sizes` for two, within a thousandth of the least.

    Raises:
        ValueError: The solver adds no noise to clipped means, or no number of records
            is enough.

    Warns:
        UserWarning: As `calibrate`, of the plan for these sizes.

    Privacy:
        Reads no records.
    """
    owner = "records_needed"
    _checks.positive(owner, ratio=ratio)
    if sizes is None:
        one_level = isinstance(problem, AbstractOneLevel)
        sizes = 1 if one_level else Sizes(1, 1)  # pyright: ignore[reportAssignmentType]
    problem.check_sizes(owner, sizes)
    refused = "Use a larger epsilon, fewer steps or fewer coordinates."

    def plan(factor: float) -> Any:
        given: Any = {"sizes": _times(sizes, factor), "w0": w0}
        return calibrated(problem, solver, budget, **given)

    def noise(factor: float) -> float:
        nonlocal refused
        if factor > _MOST:
            return _IMPOSSIBLE
        try:
            rows = plan(factor).report.forecast
        except ValueError as error:  # such as fewer records than a batch
            refused = str(error)
            return _IMPOSSIBLE
        found = [row.noise_norm_over_clip_norm for row in rows]
        return max((ratio for ratio in found if ratio is not None), default=0.0)

    if noise(_START) == 0:
        raise ValueError(f"{owner}: {type(solver).__name__} adds no noise to means.")
    try:
        factor = least_safe(noise, ratio, _START, 2.5e-4)
    except ValueError:
        text = f"{owner}: no number of records is enough. {refused}"
        raise ValueError(text) from None
    plan(factor).warn(owner)
    return _times(sizes, factor)


def _times(sizes: Any, factor: float) -> Any:
    """Return an integer or `Sizes` times a factor, rounded up to at least 1."""
    if isinstance(sizes, Sizes):
        upper, lower = _times(sizes.upper, factor), _times(sizes.lower, factor)
        return Sizes(upper, lower, sizes.people)
    return max(1, math.ceil(sizes * factor))


def _ledger(
    owner: str, noise_multiplier: float, rate: float, steps: int, neighbours: Any
) -> Ledger:
    """Return a `Ledger` of `steps` Gaussian releases; noise is given in clip norms."""
    _checks.positive(owner, noise_multiplier=noise_multiplier)
    _checks.count(owner, steps=steps)
    sampling, relation = _sampling(owner, rate), _relation(owner, neighbours)
    multiplier = float(noise_multiplier) / relation.contributions
    return gaussian_ledger(sampling, steps, 1, multiplier, relation)


def _sampling(owner: str, rate: float) -> AbstractSampling:
    _checks.batch_rate(owner, rate=rate)
    return FullBatch() if rate == 1 else Poisson(float(rate))


def _relation(owner: str, neighbours: Neighbours | str) -> Neighbours:
    values = [known.value for known in Neighbours]
    if not isinstance(neighbours, Neighbours):
        _checks.one_of(owner, "neighbours", neighbours, values)
    return Neighbours(neighbours)
