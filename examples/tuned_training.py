"""Step size, clip norm and number of steps of private training, tuned privately.

Twelve settings of `NoisyGD` are candidates. One run trains by one of them and releases
the error of its model on validation records; `TunedTraining` shows the best of a random
number of runs. Training and validation records are protected by one guarantee, epsilon
= 1 for everybody, training included: nothing is paid for a second time, and nobody
looks at a record to choose.

Compared with: one default setting with the whole budget, trained on the training
records or on all records; and each candidate with the whole budget, of which the best
in hindsight is NON-PRIVATE knowledge.

With the Adult census data (--adult CSV) the label is whether somebody earns over 50K;
otherwise records are generated.

    python examples/tuned_training.py [--smoke]
"""

import argparse
import datetime
import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.cli.config import read_config
from dpbilevel.cli.loading import without_sources
from dpbilevel.cli.tables import read_csv

ROOT = Path(__file__).resolve().parents[1]
BUDGET = dpb.PrivacyBudget(epsilon=1.0, delta=1e-5)
COUNTS, CLIPS, REACHES = (10, 40), (0.1, 1.0), (1.0, 4.0, 16.0)
# A step is at most `reach` long without noise: a clipped gradient times the step size.
CANDIDATES = tuple(
    dpb.NoisyGD(count, clip, reach / clip)
    for count, clip, reach in itertools.product(COUNTS, CLIPS, REACHES)
)
DEFAULT = dpb.NoisyGD(40, clip_norm=1.0, step_size=1.0)
# The best of six runs on average; more than 27 have a chance of 1e-10.
TUNED = dpb.search.TunedTraining(
    CANDIDATES, num_steps=27, clip_range=1.0, mean=6.0, shape=math.inf
)


def census(file):
    """Encode census records: unit rows and labels of -1 and 1."""
    records = without_sources(read_config(ROOT / "configs/census.toml").data).encode(
        read_csv(file)
    )
    return np.asarray(records.features), np.asarray(records.label)


