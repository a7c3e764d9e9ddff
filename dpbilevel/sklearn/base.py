"""Base of the private estimators: how records, keys and budgets enter a fit."""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeAlias

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree
from sklearn.base import BaseEstimator
from sklearn.utils import check_array
from sklearn.utils.validation import column_or_1d, validate_data

from .. import _checks
from ..core import process_spending
from ..core.columns import Column, elements, numbers
from ..core.loop import solved
from ..core.problem import AbstractProblem
from ..core.shares import Usability
from ..core.solution import Plan, divergence
from ..core.usability import Columns, RecordsCheck
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.keys import PRNGKey, Seedless, check_key, derive, refuse, root_key
from ..privacy.records.people import PersonUnit
from ..privacy.report import PrivacyReport
from .beforehand import SHORT, Entry, Lengths, PublicSize, Rows, mean_noise
from .declared import Frame, frame

compiled_run = jax.jit(lambda *run, key: solved(*run, key=key))
DECLARED = (
    "transformations before the estimator, such as earlier steps of a pipeline, are "
    "public: fit cannot see them, and those fitted to the records are releases",
    "the declared classes, bounds and the like, the columns and their types hold no "
    "private data",
    "no cell has changed the type of its column, and with it the cells of others, when "
    "the table was read or made: read files with declared types",
)
_FLOATS: Any = (np.float64, np.float32)
# Largest number of features that are checked one by one, not in groups of columns.
_MOST_COLUMNS = 64
_COMPARE = (
    "Compare what was declared, such as classes and bounds, with the spelling and the "
    "unit in the records. Another fit is another release."
)
_WIDE = (
    "most rows are far shorter than the longest declared one, by the released "
    "`row_length_`. Declare narrower bounds from public knowledge, or data_norm= for "
    "rows of a known length, such as embeddings."
)
_NOISE = (
    "the noise of all steps together is as large as the clipped gradients, so the "
    "model says little about the records. Use more records, a larger epsilon or fewer "
    "features."
)
_MOST_NOISE = 0.5  # largest useful ratio for the mean of all steps
# Columns and indicators of a level; a check and its indicators by level.
Description: TypeAlias = tuple[Columns, Float[np.ndarray, "n w"]]
Check: TypeAlias = tuple[RecordsCheck, Mapping[str, Float[np.ndarray, "n w"]]]
# Problem, solver, records and initial point.
Run: TypeAlias = tuple[Any, Any, Any, Any]
Prepare: TypeAlias = Callable[[Run, PRNGKey], Run]


class _Fitted(Seedless, BaseEstimator):
    """Attributes that a fit of every private estimator sets."""

    privacy_report_: PrivacyReport  # of the last `fit`, with its assumptions
    records_check_: Usability
    records_usable_: float  # or NaN
    n_features_in_: int
    _units_: Frame
    neighbours: str = "replace_one"
    size: int | None = None


