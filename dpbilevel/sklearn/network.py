"""A network for classification, trained by DP-SGD."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from sklearn.utils.validation import check_is_fitted
from typing_extensions import override

from .. import _checks
from ..core.outputs import TailMean
from ..core.plan import least_multiplier
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import FiniteSum
from ..privacy.budget import PrivacyBudget
from ..privacy.keys import PRNGKey
from ..privacy.ledger import AbstractRelease
from ..privacy.per_example.structure import rowwise
from ..privacy.records.people import on_rows
from ..privacy.sampling.base import FullBatch, Poisson
from .base import compiled_run
from .beforehand import PublicSize, with_nan
from .declared import weights_of
from .linear import PrivateClassifier, plan_of

_cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels
_adam = functools.lru_cache(maxsize=64)(optax.adam)  # one program for each step size
Layers = tuple[tuple[Float[Array, "p q"], Float[Array, " q"]], ...]
# Functions of the module of arrays: NumPy predicts without a program for each shape.
_ACTIVATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "relu": lambda module, v: module.maximum(v, 0),
    "tanh": lambda module, v: module.tanh(v),
    "identity": lambda module, v: v,
}
# Batch size; fewer records are all in one batch.
_BATCH = 2048
# Length of a typical row. Longer rows learn faster, from noise too.
_INPUT = 3.0
PART = 0.2  # of the squared budget, for the recalibration
_STEPS, _CLIP_NORM, _LONGEST_STEP = 50, 1.8, 4.0
_RIDGE = 4.0  # times the squared noise of one release and the number of classes
_WALK = 1.0  # about the largest distance that noise moves a coordinate
# Largest length of the scores of a record, and the unit of the slope.
_LENGTH = 4.0
_SLOPES = 0.0, 1.0  # a slope above 1 would follow what the training has overfitted


@dataclasses.dataclass(eq=False, repr=False)
class DPMLPClassifier(PrivateClassifier):
    r"""A network of dense layers with a softmax, trained by DP-SGD.

    After the training one slope of all scores and a constant for each class are fitted,
    so that probabilities are not too close to 0 and 1.

    Args:
        epsilon: $\varepsilon$.
        delta: $\delta$, well below one over the number of records.
        classes: Declared: every label that a record may have.
        bounds: Declared: `(lower, upper)`, numbers or one for each feature.
        data_norm: Declared instead of bounds: the largest length of a row.
        hidden_layer_sizes: The widths of the hidden layers.
        activation: `"relu"`, `"tanh"` or `"identity"`.
        max_iter: The number of steps, each of one batch.
        batch_size: The expected number of records of a batch, which is drawn by
            `Poisson`; all of them if there are no more. `"auto"`: 2048.
        learning_rate_init: The step size of Adam, which is fed with noisy gradients.
        clip_norm: The bound on one record's gradient.
        class_weight: A dict of public weights of the classes, as in
            `DPLogisticRegression`.
        neighbours: `"replace_one"`, or `"add_or_remove_one"` with `size`.
        size: A public number of records to plan for, if their number is private.
        check_records: Whether to release the fraction of usable records, for a
            hundredth of the squared budget; see docs/estimators.md.

    Attributes:
        coefs_: The matrices of the layers.
        intercepts_: Their constants.
        classes_: The declared classes, sorted.
        n_iter_: The number of steps.
        n_layers_: The number of layers, those of features and classes included.
        records_usable_: The released fraction of records that can be used.
        records_check_: All released values of the check, column by column.
        row_length_: The released length of rows, as in `DPLogisticRegression`.
        constant_accuracy_: The released accuracy of the best constant answer.
        privacy_report_: The `PrivacyReport`.
        n_features_in_: $d$.
        feature_names_in_: The names of the columns, if X has any.

    Privacy:
        The check of the records (a hundredth of the squared budget), the fractions of
        rows by length (a fiftieth), `max_iter` noisy gradients, each clipped record by
        record, and a fit of one slope and of constants of the scores (a fifth). Under
        replace-one the number of records is public; so are the declared facts.
        Parameters start at random numbers of the key. A record with a missing number,
        or a label that was not declared, is ignored without a message, because an error
        would reveal it.
    """

    _: dataclasses.KW_ONLY
    classes: Any = None
    hidden_layer_sizes: Sequence[int] = (64,)
    activation: str = "relu"
    max_iter: int = 100
    batch_size: int | str = "auto"
    learning_rate_init: float = 0.04
    clip_norm: float = 4.0
    class_weight: Any = None
    neighbours: str = "replace_one"
    size: int | None = None

    @override
    def _fit(self, entry, y):
        units, public, budget = entry.units, entry.public, entry.budget
        labels = self._read_labels(y, entry.table)
        widths = self._widths()
        weights = weights_of(self._owner, self.classes_, self.class_weight)
        usable = with_nan(units.rows(entry.table), labels >= 0)
        recalibration = Recalibration.plan(budget, public, widths[-1])
        records = {"features": _INPUT * usable, "label": np.maximum(labels, 0)}
        if weights is not None:
            records["weight"] = weights.astype(usable.dtype)[records["label"]]
        lengths, check = self._planned(entry, usable, {"y": labels < 0}, labels)
        first, then, last = jax.random.split(entry.key, 3)
        start = initial(widths, key=first)
        shapes = tuple(v.shape for v in jax.tree.leaves(start))
        problem = public.problem(FiniteSum(_loss_of(self.activation)))
        solver = self._solver(public.size).with_neighbours(public.relation)
        before = (*check[0].releases, *lengths.releases, *recalibration.releases)
        plan = plan_of(problem, solver, budget, public.size, shapes, before)
        entry, records = dataclasses.replace(entry, key=then), entry.records(records)
        run = entry, problem, plan, records, start, check, lengths
        layers, records = self._run_plan(*run)

        def with_scores(rows: Any) -> Any:
            features = rows["features"]
            flat = features.reshape(-1, features.shape[-1])
            found = np.asarray(_all_scores(self.activation, layers, flat))
            found = found.reshape(*features.shape[:-1], -1)
            beside = {k: v for k, v in rows.items() if k != "features"}
            return beside | {"scores": found}

        slope, shifts = recalibration.fit(on_rows(with_scores, records), key=last)
        scale = lengths.frame(units, self._unit).scale[:, None]
        self.coefs_ = [weights for weights, _ in layers]
        self.intercepts_ = [constants for _, constants in layers]
        self.coefs_[-1] = slope * self.coefs_[-1]
        self.intercepts_[-1] = slope * self.intercepts_[-1] + shifts
        self.coefs_[0] = _INPUT / scale * self.coefs_[0]
        self.intercepts_[0] = self.intercepts_[0] - units.center @ self.coefs_[0]
        self.n_iter_, self.n_layers_ = int(self.max_iter), len(widths)
        return self

    def _widths(self) -> tuple[int, ...]:
        """Return the widths of the layers, features and classes included."""
        hidden = self.hidden_layer_sizes
        hidden = tuple(np.atleast_1d(np.asarray(hidden, object)).tolist())
        for width in hidden:
            _checks.count(self._owner, hidden_layer_sizes=width)
        _checks.one_of(self._owner, "activation", self.activation, tuple(_ACTIVATIONS))
        return (self.n_features_in_, *map(int, hidden), len(self.classes_))

    def _solver(self, size: int) -> NoisyGD:
        owner = self._owner
        _checks.count(owner, max_iter=self.max_iter)
        _checks.positive(
            owner, learning_rate_init=self.learning_rate_init, clip_norm=self.clip_norm
        )
        batch: Any = _BATCH if self.batch_size == "auto" else self.batch_size
        _checks.count(owner, batch_size=batch)
        sampling = Poisson(batch / size) if batch < size else FullBatch()
        return NoisyGD(
            int(self.max_iter),
            float(self.clip_norm),
            _adam(float(self.learning_rate_init)),
            sampling=sampling,
            output=TailMean(),
        )

    @override
    def _scores(self, X: Any) -> Float[np.ndarray, "n k"]:
        check_is_fitted(self)
        layers = [*zip(self.coefs_, self.intercepts_, strict=True)]
        return scores(self.activation, layers, self._test_rows(X), np)


def initial(widths: tuple[int, ...], *, key: PRNGKey) -> Layers:
    """Draw layers: weights of variance 2 over the input width, and zero constants."""
    keys = jax.random.split(key, len(widths) - 1)
    return tuple(
        (math.sqrt(2 / p) * jax.random.normal(k, (p, q)), jnp.zeros(q))
        for k, p, q in zip(keys, widths[:-1], widths[1:], strict=True)
    )


def scores(activation: str, layers: Any, rows: Any, module: Any = jnp) -> Any:
    """Return the scores of the classes for one row of features, or several.

    The layers are matrices and constants; the module is `numpy` for arrays of the host.
    """
    for weights, constants in layers[:-1]:
        rows = _ACTIVATIONS[activation](module, rows @ weights + constants)
    weights, constants = layers[-1]
    return rows @ weights + constants


@functools.partial(jax.jit, static_argnums=0)
def _all_scores(activation: str, layers: Layers, rows: Float[Array, "n d"]) -> Any:
    """Return the class scores of rows, each computed from its own row alone."""
    of_row = functools.partial(scores, activation, layers)
    return jax.vmap(rowwise("DPMLPClassifier.fit", of_row))(rows)


@functools.lru_cache(maxsize=8)
def _loss_of(activation: str) -> Any:
    """Return the loss function of a record, cached so that it is compiled once."""

    def loss(layers: Layers, record: Any) -> Float[Array, ""]:
        found = scores(activation, layers, record["features"])
        return record.get("weight", 1.0) * _cross_entropy(found, record["label"])

    return loss


def _loss(model: Any, record: Any) -> Float[Array, ""]:
    slope, constants = model
    found = _cross_entropy(slope * record["scores"] + constants, record["label"])
    return record.get("weight", 1.0) * found


@functools.lru_cache(maxsize=64)
def _problem(ridge: float) -> FiniteSum:
    """Return the recalibration's `FiniteSum` with a ridge; cached, to compile once."""

    def penalty(model):
        return ridge * optax.tree.norm(model, squared=True)

    return FiniteSum(_loss, public=penalty)


