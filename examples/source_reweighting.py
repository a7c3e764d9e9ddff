"""Learn which sources of training records to trust, from 300 clean records.

Eight sources send 16 000 training records. In two of them half of the labels are wrong,
in three nine of ten, and nobody knows which. Every method gets the same guarantee,
epsilon = 1 at delta = 1e-5 for everybody. The table and the figure show the accuracy of
the RELEASED model on test records that nobody trained on.

NON-PRIVATE are the accuracies and the oracle, which is given the clean sources.

    python examples/source_reweighting.py [--out DIR] [--smoke]
"""

import argparse
import datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

BUDGET = dpb.PrivacyBudget(epsilon=1.0, delta=1e-5)
WRONG = np.array([0, 0, 0, 0.5, 0.5, 0.9, 0.9, 0.9])  # the share of labels, by source
CLEAN = 3  # so many sources, the first ones, have no wrong labels
VALIDATION, TEST, FEATURES = 300, 20_000, 20


def descent(steps, clip_norm, size):
    """Noisy descent, averaged over its second half."""
    return dpb.NoisyGD(steps, clip_norm, size, output=dpb.outputs.TailMean())


def settings():
    """Return the best setting of each method, the planned one last.

    Copied from `dpb.auto(problem, BUDGET, sizes=sizes, w0=w0).trials`, for 300 and
    16 000 records. It took two minutes and read no record.
    """
    one, mixture = dpb.bilevel.OneLevel, descent(10, 0.5, 3.0)
    inner = dpb.NoisyGD(10, 1.0, 1.0)
    search = dpb.PenaltyBilevel(20, 10.0, inner, upper_clip_norm=0.5, step_size=5.0)
    return {
        "upper level only": one(descent(10, 0.7, 2.0)),
        "lower level only": one(descent(100, 0.7, 8.0), reads="lower"),
        "both levels' records": one(descent(100, 0.7, 32.0), reads="both"),
        "PenaltyBilevel, refitted": dpb.Refitted(
            search, descent(100, 0.7, 8.0), budget_split=(0.5, 0.5)
        ),
        "SelectedSources": dpb.applications.SelectedSources(
            descent(10, 0.5, 1.0),
            descent(100, 0.7, 16.0),
            budget_split=(0.1, 0.1, 1.0),
            fit_reads="both",
        ),
        "MixedSources": dpb.applications.MixedSources(
            descent(50, 0.7826, 20.0), mixture, descent(100, 0.7, 24.0), mixture
        ),
    }


def plans(problem, sizes, w0, smoke):
    """Return a calibrated solver with its report for each method; no record is read."""
    solvers = settings()
    if smoke:
        del solvers["MixedSources"]  # which compiles longest
    found = {
        name: dpb.calibrate(problem, solver, BUDGET, sizes=sizes, w0=w0)
        for name, solver in solvers.items()
    }
    assert all(plan.report.epsilon <= BUDGET.epsilon for plan in found.values())
    *_, last = found
    print(f"{last}, before any record is read:\n{found[last].report}\n")
    return found


def records(num_training):
    """Generate rows of norm 1 with logistic labels, and flips labels by source."""
    rng = np.random.default_rng(0)
    total = VALIDATION + num_training + TEST
    features = rng.normal(size=(total, FEATURES))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    margin = 6 * features @ rng.normal(size=FEATURES)
    label = np.where(margin + rng.logistic(size=total) > 0, 1.0, -1.0)
    upper, lower, test = (
        {"features": features[rows].astype("f4"), "label": label[rows].astype("f4")}
        for rows in np.split(np.arange(total), [VALIDATION, VALIDATION + num_training])
    )
    source = rng.integers(0, len(WRONG), num_training)
    wrong = rng.random(num_training) < WRONG[source]
    lower["label"][wrong] *= -1
    lower["source"] = source.astype("i4")
    return jax.tree.map(jnp.asarray, (dpb.Levels(upper, lower), test))


