"""What every solver must do: each of `CONTRACT` in the tests of an algorithm."""

import dataclasses
import functools
import re

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters.partial_eval import dce_jaxpr

import dpbilevel as dpb
from dpbilevel.core.descent import rejected_updates
from dpbilevel.core.loop import bound_to, scan_steps
from dpbilevel.privacy.mechanisms import Gaussian
from tests.contract.recorded import (
    CASES,
    KEY,
    RUN,
    SHORT,
    at_once,
    calibrated,
    compiled_programs,
    run,
    solve,
)

solvers = pytest.mark.parametrize("name", CASES)
# One of each class; the slow suite has the others, which differ in problem or sampling.
distinct_solvers = at_once(lambda name: name in SHORT)
# One of each family, where a program is compiled.
run_solvers = at_once(lambda name: name in RUN)
OF_PEOPLE = {"noisy_gd_adam_of_people", "penalty_both_levels_of_people"}
# `fit` plans and solves; one of each family of problems, and one adaptive.
fitted_solvers = at_once(lambda name: CASES[name].fitted)


@run_solvers
def test_numbers_change_without_retracing(name):
    problem, solver, data, w0 = calibrated(name)
    other = jax.tree.map(lambda v: v * 1.5 if isinstance(v, float) else v, solver)
    programs = []
    for seed, same in enumerate((solver, other, solver.with_noise(3.0))):
        solve(problem, same, data, w0, key=jax.random.key(seed))
        programs.append(compiled_programs())
    assert programs[0] == programs[1] == programs[2]


def test_another_count_of_steps_does_retrace():
    # The control of the test above: both counters see a new program.
    problem, solver, data, w0 = calibrated("noisy_gd")
    run("noisy_gd", jax.random.key(KEY))
    before = compiled_programs()
    chex.clear_trace_counter()
    counted = jax.jit(chex.assert_max_traces(dpb.solve, n=1))
    longer = dataclasses.replace(solver, num_steps=solver.num_steps + 1)
    counted.trace(problem, solver, data, w0, key=jax.random.key(KEY))
    with pytest.raises(AssertionError, match="is traced > 1 times"):
        counted.trace(problem, longer, data, w0, key=jax.random.key(KEY))
    solve(problem, longer, data, w0, key=jax.random.key(KEY))
    assert compiled_programs() == before + 1


@fitted_solvers
def test_same_key_same_bits_new_key_new_bits(name):
    def value(seed):
        found = run(name, jax.random.key(seed)).value
        return found[1] if CASES[name].keeps_x else found

    first, again = value(KEY), value(KEY)
    chex.assert_trees_all_equal(first, again)
    # One of few candidates may be drawn twice.
    seeds = range(KEY + 1, KEY + (10 if CASES[name].few_answers else 2))
    others = [value(seed) for seed in seeds]
    leaves = zip(*map(jax.tree.leaves, [first, *others]), strict=True)
    assert all(any(bool(jnp.any(a != b)) for b in rest) for a, *rest in leaves)


