"""Accuracy of the released model on a file of other people: `[data.test]`."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..core.plan import least_multiplier
from ..core.shares import Usability
from ..privacy.keys import PRNGKey
from ..privacy.ledger import Ledger
from ..privacy.mechanisms import Gaussian
from ..privacy.queries import RECORDS, Query
from ..privacy.records.people import PersonUnit
from ..privacy.releases import Release
from ..privacy.sampling.base import FullBatch
from .columns import Label, Records
from .config import Config
from .data import mean_of, values

_HALF = 0.5  # scores are in [0, 1]: minus one half, they are at most this large
_LEFT_OUT = "a label that the config does not list, or text in the place of a number"
_NO_BETTER = (
    "; no better than that answer: the cells of a file may differ from the config "
    "(decimal commas, other units, other labels; "
    "docs/errors.md#no-better-than-that-answer)"
)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Accuracy or error of the released model on the test file.

    `trivial` is the value of the metric for the best constant answer: the larger class
    or the public mean. For a counted accuracy it is the released fraction of the most
    frequent class among the other records. It is `None` if it is not known.
    """

    metric: str  # its name
    value: float | None  # `None` if all records are left out
    file: str
    kind: str  # "public", "counted" or "non_private"
    records: int  # number that was read
    left_out: int | None = None  # unlisted label or no number; `None` if private
    trivial: float | None = None
    noise_std: float = 0.0  # of the value

    def __str__(self) -> str:
        """Return one line, the result and what protects the people of the file."""
        value = "no record to test on" if self.value is None else f"{self.value:.4g}"
        text = f"test {self.metric}: {value}{self._spread()}"
        if self.trivial is not None:
            about, digits = ("about ", 2) if self.kind == "counted" else ("", 4)
            trivial = f"{about}{self.trivial:.{digits}g}"
            text += f" (of the best constant answer: {trivial})"
        if self.kind == "counted":
            text += f" on {self.records} people of {self.file}, counted in the ledger"
        elif self.kind == "public":
            text += f" on {self.records} public records of {self.file}"
        else:
            text = f"NON-PRIVATE {text} on {self.records} records of {self.file}"
            text += ", whose people are not protected"
        if self.left_out:
            text += f"; {self.left_out} left out: {_LEFT_OUT}"
        if self.value is not None and self.trivial is not None:
            sign = 1 if self.metric == "accuracy" else -1  # small errors are better
            text += _NO_BETTER if sign * self.value <= sign * self.trivial else ""
        return text

    def beside(self, usability: Usability | None) -> Self:
        """Return a copy with the released constant accuracy, if it has none yet.

        Privacy:
            Post-processing of the check of the records. The share of the larger class
            in a counted test file itself stays private.
        """
        if usability is None or self.trivial is not None or self.metric != "accuracy":
            return self
        # The model is for the validation records if there are two levels.
        shares = {r: level.constant_accuracy for r, level in usability.levels.items()}
        roles = (RECORDS, "upper", "lower")
        found = next((shares[r] for r in roles if r in shares), None)
        return dataclasses.replace(self, trivial=found)

    def _spread(self) -> str:
        """Return text on one standard deviation of noise and sample, or no text."""
        if self.value is None:
            return ""
        parts = [f"noise {self.noise_std:.2g}"] if self.noise_std else []
        sample = 0.0  # unknown for an error
        if self.metric == "accuracy":
            people = self.records - (self.left_out or 0)
            sample = math.sqrt(self.value * (1 - self.value) / people)
            parts.append(f"sample {sample:.2g}")
        if not parts:
            return ""
        total = math.hypot(self.noise_std, sample)
        return f" +- {total:.2g} (one standard deviation: {', '.join(parts)})"


def ledger_of(config: Config) -> Ledger:
    """Return the ledger of a counted accuracy: one release with the least noise."""
    return Ledger((_release(config),))


