"""What all private estimators share: how records, keys and budgets enter a fit."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree
from sklearn.base import BaseEstimator
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from .. import _checks
from ..core import spent
from ..core.columns import Column, elements
from ..core.loop import solved
from ..core.problem import AbstractProblem
from ..core.seeds import Seedless
from ..core.shares import Usability
from ..core.solution import Plan, divergence
from ..core.usability import Columns, RecordsCheck
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.noise import PRNGKey, check_key, derive, root_key
from ..privacy.report import PrivacyReport
from .declared import Frame, declared, frame, index_of, numbers
from .lengths import SHORT, Lengths
from .public_size import PublicSize

_run = jax.jit(lambda *run, key: solved(*run, key=key))
DECLARED = (
    "transformations before the estimator, such as earlier steps of a pipeline, are "
    "public: fit cannot see them, and those fitted to the records are releases",
    "what was declared of the records (classes, bounds and the like), their columns "
    "and types hold no private data",
    "no cell has changed the type of its column, and with it the cells of others, when "
    "the table was read or made: read files with declared types",
)
_FLOATS: Any = (np.float64, np.float32)
# Up to this number features are checked one by one, else in groups of neighbours.
_MOST_COLUMNS = 64
_COMPARE = (
    "Compare what was declared, such as classes and bounds, with the spelling and the "
    "unit in the records. Another fit is another release."
)
_WIDE = (
    "most rows are far shorter than the longest one that was declared, by the "
    "released `row_length_`. Declare narrower bounds if they are public knowledge. For "
    "rows of a known length, such as embeddings, declare data_norm=."
)
_NOISE = (
    "the noise of all steps together is as long as the gradients of records may be, so "
    "the model says next to nothing of the records. Use more records, a larger epsilon "
    "or fewer features."
)
_MOST_NOISE = 0.5  # of this ratio for the mean of all steps
# The columns of a level and the indicators of its records; a check and all indicators.
Described: TypeAlias = tuple[Columns, Float[np.ndarray, "n w"]]
Check: TypeAlias = tuple[RecordsCheck, Mapping[str, Float[np.ndarray, "n w"]]]
# Problem, solver, records and initial point, from those that were planned.
Run: TypeAlias = tuple[Any, Any, Any, Any]
Prepare: TypeAlias = Callable[[Run, PRNGKey], Run]


class PrivateEstimator(Seedless, BaseEstimator):
    """An estimator whose `fit` is one run of a planned solver.

    Subclasses have the parameters `epsilon`, `delta`, `bounds`, `data_norm` and
    `check_records`.

    Attributes:
        privacy_report_: The guarantee of the last `fit`, with what it assumes.
        records_check_: Released shares of usable records.
        records_usable_: The share of usable records, with noise; NaN if it was not
            released.
    """

    privacy_report_: PrivacyReport
    records_check_: Usability
    records_usable_: float
    n_features_in_: int

    def _budget(self) -> PrivacyBudget:
        return PrivacyBudget(self._given("epsilon"), self._given("delta"))

    def _given(self, name: str) -> Any:
        """A parameter; parameters are those of the subclass's `__init__`."""
        return getattr(self, name)

    @property
    def _owner(self) -> str:
        return type(self).__name__

    def _table(self, X: Any) -> Float[np.ndarray, "n d"]:
        """The features as numbers, NaN where one is missing; sets `n_features_in_`.

        Raises:
            TypeError: They are sparse.
            ValueError: They are no table, have no features, or no rows where the
                number of rows is public.
        """
        relation = getattr(self, "neighbours", Neighbours.REPLACE_ONE.value)
        array = check_array(
            numbers(X),
            dtype="float64",
            ensure_all_finite=False,
            ensure_min_samples=int(relation == Neighbours.REPLACE_ONE.value),
            estimator=self,
            input_name="X",
        )
        validate_data(self, _named(X, array), skip_check_array=True)
        return array

    def _more_rows(self, X: Any) -> Float[np.ndarray, "n d"]:
        """Features of further protected records, of the columns of the first ones.

        Raises:
            TypeError: They are sparse.
            ValueError: They are no table of as many columns.
        """
        array = check_array(
            numbers(X), dtype="float64", ensure_all_finite=False, estimator=self
        )
        try:
            validate_data(self, _named(X, array), reset=False, skip_check_array=True)
        except ValueError as error:
            raise ValueError(
                f"{self._owner}.fit: the clean records have other columns than the "
                f"training records. {error} Steps before this one in a pipeline do not "
                "transform clean=: transform it in the same way."
            ) from None
        return array

    def _column(self, y: Any, X: Float[np.ndarray, "n d"], name: str = "y") -> Column:
        """A column beside the features, of any type."""
        if isinstance(y, str):
            raise ValueError(
                f"{self._owner}.fit: {name} must have one value for each row of X, got "
                f"the text {y!r}. Pass the column itself, such as table[{y!r}]."
            )
        if y is None:
            raise ValueError(
                f"{self._owner} requires y to be passed, but the target y is None."
            )
        column = Column.of(y)
        entries = column_or_1d(column.entries, warn=True)
        if len(entries) != len(X):
            raise ValueError(
                f"{self._owner}.fit: {name} has {len(entries)} values for {len(X)} "
                "records."
            )
        return dataclasses.replace(column, entries=entries)

    def _frame(self) -> Frame:
        """Return the declared units of the features."""
        return frame(
            self._owner,
            self.n_features_in_,
            self._given("bounds"),
            self._given("data_norm"),
            centered=self._constant,
        )

    @property
    def _constant(self) -> bool:
        """Whether the model has a constant."""
        return bool(getattr(self, "fit_intercept", True))

    def _test_rows(self, X: Any) -> Float[np.ndarray, "n d"]:
        """Features to predict, cut to what was declared, as in `fit`.

        They are not protected: errors may tell of them.
        """
        table: Any = validate_data(self, X, reset=False, dtype=_FLOATS)
        return self._units_.cut(table)

    def __sklearn_tags__(self):
        """Two fits of the same records differ, by their noise."""
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True
        return tags

    def _described(
        self,
        table: Float[np.ndarray, "n d"],
        units: Frame,
        beside: Mapping[str, Bool[np.ndarray, " n"]],
        label: Int[np.ndarray, " n"] | None = None,
        place: tuple[str, np.ndarray, Int[np.ndarray, " n"]] | None = None,
    ) -> Described:
        """Return the columns, and indicators of cells that differ from the declaration.

        Args:
            table: The features, NaN where one is no number.
            units: Their units.
            beside: For each column beside the features, whether a record has no
                declared value there.
            label: The number of each record's class, if there are classes.
            place: The name of the column of groups or sources in `beside`, what was
                declared of it, and the number of each record's value.
        """
        width = table.shape[1]
        names = getattr(self, "feature_names_in_", [f"X[:, {i}]" for i in range(width)])
        names = [f"X[{name!r}]" if name in beside else str(name) for name in names]
        starts = np.linspace(0, width, min(width, _MOST_COLUMNS), endpoint=False)
        starts = starts.astype(int)
        ends = [*(starts[1:] - 1), width - 1]
        named = (
            names[a] if a == b else f"{names[a]} to {names[b]}"
            for a, b in zip(starts, ends, strict=True)
        )
        classes = () if label is None else tuple(map(str, self._given("classes_")))
        of, values, number = ("", (), None) if place is None else place
        columns = Columns((*beside, *named), classes, of, tuple(map(str, values)))
        unread, cut = (
            np.logical_or.reduceat(cells, starts, axis=1)
            for cells in (~np.isfinite(table), units.outside(table))
        )
        first = np.stack([*beside.values()], axis=1)
        unread = np.concatenate([first, unread], axis=1)
        cut = np.concatenate([np.zeros_like(first), cut], axis=1)
        return columns, columns.indicators(unread, cut, label, number)

    def _check(
        self, budget: PrivacyBudget, planned: PublicSize, **levels: Described
    ) -> Check:
        """Plan the release of the share of usable records of each level."""
        _checks.instance(self._owner, bool, check_records=self._given("check_records"))
        if not self._given("check_records"):
            return RecordsCheck((), ()), {}
        columns = {role: level[0] for role, level in levels.items()}
        relation, size = planned.relation, planned.size
        check = RecordsCheck.planned(columns, budget, size, neighbours=relation)
        return check, {role: planned.rows(level[1]) for role, level in levels.items()}

    def _solved(
        self,
        problem: AbstractProblem,
        plan: Plan[Any],
        records: PyTree,
        w0: PyTree,
        key: PRNGKey,
        check: Check,
        units: Frame,
        lengths: Lengths | None = None,
        prepare: Prepare | None = None,
    ) -> PyTree:
        """Check the records, run a plan once, and keep report and released shares.

        Args:
            problem: The problem.
            plan: The plan, with the releases before it.
            records: The records in a public number of rows.
            w0: The initial point.
            key: The key of the fit.
            check: The check and its indicators.
            units: The units of the features, which are kept for predictions.
            lengths: A release of how long rows are; the features of `records` are
                divided by the released length.
            prepare: Makes further releases and returns the run that follows from them.

        Warns:
            RuntimeWarning: The run diverged.
            UserWarning: Too few of the records can be used, a declared value seems to
                be misspelt, many records have wrong cells in the same columns, or rows
                are far shorter than declared, by the released shares.
        """
        first, indicators = check
        plan.warn(f"{self._owner}.fit")
        name, costs = f"{self._owner}.fit", spent.costs_by(plan.report)
        sizes, relation = plan.solver.sizes, plan.report.relation
        count = spent.begun(name, relation, costs, sizes, records)
        if len(plan.report.ledger) > 1:  # an interrupt may come after a first release
            count()
        found = Usability({})
        if first.releases:
            own, key = derive(key, "usability", "run")
            found = first.release(indicators, key=own, owner=name)
        length, unit = math.nan, 1.0
        if lengths is not None:
            own, key = derive(key, "lengths", "run")
            length = lengths.typical(key=own, owner=name)
            unit = lengths.unit(length) * self._stretch(found, plan.solver)
            records = lengths.in_unit(records, unit)
        run = problem, plan.solver, records, w0
        if prepare is not None:
            own, key = derive(key, "prepare", "run")
            run = prepare(run, own)
        solution = _run(*run, key=key)
        count()
        self._units_ = units
        if lengths is not None:  # an interrupted fit shows nothing
            self.row_length_, self._unit = length, unit
        first_of_all, *declared = DECLARED
        of_run = *plan.report.assumptions, *first.assumptions
        assumed = first_of_all, *of_run, *declared
        self.privacy_report_ = dataclasses.replace(plan.report, assumptions=assumed)
        self.records_check_, self.records_usable_ = found, found.usable
        for text in found.remarks:
            warnings.warn(f"{self._owner}.fit: {text} {_COMPARE}", stacklevel=3)
        forecast = plan.report.forecast
        rows = zip(forecast, plan.report.ledger[-len(forecast) :], strict=True)
        noise = (
            (row.noise_norm_over_clip_norm or 0) / made.count**0.5 for row, made in rows
        )
        if lengths is not None and max(noise) > _MOST_NOISE:
            warnings.warn(f"{self._owner}.fit: {_NOISE}", stacklevel=3)
        if length < SHORT * units.numbers**0.5:
            warnings.warn(f"{self._owner}.fit: {_WIDE}", stacklevel=3)
        remark = divergence(int(solution.rejected_updates))
        if remark is not None:
            warnings.warn(f"{self._owner}.fit: {remark}", RuntimeWarning, stacklevel=3)
        return jax.tree.map(np.asarray, solution.value)

    def _stretch(self, found: Usability, solver: Any) -> float:
        """Return what the released unit is multiplied by."""
        return 1.0