@dataclasses.dataclass(eq=False, repr=False)
class PrivateEstimator(_Fitted, abc.ABC):
    """An estimator whose `fit` is one run of a planned solver."""

    epsilon: float = 1.0
    delta: float = 1e-5
    _: dataclasses.KW_ONLY
    bounds: Any = None
    data_norm: float | None = None
    check_records: bool = True
    most_rows: int = 8  # of a person, that count

    @property
    def _owner(self) -> str:
        return type(self).__name__

    def fit(
        self,
        X: Any,
        y: Any,
        groups: Any = None,
        *,
        key: PRNGKey | None = None,
        **refused: Any,
    ) -> Self:
        """Fit the model: plan without records, then run the plan once.

        Args:
            X: Features, of shape `(n, d)`.
            y: Labels, or targets.
            groups: The id of the person of each row, if people have several rows. The
                guarantee then protects a person with all rows, and `size` is a number
                of people. A row without an id is left out.
            key: One typed key; by default a new one from the operating system.
            **refused: No further argument is accepted; `sample_weight` and
                `random_state` raise a `TypeError` with the reason.

        Returns:
            The fitted estimator.

        Raises:
            TypeError: A key that is not typed, sparse features, other arguments.
            ValueError: Something is not declared, or shapes do not fit.
        """
        return self._fit(self._entry(X, key, refused, groups), y)

    @abc.abstractmethod
    def _fit(self, entry: Entry, y: Any) -> Self:
        """Plan the solver, run it on the records, return self; only `fit` calls it."""

    def _entry(
        self,
        X: Any,
        key: PRNGKey | None,
        refused: dict[str, Any],
        ids: Any,
        name: str = "groups",
    ) -> Entry:
        """Return the `Entry` of a fit: features and people, before it reads a label."""
        refuse(f"{self._owner}.fit", refused)
        budget = PrivacyBudget(self.epsilon, self.delta)
        key = root_key() if key is None else check_key(key)
        # Under replace-one the number of rows is public.
        least = int(self.neighbours == Neighbours.REPLACE_ONE.value)
        table = self._read(X, least)
        declared = self.n_features_in_, self.bounds, self.data_norm
        bins = getattr(self, "bins", None)
        units = frame(self._owner, *declared, self._constant, bins)
        people = self._rows(ids, table, name)
        public = PublicSize.of(self, people.count(len(table)), people.unit)
        return Entry(budget, key, table, units, people, public)

    def _read(self, X: Any, least: int, **options: Any) -> Float[np.ndarray, "n d"]:
        """Return a float64 table, NaN for missing; check rows, set `n_features_in_`."""
        array = check_array(
            numbers(X),
            dtype="float64",
            ensure_all_finite=False,
            ensure_min_samples=least,
            estimator=self,
            input_name="X",
        )
        # If X is a sequence, scikit-learn would count the cells of its first record.
        named = X if elements(X) is None else array
        validate_data(self, named, **options, skip_check_array=True)
        return array

    def _column(self, y: Any, X: Float[np.ndarray, "n d"], name: str = "y") -> Column:
        """Return a `Column` of labels or the like, checked to be as long as `X`."""
        if isinstance(y, str):
            raise ValueError(
                f"{self._owner}.fit: {name} is a text; pass the column, table[{y!r}]."
            )
        if y is None:
            what = "requires y to be passed, but the target y is None."
            raise ValueError(f"{self._owner} {what}")
        column = Column.of(y)
        entries = column_or_1d(column.entries, warn=True)
        if len(entries) != len(X):
            count = f"{len(entries)} values for {len(X)} records"
            raise ValueError(f"{self._owner}.fit: {name} has {count}.")
        return dataclasses.replace(column, entries=entries)

    def _rows(self, ids: Any, X: Float[np.ndarray, "n d"], name: str) -> Rows:
        """Return the `Rows` of a table: records, or the rows of people with ids."""
        unit = PersonUnit(self.most_rows)
        if ids is None:
            return Rows()
        return Rows(self._column(ids, X, name).entries, unit)

    @property
    def _constant(self) -> bool:
        """Whether the model has a constant."""
        return bool(getattr(self, "fit_intercept", True))

    def _test_rows(self, X: Any) -> Float[np.ndarray, "n d"]:
        """Return features to predict, cut to the declared bounds as in `fit`.

        They are not protected: errors may describe them.
        """
        table: Any = validate_data(self, X, reset=False, dtype=_FLOATS)
        return self._units_.cut(table)

    def __sklearn_tags__(self):
        """Return scikit-learn's tags, with `non_deterministic` set: fits have noise."""
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True
        return tags

    def _describe(
        self,
        table: Float[np.ndarray, "n d"],
        units: Frame,
        beside: Mapping[str, Bool[np.ndarray, " n"]],
        label: Int[np.ndarray, " n"] | None = None,
        place: tuple[str, np.ndarray, Int[np.ndarray, " n"]] | None = None,
    ) -> Description:
        """Return the `Columns`, and indicators of cells that differ from them.

        Args:
            table: The features, NaN for cells that are no number.
            units: Their units.
            beside: Whether a record has no declared value in each other column.
            label: The number of each record's class, if there are classes.
            place: Name in `beside`, values and numbers of groups or sources.
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
        classes = tuple(map(str, getattr(self, "classes_", ())))
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
        self,
        budget: PrivacyBudget,
        public: PublicSize,
        **levels: tuple[Rows, Description],
    ) -> Check:
        """Return the planned `RecordsCheck` of all levels, and their indicators."""
        _checks.instance(self._owner, bool, check_records=self.check_records)
        if not self.check_records:
            return RecordsCheck((), ()), {}
        columns = {role: described[0] for role, (_, described) in levels.items()}
        relation, size = public.relation, public.size
        check = RecordsCheck.planned(columns, budget, size, neighbours=relation)
        means = {k: rows.means(cells) for k, (rows, (_, cells)) in levels.items()}
        return check, {role: public.rows(mean) for role, mean in means.items()}

    def _planned(
        self, entry: Entry, usable: Float[np.ndarray, "n d"], *described: Any
    ) -> tuple[Lengths, Check]:
        """Return `Lengths`, and the `RecordsCheck` with indicators: planned releases.

        The features are in their units, NaN in other rows; the rest is for `_describe`.
        """
        rows, units = entry.records(usable), entry.units
        lengths = Lengths(entry.budget, entry.public, rows, units.longest)
        cells = entry.people, self._describe(entry.table, units, *described)
        return lengths, self._check(entry.budget, entry.public, records=cells)

    def _run_plan(
        self,
        entry: Entry,
        problem: AbstractProblem,
        plan: Plan[Any],
        records: PyTree,
        w0: PyTree,
        check: Check,
        lengths: Lengths | None = None,
        prepare: Prepare | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Check records, run a plan once, set attributes; return answer and records.

        The answer is of numpy arrays; the records are as the run read them. Warnings
        follow from released values alone.

        Args:
            entry: The fit, whose units are kept for predictions.
            problem: The problem.
            plan: The plan, with the releases before it.
            records: The records in a public number of rows.
            w0: The initial point.
            check: The check and its indicators.
            lengths: The release by which the features of `records` are divided.
            prepare: A function that makes further releases and returns the run that
                follows from them.
        """
        (first, indicators), key, units = check, entry.key, entry.units
        name, costs = f"{self._owner}.fit", process_spending.costs_by(plan.report)
        plan.warn(name)
        sizes, relation = plan.solver.sizes, plan.report.relation
        count = process_spending.begun(name, relation, costs, sizes, records, key)
        if len(plan.report.ledger) > 1:  # an interrupt may come after a first release
            count()
        found = Usability({})
        if first.releases:
            own, key = derive(key, "usability", "run")
            found = first.release(indicators, key=own, owner=name)
        length, unit = math.nan, 1.0
        if lengths is not None:
            own, key = derive(key, "lengths", "run")
            length = lengths.typical_length(key=own, owner=name)
            unit = lengths.unit(length) * self._stretch(found, plan.solver)
            records = lengths.in_unit(records, unit)
        run = problem, plan.solver, records, w0
        if prepare is not None:
            own, key = derive(key, "prepare", "run")
            run = prepare(run, own)
        solution = compiled_run(*run, key=key)
        count()
        self._units_ = units
        if lengths is not None:  # an interrupted fit shows nothing
            self.row_length_, self._unit = length, unit
        first_of_all, *declared = DECLARED
        of_run = *plan.report.assumptions, *first.assumptions
        assumed = first_of_all, *of_run, *declared
        report = dataclasses.replace(plan.report, assumptions=assumed)
        self.privacy_report_ = report.with_generator(jax.random.key_impl(key))
        self.records_check_, self.records_usable_ = found, found.usable
        remarks = [f"{text} {_COMPARE}" for text in found.remarks]
        if lengths is not None and mean_noise(plan.report) > _MOST_NOISE:
            remarks.append(_NOISE)
        if length < SHORT * units.numbers**0.5:
            remarks.append(_WIDE)
        for text in remarks:
            _checks.warn(f"{name}: {text}")
        remark = divergence(int(solution.rejected_updates))
        if remark is not None:
            _checks.warn(f"{name}: {remark}", RuntimeWarning)
        return jax.tree.map(np.asarray, solution.value), run[2]

    def _stretch(self, found: Usability, solver: Any) -> float:
        """Return the factor that lengthens the rows' unit after the check: 1."""
        return 1.0
