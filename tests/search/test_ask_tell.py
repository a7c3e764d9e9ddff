"""Ask and tell: what `minimize` does, with losses that are evaluated elsewhere."""

import copy
import gc
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.runs import checkpoint, guards, spending
from dpbilevel.search import ask_tell, run
from tests.cases import fast_first, slow
from tests.search import test_search as looped
from tests.search.test_search import BUDGET, FINISHED, NAME, RECORDS, SOLVERS, START

BOX = dpb.sets.Box(-1.0, 1.0)
ROOT = Path(__file__).parents[2]
SECRET = 0.123456789


def losses_at(points):
    return np.stack([np.sum((point - RECORDS) ** 2, axis=1) for point in points])


def made(name=NAME, key=0, **options):
    problem = dpb.search.BlackBox(None, 30, BOX, options.pop("records", "r"))
    options = {"budget": BUDGET} | options
    return dpb.search.AskTell(
        problem, SOLVERS[name], START, key=jax.random.key(key), **options
    )


def finished(search, most=10**6):
    """Told at most so many points, one by one; the number of points told."""
    told = 0
    while told < most and len(points := search.ask()):
        search.tell(losses_at(points[:1]))
        told += 1
    return told


@pytest.mark.parametrize("name", fast_first(SOLVERS))
def test_it_releases_what_minimize_does(name):
    whole = looped.search(name, trajectory=True)
    search = made(name)
    while len(points := search.ask()):
        assert search.result is None
        np.testing.assert_array_equal(points, search.ask())
        search.tell(losses_at(points))
    assert looped.same(search.result, whole)
    assert search.result.report == whole.report
    assert search.ask().shape == (0, 2)


@pytest.mark.parametrize("stop", [0, *slow(1, 3, 5)])
@pytest.mark.parametrize("name", [looped.NAME, *slow("gradient_informative")])
def test_another_object_goes_on_bit_for_bit(name, stop, tmp_path):
    run, whole_run = tmp_path / "run", tmp_path / "whole"
    whole = looped.search(name, trajectory=True, folder=whole_run)
    told = 0
    while True:
        # The key of the first object is used, not this one.
        with made(name, key=told, folder=run) as search:
            told += finished(search, stop + 1)
            if search.result is not None:
                break
    assert told == looped.EVALUATIONS[name]
    assert looped.same(search.result, whole)
    assert sorted(p.name for p in run.iterdir()) == FINISHED
    (spent,) = spending.read(run).runs
    assert spent.finished
    with pytest.warns(UserWarning, match="AskTell: .* holds a finished run"):
        again = made(name, folder=run)
    assert looped.same(again.result, whole)
    assert len(again.ask()) == 0


PROCESS = """
import sys
from tests.search.test_ask_tell import finished, made
search = made("gradient_informative", key=int(sys.argv[2]), folder=sys.argv[1])
print(finished(search, 4))
"""


@pytest.mark.slow
def test_processes_that_end_in_the_middle_of_a_step_lose_nothing(tmp_path):
    told, run = [], tmp_path / "run"
    for number in range(3):
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, str(run), str(number)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        told.append(int(done.stdout))
    assert told == [4, 4, 3]
    page = json.loads((run / "search.json").read_text())
    whole = looped.search(
        "gradient_informative", trajectory=True, folder=tmp_path / "whole"
    )
    # One pass over the cores of this process rounds as one of another does.
    np.testing.assert_allclose(page["trajectory"], whole.trajectory, rtol=1e-12)


def test_minimize_goes_on_where_it_stopped_and_the_other_way_around(tmp_path):
    whole = looped.search(trajectory=True, folder=tmp_path / "whole")
    with made(folder=tmp_path / "a") as search:
        finished(search, 2)
    result = looped.search(folder=tmp_path / "a", trajectory=True)
    assert looped.same(result, whole)
    with pytest.raises(RuntimeError):
        looped.search(losses=looped.Counted(1), folder=tmp_path / "b")
    search = made(folder=tmp_path / "b")
    assert finished(search) == looped.EVALUATIONS[NAME] - 1
    assert looped.same(search.result, whole)


