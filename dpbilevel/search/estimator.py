"""Private hyperparameter search of scikit-learn estimators."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from jaxtyping import Float

from .._extras import check_installed, missing

try:
    import joblib
    from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.validation import check_is_fitted
except ImportError as error:
    raise ImportError(missing("dpbilevel.PrivateSearch", "sklearn")) from error

from .. import _checks
from ..privacy.budget import PrivacyBudget
from ..privacy.keys import PRNGKey, Seedless, check_key, refuse, root_key
from ..privacy.records.people import PersonRows, PersonUnit, by_person
from ..sets import Box
from .ask_tell import AskTell
from .base import AbstractAskTellSolver, BlackBox
from .declared import DeclaredTraining, check_fits, check_search
from .defaults import default_losses, default_solver
from .gibo import GradientInformativeBO
from .loop import run_search
from .row_losses import RowLosses, check_validation, count, evaluations
from .space import Categorical, Range, Space


def _has(name: str) -> Callable[[Any], bool]:
    """Return a function: whether the estimator, best or given, has a method `name`."""
    return lambda search: hasattr(
        getattr(search, "best_estimator_", search.estimator), name
    )


@dataclasses.dataclass(eq=False, repr=False)
class PrivateSearch(Seedless, MetaEstimatorMixin, BaseEstimator):
    r"""Private tuning of an estimator on validation records.

    Every evaluation clones the estimator, sets the parameters, fits it to the training
    records and takes each validation record's loss. Only what the solver releases is
    published: the parameters of the answer, and those visited by some solvers.

    Args:
        estimator: A scikit-learn estimator.
        space: A `Range` or a `Categorical` per parameter, named as in `set_params`
            (`"svr__C": Range(0.1, 10, log=True)`). If the condition (`when`) of a
            parameter does not hold, the estimator's own value stays.
        budget: The guarantee for the validation records, and with `training` also for
            the training records.
        solver: `GradientInformativeBO`, `RandomSearch`, `RepeatAndSelect` or
            `NoisyUCB`; its noise is replaced. It searches $[-1, 1]^d$, the space scaled
            coordinate by coordinate, from its middle. The default:

            - With at most three coordinates, with whole numbers or categories, with 0-1
              losses, or with delta 0: `RandomSearch` among `30 + 10 d` points. Losses
              are clipped at their bound, or without a bound at the 99 % quantile of the
              losses of training records, after one training on half of these (one for
              each choice of a category).
            - Otherwise: `GradientInformativeBO` with AdaGrad, a drawn initial point and
              20 steps. Losses are divided by the 95 % quantile of the gradient norms of
              training records' losses, found by 2d trainings on one half; gradients are
              clipped at 1.
            - From four coordinates on, half of the points of `RandomSearch`, or the 60
              initial points of the descent, are chosen from six times as many uniform
              points. They have the least loss on one half of the training records, with
              the estimator fitted to the other half.

        starts: Likely parameters, dictionaries with values for some or all names of the
            space, in their ranges; the others are in the middle. The default solver
            evaluates them and the estimator's own parameters.
        losses: `losses(estimator, X, y)`, the loss of every row, shape `(n,)`, each
            from its own row alone. The default is half the Brier score for classifiers
            with `predict_proba`, 0-1 loss for others, both in [0, 1]; for regressors
            the squared error in units of the training targets' variance. Avoid heavy
            tails: clipping can reverse the order of their means.
        training: The releases of one `fit`, as a `dpbilevel.search.DeclaredTraining`,
            if the estimator trains privately at every point of the space. The budget
            then covers all fits, that of `best_estimator_` included. It needs `losses`
            and a `solver`, no `folder`, and no losses are tried on training rows,
            because nothing else may be learned from them.
        most_rows: Number of rows of a person that count, at most, if `fit` is given
            ids of people.
        n_jobs: Number of processes that evaluate the points of a step, -1 for all
            cores. Each evaluation then has one thread, so that the answer is the same
            for any number. `None` evaluates points one by one in this process.

    Attributes:
        best_params_: The released parameters.
        best_estimator_: The estimator fitted to the training records with them.
        report_: The `PrivacyReport`.
        trajectory_: Released points in $[-1, 1]^d$, one a step, if the solver releases
            them.

    Raises:
        NotFittedError: By `predict` and the other methods of `best_estimator_` before
            `fit`.

    Privacy:
        The privacy unit is one validation record, or one person; $n$ is public, and the
        neighbouring relation is the solver's. Training records are NOT protected unless
        `training` is declared: parameters and the fitted estimator depend on them. No
        validation loss is shown, logged or kept; a score of the answer on the same
        records is another release.

        Estimator and losses are other people's code. If they raise on a record, its
        loss counts as the worst, and the losses of other records do not change; no
        exception, warning or output about validation records leaves the search.
        Declared unprotected: that they treat every row alone and keep no state, which
        is tried on training rows; that no cell has changed the type of its column when
        the table was made; and the time, which grows if a record is rejected.
    """

    estimator: Any
    space: dict[str, Range | Categorical]
    budget: PrivacyBudget
    _: dataclasses.KW_ONLY
    solver: AbstractAskTellSolver | None = None
    losses: Callable[[Any, Any, Any], Float[np.ndarray, " n"]] | None = None
    training: DeclaredTraining | None = None
    starts: Sequence[dict[str, Any]] = ()
    n_jobs: int | None = None
    most_rows: int = 8

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        validation: tuple[Any, ...],
        key: PRNGKey | None = None,
        folder: Any = None,
        progress: bool = False,
        **refused: Any,
    ) -> "PrivateSearch":
        """Search, then fit the best estimator to the training records; return self.

        A validation row that the estimator rejects has the worst loss. If the estimator
        cannot be fitted at some parameters, all rows have the worst loss there.

        Args:
            X: Training inputs, not protected: an array, a sparse matrix or a data
                frame.
            y: Training targets, not protected.
            validation: `(X, y)` of the private records, of the types and columns of the
                training ones. With `(X, y, groups)`, the ids of the people that rows
                belong to, the guarantee protects a person, whose loss is the mean of
                those of the rows. A row without an id is left out.
            key: One typed key; by default a new one from the operating system.
            folder: Folder of the evaluations. An interrupted search continues with the
                same arguments and the same validation records in the same order. The
                folder holds losses and is SECRET until the search is done.
            progress: Whether to show a progress bar.
            **refused: No further argument: `random_state` raises with the reason.

        Returns:
            The fitted search.

        Raises:
            TypeError: The estimator, the space, the budget, the losses or the key has
                another type.
            ValueError: A parameter is unknown, numbers of rows or columns differ,
                `folder` is given with `training` or holds another search, the estimator
                fails in the middle of the space, or losses depend on other rows.

        Warns:
            UserWarning: As `minimize`; or training records give no scale of the losses
                for the default solver.
        """
        refuse("PrivateSearch.fit", refused)
        key = root_key() if key is None else check_key(key)
        self._check()
        validation, people = self._by_person(validation)
        if people is not None and self.training is not None:
            raise ValueError(
                "PrivateSearch.fit: training= is declared for records, so validation "
                "takes no ids of people. Leave one of them out."
            )
        check_validation(X, y, validation)
        rows, space = self._rows(X, y), Space(self.space)
        if self.training is None:
            for middle in space.middles():
                rows.check_row_independence(middle)
        else:
            check_fits(self.training, count(X), folder)
            rows.quiet = True
        solver = self.solver
        if solver is None:
            starts = [space.position(v) for v in (*self.starts, self._own_parameters())]
            starts = np.stack(starts)
            solver = default_solver(space, self.budget, rows, starts, self.n_jobs)
        losses = rows.black_box(*validation, people=people)
        records = "" if folder is None else self._identity(X, y, (*validation, people))
        evaluates = f"{type(self.estimator).__name__} in {self.space}"
        trains = self.training, 1  # 1 for `best_estimator_`
        size = count(validation[0]) if people is None else len(people.present)
        known = size, Box(-1.0, 1.0), records, evaluates
        unit = None if people is None else PersonUnit(self.most_rows)
        problem = BlackBox(losses, *known, *trains, unit=unit)
        owner, start = "PrivateSearch.fit", np.zeros(space.coordinates)
        if progress:
            check_installed(f"{owner}: progress=True", "tqdm")
        options: Any = {"key": key, "budget": self.budget, "folder": folder}
        search = AskTell(problem, solver, start, owner=owner, **options)
        evaluate = evaluations(losses, self.n_jobs)
        result = run_search(search, solver.num_steps, evaluate, progress)
        self.best_params_ = self.parameters(result.value)
        self.trajectory_ = result.trajectory
        self.report_ = result.report
        self.best_estimator_ = rows.fit(result.value)
        return self

    def _by_person(self, validation: Any) -> tuple[Any, PersonRows | None]:
        """Return validation data without ids, and row numbers by person or `None`."""
        if not isinstance(validation, tuple | list) or len(validation) != 3:
            return validation, None
        X, y, groups = validation
        places = np.arange(count(X))
        owner, most = "PrivateSearch.fit", self.most_rows
        return (X, y), by_person(places, groups, most_rows=most, name=owner)

    def parameters(self, point: Float[np.ndarray, " d"]) -> dict[str, Any]:
        """Return a dict of the parameters at a point whose conditions hold.

        Args:
            point: Coordinates in [-1, 1], in the order of the space.
        """
        return Space(self.space).parameters(point)

    def predict(self, X: Any) -> Any:
        """Return `best_estimator_.predict(X)`.

        Args:
            X: Inputs.
        """
        return self._best.predict(X)

    @available_if(_has("predict_proba"))
    def predict_proba(self, X: Any) -> Any:
        """Return `best_estimator_.predict_proba(X)`; absent if it has none.

        Args:
            X: Inputs.
        """
        return self._best.predict_proba(X)

    @available_if(_has("decision_function"))
    def decision_function(self, X: Any) -> Any:
        """Return `best_estimator_.decision_function(X)`; absent if it has none.

        Args:
            X: Inputs.
        """
        return self._best.decision_function(X)

    @property
    def classes_(self) -> Any:
        """Classes of `best_estimator_`, if it has any."""
        return self._best.classes_

    def score(self, X: Any, y: Any) -> float:
        """Return `best_estimator_.score(X, y)`, a release if records are private.

        Args:
            X: Inputs. A score on the private records is a release that the ledger does
                not count.
            y: Targets.
        """
        return self._best.score(X, y)

    @property
    def _best(self) -> Any:
        check_is_fitted(self)
        return self.best_estimator_

    def _own_parameters(self) -> dict[str, Any]:
        """Return a dict of the estimator's own values that are in their ranges."""
        known = self.estimator.get_params()
        return {
            name: known[name]
            for name, entry in self.space.items()
            if isinstance(entry, Range) and name in known and known[name] in entry
        }

    def _identity(self, X: Any, y: Any, validation: tuple[Any, ...]) -> str:
        """Return a hash of all inputs of an evaluation, rows in their order; SECRET."""
        try:
            private = joblib.hash(tuple(validation))
        except Exception:
            raise TypeError(
                "PrivateSearch.fit: folder= needs arrays or data frames as validation."
            ) from None
        public = X, y, self.space, self.estimator, self.losses
        return str(joblib.hash((private, *(_hash_or_name(v) for v in public))))

    def _rows(self, X: Any, y: Any) -> RowLosses:
        losses, bound = self.losses, None
        if losses is None:
            losses, bound = default_losses(self.estimator, y)
        return RowLosses(self._make, X, y, losses, bound)

    def _make(self, point: Float[np.ndarray, " d"]) -> Any:
        """Return an unfitted clone of the estimator, with the parameters at a point."""
        estimator = cast(BaseEstimator, clone(self.estimator))
        parameters = self.parameters(point).items()
        values = {name: clone(v, safe=False) for name, v in parameters}
        return estimator.set_params(**values)

    def _check(self) -> None:
        _checks.instance("PrivateSearch", PrivacyBudget, budget=self.budget)
        _checks.instance("PrivateSearch", dict, space=self.space)
        if not self.space:
            raise ValueError("PrivateSearch: space names no parameter.")
        estimator = self.estimator
        if isinstance(estimator, type) or not hasattr(estimator, "get_params"):
            raise TypeError(
                "PrivateSearch: estimator must be an instance such as Ridge(), got "
                f"{_checks.shown(estimator)}."
            )
        if self.losses is not None:
            _checks.function("PrivateSearch", losses=self.losses)
        if self.training is not None:
            check_search(self.training, estimator, self.solver, self.losses)
        n_jobs = self.n_jobs
        whole = isinstance(n_jobs, int | np.integer) and not isinstance(n_jobs, bool)
        if n_jobs is not None and not (whole and (n_jobs > 0 or n_jobs == -1)):
            raise ValueError(
                "PrivateSearch: n_jobs must be positive, -1 or None, got "
                f"{_checks.shown(n_jobs)}."
            )
        space = Space(self.space)
        for start in self.starts:
            space.position(start)
        if space.categories and isinstance(self.solver, GradientInformativeBO):
            raise ValueError(
                "PrivateSearch: GradientInformativeBO takes no category; change "
                "solver=."
            )
        for name in space.names:  # scikit-learn refuses unknown names
            self._make(space.within(name))


def _hash_or_name(value):
    try:
        return joblib.hash(value)
    except Exception:
        return getattr(value, "__qualname__", type(value).__qualname__)
