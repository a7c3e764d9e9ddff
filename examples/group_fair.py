"""Train a model for the group that is worst off, privately.

Two players: a model that lowers the weighted loss, and weights of the groups that raise
it. Both are released at epsilon = 1, and so is everything on the way. By default
records are generated: one in five is of a group that follows other coefficients. With
the census file, groups are by sex and race and the model sees columns about work alone.

The shares of the groups are declared, never computed. All losses below are NON-PRIVATE
evaluation: on generated records that harms nobody; on real ones do not publish them.

    python examples/group_fair.py [--smoke] [--adult adult.csv] [--out runs/group_fair]
"""

import argparse
import csv
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

NUMERIC = ("age", "education-num", "hours-per-week", "capital-gain", "capital-loss")
# Public constants of these columns.
MEAN, SCALE = (
    np.array([38.6, 10.1, 40.4, 0.7, 0.3]),
    np.array([13.6, 2.6, 12.3, 2.5, 1.6]),
)
JOBS = ("Exec-managerial", "Prof-specialty", "Sales", "Craft-repair", "Other-service")


def generated(count):
    """Generate unit rows; each group's labels follow a direction of its own."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(count, 10))
    group = (rng.random(count) < 0.2).astype(int)
    truth = rng.normal(size=(2, 10))
    truth[1] -= 0.5 * truth[0]
    chance = 1 / (1 + np.exp(-3 * np.sum(features * truth[group], 1)))
    label = np.where(rng.random(count) < chance, 1.0, -1.0)
    return features, label, group, {"large group": 0.8, "small group": 0.2}


def census(path):
    """Work-related columns, income as label, groups by sex and race."""
    with open(path, newline="") as file:
        rows = [{k: v.strip() for k, v in r.items()} for r in csv.DictReader(file)]
    numbers = np.array([[float(r[c]) for c in NUMERIC] for r in rows])
    numbers[:, 3:] = np.log1p(numbers[:, 3:])
    numbers = np.clip((numbers - MEAN) / SCALE, -3, 3) / 3
    jobs = np.array([[r["occupation"] == job for job in JOBS] for r in rows])
    label = np.array([1.0 if r["income-per-year"] == ">50K" else -1.0 for r in rows])
    group = [2 * (r["sex"] == "Male") + (r["race"] != "White") for r in rows]
    # Declared, as if from a published table.
    shares = {"white women": 0.27, "other women": 0.06, "white men": 0.59}
    features = np.concatenate([numbers, jobs], 1)
    return features, label, np.array(group), shares | {"other men": 0.08}


def split(features, label, group):
    """Training and test records: a constant, unit rows, a fixed permutation."""
    rows = np.concatenate([features, np.ones((len(features), 1))], 1)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    order = np.random.default_rng(1).permutation(len(rows))
    cut = len(rows) * 4 // 5
    return [
        {
            "features": jnp.asarray(rows[part], jnp.float32),
            "label": jnp.asarray(label[part], jnp.float32),
            "group": jnp.asarray(group[part], jnp.int32),
        }
        for part in (order[:cut], order[cut:])
    ]


def main(smoke: bool, adult: str, out: pathlib.Path) -> None:
    """Plans and runs the game and fixed weights at one budget, and compares them."""
    parts = census(adult) if adult else generated(20_000)
    shares = parts[3]
    training, test = split(*parts[:3])
    count, size = training["features"].shape
    steps, fractions = 50 if smoke else 200, tuple(shares.values())
    budget = dpb.PrivacyBudget(epsilon=1.0, delta=1e-5)

    game = dpb.games.group_fair(dpb.Logistic(), fractions, radius=10.0)
    w0 = dpb.games.group_start(game, jnp.zeros(size), fractions)
    # Step sizes and clip norms follow from the model and the plan.
    solver = dpb.games.GroupDescent(steps)
    plan = dpb.calibrate(game, solver, budget, sizes=count, w0=w0)
    print(plan.report)  # the guarantee, before any data are touched

    run = jax.jit(dpb.solve, static_argnames="trajectory")
    keys = jax.random.split(dpb.root_key(), 3)
    fair = run(game, plan.solver, training, w0, key=keys[0], trajectory=True)
    paths = {"game": fair.trajectory[0]}
    # The same model on fixed weights of the groups: their shares, and equal ones.
    equal = 1 / (len(shares) * np.asarray(fractions))
    for (name, factors), key in zip(
        (("average loss", np.ones(len(shares))), ("equal weights", equal)),
        keys[1:],
        strict=True,
    ):
        mean_loss = dpb.FiniteSum(weighted(factors), w_set=dpb.sets.Ball(10.0))
        descent = dpb.NoisyGD(steps, clip_norm=float(max(factors)), step_size=8.0)
        descent = dpb.calibrate(mean_loss, descent, budget, sizes=count).solver
        solution = run(mean_loss, descent, training, w0[0], key=key, trajectory=True)
        paths[name] = solution.trajectory

    def losses(model):
        return dpb.debug.group_losses(dpb.logistic_loss, model, test, len(shares))

    found = {
        name: np.asarray(jax.vmap(losses)(tails(path))) for name, path in paths.items()
    }
    last = {name: values[-1] for name, values in found.items()}
    weights = dpb.games.group_weights(game, fair.value[1])
    print("NON-PRIVATE evaluation: loss on test records, second half averaged")
    for i, group in enumerate(shares):
        told = ", ".join(f"{name} {values[i]:.3f}" for name, values in last.items())
        print(f"  {group}: {told}, released weight {weights[i]:.2f}")
    if not smoke:
        draw(
            found,
            jax.vmap(lambda y: dpb.games.group_weights(game, y))(fair.trajectory[1]),
            tuple(shares),
            out,
        )
    if not adult:
        assert last["game"].max() < last["average loss"].max() - 0.05


def weighted(factors):
    """Return the loss of a record times the factor of its group."""

    def loss(model, record):
        factor = jnp.asarray(factors, model.dtype)[record["group"]]
        return factor * dpb.logistic_loss(model, record)

    return loss


def tails(path):
    """Every step's average of the second half so far: all of the path is released."""
    sums = jnp.cumsum(path, 0)
    starts = jnp.arange(len(path)) // 2
    before = jnp.where(starts[:, None] > 0, sums[starts - 1], 0)
    lengths = (jnp.arange(len(path)) + 1 - starts).astype(path.dtype)
    return (sums - before) / lengths[:, None]


def draw(found, weights, names, out: pathlib.Path) -> None:
    """Return the worst-group test loss and the released weights of each step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, values), color in zip(
        found.items(), ("#D55E00", "#0072B2", "#009E73"), strict=True
    ):
        left.plot(np.arange(1, len(values) + 1), values.max(1), color=color, label=name)
    left.set(xlabel="step", ylabel="worst-group loss, test records")
    left.set_title("NON-PRIVATE evaluation", fontsize=10, loc="left")
    colors = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
    for i, name in enumerate(names):
        right.plot(
            np.arange(1, len(weights) + 1), weights[:, i], color=colors[i], label=name
        )
    right.set(xlabel="step", ylabel="released weight", ylim=(0, None))
    right.set_title("released", fontsize=10, loc="left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle("epsilon = 1, delta = 1e-5, for every method")
    out.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(out / "figure.png")
    print(f"figure: {out / 'figure.png'}")


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--smoke", action="store_true", help="a short run, no figure")
    parser.add_argument("--adult", default="", help="the census records, a CSV file")
    parser.add_argument("--out", type=pathlib.Path, default="runs/group_fair")
    arguments = parser.parse_args()
    main(arguments.smoke, arguments.adult, arguments.out)