def test_a_run_counts_before_its_first_point_is_asked_for(tmp_path):
    with made(folder=tmp_path):
        (run,) = spending.read(tmp_path).runs
        assert not run.finished
    assert spending.read(tmp_path).runs == (run,)


def test_the_folder_is_locked_until_the_search_is_closed_or_forgotten(tmp_path):
    first = made(folder=tmp_path)
    with pytest.raises(ValueError, match="in use by another run"):
        made(folder=tmp_path)
    first.close()
    second = made(folder=tmp_path)
    with pytest.raises(ValueError, match="in use by another run"):
        made(folder=tmp_path)
    del second
    gc.collect()
    third = made(folder=tmp_path)
    finished(third)
    with pytest.warns(UserWarning, match="finished run"):
        made(folder=tmp_path)  # it was let go at the end


def test_what_is_closed_does_not_go_on_beside_another(tmp_path):
    first = made("noisy_ucb", folder=tmp_path)
    first.ask()
    first.close()
    second = made("noisy_ucb", folder=tmp_path)
    points = second.ask()
    for call in (first.ask, lambda: first.tell(losses_at(points))):
        with pytest.raises(ValueError, match="the search was closed"):
            call()
    finished(second)
    assert first.result is None
    second.close()
    assert len(second.ask()) == 0


def noise_of(search, *told):
    """The noise of the releases of `NoisyUCB` on rows of losses."""
    for row in told:
        search.ask()
        search.tell([row])
    finished(search)
    means = [np.clip(row, 0, 2).mean() for row in told]
    return search.noisy_losses[1][: len(told)] - means


def test_a_copy_of_the_folder_has_the_same_noise_on_the_same_losses_alone(tmp_path):
    with made(folder=tmp_path / "run"):
        pass
    found = []
    for name, rows in {
        "a": (0.5, 1),
        "b": (0.5, 1),
        "c": (1.5, 1),
        "d": (1, 1),
    }.items():
        shutil.copytree(tmp_path / "run", tmp_path / name)
        told = [np.full(30, value) for value in rows]
        found.append(noise_of(made(folder=tmp_path / name), *told))
    np.testing.assert_array_equal(found[0], found[1])
    for i, j in ((0, 2), (0, 3), (2, 3)):  # in the first step, and in all after it
        assert (np.abs(found[i] - found[j]) > 1e-6).all()


def test_the_report_of_a_folder_says_what_a_copy_of_it_costs(tmp_path):
    with made(folder=tmp_path) as search:
        finished(search)
    (said,) = [v for v in search.result.report.assumptions if "copy of the folder" in v]
    assert "the budgets add" in said
    assert said not in looped.search().report.assumptions


@pytest.mark.parametrize("lost", ["deleted", "replaced", "folder"])
def test_a_search_whose_lock_file_is_lost_releases_nothing_more(lost, tmp_path):
    search = made(folder=tmp_path / "run")
    finished(search, 1)
    points, file = search.ask(), tmp_path / "run" / guards.LOCK
    second = None
    if lost == "folder":
        (tmp_path / "run").rename(tmp_path / "elsewhere")
    else:
        file.unlink()
    if lost == "replaced":
        second = made(folder=tmp_path / "run")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    for _ in range(2):
        with pytest.raises(ValueError, match="was deleted or replaced while"):
            search.tell(losses_at(points))
    assert sorted(p.name for p in tmp_path.rglob("*")) == before
    search.close()
    if second is not None:  # whose lock was left alone
        assert finished(second) == looped.EVALUATIONS[NAME] - 1