class PrivateClassifier(PrivateEstimator):
    """A private estimator of declared classes.

    Attributes:
        classes_: The declared classes, sorted.
        constant_accuracy_: The accuracy of the best constant answer, with noise.
    """

    classes_: np.ndarray

    @property
    def constant_accuracy_(self) -> float:
        """The released share of the most frequent class; NaN if it was not released.

        It is the accuracy of the best constant answer on records like those of `fit`.
        """
        check_is_fitted(self, "records_check_")
        found = self.records_check_.constant_accuracy
        return math.nan if found is None else found

    def _declared_classes(self) -> np.ndarray:
        return declared(
            self._owner, "classes", self._given("classes"), 'classes=["no", "yes"]'
        )

    def _labels(self, y: Column) -> Int[np.ndarray, " n"]:
        """The number of each record's class; -1 where it is none that is declared."""
        return index_of(self._owner, "classes", self.classes_, y)


def _named(X: Any, array: np.ndarray) -> Any:
    """Return what has the names and the number of columns of X.

    If X is a sequence, scikit-learn would count the cells of the first record.
    """
    return X if elements(X) is None else array


def key_or_fresh(key: PRNGKey | None) -> PRNGKey:
    """The key of a fit: the one given, or a new one of the operating system's."""
    return root_key() if key is None else check_key(key)


def with_nan(
    rows: Float[np.ndarray, "n d"], counts: Bool[np.ndarray, " n"]
) -> Float[np.ndarray, "n d"]:
    """Rows for the library; of NaN, which contribute nothing, where one does not count.

    Args:
        rows: Features, NaN where one is missing.
        counts: Which records have a target.
    """
    counts = counts & np.isfinite(rows).all(axis=1)
    rows = np.where(counts[:, None], rows, np.nan)
    return rows.astype(jnp.result_type(float))
