"""Logistic regression by noisy descent."""

import dataclasses
import math
import statistics
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from typing_extensions import override

from .. import _checks
from ..core.shares import OF_COLUMNS, Usability
from ..core.usability import released_mean
from ..privacy.keys import PRNGKey
from ..privacy.records.people import combined, on_rows
from .base import Run
from .beforehand import AbstractBeforehand, Terms, with_nan
from .declared import weights_of
from .intervals import Intervals
from .linear import (
    CONSTANT,
    LinearClassifier,
    Settings,
    plan_descent,
    ridge_on,
    weighted,
)

# benchmarks/results/estimator_settings.md.
_TWO = Settings(2.0, 8.0, steps=(30, 1000, 3000), clip_norm=(0.7, 1.0))
_MORE = dataclasses.replace(_TWO, longest=4.0)
# A class is rare if its fraction is below this number over the number of classes.
_RARE = 0.2
# benchmarks/results/constants.md, "Estimators".
_PART = 0.01, 0.1  # of the squared budget
_WANTED = 0.2  # noise worth more, times the number of parameters to the power 3/4
_MOST_NOISE = 0.2  # with more noise nothing is released
# Weights beside products of indicators and features: indicators, features, squares.
_RATE, _ROW, _SQUARE = 0.5, 0.25, 0.25
_SPREAD = 0.05, 0.85  # limits of the mean squared distance of rows from their mean
_WEAKEST = 0.25  # the variance of scores of effects that have the largest ridge
_STRONGEST = 1.25  # squared distance of a class from others, over that of rows


