"""Find the useful groups of columns, and fit a model that the others do not disturb.

Eighty columns come in eight groups of ten; labels depend on two groups, and nobody
knows on which. There are 4 000 training and 1 000 validation records. Every method gets
the same guarantee, epsilon = 1 at delta = 1e-5 for everybody. The table and the figure
show the accuracy of the RELEASED model on test records that nobody trained on.

`dpb.auto` plans `ScaledGroups`: one noisy gradient of both levels shows the useful
groups, and the model is fitted in scaled coordinates. It is not a method of bilevel
optimization. `PenaltyBilevel` is one: its outer steps choose one penalty per group, and
as no record meets the penalties, they release nothing and cost no budget.

NON-PRIVATE are the accuracies and the oracle, which is given the useful groups.

    python examples/penalty_tuning.py [--out DIR] [--smoke]
"""

import argparse
import datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

BUDGET = dpb.PrivacyBudget(epsilon=1.0, delta=1e-5)
GROUPS = np.repeat(np.arange(8), 10)  # of the columns
USEFUL = np.isin(GROUPS, (2, 5))
TEST = 20_000


def few_steps():
    """Return settings for tests, without a plan."""
    one = dpb.bilevel.OneLevel
    fit = dpb.NoisyGD(10, clip_norm=0.7, step_size=8.0)
    search = dpb.PenaltyBilevel(4, 10.0, fit, upper_clip_norm=0.5, step_size=5.0)
    return {
        "both levels' records": one(fit, reads="both"),
        "PenaltyBilevel, refitted": dpb.Refitted(search, fit),
        "ScaledGroups": dpb.applications.ScaledGroups(fit),
    }


def plans(problem, sizes, w0, smoke):
    """Return solver and report of each method, the planned one last."""
    if smoke:
        solvers = few_steps()
    else:
        plan = dpb.auto(problem, BUDGET, sizes=sizes, w0=w0)  # about 30 seconds
        print(plan.reason)
        trials = sorted(plan.trials[::-1], key=lambda trial: trial.levels)
        solvers = {trial.method: trial.solver for trial in trials}
    found = {
        name: dpb.calibrate(problem, solver, BUDGET, sizes=sizes, w0=w0)
        for name, solver in solvers.items()
    }
    assert all(plan.report.epsilon <= BUDGET.epsilon for plan in found.values())
    *_, last = found
    print(f"\n{last}, before any record is read:\n{found[last].report}\n")
    ledger = found["PenaltyBilevel, refitted"].report.ledger
    print("PenaltyBilevel releases:", *(row.release for row in ledger), sep="\n  ")
    assert not [row for row in ledger if "outer" in row.release]
    return found


def records(sizes):
    """Generate rows of norm 1, and logistic labels that two groups decide."""
    rng = np.random.default_rng(0)
    total = sizes.upper + sizes.lower + TEST
    features = rng.normal(size=(total, len(GROUPS)))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    margin = 12 * features @ np.where(USEFUL, rng.normal(size=len(GROUPS)), 0)
    label = np.where(margin + rng.logistic(size=total) > 0, 1.0, -1.0)
    upper, lower, test = (
        {"features": features[rows].astype("f4"), "label": label[rows].astype("f4")}
        for rows in np.split(np.arange(total), [sizes.upper, total - TEST])
    )
    return jax.tree.map(jnp.asarray, (dpb.Levels(upper, lower), test))


def problem_of(groups):
    """One penalty per group, and a start at the least penalties."""
    problem = dpb.penalty_tuning(dpb.logistic_loss, groups)
    return problem, dpb.applications.penalty_start(problem, jnp.zeros(len(groups)))


def accuracies(problem, plan, data, test, w0, keys):
    """Return the losses of the models that a solver releases, one for each key."""
    solve = jax.jit(dpb.solve)
    models = [solve(problem, plan.solver, data, w0, key=key).y for key in keys]
    return [
        float(jnp.mean(jnp.sign(test["features"] @ y) == test["label"])) for y in models
    ]


def oracle(plan, sizes, data, test, keys):
    """Fit `ScaledGroups` on the useful columns alone, with the whole budget."""
    problem, w0 = problem_of(GROUPS[USEFUL])
    fit = dpb.bilevel.OneLevel(plan.solver.fit, reads="both")
    plan = dpb.calibrate(problem, fit, BUDGET, sizes=sizes, w0=w0)
    upper, lower, test = (
        level | {"features": level["features"][:, USEFUL]}
        for level in (data.upper, data.lower, test)
    )
    return accuracies(problem, plan, dpb.Levels(upper, lower), test, w0, keys)


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
    parser.add_argument("--smoke", action="store_true", help="few steps, for tests")
    arguments = parser.parse_args()
    smoke, out = arguments.smoke, arguments.out
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    if out is None and not smoke:
        out = Path("runs") / f"penalty_tuning-{now}"
    if out is not None and out.exists():
        parser.error(f"{out} exists; give --out the name of a new folder")
    problem, w0 = problem_of(GROUPS)
    sizes = dpb.Sizes(upper=1000, lower=4000, people="disjoint")
    planned = plans(problem, sizes, w0, smoke)
    data, test = records(sizes)
    keys = jax.random.split(dpb.root_key(), 1 if smoke else 5)  # as many budgets
    found = {
        name: accuracies(problem, plan, data, test, w0, keys)
        for name, plan in planned.items()
    }
    *_, last = planned
    found["oracle: the useful groups"] = oracle(planned[last], sizes, data, test, keys)
    show(found)
    if out is not None:
        draw(found, out)
    if not smoke:
        single = [name for name in found if name.startswith(("upper", "lower", "both"))]
        best = max(np.median(found[name]) for name in single)
        assert np.median(found[last]) > best + 0.01


if __name__ == "__main__":
    main()
