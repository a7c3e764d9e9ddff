"""Private searches of parameters of estimators: results/private_search.md.

`python -m benchmarks tuned_estimators`; `--task=vectors` prints one table. The best
points by validation are NON-PRIVATE.
"""

import collections
import math
import time
import warnings

import jax
import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.datasets import make_classification
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.svm import SVC
from threadpoolctl import threadpool_limits

import dpbilevel as dpb
from dpbilevel.search.defaults import default_losses
from dpbilevel.search.space import Space

from . import pages

BUDGET = dpb.PrivacyBudget(epsilon=1.0, delta=1e-6)
TRAINING, VALIDATION, TEST = 300, 1_200, 10_000
SPLITS, FOLDS = 5, 3
Range = dpb.search.Range
COUNT = collections.Counter()


class GroupScales(TransformerMixin, BaseEstimator):
    """Multiplies groups of neighbouring columns, one scale for each group.

    A penalty of the coefficients then is one for each group. Counts evaluations.
    """

    def __init__(self, scales=1.0):
        self.scales = scales

    def fit(self, X, y=None):
        """Learns nothing."""
        return self

    def transform(self, X):
        """Return the columns times the scales of their groups."""
        COUNT["evaluations"] += len(X) == VALIDATION
        scales = np.atleast_1d(self.scales)
        return X * np.repeat(scales, X.shape[1] // len(scales))


def records(seed, features, width=1, **options):
    """Training, validation and test rows in units of the training rows."""
    count, ends = TRAINING + VALIDATION + TEST, (TRAINING, TRAINING + VALIDATION)
    # Without shuffling the columns that matter are the first ones.
    X, y = make_classification(count, features, shuffle=False, **options)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(y))
    groups = rng.permutation(np.arange(features).reshape(-1, width)).ravel()
    X, y = X[order][:, groups], y[order]
    X = (X - X[:TRAINING].mean(axis=0)) / X[:TRAINING].std(axis=0)
    return list(zip(np.split(X, ends), np.split(y, ends), strict=True))


def logistic(seed):
    model = LogisticRegression(solver="newton-cholesky")
    space = {
        "groupscales__scales": Range(0.03, 3, log=True, size=10),
        "logisticregression__C": Range(0.01, 100, log=True),
    }
    facts = {"n_informative": 12, "n_redundant": 0, "class_sep": 0.8, "flip_y": 0.05}
    made = records(seed, 40, 4, random_state=0, **facts)
    return make_pipeline(GroupScales(), model), space, made


def vectors(seed):
    space = {
        "groupscales__scales": Range(0.03, 3, log=True, size=10),
        "svc__C": Range(0.1, 100, log=True),
        "svc__gamma": Range(0.01, 1, log=True),
    }
    facts = {"n_informative": 4, "n_redundant": 0, "n_clusters_per_class": 3}
    estimator = make_pipeline(GroupScales(), SVC())
    return estimator, space, records(seed, 10, random_state=1, flip_y=0.02, **facts)


def boosting(seed):
    space = {
        "boosting__n_estimators": Range(10, 100, log=True, integer=True),
        "boosting__max_depth": Range(1, 6, integer=True),
        "boosting__min_samples_leaf": Range(1, 50, log=True, integer=True),
        "boosting__learning_rate": Range(0.01, 1, log=True),
        "boosting__subsample": Range(0.3, 1),
        "boosting__max_features": Range(0.1, 1),
    }
    facts = {"n_informative": 6, "n_redundant": 4, "n_clusters_per_class": 3}
    # The points that training rows choose from are fixed: here in another order.
    names = np.random.default_rng(seed).permutation(list(space))
    space = {str(name): space[name] for name in names}
    made = records(seed, 20, random_state=2, flip_y=0.1, **facts)
    model = GradientBoostingClassifier(random_state=0)
    return Pipeline([("scales", GroupScales()), ("boosting", model)]), space, made


TASKS = {
    "Logistic regression, 11 parameters: half the Brier score": logistic,
    "Support vector classifier, 12 parameters: 0-1 loss": vectors,
    "Gradient boosting, 6 parameters, 3 of them whole: half the Brier score": boosting,
}


def compare_split(make, seed, found):
    estimator, space, (training, validation, test) = make(seed)
    losses, _ = default_losses(estimator, training[1])

    def fitted(parameters, rows=slice(None)):
        X, y = training
        return clone(estimator).set_params(**parameters).fit(X[rows], y[rows])

    def judge(name, search, *given):
        COUNT.clear()
        began = time.process_time()
        parameters = search(*given)
        seconds, evaluations = time.process_time() - began, COUNT["evaluations"]
        model, (X, y) = fitted(parameters), test
        loss = np.mean(losses(model, X, y))
        result = loss, model.score(X, y), evaluations, seconds
        found.setdefault(name, []).append(result)
        print(f"  {name}: {loss:.4f}, {evaluations}, {seconds:.1f} s", flush=True)
        return evaluations

    def private(key, solver=None):
        chosen = dpb.PrivateSearch(estimator, space, BUDGET, solver=solver)
        chosen.fit(*training, validation=validation, key=key)
        return chosen.best_params_

    def best_of(key, count, loss):
        inner = Space(space)
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        points = rng.uniform(-1, 1, (count, inner.coordinates))
        return min(map(inner.parameters, points), key=loss)

    def of_validation(parameters):
        return np.mean(losses(fitted(parameters), *validation))

    def of_folds(parameters):
        X, y = training
        folds = StratifiedKFold(FOLDS).split(X, y)
        found = (losses(fitted(parameters, fit), X[out], y[out]) for fit, out in folds)
        return np.mean([np.mean(losses_of_fold) for losses_of_fold in found])

    keys = jax.random.split(jax.random.key(seed), 5)
    judge("the estimator's own parameters, no search", dict)
    count = judge("`PrivateSearch`, no solver given", private, keys[0])
    judge("`RandomSearch`", private, keys[1], dpb.search.RandomSearch(count, 1.0))
    # The Poisson law wastes the fewest evaluations.
    solver = dpb.search.RepeatAndSelect(count, 1.0, count / 2 - 15, math.inf)
    judge("`RepeatAndSelect`", private, keys[2], solver)
    name = "cross-validation of the training rows"
    judge(name, best_of, keys[3], count // FOLDS, of_folds)
    name = "best validation loss, not private"
    judge(name, best_of, keys[4], count, of_validation)


def table(title, found):
    rows = []
    for name, results in found.items():
        losses, accuracies, counts, seconds = np.transpose(results)
        cells = [name, f"{np.median(losses):.4f}", f"{losses.max():.4f}"]
        cells += [f"{np.median(accuracies):.3f}", f"{np.median(counts):.0f}"]
        rows.append([*cells, f"{np.median(seconds):.1f}"])
    head = ("method", "test loss", "worst", "accuracy", "evaluations", "seconds")
    return pages.table(head, rows, title)


def main():
    warnings.simplefilter("ignore")
    threadpool_limits(1)
    tables, chosen = [], pages.options().get("task")
    for title, make in TASKS.items():
        if chosen in (None, make.__name__):
            print(title, flush=True)
            found = {}
            for seed in range(SPLITS):
                compare_split(make, seed, found)
            tables.append(table(title, found))
            print(tables[-1], flush=True)
    if not chosen:
        pages.write(pages.RESULTS / "private_search.md", tables)