@dataclasses.dataclass(frozen=True)
class Recalibration:
    """Private correction of probabilities: a planned slope and constants of the scores.

    A network that is trained with noisy gradients takes noise for signal, and its
    probabilities are too close to 0 and 1. After the training, one slope for all scores
    and a constant for each class are fitted by noisy descent, for a fifth of the
    squared budget. The descent starts at a slope of 0 and has a ridge that grows with
    its noise: if there are too few records, the answer is nearly constant.
    """

    problem: FiniteSum  # with its ridge
    solver: NoisyGD  # with its noise and sizes
    releases: tuple[AbstractRelease, ...]  # for `calibrate(before=)`
    classes: int  # their number

    @classmethod
    def plan(
        cls, budget: PrivacyBudget, public: PublicSize, classes: int
    ) -> "Recalibration":
        """Return a `Recalibration` for a fifth of the squared budget of a whole fit."""
        multiplier = least_multiplier(FullBatch(), 1, 1, budget)
        multiplier *= math.sqrt(_STEPS / PART)
        solver = NoisyGD(
            _STEPS,
            _CLIP_NORM,
            _LONGEST_STEP,
            output=TailMean(),
            noise_multiplier=multiplier,
            neighbours=public.relation,
        ).with_sizes(public.size)
        release = solver.release(FiniteSum(_loss), public.size)
        noise: Any = release.noise_std / math.sqrt(_STEPS)  # of one release alone
        ridge = _RIDGE * noise**2 * classes
        longest = 1 / (1 / _LONGEST_STEP + 2 * ridge)
        step = min(longest, _WALK / (_STEPS * noise))
        solver = dataclasses.replace(solver, step_size=step)
        charged = dataclasses.replace(release, name="recalibration", count=_STEPS)
        return cls(public.problem(_problem(ridge)), solver, (charged,), classes)

    def fit(
        self, records: Any, *, key: PRNGKey
    ) -> tuple[float, Float[np.ndarray, " k"]]:
        """Release the slope of the scores, from 0 to 1, and a constant for each class.

        Records are `{"scores": scores, "label": numbers}` in the planned number: the
        scores of a released model, NaN for rows that do not count, and the classes.
        They may have weights. The key is for this run alone.

        Privacy:
            One run of `solver`.
        """

        def shortened(rows: Any) -> Any:
            scores = rows["scores"]
            with np.errstate(all="ignore"):  # a warning would reveal a record
                centred = scores - scores.mean(axis=-1, keepdims=True)
                length = np.linalg.norm(centred, axis=-1, keepdims=True)
                return rows | {"scores": centred / np.maximum(length, _LENGTH)}

        records = on_rows(shortened, records)
        w0 = jnp.zeros(()), jnp.zeros(self.classes)
        run = compiled_run(self.problem, self.solver, records, w0, key=key)
        slope, constants = run.value
        least, most = _SLOPES
        return min(max(float(slope) / _LENGTH, least), most), np.asarray(constants)
