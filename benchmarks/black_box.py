"""Tuning from losses alone, the tables of results/black_box.md.

`--task=NAME` runs configs in configs/experiments whose names begin so, `--stated=yes`
the sizes of the paper (hours), and `--saved=FILE` keeps replications and goes on from
them. $CT_SLICE names the CSV file of the CT slices. NON-PRIVATE losses.
"""

import dataclasses
import functools
import json
import os
import pathlib
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
    if adagrad is not None:
        return optax.adagrad(adagrad, initial_accumulator_value=0.0)
    return optax.sgd(sgd)


def gradient_search(task, settings):
    names = ("batch", "evaluation_noise", "jitter", "max_batch", "constant")
    fields = {name: settings[name] for name in names if name in settings}
    if "trace" in settings:
        fields["tolerance"] = settings["trace"] / settings["task"]["dimension"]
    if "tolerance" in settings:
        fields["tolerance"] = settings["tolerance"]
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
    rng = np.random.default_rng((seed, 2))
    points = [task.start(rng) for _ in range(settings["evaluations"])]
    return task.objective([start, *points]).min(), len(points)


def middle(task, settings, start, seed):
    """Return the true loss at the middle of the box, which reads no record."""
    point = np.full(len(start), (task.w_set.lower + task.w_set.upper) / 2)
    return task.objective([point])[0], 0


def replication(settings, seed):
    sizes = {k: v for k, v in settings["task"].items() if k != "name"}
    task = TASKS[settings["task"]["name"]](**sizes, seed=seed)
    start = task.start(np.random.default_rng((seed, 1)))
    others = {"descent": descent, "random": random, "middle": middle}
    if other := others.get(settings.get("method")):
        return other(task, settings, start, seed)
    box = task.black_box(settings.get("noise", 0.0), seed)
    return follow(task, gradient_search(task, settings), box, start, seed)


def replications(settings, file):
    """Return all replications of a curve; those of earlier calls come from `file`."""
    setting = {k: v for k, v in settings.items() if k != "replications"}
    setting["records"] = os.environ.get("CT_SLICE")
    name, found = json.dumps(setting, sort_keys=True), []
    for seed in range(settings["replications"]):
        done = pages.kept(file, dict) if file else {}
        if (key := f"{seed} {name}") not in done:
            loss, asked = replication(settings, seed)
            done[key] = float(loss), int(asked)
            if file:
                pages.keep(file, done)
        found.append(done[key])
    return found


def main():
    given, rows = pages.options(), []
    file = pathlib.Path(given["saved"]) if "saved" in given else None
    for config in sorted(CONFIGS.glob(f"{given.get('task', '')}*.toml")):
        experiment = tomllib.loads(config.read_text())
        stated, curves = experiment.pop("stated", {}), experiment.pop("curve")
        if "stated" in given:
            task = experiment["task"] | stated.pop("task", {})
            experiment |= stated | {"task": task}
        print(experiment["title"], flush=True)
        for curve in curves:
            if not curve["label"].startswith(given.get("curve", "")):
                continue
            began, settings = time.perf_counter(), experiment | curve
            final, asked = np.transpose(replications(settings, file))
            error = final.std(ddof=1) / len(final) ** 0.5 if len(final) > 1 else np.nan
            rows.append([config.stem, curve["label"], f"{np.mean(asked):.0f}"])
            rows[-1] += [f"{final.mean():.4f} ± {error:.4f}", f"{np.median(final):.4f}"]
            rows[-1].append(f"{(time.perf_counter() - began) / len(final):.1f}")
            print(*rows[-1], flush=True)
    head = ("experiment", "curve", "evaluations", "mean final loss", "median")
    print(pages.table([*head, "s a run"], rows))
