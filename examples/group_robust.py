"""Train a model that also serves other mixtures of sites than that of its records.

Six in ten records are of one site, three of a second and one of a third; where the
model is used, the mixture will be another one. The second player mixes sites, and pays
for leaving the declared mixture: the smaller `strength`, the farther it goes. With a
large one it is average-loss training, with none the game for the worst-off site.
Everything is released at epsilon = 1, on the way and in the end.

All losses below are NON-PRIVATE evaluation, on generated records.

    python examples/group_robust.py [--smoke] [--out runs/group_robust]
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

SHARES = (0.6, 0.3, 0.1)  # declared, never computed from the records
TURNS = np.deg2rad([0.0, 60.0, 120.0])
STRENGTH, RADIUS = 0.1, 10.0


def records(count, seed):
    """Generate unit rows; every site's labels follow a direction of its own."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(count, 10))
    site = rng.choice(3, count, p=SHARES)
    margin = 2 * np.cos(TURNS)[site] * (features[:, 0] + features[:, 1])
    margin += 2 * np.sin(TURNS)[site] * (features[:, 2] + features[:, 3])
    label = np.where(rng.random(count) < 1 / (1 + np.exp(-margin)), 1.0, -1.0)
    rows = np.concatenate([features, np.ones((count, 1))], 1)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return {
        "features": jnp.asarray(rows, jnp.float32),
        "label": jnp.asarray(label, jnp.float32),
        "group": jnp.asarray(site, jnp.int32),
    }


def main(smoke: bool, out: pathlib.Path) -> None:
    """Three models at one budget, and what each loses under other mixtures."""
    training, test = records(20_000, seed=0), records(20_000, seed=1)
    count, size = training["features"].shape
    steps, budget = 40 if smoke else 100, dpb.PrivacyBudget(epsilon=1.0, delta=1e-5)
    fields = {"radius": RADIUS, "scale": 4.0}
    robust = dpb.games.group_robust(dpb.Logistic(), SHARES, STRENGTH, **fields)
    fair = dpb.games.group_fair(dpb.Logistic(), SHARES, **fields)
    mean = dpb.FiniteSum(dpb.logistic_loss, w_set=dpb.sets.Ball(RADIUS))
    game = dpb.games.NoisyExtragradient(steps, clip_norm=6.0, step_size=6.0)
    descent = dpb.NoisyGD(steps, clip_norm=1.0, step_size=16.0)
    w0 = dpb.games.group_start(fair, jnp.zeros(size), SHARES)

    run = jax.jit(dpb.solve, static_argnames="trajectory")
    paths = {}
    for (name, problem, solver, start), key in zip(
        (
            ("average loss", mean, descent, w0[0]),
            (f"robust, strength {STRENGTH}", robust, game, w0),
            ("worst-off site", fair, game, w0),
        ),
        jax.random.split(dpb.root_key(), 3),
        strict=True,
    ):
        plan = dpb.calibrate(problem, solver, budget, sizes=count, w0=start)
        print(f"{name}: {plan.report.status.name}, epsilon = {plan.report.epsilon:g}")
        done = run(problem, plan.solver, training, start, key=key, trajectory=True)
        path = done.trajectory
        paths[name] = path if name == "average loss" else path[0]

    @jax.vmap
    def losses(model):
        return dpb.debug.group_losses(dpb.logistic_loss, model, test, len(SHARES))

    found = {name: np.asarray(losses(means(path))) for name, path in paths.items()}
    print("NON-PRIVATE evaluation: loss on test records of each site")
    for name, values in found.items():
        told = ", ".join(f"{v:.3f}" for v in values[-1])
        print(f"  {name}: {told}; mixture as declared {values[-1] @ SHARES:.3f}")
    if not smoke:
        draw(found, out)
    plain, between, worst = (values[-1] for values in found.values())
    assert worst.max() < between.max() < plain.max()
    assert plain @ SHARES < worst @ SHARES
    # Below no model at all; a clip norm of 3 counts the smallest site too little.
    assert smoke or worst.max() < np.log(2)


def means(path):
    """Return the running means of the path, all of which is released."""
    return jnp.cumsum(path, 0) / jnp.arange(1, len(path) + 1, dtype=path.dtype)[:, None]


def draw(found, out: pathlib.Path) -> None:
    """Return the worst site's loss of each step, and losses of shifted mixtures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    third = np.linspace(SHARES[2], 1, 50)
    rest = np.asarray(SHARES[:2]) / sum(SHARES[:2])
    for (name, values), color in zip(
        found.items(), ("#0072B2", "#E69F00", "#D55E00"), strict=True
    ):
        left.plot(np.arange(1, len(values) + 1), values.max(1), color=color, label=name)
        last = values[-1]
        mixed = third * last[2] + (1 - third) * (rest @ last[:2])
        right.plot(third, mixed, color=color, label=name)
    right.axvline(SHARES[2], color="0.4", linestyle="--", linewidth=1)
    right.text(SHARES[2], right.get_ylim()[1], " declared", va="top", fontsize=8)
    left.set(xlabel="step", ylabel="loss of the worst-off site")
    right.set(xlabel="share of the smallest site in use", ylabel="mean loss")
    for axes in (left, right):
        axes.set_title("NON-PRIVATE evaluation", fontsize=10, loc="left")
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
    parser.add_argument("--out", type=pathlib.Path, default="runs/group_robust")
    arguments = parser.parse_args()
    main(arguments.smoke, arguments.out)