@pytest.mark.parametrize("moment", ["release", "result"])
def test_the_last_moment_needs_the_lock_too(moment, tmp_path, monkeypatch):
    """It is lost while the last release or the result is computed."""
    search = made(folder=tmp_path)
    finished(search, looped.EVALUATIONS[NAME] - 1)
    on, name = {
        "release": (search, "_after"),
        "result": (ask_tell, "solution_of"),
    }[moment]
    computed, file = getattr(on, name), tmp_path / checkpoint.NAME
    kept = []

    def late(*arguments):
        (tmp_path / guards.LOCK).unlink()
        kept.append(file.read_bytes())
        return computed(*arguments)

    points = search.ask()
    with monkeypatch.context() as patch:
        patch.setattr(on, name, late)
        with pytest.raises(ValueError, match="was deleted or replaced while this run"):
            search.tell(losses_at(points))
    assert [file.read_bytes()] == kept
    assert search.result is None
    released = looped.EVALUATIONS[NAME] - (moment == "release")
    assert len(search.noisy_losses[1]) == released
    search.close()
    assert finished(made(folder=tmp_path)) == 0  # its losses were kept


@pytest.mark.parametrize("folder", [True, False])
def test_copies_are_refused(folder, tmp_path):
    search = made("noisy_ucb", folder=tmp_path if folder else None)
    search.ask()
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(search)
    assert finished(search) == looped.EVALUATIONS["noisy_ucb"]


def test_a_forked_process_neither_goes_on_nor_unlocks_the_folder(tmp_path):
    search = made("noisy_ucb", folder=tmp_path)
    points = search.ask()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX; the child computes nothing
        process = os.fork()
    if process == 0:
        signal.alarm(20)  # what would compute here may hang
        refused = 0
        for call in (search.ask, lambda: search.tell(losses_at(points))):
            try:
                call()
            except ValueError:
                refused += 1
        search.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 2
    with pytest.raises(ValueError, match="in use by another run"):
        made("noisy_ucb", folder=tmp_path)
    assert finished(search) == looped.EVALUATIONS["noisy_ucb"]


def test_threads_take_turns(monkeypatch):
    """Two that ask at once would each begin the step."""
    whole = looped.search("noisy_ucb", trajectory=True)
    search, begun = made("noisy_ucb"), []
    begin, both = search._begin, threading.Barrier(2)

    def slowly():
        begun.append(1)
        try:
            both.wait(0.5)  # for another thread in here
        except threading.BrokenBarrierError:
            pass
        return begin()

    monkeypatch.setattr(search, "_begin", slowly)
    threads = [threading.Thread(target=search.ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(begun) == 1
    finished(search)
    assert looped.same(search.result, whole)


def test_losses_in_the_folder_are_the_owners_alone(tmp_path):
    with made("random_search", folder=tmp_path) as search:
        finished(search, 3)
    kept = sorted(tmp_path.glob("evaluation-*"))
    assert [p.name for p in kept] == [f"evaluation-0-{j}.SECRET" for j in range(3)]
    kept.append(tmp_path / checkpoint.NAME)
    assert {p.stat().st_mode & 0o777 for p in kept} == {0o600}


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        (np.full((1, 29), SECRET), ValueError, r"shape \(30,\), got shape \(29,\)"),
        (np.full(30, SECRET), ValueError, r"got shape \(\)"),
        (np.full((13, 30), SECRET), ValueError, r"at 13 points, but ask\(\) .* 12\."),
        (np.zeros((0, 30)), ValueError, "at 0 points"),
        (np.full((1, 30), SECRET, complex), TypeError, "complex128"),
        (np.full((1, 30), SECRET).astype(str), TypeError, "real numbers"),
        ([[[SECRET], [SECRET, 2.0]]], ValueError, r"got shape \(2,\)"),
        ([{"loss": SECRET}], TypeError, "got dict of objects"),
        ([np.full(30, SECRET), np.full(29, SECRET)], ValueError, r"shape \(29,\)"),
        (SECRET, TypeError, "each point, got float"),
        (None, TypeError, "each point, got NoneType"),
    ],
)
def test_what_does_not_fit_is_refused_without_a_loss_and_nothing_is_taken(
    told, error, words
):
    search = made("random_search")
    points = search.ask()
    with pytest.raises(error, match=words) as caught:
        search.tell(told)
    assert str(SECRET)[2:6] not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    np.testing.assert_array_equal(search.ask(), points)