def evaluate(
    config: Config, model: np.ndarray, records: Records, *, key: PRNGKey
) -> Evaluation:
    """Return the `Evaluation` of a linear model on test records, noisy if counted.

    The key is for this release alone.

    Privacy:
        Exact if `[data.test]` says that the records are public, or NON-PRIVATE;
        otherwise `noisy_score`.
    """
    held_out, label = config.data.test, config.data.label
    assert held_out is not None
    of = f"log1p({label.column})" if label.transform == "log1p" else label.column
    error = f"root mean squared error of {of}"
    unit = config.privacy.unit
    people = records.tree(unit)
    fields: dict[str, Any] = {
        "metric": "accuracy" if label.of_classes else error,
        "file": Path(held_out.path).name,
        "kind": held_out.accuracy,
        "records": _checks.leading_axis("records", people),
    }
    if held_out.accuracy == "counted":
        mean = np.clip(float(noisy_score(config, model, people, key=key)), 0.0, 1.0)
        value, std = _metric(label, mean), _release(config).noise_std
        more = _metric(label, min(mean + std, 1.0)) - value
        return Evaluation(value=value, noise_std=more, **fields)
    coefficients = jnp.asarray(model, jnp.float32)
    scores = values(lambda row: _score(label, coefficients, row), records, unit)
    used = np.isfinite(scores)
    if not used.any():
        return Evaluation(value=None, left_out=len(scores), **fields)
    return Evaluation(
        value=_metric(label, float(np.mean(scores[used]))),
        left_out=int(np.sum(~used)),
        trivial=_metric(label, _trivial(label, records, unit, used)),
        **fields,
    )


def noisy_score(
    config: Config, model: PyTree, records: PyTree, *, key: PRNGKey
) -> Float[Array, ""]:
    """Release the test records' mean score, in [0, 1] but for its noise.

    There are as many records or people as the config says, with `features` and `label`.
    The key is for this release alone.

    Privacy:
        Makes the one release of `ledger_of`. A record without a listed label, or with
        a feature that is no number, counts as half right: their number stays private.
    """
    coefficients = jnp.asarray(model, jnp.float32)

    def centered(row: PyTree) -> Array:
        return _score(config.data.label, coefficients, row) - _HALF

    release, unit = _release(config), config.privacy.unit

    @jax.jit  # or every operation would be compiled alone
    def released(records, key):
        return release.apply({RECORDS: mean_of(centered, unit)}, records, key=key)

    return released(records, key) + _HALF


def _release(config: Config) -> Release:
    held_out, privacy = config.data.test, config.privacy
    assert held_out is not None
    size = held_out.records
    multiplier = least_multiplier(FullBatch(), 1, size, privacy.budget)
    noise = Gaussian(multiplier, privacy.neighbours, privacy.precision)
    return Release("test accuracy", 1, (Query(RECORDS, size, _HALF),), noise)


def _metric(label: Label, mean: float) -> float:
    """Return the accuracy or root mean squared error that a mean score stands for."""
    if label.scale is None:
        return float(mean)
    return 2 * label.clip * label.scale * math.sqrt(mean)  # times the range of labels


def _score(label: Label, model: PyTree, record: PyTree) -> Array:
    """Return a record's score in [0, 1]; NaN if a feature or the label is NaN.

    It is 1 if the class of the largest score is that of the label, else 0; for a
    numeric label the squared error, in units of the largest one.
    """
    margin, truth = record["features"] @ model, record["label"]
    if not label.of_classes:
        return ((jnp.clip(margin, -1.0, 1.0) - truth) / 2) ** 2
    if label.classes:
        right = jnp.argmax(margin, -1).astype(jnp.float32) == truth
        margin = jnp.sum(margin, -1)
    else:
        right = (margin >= 0) == (truth > 0)
    return jnp.where(jnp.isfinite(margin + truth), right.astype(jnp.float32), jnp.nan)


def _trivial(
    label: Label, records: Records, unit: PersonUnit | None, used: np.ndarray
) -> float:
    """Return the mean score if the answer is always the larger class or the mean."""

    def right(row: PyTree) -> Array:
        if not label.of_classes:
            return (row["label"] / 2) ** 2
        matches = [row["label"] == number for number in label.of_classes]
        return jnp.stack(matches, -1).astype(jnp.float32)

    scores = values(right, records, unit)[used]
    return float(np.max(np.mean(scores, axis=0, dtype=float)))
