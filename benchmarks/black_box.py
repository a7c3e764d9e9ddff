"""Tuning from losses alone: the experiments of the method, each a config with seeds.

Run by `python -m benchmarks black_box`, with `--task=NAME` for configs whose names
in configs/experiments begin so. Prints the table of docs/black_box.md. Data are
generated, so that true losses may be shown; of real records they would be NON-PRIVATE.
"""

import dataclasses
import functools
import time
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpbilevel as dpb

from . import pages
from .tuning_tasks import TASKS

CONFIGS = pages.ROOT / "configs/experiments"


@functools.cache  # one object for all replications, or each would compile anew
def rule(adagrad=None, sgd=None):
    """Return the optax optimizer that a config names."""
    if adagrad is not None:
        return optax.adagrad(adagrad, initial_accumulator_value=0.0)
    return optax.sgd(sgd)


def gradient_search(task, settings):
    """Return the method with the settings of a curve; its noise gives `mu`-GDP."""
    names = ("batch", "evaluation_noise", "jitter", "max_batch", "constant")
    fields = {name: settings[name] for name in names if name in settings}
    if "trace" in settings:
        fields["tolerance"] = settings["trace"] / settings["task"]["dimension"]
    quadratic = settings.get("kernel") == "quadratic"
    solver = dpb.search.GradientInformativeBO(
        settings["num_steps"],
        settings["clip_norm"],
        step_size=rule(settings.get("adagrad"), settings.get("sgd")),
        kernel=dpb.search.Quadratic() if quadratic else dpb.search.RBF(),
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
    """Return the true loss at the answer of a run, and its number of evaluations."""
    ask, tell = compiled()
    public, evaluations = dataclasses.replace(box, losses=len), 0
    with jax.enable_x64(True):
        state = solver.init(public, jnp.asarray(start))
        for key in jax.random.split(jax.random.key(seed), solver.num_steps):
            key_ask, key_tell = jax.random.split(key)
            asked = ask(public, solver, state, key_ask)
            count = int(asked.count)
            losses = np.zeros((len(asked.points), task.size))
            for number in range(count):
                losses[number] = box.losses(np.asarray(asked.points[number]))
            state = tell(public, solver, state, asked, jnp.asarray(losses.T), key_tell)
            evaluations += count
    return task.objective([np.asarray(state.w)])[0], evaluations


def descent(task, settings, start, seed):
    """Clipped noisy gradient descent on the exact gradients, for comparison."""
    size = rule(settings.get("adagrad"), settings.get("sgd"))
    steps, clip = settings["num_steps"], settings["clip_norm"]
    solver = dpb.NoisyGD(steps, clip, size, output=dpb.outputs.Last())
    solver = solver.with_noise(1 / settings["mu"]).with_sizes(task.size)
    with jax.enable_x64(True):
        problem = dpb.FiniteSum(task.loss, w_set=task.w_set)
        given = problem, solver, task.records, jnp.asarray(start)
        answer = jax.jit(dpb.solve)(*given, key=jax.random.key(seed)).value
    return task.objective([np.asarray(answer)])[0], 0


def random(task, settings, start, seed):
    """Return the best of uniform points by their true loss. NON-PRIVATE."""
    box, rng = task.w_set, np.random.default_rng((seed, 2))
    points = rng.uniform(box.lower, box.upper, (settings["evaluations"], len(start)))
    return task.objective([start, *points]).min(), len(points)


def replication(settings, seed):
    """Return the final loss of a curve and its evaluations; all seeds are `seed`."""
    sizes = {k: v for k, v in settings["task"].items() if k != "name"}
    task = TASKS[settings["task"]["name"]](*sizes.values(), seed=seed)
    start = task.start(np.random.default_rng((seed, 1)))
    if settings.get("method") == "descent":
        return descent(task, settings, start, seed)
    if settings.get("method") == "random":
        return random(task, settings, start, seed)
    box = task.black_box(settings.get("noise", 0.0), seed)
    return follow(task, gradient_search(task, settings), box, start, seed)


def main():
    rows, prefix = [], pages.options().get("task", "")
    for file in sorted(CONFIGS.glob(f"{prefix}*.toml")):
        experiment = tomllib.loads(file.read_text())
        print(experiment["title"], flush=True)
        for curve in experiment["curve"]:
            began, settings = time.perf_counter(), experiment | curve
            seeds = range(settings["replications"])
            found = [replication(settings, seed) for seed in seeds]
            final, asked = np.transpose(found)
            error = final.std(ddof=1) / len(final) ** 0.5 if len(final) > 1 else np.nan
            rows.append([file.stem, curve["label"], f"{np.mean(asked):.0f}"])
            rows[-1] += [f"{final.mean():.4f} ± {error:.4f}", f"{np.median(final):.4f}"]
            rows[-1].append(f"{(time.perf_counter() - began) / len(final):.1f}")
            print(*rows[-1], flush=True)
    head = ("experiment", "curve", "evaluations", "mean final loss", "median")
    print(pages.table([*head, "s a run"], rows))
