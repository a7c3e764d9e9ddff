"""Estimators that are given public facts about the records of scikit-learn's checks.

Those records are generated, so that their classes and bounds are nobody's secret. The
checks call `fit(X, y)` alone; an estimator of the library refuses to read such facts
from the records.
"""

import numpy as np

import dpbilevel as dpb
from dpbilevel.sklearn import (
    DPLogisticRegression,
    DPMLPClassifier,
    DPRidge,
    DPSourceReweighting,
    FairClassifier,
)


def bounds_of(table):
    """Bounds of each column, or some where there are none."""
    try:
        if np.iscomplexobj(table):
            return -1.0, 1.0
        table = np.asarray(table, float)
        if table.ndim == 2 and table.size and np.isfinite(table).all():
            return table.min(axis=0) - 0.1, table.max(axis=0) + 0.1
    except (TypeError, ValueError):
        pass
    return -1.0, 1.0


def classes_of(y):
    try:
        return np.unique(np.asarray(y))
    except TypeError:
        return [0, 1]


def declared(kind, facts, more=lambda X, y: {}):
    """The estimator, told the facts about the records at every `fit`.

    Args:
        kind: The estimator's class.
        facts: Parameters from (X, y).
        more: Arguments of `fit` from (X, y).
    """

    class Declared(kind):
        def fit(self, X, y=None, *, key=None):
            estimator = kind(**self.get_params() | facts(X, y))
            estimator.fit(X, y, **more(X, y), key=key)
            learnt = {k: v for k, v in vars(estimator).items() if k.endswith("_")}
            vars(self).update(learnt)
            return self

    Declared.__name__ = Declared.__qualname__ = f"Declared{kind.__name__}"
    globals()[Declared.__name__] = Declared  # to be pickled
    return Declared


def facts_of_classes(X, y):
    return {"bounds": bounds_of(X), "classes": classes_of(y)}


def facts_of_numbers(X, y):
    low, high = bounds_of(np.reshape(y, (-1, 1)))
    return {
        "bounds": bounds_of(X),
        "target_bounds": (float(np.min(low)), float(np.max(high))),
    }


def halves(X, y):
    """Two groups or sources."""
    return np.arange(X.shape[0] if hasattr(X, "shape") else len(X)) % 2


# A public number of records, so that one program fits all tables of as many columns.
SIZE = {"epsilon": 100.0, "neighbours": "add_or_remove_one", "size": 300}
LOGISTIC = declared(DPLogisticRegression, facts_of_classes)(**SIZE)
RIDGE = declared(DPRidge, facts_of_numbers)(**SIZE)
NETWORK = declared(DPMLPClassifier, facts_of_classes)(
    **SIZE, hidden_layer_sizes=(8,), max_iter=50, learning_rate_init=0.1
)
FAIR = declared(
    FairClassifier,
    lambda X, y: facts_of_classes(X, y) | {"shares": {0: 0.5, 1: 0.5}},
    lambda X, y: {"groups": halves(X, y)},
)(**SIZE)
SOURCES = declared(
    DPSourceReweighting,
    lambda X, y: facts_of_classes(X, y) | {"sources": [0, 1]},
    lambda X, y: {"sources": halves(X, y), "clean": (X, y)},
)(
    epsilon=100.0,
    solver=dpb.bilevel.OneLevel(dpb.NoisyGD(30, 1.0, 16.0), reads="both"),
)
