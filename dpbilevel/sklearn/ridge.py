"""Ridge regression by noisy descent."""

import dataclasses
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted
from typing_extensions import override

from .. import _checks
from ..core.columns import as_numbers
from ..core.usability import released_mean
from ..onelevel.losses import squared_loss
from ..privacy.keys import PRNGKey
from ..privacy.records.people import combined, on_rows
from .base import PrivateEstimator, Run
from .beforehand import AbstractBeforehand, Terms, with_nan
from .declared import interval
from .intervals import Intervals, huber_loss
from .linear import Settings, plan_descent, split, weighted, with_constant

# benchmarks/results/estimator_settings.md; for targets in [-1, 1].
_SETTINGS = Settings(0.45, 1.0, steps=(30, 2000, 3000), clip_norm=(0.15, 1.0))
# A shorter unit for intervals; residuals above it are clipped.
_CLIPPED = 0.625
_INFERENCE = Settings(
    0.45 / _CLIPPED, 1.0, steps=(30, 2000, 3000), clip_norm=(1.0, 1.0)
)
_SMALL = 0.2  # fraction of the declared range; a smaller unit is warned of
_WIDE = (
    "most targets lie between {:.3g} and {:.3g}, by the released `target_range_`, and "
    "target_bounds is far wider. Declare about this range from public knowledge."
)
# Numbers of comparisons with centers and distances, and the values that are tested.
_COMPARED = 12, 6
_CENTERS = np.linspace(-1, 1, 1025)
_DISTANCES = 2.0 ** np.arange(-13, 0.1, 0.25)
_SAME = 2.0**-12  # a smaller distance means that most targets are equal
# Fraction of targets that are farther from the center than the distance: the smaller
# one shows long tails, and the larger one stands out of more noise.
_FARTHER = 0.1, 1 / 3
_DEVIATIONS = 4.0  # the unit, if targets were normal
# Least and largest part of the squared budget.
_PART = 0.01, 0.15
# Noise of a fraction that is worth more budget; and the largest useful noise.
_WANTED, _MOST_NOISE = 0.1, 0.25


