"""A linear classifier for the group that is worst off."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from typing_extensions import override

from .. import _checks
from ..games.group_descent import GroupDescent
from ..games.groups import GroupGame, group_fair, group_start, group_weights
from ..privacy.keys import PRNGKey
from .beforehand import with_nan
from .declared import declared, index_of
from .linear import LinearClassifier, plan_of

EXAMPLE = 'shares={"women": 0.5, "men": 0.5}'


@dataclasses.dataclass(eq=False, repr=False)
class FairClassifier(LinearClassifier):
    r"""A linear classifier that minimizes the loss of the group that is worst off.

    The problem is `games.group_fair`, the solver `games.GroupDescent`: weights of the
    groups rise if the loss is large, and the model follows them.

    Args:
        epsilon: $\varepsilon$.
        delta: $\delta$, well below one over the number of records.
        classes: Declared: every label that a record may have.
        shares: Declared: the groups, each with its fraction of the records, of sum at
            most 1; from a census or a sampling plan. A wrong fraction multiplies the
            loss of its group by the true over the declared one.
        bounds: Declared: `(lower, upper)`, numbers or one for each feature.
        data_norm: Declared instead of bounds: the largest length of a row.
        fit_intercept: Whether to fit a constant, too.
        radius: The radius of the ball of models about the origin, in units of the rows.
        max_iter: The number of steps.
        neighbours: `"replace_one"`, or `"add_or_remove_one"` with `size`.
        size: A public number of records to plan for, if their number is private.
        check_records: Whether to release the fraction of usable records, for a
            hundredth of the squared budget; see docs/estimators.md.

    Attributes:
        coef_: Of shape `(1, d)` for two classes, else `(k, d)`.
        intercept_: Of shape `(1,)` or `(k,)`.
        classes_: The declared classes, sorted.
        groups_: The declared groups, sorted.
        group_weights_: The released weights of the groups, of sum 1. The group that is
            worst off has the largest weight, if that is worth its noise.
        n_iter_: The number of steps.
        records_usable_: The released fraction of records that can be used.
        records_check_: All released values of the check, column by column.
        row_length_: The released length of rows, as in `DPLogisticRegression`.
        constant_accuracy_: The released accuracy of the best constant answer.
        privacy_report_: The `PrivacyReport`.
        n_features_in_: $d$.
        feature_names_in_: The names of the columns, if X has any.

    Privacy:
        `max_iter` releases of gradient and losses, enforced by clipping, after the
        fractions of rows by length (a fiftieth of the squared budget). Under
        replace-one the number of records is public; so is whatever was declared. The
        group of a record is part of it and protected. A record with a missing number,
        or a label or group that was not declared, is ignored without a message, because
        an error would reveal it.
    """

    _: dataclasses.KW_ONLY
    classes: Any = None
    shares: Any = None
    fit_intercept: bool = True
    radius: float = 20.0
    max_iter: int = 200
    neighbours: str = "replace_one"
    size: int | None = None

    def fit(
        self,
        X: Any,
        y: Any,
        groups: Any = None,
        *,
        person: Any = None,
        key: PRNGKey | None = None,
        **refused: Any,
    ) -> Self:
        """Fit the model: plan without records, then run the plan once.

        Args:
            X: Features, of shape `(n, d)`.
            y: Labels.
            groups: The group of each row.
            person: The id of the person of each row, if people have several rows, as
                `groups` of `DPLogisticRegression`. Their rows may be of several groups.
            key: One typed key; by default a new one from the operating system.
            **refused: No further argument is accepted; `sample_weight` and
                `random_state` raise a `TypeError` with the reason.

        Returns:
            The fitted estimator.

        Raises:
            TypeError: A key that is not typed, sparse features, other arguments.
            ValueError: Something is not declared, or shapes do not fit.
        """
        entry = self._entry(X, key, refused, person, "person")
        return self._fit(entry, y, groups)

    @override
    def _fit(self, entry, y, groups=None):
        units, public, table = entry.units, entry.public, entry.table
        if groups is None:
            raise ValueError(f"{self._owner}.fit: give groups=, one for each record.")
        labels = self._read_labels(y, table)
        if not isinstance(self.shares, Mapping):
            what = f"declare shares= from public knowledge, such as {EXAMPLE}."
            raise ValueError(f"{self._owner}: {what}")
        names = [*self.shares]
        self.groups_ = declared(self._owner, "the groups of shares", names, EXAMPLE)
        shares = tuple(float(self.shares[name]) for name in self.groups_.tolist())
        _checks.positive(self._owner, radius=self.radius)
        _checks.count(self._owner, max_iter=self.max_iter)
        rows = units.rows(table)
        records = self._records(rows, labels)
        group = index_of(
            self._owner, "shares", self.groups_, self._column(groups, table, "groups")
        )
        usable = with_nan(rows, (labels >= 0) & (group >= 0))
        records["group"] = group
        beside = {"y": labels < 0, "groups": group < 0}
        place = "groups", self.groups_, group
        lengths, check = self._planned(entry, usable, beside, labels, place)
        game = _game_of(self._loss, shares, float(self.radius), len(self.classes_))
        game = public.problem(game)
        w0 = group_start(game, self._start(), shares)
        solver = GroupDescent(num_steps=int(self.max_iter))
        solver = solver.with_neighbours(public.relation)
        shapes = tuple(v.shape for v in w0)
        before = (*check[0].releases, *lengths.releases)
        plan = plan_of(game, solver, entry.budget, public.size, shapes, before)
        run = entry, game, plan, entry.records(records), w0, check, lengths
        (model, weights), _ = self._run_plan(*run)
        self.group_weights_ = np.asarray(group_weights(game, weights))
        self.n_iter_ = solver.num_steps
        self._keep(model, lengths.frame(units, self._unit))
        return self


@functools.lru_cache(maxsize=64)
def _game_of(
    loss: Any, shares: tuple[float, ...], radius: float, classes: int
) -> GroupGame:
    """Return the `GroupGame` of a loss, cached so that it is compiled once.

    Its steps are for the curvature of rows at the unit. The second derivative of a
    logistic loss is at most 1/4 of the squared length of a row, that of a softmax at
    most 1/2.
    """
    game = group_fair(loss, shares, radius=radius)
    smoothness = 0.25 if classes == 2 else 0.5
    most = 2 * math.log(classes)  # twice the loss of no model
    return dataclasses.replace(game, smoothness=smoothness, loss_bound=most)
