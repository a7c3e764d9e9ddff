"""Logistic regression by noisy descent."""

import dataclasses
import math
from typing import Any

import numpy as np

from .. import _checks
from ..core.shares import OF_COLUMNS, Usability
from ..privacy.noise import PRNGKey
from .base import Run, with_nan
from .descent import Settings, plan_descent
from .effects import Effects
from .lengths import Lengths
from .linear import CONSTANT, LinearClassifier, ridge_on
from .public_size import PublicSize

# docs/estimators.md, "Settings".
_TWO = Settings(2.0, 8.0, steps=(30, 1000, 3000), clip_norm=(0.7, 1.0))
_MORE = dataclasses.replace(_TWO, longest=4.0)
# A class is rare if its fraction is below this number over the number of classes.
_RARE = 0.2


@dataclasses.dataclass(eq=False, repr=False)
class DPLogisticRegression(LinearClassifier):
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
        neighbours: `"replace_one"`, or `"add_or_remove_one"` with `size`.
        size: A public number of records to plan for, if their number is private.
        check_records: Whether to release the fraction of usable records, for a
            hundredth of the squared budget; see docs/estimators.md.

    Attributes:
        coef_: Of shape `(1, d)` for two classes, else `(k, d)`.
        intercept_: Of shape `(1,)` or `(k,)`.
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
        fiftieth) and the mean row of each class (1 % to 10 %). Under replace-one the
        number of records is public; so are the declared facts, the columns and their
        types.
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
    fit_intercept: bool = True
    ridge: float = 0.0
    max_iter: int = 3000
    clip_norm: float | str = "auto"
    neighbours: str = "replace_one"
    size: int | None = None

    def fit(
        self, X: Any, y: Any, *, key: PRNGKey | None = None, **refused: Any
    ) -> "DPLogisticRegression":
        """Fit the model: plan without records, then run the plan once.

        Args:
            X: Features, of shape `(n, d)`.
            y: Labels.
            key: One typed key; by default a new one from the operating system.
            **refused: No further argument is accepted; `sample_weight` and
                `random_state` raise a `TypeError` with the reason.

        Returns:
            The fitted estimator.

        Raises:
            TypeError: A key that is not typed, sparse features, other arguments.
            ValueError: Something is not declared, or shapes do not fit.
        """
        owner, (budget, key, table, units) = self._owner, self._entry(X, key, refused)
        labels = self._read_labels(y, table)
        public = PublicSize.of(owner, self.neighbours, self.size, len(table))
        settings = _TWO if len(self.classes_) == 2 else _MORE
        settings = settings.with_parameters(owner, self.max_iter, self.clip_norm)
        _checks.non_negative(owner, ridge=self.ridge)
        rows = units.rows(table)
        records = self._records(rows, labels)
        usable = with_nan(rows, labels >= 0)
        lengths = Lengths.plan(budget, public, usable, units.longest)
        cells = self._describe(table, units, {"y": labels < 0}, labels)
        check = self._check(budget, public, records=cells)
        start = self._start()
        shape = len(self.classes_), self.n_features_in_
        effects = Effects.plan(budget, public, *shape, centered=self._constant)
        before = (*check[0].releases, *lengths.releases, *effects.releases)
        penalty = self._loss, float(self.ridge), self._constant
        options = start.shape, budget, public, settings, before
        problem, plan = plan_descent(*penalty, *options)
        records = public.rows(records)

        def informed(run: Run, key: PRNGKey) -> Run:
            return self._run_from_rates(run, effects, settings.longest, key)

        run = problem, plan, records, start, key, check, units, lengths
        model = self._run_plan(*run, informed)
        self.n_iter_ = plan.solver.num_steps
        self._keep(model, lengths.frame(units, self._unit))
        return self

    def _stretch(self, found: Usability, solver: Any) -> float:
        """Return a longer unit if a class is rare, so that few of its rows are clipped.

        Records of a rare class have gradients as long as their rows. A clip norm below
        1 would shorten only these gradients, and underestimate the class. So the rows
        of all classes are shortened instead.
        """
        level = found.levels.get("records")
        if level is None or self.clip_norm != "auto":
            return 1.0
        most = min(level.classes.values()) + OF_COLUMNS * level.noise_std
        return 1 / float(solver.clip_norm) if most < _RARE / len(level.classes) else 1.0

    def _run_from_rates(
        self, run: Run, effects: Effects, longest: float, key: PRNGKey
    ) -> Run:
        """Return the run from the constant answer, with a ridge by the effects."""
        problem, solver, records, w0 = run
        width, count = self.n_features_in_, len(self.classes_)
        label = records["label"]
        labels = label > 0 if count == 2 else label
        features = records["features"][:, :width]
        seen: Any = features, labels
        rates, weight = effects.rates_and_ridge(*seen, key=key, owner=self._owner)
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