@dataclasses.dataclass(eq=False, repr=False)
class DPLogisticRegression(Intervals, LinearClassifier):
    r"""Private logistic regression, for two classes or more.

    Minimizes the mean loss plus $\rho \|w\|^2$ by noisy gradient descent, `NoisyGD` on
    full batches; nothing has to be set. A first release finds the length of rows. Steps
    are stable for rows of that length, and their number follows from the noise. A
    second release finds the rate of each class and the strength of effects: the descent
    starts at the constant answer, and a ridge follows from noise and effects.

    Args:
        epsilon: $\varepsilon$.
        delta: $\delta$, well below one over the number of records.
        classes: Declared: every label that a record may have, texts or numbers.
        bounds: Declared: `(lower, upper)`, numbers or one for each feature. Entries
            outside are cut to them in `fit`.
        data_norm: Declared instead of bounds: the largest length of a row; longer ones
            are shortened to it in `fit`.
        fit_intercept: Whether to fit a constant, too.
        ridge: $\rho \ge 0$, public, in units of rows of length 1, which is the released
            length; costs no budget. The ridge that follows from the effects is added.
        max_iter: The maximum number of steps; fewer are made if the noise requires it.
            Public.
        clip_norm: The bound on one record's gradient, in the same units. `"auto"`: as
            large as the noise admits.
        class_weight: A dict of public weights of the classes, which multiply the loss
            of a record before it is clipped; 1 for classes that it lacks. They count
            relative to the largest. Probabilities are then those of the weighted law.
        intervals: Whether to release standard deviations, too, for two classes.
        bins: The number of equal bins of the bounds that replace a numeric feature.
        neighbours: `"replace_one"`, or `"add_or_remove_one"` with `size`.
        size: A public number of records to plan for, if their number is private.
        check_records: Whether to release the fraction of usable records, for a
            hundredth of the squared budget; see docs/estimators.md.

    Attributes:
        coef_: Of shape `(1, d)` for two classes, else `(k, d)`; $d$ counts bins.
        intercept_: Of shape `(1,)` or `(k,)`.
        coef_std_, intercept_std_: With `intervals=True` the standard deviations.
        classes_: The declared classes, sorted.
        n_iter_: The number of steps.
        records_usable_: The released fraction of records that can be used.
        records_check_: All released values of the check, column by column.
        row_length_: The released length that a quarter of the rows exceed, over that of
            the longest row that is declared; NaN if there are too few records.
        constant_accuracy_: The released accuracy of the best constant answer.
        privacy_report_: The `PrivacyReport`.
        n_features_in_: $d$.
        feature_names_in_: The names of the columns, if X has any.

    Privacy:
        `n_iter_` noisy gradients, enforced by clipping, after the check of the records
        (a hundredth of the squared budget), the fractions of rows by length (a
        fiftieth) and the mean row of each class (1 % to 10 %). With `intervals=True` a
        last release has the means of second derivatives and of squared gradients (5 %
        to 20 %). Under replace-one the number of records is public; so are the declared
        facts, the columns and their types.
        A record with a missing number, or a label that was not declared, is ignored
        without a message, because an error would reveal it. Every `fit` is a release of
        its own: k-fold cross-validation costs k of them, and a score on the records
        themselves is a release that is not in the ledger.

    Example:
        >>> import numpy as np
        >>> from dpbilevel.sklearn import DPLogisticRegression
        >>> X = np.random.default_rng(0).normal(size=(2000, 2))
        >>> y = np.where(X[:, 0] > X[:, 1], "left", "right")
        >>> model = DPLogisticRegression(classes=["left", "right"], bounds=(-4, 4))
        >>> bool(model.fit(X, y).score(X, y) > 0.9)
        True
    """

    _: dataclasses.KW_ONLY
    classes: Any = None
    class_weight: Any = None

    @override
    def _fit(self, entry, y):
        owner, units, width = self._owner, entry.units, len(entry.units.scale)
        labels = self._read_labels(y, entry.table)
        weights = weights_of(owner, self.classes_, self.class_weight)
        settings = _TWO if len(self.classes_) == 2 else _MORE
        if self.intervals:
            settings = dataclasses.replace(settings, clip_norm=(1.0, 1.0))
        settings = settings.with_parameters(owner, self.max_iter, self.clip_norm)
        _checks.non_negative(owner, ridge=self.ridge)
        rows = units.rows(entry.table)
        records = self._records(rows, labels)
        if weights is not None:
            own = weights.astype(records["features"].dtype)
            records["weight"] = own[np.maximum(labels, 0)]
        usable, beside = with_nan(rows, labels >= 0), {"y": labels < 0}
        lengths, check = self._planned(entry, usable, beside, labels)
        start, known = self._start(width), (entry.budget, entry.public)
        of_classes = len(self.classes_), width, self._constant, weights
        effects = Effects(*known, *of_classes)
        moments = self._moments(*known, width, start.size, 0.25)
        planned = check[0], lengths, effects, moments
        before = tuple(made for one in planned for made in one.releases)
        is_weighted = self.intervals or weights is not None
        loss = weighted(self._loss) if is_weighted else self._loss
        penalty = loss, float(self.ridge), self._constant
        options = start.shape, *known, settings, before, moments.kind
        problem, plan = plan_descent(*penalty, *options)
        entry, last = moments.with_keys(entry)

        def informed(run: Run, key: PRNGKey) -> Run:
            run = self._run_from_rates(run, effects, settings.longest, key)
            return (*run[:2], moments.shortened(run[2]), run[3])

        run = entry, problem, plan, entry.records(records), start, check, lengths
        found = problem, plan.solver, *self._run_plan(*run, informed)
        model, covariance = moments.estimate(*found, key=last, owner=owner)
        self.n_iter_ = plan.solver.num_steps
        units = lengths.frame(units, self._unit)
        self._keep(model, units)
        self._keep_deviations(covariance, units)
        return self

    def _stretch(self, found: Usability, solver: Any) -> float:
        """Return the factor of the rows' unit: above 1 if a class is rare, else 1.

        Records of a rare class have gradients as long as their rows. A clip norm below
        1 would shorten only these gradients, and underestimate the class. So the rows
        of all classes are shortened instead, by a longer unit.
        """
        level = found.levels.get("records")
        if level is None or self.clip_norm != "auto":
            return 1.0
        most = min(level.classes.values()) + OF_COLUMNS * level.noise_std
        return 1 / float(solver.clip_norm) if most < _RARE / len(level.classes) else 1.0

    def _run_from_rates(
        self, run: Run, effects: "Effects", longest: float, key: PRNGKey
    ) -> Run:
        """Return the `Run` that starts at class rates, its ridge set by the effects."""
        problem, solver, records, w0 = run
        width, count = effects.width, effects.classes

        def seen(rows: Any) -> Any:
            label = rows["label"]
            labels = label > 0 if count == 2 else label
            return {"features": rows["features"][..., :width], "label": labels}

        known = on_rows(seen, records)
        rates, weight = effects.rates_and_ridge(known, key=key, owner=self._owner)
        if self._constant:
            scores = np.log(rates / rates[0])
            scores = scores[1] if count == 2 else scores - scores.mean()
            w0 = w0.at[-1].set(scores / CONSTANT)
        (release,) = solver.ledger(problem, solver.sizes).releases
        noise = release.noise_std / release.count**0.5 / float(solver.clip_norm)
        # Powers of 2 need few programs, each of which is compiled.
        ridge = 2.0 ** round(math.log2(weight * noise**2)) + float(self.ridge)
        problem = dataclasses.replace(problem, public=ridge_on(ridge, self._constant))
        step = min(1 / (1 / longest + 2 * ridge), float(solver.step_size))
        return problem, dataclasses.replace(solver, step_size=step), records, w0