@dataclasses.dataclass(eq=False, repr=False)
class DPRidge(Intervals, RegressorMixin, PrivateEstimator):
    r"""Private linear regression with a ridge.

    Minimizes $\frac12$ the mean square plus $\rho \|w\|^2$ by noisy gradient descent,
    `NoisyGD` on full batches; nothing has to be set. Large residuals are shortened by
    the clip norm, as by a Huber loss.

    Args:
        epsilon: $\varepsilon$.
        delta: $\delta$, well below one over the number of records.
        bounds: Declared: `(lower, upper)`, numbers or one for each feature. Entries
            outside are cut to them in `fit`.
        target_bounds: Declared: `(lower, upper)` of the target, which is cut to them.
        data_norm: Declared instead of `bounds`: the largest length of a row; longer
            ones are shortened to it in `fit`.
        fit_intercept: Whether to fit a constant, too; without one the target is not
            centered.
        ridge: $\rho \ge 0$, public, in units of rows of length 1, which is the released
            length; costs no budget.
        max_iter: The maximum number of steps; fewer are made if the noise requires it.
            Public.
        clip_norm: The bound on one record's gradient, in units of half the width of
            `target_range_`. `"auto"`: as large as the noise admits.
        intervals: Whether to release standard deviations of the coefficients, too.
        bins: The number of equal bins of the bounds that replace a numeric feature.
        neighbours: `"replace_one"`, or `"add_or_remove_one"` with `size`.
        size: A public number of records to plan for, if their number is private.
        check_records: Whether to release the fraction of usable records, for a
            hundredth of the squared budget; see docs/estimators.md.

    Attributes:
        coef_: Of shape `(d,)`; $d$ counts bins.
        intercept_: A number.
        coef_std_: With `intervals=True` the standard deviation of each coefficient.
        intercept_std_: The same of the constant.
        n_iter_: The number of steps.
        target_range_: The released range of most targets, which is the unit of the
            fit; `target_bounds` if that is not wider or the records are too few.
        records_usable_: The released fraction of records that can be used.
        records_check_: All released values of the check, column by column.
        row_length_: The released length that a quarter of the rows exceed, over that of
            the longest row that is declared; NaN if there are too few records.
        privacy_report_: The `PrivacyReport`.
        n_features_in_: $d$.
        feature_names_in_: The names of the columns, if X has any.

    Privacy:
        As `DPLogisticRegression`, with noisy comparisons of targets instead of base
        rates: 18, or 6 without a constant, for 1 % to 15 % of the squared budget. A
        record whose target is not a finite number is ignored.
    """

    _: dataclasses.KW_ONLY
    target_bounds: Any = None

    @override
    def _fit(self, entry, y):
        owner, units, known = self._owner, entry.units, (entry.budget, entry.public)
        ends, center, half = self._target_units()
        column = as_numbers("y", self._column(y, entry.table))
        settings = _INFERENCE if self.intervals else _SETTINGS
        settings = settings.with_parameters(owner, self.max_iter, self.clip_norm)
        _checks.non_negative(owner, ridge=self.ridge)
        counts = np.isfinite(column)
        inside = np.clip(np.where(counts, column, center), *ends)
        rows = units.rows(entry.table)
        features = with_constant(rows, counts, self._constant)
        usable = with_nan(rows, counts)
        label = ((inside - center) / half).astype(features.dtype)
        targets = np.where(np.isfinite(usable).all(axis=1), label, np.nan)
        spread = Spread(*known, entry.people.records(targets), self._constant)
        wrong = ~((column >= ends[0]) & (column <= ends[1]))
        lengths, check = self._planned(entry, usable, {"y": wrong})
        start = jnp.zeros(features.shape[1])
        moments = self._moments(*known, len(units.scale), start.size, 1.0)
        planned = check[0], lengths, spread, moments
        before = tuple(made for one in planned for made in one.releases)
        loss = weighted(huber_loss) if self.intervals else squared_loss
        penalty = loss, float(self.ridge), self._constant
        options = start.shape, *known, settings, before, moments.kind
        problem, plan = plan_descent(*penalty, *options)
        records = entry.records({"features": features, "label": label})
        of_target, shorter = [0.0, 1.0], _CLIPPED if self.intervals else 1.0
        entry, last = moments.with_keys(entry)

        def moved(rows: Any) -> Any:
            center, half = of_target
            return rows | {"label": (rows["label"] - center) / (half * shorter)}

        def in_unit(run: Run, key: PRNGKey) -> Run:
            of_target[:] = spread.center_and_unit(key=key, owner=owner)
            problem, solver, records, w0 = run
            return problem, solver, moments.shortened(on_rows(moved, records)), w0

        run = entry, problem, plan, records, start, check, lengths
        found = problem, plan.solver, *self._run_plan(*run, in_unit)
        model, covariance = moments.estimate(*found, key=last, owner=owner)
        center, half = center + half * of_target[0], half * of_target[1]
        model = half * shorter * model[None].astype(float)
        weights, constant = split(model, self._constant)
        unit = lengths.frame(units, self._unit)
        coef, intercept = unit.coefficients(weights, constant + center)
        self.coef_, self.intercept_ = coef[0], float(intercept[0])
        self._keep_deviations(covariance, unit, half * shorter)
        self.n_iter_ = plan.solver.num_steps
        most = max(ends[0], center - half), min(ends[1], center + half)
        self.target_range_ = most
        # The check warns of targets beyond the bounds, which are cut to an end.
        if of_target[1] < _SMALL and not self.records_check_.remarks:
            _checks.warn(f"{owner}.fit: {_WIDE.format(*most)}")
        return self

    def _target_units(self) -> tuple[tuple[float, float], float, float]:
        """Return the (lower, upper) bounds of targets, a center, half a width."""
        if self.target_bounds is None:
            what = "declare target_bounds=(lower, upper) from public knowledge."
            raise ValueError(f"{self._owner}: {what}")
        pair = interval(self._owner, "target_bounds", self.target_bounds, 1)
        lower, upper = (float(v[0]) for v in pair)
        if not self._constant:
            return (lower, upper), 0.0, max(abs(lower), abs(upper))
        half = (upper - lower) / 2
        return (lower, upper), lower + half, half

    def predict(self, X: Any) -> Float[np.ndarray, " n"]:
        """Return `X @ coef_ + intercept_`.

        Args:
            X: Features, of shape `(n, d)`; not protected.
        """
        check_is_fitted(self)
        return self._test_rows(X) @ self.coef_ + self.intercept_