@pytest.mark.parametrize("odd", [None, "text", [1.0, 2.0]])
def test_a_loss_that_is_no_number_is_the_worst_and_leaves_the_others(odd):
    def loss_of(first):
        return run.check_losses("owner", [first, 0.25, 2**60 + 1], 3)

    np.testing.assert_array_equal(loss_of(odd), [np.inf, 0.25, 2.0**60])
    np.testing.assert_array_equal(loss_of(0.5), [0.5, 0.25, 2.0**60])


def test_losses_that_nothing_asked_for_are_refused():
    search = made("random_search")
    with pytest.raises(ValueError, match=r"AskTell: no points .* call ask\(\)"):
        search.tell(np.ones((1, 30)))
    finished(search)
    with pytest.raises(ValueError, match="no points to evaluate"):
        search.tell(np.ones((1, 30)))


def test_a_disk_that_refuses_a_checkpoint_leaves_the_release_to_be_made_again(
    tmp_path, monkeypatch
):
    run, whole_run = tmp_path / "run", tmp_path / "whole"

    def refuses(*arguments, **options):
        raise OSError("disk full")

    whole = looped.search(trajectory=True, folder=whole_run)
    search = made(folder=run)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", refuses)
        with pytest.raises(OSError, match="disk full"):
            search.tell(losses_at(search.ask()))
    finished(search)
    assert looped.same(search.result, whole)


def test_other_records_are_refused(tmp_path):
    with made(folder=tmp_path) as search:
        finished(search, 1)
    with pytest.raises(ValueError, match="are not those the run began with"):
        made(folder=tmp_path, records="s")


def test_points_that_are_changed_outside_change_nothing():
    search = made("random_search")
    points = search.ask()
    points[:] = 7.0
    assert np.abs(search.ask()).max() <= 1
    search.tell(losses_at(search.ask()))
    assert looped.same(search.result, looped.search("random_search", trajectory=True))


@pytest.mark.parametrize(
    "name", [looped.NAME, *slow("gradient_informative", "repeat_and_select")]
)
def test_noisy_losses_are_those_that_the_solver_releases_and_are_kept(name, tmp_path):
    count = {"noisy_ucb": 4, "repeat_and_select": 1}.get(name, 0)
    search = made(name, folder=tmp_path)
    for told in range(4):
        so_far = search.noisy_losses[1]
        assert len(so_far) == (told if name == "noisy_ucb" else 0)
        search.tell(losses_at(search.ask()[:1]))
    finished(search)
    points, values = search.noisy_losses
    np.testing.assert_array_equal(so_far, values[: len(so_far)])
    assert points.shape == (count, 2)
    assert values.shape == (count,)
    scale = search.result.report.epsilon
    for point, value in zip(points, values, strict=True):
        exact = np.clip(losses_at(point[None]), 0, 2).mean()
        assert 0 < abs(value - exact) < 10 * 2 / 30 / scale  # noise of some B / n
    with pytest.warns(UserWarning, match="finished run"):
        again = made(name, folder=tmp_path)
    np.testing.assert_array_equal(again.noisy_losses[0], points)
    np.testing.assert_array_equal(again.noisy_losses[1], values)


def test_nothing_of_the_losses_is_shown():
    search = made("random_search")
    search.ask()
    search.tell(np.full((3, 30), SECRET))
    assert "0.12" not in repr(search) + str(vars(search))


def test_a_search_without_a_guarantee_is_refused():
    with pytest.raises(ValueError, match="AskTell: not calibrated"):
        made(budget=None)


def test_minimize_refuses_a_black_box_without_losses():
    problem = dpb.search.BlackBox(None, 30, BOX)
    with pytest.raises(TypeError, match="Use AskTell"):
        looped.searched(problem=problem)
