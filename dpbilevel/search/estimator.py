"""Private hyperparameter search of scikit-learn estimators."""

import difflib
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .._extras import missing

try:
    import joblib
    from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.validation import check_is_fitted
except ImportError as error:
    raise ImportError(missing("dpbilevel.PrivateSearch", "sklearn")) from error

from .. import _checks
from ..core.seeds import Seedless, refuse
from ..privacy.budget import PrivacyBudget
from ..privacy.noise import PRNGKey, check_key, root_key
from ..sets import Box
from .base import AbstractAskTellSolver
from .declared import DeclaredTraining, check_fits, check_search
from .default_losses import default_losses
from .default_solver import default_solver
from .gibo import GradientInformativeBO
from .loop import searched
from .parallel import check_jobs, evaluations
from .problem import BlackBox
from .ranges import Categorical
from .ranges import Range as Range
from .row_losses import RowLosses, check_validation, count
from .space import Space


def _has(name: str) -> Callable[[Any], bool]:
    """Whether the estimator has a method, for `available_if`."""
    return lambda search: hasattr(
        getattr(search, "best_estimator_", search.estimator), name
    )


class PrivateSearch(Seedless, MetaEstimatorMixin, BaseEstimator):
    r"""Tunes an estimator on validation records, and returns a private answer.

    Every evaluation clones the estimator, sets the parameters, fits it to the training
    records and takes each validation record's loss. Only what the solver releases is
    published: the parameters that it visits.

    Args:
        estimator: A scikit-learn estimator.
        space: A `Range` or a `Categorical` per parameter, named as in `set_params`
            (`"svr__C": Range(0.1, 10, log=True)`). One whose condition (`when`) does
            not hold is left as the estimator has it.
        budget: The guarantee for the validation records, and with `training` for those
            that are trained on.
        solver: What searches: `GradientInformativeBO`, `RandomSearch`,
            `RepeatAndSelect` or `NoisyUCB`; its noise is replaced. It moves in
            $[-1, 1]^d$, the space scaled coordinate by coordinate, from its middle. The
            default:

            - With at most three coordinates, with whole numbers or categories, with 0-1
              losses, or with delta 0: `RandomSearch` among `30 + 10 d` points. Losses
              are clipped at their bound. Without a bound they are clipped at the 99 %
              quantile of the losses of training records, after one training on half of
              these (with categories one for each choice).
            - Otherwise: `GradientInformativeBO` with AdaGrad, a drawn start and 20
              steps. Losses are divided by the 95 % quantile of the norms of gradients
              of a training record's loss, found by 2d trainings on one half; gradients
              are clipped at 1.
            - From four coordinates on, half of the points of `RandomSearch`, or the 60
              starts of the descent, are chosen from six times as many uniform points.
              They are those with the least loss on one half of the training records,
              with the estimator fitted to the other half.

        starts: Likely parameters, dictionaries with values for some or all names of the
            space, in their ranges; the others are in the middle. The default has them,
            and the estimator's own parameters, among its points.
        losses: `losses(estimator, X, y)`, the loss of every row, shape `(n,)`, each
            from its own row alone. By default half the Brier score for classifiers with
            `predict_proba`, else 0-1 loss, both in [0, 1]; for regressors the squared
            error in units of the training targets' variance. Heavy tails mislead:
            what is clipped may have the best mean where the losses have the worst.
        training: Declared, for an estimator that trains privately: what one `fit`
            releases of the training records, at any point of the space, as a
            `dpbilevel.search.DeclaredTraining`. The budget then covers all fits, that
            of `best_estimator_` included. Nothing else may be learned from the
            training records: it needs `losses` and a `solver`, no `folder`, and no
            losses are tried on training rows first.
        n_jobs: How many processes evaluate the points of a step, -1 for one on each
            core; each evaluation then has one thread, so that the answer is the same
            for any number. With `None` points are evaluated one after another in this
            process, with as many threads as libraries take.

    Attributes:
        best_params_: The released parameters.
        best_estimator_: The estimator fitted to the training records with them.
        report_: The `PrivacyReport`.
        trajectory_: Released points in $[-1, 1]^d$, one a step, where the solver
            releases them.

    Raises:
        NotFittedError: Before `fit`, by all that `best_estimator_` answers.

    Privacy:
        The unit is one validation record, $n$ is public, and the relation is the
        solver's. The training records are NOT protected: parameters, and the fitted
        estimator above all, are functions of them; but where the estimator trains
        privately and `training` declares it, the guarantee covers them. No validation
        loss is shown, logged or kept; a score of the answer on the same records is
        another release. A record for which the estimator or the losses raise an error
        has the loss NaN; the search goes on, and the losses of other records do not
        change. Output and warnings about validation records are suppressed. Numbers
        that are refused, such as NaN, are found before any prediction; rows that are
        refused for another reason, such as a category that is not in the training
        records, need further predictions: time is unprotected. The loss of a record
        must not depend on other records. It does where a stray text turns all numbers
        of a column into texts, or where an estimator predicts rows together; a trial on
        training rows refuses such an estimator if the trial shows it.
    """

    def __init__(
        self,
        estimator: Any,
        space: dict[str, Range | Categorical],
        budget: PrivacyBudget,
        *,
        solver: AbstractAskTellSolver | None = None,
        losses: Callable[[Any, Any, Any], Float[np.ndarray, " n"]] | None = None,
        training: DeclaredTraining | None = None,
        starts: Sequence[dict[str, Any]] = (),
        n_jobs: int | None = None,
    ):
        self.estimator = estimator
        self.space = space
        self.budget = budget
        self.solver = solver
        self.losses = losses
        self.training = training
        self.starts = starts
        self.n_jobs = n_jobs

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        validation: tuple[Any, Any],
        key: PRNGKey | None = None,
        folder: Any = None,
        progress: bool = False,
        **refused: Any,
    ) -> "PrivateSearch":
        """Search, then fit the estimator to the training records.

        If the estimator refuses a validation row, that row counts for nothing. If it
        cannot be fitted at some parameters, all rows count for nothing.

        Args:
            X: Training inputs, not protected: an array, a sparse matrix or a data
                frame.
            y: Training targets, not protected.
            validation: `(X, y)` of the private records, of the kinds and columns of
                the training ones.
            key: One typed key; by default a new one of the operating system's.
            folder: Folder of the evaluations. A stopped search continues with the same
                arguments and the same validation records in the same order. The folder
                holds losses and is secret until the search is done.
            progress: Whether to show a progress bar.
            **refused: No further argument: `random_state` raises with the reason.

        Returns:
            The fitted search.

        Raises:
            TypeError: The estimator, the space, the budget, the losses or the key is of
                another kind.
            ValueError: An unknown parameter, rows of different numbers or columns, a
                folder with `training` or of another search, an estimator that fails
                in the middle of the space, or losses that depend on each other's rows,
                as tried on training records.

        Warns:
            UserWarning: As `search`; or training records do not give the default
                solver the unit of losses.
        """
        refuse("PrivateSearch.fit", refused)
        key = root_key() if key is None else check_key(key)
        self._check()
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
            starts = [space.position(v) for v in (*self.starts, self._own())]
            solver = default_solver(
                space, self.budget, rows, np.stack(starts), self.n_jobs
            )
        records = "" if folder is None else self._identity(X, y, validation)
        losses = rows.black_box(*validation)
        problem = BlackBox(
            losses,
            count(validation[0]),
            Box(-1.0, 1.0),
            records,
            f"{type(self.estimator).__name__} in {self.space}",
            training=self.training,
            trainings_after=1,  # `best_estimator_`
        )
        result = searched(
            problem,
            solver,
            jnp.zeros(space.coordinates),
            evaluations(losses, self.n_jobs),
            key=key,
            budget=self.budget,
            precision="grid",
            folder=folder,
            progress=progress,
            owner="PrivateSearch.fit",
        )
        self.best_params_ = self.parameters(result.value)
        self.trajectory_ = result.trajectory
        self.report_ = result.report
        self.best_estimator_ = rows.fit(result.value)
        return self

    def parameters(self, point: Float[np.ndarray, " d"]) -> dict[str, Any]:
        """The parameters at a point of the search, where their conditions hold.

        Args:
            point: Coordinates in [-1, 1], in the order of the space.
        """
        return Space(self.space).parameters(point)

    def predict(self, X: Any) -> Any:
        """The prediction of `best_estimator_`.

        Args:
            X: Inputs.
        """
        return self._best.predict(X)

    @available_if(_has("predict_proba"))
    def predict_proba(self, X: Any) -> Any:
        """The chances of the classes by `best_estimator_`, where it has them.

        Args:
            X: Inputs.
        """
        return self._best.predict_proba(X)

    @available_if(_has("decision_function"))
    def decision_function(self, X: Any) -> Any:
        """The decision function of `best_estimator_`, where it has one.

        Args:
            X: Inputs.
        """
        return self._best.decision_function(X)

    @property
    def classes_(self) -> Any:
        """The classes of `best_estimator_`, where it has any."""
        return self._best.classes_

    def score(self, X: Any, y: Any) -> float:
        """The estimator's own score of `best_estimator_` on other records.

        Args:
            X: Inputs; a score on the private records is a release that is not in the
                ledger.
            y: Targets.
        """
        return self._best.score(X, y)

    @property
    def _best(self) -> Any:
        check_is_fitted(self)
        return self.best_estimator_

    def position(self, parameters: dict[str, Any]) -> Float[np.ndarray, " d"]:
        """The point of the search at parameters; the converse of `parameters`.

        Args:
            parameters: Values in their ranges, by name; others are in the middle.

        Raises:
            ValueError: A name is not in the space, or a value outside of its range.
        """
        return Space(self.space).position(parameters)

    def _own(self) -> dict[str, Any]:
        """The estimator's parameters that are in their ranges."""
        known = self.estimator.get_params()
        return {
            name: known[name]
            for name, entry in self.space.items()
            if isinstance(entry, Range) and name in known and known[name] in entry
        }

    def _identity(self, X: Any, y: Any, validation: tuple[Any, Any]) -> str:
        """Tells all that an evaluation reads from others; SECRET.

        Losses of rows in another order, as by a new split, must not join old ones.
        """
        try:
            private = joblib.hash(tuple(validation))
        except Exception:
            raise TypeError(
                "PrivateSearch.fit: folder= compares the validation records when an "
                "interrupted search goes on, and they cannot be pickled; give arrays "
                "or data frames."
            ) from None
        public = X, y, self.space, self.estimator, self.losses
        return str(joblib.hash((private, *(_hash_or_name(v) for v in public))))

    def _rows(self, X: Any, y: Any) -> RowLosses:
        losses, largest = self.losses, None
        if losses is None:
            losses, largest = default_losses(self.estimator, y)
        middle = Space(self.space).middle
        return RowLosses(self._make, X, y, losses, middle, largest)

    def _make(self, point: Float[np.ndarray, " d"]) -> Any:
        """The estimator with the parameters at a point, not fitted."""
        return self._with(self.parameters(point))

    def _with(self, parameters: dict[str, Any]) -> Any:
        """The estimator with some parameters; a choice is not fitted in place."""
        estimator = cast(BaseEstimator, clone(self.estimator))
        return estimator.set_params(
            **{name: clone(v, safe=False) for name, v in parameters.items()}
        )

    def _check(self) -> None:
        _checks.instance("PrivateSearch", PrivacyBudget, budget=self.budget)
        _checks.instance("PrivateSearch", dict, space=self.space)
        if not self.space:
            raise ValueError("PrivateSearch: space names no parameter.")
        estimator = self.estimator
        if isinstance(estimator, type) or not hasattr(estimator, "get_params"):
            raise TypeError(
                "PrivateSearch: estimator must be a scikit-learn estimator such as "
                f"Ridge(), an instance, got {_checks.shown(estimator)}."
            )
        if self.losses is not None and not callable(self.losses):
            raise TypeError(
                "PrivateSearch: losses must be a function of (estimator, X, y) that "
                f"returns every row's loss, got {_checks.shown(self.losses)}."
            )
        if self.training is not None:
            check_search(self.training, estimator, self.solver, self.losses)
        check_jobs("PrivateSearch", self.n_jobs)
        space = Space(self.space)
        for start in self.starts:
            space.position(start)
        if space.categories and isinstance(self.solver, GradientInformativeBO):
            raise ValueError(
                "PrivateSearch: GradientInformativeBO follows slopes, which "
                f"{space.categories[0]!r} has none of; give no solver, "
                "RandomSearch(...) or RepeatAndSelect(...). Or search the parameters "
                "of each choice by itself, each search with a budget of its own."
            )
        for name in space.names:
            self._check_known(name, space)

    def _check_known(self, name: str, space: Space) -> None:
        """Raises where the estimator has no such parameter, with the categories set."""
        parameters = space.parameters(space.within(name))
        others = [v for v in parameters if v != name and v in space.categories]
        known = self._with({v: parameters[v] for v in others}).get_params()
        if name in known:
            return
        likely = [k for k in known if k.endswith(f"__{name}")]
        likely = likely or difflib.get_close_matches(name, known, 3)
        hint = f"did you mean {' or '.join(map(repr, likely))}? " * bool(likely)
        raise ValueError(
            f"PrivateSearch: {type(self.estimator).__name__} has no parameter "
            f"{name!r}; {hint}It has {sorted(known)}."
        )


def _hash_or_name(value):
    """A hash, or a name where there is none, as of a function defined in a session."""
    try:
        return joblib.hash(value)
    except Exception:
        return getattr(value, "__qualname__", type(value).__qualname__)