def oracle(data, fit):
    """Return the records of the clean sources, and a plan of the same fit."""
    known = data.lower["source"] < CLEAN
    pooled = {
        name: jnp.concatenate([data.upper[name], data.lower[name][known]])
        for name in data.upper
    }
    one = dpb.FiniteSum(dpb.logistic_loss)
    return one, dpb.calibrate(one, fit, BUDGET, sizes=len(pooled["label"])), pooled


def compare(problem, found, data, test, w0, keys):
    """Accuracies by method, one for each key, and the weights of the planned one."""

    def accuracy(model):
        return float(jnp.mean(jnp.sign(test["features"] @ model) == test["label"]))

    solve, accuracies = jax.jit(dpb.solve), {}
    for name, plan in found.items():
        runs = [solve(problem, plan.solver, data, w0, key=key) for key in keys]
        accuracies[name] = [accuracy(run.y) for run in runs]
    weights = dpb.source_weights(runs[0].x)  # of the last method, the planned one
    one, plan, pooled = oracle(data, plan.solver.fit)
    runs = [solve(one, plan.solver, pooled, w0[1], key=key) for key in keys]
    accuracies["oracle: the clean sources"] = [accuracy(run.value) for run in runs]
    return accuracies, weights


def show(found):
    """Print a table."""
    width = max(map(len, found))
    print(f"\n{'method':{width}}  accuracy of the released model on test records")
    for name, values in found.items():
        low, middle, high = np.min(values), np.median(values), np.max(values)
        print(f"{name:{width}}  {middle:.3f}  ({low:.3f} to {high:.3f})")
    print("NON-PRIVATE: the accuracies on test records, and the oracle.")


def draw(found, out):
    """Save a figure in a new folder."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    colors = ["#9aa5b1"] * (len(found) - 2) + ["#1f77b4", "#d9b44a"]
    places = np.arange(len(found))[::-1]
    axes.barh(places, [np.median(v) for v in found.values()], color=colors)
    for place, values in zip(places, found.values(), strict=True):
        axes.plot(values, [place] * len(values), ".", color="black", markersize=4)
    axes.set_yticks(places, list(found))
    axes.set_xlim(0.5, 1)
    axes.set_xlabel("accuracy on test records, epsilon = 1")
    out.mkdir(parents=True)
    figure.savefig(out / "figure.png", dpi=150)
    print(f"Figure: {out / 'figure.png'}")


def main() -> None:
    """Plans, prints the guarantee, runs all methods and compares them."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, help="a new folder for the figure")
    parser.add_argument("--smoke", action="store_true", help="few records, for tests")
    arguments = parser.parse_args()
    smoke, out = arguments.smoke, arguments.out
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    if out is None and not smoke:
        out = Path("runs") / f"source_reweighting-{now}"
    if out is not None and out.exists():
        parser.error(f"{out} exists; give --out the name of a new folder")
    problem = dpb.source_weighting(dpb.logistic_loss, len(WRONG), ridge=1e-4)
    sizes = dpb.Sizes(VALIDATION, 4000 if smoke else 16_000, people="disjoint")
    w0 = jnp.zeros(len(WRONG)), jnp.zeros(FEATURES)
    planned = plans(problem, sizes, w0, smoke)
    data, test = records(sizes.lower)
    keys = jax.random.split(dpb.root_key(), 1 if smoke else 5)  # as many budgets
    found, weights = compare(problem, planned, data, test, w0, keys)
    for source, (weight, wrong) in enumerate(zip(weights, WRONG, strict=True)):
        print(f"source {source}: {wrong:3.0%} wrong labels, weight {weight:.3f}")
    show(found)
    if out is not None:
        draw(found, out)
    if not smoke:
        *_, last = planned
        single = [name for name in found if name.startswith(("upper", "lower", "both"))]
        best = max(np.median(found[name]) for name in single)
        assert np.median(found[last]) > best + 0.03
        assert jnp.sum(weights[:CLEAN]) > 0.9


if __name__ == "__main__":
    main()
