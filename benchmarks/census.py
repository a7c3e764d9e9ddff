"""The census task: utility over 10 keys, compile time and run time.

NON-PRIVATE evaluation: hyper-objective and test loss are computed from the records.
The Adult CSV is read from $ADULT or ../shared/data/adult.csv; without it the generated
records of configs/source_reweighting.toml stand in.
"""

import dataclasses
import functools
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.cli.columns import Records
from dpbilevel.cli.config import read_config
from dpbilevel.cli.data import as_levels
from dpbilevel.cli.data import load as load_records
from dpbilevel.cli.prepared import prepare

ROOT = pathlib.Path(__file__).parent.parent
ADULT = pathlib.Path(os.environ.get("ADULT", ROOT / "../shared/data/adult.csv"))
KEYS = 10


def load():
    """The config, its records, and the records that no level uses, for testing."""
    census = ADULT.is_file()
    name = "census" if census else "source_reweighting"
    config = read_config(ROOT / f"configs/{name}.toml")
    print(f"records: {'Adult census' if census else 'generated'}")
    privacy, override = config.privacy, ADULT if census else None
    by_role = load_records(
        config.data,
        privacy.people,
        privacy.neighbours,
        base=config.folder,
        override=override,
    )
    levels = as_levels(by_role)
    records = config.data.load(config.data.file(config.folder, override))
    order = np.random.default_rng(config.data.split_seed).permutation(
        len(records.label)
    )
    rest = records.take(order[config.data.training + config.data.validation :])
    test = Records(rest.features, rest.label).tree() if len(rest.label) else None
    return config, jax.tree.map(jnp.asarray, levels), test


def quartiles(values):
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{middle:.4f} [{low:.4f}, {high:.4f}]"


def optimum(problem, w0, levels):
    """The hyper-objective without noise or clipping, after many exact steps."""
    inner = dpb.NoisyGD(40, 1e6, step_size=2.0)
    solver = dpb.PenaltyBilevel(
        150, 50.0, inner, clip_norm=1e6, upper_clip_norm=1e6, step_size=20.0
    )
    run = jax.jit(dpb.solve)
    key = jax.random.key(0)
    x = run(problem, solver.with_noise(0.0), levels, w0, key=key).x
    return dpb.debug.hyper_objective(problem, x, w0[1], levels)


def single_loop(config):
    """The config with its search replaced by the single-loop method."""
    search = dpb.SingleLoopBilevel(
        50,
        step_size=20.0,
        lower_step_size=1.0,
        linear_step_size=1.0,
        hessian_clip_norm=0.5,
        cross_clip_norm=0.5,
        upper_clip_norm=0.5,
    )
    solver = dataclasses.replace(config.solver, search=search)
    return dataclasses.replace(config, solver=solver)


def first_order(config):
    """The config with its search replaced by the fully first-order method."""
    search = dpb.bilevel.F2SA(
        50,
        penalty=10.0,
        step_size=20.0,
        lower_step_size=1.0,
        cross_clip_norm=0.5,
        upper_clip_norm=0.5,
    )
    solver = dataclasses.replace(config.solver, search=search)
    return dataclasses.replace(config, solver=solver)


def evaluate(config, epsilon, levels, test):
    budget = dataclasses.replace(config.privacy, epsilon=epsilon)
    plan = prepare(dataclasses.replace(config, privacy=budget))
    problem, w0 = plan.problem, plan.w0
    run = jax.jit(dpb.solve, static_argnames="trajectory")
    start = time.perf_counter()
    run.lower(
        problem, plan.solver, levels, w0, key=jax.random.key(0), trajectory=True
    ).compile()
    build = time.perf_counter() - start
    objective, before, after, seconds = [], [], [], []
    for key in jax.random.split(jax.random.key(0), KEYS):
        start = time.perf_counter()
        found = jax.block_until_ready(
            run(problem, plan.solver, levels, w0, key=key, trajectory=True)
        )
        seconds.append(time.perf_counter() - start)
        objective.append(dpb.debug.hyper_objective(problem, found.x, w0[1], levels))
        if test is not None:
            fitted = dpb.Levels(test, levels.lower)
            rough = found.trajectory[1][-2]
            loss = dpb.debug.upper_objective
            before.append(float(loss(problem, found.x, rough, fitted)))
            after.append(float(loss(problem, found.x, found.y, fitted)))
    name = type(config.solver.search).__name__
    print(f"{name}, epsilon {epsilon:g}: hyper-objective {quartiles(objective)}")
    if test is not None:
        print(f"  test loss before the refit {quartiles(before)}")
        print(f"  test loss after the refit  {quartiles(after)}")
    median = np.median(seconds[1:])
    print(f"  compile {build:.2f} s, one run {median:.2f} s")


def plain(config, epsilon, levels, test):
    """Test loss of plain private descent on one level, at the budget of a person."""
    problem = dpb.FiniteSum(dpb.logistic_loss)
    budget = dpb.PrivacyBudget(epsilon, config.privacy.delta)
    for name in ("upper", "lower"):
        level = getattr(levels, name)
        records = {key: level[key] for key in ("features", "label")}
        size, w0 = len(records["label"]), jnp.zeros(records["features"].shape[1])
        solver = dpb.NoisyGD(100, clip_norm=1.0, step_size=4.0)
        plan = dpb.calibrate(problem, solver, budget, sizes=size, w0=w0)
        run = functools.partial(dpb.solve, problem, plan.solver, records, w0)
        keys = jax.random.split(jax.random.key(0), KEYS)
        models = jax.jit(jax.vmap(lambda key, run=run: run(key=key).value))(keys)
        losses = jax.vmap(dpb.logistic_loss, (None, 0))
        loss = [float(jnp.mean(losses(w, test))) for w in models]
        print(f"NoisyGD on the {name} level, epsilon {epsilon:g}: {quartiles(loss)}")


def main():
    config, levels, test = load()
    problem, w0 = config.problem, config.model.start(config.data.blocks)
    clean = np.asarray(config.data.sources.flip) == 0
    for name, x in (
        ("uniform weights", np.zeros(len(clean))),
        ("all weight on clean sources", np.where(clean, 0.0, -30.0)),
    ):
        value = dpb.debug.hyper_objective(problem, x, w0[1], levels)
        print(f"{name}: hyper-objective {value:.4f}")
    best = optimum(problem, w0, levels)
    print(f"without noise or clipping: hyper-objective {best:.4f}")
    for epsilon in (1.0, 0.3):
        for searched in (config, single_loop(config), first_order(config)):
            evaluate(searched, epsilon, levels, test)
        if test is not None:
            plain(config, epsilon, levels, test)
