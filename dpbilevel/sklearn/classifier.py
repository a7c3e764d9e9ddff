"""Private estimators of declared classes."""

import abc
import math
from typing import Any

import numpy as np
import scipy.special
from jaxtyping import Float, Int
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from .base import PrivateEstimator
from .declared import declared, index_of


class PrivateClassifier(ClassifierMixin, PrivateEstimator, abc.ABC):
    """A private estimator of declared classes.

    Attributes:
        classes_: The declared classes, sorted.
        constant_accuracy_: The released accuracy of the best constant answer.
    """

    classes: Any

    classes_: np.ndarray

    @property
    def constant_accuracy_(self) -> float:
        """Released fraction of the most frequent class; NaN if it was not released.

        It is the accuracy of the best constant answer on records like those of `fit`.
        """
        check_is_fitted(self, "records_check_")
        found = self.records_check_.constant_accuracy
        return math.nan if found is None else found

    def _read_labels(
        self, y: Any, table: Float[np.ndarray, "n d"], name: str = "y"
    ) -> Int[np.ndarray, " n"]:
        """Set the declared classes; return the number of each record's class.

        It is -1 for a label that is not declared.
        """
        column = self._column(y, table, name)
        example = 'classes=["no", "yes"]'
        self.classes_ = declared(self._owner, "classes", self.classes, example)
        return index_of(self._owner, "classes", self.classes_, column)

    @abc.abstractmethod
    def _scores(self, X: Any) -> Float[np.ndarray, "n k"]:
        """Return the scores of each row, one for each class."""

    def predict(self, X: Any) -> np.ndarray:
        """Return the class with the largest score, for each row.

        Args:
            X: Features, of shape `(n, d)`; not protected.
        """
        scores = self._scores(X)  # refuses an estimator that is not fitted
        return self.classes_[np.argmax(scores, axis=1)]

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n k"]:
        """Return the probabilities of the classes of each row, ordered as `classes_`.

        Args:
            X: Features, of shape `(n, d)`; not protected.
        """
        return scipy.special.softmax(self._scores(X), axis=1)

    def predict_log_proba(self, X: Any) -> Float[np.ndarray, "n k"]:
        """Return the logarithms of `predict_proba`'s probabilities.

        Args:
            X: Features, of shape `(n, d)`; not protected.
        """
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))
