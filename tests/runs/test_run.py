"""Runs that are advanced, looked at, saved and resumed between their steps."""

import dataclasses
import os
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.core import loop
from dpbilevel.runs import run as module
from dpbilevel.runs.run import is_true
from tests.cases import slow

N, STEPS, KEY = 70, 6, 0
ROWS = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)
W0 = jnp.zeros(2)
ADDED = dpb.Neighbours.ADD_OR_REMOVE_ONE


def distance(w, row):
    return 0.5 * jnp.sum((w - row) ** 2)


def other_distance(w, row):
    return 0.4 * jnp.sum((w - row) ** 2)


PROBLEM = dpb.FiniteSum(distance)
SOLVER = dpb.NoisyGD(STEPS, clip_norm=1.0, step_size=0.1, neighbours=ADDED)
BUDGET = dpb.PrivacyBudget(1.0, 1e-3)
PLAN = dpb.calibrate(PROBLEM, SOLVER, BUDGET, sizes=N)
PLANNED = dpb.NoisyGD(STEPS, clip_norm=1.0, step_size=0.1)  # under replace-one


def started(problem=PROBLEM, plan=PLAN, data=ROWS, **options):
    return dpb.start(problem, plan, data, W0, key=jax.random.key(KEY), **options)


@pytest.fixture(scope="module")
def in_parts():
    """All states of a run in parts of 1, 3 and what is left, with its path."""
    runs = [started(trajectory=True)]
    for steps in (1, 3, None):
        runs.append(dpb.advance(runs[-1], steps))
    return runs


def test_steps_in_parts_are_those_of_solve_bit_for_bit(in_parts):
    want = dpb.solve(
        PROBLEM, PLAN.solver, ROWS, W0, key=jax.random.key(KEY), trajectory=True
    )
    got = in_parts[-1].solution
    np.testing.assert_array_equal(got.value, want.value)
    np.testing.assert_array_equal(got.trajectory, want.trajectory)
    assert got.report == PLAN.report
    for run in in_parts[1:]:
        np.testing.assert_array_equal(run.value, want.trajectory[run.done - 1])
        assert len(run.solution.trajectory) == run.done


def test_parts_of_any_length_share_one_program(in_parts):
    module._steps.clear_cache()
    for seed, steps in enumerate((1, 2, 5)):
        run = dpb.start(PROBLEM, PLAN, ROWS, W0, key=jax.random.key(seed))
        dpb.advance(dpb.advance(run, steps))
    assert module._steps._cache_size() == 1


def test_records_fill_the_rows_of_the_plan_whatever_their_number():
    fewer = started(data=ROWS[:-9])
    assert {v.shape[0] for v in jax.tree.leaves(fewer.data)} == {128}
    assert fewer.data.records.shape == started().data.records.shape
    with pytest.raises(ValueError, match="start: data has more records than the 128"):
        started(data=np.ones((129, 2), np.float32))


def test_the_epsilon_so_far_is_that_of_so_many_releases(in_parts):
    (release,) = PLAN.solver.ledger(PROBLEM, N).releases
    for run in in_parts[1:]:
        made = dataclasses.replace(release, count=run.done)
        want = dpb.privacy.Ledger((made,)).epsilon(1e-3)
        assert run.epsilon == pytest.approx(want, rel=1e-9)
    assert in_parts[0].epsilon == 0.0
    assert in_parts[-1].epsilon == PLAN.report.epsilon


@pytest.mark.slow
def test_fit_calls_back_with_released_values_and_may_end_early(capsys):
    def fitted(**options):
        key = jax.random.key(KEY)
        return dpb.fit(
            PROBLEM,
            PLANNED,
            ROWS,
            W0,
            budget=BUDGET,
            key=key,
            trajectory=True,
            **options,
        )

    seen, want = [], fitted()

    def callback(run):
        seen.append((run.done, np.asarray(run.value), run.epsilon))
        return run.done >= 4

    ended = fitted(callback=callback, every=2, progress=True)
    assert [done for done, *_ in seen] == [2, 4]
    for done, value, epsilon in seen:
        np.testing.assert_array_equal(value, want.trajectory[done - 1])
        assert 0 < epsilon < 1.0
    np.testing.assert_array_equal(ended.trajectory, want.trajectory[:4])
    assert ended.report == want.report  # ending early refunds nothing
    assert "4/6" in capsys.readouterr().err
    with pytest.raises(ValueError, match="every must be an integer"):
        fitted(every=0)
    with pytest.raises(TypeError, match="callback must be a function"):
        fitted(callback=3)


def test_only_true_ends_a_run():
    no = (None, False, 0.9, 1, "stop", [1.0], [[1], [1, 2]], np.ones(2, bool), {"a": 1})
    assert not any(map(is_true, (*no, jnp.ones(()), np.float32(0.5))))
    assert all(map(is_true, (True, np.True_, np.asarray(True), jnp.asarray(True))))


@pytest.mark.reuses_keys
def test_fits_of_the_same_shapes_compile_once():
    loop.all_steps.clear_cache()
    for seed in range(3):  # a problem and a solver of its own each time
        problem = dpb.FiniteSum(distance)
        solver = dpb.NoisyGD(2, clip_norm=1.0, step_size=0.1)
        key = jax.random.key(seed)
        dpb.fit(problem, solver, ROWS + seed, W0, budget=BUDGET, key=key)
    assert loop.all_steps._cache_size() == 1


