"""Linear classifiers on several sources, weighted by clean records."""

import dataclasses
import functools
from typing import Any, Self, get_args

import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from .. import _checks
from .._extras import check_installed
from ..applications.sources import SourceWeighting, source_weighting, source_weights
from ..bilevel.problem import Levels, Sizes
from ..core.levels import check_disjoint, check_disjoint_ids
from ..core.solution import Plan
from ..core.solver import AbstractSolver
from ..planning.auto_plan import AutoPlan, auto
from ..planning.race import Effort
from ..privacy.budget import Neighbours, PrivacyBudget
from ..privacy.keys import PRNGKey
from ..privacy.ledger import AbstractRelease
from .base import Description
from .beforehand import PublicSize, Rows
from .declared import declared, index_of
from .linear import LinearClassifier, plan_of

_problem = functools.lru_cache(maxsize=64)(source_weighting)  # compiled once
_IN_BOTH = (
    'DPSourceReweighting.fit: people="disjoint", but an id is in both levels. Leave '
    'such people out of one level, or give "overlapping".'
)
EXAMPLE = 'sources=["north", "south"]'


@dataclasses.dataclass(eq=False, repr=False)
class DPSourceReweighting(LinearClassifier):
    r"""A linear classifier with weights of its sources, chosen on clean records.

    The problem is `source_weighting`: the sources' weights are chosen so that a model
    of the weighted training records fits the clean ones. `dpbilevel.auto` compares
    methods of two levels and of one on synthetic records of these sizes, which takes
    one to two minutes at the first fit of its sizes and is kept for the next ones of
    the process.

    Args:
        epsilon: $\varepsilon$ for every person.
        delta: $\delta$, well below one over the number of people.
        classes: Declared: every label that a record may have.
        sources: Declared: the names of the sources.
        bounds: Declared: `(lower, upper)`, numbers or one for each feature.
        data_norm: Declared instead of bounds: the largest length of a row.
        fit_intercept: Whether to fit a constant, too.
        ridge: $\rho$, the public penalty of `source_weighting`, in units of the rows.
        solver: `"auto"`, or a solver of `source_weighting` such as
            `applications.SelectedSources`, which needs no dry runs.
        effort: `"fast"` or `"thorough"`, of the dry runs.
        verbose: Whether to show a bar of the dry runs on stderr; needs tqdm.
        check_records: Whether to release the fraction of usable records, for a
            hundredth of the squared budget; see docs/estimators.md.

    Attributes:
        coef_: Of shape `(1, d)` for two classes, else `(k, d)`.
        intercept_: Of shape `(1,)` or `(k,)`.
        classes_: The declared classes, sorted.
        sources_: The declared sources, sorted.
        source_weights_: The released weights of the sources, of sum 1; all are equal if
            the method has one level.
        plan_: The `planning.AutoPlan` with its reason, or the `Plan` of `solver`.
        two_levels_: Whether the dry runs chose a method of two levels; `None` with
            a `solver` that was given.
        records_usable_: The released fraction of records that can be used.
        records_check_: All released values of the check, column by column.
        constant_accuracy_: The released accuracy of the best constant answer.
        privacy_report_: The `PrivacyReport`.
        n_features_in_: $d$.
        feature_names_in_: The names of the columns, if X has any.

    Privacy:
        One run of the planned solver. Training and clean records are both protected,
        under replace-one: how many there are of either is public, and so is whatever
        was declared. `people` of `fit` says whether a person may be in both. A record
        with a missing number, or a label or source that was not declared, is ignored
        without a message, because an error would reveal it.
    """

    _: dataclasses.KW_ONLY
    classes: Any = None
    sources: Any = None
    fit_intercept: bool = True
    ridge: float = 1e-4
    solver: AbstractSolver | str = "auto"
    effort: Effort = "fast"
    verbose: bool = False

    def fit(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        X: Any,
        y: Any,
        sources: Any = None,
        clean: tuple[Any, ...] | None = None,
        *,
        groups: Any = None,
        people: str = "overlapping",
        key: PRNGKey | None = None,
        **refused: Any,
    ) -> Self:
        """Fit the model: plan without records, then run the plan once.

        Args:
            X: Features of the training records, of shape `(n, d)`.
            y: Their labels.
            sources: The source of each training record.
            clean: `(X, y)` of the clean records, or `(X, y, groups)` with `groups`.
            groups: The id of the person of each training record, as in
                `DPLogisticRegression`. Rows of a person may be of several sources.
            people: `"disjoint"` if nobody has a training record and a clean one,
                else `"overlapping"`. Checked as far as arrays share memory, and by
                the ids of people.
            key: One typed key; by default a new one from the operating system.
            **refused: No further argument is accepted; `sample_weight` and
                `random_state` raise a `TypeError` with the reason.

        Returns:
            The fitted estimator.

        Raises:
            TypeError: A key that is not typed, sparse features, other arguments.
            ValueError: Something is not declared, shapes do not fit, or tqdm is not
                installed for `verbose=True`.
        """
        entry = self._entry(X, key, refused, groups)
        if sources is None or clean is None:
            what = "give sources=, one for each record, and clean=(X, y)."
            raise ValueError(f"{self._owner}.fit: {what}")
        upper = self._clean(clean, entry.units, groups is not None)
        if people == "disjoint":
            if hasattr(X, "__array__") and hasattr(clean[0], "__array__"):
                try:
                    check_disjoint(Levels(np.asarray(clean[0]), np.asarray(X)))
                except ValueError:
                    raise ValueError(
                        f'{self._owner}.fit: people="disjoint", but clean and X are '
                        "the same array or parts of it. Copy the rows of X, or pass "
                        '"overlapping".'
                    ) from None
            check_disjoint_ids(upper[-1].ids, entry.people.ids, _IN_BOTH)
        return self._fit(entry, y, sources, upper, people)

    @override
    def _fit(self, entry, y, sources=None, clean: Any = None, people=""):
        labels = self._read_labels(y, entry.table)
        self.sources_ = declared(self._owner, "sources", self.sources, EXAMPLE)
        _checks.non_negative(self._owner, ridge=self.ridge)
        rows = entry.units.rows(entry.table)
        lower = self._records(rows, labels)
        named = self._column(sources, entry.table, "sources")
        source = index_of(self._owner, "sources", self.sources_, named)
        counts = np.isfinite(rows).all(axis=1) & (labels >= 0)
        lower["source"] = np.where(counts, source, -1).astype(np.int32)
        beside = {"y": labels < 0, "sources": source < 0}
        place = "sources", self.sources_, source
        cells = self._describe(entry.table, entry.units, beside, labels, place)
        upper, clean_cells, above = clean
        problem = _problem(self._loss, len(self.sources_), ridge=float(self.ridge))
        start = jnp.zeros(len(self.sources_)), self._start()
        counts = above.count(len(upper["label"])), entry.people.count(len(entry.table))
        sizes = Sizes(*counts, people)
        public = PublicSize(Neighbours.REPLACE_ONE, sizes, entry.people.unit)
        problem = public.problem(problem)
        levels = {"upper": (above, clean_cells), "lower": (entry.people, cells)}
        check = self._check(entry.budget, public, **levels)
        self.plan_ = self._plan(problem, entry.budget, sizes, start, check[0].releases)
        self.two_levels_ = getattr(self.plan_, "two_levels", None)
        data = Levels(above.records(upper), entry.people.records(lower))
        found, _ = self._run_plan(entry, problem, self.plan_, data, start, check)
        self.source_weights_ = np.asarray(source_weights(found[0]))
        self._keep(found[1], entry.units)
        return self

    def _clean(
        self, clean: Any, units: Any, by_person: bool
    ) -> tuple[dict[str, Any], Description, Rows]:
        """Return a dict of the clean rows, which of their cells are wrong, and `Rows`.

        `by_person` is whether there are ids of people.
        """
        parts = "(X, y, groups)" if by_person else "(X, y)"
        if not isinstance(clean, tuple | list) or len(clean) != 2 + by_person:
            got = _checks.shown(clean)
            raise ValueError(f"{self._owner}.fit: clean must be {parts}, got {got}.")
        X, y, *groups = clean
        try:
            table = self._read(X, 1, reset=False)
        except ValueError as error:
            raise ValueError(
                f"{self._owner}.fit: clean must have the columns of X ({error})."
            ) from None
        labels = self._read_labels(y, table, "clean[1]")
        cells = self._describe(table, units, {"clean[1]": labels < 0}, labels)
        rows = self._rows(groups[0] if groups else None, table, "clean[2]")
        return self._records(units.rows(table), labels), cells, rows

    def _plan(
        self,
        problem: SourceWeighting,
        budget: PrivacyBudget,
        sizes: Sizes,
        start: Any,
        before: tuple[AbstractRelease, ...],
    ) -> Plan[Any]:
        shapes = tuple(v.shape for v in start)
        if isinstance(self.solver, AbstractSolver):
            return plan_of(problem, self.solver, budget, sizes, shapes, before)
        _checks.one_of(self._owner, "solver", self.solver, ("auto",))
        _checks.one_of(self._owner, "effort", self.effort, get_args(Effort))
        of = problem, budget, sizes, shapes, self.effort, before
        if of not in _PLANS:
            if self.verbose:
                check_installed(f"{self._owner}.fit: verbose=True", "tqdm")
            options: Any = {"sizes": sizes, "w0": start, "effort": self.effort}
            options["before"] = before
            _PLANS[of] = auto(problem, budget, **options, progress=bool(self.verbose))
        return _PLANS[of]


# Plans for later fits, by problem, budget, sizes, shapes, effort and check.
_PLANS: dict[tuple[Any, ...], AutoPlan] = {}