def generated(count, size=60, offset=2.3):
    """Generate unit rows with a constant; with an offset one label in four is 1."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(count, size))
    features[:, 0] = 2.0
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    model = rng.normal(size=size) * 12.0 * 0.9 ** np.arange(size)
    margin = features[:, 1:] @ model[1:] - offset
    label = np.where(margin + rng.logistic(size=count) > 0, 1.0, -1.0)
    return features, label


def split(features, label, sizes):
    """Return validation, training and test records of so many people."""
    order = np.random.default_rng(1).permutation(len(label))
    upper, lower, test = (
        {
            "features": jnp.asarray(features[rows], jnp.float32),
            "label": jnp.asarray(label[rows], jnp.float32),
        }
        for rows in np.split(order, np.cumsum(sizes))
    )
    return dpb.Levels(upper, lower), test


def error(model, record):
    """1 where a model labels a record wrongly."""
    return jnp.where(record["label"] * (record["features"] @ model) > 0, 0.0, 1.0)


def problem_of(loss, error):
    """Training records meet the loss, validation records the error."""
    return dpb.BilevelProblem(
        lambda _, model, record: error(model, record),
        lambda _, model, record: loss(model, record),
        x_in_records=False,
    )


def tuned(problem, data, start, budget=BUDGET):
    """Return the runs of private tuning; its report covers both levels."""
    sizes = problem.sizes_of(data, "disjoint")
    w0 = None, start
    plan = dpb.calibrate(problem, TUNED, budget, sizes=sizes, w0=w0)
    solve = jax.jit(dpb.solve)

    def run(key):
        found = solve(problem, plan.solver, data, w0, key=key)
        return found.y, int(found.x)

    return run, plan.report


def trained(loss, solver, records, start, budget=BUDGET):
    """Run of one setting with the whole budget."""
    problem, count = dpb.FiniteSum(loss), len(records["label"])
    plan = dpb.calibrate(problem, solver, budget, sizes=count)
    solve = jax.jit(dpb.solve)
    return lambda key: solve(problem, plan.solver, records, start, key=key).value


def both(data):
    """Return the records of both levels in one."""
    return jax.tree.map(lambda *v: jnp.concatenate(v), data.upper, data.lower)


def named(candidate):
    """Return a candidate in words."""
    count, clip, size = (candidate.num_steps, candidate.clip_norm, candidate.step_size)
    return f"{count} steps of {size:g}, clipped at {clip:g}"


def compare(data, test, loss, error, start, keys, budget=BUDGET):
    """Test errors of every method, one for each key."""

    @jax.jit
    def judged(model):
        return jnp.mean(jax.vmap(lambda record: error(model, record))(test))

    found = {}
    levels = {"training records": data.lower, "all records": both(data)}
    for name, records in levels.items():
        run = trained(loss, DEFAULT, records, start, budget)
        found[f"default setting, {name}"] = [float(judged(run(key))) for key in keys]
    run, report = tuned(problem_of(loss, error), data, start, budget)
    print(report)
    shown = [run(key) for key in keys]
    found["tuned privately"] = [float(judged(model)) for model, _ in shown]
    print("\nsettings that were selected:")
    for _, setting in shown:
        print(f"  {named(CANDIDATES[setting]) if setting >= 0 else 'none: K was zero'}")
    alone = []
    for candidate in CANDIDATES:
        run = trained(loss, candidate, data.lower, start, budget)
        alone.append([float(judged(run(key))) for key in keys])
    order = sorted(alone, key=np.median)
    found["median candidate, whole budget"] = order[len(order) // 2]
    found["best candidate in hindsight (NOT private)"] = order[0]
    return found


def show(found, out):
    """Print a table, and save a figure in a new folder."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = max(map(len, found))
    print(f"\n{'method':{width}}  error of the released model on test records")
    for name, values in found.items():
        low, middle, high = np.min(values), np.median(values), np.max(values)
        print(f"{name:{width}}  {middle:.3f}  ({low:.3f} to {high:.3f})")
    figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
    places = np.arange(len(found))[::-1]
    colors = ["#9aa5b1", "#9aa5b1", "#1f77b4", "#9aa5b1", "#d9b44a"]
    axes.barh(places, [np.median(v) for v in found.values()], color=colors)
    for place, values in zip(places, found.values(), strict=True):
        axes.plot(values, [place] * len(values), ".", color="black", markersize=4)
    axes.set_yticks(places, list(found))
    axes.set_xlim(min(map(min, found.values())) - 0.01)
    axes.set_xlabel("error on test records, epsilon = 1")
    out.mkdir(parents=True)
    figure.savefig(out / "figure.png", dpi=150)
    print(f"Figure: {out / 'figure.png'}")


def main() -> None:
    """Run all methods and compare what they release."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--adult", default="", help="the Adult CSV file, if at hand")
    parser.add_argument("--out", type=Path, help="a new folder for the figure")
    parser.add_argument("--smoke", action="store_true", help="few records, for tests")
    arguments = parser.parse_args()
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    out = arguments.out or Path("runs") / f"tuned-training-{now}"
    if out.exists():
        parser.error(f"{out} exists; give --out the name of a new folder")
    if arguments.adult and Path(arguments.adult).is_file():
        records = census(Path(arguments.adult))
    else:
        records = generated(5_000 if arguments.smoke else 20_000)
    validation, training = (1000, 3000) if arguments.smoke else (2000, 6000)
    data, test = split(*records, (validation, training))
    start = jnp.zeros(test["features"].shape[1])
    keys = jax.random.split(dpb.root_key(), 3 if arguments.smoke else 5)
    found = compare(data, test, dpb.logistic_loss, error, start, keys)
    show(found, out)
    default = found["default setting, all records"]
    assert np.median(found["tuned privately"]) < np.median(default)


if __name__ == "__main__":
    main()