def test_a_saved_run_goes_on_bit_for_bit(in_parts, tmp_path):
    in_parts[1].save(tmp_path / "new")
    (file,) = (tmp_path / "new").iterdir()
    assert file.name == "checkpoint.SECRET"
    if os.name == "posix":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    run = dpb.resume(tmp_path / "new", PROBLEM, PLAN, ROWS, W0)
    assert run.done == 1
    run = dpb.advance(run)
    np.testing.assert_array_equal(run.value, in_parts[-1].value)
    want = in_parts[-1].solution.trajectory
    np.testing.assert_array_equal(run.solution.trajectory, want)


def test_the_same_noise_is_refused_on_anything_else(in_parts, tmp_path):
    in_parts[1].save(tmp_path)
    moved = ROWS + np.float32(1e-3)
    with pytest.raises(ValueError, match="the records are not those"):
        dpb.resume(tmp_path, PROBLEM, PLAN, moved, W0)
    with pytest.raises(ValueError, match=r"the loss or the solver has changed"):
        dpb.resume(tmp_path, dpb.FiniteSum(other_distance), PLAN, ROWS, W0)
    # At other iterates, what the same noise hides would be a difference of gradients.
    longer = dataclasses.replace(PLAN.solver, step_size=0.25)
    with pytest.raises(ValueError, match="cannot resume"):
        dpb.resume(
            tmp_path, PROBLEM, dataclasses.replace(PLAN, solver=longer), ROWS, W0
        )
    budget = dpb.PrivacyBudget(2.0, 1e-3)
    louder = dpb.calibrate(PROBLEM, SOLVER, budget, sizes=N)
    with pytest.raises(ValueError, match=r"cannot resume .* plan\.epsilon was"):
        dpb.resume(tmp_path, PROBLEM, louder, ROWS, W0)
    with pytest.raises(ValueError, match=r"holds no checkpoint[^-]*$"):
        dpb.resume(tmp_path / "empty", PROBLEM, PLAN, ROWS, W0)


def test_the_checkpoint_of_another_run_is_not_replaced(in_parts, tmp_path):
    in_parts[1].save(tmp_path)
    in_parts[2].save(tmp_path)
    dpb.resume(tmp_path, PROBLEM, PLAN, ROWS, W0).save(tmp_path)
    other = dpb.start(PROBLEM, PLAN, ROWS, W0, key=jax.random.key(KEY + 1))
    with pytest.raises(ValueError, match="is of another run"):
        other.save(tmp_path)
    assert dpb.resume(tmp_path, PROBLEM, PLAN, ROWS, W0).done == in_parts[2].done


def test_the_same_noise_is_refused_on_other_records_on_disk(tmp_path):
    np.save(tmp_path / "rows.npy", np.asarray(ROWS))

    def on_disk(rows=slice(None)):
        found = np.load(tmp_path / "rows.npy", mmap_mode="r+")
        return dpb.privacy.OnDisk.arrays(found[rows])

    plan = dpb.calibrate(PROBLEM, PLANNED, BUDGET, sizes=N // 2)
    first, key = on_disk(slice(N // 2)), jax.random.key(2)
    dpb.start(PROBLEM, plan, first, W0, key=key).save(tmp_path)
    dpb.resume(tmp_path, PROBLEM, plan, on_disk(slice(N // 2)), W0)
    with pytest.raises(ValueError, match="the records are not those"):
        dpb.resume(tmp_path, PROBLEM, plan, on_disk(slice(N // 2, 2 * (N // 2))), W0)
    first.store.arrays[0][0] += 1
    with pytest.raises(ValueError, match="the records are not those"):
        dpb.resume(tmp_path, PROBLEM, plan, on_disk(slice(N // 2)), W0)


def test_a_run_shows_neither_its_key_nor_records(in_parts):
    shown = repr(in_parts[1])
    assert shown.startswith("Run(1 of 6 steps of Plan(")
    assert len(shown) < 300


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: started(plan=PLAN.solver),
            TypeError,
            "plan must be an instance",
        ),
        (lambda: started(data=dpb.Levels(ROWS, ROWS)), TypeError, "Levels"),
        (lambda: dpb.advance(started(), 0), ValueError, "steps must be an integer"),
        (lambda: dpb.advance(started(), 1.5), ValueError, "steps must be an integer"),
        (lambda: dpb.advance(PLAN, 1), TypeError, "run must be an instance"),
    ],
)
def test_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_notebook_shows_small_tables_whose_text_is_escaped():
    solution = started().solution
    for shown in (PLAN, PLAN.report, solution):
        page = shown._repr_html_()
        assert page.startswith("<table>")
        assert PLAN.report.claim in page
        assert "<script>" not in page
        assert len(repr(shown)) < 200
    assert str(PLAN.report.forecast[0]) in PLAN.report._repr_html_()
    assert "<script>" not in dpb.privacy.rows.html_table(
        "<script>", {"<script>": "<script>"}
    )


@pytest.mark.reuses_keys
@pytest.mark.parametrize("callback", [None, *slow(lambda run: False)])
def test_a_run_checks_its_problem_once(callback, monkeypatch):
    check, seen = dpb.FiniteSum.check, []

    def counted(problem, w0, data):
        seen.append(1)
        check(problem, w0, data)

    monkeypatch.setattr(dpb.FiniteSum, "check", counted)
    key, options = jax.random.key(KEY), {"budget": BUDGET, "callback": callback}
    dpb.fit(PROBLEM, PLANNED, ROWS, W0, key=key, **options)
    assert len(seen) == 1
    dpb.solve(PROBLEM, PLAN.solver, ROWS, W0, key=key)
    assert len(seen) == 2