@dataclasses.dataclass(frozen=True)
class Spread(AbstractBeforehand):
    """Planned release, before the fit, of a center and a unit of the targets.

    Noise and clip norm are in proportion to the unit of the target. A declared range
    that is far too wide would leave nothing but noise, so the unit follows from the
    records. One search finds the median, and another one a quantile of the distances
    from it. Each step releases the excess of targets above the tested value, with
    noise.

    Attributes:
        targets: Targets in [-1, 1], or those of people; NaN for rows that do not
            count. NON-PRIVATE.
        centered: Whether to search for the center, which is 0 otherwise.
    """

    targets: Any
    centered: bool

    @property
    @override
    def terms(self) -> Terms:
        count = sum(_COMPARED if self.centered else _COMPARED[1:])
        of_noise = _PART, _WANTED, _MOST_NOISE
        return Terms("sides of targets", *of_noise, count, clip_norm=0.5)

    def center_and_unit(self, *, key: PRNGKey, owner: str) -> tuple[float, float]:
        """Release the center and the unit, in units of the targets.

        They are about the median and four standard deviations; 0 and 1, as declared, if
        that is less, if most targets are equal, or without a release. The key is for
        these comparisons alone.

        Privacy:
            As many releases as `release` counts, each the mean of one number a record.
        """
        release = self.release
        if release is None:
            return 0.0, 1.0
        keys, noise = jax.random.split(key, release.count), release.noise_std

        def quantile(
            values: Any, fraction: float, grid: Float[np.ndarray, " k"], keys: PRNGKey
        ) -> float:
            """Release the value of a grid that about a fraction of values exceed.

            Every answer has a weight by its noise, so later ones correct a wrong one.
            """
            belief = np.zeros(len(grid))  # log probabilities
            for own in keys:
                value = middle(grid, belief)
                # Rows are added afterwards: they must contribute 0.
                side = functools.partial(comparisons, value=value, fraction=fraction)
                rows = combined(side, values, self.public.unit, fraction - 0.5)
                rows = self.public.rows(rows)
                mean = released_mean(release, rows, key=own, owner=owner)
                more = float(mean[0]) - (fraction - 0.5)
                belief += np.where(grid > value, 0.5, -0.5) * more / noise**2
            return middle(grid, belief)

        center = 0.0
        if self.centered:
            center = quantile(self.targets, 0.5, _CENTERS, keys[: -_COMPARED[1]])
        longest = 1 + abs(center)
        distance = on_rows(lambda v: np.abs(v - center) / longest, self.targets)
        least, most = _FARTHER
        farther = min(max(least, 2 * noise), most)
        found = quantile(distance, farther, _DISTANCES, keys[-_COMPARED[1] :])
        if found < _SAME:  # if most targets are zero, the few others matter
            return 0.0, 1.0
        normal = statistics.NormalDist().inv_cdf(1 - farther / 2)
        unit = _DEVIATIONS * longest * found / normal
        return (center, unit) if unit < 1 else (0.0, 1.0)


def middle(grid: Float[np.ndarray, " k"], belief: Float[np.ndarray, " k"]) -> float:
    """Return the median of a grid's values with these log probabilities."""
    chances = np.cumsum(np.exp(belief - belief.max()))
    return float(grid[np.searchsorted(chances, chances[-1] / 2)])


def comparisons(
    values: Float[np.ndarray, " n"], value: float, fraction: float
) -> Float[np.ndarray, "n 1"]:
    """Return a column: 1/2 for each entry of `values` above `value`, else -1/2.

    NaN becomes the expected mean, so that it moves no comparison.

    Privacy:
        Row by row. NON-PRIVATE until `Spread.center_and_unit` releases the mean.
    """
    sides = np.where(values > value, 0.5, -0.5)
    return np.where(np.isnan(values), fraction - 0.5, sides)[:, None].astype(np.float32)
