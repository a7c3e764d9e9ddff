"""Tunes 13 parameters of a support vector regression on private validation records.

Ten length-scales, C, epsilon and gamma of a kernel regression on scikit-learn's
diabetes records. Training records are not protected here; the validation records are,
all that is released of them are the parameters.

    python examples/private_search.py [--smoke] [--out FOLDER]

With --out the search keeps its evaluations in FOLDER until it is done, and the same
command goes on after a stop.
"""

import argparse

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.datasets import load_diabetes
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVR

import dpbilevel as dpb


class LengthScales(TransformerMixin, BaseEstimator):
    """Divides every column by its length-scale."""

    def __init__(self, scales=1.0):
        self.scales = scales

    def fit(self, X, y=None):
        """Learns nothing."""
        return self

    def transform(self, X):
        """Return the columns in units of their length-scales."""
        return X / self.scales


def records():
    """Training and validation records, in units of the training records alone."""
    inputs, targets = load_diabetes(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(targets))
    train, private = order[:142], order[142:]
    middle, spread = inputs[train].mean(0), inputs[train].std(0)
    inputs = np.clip((inputs - middle) / spread, -3, 3)
    targets = (targets - targets[train].mean()) / targets[train].std()
    return [(inputs[rows], targets[rows]) for rows in (train, private)]


def main(smoke: bool, out: str | None) -> None:
    """Search and prints the report and what it gained."""
    train, private = records()
    estimator = make_pipeline(LengthScales(), SVR())
    space = {
        "lengthscales__scales": dpb.search.Range(0.1, 10, log=True, size=10),
        "svr__C": dpb.search.Range(0.1, 10, log=True),
        "svr__epsilon": dpb.search.Range(0.01, 1, log=True),
        "svr__gamma": dpb.search.Range(0.01, 1, log=True),
    }
    solver = None  # the default: DP-GIBO with AdaGrad
    if smoke:
        solver = dpb.search.GradientInformativeBO(
            2, 1.0, step_size=0.2, batch=14, polish=2
        )
    budget = dpb.PrivacyBudget(epsilon=4.0, delta=1e-5)
    search = dpb.PrivateSearch(estimator, space, budget, solver=solver)
    search.fit(
        *train, validation=private, key=dpb.root_key(), folder=out, progress=not smoke
    )
    print(search.report_)
    for name, value in search.best_params_.items():
        print(f"{name}: {np.round(value, 3)}")

    # NON-PRIVATE, for this page only: the records are public.
    start = estimator.set_params(**search.parameters(np.zeros(13))).fit(*train)
    before, after = (
        np.mean((model.predict(private[0]) - private[1]) ** 2)
        for model in (start, search)
    )
    print(f"validation error: {before:.3f} at the start, {after:.3f} at the answer")
    assert search.report_.epsilon <= budget.epsilon
    assert smoke or after < before


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--smoke", action="store_true", help="a short run")
    parser.add_argument("--out", help="a folder to go on from after a stop")
    arguments = parser.parse_args()
    main(arguments.smoke, arguments.out)
