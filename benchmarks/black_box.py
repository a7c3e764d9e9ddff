"""Tuning from losses alone: the experiments of the method, each a config with seeds.

Run by `python -m benchmarks.black_box [NAME ...]` for the configs of that name in
configs/experiments, all by default. Tables and figures go to runs/black_box. Data are
generated, so that true losses may be shown; of real records they would be NON-PRIVATE.
"""

import dataclasses
import functools
import pathlib
import sys
import time
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpbilevel as dpb

from .tuning_tasks import TASKS

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = ROOT / "configs/experiments"
FOLDER = pathlib.Path("runs/black_box")


@dataclasses.dataclass(frozen=True)
class Path:
    """One replication of one curve.

    Attributes:
        losses: True mean loss after each step, the start first.
        evaluations: How many there were by then.
        distances: To what is looked for; NaN where it is not known.
    """

    losses: np.ndarray
    evaluations: np.ndarray
    distances: np.ndarray


def path_of(task, points, evaluations):
    points = np.asarray(points)
    target = np.nan if task.optimum is None else task.optimum
    distances = np.linalg.norm(points - target, axis=1)
    return Path(task.objective(points), np.asarray(evaluations), distances)


def rule(settings):
    """Return the optax optimizer that a config names."""
    return made(settings.get("adagrad"), settings.get("sgd"))


@functools.cache  # one object for all replications, or each would compile anew
def made(adagrad, sgd):
    if adagrad is not None:
        return optax.adagrad(adagrad, initial_accumulator_value=0.0)
    return optax.sgd(sgd)


def gradient_search(task, settings):
    """Return the method with the settings of a curve; its noise gives `mu`-GDP."""
    kernel = {"rbf": dpb.search.RBF, "quadratic": dpb.search.Quadratic}[
        settings.get("kernel", "rbf")
    ]()
    fields = {
        name: settings[name]
        for name in ("batch", "evaluation_noise", "jitter", "max_batch", "constant")
        if name in settings
    }
    if "trace" in settings:
        fields["tolerance"] = settings["trace"] / settings["task"]["dimension"]
    solver = dpb.search.GradientInformativeBO(
        settings["num_steps"],
        settings["clip_norm"],
        step_size=rule(settings),
        kernel=kernel,
        portfolio=None,
        **fields,
    )
    return solver.with_noise(1 / settings["mu"]).with_sizes(task.size)


@functools.cache
def compiled():
    ask = jax.jit(
        lambda problem, solver, state, key: solver.ask(problem, state, key=key)
    )
    tell = jax.jit(
        lambda problem, solver, state, asked, losses, key: solver.tell(
            problem, state, asked, losses, key=key
        )
    )
    return ask, tell


def follow(task, solver, box, start, seed):
    """Return a run with the number of evaluations of every step."""
    ask, tell = compiled()
    public = dataclasses.replace(box, losses=len)
    with jax.enable_x64(True):
        state = solver.init(public, jnp.asarray(start))
        points, evaluations = [np.asarray(state.w)], [0]
        for key in jax.random.split(jax.random.key(seed), solver.num_steps):
            key_ask, key_tell = jax.random.split(key)
            asked = ask(public, solver, state, key_ask)
            count = int(asked.count)
            losses = np.zeros((len(asked.points), task.size))
            for number in range(count):
                losses[number] = box.losses(np.asarray(asked.points[number]))
            state = tell(public, solver, state, asked, jnp.asarray(losses.T), key_tell)
            points.append(np.asarray(state.w))
            evaluations.append(evaluations[-1] + count)
    return path_of(task, points, evaluations)


def descent(task, settings, start, seed):
    """Clipped noisy gradient descent on the exact gradients, for comparison."""
    solver = dpb.NoisyGD(
        settings["num_steps"], settings["clip_norm"], step_size=rule(settings)
    )
    solver = solver.with_noise(1 / settings["mu"]).with_sizes(task.size)
    with jax.enable_x64(True):
        run = jax.jit(dpb.solve, static_argnames="trajectory")
        found = run(
            task.problem,
            solver,
            task.records,
            jnp.asarray(start),
            key=jax.random.key(seed),
            trajectory=True,
        )
        points = np.concatenate([start[None], found.trajectory])
    return path_of(task, points, np.zeros(len(points), int))