@dataclasses.dataclass(frozen=True)
class Effects(AbstractBeforehand):
    r"""Planned release, before the fit, of class rates and strength of effects.

    With many features and few records the noise of a fit needs a ridge; with strong
    effects the same ridge would hide them. If coefficients are equally likely in all
    directions, noise of the deviation $s$ is added to gradients, and the ridge is
    larger than the curvature, then the expected loss is least with

    $$\rho = \frac{s^2 \operatorname{tr} H}{2 G^2}$$

    for the second derivative $H$ of the mean loss at the constant answer and the length
    $G$ of its gradient there. Both follow from the mean row of each class.

    Attributes:
        classes: Number of classes.
        width: Number of features, without a constant.
        centered: Whether the model has a constant.
        weights: Declared weights of the classes, 1 at most, or `None`. Rates are then
            those of the weighted law, and the ridge is for the weighted loss.
    """

    classes: int
    width: int
    centered: bool = True
    weights: Float[np.ndarray, " k"] | None = None

    @property
    @override
    def terms(self) -> Terms:
        count = self.classes
        products = 0.25 if count == 2 else 1 - 1 / count
        squared = products * (1 + _RATE**2) + _ROW**2 + _SQUARE**2
        wanted = _WANTED / (self.width * (count - 1)) ** 0.75
        of_noise = _PART, wanted, _MOST_NOISE
        return Terms("rates and effects", *of_noise, clip_norm=math.sqrt(squared))

    def rates_and_ridge(
        self, records: Any, *, key: PRNGKey, owner: str
    ) -> tuple[Float[np.ndarray, " k"], float]:
        r"""Release the rates of the classes, and the weight of a ridge for noise 1.

        Records are `{"features": rows, "label": numbers}`: rows of length about 1,
        without a constant and NaN if they do not count, and their classes. The key is
        for this release alone. Rates are positive and have sum 1; they are equal
        without a constant. Without a release rates are equal, and the ridge is for
        scores of variance 1. Longer rows are shortened, so that the rate of a class is
        too small if only its rows are longer than 1: 2 and 5 times as long, by a third
        and half.

        Privacy:
            The one release of `release`.
        """
        count, parameters = self.classes, self.width * (self.classes - 1)
        equal = np.full(count, 1 / count)
        weights = np.ones(count) if self.weights is None else self.weights
        if self.release is None:
            rates = weights / weights.sum()
            return rates, self.width / float(weights.mean() * (1 - rates @ rates))
        unit = self.public.unit
        rows = combined(lambda v: rows_of(**v, classes=count), records, unit)
        mean = released_mean(self.release, rows, key=key, owner=owner)
        noise, blocks = self.release.noise_std, 1 if count == 2 else count
        ends = np.cumsum((blocks * self.width, blocks, self.width))
        products, offsets, row, square = np.split(np.asarray(mean, float), ends)
        products, row = products.reshape(blocks, -1), row / _ROW
        offsets = offsets / _RATE
        if count == 2:  # the other class has the opposite mean
            products, offsets = np.stack([-products[0], products[0]]), offsets * [-1, 1]
        # Noise of a rate, and of a coordinate of the gradient.
        of_rate = noise / _RATE * (1 if count == 2 else math.sqrt(1 - 1 / count))
        centering = np.eye(count) - 1 / count
        spread_of_noise = centering if count > 2 else np.asarray([[-1.0], [1.0]])
        rates, length, total = equal, 0.0, float(weights.mean())
        if self.centered:
            noisy = (offsets + equal).tolist()
            rates = np.asarray([_expected(rate, of_rate) for rate in noisy])
            rates /= rates.sum()
            length = float(row @ row) - self.width * (noise / _ROW) ** 2
            total = float(weights @ rates)
            rates = weights * rates / total
        # The gradient of each class from the sums of rows by class.
        of_sums = np.diag(weights) - np.outer(rates, weights)
        gradient = of_sums @ (centering @ products + row / count)
        variance = np.square(of_sums @ spread_of_noise).sum() / (count - 1) * noise**2
        of_row = float(np.square(of_sums.sum(axis=1) / count).mean())
        variance = float(variance) + of_row * (noise / _ROW) ** 2
        squared = float(np.square(gradient).sum()) - parameters * variance
        squared -= count * of_rate**2 * max(length, 0.0)
        spread = min(max(float(square[0]) / _SQUARE - length, _SPREAD[0]), _SPREAD[1])
        trace = total * spread * float(1 - rates @ rates)
        least = trace**2 / spread * _WEAKEST / (2 * self.width)
        apart = float(np.square(total * rates * (1 - rates)).sum())
        most = _STRONGEST * spread * apart
        strength = _expected_square((least, most), squared, variance, parameters)
        return rates, trace / (2 * strength)


