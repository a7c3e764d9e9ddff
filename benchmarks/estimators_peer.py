"""The process of `benchmarks.estimators` in which diffprivlib runs.

It takes `logistic` or `linear`, an npz file of records and `[epsilons, keys]` in JSON,
and prints in JSON test scores of the same splits, for each epsilon one a key, and the
seconds of each fit. It imports nothing of this library, which its environment needs not
have.
"""

import json
import sys
import time
import warnings

import numpy as np
from diffprivlib.models import LinearRegression, LogisticRegression
from sklearn.model_selection import train_test_split


def main():
    kind, path, numbers = sys.argv[1:]
    epsilons, keys = json.loads(numbers)
    warnings.simplefilter("ignore")
    with np.load(path) as given:
        records = dict(given)
    found, seconds = {}, []
    for epsilon in epsilons:
        found[epsilon] = []
        for seed in range(keys):
            X_fit, X_test, y_fit, y_test = train_test_split(
                records["X"], records["y"], test_size=0.25, random_state=seed
            )
            if kind == "logistic":
                norm = float(records["norm"])
                model = LogisticRegression(
                    epsilon=epsilon, data_norm=norm, max_iter=1000, random_state=seed
                )
            else:
                model = LinearRegression(
                    epsilon=epsilon,
                    bounds_X=tuple(records["bounds"]),
                    bounds_y=tuple(records["target"]),
                    random_state=seed,
                )
            start = time.perf_counter()
            model.fit(X_fit, y_fit)
            seconds.append(time.perf_counter() - start)
            found[epsilon].append(model.score(X_test, y_test))
    print(json.dumps([found, seconds]))


main()
