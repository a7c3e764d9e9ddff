"""Runs of `fit` in a folder: killed at any time, and the same bits."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.runs import checkpoint
from tests.cases import ROOT, slow

N, STEPS = 70, 6
ROWS = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)
W0 = np.zeros(2, np.float32)  # JAX must not start where the driver forks
BUDGET = dpb.PrivacyBudget(1.0, 1e-3)
SOLVER = dpb.NoisyGD(STEPS, clip_norm=1.0, step_size=0.1)


def distance(w, row):
    return 0.5 * jnp.sum((w - row) ** 2)


def other_distance(w, row):
    return 0.4 * jnp.sum((w - row) ** 2)


PROBLEM = dpb.FiniteSum(distance)


def fitted(folder, *, seed=0, **changes):
    given = {"problem": PROBLEM, "solver": SOLVER, "data": ROWS, "w0": W0} | changes
    key = jax.random.key(seed)
    return dpb.fit(**{"budget": BUDGET} | given, key=key, folder=folder)


class Killed(BaseException):
    """What ends a run between two of its writes."""


def names_in(folder):
    return sorted(file.name for file in folder.iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run, its solution, and that of no folder."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    return folder, fitted(folder, every=2, trajectory=True), fitted(None, every=2)


def test_a_folder_holds_a_solution_and_one_entry_of_spending(finished):
    folder, solution, plain = finished
    np.testing.assert_array_equal(solution.value, plain.value)
    assert names_in(folder) == ["run.json", "solution", "spending.jsonl"]
    log = dpb.search.spent(folder)
    assert log.epsilon == solution.report.epsilon
    (run,) = log.runs
    assert run.finished
    assert run.resumed == 0
    np.testing.assert_array_equal(dpb.load(folder).value, solution.value)


def test_a_finished_folder_reads_no_record_and_spends_nothing(finished):
    folder, solution, _ = finished
    before = len(dpb.spent().runs), (folder / "spending.jsonl").read_bytes()
    found = fitted(folder, seed=1, data=ROWS * np.nan, trajectory=True)
    np.testing.assert_array_equal(found.value, solution.value)
    np.testing.assert_array_equal(found.trajectory, solution.trajectory)
    assert found.report == solution.report
    after = len(dpb.spent().runs), (folder / "spending.jsonl").read_bytes()
    assert after == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": dpb.PrivacyBudget(2.0, 1e-3)}, r"budget\.epsilon was 1.*, is 2"),
        ({"solver": dpb.NoisyGD(STEPS, 1.0, 0.2)}, r"solver\.step_size was 0.1"),
        ({"data": ROWS[1:]}, "sizes was 70, is 69"),
        ({"w0": W0 + 1}, "start was"),
        ({"trajectory": False}, "trajectory was true, is false"),
        *slow(
            ({"problem": dpb.FiniteSum(other_distance)}, "the loss or the solver has"),
        ),
    ],
)
def test_a_folder_of_another_run_says_what_differs(finished, changes, message):
    folder, *_ = finished
    with pytest.raises(ValueError, match=f"{message}.*give a new folder"):
        fitted(folder, **{"trajectory": True} | changes)


def killed_at(folder, writes, monkeypatch):
    """Kill a run at its write of this number."""
    replace, seen = os.replace, []

    def replaced(source, target):
        seen.append(target)
        if len(seen) == writes:
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replaced)
        with pytest.raises(Killed):
            fitted(folder, every=2, trajectory=True)


# Checkpoint, start of spending, checkpoints after steps 2 to 6, facts, end of spending.
@pytest.mark.parametrize("writes", [2, 4, 7, *slow(1, 3, 5, 6)])
@pytest.mark.reuses_keys
def test_a_run_that_ends_between_two_writes_goes_on(
    writes, finished, tmp_path, monkeypatch
):
    _, want, _ = finished
    killed_at(tmp_path / "a", writes, monkeypatch)
    found = fitted(
        tmp_path / "a", every=3, seed=0 if writes < 2 else 1, trajectory=True
    )
    np.testing.assert_array_equal(found.value, want.value)
    np.testing.assert_array_equal(found.trajectory, want.trajectory)
    (run,) = dpb.search.spent(tmp_path / "a").runs
    assert run.finished
    assert names_in(tmp_path / "a") == ["run.json", "solution", "spending.jsonl"]


def test_the_rest_of_a_run_is_refused_on_other_records(tmp_path, monkeypatch):
    killed_at(tmp_path / "a", 4, monkeypatch)
    with pytest.raises(ValueError, match="the records are not those"):
        fitted(tmp_path / "a", data=ROWS + 1, trajectory=True)
    page = b"".join(f.read_bytes() for f in (tmp_path / "a").glob("*.json*"))
    saved = checkpoint.read(tmp_path / "a")
    assert saved.fingerprint["records"].encode() not in page
    (tmp_path / "a" / checkpoint.NAME).unlink()
    with pytest.raises(ValueError, match=r"not empty \(it holds 'spending.jsonl'"):
        fitted(tmp_path / "a", trajectory=True)


def test_the_rest_of_a_run_needs_a_key_of_the_same_generator(tmp_path):
    def kill(run):
        raise Killed

    fit = {"budget": BUDGET, "folder": tmp_path / "a", "every": 2}
    with pytest.raises(Killed):
        dpb.fit(PROBLEM, SOLVER, ROWS, W0, key=jax.random.key(0), callback=kill, **fit)
    other = dpb.root_key("threefry4x32")
    with pytest.raises(ValueError, match=r"began with a key of \w+, this key is of"):
        dpb.fit(PROBLEM, SOLVER, ROWS, W0, key=other, **fit)


def test_a_limit_refuses_a_run_which_leaves_no_trace(tmp_path):
    dpb.search.limit_spending(tmp_path, dpb.PrivacyBudget(0.5, 1e-2))
    with pytest.raises(ValueError, match="refused by the limit"):
        fitted(tmp_path / "a")
    dpb.search.limit_spending(tmp_path, BUDGET)
    fitted(tmp_path / "a")
    with pytest.raises(ValueError, match="refused by the limit"):
        fitted(tmp_path / "b")


def test_the_number_of_records_is_that_of_sizes(tmp_path):
    solver = SOLVER.with_neighbours(dpb.Neighbours.ADD_OR_REMOVE_ONE)
    plan = dpb.calibrate(PROBLEM, solver, BUDGET, sizes=80)
    want = dpb.solve(PROBLEM, plan.solver, ROWS, W0, key=jax.random.key(0))
    found = fitted(tmp_path / "a", solver=solver, sizes=80)
    np.testing.assert_array_equal(found.value, want.value)
    # No fact of the folder tells the number of records.
    np.testing.assert_array_equal(
        fitted(tmp_path / "a", solver=solver, sizes=80, data=ROWS[1:]).value,
        found.value,
    )
    with pytest.raises(ValueError, match=r"fit: the plan is for 80; calibrate with"):
        fitted(None, sizes=80)
    with pytest.raises(TypeError, match="leave people= out"):
        fitted(None, sizes=80, people="disjoint")


# A process that never starts JAX forks runs of `fit`, and kills them.
DRIVER = """
import os, random, signal, sys, time
from tests.runs.test_folder import fitted

folder, kills, longest = sys.argv[1], int(sys.argv[2]), 5.0
random.seed(kills)
while True:
    child = os.fork()
    if child == 0:
        fitted(folder, every=1, callback=lambda run: time.sleep(0.1 * (kills > 0)))
        os._exit(0)
    if kills <= 0:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    time.sleep(random.uniform(0.0, longest))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    kills -= 1
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("kills", [2, 20])
def test_a_run_that_is_killed_at_random_times_ends_in_the_same_bits(kills, tmp_path):
    killed, whole = tmp_path / "a", tmp_path / "b"
    for folder, number in ((killed, kills), (whole, 0)):
        command = [sys.executable, "-c", DRIVER, os.fspath(folder), str(number)]
        subprocess.run(command, check=True, cwd=ROOT, timeout=900)
    np.testing.assert_array_equal(dpb.load(killed).value, dpb.load(whole).value)
    (run,) = dpb.search.spent(killed).runs
    assert run.finished
    # A run goes on in a process of its own, where its program has the same text.
    pages = [(folder / "run.json").read_text() for folder in (killed, whole)]
    assert pages[0] == pages[1]
