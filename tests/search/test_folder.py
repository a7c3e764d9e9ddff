"""Folders of searches: what survives a stop, and what stays secret."""

import json

import jax
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.cli import results
from dpbilevel.privacy.keys import NAMES, derive, follows
from dpbilevel.runs import checkpoint, spending
from tests.attacks.test_secrets import holds, root_key, step_and_below
from tests.search.test_search import (
    BOX,
    EVALUATIONS,
    FINISHED,
    NAME,
    RECORDS,
    Counted,
    black_box,
    same,
    search,
    searched,
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The same with folders, in which the noise depends on the losses too."""

    class Kept(dict):
        def __missing__(self, name):
            folder = tmp_path_factory.mktemp(name)
            self[name] = search(name, trajectory=True, folder=folder)
            return self[name]

    return Kept()


def test_a_program_of_several_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"folder= .* need one process"):
        search(NAME, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "fails_at"),
    [
        pytest.param("random_search", 7, marks=pytest.mark.slow),
        ("repeat_and_select", 5),
        ("noisy_ucb", 0),
    ],
)
def test_a_crash_in_a_step_loses_no_evaluation_and_no_bit(
    name, fails_at, kept, tmp_path
):
    with pytest.raises(RuntimeError, match="the cluster went away"):
        search(name, Counted(fails_at), folder=tmp_path / "run", trajectory=True)
    losses = Counted()
    # The key of the interrupted run is used, not this one.
    result = search(name, losses, 9, folder=tmp_path / "run", trajectory=True)
    assert same(result, kept[name])
    assert len(losses.points) == EVALUATIONS[name] - fails_at
    (run,) = spending.read(tmp_path / "run").runs
    assert (run.resumed, run.finished, run.epsilon) == (1, True, result.report.epsilon)


def test_a_crash_at_the_last_moment_loses_nothing(kept, tmp_path, monkeypatch):
    def refuses(*args):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(spending, "finish", refuses)
        with pytest.raises(OSError, match="disk full"):
            search(folder=tmp_path)
    losses = Counted()
    with pytest.warns(UserWarning, match="holds a finished run"):
        again = search(losses=losses, folder=tmp_path, trajectory=True)
    assert same(again, kept[NAME])
    assert not losses.points
    assert [p.name for p in sorted(tmp_path.iterdir())] == FINISHED


def test_a_finished_folder_answers_without_an_evaluation(kept, tmp_path):
    first, losses = search(folder=tmp_path / "a" / "b"), Counted()
    with pytest.warns(UserWarning, match="holds a finished run, whose result"):
        again = search(
            losses=losses, key=3, folder=str(tmp_path / "a" / "b"), trajectory=True
        )
    assert same(again, kept[NAME])
    assert again.report == first.report
    assert not losses.points
    assert len(spending.read(tmp_path / "a" / "b").runs) == 1
    with pytest.raises(ValueError, match=r"folder of a search; read .*search.json"):
        results.load(tmp_path / "a" / "b")


@jax.jit
def below(key):
    return derive(key, *NAMES)


def test_secrets_are_the_owners_alone_and_gone_at_the_end(tmp_path):
    seen, found = [], []

    def losses(point):
        files = [p for p in tmp_path.iterdir() if "SECRET" in p.name]
        modes = {p.stat().st_mode & 0o777 for p in files}
        content = (tmp_path / checkpoint.NAME).read_bytes()
        seen.append((len(files), modes, content))
        found.append(np.sum((point - RECORDS) ** 2, axis=1))
        return found[-1]

    searched(problem=black_box(losses), key=root_key(), folder=tmp_path)
    used, key = [], root_key()
    for row in found:
        before, told = key, row[None].tobytes()
        following, words = step_and_below(before)  # the step's words, and below them
        tell = jax.random.wrap_key_data(words[1 + NAMES.index("tell")])
        bound = follows(tell, told)
        keys = [before, following, bound]
        more = [*map(jax.random.key_data, keys), *jax.random.key_data(below(bound))]
        used.append([*map(np.asarray, more), *np.asarray(words)])
        key = follows(following, told)
    for done, (_, _, content) in enumerate(seen):
        earlier = [words for step in used[:done] for words in step]
        assert not (earlier and holds(content, *earlier))
        assert holds(content, used[done][0])  # the control
    assert {number for number, *_ in seen} == {1}  # what a step read is forgotten
    assert all(modes == {0o600} for _, modes, _ in seen)
    assert b"losses of single records" in seen[0][2].splitlines()[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == FINISHED
    text = (tmp_path / "search.json").read_text() + str(spending.read(tmp_path))
    assert not [v for row in found for v in row if repr(float(v))[:10] in text]
    assert not holds(text.encode(), *(w for step in used for w in step))


def test_evaluations_of_a_step_in_progress_are_the_owners_alone(tmp_path):
    with pytest.raises(RuntimeError):
        search("random_search", Counted(3), folder=tmp_path)
    kept = sorted(tmp_path.glob("evaluation-*"))
    assert [p.name for p in kept] == [f"evaluation-0-{j}.SECRET" for j in range(3)]
    assert {p.stat().st_mode & 0o777 for p in kept} == {0o600}
    kept[1].write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"is damaged. Delete it"):
        search("random_search", folder=tmp_path)
    kept[1].unlink()
    losses = Counted()
    search("random_search", losses, folder=tmp_path)
    assert len(losses.points) == 10


def test_a_black_box_that_changes_its_point_spoils_nothing_that_is_kept(tmp_path):
    losses = Counted(3)

    def changing(point):
        found = losses(point.copy())
        point[:] = 7.0
        return found

    with pytest.raises(RuntimeError):
        search("random_search", changing, folder=tmp_path)
    losses.fails_at = None
    search("random_search", changing, folder=tmp_path)
    assert len(losses.points) == 12


def test_losses_kept_at_another_point_are_not_used(tmp_path):
    with pytest.raises(RuntimeError):
        search("random_search", Counted(1), folder=tmp_path)
    file = tmp_path / "evaluation-0-0.SECRET"
    with file.open("wb") as out:
        np.savez(out, point=np.zeros(2), losses=np.zeros(30))
    with pytest.raises(ValueError, match="holds losses at another point"):
        search("random_search", folder=tmp_path)


@pytest.mark.parametrize("fails_at", [1, None])
def test_another_run_is_not_mixed_into_a_folder(tmp_path, fails_at):
    try:
        search(losses=Counted(fails_at), folder=tmp_path)
    except RuntimeError:
        pass
    other = dpb.PrivacyBudget(1.0, 1e-3)
    with pytest.raises(ValueError, match=r"resume .*budget.epsilon was 2.0, is 1"):
        search(folder=tmp_path, budget=other)
    with pytest.raises(ValueError, match=r"solver.class was \"NoisyUCB\", is"):
        search("random_search", folder=tmp_path)


def test_a_folder_of_something_else_or_without_its_checkpoint_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty \(it holds 'notes.txt'\)"):
        search(folder=tmp_path)
    with pytest.raises(RuntimeError):
        search(losses=Counted(1), folder=tmp_path / "run")
    file = tmp_path / "run" / checkpoint.NAME
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged or not a checkpoint"):
        search(folder=tmp_path / "run")
    file.unlink()
    with pytest.raises(ValueError, match=r"is not empty .*; give a new folder"):
        search(folder=tmp_path / "run")


def test_two_searches_at_once_in_a_folder_are_refused(tmp_path):
    def losses(point):
        with pytest.raises(ValueError, match="in use by another run"):
            search(folder=tmp_path)
        return np.ones(30)

    search("random_search", losses, folder=tmp_path)


def test_a_folder_needs_a_budget(tmp_path):
    with pytest.raises(ValueError, match="folder= records the report"):
        search(folder=tmp_path, budget=None)
    with pytest.raises(ValueError, match=r"calibrate\(problem, solver, budget"):
        search(budget=None)


def test_a_folder_needs_what_tells_the_records(tmp_path):
    unknown = dpb.search.BlackBox(Counted(), 30, BOX)
    with pytest.raises(ValueError, match=r"would be a second release.*records="):
        searched(problem=unknown, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_result_file_holds_released_and_public_values(kept, tmp_path):
    result = search(folder=tmp_path)
    page = json.loads((tmp_path / "search.json").read_text())
    names = {"format", "value", "trajectory", "rejected_updates", "noisy_losses"}
    assert set(page) == names | {"run"}
    assert page["value"] == result.value.tolist()
    assert page["run"]["report"]["epsilon"] == result.report.epsilon
    assert page["trajectory"] == kept[NAME].trajectory.tolist()


def test_other_records_are_refused_and_their_hash_stays_in_the_checkpoint(tmp_path):
    def run(records, losses=None):
        problem = dpb.search.BlackBox(losses or Counted(), 30, BOX, records)
        return searched(problem=problem, folder=tmp_path)

    with pytest.raises(RuntimeError):
        run("a1b2c3", Counted(2))
    with pytest.raises(ValueError, match="are not those the run began with") as caught:
        run("d4e5f6")
    assert not [h for h in ("a1b2c3", "d4e5f6") if h in str(caught.value)]
    assert b"a1b2c3" in (tmp_path / checkpoint.NAME).read_bytes()
    run("a1b2c3")
    kept = [p for p in tmp_path.iterdir() if b"a1b2c3" in p.read_bytes()]
    assert not kept
    assert "a1b2c3" not in repr(dpb.search.BlackBox(Counted(), 30, BOX, "a1b2c3"))