def rows_of(
    features: Float[np.ndarray, "n d"], label: Int[np.ndarray, " n"], classes: int
) -> Float[np.ndarray, "n w"]:
    """Return an array of class indicators, features and products, a row per record.

    Privacy:
        Row by row. NON-PRIVATE until `Effects.rates_and_ridge` releases the mean.
    """
    one_hot = (label[:, None] == np.arange(classes)).astype(np.float32)
    indicators = one_hot - np.float32(1 / classes)
    if classes == 2:
        indicators = indicators[:, 1:]
    with np.errstate(all="ignore"):  # an exception would reveal a record
        features = features.astype(np.float32)
        products = indicators[:, :, None] * features[:, None, :]
        squares = np.square(features).sum(axis=1, keepdims=True)
        beside = _RATE * indicators, _ROW * features, _SQUARE * squares
        parts = products.reshape(len(features), -1), *beside
        return np.concatenate(parts, axis=1, dtype=np.float32)


def _expected(rate: float, noise: float) -> float:
    """Return the posterior mean of a noisy rate, with a uniform prior on [0, 1]."""
    rate = min(max(rate, -4 * noise), 1 + 4 * noise)
    normal = statistics.NormalDist(rate, noise)
    chance = normal.cdf(1) - normal.cdf(0)
    return rate + noise**2 * (normal.pdf(0) - normal.pdf(1)) / chance


def _expected_square(
    limits: tuple[float, float], squared: float, variance: float, count: int
) -> float:
    """Return the posterior mean of the squared length of a vector with normal noise.

    The prior of the squared length is in proportion to its inverse square, within
    limits. The squared length of the noisy vector, less its expected excess, is about
    normal. The variance is of the noise of one of `count` coordinates.
    """
    least, most = limits
    squares = np.geomspace(least, max(most, 2 * least), 60)
    deviation = np.sqrt(2 * variance * (count * variance + 2 * squares))
    belief = -0.5 * ((squared - squares) / deviation) ** 2
    belief -= np.log(deviation * squares)
    chances = np.exp(belief - belief.max())
    return float(chances @ squares / chances.sum())