def replications(settings):
    """All replications of a curve; number `i` has seed `i` throughout."""
    found = []
    for seed in range(settings["replications"]):
        task = TASKS[settings["task"]["name"]](
            *(v for k, v in settings["task"].items() if k != "name"), seed=seed
        )
        start = task.start(np.random.default_rng((seed, 1)))
        if settings.get("method") == "descent":
            found.append(descent(task, settings, start, seed))
        elif settings.get("method") == "random":
            found.append(random(task, settings, start, seed))
        else:
            box = task.black_box(settings.get("noise", 0.0), seed)
            solver = gradient_search(task, settings)
            found.append(follow(task, solver, box, start, seed))
    return found


def random(task, settings, start, seed):
    """Return the best of uniform points by their true loss. NON-PRIVATE."""
    box, rng = task.w_set, np.random.default_rng((seed, 2))
    points = rng.uniform(box.lower, box.upper, (settings["evaluations"], len(start)))
    path = path_of(task, np.concatenate([start[None], points]), range(len(points) + 1))
    return dataclasses.replace(path, losses=np.minimum.accumulate(path.losses))


def report(name, experiment):
    """Run a config; return the lines of its table and the curves."""
    common = {
        k: v for k, v in experiment.items() if k not in ("curve", "title", "distances")
    }
    curves, lines = {}, []
    for curve in experiment["curve"]:
        began = time.perf_counter()
        label = curve["label"]
        curves[label] = paths = replications(common | curve)
        final = np.asarray([path.losses[-1] for path in paths])
        error = final.std(ddof=1) / len(final) ** 0.5 if len(final) > 1 else np.nan
        asked = np.mean([path.evaluations[-1] for path in paths])
        seconds = (time.perf_counter() - began) / len(paths)
        lines.append(
            f"| {name} | {label} | {asked:.0f} | {final.mean():.4f} ± {error:.4f} | "
            f"{np.median(final):.4f} | {seconds:.1f} |"
        )
        print(lines[-1], flush=True)
    return lines, curves


def main():
    names = sys.argv[1:]
    files = sorted(CONFIGS.glob("*.toml"))
    lines = [
        "| experiment | curve | evaluations | mean final loss | median | s a run |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file in files:
        if names and file.stem not in names:
            continue
        experiment = tomllib.loads(file.read_text())
        rows, curves = report(file.stem, experiment)
        lines += rows
        draw(file.stem, experiment, curves)
        (FOLDER / f"{file.stem}.md").write_text("\n".join(rows) + "\n")
    print(f"figures: {FOLDER}")


def draw(name, experiment, curves):
    """Median and quartiles over the replications; true losses of generated records."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    distances = experiment.get("distances", False)
    for number, (label, paths) in enumerate(curves.items()):
        color = f"C{number}"
        losses, asked, away = (
            np.asarray([getattr(path, field) for path in paths])
            for field in ("losses", "evaluations", "distances")
        )
        steps = np.arange(losses.shape[1])
        walked = np.any(asked != steps)
        if walked:  # random search takes no steps
            shade(left, steps, losses, color, label)
        if distances:
            shade(right, steps, away, color, label)
        else:
            shade(right, asked.mean(0), losses, color, label)
    left.set_xlabel("step")
    left.set_ylabel("mean loss")
    right.set_xlabel("step" if distances else "evaluations, mean")
    right.set_ylabel("distance to the minimizer" if distances else "mean loss")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_yscale("log" if experiment.get("log") else "linear")
    right.legend(frameon=False)
    figure.suptitle(f"{experiment['title']}; median and quartiles", fontsize=11)
    FigureCanvasAgg(figure).print_png(FOLDER / f"{name}.png")


def shade(axes, x, values, color, label):
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], axis=0)
    axes.plot(x, middle, color=color, label=label)
    axes.fill_between(x, low, high, color=color, alpha=0.15, lw=0)


if __name__ == "__main__":
    main()