@at_once(lambda name: name in ("noisy_gd", "exponential"))
def test_vmap_over_solvers_and_keys_equals_a_loop(name):
    problem, solver, data, w0 = calibrated(name, 0.5)
    keys = jax.random.split(jax.random.key(KEY), 2)
    quiet, loud = (solver.with_noise(scale) for scale in (0.5, 1.0))
    both = jax.tree.map(lambda a, b: jnp.asarray([a, b], jnp.float32), quiet, loud)

    def one(solver, key):
        return dpb.solve(problem, solver, data, w0, key=key).value

    together = jax.jit(jax.vmap(one))(both, keys)
    apart = [
        solve(problem, solver, data, w0, key=key).value
        for solver, key in zip((quiet, loud), keys, strict=True)
    ]
    alone = jax.tree.map(lambda *v: jnp.stack(v), *apart)
    chex.assert_trees_all_close(together, alone, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.reuses_keys  # by the loop that is compared with
@solvers
@pytest.mark.parametrize("over", ["solvers", "keys"])
def test_vmap_over_one_of_solvers_and_keys_equals_a_loop(name, over):
    problem, solver, data, w0 = calibrated(name, 0.5)
    loud = solver.with_noise(1.0)
    both = jax.tree.map(lambda a, b: jnp.asarray([a, b], jnp.float32), solver, loud)

    def one(solver, key):
        return dpb.solve(problem, solver, data, w0, key=key).value

    if over == "keys":
        keys = jnp.stack([jax.random.key(seed) for seed in (0, 1)])
        together = jax.jit(jax.vmap(one, (None, 0)))(solver, keys)
        pairs = (solver, 0), (solver, 1)
    else:
        together = jax.jit(jax.vmap(one, (0, None)))(both, jax.random.key(0))
        pairs = (solver, 0), (loud, 0)
    apart = [
        solve(problem, solver, data, w0, key=jax.random.key(seed)).value
        for solver, seed in pairs
    ]
    alone = jax.tree.map(lambda *v: jnp.stack(v), *apart)
    chex.assert_trees_all_close(together, alone, rtol=2e-4, atol=2e-4)


@run_solvers
def test_float64_in_float64_out(name):
    problem, solver, data, w0 = calibrated(name)
    with jax.enable_x64(True):
        wide, start = jax.tree.map(widened, (data, w0))
        problem = jax.tree.map(lambda v: widened(v) if eqx.is_array(v) else v, problem)
        if getattr(solver, "scoring", None) is not None:  # it has a start of its own
            scoring = jax.tree.map(widened, solver.scoring)
            solver = dataclasses.replace(solver, scoring=scoring)
        assert dtypes(problem, solver, wide, start) == {jnp.dtype("f8")}


def dtypes(problem, solver, data, w0):
    """Of a solution, which tracing tells without compiling."""

    def value(data, w0, key):
        return dpb.solve(problem, solver, data, w0, key=key).value

    found = jax.eval_shape(value, data, w0, jax.random.key(KEY))
    return {v.dtype for v in jax.tree.leaves(found)}


def widened(leaf):
    host = np.asarray(leaf)
    return jnp.asarray(host.astype(np.float64) if host.dtype == np.float32 else host)


@at_once(lambda name: name in SHORT, [n for n, c in CASES.items() if not c.double])
def test_float32_in_float32_out(name):
    _, answer = traced(name, None)
    assert {v.dtype for v in jax.tree.leaves(answer)} == {jnp.dtype("f4")}


@pytest.mark.slow
@solvers
def test_records_on_disk_release_the_same_bits_or_are_refused(name):
    problem, solver, data, w0 = calibrated(name)

    def stored(level):
        return dpb.OnDisk.arrays(jax.tree.map(np.asarray, level))

    if not isinstance(data, dpb.Levels):
        disk = stored(data)
    elif data.is_shared:
        disk = dpb.Levels.shared(stored(data.upper))
    else:
        disk = dpb.Levels(stored(data.upper), stored(data.lower))
    try:
        got = dpb.solve(problem, solver, disk, w0, key=jax.random.key(KEY)).value
    except ValueError as error:
        if not re.search("in memory.*, got OnDisk", str(error)):
            raise
    else:
        want = dpb.solve(problem, solver, data, w0, key=jax.random.key(KEY)).value
        chex.assert_trees_all_equal(got, want)


@distinct_solvers
def test_no_key_is_used_twice(name):
    problem, solver, data, w0 = calibrated(name)
    run = jax.jit(lambda key: dpb.solve(problem, solver, data, w0, key=key).value)
    with jax.debug_key_reuse(True):  # which tracing checks
        run.trace(jax.random.key(KEY))


@run_solvers
def test_uncalibrated_solver_raises_with_the_remedy(name):
    case, key = CASES[name], jax.random.key(KEY)
    with pytest.raises(ValueError, match=r"calibrate\(problem, solver, budget"):
        dpb.solve(case.problem, case.solver, case.data, case.w0, key=key)


@run_solvers
def test_a_nan_record_leaves_the_answer_finite(name):
    problem, solver, data, w0 = calibrated(name)
    sick = jax.tree.map(first_row_to_nan, data)
    solution = solve(problem, solver, sick, w0, key=jax.random.key(KEY))
    assert all(bool(jnp.isfinite(v).all()) for v in jax.tree.leaves(solution.value))


def first_row_to_nan(leaf):
    leaf = jnp.asarray(leaf)
    return leaf.at[0].set(jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


@distinct_solvers
def test_a_raw_key_is_refused(name):
    problem, solver, data, w0 = calibrated(name)
    with pytest.raises(TypeError, match="typed key"):
        dpb.solve(problem, solver, data, w0, key=jax.random.PRNGKey(KEY))


@run_solvers
def test_trajectory_has_one_released_iterate_per_step(name):
    _, solver, _, _ = calibrated(name)
    trajectory = run(name, jax.random.key(KEY)).trajectory
    lengths = {v.shape[0] for v in jax.tree.leaves(trajectory)}
    assert lengths == {solver.num_steps}


@distinct_solvers
def test_data_of_another_size_than_planned_are_refused(name):
    problem, solver, data, w0 = calibrated(name)
    longer = jax.tree.map(lambda v: jnp.concatenate([v, v[:1]]), data)
    with pytest.raises(ValueError, match="the plan is for"):
        dpb.solve(problem, solver, longer, w0, key=jax.random.key(KEY))


@fitted_solvers
def test_fit_reports_the_ledger_of_what_it_ran(name):
    case = CASES[name]
    result = dpb.fit(
        case.problem,
        case.solver,
        case.data,
        case.w0,
        budget=dpb.PrivacyBudget(2.0, 1e-2),
        people=case.people,
        key=jax.random.key(KEY),
    )
    clipped = case.solver.basis is dpb.privacy.Basis.CLIPPED
    expected = (
        dpb.privacy.Status.ENFORCED if clipped else dpb.privacy.Status.CONDITIONAL
    )
    assert result.report.status is expected
    assert 1.95 < result.report.epsilon <= 2.0
    restored = dpb.privacy.PrivacyReport.from_json(result.report.to_json())
    assert restored == result.report


@run_solvers
def test_the_answer_is_feasible(name):
    problem, solver, data, w0 = calibrated(name)
    value = run(name, jax.random.key(KEY)).value
    if isinstance(problem, dpb.BilevelProblem | dpb.games.SaddleProblem):
        assert bool(problem.x_set.contains(value[0]))
        assert value[1] is None or bool(problem.y_set.contains(value[1]))
    else:
        assert bool(problem.w_set.contains(value))
    assert bound_to(problem, solver, data) is solver
    del w0


class Constant:
    """A release that no longer depends on what it releases."""

    def __init__(self, release):
        self.release = release

    def __get__(self, mechanism, kind):
        def constant(*args, **kwargs):
            made = jax.eval_shape(
                lambda: self.release.__get__(mechanism, kind)(*args, **kwargs)
            )
            # The key decides about the noise, so it must not depend on records either.
            number = jnp.sum(jax.random.key_data(kwargs["key"]) % 97)
            return jax.tree.map(lambda v: jnp.full(v.shape, number, v.dtype), made)

        return constant


@functools.cache  # it serves the test of dtypes, too
def traced(name, kind):
    """Return what a run shows, with releases that no longer depend on records.

    Args:
        name: A case.
        kind: A class of solvers that replaces the case's, or None.

    Returns:
        Whether what it shows depends on records, and the shapes of the answer.
    """
    problem, solver, data, w0 = calibrated(name)
    solver = solver if kind is None else kind(**vars(solver))

    def shown(data):
        keys = jax.random.split(jax.random.key(KEY), solver.num_steps)
        state, path = scan_steps(
            problem, solver, data, solver.init(problem, w0), keys, trajectory=True
        )
        seen = solver.adversary_view(state), rejected_updates(state)
        return solver.answer(problem, state), seen, path

    with pytest.MonkeyPatch.context() as patch:
        for owner, method in (
            (Gaussian, "release"),
            (dpb.draws.Exponential, "draw"),
            (dpb.draws.RegularizedExponential, "draw"),
        ):
            patch.setattr(owner, method, Constant(getattr(owner, method)))
        made = jax.jit(shown).trace(data)
    jaxpr = made.jaxpr.jaxpr
    _, is_read = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return any(is_read), made.out_info[0]


def reads(name, kind=None):
    return traced(name, kind)[0]


@at_once(lambda name: name in {*SHORT, *OF_PEOPLE})
def test_records_are_read_by_releases_alone(name):
    assert not reads(name)


class Peeks(dpb.NoisyGD):
    """Reads a record in passing."""

    def step(self, problem, data, state, *, key):
        state = dpb.NoisyGD.step(self, problem, data, state, key=key)
        seen = 1e-30 * data["features"][0]
        return dataclasses.replace(state, w=state.w + seen)


class CountsByRecord(dpb.NoisyGD):
    """Tells of a record by the number of updates that were left out."""

    def step(self, problem, data, state, *, key):
        state = dpb.NoisyGD.step(self, problem, data, state, key=key)
        told = (data["features"][0, 0] > 0).astype(jnp.int32)
        memory = dataclasses.replace(
            state.memory, rejections=state.memory.rejections.plus(told)
        )
        return dataclasses.replace(state, memory=memory)


class NoiseByRecord(dpb.NoisyGD):
    """Chooses the noise by a record."""

    def step(self, problem, data, state, *, key):
        bit = (data["features"][0, 0] > 0).astype(jnp.uint32)
        key = jax.random.fold_in(key, bit)
        return dpb.NoisyGD.step(self, problem, data, state, key=key)


@pytest.mark.parametrize("kind", [Peeks, CountsByRecord, NoiseByRecord])
def test_a_record_read_in_passing_is_noticed(kind):  # the control of the test above
    assert reads("noisy_gd", kind)


class StepsTwice(dpb.NoisyGD):
    releases_per_step = 2


def test_a_ledger_counts_every_release_of_a_step():
    problem, solver, data, _ = calibrated("noisy_gd")
    twice = StepsTwice(**vars(solver))
    (release,) = twice.ledger(problem, problem.sizes_of(data)).releases
    assert release.count == 2 * solver.num_steps
    assert twice.with_noise(1.0).release_noise.noise_multiplier == pytest.approx(
        (2 * solver.num_steps) ** 0.5
    )
